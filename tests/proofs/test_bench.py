"""The benchmarks run, on the tape, in small numbers."""

import json
from pathlib import Path

import pytest

from weft.proofs.bench import graphify_overhead


def test_graphify_overhead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["graphify_overhead", "--out", str(tmp_path), "--quick", "--leaves", "3"])
    graphify_overhead.main()
    report = json.loads((tmp_path / "graphify_overhead.json").read_text())
    found = {(row["what"], row["given"], row["captures"]) for row in report["rows"]}
    for given in ("reference, borrowed", "fresh, safe"):
        assert {("graphify", given, 1), ("graphify", given, 10), ("graphify, in turn", given, 10)} <= found
    assert all(row["us"] >= row["least_us"] > 0 for row in report["rows"])
    assert report["environment"]["torch"]
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + len(report["rows"])
