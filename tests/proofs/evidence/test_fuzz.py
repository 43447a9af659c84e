"""Many odd requests: the counts, and the end of a run with a broken law."""

import sys

import pytest
from hypothesis import Phase

from weft.proofs.evidence.mutants import MUTANTS
from weft.proofs.evidence.runs import fuzz as module
from weft.proofs.evidence.runs.fuzz import fuzz, main


@pytest.mark.slow
def test_what_became_of_them_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 4)
    report = fuzz(8)
    assert report.lost == 0
    assert report.tally.accepted >= 8
    assert report.engines >= 2
    assert report.tally.ended.total() >= report.tally.accepted
    assert report.tally.errors.total() == report.tally.ended["error"]
    monkeypatch.setattr(sys, "argv", ["fuzz", "--requests", "3"])
    assert main() == 0
    assert "0 lost or with a forbidden token" in capsys.readouterr().out


@pytest.mark.nightly
def test_a_broken_law_is_told_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [bug] = [
        mutant
        for mutant in MUTANTS
        if mutant.name == "a token is returned although none is allowed"
    ]
    # Finding the smallest case would take minutes
    monkeypatch.setattr(module, "_PHASES", [Phase.generate])
    monkeypatch.setattr(sys, "argv", ["fuzz", "--requests", "1000"])
    with bug.plant():
        assert main() == 1
    out = capsys.readouterr().out
    assert "L11 faults: a forbidden token: " in out
    assert "load=OddLoad(" in out
