"""The tiles of the products with experts: measured ones are well formed, and every other shape has
a default."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import weft.proofs
from weft.ops.tiles import experts
from weft.ops.tiles.experts import MEASURED, SCAN_PAIRS, expert_key, expert_tile
from weft.ops.tiles.tile import Tile
from weft.proofs.evidence.bench.tiles import search
from weft.proofs.evidence.bench.tiles.experts import ExpertProduct

RESULTS = Path(weft.proofs.__path__[0]) / "results"
# Searches: for 1, 2, 4 and 8 tokens, and for more, with the kernels of their days.
FEW, MANY = (
    RESULTS / f"{name}.json.xz"
    for name in ("2026-11-26-h100-tile-search-few-tokens", "2026-11-25-h100-tile-search-experts")
)
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
    assert json.loads(MEASURED.read_text()).keys() == experts.measured().keys()
    for key, rows in experts.measured().items():
        assert list(rows) == sorted(rows)
        for tile in rows.values():
            assert_fits(tile, 1 if " fp8 " in key else 2)


@pytest.mark.parametrize("tokens", [2, 8, 9, 64, 100, 128, 129, 256])
def test_the_pairs_of_both_products_are_sorted_once(tokens: int) -> None:
    """The measured tiles of Qwen3-30B-A3B sort once: a second sort would take some 4 microseconds
    more."""
    first, second = (
        expert_tile(tokens, 8, *shape, num_experts=128, itemsize=1)
        for shape in ((1536, 2048), (2048, 768))
    )
    measured = [
        next(tile for most, tile in experts.measured()[key].items() if tokens <= most)
        for key in QWEN.values()
    ]
    assert [first, second] == measured
    assert first.sort == second.sort
    assert first.tokens == second.tokens or not first.sort


def rule_losses(fp8: bool) -> list[float]:
    """How much longer both products and the sort take than with the best tiles, for each set and
    number of tokens; the second product quantises its input."""
    (few, first), (many, second) = search.read(FEW), search.read(MANY)
    measurements = [*few, *(one for one in many if one.product.tokens > 8)]
    sort = {
        (tokens, top_k, count): seconds
        for tokens, top_k, count, _, seconds in second["aligning"] + first["aligning"]
    }
    products: dict[Any, dict[str, dict[Any, float]]] = {}
    for one in measurements:
        product = one.product
        assert isinstance(product, ExpertProduct)
        if product.fp8 == fp8 and product.tokens * product.top_k <= 256 * product.num_experts:
            shape = (
                (product.rows, product.columns)
                if product.is_down
                else (product.columns, product.rows // 2)
            )
            key = product.tokens, product.top_k, product.num_experts, *shape
            products.setdefault(key, {})[product.kind] = one.seconds | one.again
    losses = []
    for (tokens, top_k, count, hidden, inner), kinds in products.items():
        if "down_plain" not in kinds:  # the search's time was over
            continue

        def total(
            up: Any, down: Any, kinds: Any = kinds, key: Any = (tokens, top_k, count)
        ) -> float:
            return float(
                kinds["gate_up"][up] + kinds["down_plain"][down] + (sort[key] if up.sort else 0)
            )

        both = [
            total(up, down)
            for up in kinds["gate_up"]
            for down in kinds["down_plain"]
            if (up.sort, up.tokens) == (down.sort, down.tokens) and not (fp8 and up.rows == 256)
        ]
        experts.expert_tile.cache_clear()
        shapes = (2 * inner, hidden), (hidden, inner)
        tiles = [expert_tile(tokens, top_k, *shape, count, 1 if fp8 else 2) for shape in shapes]
        losses.append(total(*tiles) / min(both) - 1)
    return losses


@pytest.mark.parametrize(("fp8", "tenth", "worst"), [(False, 0.03, 0.07), (True, 0.06, 0.1)])
def test_the_rule_is_near_the_best_of_a_search(
    fp8: bool, tenth: float, worst: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "measured", dict)
    losses = rule_losses(fp8)
    assert len(losses) >= 75
    assert np.median(losses) <= 0.015
    assert np.percentile(losses, 90) <= tenth
    assert max(losses) <= worst
    expert_tile.cache_clear()


sizes = st.sampled_from((64, 100, 128, 768, 2048, 5120))


@given(
    tokens=st.integers(1, 10_000),
    top_k=st.integers(1, 8),
    rows=sizes,
    columns=sizes,
    fp8=st.booleans(),
)
def test_every_shape_has_a_tile(
    tokens: int, top_k: int, rows: int, columns: int, fp8: bool
) -> None:
    for itemsize in (1,) if fp8 else (2, 4):
        tile = expert_tile(tokens, top_k, rows, columns, 60, itemsize)
        assert_fits(tile, itemsize)
        assert tile.sort or tokens * top_k <= SCAN_PAIRS
