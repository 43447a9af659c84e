"""Figures of serving, against counts by hand."""

from typing import Any

import attrs
import pytest

from weft.transforms.engine.evaluation.serving import RankFigures, Served, figures
from weft.transforms.engine.stats import Stats

NOTHING: Any = {
    field.name: {} if "Mapping" in str(field.type) else 0 for field in attrs.fields(Stats)
}


def test_figures_by_hand() -> None:
    before = Stats(**NOTHING)
    after = attrs.evolve(before, modes={"full": 3, "none": 1}, tokens=18, padding=3)
    read = [[1.0, 1.5, 3.0], [2.0]]
    rank = RankFigures("cpu", 1.0, 2.0, 3.0)
    metrics = figures(Served(read, before, after), 10, [rank])
    assert (metrics["seconds"], metrics["output_tokens"], metrics["total_tokens"]) == (3.0, 4, 24)
    assert (metrics["output_tokens_per_s"], metrics["total_tokens_per_s"]) == (
        pytest.approx(4 / 3),
        8.0,
    )
    assert metrics["ttft"] == {"mean": 1500.0, "p50": 1500.0, "p99": 1990.0}
    assert metrics["tpot"] == {"mean": 1000.0, "p50": 1000.0, "p99": 1000.0}
    assert metrics["itl"] == {"mean": 1000.0, "p50": 1000.0, "p99": 1490.0}
    assert (metrics["num_steps"], metrics["graphs"]["shares"]) == (
        4,
        {"full": 0.75, "piecewise": 0.0, "none": 0.25},
    )
    assert metrics["graphs"]["padding"] == pytest.approx(3 / 21)
    assert figures(Served([[1.0]], before, before), 1, [])["itl"] is None
