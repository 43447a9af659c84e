"""Each law catches the bug planted for it."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from weft.proofs.laws import LawViolation
from weft.proofs.mutants import MUTANTS, Mutant
from weft.proofs.suite import LAWS


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_the_law_catches_its_mutant(mutant: Mutant) -> None:
    # Found is enough: shrinking a planted bug teaches nothing.
    quiet = list(HealthCheck)

    @settings(max_examples=200, deadline=None, database=None, phases=(Phase.generate,), suppress_health_check=quiet)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        mutant.law.check(data, "cpu")

    with mutant.plant(), pytest.raises(LawViolation, match=mutant.law.number):
        run()


def test_each_law_has_a_mutant() -> None:
    assert {str(law) for law in LAWS} == {str(mutant.law) for mutant in MUTANTS}
