"""Shares: the part of a decoder that one of several ranks holds, where all of them compute each layer together.

Attention is shared by heads, and a feed-forward block by its inner columns: the first product of each is cut by rows,
the second by columns, and its results are summed over the ranks (Shoeybi et al., 2019, Megatron-LM, arXiv 1909.08053).
Where there are fewer key and value heads than ranks, several hold the same one. The embedding and the head are cut by
the vocabulary, to whose end zeros are added where it is not a multiple of the number of ranks.
"""

from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.errors import ConfigError
from weft.ops.fp8 import BLOCK
from weft.ops.transfers.collective import all_gather, all_reduce, axis_index
from weft.stages.config import ModelConfig
from weft.stages.layer_fields import Field, layer_fields
from weft.stages.layout import StageLayout
from weft.stages.params import DecoderParams, LayerParams


def share_config(config: ModelConfig, num_ranks: int) -> ModelConfig:
    """The configuration of one rank's share: with its part of the heads and of the inner columns.

    Raises:
        ConfigError: heads or columns that the ranks cannot share evenly.
    """
    call = f"a model over {num_ranks} ranks"
    heads, kv_heads, inner = config.num_heads, config.num_kv_heads, config.intermediate_size
    even = heads % num_ranks == 0 and (kv_heads % num_ranks == 0 or num_ranks % kv_heads == 0)
    if not even:
        instead = "a number of ranks that divides the heads, and that divides the key and value heads or is a multiple"
        raise ConfigError(call, f"{heads} heads, and {kv_heads} of keys and values", instead)
    unit = num_ranks * (BLOCK if config.fp8 is not None else 1)
    blocks = {"intermediate_size": inner} if config.moe is None else {"moe_intermediate_size": config.moe.inner}
    if config.moe is not None and any(not config.moe.is_sparse(i) for i in range(config.num_layers)):
        blocks["intermediate_size"] = inner
    if uneven := next((name for name, size in blocks.items() if size % unit), None):
        instead = f"a number of ranks by which it is a multiple of {unit // num_ranks}"
        raise ConfigError(call, f"{uneven}={blocks[uneven]}", instead)
    return attrs.evolve(
        config,
        num_heads=heads // num_ranks,
        num_kv_heads=max(kv_heads // num_ranks, 1),
        intermediate_size=max(inner // num_ranks, 1),
        moe=None if config.moe is None else attrs.evolve(config.moe, inner=config.moe.inner // num_ranks),
    )


def share_params(
    params: DecoderParams, config: ModelConfig, layout: StageLayout, rank: int, num_ranks: int
) -> DecoderParams:
    """A rank's share of a stage's parameters, as new tensors where they are cut.

    Args:
        params: of the stage.
        config: of the whole model.
        layout: the stage's layers.
        rank, num_ranks: the rank, and the number of ranks.
    """
    own = share_config(config, num_ranks)
    layers = (
        _share_layer(layer, config, own, index, rank, num_ranks)
        for index, layer in zip(layout.layers, params.layers, strict=True)
    )
    embed, head = params.embed_tokens, params.lm_head
    shared = None if embed is None else share_rows(embed, rank, num_ranks)
    return attrs.evolve(
        params,
        embed_tokens=shared,
        layers=tuple(layers),
        lm_head=shared if head is embed else None if head is None else share_rows(head, rank, num_ranks),
    )


def share_rows(weight: Tensor, rank: int, num_ranks: int) -> Tensor:
    """A rank's rows of the embedding or the head [vocab, hidden], the last ones filled with zeros."""
    size = -(-weight.shape[0] // num_ranks)
    own = weight[rank * size : (rank + 1) * size]
    return F.pad(own, (0, 0, 0, size - own.shape[0])) if own.shape[0] < size else own


def _share_layer(
    layer: LayerParams, config: ModelConfig, own: ModelConfig, index: int, rank: int, num_ranks: int
) -> LayerParams:
    whole, shared = layer_fields(config, index), layer_fields(own, index)
    kv_index = rank * min(config.num_kv_heads, num_ranks) // num_ranks  # ranks may hold the same head
    cut = dict[str, Any]()
    for name, field in shared.items():
        tensor: Tensor = getattr(layer, name)
        if field.shape == whole[name].shape:
            # A bias after a sum over the ranks is added by one of them.
            cut[name] = torch.zeros_like(tensor) if name in ("o_bias", "down_bias") and rank else tensor
        else:
            cut[name] = _share_field(tensor, name, whole[name], field, rank, kv_index)
    return attrs.evolve(layer, **cut)


def _share_field(tensor: Tensor, name: str, whole: Field, own: Field, rank: int, kv_index: int) -> Tensor:
    """A rank's share of a tensor of `LayerParams`; of keys and values, the share `kv_index`."""
    made = torch.zeros(own.shape, dtype=tensor.dtype, device=tensor.device)
    for place, (part, mine) in enumerate(zip(whole.parts, own.parts, strict=True)):
        source, target = (x if part.expert is None else x[part.expert] for x in (tensor, made))
        index = kv_index if name.startswith("qkv") and place > 0 else rank
        source = source.narrow(0, part.start, part.shape[0])
        target = target.narrow(0, mine.start, mine.shape[0])
        for dim, (size, share) in enumerate(zip(part.shape, mine.shape, strict=True)):
            source = source.narrow(dim, index * share if share < size else 0, share)
            target = target.narrow(dim, 0, share)
        target.copy_(source)
    return made


@attrs.frozen
class TensorRanks:
    """The ranks that share a stage's layers.

    Args:
        axis: of the mesh.
        vocab_size: of the whole model.
    """

    axis: str
    vocab_size: int

    def total(self, added: Tensor) -> Tensor:
        """The sum over the ranks of what their shares of a block return."""
        return all_reduce(added, self.axis)

    def embed(self, input_ids: Tensor, weight: Tensor) -> Tensor:
        """The embeddings [num_tokens, hidden_size], each from the rank that holds the token's row."""
        own = input_ids - axis_index(self.axis) * weight.shape[0]
        holds = (own >= 0) & (own < weight.shape[0])
        found = F.embedding(torch.where(holds, own, 0), weight)
        return all_reduce(torch.where(holds[:, None], found, 0), self.axis)

    def logits(self, own: Tensor) -> Tensor:
        """The logits [n, vocab_size] of the whole vocabulary, from each rank's."""
        return all_gather(own, self.axis, dim=-1)[:, : self.vocab_size]
