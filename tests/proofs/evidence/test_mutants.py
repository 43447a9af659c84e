"""Each law catches the bugs planted for it, and the record of mutants has exactly these laws and
bugs."""

import json
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from refusal import refused

from weft.errors import ArgumentError
from weft.proofs import LawViolation
from weft.proofs.evidence.mutants import MUTANTS, Mutant
from weft.proofs.evidence.mutants.__main__ import table
from weft.proofs.evidence.mutants.captures import CAPTURES
from weft.proofs.evidence.mutants.catch import catch, replay
from weft.proofs.evidence.runs.suite import LAWS, Law, find
from weft.transforms.graphs.graphify import graphify

RESULTS = Path(__file__).parents[3] / "proofs" / "results"
RECORD = json.loads((RESULTS / "mutants.json").read_text(encoding="utf-8"))
ROWS = {(row["law"], row["mutant"]): row for row in RECORD["mutants"]}
VERSIONS = (hypothesis.__version__, torch.__version__.partition("+")[0])
# Whether this Hypothesis and this torch made the record.
SAME = (RECORD["hypothesis"], RECORD["torch"].partition("+")[0]) == VERSIONS


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_the_law_catches_its_mutant_on_the_stored_case(mutant: Mutant) -> None:
    with mutant.plant():
        row = ROWS.get((str(mutant.law), mutant.name))
        assert row is not None, (
            "run python -m weft.proofs.evidence.mutants --out proofs/results --missing"
        )
        caught = replay(mutant.law, row["choices"])
        if SAME:
            # Hypothesis draws at random what a stored case lacks, and replaces what does not fit.
            assert caught is None or (list(caught.case), caught.choices) == (
                row["case"],
                row["choices"],
            ), (
                "the strategies draw otherwise now: empty its choices, and run python -m"
                " weft.proofs.evidence.mutants --missing"
            )
        elif caught is None:
            # Another Hypothesis may draw, and another torch may compute, something else
            caught = catch(mutant.law, max_examples=1000)
    assert caught is not None, (
        f"{mutant} survives its stored case: run python -m weft.proofs.evidence.mutants"
    )
    assert caught.violation.startswith(f"{mutant.law.number} "), caught


@pytest.mark.parametrize("mutant", CAPTURES, ids=str)
def test_a_bug_of_odd_functions_does_not_break_a_plain_one(mutant: Mutant) -> None:
    """Else the law would catch the plant, and not the bug."""
    with mutant.plant():
        graphed = graphify(lambda x: x + 1)
        for value in (torch.ones(2), torch.zeros(2)):
            assert torch.equal(graphed(value), value + 1)


@pytest.mark.one_of(1, 5)
@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_without_the_bug_the_law_holds_on_the_stored_case(mutant: Mutant) -> None:
    assert replay(mutant.law, ROWS[str(mutant.law), mutant.name]["choices"]) is None


# The most cases of a search that `--all` waits for.
LONGEST = 60
# The mutant of each law, by the law's number, whose recorded search drew the fewest cases.
SOONEST = {
    row["law"].partition(" ")[0]: (row["law"], row["mutant"])
    for row in sorted(RECORD["mutants"], key=lambda row: -row["examples"])
}


def _searched(mutant: Mutant) -> Any:
    """A mutant, marked `slow` if its search says that the law's strategy draws what breaks the law,
    and otherwise `nightly`: all have their stored case, in every run."""
    row = ROWS.get((str(mutant.law), mutant.name))
    is_short = row is None or (
        SOONEST[mutant.law.number] == (row["law"], mutant.name) and row["examples"] <= LONGEST
    )
    return pytest.param(mutant, marks=pytest.mark.slow if is_short else pytest.mark.nightly)


@pytest.mark.parametrize("mutant", [_searched(mutant) for mutant in MUTANTS], ids=str)
def test_the_law_catches_its_mutant_on_a_drawn_case(mutant: Mutant) -> None:
    with mutant.plant():
        caught = catch(mutant.law, max_examples=1000)  # some are caught by one example in a hundred
    assert caught is not None, f"{mutant} survives {mutant.law}"
    assert caught.violation.startswith(f"{mutant.law.number} "), caught
    assert caught.case, caught


def test_each_law_has_a_mutant() -> None:
    assert {str(law) for law in LAWS} == {str(mutant.law) for mutant in MUTANTS}
    assert len({str(mutant) + str(mutant.law) for mutant in MUTANTS}) == len(MUTANTS)


def test_find_takes_a_name_or_a_part_that_only_one_law_has() -> None:
    assert str(find("L2", "padding is inert")) == "L2 padding is inert"
    assert str(find("L2", "images")) == "L2 padding is inert, on images"
    instead = "a part of the name of one law of that number"
    with refused(ArgumentError, "find('L3', 'pipeline')", "2 such laws: <any>", instead):
        find("L3", "pipeline")
    with refused(ArgumentError, "find('L99', '')", "no such law", instead):
        find("L99")


def test_a_law_that_holds_catches_nothing() -> None:
    assert catch(LAWS[0], max_examples=3) is None


def test_the_smallest_case_and_the_count() -> None:
    def check(data: st.DataObject, device: str) -> None:
        number = data.draw(st.integers(0, 1000))
        if number > 17:
            raise LawViolation(f"L0 small: {number}")

    caught = catch(Law("L0", "small", check), shrinks=100)
    assert caught is not None
    assert (caught.case, caught.violation) == (("18",), "L0 small: 18")
    assert caught.examples >= 1
    assert "the smallest case: 18" in str(caught)
    again = replay(Law("L0", "small", check), caught.choices)
    assert again is not None
    assert (again.case, again.violation, again.examples) == (("18",), "L0 small: 18", 1)
    assert (
        replay(Law("L0", "nothing", lambda data, device: data.draw(st.integers())), caught.choices)
        is None
    )


def test_the_record_is_of_these_laws_and_bugs() -> None:
    rows = RECORD["mutants"]
    assert [(r["law"], r["mutant"]) for r in rows] == [(str(m.law), m.name) for m in MUTANTS], (
        "run python -m weft.proofs.evidence.mutants --out proofs/results"
    )
    assert all(r["examples"] and r["case"] and r["violation"] and r["choices"] for r in rows)
    assert table(rows) in (RESULTS / "mutants.md").read_text()
