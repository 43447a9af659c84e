"""The CUDA implementation of `weft::paged_attention`, in Triton: three kernels, whose launches depend on shapes alone.

1. `write_kernel`, a program a token: k and v go to their slots; not where they were written before.
2. `attend_kernel`, a program for a block of queries of one request, a key head, and a share (split) of the context:
   softmax attention a tile of keys at a time, with a running maximum and sum (FlashAttention-2, Dao 2023, algorithm 1).
   The heads that share a key head are rows of one matrix, so that each key is loaded once for all of them.
3. `combine_kernel`, only where the context was split, for batches of few short queries (flash-decoding, Dao et al.
   2023): rescales and adds the shares.

Whichever is last writes the zeros of padding: a program those of its own request's tokens, and all programs in turn
those of the tokens behind the last request.

Nothing here reads a tensor's values on the host, so a CUDA graph can hold the whole and replay it for other lengths.
Import it only where triton is installed. With TRITON_INTERPRET=1 set before, it runs on CPU tensors, for tests; not
bfloat16, whose products triton's interpreter gets wrong.
"""

from typing import Any

import torch
from torch import Tensor

from weft.ops.blocks_triton import TRITON_DTYPES
from weft.ops.early_triton import early
from weft.ops.fp8 import empty_quantized
from weft.ops.norm_triton import quantize
from weft.ops.paged_attention_kernels_triton import attend_kernel, combine_kernel, write_kernel
from weft.ops.paged_attention_launch import plan_launch
from weft.ops.tiles import power_of_two

_LOG2_E = 1.4426950408889634


_SEARCHED = 128
"""Requests that are looked through at a time for the owner of a block: the same for all batches, so that they share a
compiled kernel."""


def attend(q: Tensor, *rest: Any) -> Tensor:
    """`weft.ops.paged_attention.paged_attention` by three kernels: its arguments, unchecked, and its result."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out if _attend_into(out, None, q, *rest) else out.zero_()


def attend_quantized(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """`weft::paged_attention.quantized`, of heads of 128."""
    values, scales = empty_quantized(q, q.shape[0], q.shape[1] * q.shape[2])
    return (values, scales) if _attend_into(values, scales, q, *rest) else quantize(torch.zeros_like(q).flatten(1))


Where = tuple[Tensor, Tensor, Tensor, Tensor]
"""slot_mapping, block_table, query_start_loc and seq_lens, contiguous."""


def _attend_into(
    out: Tensor,
    scales: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    kv_pages: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
) -> bool:
    """Write and attend; the results go to `out` `[T, H, D]`, or in FP8 `[T, H * D]`, with `scales` `[T, H]`.

    Returns:
        False where there is no request: then nothing is written.
    """
    if not seq_lens.numel():
        return False
    if not q.numel():
        return True
    where = (slot_mapping.contiguous(), block_table.contiguous(), query_start_loc.contiguous(), seq_lens.contiguous())
    # A launch goes to the current device, which need not be that of the tensors.
    with torch.cuda.device_of(q):
        if k is not None and v is not None:
            _launch_write(_packed_heads(k), _packed_heads(v), kv_pages, where)
        _launch_attend(_packed_heads(q), kv_pages, where, max_query_len, scale, out, scales)
    return True


def _packed_heads(x: Tensor) -> Tensor:
    """`x` `[T, heads, D]` with each token's heads contiguous; tokens may be apart, as in a slice of fused q, k, v."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _launch_write(k: Tensor, v: Tensor, kv_pages: Tensor, where: Where) -> None:
    slot_mapping, _, query_start_loc, seq_lens = where
    width = k[0].numel()
    write_kernel[(k.shape[0],)](
        k,
        v,
        kv_pages,
        slot_mapping,
        query_start_loc,
        seq_lens,
        seq_lens.shape[0],
        kv_pages.stride(0),
        k.stride(0),
        v.stride(0),
        WIDTH=width,
        BLOCK=min(1024, power_of_two(width)),
        BLOCK_R=_SEARCHED,
        **early(k),
    )


def _launch_attend(
    q: Tensor, kv_pages: Tensor, where: Where, max_query_len: int, scale: float, out: Tensor, scales: Tensor | None
) -> None:
    slot_mapping, block_table, query_start_loc, seq_lens = where
    (tokens, heads, dim), (_, _, page_size, kv_heads, _) = q.shape, kv_pages.shape
    requests, group, context = seq_lens.shape[0], heads // kv_heads, block_table.shape[1] * page_size
    plan = plan_launch(
        tokens, requests, group, kv_heads, dim, context, max_query_len, q.element_size(), _processors(q.device)
    )
    split = plan.splits > 1
    shares = q.new_empty((tokens, heads, plan.splits, dim), dtype=torch.float32) if split else out
    maxima, sums = q.new_empty((2, tokens, heads, plan.splits), dtype=torch.float32) if split else (out, out)
    quantized, scales = scales is not None, out if scales is None else scales
    attend_kernel[(plan.blocks, kv_heads, plan.splits)](
        q,
        kv_pages,
        *where,
        shares,
        maxima,
        sums,
        scales,
        requests,
        tokens,
        kv_pages.stride(0),
        q.stride(0),
        block_table.stride(0),
        scale * _LOG2_E,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE_SIZE=page_size,
        QUERIES=plan.queries,
        ROWS=plan.rows,
        KEYS=plan.keys,
        DIMS=plan.dims,
        SPLITS=plan.splits,
        ONE_BLOCK=plan.one_block,
        QUANTIZE=quantized and not split,
        BLOCK_R=1 if plan.one_block else _SEARCHED,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **early(q),
    )
    if split:
        combine_kernel[(requests, max_query_len, heads)](
            shares,
            maxima,
            sums,
            slot_mapping,
            query_start_loc,
            seq_lens,
            out,
            scales,
            tokens,
            DIM=dim,
            DIMS=plan.dims,
            SPLITS=plan.splits,
            QUANTIZE=quantized,
            TYPE=TRITON_DTYPES[q.dtype],
            **early(q),
        )


def _processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; the interpreter, on the CPU, plans as for one with 4."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4
