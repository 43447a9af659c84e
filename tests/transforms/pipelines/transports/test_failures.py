"""Ranks in separate processes that fail: some cases of the proof, on the CPU, on a fake device, and
on GPUs."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch
from ranks import scale
from streams import run_rank, run_slowly_closing_rank

from weft.proofs.evidence.runs.failures import (
    MESHES,
    cases,
    cases_at_any_time,
    cases_of_meshes,
    run_case,
)
from weft.proofs.evidence.runs.sabotage import MOMENTS, STEPS, WAYS, Case, make_pipeline
from weft.transforms.pipelines.pipeline import pipeline
from weft.transforms.pipelines.transports.watching.failures import Failure, blockers, culprit

ALL = list(cases())
IN_MESHES = list(cases_of_meshes())


def test_the_cases_are_every_place_in_every_way() -> None:
    places = {(case.num_ranks, case.rank, case.index) for case in ALL}
    assert len(ALL) == len(set(ALL)) == 2 * len(WAYS) * len(places)
    for number in (2, 3, 4):
        programs = make_pipeline(number).programs(2)
        covered = {
            (case.rank, case.index, case.instruction) for case in ALL if case.num_ranks == number
        }
        assert covered == {
            (p.rank, i, str(e)) for p in programs for i, e in enumerate((*p.effects, "its end"))
        }
    kinds = {case.instruction.split()[0] for case in ALL}
    assert kinds == {"run", "send", "recv", "broadcast", "fence", "its"}
    # A failure at the end of a step is noticed in the next one
    assert max(case.step for case in ALL) < STEPS - 1


def test_the_cases_of_meshes_are_every_place_in_every_way_and_every_moment_of_a_collective() -> (
    None
):
    places = {(case.mesh, case.rank, case.index, case.collective) for case in IN_MESHES}
    assert len(IN_MESHES) == len(set(IN_MESHES)) == 2 * len(WAYS) * len(places)
    for mesh in MESHES:
        programs = make_pipeline(mesh.num_ranks, mesh=mesh).programs(2)
        mesh_cases = [case for case in IN_MESHES if case.mesh == mesh]
        covered = {
            (case.rank, case.index, case.instruction)
            for case in mesh_cases
            if case.collective is None
        }
        assert covered == {
            (p.rank, i, str(e)) for p in programs for i, e in enumerate((*p.effects, "its end"))
        }
        inside = [case for case in mesh_cases if case.collective]
        assert {case.collective.moment for case in inside if case.collective} == set(MOMENTS)
        runs = {
            (p.rank, i)
            for p in programs
            for i, e in enumerate(p.effects)
            if str(e).startswith("run stage")
        }
        assert {(case.rank, case.index) for case in inside} == runs


# The end of another rank is noticed at once; the rest allows for other tests on the same machine.
QUICK = [attrs.evolve(case, timeout=20.0) for case in ALL if case.way in ("raise", "exit", "kill")]
SLOW = [attrs.evolve(case, timeout=3.0) for case in ALL if case.way in ("stall", "stop")]
ANY_TIME = [attrs.evolve(case, timeout=20.0) for case in itertools.islice(cases_at_any_time(), 10)]


@pytest.mark.one_of(1, 2)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if i else ()) for i, case in enumerate(QUICK[::17])],
    ids=str,
)
def test_a_rank_that_ends_is_named_by_all(case: Case) -> None:
    outcome = run_case(case)
    assert outcome.wrong is None
    assert outcome.ended < 15


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW[::85], ids=str)
def test_a_rank_that_stalls_is_named_by_all_in_time(case: Case) -> None:
    outcome = run_case(case)
    assert outcome.wrong is None
    assert outcome.raised < case.timeout + 0.9


@pytest.mark.one_of(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("case", ANY_TIME, ids=str)
def test_a_rank_killed_at_any_time_is_named_by_all(case: Case) -> None:
    assert run_case(case).wrong is None


@pytest.mark.one_of(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in IN_MESHES if case.way in ("raise", "exit", "kill")][:12], ids=str
)
def test_a_rank_of_a_mesh_that_ends_is_named_by_all(case: Case) -> None:
    outcome = run_case(attrs.evolve(case, timeout=20.0))
    assert outcome.wrong is None
    assert outcome.ended < 15


STALLED = [
    case for case in IN_MESHES if case.way in ("stall", "stop") and case.collective is not None
]


@pytest.mark.one_of(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("case", STALLED[:8], ids=str)
def test_a_rank_of_a_mesh_that_stalls_at_a_collective_is_named_by_all(case: Case) -> None:
    assert run_case(case).wrong is None


# A device whose host runs ahead, and GPUs

TWO = [case for case in ALL if case.num_ranks == 2 and case.step == 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [attrs.evolve(case, timeout=20.0) for case in TWO if case.way == "kill"][::5], ids=str
)
def test_a_rank_killed_before_its_device_is_done_is_named(case: Case) -> None:
    assert run_case(case, run_rank).wrong is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [attrs.evolve(case, timeout=3.0) for case in TWO if case.way == "stall"][::11], ids=str
)
def test_a_rank_that_stalls_before_its_device_is_done_is_named(case: Case) -> None:
    assert run_case(case, run_rank).wrong is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [attrs.evolve(case, timeout=20.0) for case in TWO if case.way == "raise"][::5], ids=str
)
def test_a_rank_keeps_its_error_while_it_closes(case: Case) -> None:
    assert run_case(case, run_slowly_closing_rank).wrong is None


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "case", [case for case in TWO if case.way in ("kill", "raise", "stall")][::3], ids=str
)
@pytest.mark.parametrize("backend", ["nccl", "peer"])
def test_a_rank_that_fails_on_gpus_is_named(backend: str, case: Case) -> None:
    assert run_case(attrs.evolve(case, backend=backend, timeout=8.0)).wrong is None


# Who is blamed


def test_the_culprit_is_who_waits_for_nobody() -> None:
    programs = pipeline([scale] * 4).programs(1)

    def blamed(rank: int, at: list[int]) -> int:
        return culprit(rank, lambda waiting: blockers(programs, at, waiting, 1))

    assert blamed(3, [0, 0, 0, 0]) == 0
    assert blamed(3, [1, 0, 0, 0]) == 0  # it has run, and is to send
    assert blamed(3, [2, 0, 0, 0]) == 1  # rank 1 could receive
    assert blamed(3, [2, 3, 1, 0]) == 2
    assert blamed(3, [2, 3, 3, 1]) == 3  # it waits for nobody
    assert blockers(programs, [2, 3, 3, 2], 3, 1) == ()


def test_who_wait_for_each_other_are_not_followed_for_ever() -> None:
    assert culprit(0, lambda rank: [1 - rank]) in (0, 1)


def test_the_error_of_a_rank_names_all() -> None:
    error = Failure(2, "run stage 2 [mb 0]", "its process ended: SIGKILL").for_rank(
        0, "broadcast from 2 [mb 0]"
    )
    assert (error.rank, error.instruction, error.cause) == (
        2,
        "run stage 2 [mb 0]",
        "its process ended: SIGKILL",
    )
    assert (
        str(error)
        == "rank 0: 'broadcast from 2 [mb 0]'\n  saw: rank 2 failed at 'run stage 2 [mb 0]': its"
        " process ended: SIGKILL\n  instead: mend what failed on rank 2; if it needs longer, a"
        " greater timeout= or --timeout"
    )


@pytest.mark.slow
def test_the_proof_runs_and_writes_its_record(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "weft.proofs.evidence.runs.failures",
        "--runs",
        "3",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "failures.json").read_text())
    assert (record["runs"], record["wrong"]) == (3, [])
