"""Tiles, and those of the products with experts: a function of shapes alone.

`tiles.json` beside this module has the best tiles of experts measured on an H200. Other shapes, and more tokens, have
defaults. Nothing is tried out at run time. Linear layers have a model: `weft.ops.linear_tiles`.
"""

import functools
import json
from pathlib import Path

import attrs

from weft.errors import DescriptorError
from weft.ops.gpus import device

MEASURED = Path(__file__).parent / "tiles.json"
"""Lists of `{"tokens": the most tokens, "tile": the fields of a Tile}`, by product."""

SCAN_PAIRS = 64
"""The (token, expert) pairs for which a program that finds its expert's tokens itself is made at least."""

_FEW_PAIRS = 4
"""The most pairs that are not sorted, for shapes that were not measured."""

_BY_PAIRS: dict[bool, tuple[tuple[float, tuple[int, int, int, int, int]], ...]] = {
    False: ((8, (64, 16, 128, 4, 3)), (32, (64, 32, 128, 4, 3)), (float("inf"), (256, 64, 64, 8, 4))),
    True: ((8, (64, 16, 128, 4, 3)), (float("inf"), (128, 64, 128, 4, 3))),
}
"""Rows, tokens, columns, warps and stages of other shapes, by whether in FP8, each up to a number of pairs per expert.
On ten sets of experts and six numbers of tokens, with at most 256 pairs per expert, timed on an H100 (`python -m
weft.proofs.bench.tile_search --experts`), both products and the sort take 0.5 and 1.1 % longer than with the best
tiles (median), 2.6 and 5.8 % in the 90th percentile, and 6 and 17 % at the worst."""


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
def measured() -> dict[str, dict[int, Tile]]:
    """The table of `tiles.json`: for each key, tiles by the most tokens for which they were best, ascending."""
    table = json.loads(MEASURED.read_text(encoding="utf-8"))
    return {key: {row["tokens"]: Tile(*row["tile"]) for row in rows} for key, rows in table.items()}


def expert_key(rows: int, columns: int, num_experts: int, fp8: bool) -> str:
    """The key in `tiles.json` of the product of experts with weights `[num_experts, rows, columns]`."""
    return f"experts {'fp8' if fp8 else 'bf16'} {num_experts}x{rows}x{columns}"


def _measured_tile(key: str, tokens: int) -> Tile | None:
    """The best tile, if these shapes were measured for this many tokens."""
    return next((tile for most, tile in measured().get(key, {}).items() if tokens <= most), None)


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
        tile = _measured_tile(expert_key(rows, columns, num_experts, itemsize == 1), tokens)
        if tile is not None:
            return tile
    pairs = tokens * top_k
    if itemsize < 4 and device() is not None:
        own = next(own for most, own in _BY_PAIRS[itemsize == 1] if pairs <= most * num_experts)
        return Tile(*own, sort=pairs > _FEW_PAIRS)
    each, sort, across = cdiv(pairs, num_experts), pairs > SCAN_PAIRS, 128 // itemsize
    if sort and each > 16:
        return Tile(128, 64, across, 4, 3, sort=True)
    return Tile(128, 16, across, 4, 3, sort=sort)
