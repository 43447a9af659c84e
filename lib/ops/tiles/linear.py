"""The tile of a linear layer: for any shape, the one that a model of the device predicts to be
fastest.

The choice is a function of the shapes and the device's name, so that all ranks make the same one;
nothing is timed at run time.
"""

import functools

import attrs

from weft.ops.products.fp8 import BLOCK
from weft.ops.tiles.candidates import candidates
from weft.ops.tiles.formula import COPY_SECONDS, gate_seconds, gated_many_seconds
from weft.ops.tiles.gpus import MEASURED, device
from weft.ops.tiles.model import model
from weft.ops.tiles.tile import FEW_TOKENS, MANY_TOKENS, Tile, cdiv, power_of_two, segment_columns
from weft.torchapi.scaled_mm import scaled_mm_lacks

# Bytes of weights that fit on 132 multiprocessors, with two tiles of 64 KB on each, beside programs
# of other kernels.
_RESIDENT = 2**24
# For products whose programs load all of their weights at once: the most tiles of columns of a
# program, the most parts, and the number of programs below which the product is cut into more
# parts.
_MOST_AHEAD = 4
_MOST_PARTS = 16
_PROGRAMS = 64
# The tile for many tokens whose product ends with a gate.
GATED_MANY = Tile(256, 128, 64, 8, 3)
# The shortest such product, in seconds: the host takes some 20 us to build its tensor descriptors,
# and shorter products do not hide that.
_MANY_SECONDS = 3e-4
# The most tokens for which each segment of a batch-invariant product has separate programs.
_SEGMENT_TOKENS = 128


@functools.lru_cache(maxsize=4096)
def linear_tile(
    tokens: int, rows: int, columns: int, fp8: bool, batch_invariant: bool = False
) -> Tile | None:
    """The tile of a linear layer; None: use torch's own product."""
    if not batch_invariant:
        best = _best(_rounded(tokens), tokens % 4 > 0, rows, columns, fp8)
        if tokens > FEW_TOKENS or best is None or device() is None:
            return best
        return _ahead(best, rows, columns, fp8)
    segments = linear_segments(rows, columns, fp8)
    if tokens <= _SEGMENT_TOKENS:
        parts = segments
    else:
        parts = 1
    if device() is None:
        return attrs.evolve(_by_rule(tokens, rows, columns, fp8), parts=parts, segments=segments)
    return attrs.evolve(
        _best_of_parts(_rounded(tokens), rows, columns, fp8, parts), segments=segments
    )


@functools.lru_cache(maxsize=4096)
def gated_tile(tokens: int, rows: int, columns: int) -> Tile | None:
    """The one-part tile of a 16-bit product that ends with a gate, in which the first half of the
    rows gates the second; None: a product and then a separate gate take less time."""
    best = linear_tile(tokens, rows, columns, False)
    gpu = device()
    if gpu is None or (best is not None and best.parts == 1):
        return best
    # One part could not load all weights at once as this tile does, and was measured to be slower.
    if best is not None and best.stages == 1:
        return None
    whole = one_part_tile(tokens, rows, columns, False)
    apart, together = model(False).costs(_rounded(tokens), rows, columns, [best, whole], gpu)
    if together > apart + gate_seconds(tokens, rows):
        return None
    if tokens <= FEW_TOKENS:
        return attrs.evolve(whole, ahead=128 // whole.columns)
    return whole


@functools.lru_cache(maxsize=4096)
def gated_many_tile(tokens: int, rows: int, columns: int) -> Tile | None:
    """The tile of a 16-bit product of many tokens that ends with a gate; None: the choice of
    `gated_tile` takes less time."""
    gpu = device()
    if tokens > MANY_TOKENS:
        tokens = _rounded(tokens)
    seconds = gated_many_seconds(tokens, rows, columns, GATED_MANY, gpu or MEASURED)
    if gpu is None or seconds < _MANY_SECONDS:
        return None
    one = gated_tile(tokens, rows, columns)
    other = one or linear_tile(tokens, rows, columns, False)
    best = model(False).costs(_rounded(tokens), rows, columns, [other], gpu)[0]
    best += gate_seconds(tokens, rows) if one is None else 0.0
    if seconds < best:
        return GATED_MANY
    return None


def _ahead(best: Tile, rows: int, columns: int, fp8: bool) -> Tile:
    """The tile of a product of few tokens, which starts to load weights before the previous kernel
    has ended.

    If all weights fit on the multiprocessors at once, each program loads all of its own together.
    The model cannot choose this: it was fitted to single products, which wait for no other kernel.
    """
    steps = cdiv(columns, 128)
    ahead = _MOST_AHEAD
    if rows * columns * (1 if fp8 else 2) > _RESIDENT or steps > _MOST_PARTS * ahead:
        return attrs.evolve(best, ahead=128 // best.columns)
    while ahead > 1 and cdiv(rows, 64) * cdiv(steps, ahead) < _PROGRAMS:
        ahead //= 2
    share = cdiv(steps, min(cdiv(steps, ahead), _MOST_PARTS))
    # The number of parts for which none is empty
    return Tile(64, 16, 128, 4, 1, cdiv(steps, share), ahead=power_of_two(share))


def _rounded(tokens: int) -> int:
    """The number of tokens for which a tile is chosen.

    1 stays; other numbers are rounded up to a multiple of 16, of 64 beyond 128, and of 256 beyond
    1,024. Beyond `MANY_TOKENS` they are rounded up to a power of two, the numbers for which kernels
    are compiled ahead of serving.
    """
    if tokens > MANY_TOKENS:
        return power_of_two(tokens)
    if tokens <= 128:
        step = 16
    elif tokens <= 1024:
        step = 64
    else:
        step = 256
    if tokens > 1:
        return cdiv(max(tokens, 1), step) * step
    return 1


@functools.lru_cache(maxsize=4096)
def _best(tokens: int, is_padded: bool, rows: int, columns: int, fp8: bool) -> Tile | None:
    """The best tile, or None for torch's product; `is_padded` says that the number of tokens is no
    multiple of four, to which torch's FP8 product must pad it."""
    gpu = device()
    if gpu is None:
        if fp8:
            return _by_rule(tokens, rows, columns, fp8)
        return None
    # In bfloat16 torch's product does not overlap with other kernels, so for few tokens a tile of
    # weft's kernel is faster.
    # In FP8, torch's is faster from some 200 tokens on: 1.8 times as fast at 2,048, on an H100.
    takes_fp8 = fp8 and scaled_mm_lacks() is None and rows % BLOCK == columns % BLOCK == 0
    if fp8:
        has_library = takes_fp8
    else:
        has_library = tokens > FEW_TOKENS
    choices = [*candidates(tokens, rows, columns, fp8), *([None] if has_library else [])]
    costs = model(fp8).costs(tokens, rows, columns, choices, gpu)
    if fp8 and has_library and is_padded:
        costs[-1] += COPY_SECONDS + tokens * columns / 1e12
    return choices[int(costs.argmin())]


@functools.lru_cache(maxsize=4096)
def _best_of_parts(tokens: int, rows: int, columns: int, fp8: bool, parts: int) -> Tile:
    """The best tile with this many parts."""
    tiles = [
        *dict.fromkeys(
            attrs.evolve(tile, parts=parts) for tile in candidates(tokens, rows, columns, fp8)
        )
    ]
    return tiles[int(model(fp8).costs(tokens, rows, columns, tiles, device() or MEASURED).argmin())]


def one_part_tile(tokens: int, rows: int, columns: int, fp8: bool) -> Tile:
    """The best tile with one part, even if torch's product is faster."""
    return _best_of_parts(_rounded(tokens), rows, columns, fp8, 1)


def _by_rule(tokens: int, rows: int, columns: int, fp8: bool) -> Tile:
    """The tile of a linear layer on a GPU without measurements."""
    if tokens > 64:
        if not fp8:
            return Tile(128, 128, 64, 8, 4)
        return Tile(64 if tokens <= 512 else 128, 64, 128, 4, 3)
    programs = cdiv(rows, 64)
    steps = cdiv(columns, 128)
    parts = max(1, min(steps // 4, 256 // programs, 8))
    return Tile(64, max(16, power_of_two(tokens)), 128, 4, 4, parts)


@functools.cache
def linear_segments(rows: int, columns: int, fp8: bool) -> int:
    """The number of segments of a batch-invariant product with weights `[rows, columns]`.

    It depends on the weights alone, not on a device or a measurement, since it fixes the order of
    sums. It is chosen so that about 128 programs, one for each multiprocessor, read the weights
    (256 in FP8). For at most 128 tokens, the best tiles with this many parts take as long as the
    best with any number of parts (median of 78 and 75 shapes).
    """
    programs = 256 if fp8 else 128
    parts = max(1, min(cdiv(columns, 128) // 4, programs // cdiv(rows, 64), 8))
    return cdiv(columns, segment_columns(columns, parts))


def linear_parts(
    tokens: int, rows: int, columns: int, fp8: bool, batch_invariant: bool = False
) -> int:
    """The number of parts of a linear layer on CUDA."""
    tile = linear_tile(tokens, rows, columns, fp8, batch_invariant)
    if tile is None or batch_invariant:
        if tile is None:
            return 1
        return tile.parts
    # No part is empty, not even the last one.
    steps = cdiv(columns, tile.columns)
    return cdiv(steps, cdiv(steps, tile.parts))
