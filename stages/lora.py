"""Slots of LoRA adapters beside a layer's weights, and what they add in a step."""

import attrs
from torch import Tensor

from weft.batch import ResolvedBatch
from weft.ops.lora import add_lora
from weft.summary import Summarized
from weft.trees import pytree, static


@pytree
@attrs.frozen(eq=False, repr=False)
class LoraWeights(Summarized):
    """The slots of one product of a layer, which may be several linear layers, a pair of matrices each; 0 where a slot
    has none.

    Args:
        a: `[slots, pairs, rank, in]`.
        b: `[slots, out, rank]`, the scaling in it.
        starts: the rows of `out` where each pair's begin, and where the last one's end.
    """

    a: Tensor
    b: Tensor
    starts: tuple[int, ...] = attrs.field(metadata=static())


@pytree
@attrs.frozen(eq=False, repr=False)
class LayerLora(Summarized):
    """The slots of a layer's products; None: no adapter changes that one."""

    qkv: LoraWeights | None = None
    o: LoraWeights | None = None
    gate_up: LoraWeights | None = None
    down: LoraWeights | None = None


NO_LORA = LayerLora()


def adapted(y: Tensor, x: Tensor, lora: LoraWeights | None, batch: ResolvedBatch) -> Tensor:
    """The product `y`, `[T, out]` or parts of it, of `x` `[T, in]`, with what each token's adapter adds; `y` itself
    where there is no adapter, in the layer or in the batch."""
    if lora is None or batch.adapters is None or batch.active_adapters is None:
        return y
    return add_lora(y, x, lora.a, lora.b, batch.adapters, batch.active_adapters, lora.starts)
