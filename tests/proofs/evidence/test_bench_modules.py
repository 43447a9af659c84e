"""The benchmark of functions that others wrote: small sizes, in this process."""

import json
import os
from pathlib import Path

import attrs
import pytest

from weft.proofs.evidence.bench.modules import __main__ as driver, report
from weft.proofs.evidence.bench.modules.cases import CASES
from weft.proofs.evidence.bench.modules.one import Row, measure
from weft.proofs.evidence.bench.modules.variants import (
    COMPILE,
    EAGER,
    GRAPHIFY,
    GRAPHIFY_INDUCTOR,
    REDUCE_OVERHEAD,
    Setting,
)


@pytest.mark.parametrize("case", ["mlp", "gnn"])
def test_a_graph_is_measured_and_compared_to_eager(case: str) -> None:
    eager = measure(case, Setting(EAGER, "cpu", small=True), check=False)
    assert eager.error is None
    graph = measure(case, Setting(GRAPHIFY, "cpu", small=True), check=True)
    # Padding may change how products round.
    assert graph.error is not None
    assert graph.error < 1e-6
    for row in (eager, graph):
        assert len(row.opening_s) == 4
        assert row.ms > 0
        assert row.allocated_gb is None
        assert row.kernels is None


def test_a_wrong_result_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["mlp"]

    def wrong(setting: Setting):  # type: ignore[no-untyped-def]
        call = case.build(setting)
        if setting.variant == EAGER:
            return call
        return lambda: 1.5 * call()

    monkeypatch.setitem(CASES, "mlp", type(case)(wrong))
    row = measure("mlp", Setting(GRAPHIFY, "cpu", small=True), check=True)
    assert row.error == pytest.approx(0.5, rel=1e-5)


def record(case: str, variant: str, number: int, first: float, ms: float) -> dict[str, object]:
    row = Row([first, 0.1], ms, allocated_gb=2 * ms, reserved_gb=4.0, kernels=7, error=0.25)
    return {"case": case, "variant": variant, "pass": number, **attrs.asdict(row)}


def test_the_table() -> None:
    records = [
        record("train", REDUCE_OVERHEAD, 0, 30, 8),
        record("train", GRAPHIFY_INDUCTOR, 0, 10, 2),
        record("train-fused", GRAPHIFY_INDUCTOR, 0, 15, 4),
        {"case": "vit", "variant": REDUCE_OVERHEAD, "pass": 0, "problem": "ValueError: no"},
        record("vit", COMPILE, 0, 15, 4),
        record("train", REDUCE_OVERHEAD, 1, 6, 9),
        record("train", REDUCE_OVERHEAD, 2, 8, 7),
        record("train", GRAPHIFY_INDUCTOR, 1, 14, 3),
        record("train", GRAPHIFY_INDUCTOR, 2, 14, 1),
    ]
    lines = list(report.lines(records))
    assert [(line.cold_s, line.warm_s, line.ms) for line in lines] == [
        (30, 7, 8),
        (10, 14, 2),
        (15, None, 4),
        (None, None, None),
        (15, None, 4),
    ]
    table = report.ratios(lines)
    # The columns: later calls, cold, warm, allocated, reserved.
    assert table == {"train": [4, 3, 0.5, 4, 1], "train-fused": [2, 2, None, 2, 1]}
    assert report.geometric_means(table) == pytest.approx([8**0.5, 6**0.5, 0.5, 8**0.5, 1])
    printed = report.text(records).splitlines()
    assert "ValueError: no" in printed[4]
    assert printed[-1].split() == ["geometric", "mean", "2.83", "2.45", "0.50", "2.83", "1.00"]


@pytest.mark.nightly
def test_processes_and_a_variant_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "jax.py").write_text("raise ModuleNotFoundError\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    driver.main(
        [
            *("--out", str(tmp_path), "--device", "cpu", "--small", "--passes", "2"),
            *("--cases", "mlp", "--variants", "graphify", "jax"),
        ]
    )
    head, *rows = map(json.loads, (tmp_path / "modules.jsonl").read_text().splitlines())
    assert head["environment"]["torch"]
    assert [(row["variant"], row["pass"]) for row in rows] == [
        ("graphify", 0),
        ("jax", 0),
        ("graphify", 1),  # what failed is not tried again
    ]
    assert rows[1]["problem"] == "RuntimeError: no jax"
    assert rows[0]["error"] == 0
    assert rows[2]["error"] is None
    assert capsys.readouterr().out == (tmp_path / "modules.txt").read_text()
