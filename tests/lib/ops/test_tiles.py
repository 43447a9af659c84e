"""The tiles of the products with experts: measured ones are well formed, and every other shape has a default."""

import json

import pytest
from hypothesis import given, strategies as st

from weft.ops import tiles
from weft.ops.tiles import MEASURED, SCAN_PAIRS, Tile, expert_key, expert_tile

QWEN = {"first": expert_key(1536, 2048, 128, True), "second": expert_key(2048, 768, 128, True)}


def assert_fits(tile: Tile, itemsize: int) -> None:
    for size in (tile.rows, tile.tokens, tile.columns, tile.warps):
        assert size & (size - 1) == 0
    assert tile.tokens >= 16
    assert min(tile.stages, tile.parts) >= 1
    assert tile.columns == 128 or itemsize > 1  # a scale covers as many
    # The shared memory of sm_90 that the tiles in flight take.
    assert (tile.rows + tile.tokens) * tile.columns * itemsize * tile.stages <= 227 * 2**10


def test_what_was_measured_fits() -> None:
    assert json.loads(MEASURED.read_text()).keys() == tiles.measured().keys()
    for key, rows in tiles.measured().items():
        assert list(rows) == sorted(rows)
        for tile in rows.values():
            assert_fits(tile, 1 if " fp8 " in key else 2)


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 64, 100, 128, 129, 256])
def test_the_pairs_of_both_products_are_sorted_once(tokens: int) -> None:
    """The measured tiles of Qwen3-30B-A3B sort once: a second sort would take some 4 microseconds more."""
    first, second = (
        expert_tile(tokens, 8, *shape, num_experts=128, itemsize=1) for shape in ((1536, 2048), (2048, 768))
    )
    measured = [next(tile for most, tile in tiles.measured()[key].items() if tokens <= most) for key in QWEN.values()]
    assert [first, second] == measured
    assert first.sort == second.sort
    assert first.tokens == second.tokens or not first.sort


sizes = st.sampled_from((64, 100, 128, 768, 2048, 5120))


@given(tokens=st.integers(1, 10_000), top_k=st.integers(1, 8), rows=sizes, columns=sizes, fp8=st.booleans())
def test_every_shape_has_a_tile(tokens: int, top_k: int, rows: int, columns: int, fp8: bool) -> None:
    for itemsize in (1,) if fp8 else (2, 4):
        tile = expert_tile(tokens, top_k, rows, columns, 60, itemsize)
        assert_fits(tile, itemsize)
        assert tile.sort or tokens * top_k <= SCAN_PAIRS
