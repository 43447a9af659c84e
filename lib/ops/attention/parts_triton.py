"""Decodes in equal parts, in Triton: the tiles of all requests one after the other, and each program some of them.

Requests of a batch have contexts of any lengths, which the host does not know where a graph is replayed. So each
program counts their tiles, takes its part of them, which may begin in one request and end in another, and writes the
result of a request that is its own as a whole; of the others it writes a share to be combined (Stream-K, Osama et al.
2023, https://arxiv.org/abs/2301.03598). A tile is UNIT positions: those of a product, or a segment.

Import this module only where triton is installed.
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def count_tiles(request, query_start_loc, seq_lens, num_reqs, UNIT: tl.constexpr, WINDOW: tl.constexpr):
    """The first tile that a request's queries see, and the number of them, for one request or several. Those from
    num_reqs on, those without a query and padded ones have none."""
    there = request < num_reqs
    start = tl.load(query_start_loc + request, mask=there, other=0)
    query_len = tl.load(query_start_loc + request + 1, mask=there, other=0) - start
    seq_len = tl.load(seq_lens + request, mask=there, other=0)
    first = start * 0
    if WINDOW:
        first = tl.maximum(seq_len - query_len + 1 - WINDOW, 0) // UNIT
    return first, tl.where(query_len > 0, tl.cdiv(seq_len, UNIT) - first, 0)


@triton.jit
def count_all(query_start_loc, seq_lens, num_reqs, UNIT: tl.constexpr, WINDOW: tl.constexpr, BLOCK_R: tl.constexpr):
    """The tiles of each request `[BLOCK_R]`, and of all, at least 1."""
    _, tiles = count_tiles(tl.arange(0, BLOCK_R), query_start_loc, seq_lens, num_reqs, UNIT, WINDOW)
    return tiles, tl.maximum(tl.sum(tiles, axis=0), 1)


@triton.jit
def first_of(part, total, parts):
    """The first tile of a part; one of the next begins where it ends. Parts differ by one tile at most."""
    return part * total // parts


@triton.jit
def part_of(tile, total, parts):
    """The part that has a tile."""
    return ((tile + 1) * parts - 1) // total


@triton.jit
def share_of(part, begins):
    """The place of a part's share of a request. A part has two at most: one of a request that began in an earlier part,
    and one of a request that `begins` in it and goes on in the next."""
    return 2 * part + tl.where(begins, 1, 0)
