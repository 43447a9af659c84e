"""Random custom functions in a decoder's stages, with their extras and what they capture and
carry."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

from weft.stages.custom.sown import carry, sow
from weft.stages.decoder import attention, feed_forward
from weft.stages.model import Model

Extras = Mapping[str, Tensor]
_LAYERS = ("vector", "strength")
_PARTS = ("feed_forward", "attention", "logits")


@attrs.frozen
class OwnStages:
    """Changes to a model, each controlled by extras of the request.

    Args:
        layers: (index of a layer, change of its result): `vector` is added to it, or it is
            multiplied by 1 + `strength`.
        parts: the functions that are replaced. The results of `feed_forward` and `attention` are
            multiplied by 1 + `strength`, and `bias` is added to the `logits`.
        captured: the indices of the layers whose results are captured.
        carried: the indices of the layers that carry a sum over the request's tokens. A bounded
            function of the sum is added to the layer's result.
        prefix_caching: the argument of `model.with_stages`.
        patched: the indices of the layers to whose input each token's `patch` is added.
    """

    layers: tuple[tuple[int, str], ...]
    parts: tuple[str, ...]
    captured: tuple[int, ...]
    carried: tuple[int, ...] = ()
    prefix_caching: str | None = None
    patched: tuple[int, ...] = ()

    def apply(self, model: Model, constants: Extras | None = None) -> Model:
        """The changed model.

        Args:
            constants: the extras' values as constants of the functions. The functions then serve
                one request alone, and recompute what it carries from all of its tokens at each
                step. None: the functions read each request's extras.
        """
        hidden = model.config.hidden_size
        vocab = model.config.vocab_size
        defaults = {
            "vector": torch.zeros(hidden),
            "strength": torch.zeros(()),
            "bias": torch.zeros(vocab),
        }
        if constants is None:
            values = {}
        else:
            values = {name: constants.get(name, x).to(model.device) for name, x in defaults.items()}
        # Not 0, so that a default that is not applied shows.
        unpatched = torch.full((hidden,), 0.25)
        table = torch.cat(((constants or {}).get("patch", unpatched[None]), unpatched[None])).to(
            model.device
        )

        def patch(batch: Any) -> Tensor:
            if constants is None:
                rows: Tensor = batch.token_extras["patch"]
                return rows
            # The last row has the default, for all tokens after the prompt.
            return table[batch.positions.clamp(max=len(table) - 1)]

        def read(name: str, batch: Any) -> Tensor:
            value = batch.per_token(batch.extras[name]) if constants is None else values[name]
            return value[..., None] if name == "strength" else value

        def biased(logits: Tensor, rows: Tensor, extras: Extras) -> Tensor:
            return logits + (extras["bias"] if constants is None else values["bias"])

        def stronger(config: Any, layer: Any, batch: Any, x: Any) -> Tensor:
            return _times(feed_forward(config, layer, batch, x), read("strength", batch))

        def attentive(
            config: Any, layer: Any, kv_pages: Tensor, batch: Any, *rest: Any
        ) -> tuple[Tensor, Tensor]:
            added, pages = attention(config, layer, kv_pages, batch, *rest)
            return _times(added, read("strength", batch)), pages

        functions: dict[str, Any] = {
            "feed_forward": stronger,
            "attention": attentive,
            "logits": biased,
        }
        changes = dict(self.layers)
        start = torch.linspace(-1, 1, hidden)
        layers: dict[int, Any] = {}
        for index in self._indices:
            add = None
            if index in self.carried:
                if constants is None:
                    add = _adding(index)
                else:
                    add = _adding_anew(start.to(model.device))
            layers[index] = _change(changes.get(index), index in self.captured, index, read, add)
            if index in self.patched:
                layers[index] = _patched(layers[index], patch)
        carries = {f"sum {index}": start for index in self.carried}
        return model.with_stages(
            **{name: functions[name] for name in self.parts},
            layers=layers,
            extras=defaults if constants is None else {},
            token_extras={"patch": unpatched} if constants is None and self.patched else {},
            captures={f"layer {index}": defaults["vector"] for index in self.captured},
            carries=carries if constants is None else {},
            prefix_caching=self.prefix_caching if constants is None else None,
        )

    @property
    def _indices(self) -> list[int]:
        return sorted(
            {index for index, _ in self.layers} | {*self.captured, *self.carried, *self.patched}
        )


def _times(added: Tensor, strength: Tensor) -> Tensor:
    """A block's result times 1 + strength. It may be the parts of a sum, [parts, num_tokens,
    hidden_size]."""
    return added * (1 + strength)


def _next(value: Tensor, hidden: Tensor) -> Tensor:
    """The sum after one more token. It depends on the order and the number of the tokens."""
    return 0.9 * value.roll(1, -1) + hidden


# `(batch, hidden) -> hidden`: add a bounded function of the sum over a request's tokens so far.
Add = Callable[[Any, Tensor], Tensor]


def _adding(index: int) -> Add:
    def add(batch: Any, hidden: Tensor) -> Tensor:
        sums = batch.scan_tokens(_next, batch.carried[f"sum {index}"], hidden)
        carry(f"sum {index}", sums)
        added: Tensor = hidden + sums.tanh()
        return added

    return add


def _adding_anew(start: Tensor) -> Add:
    """`_adding` for one request alone, whose tokens are kept here.

    The batch may end with padding at position 0, so the last token is the one with the greatest
    position."""
    hidden_at: dict[int, Tensor] = {}

    def add(batch: Any, hidden: Tensor) -> Tensor:
        first = int(batch.positions[0])
        last = int(batch.positions.max())
        hidden_at.update(zip(range(first, last + 1), hidden.clone(), strict=False))
        sums = list[Tensor]()
        value = start
        for place in range(last + 1):
            value = _next(value, hidden_at[place])
            sums.append(value)
        return hidden + torch.stack(sums)[batch.positions].tanh()

    return add


def _change(
    kind: str | None,
    captured: bool,
    index: int,
    read: Callable[[str, Any], Tensor],
    add: Add | None = None,
) -> Any:
    def change(layer: Any) -> Any:
        def run(
            params: Any, kv_pages: Tensor, batch: Any, tables: Any, hidden: Tensor
        ) -> tuple[Tensor, Tensor]:
            hidden, kv_pages = layer(params, kv_pages, batch, tables, hidden)
            if kind == "vector":
                hidden = hidden + read("vector", batch)
            elif kind == "strength":
                hidden = _times(hidden, read("strength", batch))
            if add is not None:
                hidden = add(batch, hidden)
            if captured:
                sow(f"layer {index}", hidden)
            return hidden, kv_pages

        return run

    return change


def _patched(change: Any, patch: Callable[[Any], Tensor]) -> Any:
    """The change of a layer, with each token's patch added to the layer's input first."""

    def patched(layer: Any) -> Any:
        changed_layer = change(layer)
        return lambda params, kv_pages, batch, tables, hidden: changed_layer(
            params, kv_pages, batch, tables, hidden + patch(batch)
        )

    return patched


def patched_stages(num_layers: int) -> st.SearchStrategy[OwnStages]:
    """Changes that add each token's patch in some layers of a model; the results of some layers may
    be captured."""
    some = st.lists(st.integers(0, num_layers - 1), unique=True, min_size=1).map(tuple)
    policies = st.sampled_from((None, "recompute"))
    no_captures = st.builds(OwnStages, st.just(()), st.just(()), st.just(()), patched=some)
    return no_captures | st.builds(
        OwnStages, st.just(()), st.just(()), some, patched=some, prefix_caching=policies
    )


@st.composite
def token_patches(draw: st.DrawFn, model: Model, num_tokens: int) -> Extras | None:
    """The patches that a request gives for some of its prompt's tokens (0.25, the default, for the
    others), or None."""
    places = draw(st.lists(st.integers(0, num_tokens - 1), max_size=2, unique=True))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1)))
    patch = torch.full((num_tokens, model.config.hidden_size), 0.25)
    patch[sorted(places)] = 2 * torch.randn(model.config.hidden_size, generator=generator)
    if draw(st.integers(0, 2)):
        return {"patch": patch}
    return None


def own_stages(num_layers: int) -> st.SearchStrategy[OwnStages]:
    """Changes of some layers of a model with this many layers, and of some of a stage's
    functions."""
    index = st.integers(0, num_layers - 1)
    parts = {
        "layers": (
            st.dictionaries(index, st.sampled_from(_LAYERS)).map(
                lambda layers: tuple(sorted(layers.items()))
            )
        ),
        "parts": st.lists(st.sampled_from(_PARTS), unique=True).map(tuple),
    }
    some = st.lists(index, unique=True).map(tuple)
    policies = st.sampled_from((None, "none", "recompute"))
    carried = st.lists(index, unique=True, min_size=1).map(tuple)
    return st.one_of(
        st.builds(OwnStages, **parts, captured=some, carried=some, prefix_caching=policies),
        st.builds(
            OwnStages,
            **parts,
            captured=st.just(()),
            carried=carried,
            prefix_caching=st.just("snapshot"),
        ),
    )


@st.composite
def request_extras(draw: st.DrawFn, model: Model) -> Extras | None:
    """Some of the extras of `OwnStages`, with a request's values for them, or None."""
    sizes = {
        "vector": (model.config.hidden_size,),
        "strength": (),
        "bias": (model.config.vocab_size,),
    }
    # Sorted below: the values must depend on the seed and not on the order of the draws.
    names = draw(st.lists(st.sampled_from([*sizes]), unique=True))
    seed = draw(st.integers(0, 2))
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(sizes[name], generator=generator) for name in sorted(names)} or None
