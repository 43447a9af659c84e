"""Shares: the part of a decoder that one rank holds when several ranks compute each layer together
(tensor parallelism).

Attention is shared by heads, and a feed-forward block by its inner columns: the weights of the
first product are cut by rows, those of the second by columns, and the results are summed over the
ranks (Shoeybi et al., 2019, Megatron-LM, arXiv 1909.08053). If there are fewer key and value heads
than ranks, several ranks hold the same head. The embedding and the head are cut by the vocabulary,
which is padded with zeros to a multiple of the number of ranks.

Experts are shared by their inner columns, too, or whole (expert parallelism): each of R ranks then
holds 1 / R of the experts. After the last sum, every rank has all T tokens; it computes what its
own experts add to them, and the sum that ends the block adds up the ranks.

Why no all-to-all: with a fixed capacity that cannot overflow, it would carry T / R rows from each
rank to every other, and as many back. These are the bytes of an all-gather and a reduce-scatter of
the tokens, that is, of the all-reduce that is needed in any case, since attention shared by heads
needs every token on every rank. Without padding, there would be little to gain: if all of 128
experts are equally likely, a given one of 2, 4 or 8 ranks holds at least one of a token's 8 experts
with a probability of 99.7, 90.7 or 66.7 %.
"""

from collections.abc import Sequence

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.errors import ConfigError
from weft.ops.products.fp8 import BLOCK
from weft.ops.transfers.collective import all_gather, all_reduce, all_to_all, axis_index, axis_size
from weft.stages.config import ModelConfig, MoeConfig
from weft.stages.layer_fields import Field, Part, layer_fields

# A rank's share of a model: its index, and the number of ranks.
Share = tuple[int, int]
WHOLE: Share = (0, 1)
# The axis of a mesh along which ranks share the layers of a model.
AXIS = "tensor"


def share_config(config: ModelConfig, num_ranks: int) -> ModelConfig:
    """The configuration of one rank's share, with its part of the heads and of the inner columns or
    experts.

    Raises:
        ConfigError: heads, columns or experts that the ranks cannot share evenly.
    """
    if num_ranks == 1:
        return config
    call = f"a model over {num_ranks} ranks"
    heads = config.num_heads
    kv_heads = config.num_kv_heads
    inner = config.intermediate_size
    even = heads % num_ranks == 0 and (kv_heads % num_ranks == 0 or num_ranks % kv_heads == 0)
    if not even:
        instead = (
            "a number of ranks that divides the heads, and that divides the key and value heads or"
            " is a multiple of them"
        )
        raise ConfigError(call, f"{heads} heads, and {kv_heads} of keys and values", instead)
    modules = [
        f"model.layers.{index}.self_attn.{part}_proj"
        for index in range(config.num_layers)
        for part in "qkvo"
    ]
    if config.fp8 is not None and any(map(config.fp8.converts, modules)):
        _refuse_split_blocks(config, num_ranks, call)
    block = BLOCK if config.fp8 is not None else 1
    if config.moe is None:
        moe = None
    else:
        moe = _share_experts(config.moe, num_ranks, block, call)
    is_dense = config.moe is None or not all(map(config.moe.is_sparse, range(config.num_layers)))
    if is_dense and inner % (num_ranks * block):
        instead = _number_that_cuts("intermediate_size", block)
        raise ConfigError(call, f"intermediate_size={inner}", instead)
    return attrs.evolve(
        config,
        num_heads=heads // num_ranks,
        num_kv_heads=max(kv_heads // num_ranks, 1),
        intermediate_size=max(inner // num_ranks, 1),
        moe=moe,
    )


def _number_that_cuts(name: str, block: int) -> str:
    """The remedy for columns that the ranks cannot share evenly, in whole FP8 blocks."""
    if block == 1:
        return f"a number of ranks that divides {name}"
    return f"a number of ranks n for which {name} / n is a multiple of {block}"


def _share_experts(moe: MoeConfig, num_ranks: int, block: int, call: str) -> MoeConfig:
    """The experts of one rank's share: a part of the columns of each, or some whole experts."""
    can_cut = moe.inner % (num_ranks * block) == 0
    can_deal = moe.num_experts % num_ranks == 0
    if can_cut and moe.sharing != "whole":
        return attrs.evolve(moe, inner=moe.inner // num_ranks)
    if can_deal and moe.sharing != "columns":
        return attrs.evolve(moe, num_local_experts=moe.num_experts // num_ranks)
    columns = f"moe_intermediate_size={moe.inner}"
    whole = f"num_experts={moe.num_experts}"
    cuts = _number_that_cuts("moe_intermediate_size", block)
    if moe.sharing is None:
        instead = f"{cuts}, or one that divides num_experts"
        raise ConfigError(call, f"{columns} and {whole}", instead)
    problem = columns
    other = "whole"
    instead = cuts
    works = can_deal
    if moe.sharing == "whole":
        problem = whole
        other = "columns"
        instead = "a number of ranks that divides num_experts"
        works = can_cut
    raise ConfigError(
        call, f"{problem}, shared as {moe.sharing!r}", instead + f", or experts={other!r}" * works
    )


def check_leaves(call: str, config: ModelConfig, leaves: int, num_ranks: int = 1) -> None:
    """Raise ConfigError if sums cannot be cut evenly into leaves, or ranks cannot share the leaves
    evenly."""
    unit = leaves * (1 if config.fp8 is None or leaves == 1 else BLOCK)
    heads = config.num_heads * config.head_dim
    sizes = {f"{heads} columns of {config.num_heads} heads": heads}
    sizes |= {f"{name}={size}": size for name, size in _inner_sizes(config).items()}
    if uneven := next((name for name, size in sizes.items() if size % unit), None):
        if unit != leaves:
            in_fp8 = f" of whole FP8 blocks ({BLOCK} columns each)"
        else:
            in_fp8 = ""
        problem = f"{uneven}, which cannot be cut into {leaves} equal leaves{in_fp8}"
        instead = (
            f"a power of two that divides the columns into equal leaves{in_fp8}; or 1, with which"
            " the bits depend on the number of ranks"
        )
        raise ConfigError(f"{call} with reduction_leaves={leaves}", problem, instead)
    if config.moe is None or leaves == 1 or num_ranks == 1:
        shared = None
    else:
        shared = share_config(config, num_ranks).moe
    if shared is not None and shared.num_local_experts is not None:
        problem = f"{num_ranks} ranks with whole experts"
        instead = "ranks that share them as 'columns', or 1 leaf"
        raise ConfigError(f"{call} with reduction_leaves={leaves}", problem, instead)
    if leaves > 1 and leaves % num_ranks:
        instead = f"a number of ranks that divides {leaves}, or more leaves"
        raise ConfigError(f"{call} with reduction_leaves={leaves}", f"{num_ranks} ranks", instead)


def _inner_sizes(config: ModelConfig) -> dict[str, int]:
    """The inner columns of the feed-forward blocks, by the name in the configuration."""
    if config.moe is None:
        sizes = {}
    else:
        sizes = {"moe_intermediate_size": config.moe.inner}
    if config.moe is None or any(not config.moe.is_sparse(i) for i in range(config.num_layers)):
        sizes["intermediate_size"] = config.intermediate_size
    return sizes


def _refuse_split_blocks(config: ModelConfig, num_ranks: int, call: str) -> None:
    """Raise ConfigError if an FP8 block of the heads, which has a single scale, would be split over
    two ranks."""
    counts = {"num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads}
    for name, count in counts.items():
        rows = count * config.head_dim
        rank_rows = max(count // num_ranks, 1) * config.head_dim
        if rows > BLOCK and rank_rows % BLOCK:
            instead = (
                f"a number of ranks that gives each rank a multiple of {BLOCK} rows of these heads"
            )
            raise ConfigError(
                call, f"{name}={count} with head_dim={config.head_dim} in FP8", instead
            )


def share_fields(config: ModelConfig, index: int, shard: Share = WHOLE) -> dict[str, Field]:
    """The fields of layer `index` (`weft.stages.layer_fields`), or of a rank's share of it."""
    whole = layer_fields(config, index)
    rank, num_ranks = shard
    if num_ranks == 1:
        return whole
    # With fewer KV heads than ranks, neighbouring ranks hold the same head.
    kv_rank = rank * min(config.num_kv_heads, num_ranks) // num_ranks
    shard_fields = layer_fields(share_config(config, num_ranks), index)
    return {
        name: _share_field(name, whole[name], field, rank, kv_rank)
        for name, field in shard_fields.items()
    }


def adaptable(
    config: ModelConfig, index: int, shard: Share = WHOLE
) -> dict[str, tuple[str, int, Part]]:
    """The linear layers of decoder layer `index` that an adapter may change, by transformers' name.

    The values are the product that each is part of, its place in that product, and its part of the
    weights or a rank's share of it. Experts are left out.
    """
    layers = {}
    for name, field in share_fields(config, index, shard).items():
        for place, part in enumerate(field.parts):
            if name.endswith("_proj") and part.expert is None:
                layers[part.name.removesuffix(".weight")] = (
                    name.removesuffix("_proj"),
                    place,
                    part,
                )
    return layers


def _share_field(name: str, whole: Field, shard_field: Field, rank: int, kv_rank: int) -> Field:
    """A rank's share of a field; for keys and values, share number `kv_rank`."""
    if name in ("o_bias", "down_bias") and rank:
        # The results of the ranks are summed, so only rank 0 adds the bias.
        return attrs.evolve(shard_field, parts=())
    parts = list[Part]()
    count = len(shard_field.parts)
    # A share has fewer parts than the whole only if it holds whole experts.
    first = rank * count if count < len(whole.parts) else 0
    for place, (part, mine) in enumerate(
        zip(whole.parts[first : first + count], shard_field.parts, strict=True)
    ):
        if name.startswith("qkv") and place > 0:
            at = kv_rank
        else:
            at = rank
        offset = tuple(
            at * size if size < all_ else 0
            for size, all_ in zip(mine.shape, part.shape, strict=True)
        )
        mine = attrs.evolve(mine, name=part.name)
        parts.append(
            mine
            if mine.shape == part.shape
            else attrs.evolve(mine, stored=part.shape, offset=offset)
        )
    return attrs.evolve(shard_field, parts=tuple(parts))


def share_rows(field: Field, shard: Share) -> Field:
    """A rank's share of the embedding or the head, `[vocab, hidden]`: every rank has the same
    number of rows, and rows beyond the vocabulary are 0."""
    rank, num_ranks = shard
    if num_ranks == 1:
        return field
    (part,), (rows, columns) = field.parts, field.shape
    size = -(-rows // num_ranks)
    count = min(size, rows - rank * size)
    rank_part = attrs.evolve(
        part, shape=(count, columns), stored=field.shape, offset=(rank * size, 0)
    )
    return Field((size, columns), (rank_part,) if count > 0 else (), field.dtype)


def cut_field(tensor: Tensor, whole: Field, shard_field: Field) -> Tensor:
    """A rank's share of a field's tensor; in new memory if it is cut."""
    if shard_field == whole:
        return tensor
    share = torch.zeros(shard_field.shape, dtype=tensor.dtype, device=tensor.device)
    parts = {part.name: part for part in whole.parts}
    for part in shard_field.parts:
        source = parts[part.name].place(tensor)
        part.place(share).copy_(source[part.slices])
    return share


def join_field(shares: Sequence[Tensor], shard_fields: Sequence[Field], whole: Field) -> Tensor:
    """A field's tensor from the shares of all ranks, in order: the inverse of `cut_field`."""
    joined = shares[0].new_zeros(whole.shape)
    parts = {part.name: part for part in whole.parts}
    for tensor, field in zip(shares, shard_fields, strict=True):
        for part in field.parts:
            parts[part.name].place(joined)[part.slices] = part.place(tensor)
    return joined


@attrs.frozen
class TensorRanks:
    """The ranks that share a stage's layers.

    Args:
        axis: the axis of the mesh.
        vocab_size: the vocabulary of the whole model.
    """

    axis: str
    vocab_size: int

    def total(self, added: Tensor) -> Tensor:
        """The sum over the ranks of what their shares of a block return."""
        return all_reduce(added, self.axis)

    def embed(self, input_ids: Tensor, weight: Tensor) -> Tensor:
        """The embeddings [num_tokens, hidden_size], each from the rank that holds the token's row."""
        # A token of another rank looks up row 0, and adds 0 to the sum.
        local_ids = input_ids - axis_index(self.axis) * weight.shape[0]
        holds = (local_ids >= 0) & (local_ids < weight.shape[0])
        embeddings = F.embedding(torch.where(holds, local_ids, 0), weight)
        return all_reduce(torch.where(holds[:, None], embeddings, 0), self.axis)


@attrs.frozen
class SharedRows:
    """The rows of logits of each rank, if ranks share a head. Each rank computes its part of the
    vocabulary for all rows; an exchange then gives it the whole vocabulary for some of the rows,
    from which it samples.

    All ranks have the same number of rows. If the rows cannot be shared evenly, the rows of the
    last ranks overlap with those of the rank before. A single row belongs to every rank, so that
    nothing has to be gathered.

    Args:
        count: the number of rows.
        ranks: the ranks; None: one process has the whole head, and all rows.
    """

    count: int
    ranks: TensorRanks | None

    @property
    def size(self) -> int:
        """The number of rows of each rank."""
        if self.ranks is None:
            return self.count
        return -(-self.count // axis_size(self.ranks.axis))

    @property
    def first(self) -> int:
        """The first of this rank's rows."""
        if self.ranks is None:
            return 0
        return self._first(axis_index(self.ranks.axis))

    def _first(self, rank: int) -> int:
        return min(rank * self.size, self.count - self.size)

    def local_rows(self, x: Tensor) -> Tensor:
        """This rank's rows of a tensor [count, ...] that all ranks have."""
        if self.ranks is None:
            return x
        return x[self.first : self.first + self.size]

    def exchange(self, logits: Tensor) -> Tensor:
        """The logits [size, vocab_size] of this rank's rows, from the logits [count, columns] that
        each rank's share of the head gives for all rows."""
        if self.ranks is None:
            return logits
        starts = [self._first(rank) for rank in range(axis_size(self.ranks.axis))]
        # `all_to_all` splits evenly, so rows that belong to two ranks are sent twice.
        if self.count != len(starts) * self.size:
            logits = torch.cat([logits[start : start + self.size] for start in starts])
        # The columns beyond the vocabulary are the padding of the last ranks' shares.
        return all_to_all(logits, self.ranks.axis, split_dim=0, concat_dim=1)[
            :, : self.ranks.vocab_size
        ]

    def gather(self, rows: Tensor) -> Tensor:
        """All rows [count, ...] of a result, from each rank's rows of it [size, ...]."""
        if self.ranks is None or self.count == 1:
            return rows
        every = all_gather(rows, self.ranks.axis)
        size = self.size
        if len(every) == self.count:
            return every
        begins = [
            (rank * size, rank * size - self._first(rank))
            for rank in range(axis_size(self.ranks.axis))
        ]
        return torch.cat([every[start + overlap : start + size] for start, overlap in begins])

    def gather_all(self, *results: Tensor) -> tuple[Tensor, ...]:
        """All rows of several results, in one collective; each is [size] or [size, n], int64 or
        float32."""
        if self.ranks is None or self.count == 1:
            return results
        # Viewed as float32, so that logprobs keep their derivatives; int64 survives, as a copy does
        # not change any bits.
        words = [
            _viewed((x if x.ndim == 2 else x[:, None]).contiguous(), torch.float32) for x in results
        ]
        parts = self.gather(torch.cat(words, 1)).split([x.shape[1] for x in words], 1)
        dense = [part.clone(memory_format=torch.contiguous_format).view(-1) for part in parts]
        flat = [_viewed(part, x.dtype) for part, x in zip(dense, results, strict=True)]
        return tuple(
            part.view(self.count, *x.shape[1:]) for part, x in zip(flat, results, strict=True)
        )


def _viewed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor viewed as another dtype. If that is its own, the tensor itself, as a view would lose
    its derivatives."""
    if x.dtype == dtype:
        return x
    return x.view(dtype)
