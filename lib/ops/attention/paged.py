"""Attention over a paged KV cache, as one operator: write this step's keys and values, then attend
to the history."""

from collections.abc import Iterator
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.errors import DescriptorError, DeviceError
from weft.ops.attention.functional import attend, write_rows
from weft.ops.products.fp8 import BLOCK, ROUNDED, Quantized, empty_quantized, reference_quantize
from weft.ops.register import operator

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SLOT_DTYPES = (torch.int32, torch.int64)
_INT32 = (torch.int32,)

# The reference attends this many queries at a time, so that the memory for a long prompt's scores
# is linear in its length.
_QUERY_BLOCK = 256
# The rows and columns of batch-invariant products are padded to multiples of this.
_PADDED = 16


def _check(
    q: Tensor, k: Tensor | None, v: Tensor | None, kv_pages: Tensor, *where: Any, block: int = 0
) -> None:
    """Raise unless the arguments agree: DeviceError for a wrong device, DescriptorError for
    anything else.

    Args:
        block: the required size of a head; 0: any.
    """
    fault = _fault(q, k, v, kv_pages, *where[:5])
    if fault is None and len(where) > 6 and where[6] < 0:
        fault = "window", f"{where[6]}", "the positions that a query sees, 1 or more; 0: all"
    if fault is None and block and q.shape[2] != block:
        fault = (
            "q",
            f"heads of {q.shape[2]}, not blocks of {block}",
            "quantize(paged_attention(q, …).flatten(1))",
        )
    if fault is not None:
        name, problem, instead = fault
        raise DescriptorError(f"paged_attention(…, {name}=…)", f"{name} has {problem}", instead)


@operator(
    writes=("kv_pages",),
    kernel="weft.ops.attention.paged_triton:attend",
    fake=lambda q: torch.empty_like(q, memory_format=torch.contiguous_format),
    functional=attend,
    check=_check,
    returns_written=False,
)
def paged_attention(
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
    window: int = 0,
    batch_invariant: bool = False,
) -> Tensor:
    """Write `k` and `v` into `kv_pages` in place, then attend, causally, to each request's pages.

    Request r owns the tokens `query_start_loc[r]:query_start_loc[r + 1]` (possibly none). They are
    the last tokens of its context, which is `seq_lens[r]` long. Head h reads the key and value head
    `h // (H // Hkv)` (grouped-query attention).

    Padding is every token past `query_start_loc[-1]`, every token of a request with `seq_lens[r] ==
    0`, and every token with slot -1. Its output is 0 whatever it holds, and its keys and values are
    not written. Memory that no token reads may hold anything, NaN included: pages outside the used
    part of the table, the unused rest of a last page, and the positions of slot -1 at the end of a
    request. (A slot of -1 elsewhere in a request leaves a position that later tokens do read.)

    All writes come before all reads, so a request may read what another one writes in this call.
    Two tokens must not write to the same slot.

    The operator is `weft::paged_attention`. The CPU implementation processes one request after
    another, so that a result does not depend on the rest of the batch; in `weft.batch_invariant()`
    it processes one query after another.

    Args:
        q: `[T, H, D]`, float32, bfloat16 or float16. Sums are in float32.
        k: `[T, Hkv, D]`, of q's dtype; Hkv divides H.
        v: `[T, Hkv, D]`, of q's dtype. If k and v are None, each token's are already in its slot.
        kv_pages: `[2, P, page_size, Hkv, D]`, contiguous: a layer's pages, keys at 0, values at 1;
            written in place. Its dtype is q's, or float8_e4m3fn, which clamps values to ±448.
        slot_mapping: `[T]`, int32 or int64: token t is stored in page `slot // page_size` at `slot
            % page_size`.
        block_table: `[R, max_pages]`, int32: the pages of each request, in order.
        query_start_loc: `[R + 1]`, int32, ascending from 0.
        seq_lens: `[R]`, int32: the context of each request, this call's tokens included; 0 for a
            padded request.
        max_query_len: the most tokens of a request in this call. On a GPU it shapes the launch and
            may change the order of sums.
        scale: factor on the products of queries and keys, usually `D ** -0.5`.
        window: how many of the last positions a query sees, including its own (sliding-window
            attention, Beltagy et al. 2020); 0: all.

    Returns:
        `[T, H, D]`, q's dtype, contiguous.

    Raises:
        DescriptorError: shapes or dtypes contradict each other; on the CPU, also the lengths. On a
            GPU the values of the lengths are not checked, since the host would have to wait for
            them.
        DeviceError: the tensors are on several devices, or on CUDA without triton.

    >>> kv_pages = torch.zeros(2, 1, 4, 1, 2)  # one page of four slots
    >>> q, k, v = torch.ones(1, 1, 2), torch.ones(1, 1, 2), torch.tensor([[[3.0, 5.0]]])
    >>> slot, table = torch.tensor([0]), torch.tensor([[0]], dtype=torch.int32)
    >>> start, length = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    >>> paged_attention(q, k, v, kv_pages, slot, table, start, length, max_query_len=1, scale=1.0)
    tensor([[[3., 5.]]])
    >>> kv_pages[1, 0, :, 0]
    tensor([[3., 5.],
            [0., 0.],
            [0., 0.],
            [0., 0.]])
    """
    limit = block_table.shape[1] * kv_pages.shape[2]
    # A list, so that all requests are checked before anything is written.
    spans = list(
        _spans(query_start_loc.tolist(), seq_lens.tolist(), q.shape[0], max_query_len, limit)
    )
    slots = slot_mapping.tolist()
    live = [t for span in spans for t in range(span.start, span.end) if slots[t] >= 0]
    if k is not None and v is not None:
        _write(k, v, kv_pages, slot_mapping, live)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for span in spans:
        _attend(
            q,
            kv_pages,
            block_table[span.request],
            span.trimmed(slots),
            scale,
            window,
            out,
            1 if batch_invariant else _QUERY_BLOCK,
        )
    # Padding in the middle of a request got a result above.
    if len(live) != len(slots):
        out[slot_mapping < 0] = 0
    return out


def paged_attention_quantized(q: Tensor, *where: Any) -> Quantized:
    """`paged_attention` with its result quantised as by `weft.ops.products.fp8.quantize`, bit for
    bit, without an extra launch.

    The operator is an overload, `weft::paged_attention.quantized`, for an output projection in FP8.

    Args:
        q, where: the arguments of `paged_attention`, in order, with heads of 128.

    Returns:
        `[T, H * 128]`, in which each head is a block.

    Raises:
        DescriptorError: the heads are not 128 wide.

    It also raises what `paged_attention` raises.
    """
    _check(q, *where, block=BLOCK)
    return Quantized(*_paged_attention_quantized(q, *where))


def _functional_quantized(q: Tensor, *where: Any) -> tuple[Tensor, Tensor]:
    return reference_quantize(attend(q, *where).flatten(1))


@operator(
    name="paged_attention.quantized",
    parameters=paged_attention,
    writes=("kv_pages",),
    kernel="weft.ops.attention.paged_triton:attend_quantized",
    fake=lambda q: empty_quantized(q, q.shape[0], q.shape[1] * q.shape[2]),
    functional=_functional_quantized,
    no_derivative=ROUNDED,
)
def _paged_attention_quantized(
    q: Tensor, *where: Any, batch_invariant: bool = False
) -> tuple[Tensor, Tensor]:
    """The operator of `paged_attention_quantized`."""
    reference: Any = paged_attention.reference
    return reference_quantize(reference(q, *where, batch_invariant=batch_invariant).flatten(1))


@attrs.frozen
class _Span:
    """A request that is not padding. It owns the tokens `start:end`, the first of which is at
    position `past`."""

    request: int
    start: int
    end: int
    past: int

    def trimmed(self, slots: list[int]) -> "_Span":
        """The span without the padding at its end, whose slots belong to no context."""
        end = self.end
        while end > self.start and slots[end - 1] < 0:
            end -= 1
        return attrs.evolve(self, end=end)


def _spans(
    starts: list[int], seq_lens: list[int], num_tokens: int, max_query_len: int, limit: int
) -> Iterator[_Span]:
    """Check the lengths of the requests, and yield those that are not padding; a row of the table
    has pages for `limit` positions."""
    for request, seq_len in enumerate(seq_lens):
        start = starts[request]
        end = starts[request + 1]
        query_len = end - start
        if seq_len == 0 or query_len == 0:
            continue
        is_outside = start < 0 or end > num_tokens
        if is_outside or not 0 < query_len <= min(seq_len, max_query_len) or seq_len > limit:
            call = (
                f"paged_attention(query_start_loc={starts}, seq_lens={seq_lens},"
                f" max_query_len={max_query_len})"
            )
            problem = (
                f"request {request} has {query_len} queries, context {seq_len}, its pages hold"
                f" {limit}"
            )
            instead = (
                "give it no more queries than context or max_query_len, and no more context than"
                " its pages hold"
            )
            if is_outside:
                problem = (
                    f"request {request} has the tokens from {start} to {end}, and leaves the"
                    f" {num_tokens} tokens"
                )
                instead = "let query_start_loc run from 0 to at most the number of tokens"
            raise DescriptorError(call, problem, instead)
        yield _Span(request, start, end, seq_len - query_len)


def _write(k: Tensor, v: Tensor, kv_pages: Tensor, slot_mapping: Tensor, tokens: list[int]) -> None:
    """Write the keys and values of `tokens` to their slots."""
    if len(tokens) != k.shape[0]:
        index = torch.tensor(tokens, dtype=torch.int64)
        k = k[index]
        v = v[index]
        slot_mapping = slot_mapping[index]
    for pages, rows in zip(kv_pages.flatten(1, 2), (k, v), strict=True):
        write_rows(rows, slot_mapping, pages)


def _attend(
    q: Tensor,
    kv_pages: Tensor,
    pages: Tensor,
    span: _Span,
    scale: float,
    window: int,
    out: Tensor,
    block: int,
) -> None:
    """Fill the span's rows of `out` by softmax attention in float32, a block of queries at a time.

    The shapes below depend on the request alone, and every operand is in new memory (scaling copies
    q, indexing copies the pages). So alignment, on which the matrix products may depend, is the
    same in every batch. With one query at a time, the products' rows and columns are padded, so
    that torch multiplies in the same way for any number of heads: a rank may hold only some.
    """
    page_size, kv_heads = kv_pages.shape[2:4]
    for start in range(span.start, span.end, block):
        end = min(start + block, span.end)
        length = span.past + end - span.start
        history = (
            kv_pages.index_select(1, pages[: -(-length // page_size)])
            .flatten(1, 2)[:, :length]
            .float()
        )
        rows = _by_kv_head(q[start:end].float() * scale, kv_heads)
        num_rows, dim = rows.shape[1:]
        if block == 1:
            history = F.pad(history, (0, -dim % _PADDED))
            rows = F.pad(rows, (0, -dim % _PADDED, 0, -num_rows % _PADDED))
        keys, values = history.transpose(1, 2)
        scores = torch.bmm(rows, keys.transpose(1, 2))
        # A single query sees its whole history, unless a window hides some of it.
        if end - start > 1 or 0 < window < length:
            scores = _masked(scores, end - start, window)
        weighted = torch.bmm(torch.softmax(scores, dim=-1), values)[:, :num_rows, :dim]
        out[start:end] = (
            weighted.reshape(kv_heads, end - start, -1, q.shape[2]).transpose(0, 1).flatten(1, 2)
        )


def _by_kv_head(q: Tensor, kv_heads: int) -> Tensor:
    """`[n, H, D] -> [Hkv, n * (H // Hkv), D]`: the queries that share a key head become the rows of
    one matrix."""
    queries, heads, dim = q.shape
    grouped = q.reshape(queries, kv_heads, heads // kv_heads, dim).transpose(0, 1)
    return grouped.reshape(kv_heads, -1, dim).contiguous()


def _masked(scores: Tensor, queries: int, window: int) -> Tensor:
    """Mask, in `scores` `[Hkv, queries * group, length]` of the last `queries` positions, the
    future and what is outside the window."""
    kv_heads, rows, length = scores.shape
    visible = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
    if window:
        visible = visible.triu(length - queries - window + 1)
    masked = scores.view(kv_heads, queries, -1, length).masked_fill(~visible[:, None], -torch.inf)
    return masked.view(kv_heads, rows, length)


def _fault(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    kv_pages: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
) -> tuple[str, str, str] | None:
    """The first argument that contradicts the others, what is wrong with it, and what to pass
    instead."""
    ranks = (("q", q, "[T, H, D]"), ("kv_pages", kv_pages, "[2, P, page_size, Hkv, D]"))
    for name, tensor, layout in (*ranks, ("block_table", block_table, "[R, max_pages]")):
        if tensor.dim() != layout.count(",") + 1:
            return name, f"shape {list(tensor.shape)}", f"pass {name} of shape {layout}"
    tokens, heads, dim = q.shape
    _, pages, page_size, kv_heads, _ = kv_pages.shape
    requests = block_table.shape[0]
    device = q.device
    # If q's own dtype is not supported, the error lists the dtypes that are.
    floats = (q.dtype,) if q.dtype in _FLOATS else _FLOATS
    for name, tensor, shape, dtypes in (
        ("q", q, q.shape, floats),
        (
            "kv_pages",
            kv_pages,
            (2, pages, page_size, kv_heads, dim),
            (*floats, torch.float8_e4m3fn),
        ),
        *(
            (name, x, (tokens, kv_heads, dim), floats)
            for name, x in (("k", k), ("v", v))
            if x is not None
        ),
        ("slot_mapping", slot_mapping, (tokens,), _SLOT_DTYPES),
        ("block_table", block_table, block_table.shape, _INT32),
        ("query_start_loc", query_start_loc, (requests + 1,), _INT32),
        ("seq_lens", seq_lens, (requests,), _INT32),
    ):
        if tensor.shape != shape or tensor.dtype not in dtypes:
            problem = (
                f"shape {list(tensor.shape)} and dtype {tensor.dtype} beside q {list(q.shape)}"
                f" {q.dtype}"
            )
            beside = f"{problem}, kv_pages {list(kv_pages.shape)} and block_table {list(block_table.shape)}"
            return (
                name,
                beside,
                f"pass {name} of shape {list(shape)} as {' or '.join(map(str, dtypes))}",
            )
        if tensor.device != device:
            call = f"paged_attention(…, {name}=…)"
            problem = f"{name} on {tensor.device}, q on {device}"
            raise DeviceError(call, problem, f"{name}.to({str(device)!r})")
    if not dim or not kv_heads or heads % kv_heads:
        problem = f"{heads} heads, {kv_heads} key heads, head dimension {dim}"
        return (
            "q",
            problem,
            "let the number of key heads divide the number of heads, none of them 0",
        )
    if (k is None) != (v is None):
        return (
            "v" if v is None else "k",
            "no values beside it",
            "pass both k and v, or None for both",
        )
    if not kv_pages.is_contiguous():
        problem = f"strides {kv_pages.stride()} of shape {list(kv_pages.shape)}"
        return "kv_pages", problem, "pass one layer of contiguous pages, such as pages[layer]"
    if max_query_len < 1:
        instead = "pass the query length of the batch descriptor, or num_tokens for a ragged batch"
        return "max_query_len", f"{max_query_len}, and no request could have a token", instead
    return None
