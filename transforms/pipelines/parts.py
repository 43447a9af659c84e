"""What each stage gets of a pipeline's batches, and what all ranks must agree on of them."""

from typing import Any

from weft.batch import Batch
from weft.effects import Schema
from weft.trees import find_descriptors, tree_map


def after_first(tree: Any) -> Any:
    """What stages behind the first one get of a batch, or of what holds one: not what only the first takes."""
    return tree_map(
        lambda x: x.after_first() if isinstance(x, Batch) else x, tree, is_leaf=lambda x: isinstance(x, Batch)
    )


def class_of(batch: Any) -> Any:
    """What all ranks must agree on of a batch: its descriptor, or of plain tensors the schema."""
    found = find_descriptors(batch)
    return found[0] if found else Schema.of(batch)


def class_text(batch: Any) -> str:
    """What all ranks must agree on of a batch (or of work that holds one as `batch`), and what the layout of its
    messages follows from: its class, and whether it has targets, whose logprobs come back."""
    targets = getattr(getattr(batch, "batch", batch), "targets", None)
    return f"{class_of(batch)}{'' if targets is None else ', with targets'}"
