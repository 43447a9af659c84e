"""The tiles of the products with experts: a function of shapes alone.

`experts.json` beside this module has the best tiles for some shapes, measured on an H200. For a
single token, for more tokens than measured, and for other shapes, rules choose the tile. Nothing is
timed at run time.
"""

import functools
import json
from pathlib import Path

from weft.ops.tiles.gpus import device
from weft.ops.tiles.tile import Tile, cdiv

# For each product, a list of `{"tokens": the most tokens, "tile": the fields of a Tile}`.
MEASURED = Path(__file__).parent / "experts.json"

# In float32, and on GPUs without measurements, each program finds its expert's tokens itself if
# there are at most this many (token, expert) pairs. It is also the smallest number of pairs for
# which such a kernel is compiled.
SCAN_PAIRS = 64

# Rows, tokens, columns, warps and stages for other shapes, by whether the weights are in FP8, each
# up to a number of pairs per expert. They were timed on an H100 with ten sets of experts and eight
# numbers of tokens from 1 on, with at most 256 pairs per expert
# (`python -m weft.proofs.evidence.bench.tiles.search --experts`, and again with
# `--counts 1 2 4 8`). Both products and the sort take 0.7 and 1.2 % longer than with the best tiles
# (median), 2.8 and 5.8 % longer at the 90th percentile, and 6 and 9.5 % at worst.
_BY_PAIRS: dict[bool, tuple[tuple[float, tuple[int, int, int, int, int]], ...]] = {
    False: (
        (8, (64, 16, 128, 4, 3)),
        (32, (64, 32, 128, 4, 3)),
        (float("inf"), (256, 64, 64, 8, 4)),
    ),
    True: ((8, (64, 16, 128, 4, 3)), (float("inf"), (128, 64, 128, 4, 3))),
}


@functools.cache
def measured() -> dict[str, dict[int, Tile]]:
    """The table of `experts.json`: for each key, the best tile up to each number of tokens, in
    ascending order."""
    table = json.loads(MEASURED.read_text(encoding="utf-8"))
    return {key: {row["tokens"]: Tile(*row["tile"]) for row in rows} for key, rows in table.items()}


def expert_key(rows: int, columns: int, num_experts: int, fp8: bool) -> str:
    """The key in `experts.json` for experts with weights `[num_experts, rows, columns]`."""
    return f"experts {'fp8' if fp8 else 'bf16'} {num_experts}x{rows}x{columns}"


def _measured_tile(key: str, tokens: int) -> Tile | None:
    """The measured best tile, or None if these shapes were not measured for this many tokens."""
    return next((tile for most, tile in measured().get(key, {}).items() if tokens <= most), None)


@functools.lru_cache(maxsize=4096)
def expert_tile(
    tokens: int, top_k: int, rows: int, columns: int, num_experts: int, itemsize: int
) -> Tile:
    """The tile of a product with experts.

    Args:
        rows: the rows of the weights; in the first product 2 * I, and half of a tile's rows are
            gates.
        itemsize: the bytes of an element of the weights; 1 means FP8.
    """
    # One token has nothing to sort. The longer a program's sum, the more of it should be in flight.
    if itemsize < 4 and tokens == 1:
        return Tile(
            64,
            16,
            128,
            4,
            4 if itemsize > 1 else 3 if columns < 1024 else 4 if columns < 2048 else 6,
        )
    if itemsize < 4:
        tile = _measured_tile(expert_key(rows, columns, num_experts, itemsize == 1), tokens)
        if tile is not None:
            return tile
    pairs = tokens * top_k
    if itemsize < 4 and device() is not None:
        tile_sizes = next(
            tile_sizes
            for most, tile_sizes in _BY_PAIRS[itemsize == 1]
            if pairs <= most * num_experts
        )
        return Tile(*tile_sizes, sort=True)
    each = cdiv(pairs, num_experts)
    sort = pairs > SCAN_PAIRS
    across = 128 // itemsize
    if sort and each > 16:
        return Tile(128, 64, across, 4, 3, sort=True)
    return Tile(128, 16, across, 4, 3, sort=sort)
