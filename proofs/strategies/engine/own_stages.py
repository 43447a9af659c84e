"""Functions of one's own in a decoder's stages, random ones, with their extras and what they capture."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

from weft.stages.decoder import attention, feed_forward
from weft.stages.functions import sow
from weft.stages.model import Model

Extras = Mapping[str, Tensor]
_LAYERS = ("vector", "strength")
_PARTS = ("feed_forward", "attention", "logits")


@attrs.frozen
class OwnStages:
    """Changes of a model, each by extras of the request.

    Args:
        layers: for the indices of some layers, what is changed in their result: `vector` is added, or it is multiplied
            by 1 + `strength`.
        parts: the functions that are replaced: `feed_forward` and `attention` are multiplied by 1 + `strength`, and
            `bias` is added to the `logits`.
        captured: the indices of the layers whose result is captured.
    """

    layers: tuple[tuple[int, str], ...]
    parts: tuple[str, ...]
    captured: tuple[int, ...]

    def apply(self, model: Model, given: Extras | None = None) -> Model:
        """The changed model.

        Args:
            given: the values of the extras, as constants of the functions; None: those of each request.
        """
        hidden, vocab = model.config.hidden_size, model.config.vocab_size
        defaults = {"vector": torch.zeros(hidden), "strength": torch.zeros(()), "bias": torch.zeros(vocab)}
        values = {} if given is None else {name: given.get(name, x).to(model.device) for name, x in defaults.items()}

        def read(name: str, batch: Any) -> Tensor:
            own = batch.per_token(batch.extras[name]) if given is None else values[name]
            return own[..., None] if name == "strength" else own

        def biased(logits: Tensor, rows: Tensor, extras: dict[str, Tensor]) -> Tensor:
            return logits + (extras["bias"] if given is None else values["bias"])

        def stronger(config: Any, layer: Any, batch: Any, x: Any) -> Tensor:
            return _times(feed_forward(config, layer, batch, x), read("strength", batch))

        def attentive(config: Any, layer: Any, kv_pages: Tensor, batch: Any, *rest: Any) -> tuple[Tensor, Tensor]:
            added, pages = attention(config, layer, kv_pages, batch, *rest)
            return _times(added, read("strength", batch)), pages

        own: dict[str, Any] = {"feed_forward": stronger, "attention": attentive, "logits": biased}
        changes = dict(self.layers)
        layers = {index: _change(changes.get(index), index in self.captured, index, read) for index in self._indices}
        return model.with_stages(
            **{name: own[name] for name in self.parts},
            layers=layers,
            extras=defaults if given is None else {},
            captures={f"layer {index}": defaults["vector"] for index in self.captured},
        )

    @property
    def _indices(self) -> list[int]:
        return sorted({index for index, _ in self.layers} | {*self.captured})


def _times(added: Tensor, strength: Tensor) -> Tensor:
    """A block's result times 1 + strength; it may be parts of a sum, [parts, num_tokens, hidden_size]."""
    return added * (1 + strength)


def _change(kind: str | None, captured: bool, index: int, read: Callable[[str, Any], Tensor]) -> Any:
    def change(layer: Any) -> Any:
        def run(params: Any, kv_pages: Tensor, batch: Any, tables: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
            hidden, kv_pages = layer(params, kv_pages, batch, tables, hidden)
            if kind == "vector":
                hidden = hidden + read("vector", batch)
            elif kind == "strength":
                hidden = _times(hidden, read("strength", batch))
            if captured:
                sow(f"layer {index}", hidden)
            return hidden, kv_pages

        return run

    return change


def own_stages(num_layers: int) -> st.SearchStrategy[OwnStages]:
    """Changes of a model with so many layers: of some layers, and of some of a stage's functions."""
    index = st.integers(0, num_layers - 1)
    return st.builds(
        OwnStages,
        st.dictionaries(index, st.sampled_from(_LAYERS), min_size=1).map(lambda own: tuple(sorted(own.items()))),
        st.lists(st.sampled_from(_PARTS), unique=True).map(tuple),
        st.lists(index, unique=True).map(tuple),
    )


@st.composite
def request_extras(draw: st.DrawFn, model: Model) -> Extras | None:
    """The extras that one request gives for the changes of `OwnStages`: some of them, or none."""
    sizes = {"vector": (model.config.hidden_size,), "strength": (), "bias": (model.config.vocab_size,)}
    names, seed = draw(st.lists(st.sampled_from([*sizes]), unique=True)), draw(st.integers(0, 2))
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(sizes[name], generator=generator) for name in sorted(names)} or None
