"""Contexts that several programs share, in Triton: which tiles of which requests a program attends
to.

The contexts of a batch have any lengths, which the host does not know when a graph is replayed. So
each program counts the tiles of all requests. If the contexts are about equal, or short, each
request has the same number of programs, which take equal shares of its tiles (flash-decoding, Dao
et al. 2023). Otherwise the tiles of all requests, one after the other, are cut into equal parts.
Each program takes one part, which may begin in one request and end in another (Stream-K, Osama et
al. 2023, https://arxiv.org/abs/2301.03598). If a program attends to a request's whole context, it
writes the result; otherwise it writes a share, to be combined. A tile is UNIT positions: the keys
of one product, or a segment.

Import this module only where triton is installed.
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def count_tiles(
    request,
    query_start_loc,
    seq_lens,
    num_reqs,
    QUERIES: tl.constexpr,
    UNIT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The first tile that a request's queries see, and the number of such tiles, for one request or
    several.

    Requests from num_reqs on, padded requests, and requests without a query or with more than
    QUERIES have no tiles.
    """
    there = request < num_reqs
    start = tl.load(query_start_loc + request, mask=there, other=0)
    query_len = tl.load(query_start_loc + request + 1, mask=there, other=0) - start
    seq_len = tl.load(seq_lens + request, mask=there, other=0)
    first = start * 0
    if WINDOW:
        first = tl.maximum(seq_len - query_len + 1 - WINDOW, 0) // UNIT
    return first, tl.where(
        (query_len > 0) & (query_len <= QUERIES), tl.cdiv(seq_len, UNIT) - first, 0
    )


@triton.jit
def count_all(
    query_start_loc,
    seq_lens,
    num_reqs,
    parts,
    slack,
    spare,
    QUERIES: tl.constexpr,
    SPLITS: tl.constexpr,
    UNIT: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """The number of tiles of each request `[BLOCK_R]`, the total, at least 1, and whether each
    request has SPLITS programs.

    That is so if the largest share would have at most `slack` eighths of a part plus `spare` tiles,
    the additional cost of parts.
    """
    _, tiles = count_tiles(
        tl.arange(0, BLOCK_R), query_start_loc, seq_lens, num_reqs, QUERIES, UNIT, WINDOW
    )
    total = tl.maximum(tl.sum(tiles, axis=0), 1)
    largest = tl.cdiv(tl.max(tiles, axis=0), SPLITS) - spare
    # In 64 bits, since these products may overflow 32.
    return tiles, total, tl.cast(largest, tl.int64) * parts * 8 <= tl.cast(total, tl.int64) * slack


@triton.jit
def split_of(split, tiles, SPLITS: tl.constexpr):
    """The first of a request's tiles in one of its shares, and the tile after the last. If there
    are fewer tiles than splits, the last splits are empty."""
    few = tiles < SPLITS
    first = tl.where(few, split, split * tiles // SPLITS)
    end = tl.where(few, split + 1, (split + 1) * tiles // SPLITS)
    return tl.minimum(first, tiles), tl.minimum(end, tiles)


@triton.jit
def first_of(part, total, parts):
    """The first tile of a part. If the parts do not divide the total, the first parts have one tile
    more than the others."""
    return part * (total // parts) + tl.minimum(part, total % parts)


@triton.jit
def requests_of(
    index,
    query_start_loc,
    seq_lens,
    num_reqs,
    parts,
    slack,
    spare,
    QUERIES: tl.constexpr,
    SPLITS: tl.constexpr,
    UNIT: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """The requests, or the part of their contexts, that program `index` attends to.

    Returns:
        The program's first request; its number of requests; whether contexts are about equal, so
        that it has a split of one request; and, if they are not: the total number of tiles, the
        first tile of its part, the tile after the last, and the number of tiles of the requests
        before its first.
    """
    tiles, total, even = count_all(
        query_start_loc,
        seq_lens,
        num_reqs,
        parts,
        slack,
        spare,
        QUERIES,
        SPLITS,
        UNIT,
        WINDOW,
        BLOCK_R,
    )
    first = index // SPLITS
    begin_at = 0
    end_at = 0
    before = 0
    number = tl.where(first < num_reqs, 1, 0)
    if not even:
        ends = tl.cumsum(tiles, axis=0)
        begin_at = first_of(index, total, parts)
        end_at = first_of(index + 1, total, parts)
        before = tl.sum(tl.where(ends <= begin_at, tiles, 0), axis=0)
        first = tl.sum((ends <= begin_at).to(tl.int32), axis=0)
        number = tl.minimum(tl.sum((ends < end_at).to(tl.int32), axis=0) + 1, num_reqs) - first
    return first, number, even, total, begin_at, end_at, before


@triton.jit
def part_of(tile, total, parts):
    """The part that contains a tile, the inverse of `first_of`."""
    size = total // parts
    larger = total % parts
    edge = larger * (size + 1)
    return tl.where(tile < edge, tile // (size + 1), larger + (tile - edge) // tl.maximum(size, 1))


@triton.jit
def place_of(part, begins):
    """The place of a part's share of a request. A part has at most two shares: one of a request
    that began in an earlier part, and one of a request that `begins` in it and continues in the
    next."""
    return 2 * part + tl.where(begins, 1, 0)
