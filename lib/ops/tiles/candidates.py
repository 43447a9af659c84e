"""The candidate tiles of a linear layer."""

from collections.abc import Iterator

from weft.ops.tiles.tile import Tile, cdiv, power_of_two

# Rows, tokens, columns, warps and stages, by whether the product is in FP8. Of the 97 tiles that
# were timed, these are the ones without which many products would be slower. In 1,303 of 1,315
# measured products the best of these is within 1 % of the best of all.
TILES: dict[bool, tuple[tuple[int, int, int, int, int], ...]] = {
    False: (
        (64, 16, 64, 4, 6),
        (64, 16, 128, 4, 3),
        (64, 16, 128, 4, 4),
        (64, 16, 128, 4, 5),
        (64, 32, 64, 4, 6),
        (64, 32, 128, 4, 3),
        (64, 32, 128, 4, 4),
        (64, 32, 128, 4, 5),
        (64, 64, 64, 4, 3),
        (64, 64, 64, 4, 5),
        (64, 64, 128, 4, 3),
        (64, 64, 128, 4, 4),
        (128, 64, 64, 4, 5),
        (128, 64, 128, 4, 3),
        (128, 64, 128, 4, 4),
        (128, 64, 128, 8, 3),
        (64, 128, 64, 4, 3),
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 128, 128, 4, 3),
    ),
    True: (
        (64, 16, 128, 4, 3),
        (64, 16, 128, 4, 4),
        (64, 16, 128, 4, 6),
        (64, 32, 128, 4, 3),
        (64, 32, 128, 4, 4),
        (64, 32, 128, 4, 6),
        (128, 32, 128, 4, 3),
        (128, 32, 128, 4, 4),
        (128, 32, 128, 4, 6),
        (64, 64, 128, 4, 3),
        (64, 64, 128, 4, 4),
        (64, 64, 128, 4, 5),
        (128, 64, 128, 4, 3),
        (128, 64, 128, 4, 4),
        (128, 64, 128, 4, 5),
        (64, 128, 128, 4, 3),
    ),
}

_PARTS = (1, 2, 3, 4, 6, 8, 12, 16)
# The fewest columns of a part. With fewer, a program ends before all its loads are in flight.
_PART_COLUMNS = 256
# A third of an H100's multiprocessors, and four times their number. Fewer programs leave most
# multiprocessors idle; more gain nothing from a split. Candidates do not depend on the device.
_FEW_PROGRAMS = 44
_MANY_PROGRAMS = 528


def candidates(tokens: int, rows: int, columns: int, fp8: bool) -> list[Tile]:
    """The tiles that may be the best for a linear layer with weights `[rows, columns]`, each with
    several numbers of parts.

    A tile is left out if it would be mostly empty, or if it reads the weights more than twice
    although there would be enough programs without that. A number of parts is left out if it gives
    too many programs, or too few although more are possible.
    """
    tiles = []
    for tile in TILES[fp8]:
        height = tile[1]
        programs = cdiv(tokens, tile[1]) * cdiv(rows, tile[0])
        # 264 is twice the multiprocessors of an H100.
        is_spread = (
            height >= 64
            or cdiv(tokens, height) <= 2
            or cdiv(tokens, height) * cdiv(rows, 64) <= 264
        )
        if height <= max(16, power_of_two(tokens)) and is_spread:
            tiles += [
                Tile(*tile, parts=parts) for parts in _possible_parts(programs, columns, tile[2])
            ]
    return tiles


def _possible_parts(programs: int, columns: int, across: int) -> Iterator[int]:
    """The numbers of parts to consider, such that no part is empty, not even the last one."""
    steps = cdiv(columns, across)
    possible = {
        cdiv(steps, cdiv(steps, n)) for n in _PARTS if n == 1 or n * _PART_COLUMNS <= columns
    }
    least = min(_FEW_PROGRAMS, programs * max(possible))
    return (
        n
        for n in sorted(possible)
        if programs * n >= least and (n == 1 or programs * n <= _MANY_PROGRAMS)
    )


def tile_index(tile: Tile, fp8: bool) -> int:
    """The index of a tile in `TILES`, whatever its number of parts."""
    return TILES[fp8].index((tile.rows, tile.tokens, tile.columns, tile.warps, tile.stages))
