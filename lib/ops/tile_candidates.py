"""The tiles that a product may take: those a search times, and among which `weft.ops.tiles` chooses."""

from collections.abc import Iterator

from weft.ops.tiles import SCAN_PAIRS, Tile, cdiv, power_of_two

SHARED_BYTES = 227 * 2**10
"""The shared memory of sm_90 that the tiles in flight of one program may take."""

_PROCESSORS = 132
"""The multiprocessors of an H100 or H200. Candidates do not depend on the device: all ranks have the same."""

_FEW_PROGRAMS, _MANY_PROGRAMS = _PROCESSORS // 3, 4 * _PROCESSORS
"""Fewer programs leave most multiprocessors idle; more gain nothing from a split, since four run on each at a time."""

_PARTS = (1, 2, 3, 4, 6, 8, 12, 16)
_PART_COLUMNS = 384
"""The fewest columns of a part. With fewer a program ends before its loads are in flight."""

_HEIGHTS = {16: ((64, 4), (128, 4), (128, 8)), 64: ((64, 4), (128, 4), (128, 8), (256, 8)), 256: ((128, 8),)}
_HEIGHTS |= {32: _HEIGHTS[16], 128: _HEIGHTS[64]}
"""Rows and warps, by a tile's tokens. A tile of 256 by 256 does not fit in the registers."""

_DEPTHS = {
    16: ((64, 4), (64, 6), (128, 3), (128, 4), (128, 5)),
    64: ((64, 3), (64, 5), (128, 3), (128, 4)),
    128: ((64, 3), (64, 4), (128, 2), (128, 3)),
}
_DEPTHS |= {32: _DEPTHS[16], 256: _DEPTHS[128][:2]}
"""Columns and stages in 16 bits."""

_FP8_STAGES = {16: (3, 4, 6), 32: (3, 4, 6), 64: (3, 4, 5), 128: (3, 4)}
"""Stages in FP8, whose columns are 128."""


def linear_candidates(tokens: int, rows: int, columns: int, fp8: bool) -> Iterator[Tile]:
    """The tiles of a linear layer with weights `[rows, columns]` that are worth timing.

    A tile is left out if its programs would be too few for the multiprocessors though more are possible, if it reads
    the weights more than twice and has programs enough without, or if it does not fit in shared memory. In FP8 a tile
    of more than 128 by 128 is left out too: it needs two accumulators.
    """
    for height in _HEIGHTS:
        if not _is_worth(height, tokens, rows):
            continue
        for width, warps in _HEIGHTS[height]:
            if fp8 and (height > 128 or width * height > 128 * 128):
                continue
            for across, stages in [(128, s) for s in _FP8_STAGES[height]] if fp8 else _DEPTHS[height]:
                if _fits(width, height, across, stages, fp8):
                    for parts in _parts(cdiv(rows, width) * cdiv(tokens, height), columns, across):
                        yield Tile(width, height, across, warps, stages, parts)


def _fits(rows: int, tokens: int, columns: int, stages: int, fp8: bool) -> bool:
    return (rows + tokens) * columns * (1 if fp8 else 2) * stages <= SHARED_BYTES


def _is_worth(height: int, tokens: int, rows: int) -> bool:
    """Whether tiles of so many tokens are neither mostly empty nor so small that the weights are read again for
    nothing."""
    across = cdiv(tokens, height)
    few = across * cdiv(rows, 64) <= 2 * _PROCESSORS
    return height <= max(16, power_of_two(tokens)) and (across <= 2 or height >= 64 or few)


def _parts(programs: int, columns: int, across: int) -> list[int]:
    """The numbers of parts to try. Every part has columns, the last one too."""
    steps = cdiv(columns, across)
    possible = {cdiv(steps, cdiv(steps, n)) for n in _PARTS if n == 1 or n * _PART_COLUMNS <= columns}
    least = min(_FEW_PROGRAMS, programs * max(possible))
    return sorted(n for n in possible if programs * n >= least and (n == 1 or programs * n <= _MANY_PROGRAMS))


_EXPERT_ROWS = {16: ((64, 4), (128, 4), (128, 8), (256, 8)), 64: ((128, 4), (128, 8), (256, 8))}
_EXPERT_ROWS |= {32: _EXPERT_ROWS[16], 128: ((128, 4), (128, 8))}
"""Rows and warps, by a tile's pairs."""


def expert_candidates(tokens: int, top_k: int, num_experts: int, fp8: bool) -> Iterator[Tile]:
    """The tiles of a product with experts that are worth timing.

    A tile has at most four times the pairs that an expert has on average, and at least a quarter of them: with more it
    is mostly empty, and with fewer it reads the weights more than four times.
    """
    pairs = tokens * top_k
    each = max(1, pairs // num_experts)
    for sort in (False, True) if pairs <= 2 * SCAN_PAIRS else (True,):
        for height in _EXPERT_ROWS if sort else (16,):
            if (height == 16 and each <= 128) or each // 4 <= height <= 4 * each:
                for rows, warps in _EXPERT_ROWS[height]:
                    for across, stages in ((128, 3), (128, 4)) if fp8 else ((64, 4), (128, 3)):
                        if _fits(rows, height, across, stages, fp8):
                            yield Tile(rows, height, across, warps, stages, sort=sort)
