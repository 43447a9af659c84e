"""The tile of a linear layer: for any shape the one with the least seconds by a model of the
device.

A choice is a function of shapes and of the device's name, so that all ranks make the same one;
nothing is tried out at run time.
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

# Bytes of weights that fit on 132 multiprocessors, two tiles of 64 KB on each, beside programs of
# other kernels.
_RESIDENT = 2**24
_MOST_AHEAD = 4
_MOST_PARTS = 16
# Tiles of columns of a program that asks for all of its weights at once, the parts of such a
# product, and the programs for which it is cut into more of them.
_PROGRAMS = 64
# The tile of many tokens whose product ends with a gate.
GATED_MANY = Tile(256, 128, 64, 8, 3)
# The least that such a product takes: to describe its tensors costs the host some 20 us, for which
# it has no time in steps of shorter ones.
_MANY_SECONDS = 3e-4
# The most tokens for which the segments of a batch-invariant product have programs of their own.
_SEGMENT_TOKENS = 128


@functools.lru_cache(maxsize=4096)
def linear_tile(
    tokens: int, rows: int, columns: int, fp8: bool, batch_invariant: bool = False
) -> Tile | None:
    """The tile of a linear layer; None: torch's own product."""
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
    """The tile of a product in 16 bits whose first half of rows is the gate of the second, so that
    it has one part; None: the product, and then the gate, take less."""
    best = linear_tile(tokens, rows, columns, False)
    gpu = device()
    if gpu is None or (best is not None and best.parts == 1):
        return best
    if (
        best is not None and best.stages == 1
    ):  # one part cannot ask for all weights at once (measured: slower)
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
    """The tile of many tokens' product in 16 bits that ends with a gate; None: `gated_tile` has
    what takes less."""
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
    """The tile of a product of few tokens, whose weights are on their way before the last kernel
    has ended.

    If all weights fit on the multiprocessors at once, each program asks for all of its own. The
    model knows times of products by themselves, which wait for no other kernel.
    """
    steps = cdiv(columns, 128)
    ahead = _MOST_AHEAD
    if rows * columns * (1 if fp8 else 2) > _RESIDENT or steps > _MOST_PARTS * ahead:
        return attrs.evolve(best, ahead=128 // best.columns)
    while ahead > 1 and cdiv(rows, 64) * cdiv(steps, ahead) < _PROGRAMS:
        ahead //= 2
    share = cdiv(steps, min(cdiv(steps, ahead), _MOST_PARTS))
    # Every part has columns
    return Tile(64, 16, 128, 4, 1, cdiv(steps, share), ahead=power_of_two(share))


def _rounded(tokens: int) -> int:
    """The number of tokens for which a tile is chosen: 1; then rounded up to multiples of 16, of 64
    beyond 128, of 256 beyond 1,024; beyond `MANY_TOKENS` to a power of two, for which kernels are
    compiled ahead of serving."""
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
    """The best choice; torch's product in FP8 takes a multiple of four tokens, and others are
    padded."""
    gpu = device()
    if gpu is None:
        if fp8:
            return _by_rule(tokens, rows, columns, fp8)
        return None
    # In bfloat16 torch's product overlaps with no other kernel, so for few tokens one of these
    # tiles is faster.
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
    """The best tile of one part, whether or not torch's product is faster."""
    return _best_of_parts(_rounded(tokens), rows, columns, fp8, 1)


def _by_rule(tokens: int, rows: int, columns: int, fp8: bool) -> Tile:
    """The tile of a linear layer on a GPU of another kind."""
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
    """The segments of a batch-invariant product with weights `[rows, columns]`: a function of the
    weights alone, of no device and no measurement.

    They are so many that about 128 programs, one for each multiprocessor, read the weights, and 256
    in FP8. Best tiles of at most 128 tokens that have as many parts take as long as those of any
    parts (median of 78 and 75 shapes).
    """
    programs = 256 if fp8 else 128
    parts = max(1, min(cdiv(columns, 128) // 4, programs // cdiv(rows, 64), 8))
    return cdiv(columns, segment_columns(columns, parts))


def linear_parts(
    tokens: int, rows: int, columns: int, fp8: bool, batch_invariant: bool = False
) -> int:
    """The parts of a linear layer on CUDA."""
    tile = linear_tile(tokens, rows, columns, fp8, batch_invariant)
    if tile is None or batch_invariant:
        if tile is None:
            return 1
        return tile.parts
    # Every part has columns, the last one too.
    steps = cdiv(columns, tile.columns)
    return cdiv(steps, cdiv(steps, tile.parts))
