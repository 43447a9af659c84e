"""The benchmarks run, on the tape, in small numbers."""

import json
from pathlib import Path

import pytest

from weft.proofs.bench import decode_modes, graphify_overhead, ladder_capture, sampling


def test_graphify_overhead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["graphify_overhead", "--out", str(tmp_path), "--quick", "--leaves", "3"])
    graphify_overhead.main()
    report = json.loads((tmp_path / "graphify_overhead.json").read_text())
    found = {(row["what"], row["given"], row["captures"]) for row in report["rows"]}
    for given in ("reference, borrowed", "fresh, borrowed", "fresh, safe"):
        assert {("graphify", given, 1), ("graphify", given, 10), ("graphify, in turn", given, 10)} <= found
    assert all(row["us"] >= row["least_us"] > 0 for row in report["rows"])
    assert report["environment"]["torch"]
    assert "copies" in [row["op"] for row in report["environment"]["ops"]]
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + len(report["rows"])


def test_decode_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["decode_modes", "--out", str(tmp_path), "--quick"])
    decode_modes.main()
    report = json.loads((tmp_path / "decode_modes.json").read_text())
    assert [row["mode"] for row in report["rows"]] == ["none", "piecewise", "full"]
    assert [row["captures"] > 0 for row in report["rows"]] == [False, True, True]
    for row in report["rows"]:
        assert row["replays"] >= 90 * (row["mode"] != "none")
        assert row["share"] * row["ms"] == pytest.approx(row["floor_ms"])
        assert row["floor_ms"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(report["rows"])


def test_ladder_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["ladder_capture", "--out", str(tmp_path), "--quick"])
    ladder_capture.main()
    runs = json.loads((tmp_path / "ladder_capture.json").read_text())["runs"]
    assert [(run["graphs"], run["in_pieces"]) for run in runs] == [(5, 3), (5, 3)]
    for run in runs:
        assert run["bytes"] <= run["estimated_bytes"] <= 1.1 * run["bytes"]
        assert run["seconds"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["sampling", "--out", str(tmp_path), "--quick"])
    sampling.main()
    rows = json.loads((tmp_path / "sampling.json").read_text())["rows"]
    assert [row["asked"] for row in rows] == list(sampling.ASKED)
    assert all(row["us"] > 0 < row["sample_us"] for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
