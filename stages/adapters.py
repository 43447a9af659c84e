"""`Adapter`: a LoRA as a value; and slots in a stage's parameters that hold several."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
from torch import Tensor

from weft.errors import RequestError
from weft.stages.config import ModelConfig
from weft.stages.digest import Origin, digest_params
from weft.stages.layer_fields import Part, layer_fields
from weft.stages.layout import StageLayout
from weft.stages.lora import LayerLora, LoraWeights
from weft.stages.params import DecoderParams, LayerParams

PRODUCTS = tuple(field.name for field in attrs.fields(LayerLora))
"""The products of a layer that adapters may change."""


@attrs.frozen(eq=False)
class Adapter:
    """A LoRA adapter: what it adds to linear layers. Nothing in it changes.

    Args:
        deltas: for each linear layer that it changes, by transformers' name (`model.layers.3.self_attn.q_proj`), the
            matrices `a [rank, in]` and `b [out, rank]`, float32, the scaling in b: `b @ (a @ x)` is added.
        path: where it came from.
        origin: digests of the files that it was loaded from; None where there are none.
    """

    deltas: Mapping[str, tuple[Tensor, Tensor]]
    path: Path
    origin: Origin | None = attrs.field(default=None, kw_only=True)

    @property
    def weights(self) -> str:
        """A digest of it, as the ranks of a pipeline compare them: of its files, and whether 4 values of each matrix
        here are still as they had them; without files, of these values."""
        return digest_params(self.deltas) if self.origin is None else self.origin.describe(self.deltas)

    @property
    def rank(self) -> int:
        """The greatest of its layers."""
        return max((a.shape[0] for a, _ in self.deltas.values()), default=1)

    def __repr__(self) -> str:
        return f"<Adapter {str(self.path)!r}, {len(self.deltas)} layers, rank {self.rank}>"


def adaptable(config: ModelConfig, index: int) -> dict[str, tuple[str, int, Part]]:
    """The linear layers of decoder layer `index` that an adapter may change, by transformers' name: the product that
    each is in, its place in that, and its part of the weights. Not experts."""
    fields = layer_fields(config, index)
    found = {}
    for product in PRODUCTS:
        for place, part in enumerate(fields[f"{product}_proj"].parts):
            if part.expert is None:
                found[part.name.removesuffix(".weight")] = (product, place, part)
    return found


def with_adapters(
    params: DecoderParams, config: ModelConfig, layout: StageLayout, adapters: Sequence[Adapter]
) -> DecoderParams:
    """A stage's parameters with a slot for each adapter, in order, that holds it; the same where there is none.

    Args:
        params: of the stage; its tensors are shared.
        config, layout: of the model, and of the stage.
        adapters: from `load_adapter`.
    """
    if not adapters:
        return params
    names = {name for adapter in adapters for name in adapter.deltas}
    rank = max(adapter.rank for adapter in adapters)
    params = reserve_slots(params, config, layout, num_slots=len(adapters), rank=rank, names=names)
    for slot, adapter in enumerate(adapters):
        write_slot(params, config, layout, slot, adapter)
    return params


def reserve_slots(
    params: DecoderParams,
    config: ModelConfig,
    layout: StageLayout,
    *,
    num_slots: int,
    rank: int,
    names: Collection[str] | None = None,
) -> DecoderParams:
    """A stage's parameters with empty slots for adapters.

    Args:
        params: of the stage; its tensors are shared.
        config, layout: of the model, and of the stage.
        num_slots: at least 1.
        rank: of an adapter at most.
        names: the linear layers that adapters may change, as in `Adapter.deltas`; None: all.
    """
    layers = []
    for index, layer in zip(layout.layers, params.layers, strict=True):
        wanted = {
            product for name, (product, _, _) in adaptable(config, index).items() if names is None or name in names
        }
        made = {product: _empty(config, index, layer, product, num_slots, rank) for product in sorted(wanted)}
        layers.append(attrs.evolve(layer, lora=LayerLora(**made)))
    return attrs.evolve(params, layers=tuple(layers))


def _empty(config: ModelConfig, index: int, layer: LayerParams, product: str, num_slots: int, rank: int) -> LoraWeights:
    weight: Tensor = getattr(layer, f"{product}_proj")
    rows, columns = weight.shape
    starts = [part.start for part in layer_fields(config, index)[f"{product}_proj"].parts]
    # Weights in FP8 have adapters in the dtype of the activations, which is that of the norms.
    like = layer.input_layernorm
    return LoraWeights(
        like.new_zeros(num_slots, len(starts), rank, columns), like.new_zeros(num_slots, rows, rank), (*starts, rows)
    )


def write_slot(
    params: DecoderParams, config: ModelConfig, layout: StageLayout, slot: int, adapter: Adapter | None
) -> None:
    """Write an adapter into a slot of a stage's parameters, in place: graphs that were captured with them go on with
    the new adapter, and none is captured again. What the slot held is gone.

    Args:
        params: of the stage, with slots.
        config, layout: of the model, and of the stage.
        slot: which. No request that is under way may use it.
        adapter: None: empty the slot.

    Raises:
        RequestError: no such slot, a rank that is too great, or a linear layer that has no slots.
    """
    check_slot(params, config, layout, slot, adapter)
    slots, deltas = _slots(params, config, layout), _deltas(layout, adapter)
    for lora, _, _ in slots.values():
        lora.a[slot].zero_()
        lora.b[slot].zero_()
    for name, (a, b) in deltas.items():
        lora, place, part = slots[name]
        lora.a[slot, place, : a.shape[0], : a.shape[1]] = a.to(lora.a)
        lora.b[slot, part.start : part.start + b.shape[0], : b.shape[1]] = b.to(lora.b)


def check_slot(
    params: DecoderParams, config: ModelConfig, layout: StageLayout, slot: int, adapter: Adapter | None
) -> None:
    """Refuse what `write_slot` cannot write.

    Raises:
        RequestError: as of `write_slot`.
    """
    call = f"write_slot(params, config, {layout!r}, {slot}, {adapter!r})"
    slots = _slots(params, config, layout)
    for name, (a, _) in _deltas(layout, adapter).items():
        if name not in slots or a.shape[0] > slots[name][0].a.shape[2]:
            seen = f"{name} of rank {a.shape[0]}, and slots "
            seen += f"of rank {slots[name][0].a.shape[2]}" if name in slots else f"of {', '.join(slots) or 'no layer'}"
            raise RequestError(call, seen, "reserve_slots(..., rank=..., names=...) of all that will be written")
    for lora, _, _ in slots.values():
        if not 0 <= slot < len(lora.a):
            raise RequestError(call, f"{len(lora.a)} slots", f"a slot from 0 to {len(lora.a) - 1}")


def _slots(params: DecoderParams, config: ModelConfig, layout: StageLayout) -> dict[str, tuple[LoraWeights, int, Part]]:
    return {name: found for index, layer in zip(layout.layers, params.layers, strict=True)
            for name, found in _slots_of(config, index, layer)}  # fmt: skip


def _deltas(layout: StageLayout, adapter: Adapter | None) -> dict[str, tuple[Tensor, Tensor]]:
    """What an adapter adds to the layers of a stage."""
    return {} if adapter is None else {n: d for n, d in adapter.deltas.items() if _layer_of(n) in layout.layers}


def _slots_of(
    config: ModelConfig, index: int, layer: LayerParams
) -> Iterator[tuple[str, tuple[LoraWeights, int, Part]]]:
    for name, (product, place, part) in adaptable(config, index).items():
        lora = getattr(layer.lora, product)
        if lora is not None:
            yield name, (lora, place, part)


def _layer_of(name: str) -> int:
    return int(name.split(".")[2])
