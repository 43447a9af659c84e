"""The layers of a stage, one after the other. A layer is a norm and attention, a norm and a
feed-forward block.

The result of a block is not added to the hidden states at once: the next norm adds it, in the same
kernel. The last one is added after the last layer. Custom functions may replace the model's blocks
(`Blocks`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.batches.batch import ResolvedBatch
from weft.ops.attention.backends import AttentionBackend
from weft.ops.constants import is_asking, kernel_kind
from weft.ops.norm import add_parts
from weft.ops.products.leaves import sum_leaves
from weft.ops.transfers.collective import axis_size
from weft.stages.attention import context
from weft.stages.config import ModelConfig
from weft.stages.custom.functions import OWN, Attend, Normed, StageFunctions, Tables
from weft.stages.custom.results import blamed_on, changed_layer, check_added, check_attended, noted
from weft.stages.custom.sown import at_layer
from weft.stages.params import DecoderParams, LayerParams
from weft.stages.shares import TensorRanks
from weft.torchapi.private import in_functorch_transform
from weft.values.trees import tree_flatten


@attrs.frozen
class Blocks:
    """The functions of a model's layers, with the signatures of those in `weft.stages.decoder`.

    The results of `attention` and `feed_forward` are added to the hidden states. Apart from biases,
    the first is a sum over heads, and the second a sum over inner columns or experts. A rank with
    the parameters of some of these computes a partial sum, which `ranks` complete. Custom functions
    must have this property, too: a rank may hold only some of the experts. With `reduction_leaves`,
    each sum is cut into leaves (`weft.ops.products.leaves`), of which every rank has the same
    number.
    """

    norm: Callable[..., tuple[Normed, Tensor]]
    attention: Callable[..., tuple[Tensor, Tensor]]
    feed_forward: Callable[..., Tensor]
    ranks: TensorRanks | None = None
    reduction_leaves: int = 1

    @property
    def leaves(self) -> int:
        """The number of leaves in this rank's part of each sum; 0: sums are not cut."""
        if self.reduction_leaves == 1:
            return 0
        return self.reduction_leaves // (1 if self.ranks is None else axis_size(self.ranks.axis))

    def total(self, added: Tensor, hidden: Tensor) -> Tensor:
        """The sum over the ranks of a block's result, which is added to the hidden states; leaves
        are added in float32."""
        if not self.leaves and self.ranks is None:
            return added
        if self.leaves:
            dtype = torch.promote_types(hidden.dtype, torch.float32)
        else:
            dtype = hidden.dtype
        if added.dim() == 2:
            partial_sum = added.to(dtype)
        else:
            partial_sum = sum_leaves(added, max(self.leaves, 1), dtype)
        if self.ranks is None:
            return partial_sum
        return self.ranks.total(partial_sum)


def run_layers(
    config: ModelConfig,
    blocks: Blocks,
    params: DecoderParams,
    kv_pages: Tensor,
    batch: ResolvedBatch,
    tables: Tables,
    hidden: Tensor,
    functions: StageFunctions = OWN,
    start: int = 0,
) -> tuple[Tensor, Tensor]:
    """Run the stage's layers one after the other; layer i of the stage writes `kv_pages[i]`.

    Args:
        blocks: the model's own functions.
        kv_pages: [layers of the stage, 2, num_pages, page_size, num_kv_heads, head_dim].
        tables: the rotary cosines and sines, each [num_tokens, head_dim / 2].
        hidden: [num_tokens, hidden_size].
        functions: the custom functions.
        start: the index of the stage's first layer in the model.

    Returns:
        [num_tokens, hidden_size]; and the pages: `kv_pages` itself if they were written in place
        (`rotate_and_keep`).
    """
    attend = functools.partial(_attend, config, blocks, functions)
    feed = functools.partial(_feed, config, blocks, functions)

    def whole(
        layer: LayerParams,
        layer_pages: Tensor,
        batch: ResolvedBatch,
        tables: Tables,
        hidden: Tensor,
    ) -> Any:
        added, hidden, pages = attend(layer, layer_pages, batch, tables, None, hidden)
        return add_parts(*feed(layer, batch, added, hidden)), pages

    added, written, in_place = None, list[Tensor](), True
    for index, layer in enumerate(_layers_to_run(config, blocks, functions, params.layers)):
        layer_pages, change = kv_pages[index], functions.layers.get(start + index)
        # No two layers may carry the same name, so `carry` has to know which layer runs.
        if functions.carries:
            at_layer(start + index)
        if change is None:
            # In two calls, so that what the last layer added is freed before the experts of this
            # one take memory.
            added, hidden, pages = attend(layer, layer_pages, batch, tables, added, hidden)
            added, hidden = feed(layer, batch, added, hidden)
        else:
            # A custom layer takes complete hidden states: add the pending result first.
            if added is not None:
                hidden = add_parts(added, hidden)
            layer_args = layer, layer_pages, batch, tables, hidden
            added, (hidden, pages) = None, changed_layer(start + index, change, whole, *layer_args)
        in_place = in_place and pages is layer_pages
        written.append(pages)
    if added is not None:
        hidden = add_parts(added, hidden)
    # `_layers_to_run` may have left out layers, whose pages stay as they are.
    return hidden, kv_pages if in_place else torch.stack([*written, *kv_pages[len(written) :]])


def _layers_to_run(
    config: ModelConfig, blocks: Blocks, functions: StageFunctions, layers: Sequence[LayerParams]
) -> Sequence[LayerParams]:
    """All layers; or, while a run only finds out which kernels it needs, the first two if all are
    alike, as the others need the same kernels as the second. (The first layer's norm is another
    kernel, as there is no earlier result to add.)

    Not if custom functions may differ by layer; nor with several ranks, whose collectives wait for
    each other, and which may have other layers; nor for tensors of torch.func, which have no
    address, by which kernels may differ.
    """
    custom = functions.attention, functions.feed_forward, functions.norm, functions.attend
    may_differ = (
        any(one is not None for one in custom)
        or functions.layers
        or functions.captures
        or functions.carries
    )
    if not is_asking() or blocks.ranks is not None or may_differ or in_functorch_transform():
        return layers
    kinds = [_kind(config, layer) for layer in layers]
    if all(kind == kinds[0] for kind in kinds):
        return layers[:2]
    return layers


def _kind(config: ModelConfig, layer: LayerParams) -> Any:
    """A key that is equal for layers that launch the same kernels for the same batch."""
    if config.windows:
        window = config.windows[layer.index]
    else:
        window = 0
    # The index is part of the structure, and would make every layer another kind.
    leaves, structure = tree_flatten(attrs.evolve(layer, index=0))
    return window, structure, *(kernel_kind(x) if isinstance(x, Tensor) else x for x in leaves)


def _attend(
    config: ModelConfig,
    blocks: Blocks,
    functions: StageFunctions,
    layer: LayerParams,
    kv_pages: Tensor,
    batch: ResolvedBatch,
    tables: Tables,
    added: Tensor | None,
    hidden: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's norm, which first adds the result of the block before, if any, and its attention.
    Returns the attention's result, which is not added yet, the hidden states, and the pages."""
    norm = functools.partial(_norm, config, blocks, functions, batch)
    x, hidden = norm(layer.input_layernorm, added, hidden, quantized=layer.qkv_scale is not None)
    if functions.attention is None:
        if functions.attend is None:
            attend = None
        else:
            attend = functools.partial(_own_attend, functions.attend)
        added, pages = blocks.attention(
            config, layer, kv_pages, batch, tables, x, attend=attend, leaves=blocks.leaves
        )
    else:
        with blamed_on("attention", batch):
            added, pages = functions.attention(config, layer, kv_pages, batch, tables, x)
        added = check_added("attention", added, hidden)
    return blocks.total(added, hidden), hidden, pages


def _feed(
    config: ModelConfig,
    blocks: Blocks,
    functions: StageFunctions,
    layer: LayerParams,
    batch: ResolvedBatch,
    added: Tensor,
    hidden: Tensor,
) -> tuple[Tensor, Tensor]:
    """Like `_attend`, for the layer's feed-forward block."""
    norm = functools.partial(_norm, config, blocks, functions, batch)
    x, hidden = norm(
        layer.post_attention_layernorm, added, hidden, quantized=layer.gate_up_scale is not None
    )
    if functions.feed_forward is None:
        added = blocks.feed_forward(config, layer, batch, x, leaves=blocks.leaves)
    else:
        with blamed_on("feed_forward", batch):
            added = check_added(
                "feed_forward", functions.feed_forward(config, layer, batch, x), hidden
            )
    return blocks.total(added, hidden), hidden


def _norm(
    config: ModelConfig,
    blocks: Blocks,
    functions: StageFunctions,
    batch: ResolvedBatch,
    weight: Tensor,
    added: Tensor | None,
    hidden: Tensor,
    *,
    quantized: bool,
) -> tuple[Normed, Tensor]:
    """The result of the norm, the model's or a custom one."""
    if functions.norm is None:
        return blocks.norm(weight, config.rms_norm_eps, added, hidden, quantized=quantized)
    with blamed_on("norm", batch):
        return functions.norm(weight, config.rms_norm_eps, added, hidden, quantized=quantized)


def _own_attend(
    attend: Attend | AttentionBackend,
    config: ModelConfig,
    layer: LayerParams,
    q: Tensor,
    kv_pages: Tensor,
    batch: ResolvedBatch,
) -> Tensor:
    """The checked result of a custom `attend` or of a back end."""
    if isinstance(attend, AttentionBackend):
        with noted(
            lambda _: (
                f"in the attention back end {attend.name!r}, of capability {attend.capability!r}"
            )
        ):
            return check_attended(
                context.attend(config, layer, q, kv_pages, batch, backend=attend), q
            )
    with blamed_on("attend", batch):
        return check_attended(attend(config, layer, q, kv_pages, batch), q)
