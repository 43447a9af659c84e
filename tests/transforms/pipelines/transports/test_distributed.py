"""Processes give the results of Local, by gloo and on GPUs; and the ways to start them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import PYTHONPATH, SCENARIOS, run_all, run_scenario

from weft.errors import DeviceError, ProgramError
from weft.proofs import LawViolation, assert_equal
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.launch import launch
from weft.transforms.pipelines.transports.local import Local

LAW = "processes are local"


def part(result: Any, rank: int) -> Any:
    """Rank `rank`'s part of the result of a scenario that ran everywhere: its state, and all
    outputs."""
    states, outs, *rest = result
    return (type(states)([states[rank]]), outs, *[counts[rank : rank + 1] for counts in rest])


def parts(name: str, num_ranks: int, rank: int) -> Any:
    expected = SCENARIOS[name](num_ranks, Local())
    return (
        tuple(part(result, rank) for result in expected)
        if name == "stream"
        else part(expected, rank)
    )


FIRST_IS_QUICK = [
    pytest.param(name, marks=pytest.mark.slow if i else ()) for i, name in enumerate(SCENARIOS)
]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", FIRST_IS_QUICK)
def test_it_gives_what_local_gives(name: str, num_ranks: int) -> None:
    for rank, result in enumerate(launch(run_scenario, num_ranks, name, num_ranks)):
        assert_equal(LAW, result, parts(name, num_ranks, rank))


def test_transports_run_many_pipelines() -> None:
    for rank, (results, second, again) in enumerate(launch(run_all, 2, 2)):
        for name, result in zip(SCENARIOS, results, strict=True):
            assert_equal(LAW, result, parts(name, 2, rank))
        assert_equal(LAW, second, parts("calls", 2, rank))
        assert_equal(LAW, again, second)


@pytest.mark.nightly
def test_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom ranks import calls\nfrom weft.transforms import Distributed\n"
        "transport = Distributed()\nstates, outs = calls(2, transport)\n"
        f"torch.save((states, outs), f'{tmp_path}/' + str(transport.rank))\n"
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        assert_equal(LAW, tuple(torch.load(tmp_path / str(rank))), tuple(parts("calls", 2, rank)))


def test_without_a_launcher_it_says_how_to_start() -> None:
    with pytest.raises(ProgramError) as error:
        Distributed()
    assert str(error.value) == (
        "Distributed()\n  saw: no RANK and WORLD_SIZE in the environment\n"
        "  instead: torchrun --nproc-per-node N script.py, or weft.transforms.launch(function, N)"
    )


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("-1", "2"), ("0", "0"), ("0", "two")])
def test_a_place_that_cannot_be_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, rank: str, size: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ProgramError) as error:
        Distributed()
    assert error.value.problem == f"RANK='{rank}', WORLD_SIZE='{size}' in the environment"
    assert error.value.instead.startswith("0 <= RANK < WORLD_SIZE: torchrun")


def test_an_environment_that_names_no_store_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        ProgramError, match="no MASTER_ADDR and no MASTER_PORT in the environment"
    ) as error:
        Distributed(device="cpu")
    assert error.value.call == "Distributed() on rank 0 of 1"


@pytest.mark.parametrize(
    ("backend", "device", "problem"),
    [
        ("nccl", "cpu", "backend='nccl' for a device of type cpu"),
        ("peer", "cpu", "backend='peer' for a device of type cpu"),
        ("gloo", "cuda:0", "backend='gloo' for a device of type cuda"),
        ("mpi", "cpu", "backend='mpi' for a device of type cpu"),
        ("nccl", "cuda:99", f"{torch.cuda.device_count()} GPUs"),
    ],
)
def test_a_back_end_that_cannot_serve_the_device_is_refused(
    monkeypatch: pytest.MonkeyPatch, backend: Any, device: str, problem: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(DeviceError) as error:
        Distributed(backend=backend, device=device)
    assert error.value.call == f"Distributed(backend='{backend}', device='{device}')"
    assert error.value.problem == problem


def run_on_gpus(num_ranks: int, backend: Any) -> list[str]:
    """The scenarios whose results differ from those of one process on the same device."""
    transport = Distributed(backend=backend, timeout=20)
    wrong = []
    with transport.device:
        for name in SCENARIOS:
            if name in ("requests", "own_batches"):  # whose batches are the CPU's
                continue
            result = SCENARIOS[name](num_ranks, transport)
            transport.synchronize()
            try:
                assert_equal(name, result, parts(name, num_ranks, transport.rank))
            except LawViolation as error:
                wrong.append(str(error))
    transport.close()
    return wrong


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["nccl", "peer"])
def test_on_gpus_it_gives_what_local_gives(backend: str) -> None:
    assert launch(run_on_gpus, 2, 2, backend) == [[], []]
