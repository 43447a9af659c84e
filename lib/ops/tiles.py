"""The tiles of the products, and the number of parts that a product is split into: functions of shapes alone.

`tiles.json` beside this module has the best tiles measured on an H200, found by `python -m weft.proofs.bench.kernels`.
Other shapes, and more tokens, have defaults. Nothing is tried out at run time.
"""

import functools
import json
from pathlib import Path

import attrs

from weft.errors import DescriptorError

MEASURED = Path(__file__).parent / "tiles.json"
"""Lists of `{"tokens": the most tokens, "tile": the fields of a Tile, or null for torch's own product}`, by product."""

SCAN_PAIRS = 64
"""For shapes that were not measured: the most (token, expert) pairs that are not sorted; programs find their expert's
tokens themselves."""

MOST_SCANNED = 512
"""The most pairs for which a search for tiles tries programs that find their own pairs."""


@attrs.frozen
class Tile:
    """The part of a product that one program computes.

    Args:
        rows: of the weights, a power of two.
        tokens: of the activations, a power of two, at least 16. Below 64 the weights are the left operand, since the
            tensor cores of sm_90 take at least 64 rows of it.
        columns: at a time, a power of two; 128 in FP8.
        warps: of a program.
        stages: tiles in flight.
        parts: into which the columns are split, each with programs of its own; of a linear layer.
        sort: whether the pairs are sorted by expert beforehand; of experts.
        segments: into which a batch-invariant product splits the columns: each is summed by itself, and their sums are
            added first to last, by one program, or by the next kernel where the parts are as many.
    """

    rows: int
    tokens: int
    columns: int
    warps: int
    stages: int
    parts: int = 1
    sort: bool = False
    segments: int = 1


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n.

    >>> [power_of_two(n) for n in (0, 1, 5, 8)]
    [1, 1, 8, 8]
    """
    return 1 << (max(n, 1) - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; a call of Triton's own takes microseconds on the host.

    >>> cdiv(5, 2)
    3
    """
    return -(-a // b)


@functools.cache
def measured() -> dict[str, dict[int, Tile | None]]:
    """The table of `tiles.json`: for each key, tiles by the most tokens for which they were best, ascending; None:
    torch's own product was best."""
    table = json.loads(MEASURED.read_text(encoding="utf-8"))
    return {key: {row["tokens"]: row["tile"] and Tile(*row["tile"]) for row in rows} for key, rows in table.items()}


def linear_key(rows: int, columns: int, fp8: bool) -> str:
    """The key in `tiles.json` of a linear layer with weights `[rows, columns]`."""
    return f"linear {'fp8' if fp8 else 'bf16'} {rows}x{columns}"


def expert_key(rows: int, columns: int, num_experts: int, fp8: bool) -> str:
    """The key in `tiles.json` of the product of experts with weights `[num_experts, rows, columns]`."""
    return f"experts {'fp8' if fp8 else 'bf16'} {num_experts}x{rows}x{columns}"


def _is_measured(key: str, tokens: int) -> tuple[bool, Tile | None]:
    """Whether these shapes were measured for this many tokens, and the best tile."""
    return next(((True, tile) for most, tile in measured().get(key, {}).items() if tokens <= most), (False, None))


@functools.lru_cache(maxsize=4096)
def linear_tile(tokens: int, rows: int, columns: int, fp8: bool, batch_invariant: bool = False) -> Tile | None:
    """The tile of a linear layer; None: torch's own product, the default for plain weights."""
    known, tile = _is_measured(linear_key(rows, columns, fp8), tokens)
    if batch_invariant:
        segments = linear_segments(rows, columns, fp8)
        own = tile if known and tile is not None else _tile_by_rule(tokens, rows, columns, fp8)
        return attrs.evolve(own, parts=segments if tokens <= FEW_TOKENS else 1, segments=segments)
    if known:
        return tile
    return _tile_by_rule(tokens, rows, columns, fp8) if fp8 else None


def _tile_by_rule(tokens: int, rows: int, columns: int, fp8: bool) -> Tile:
    """The tile of a linear layer that was not measured."""
    if tokens > 64:
        if not fp8:
            return Tile(128, 128, 64, 8, 4)
        return Tile(64 if tokens <= 512 else 128, 64, 128, 4, 3)
    programs, steps = cdiv(rows, 64), cdiv(columns, 128)
    parts = max(1, min(steps // 4, 256 // programs, 8))
    return Tile(64, max(16, power_of_two(tokens)), 128, 4, 4, parts)


FEW_TOKENS = 128
"""The most tokens for which the segments of a batch-invariant product have programs of their own. It is also the number
of tokens whose measured parts are the segments."""


@functools.cache
def linear_segments(rows: int, columns: int, fp8: bool) -> int:
    """The segments of a batch-invariant product with weights `[rows, columns]`: a function of the weights alone.

    Where it was not measured, they are so many that about 128 programs, one for each multiprocessor, read the weights;
    more would cost time with many tokens, whose programs add up all segments.
    """
    known, tile = _is_measured(linear_key(rows, columns, fp8), FEW_TOKENS)
    by_rule = max(1, min(cdiv(columns, 128) // 4, 128 // cdiv(rows, 64), 8))
    parts = by_rule if not known else 1 if tile is None else tile.parts
    return cdiv(columns, segment_columns(columns, parts))


def segment_columns(columns: int, segments: int) -> int:
    """The columns of a segment, a multiple of every tile's."""
    return cdiv(cdiv(columns, 128), segments) * 128


def leaf_columns(columns: int, leaves: int, multiple: int = 1) -> int:
    """The columns of each of the equal leaves of a product; 0 leaves: all of them.

    Raises:
        DescriptorError: there are no such leaves, or they are no multiples.
    """
    if columns % (leaves * multiple if leaves > 1 else 1):
        instead = f"a number of leaves whose columns are {'whole' if multiple == 1 else f'a multiple of {multiple}'}"
        raise DescriptorError(f"a product with leaves={leaves}", f"{columns} columns", instead)
    return columns // max(leaves, 1)


@functools.lru_cache(maxsize=4096)
def expert_tile(tokens: int, top_k: int, rows: int, columns: int, num_experts: int, itemsize: int) -> Tile:
    """The tile of a product with experts.

    Args:
        rows: of the weights; in the first product 2 * I, and half of a tile's rows are gates.
        itemsize: bytes of an element of the weights; 1 is FP8.
    """
    if itemsize < 4:
        _, tile = _is_measured(expert_key(rows, columns, num_experts, itemsize == 1), tokens)
        if tile is not None:
            return tile
    each, sort, across = cdiv(tokens * top_k, num_experts), tokens * top_k > SCAN_PAIRS, 128 // itemsize
    if sort and each > 16:
        return Tile(128, 64, across, 4, 3, sort=True)
    return Tile(128, 16, across, 4, 3, sort=sort)


def linear_parts(tokens: int, rows: int, columns: int, fp8: bool, batch_invariant: bool = False) -> int:
    """The parts of a linear layer on CUDA."""
    tile = linear_tile(tokens, rows, columns, fp8, batch_invariant)
    if tile is None or batch_invariant:
        return 1 if tile is None else tile.parts
    # Every part has columns, the last one too.
    steps = cdiv(columns, tile.columns)
    return cdiv(steps, cdiv(steps, tile.parts))
