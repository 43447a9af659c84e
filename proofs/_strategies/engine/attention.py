"""Custom attention: back ends of every capability, windows in some layers, and dense attention as
the reference."""

from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

from weft.ops.attention.backends import BACKENDS, AttentionBackend
from weft.ops.attention.capabilities import CAPABILITIES
from weft.proofs._strategies.engine.own_stages import Extras
from weft.stages.attention.context import attention_scores, weighted_values
from weft.stages.model import Model


@attrs.frozen
class OtherAttention:
    """An attention back end for a model with windows.

    Args:
        windows: the window of each layer; 0 means none.
        capability: the back end's capability. Where it cannot run in a graph, it reads the lengths
            on the host.
    """

    windows: tuple[int, ...]
    capability: str

    def apply(self, model: Model, constants: Extras | None = None) -> Model:
        """The model with this back end, or with dense attention if `constants` is not None."""
        model = attrs.evolve(model, config=attrs.evolve(model.config, windows=self.windows))
        if constants is not None:
            return model.with_stages(attend=dense)
        backend = AttentionBackend("of a law", self._attend, self._plan, capability=self.capability)
        return model.with_stages(attend=backend)

    def _plan(self, q: Tensor, _: Tensor, *where: Any) -> tuple[Any, Any]:
        """The starts and lengths of the requests: tensors where a graph may be captured, else lists
        on the host."""
        longest = where[4]
        lengths = where[3]
        is_uniform = len(lengths) * longest == len(q)
        single = is_uniform and longest == 1
        inside = {"full": True, "uniform": is_uniform, "uniform_single_token": single}.get(
            self.capability, False
        )
        if inside:
            # Computed, and not passed on, so that a graph with the plan of another step gives other
            # results.
            return (where[2] + 0, lengths + 0)
        return (where[2].tolist(), lengths.tolist())

    def _attend(self, q: Tensor, kv_pages: Tensor, *where: Any) -> Tensor:
        slots, table, starts, lengths, *rest, plan = where
        if isinstance(plan[0], list):
            return planned(q, kv_pages, plan, slots, table, starts, lengths, *rest)
        return BACKENDS["torch"].attend(q, kv_pages, slots, table, *plan, *rest)


def planned(
    q: Tensor,
    kv_pages: Tensor,
    plan: tuple[list[int], list[int]],
    slots: Tensor,
    table: Tensor,
    *rest: Any,
) -> Tensor:
    """Attention computed request by request, by a plan made on the host."""
    starts, lengths, longest, scale, window = rest
    spans = plan[0]
    out = torch.zeros_like(q)
    for r, length in enumerate(plan[1]):
        part = slice(spans[r], spans[r + 1])
        if length and part.start < part.stop:
            query_starts = starts.new_tensor([0, part.stop - part.start])
            where = slots[part], table[r : r + 1], query_starts, lengths[r : r + 1]
            out[part] = BACKENDS["torch"].attend(q[part], kv_pages, *where, longest, scale, window)
    return out


def dense(config: Any, layer: Any, q: Tensor, kv_pages: Tensor, batch: Any) -> Tensor:
    """Attention from the scores of whole contexts, masked by the layer's window."""
    scores = attention_scores(q, kv_pages, batch)
    window = config.windows[layer.index]
    if window:
        ages = batch.positions[:, None] - torch.arange(scores.shape[2], device=q.device)
        scores = scores.masked_fill((ages >= window)[:, None], -torch.inf)
    return weighted_values(scores.softmax(-1), kv_pages, batch)


def other_attentions(num_layers: int) -> st.SearchStrategy[OtherAttention]:
    """Attention back ends of any capability, with windows in some layers."""
    # One for each layer: a planted bug gives all layers the first one's window.
    windows = st.tuples(*[st.sampled_from((0, 3, 2, 1, 7))] * num_layers).filter(any)
    return st.builds(OtherAttention, windows, st.sampled_from(CAPABILITIES[::-1]))
