"""The laws hold: on tapes everywhere, and on CUDA graphs where there is a GPU."""

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from weft.proofs.evidence.runs.suite import LAWS, Law

# The numbers of cases per law of weight 1: in a short run, with `--all`, and with `--nightly`. They
# are the same cases each time, so that a run adds nothing to the one before it.
FEW = 5
SOME = 10
MANY = 120
EXAMPLES_GPU = 25
QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)


def _count(law: Law, examples: int) -> int:
    return int(examples * law.weight)


def _check(law: Law, device: str, examples: int) -> None:
    @settings(max_examples=_count(law, examples), deadline=None, suppress_health_check=QUIET)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        law.check(data, device)

    run()


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_law_on_the_tape(law: Law, runs_all: bool, runs_nightly: bool) -> None:
    _check(law, "cpu", MANY if runs_nightly else SOME if runs_all else FEW)


@pytest.mark.gpu
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_law_on_cuda_graphs(law: Law) -> None:
    _check(law, "cuda", EXAMPLES_GPU)


def test_the_gate_checks_500_examples() -> None:
    assert sum(_count(law, SOME) for law in LAWS) >= 500
