"""The slots in a stage's parameters that hold adapters: reserved, written and checked."""

from collections.abc import Collection, Sequence

import attrs
from torch import Tensor

from weft.errors import ProgramError, RequestError
from weft.stages.adapters.adapter import Adapter
from weft.stages.config import ModelConfig
from weft.stages.layer_fields import Part
from weft.stages.layout import StageLayout
from weft.stages.model import Model
from weft.stages.params import DecoderParams, LayerLora, LayerParams, LoraWeights, slice_params
from weft.stages.shares import WHOLE, Share, adaptable, share_fields


def with_adapters(
    params: DecoderParams,
    config: ModelConfig,
    layout: StageLayout,
    adapters: Sequence[Adapter],
    *,
    shard: Share = WHOLE,
) -> DecoderParams:
    """A stage's parameters with one slot for each adapter, in order; unchanged if there are none.

    Args:
        params: the stage's parameters; the result shares their tensors.
        config, layout: the model's configuration, and the stage's layout.
        adapters: from `load_adapter`.
        shard: the rank's share of each layer that `params` has.
    """
    if not adapters:
        return params
    names = {name for adapter in adapters for name in adapter.deltas}
    rank = max(adapter.rank for adapter in adapters)
    params = reserve_slots(
        params, config, layout, num_slots=len(adapters), rank=rank, names=names, shard=shard
    )
    for slot, adapter in enumerate(adapters):
        write_slot(params, config, layout, slot, adapter, shard=shard)
    return params


def reserve_slots(
    params: DecoderParams,
    config: ModelConfig,
    layout: StageLayout,
    *,
    num_slots: int,
    rank: int,
    names: Collection[str] | None = None,
    shard: Share = WHOLE,
) -> DecoderParams:
    """A stage's parameters with empty slots for adapters.

    Args:
        params: the stage's parameters; the result shares their tensors.
        config, layout: the model's configuration, and the stage's layout.
        num_slots: at least 1.
        rank: the greatest rank of an adapter.
        names: the linear layers that adapters may change, as in `Adapter.deltas`; None: all.
        shard: the rank's share of each layer that `params` has.
    """
    layers = []
    for index, layer in zip(layout.layers, params.layers, strict=True):
        products = {
            product
            for name, (product, _, _) in adaptable(config, index).items()
            if names is None or name in names
        }
        fields = share_fields(config, index, shard)
        lora_weights = {
            product: _empty(fields[f"{product}_proj"].parts, layer, product, num_slots, rank)
            for product in sorted(products)
        }
        layers.append(attrs.evolve(layer, lora=LayerLora(**lora_weights)))
    return attrs.evolve(params, layers=tuple(layers))


def _empty(
    parts: Sequence[Part], layer: LayerParams, product: str, num_slots: int, rank: int
) -> LoraWeights:
    weight: Tensor = getattr(layer, f"{product}_proj")
    rows, columns = weight.shape
    starts = [part.start for part in parts]
    # Not the weight's dtype: for weights in FP8, adapters have the dtype of the activations, which
    # is that of the norms.
    like = layer.input_layernorm
    return LoraWeights(
        like.new_zeros(num_slots, len(starts), rank, columns),
        like.new_zeros(num_slots, rows, rank),
        (*starts, rows),
    )


def write_slot(
    params: DecoderParams,
    config: ModelConfig,
    layout: StageLayout,
    slot: int,
    adapter: Adapter | None,
    *,
    shard: Share = WHOLE,
) -> None:
    """Write an adapter into a slot of a stage's parameters, in place. Captured graphs replay with
    the new adapter, without a new capture. The slot's old values are lost.

    Args:
        params: the stage's parameters, with slots.
        config, layout: the model's configuration, and the stage's layout.
        slot: the index of the slot. No running request may use it.
        adapter: the adapter; None: empty the slot.
        shard: the rank's share of each layer that `params` has.

    Raises:
        RequestError: no such slot, a rank that is too great, or a linear layer that has no slots.
    """
    check_slot(params, config, layout, slot, adapter)
    slots = _slots(params, config, layout, shard)
    deltas = _deltas(layout, adapter)
    # All slots of this index, as the old adapter may have changed other layers, or had a greater
    # rank.
    for lora, _, _ in slots.values():
        lora.a[slot].zero_()
        lora.b[slot].zero_()
    for name, (a, b) in deltas.items():
        lora, place, part = slots[name]
        if part.slices:
            # The rank's rows and columns of the product `b @ a`.
            rows, columns = part.slices
            a = a[:, columns]
            b = b[rows]
        # An adapter of a smaller rank leaves zeros behind it, which add nothing.
        lora.a[slot, place, : a.shape[0], : a.shape[1]] = a.to(lora.a)
        lora.b[slot, part.start : part.start + b.shape[0], : b.shape[1]] = b.to(lora.b)


def check_slot(
    params: DecoderParams,
    config: ModelConfig,
    layout: StageLayout,
    slot: int,
    adapter: Adapter | None,
) -> None:
    """Raise RequestError where `write_slot` does."""
    slots = _slots(params, config, layout)
    faults = [
        f"{name} of rank {a.shape[0]}, and slots of "
        + (f"rank {slots[name][0].a.shape[2]}" if name in slots else ", ".join(slots) or "no layer")
        for name, (a, _) in _deltas(layout, adapter).items()
        if name not in slots or a.shape[0] > slots[name][0].a.shape[2]
    ]
    instead = "reserve_slots(..., rank=..., names=...) of all that will be written"
    count = min((len(lora.a) for lora, _, _ in slots.values()), default=slot + 1)
    if not faults and not 0 <= slot < count:
        faults = [f"{count} slots"]
        instead = f"a slot from 0 to {count - 1}"
    if faults:
        raise RequestError(
            f"write_slot(params, config, {layout!r}, {slot}, {adapter!r})", faults[0], instead
        )


def _slots(
    params: DecoderParams, config: ModelConfig, layout: StageLayout, shard: Share = WHOLE
) -> dict[str, tuple[LoraWeights, int, Part]]:
    slots = {}
    for index, layer in zip(layout.layers, params.layers, strict=True):
        for name, (product, place, part) in adaptable(config, index, shard).items():
            if (lora := getattr(layer.lora, product)) is not None:
                slots[name] = (lora, place, part)
    return slots


def _deltas(layout: StageLayout, adapter: Adapter | None) -> dict[str, tuple[Tensor, Tensor]]:
    """The pairs of matrices for the layers of a stage."""
    deltas = {} if adapter is None else adapter.deltas
    # In `model.layers.3.self_attn.q_proj`, the third component is the layer in the whole model.
    return {name: pair for name, pair in deltas.items() if int(name.split(".")[2]) in layout.layers}


def stage_params(
    model: Model, layouts: Sequence[StageLayout], adapters: Sequence[Adapter] = ()
) -> tuple[DecoderParams, ...]:
    """The parameters of stages, with a slot for each adapter, from a whole model or from a model
    that is the stage itself.

    Raises:
        ProgramError: the model is another stage.
    """
    if model.layout.num_stages == 1:
        sliced_params = [slice_params(model.params, layout) for layout in layouts]
        every = zip(sliced_params, layouts, strict=True)
        return tuple(
            with_adapters(p, model.config, layout, adapters, shard=model.shard)
            for p, layout in every
        )
    if (model.layout,) != tuple(layouts):
        call = f"stage_params({model!r}, {list(layouts)})"
        problem = f"a model that is {model.layout}"
        raise ProgramError(
            call, problem, "weft.load(folder, stage=...) of the stage that runs here"
        )
    return (with_adapters(model.params, model.config, model.layout, adapters, shard=model.shard),)
