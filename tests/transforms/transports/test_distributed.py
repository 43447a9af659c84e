"""Processes: what Local gives, by gloo; what differs between ranks is found and named; what is refused."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import SCENARIOS, advance, run_all, run_scenario, scale, told

from weft.effects import Schema
from weft.errors import DeviceError, ProgramError
from weft.proofs.laws import assert_equal
from weft.transforms.pipeline import pipeline
from weft.transforms.transports.distributed import Distributed
from weft.transforms.transports.launch import launch
from weft.transforms.transports.local import Local
from weft.transforms.transports.plan import Plan
from weft.transforms.transports.worker import Worker

LAW = "processes are local"


def part(found: Any, rank: int) -> Any:
    """What rank `rank` has of the result of a scenario that ran everywhere: its state, and all outputs."""
    states, outs, *rest = found
    return (type(states)([states[rank]]), outs, *[counts[rank : rank + 1] for counts in rest])


def parts(name: str, num_ranks: int, rank: int) -> Any:
    wanted = SCENARIOS[name](num_ranks, Local())
    return tuple(part(found, rank) for found in wanted) if name == "stream" else part(wanted, rank)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", SCENARIOS)
def test_it_gives_what_local_gives(name: str, num_ranks: int) -> None:
    for rank, seen in enumerate(launch(run_scenario, num_ranks, name, num_ranks)):
        assert_equal(LAW, seen, parts(name, num_ranks, rank))


def test_transports_run_many_pipelines() -> None:
    for rank, (seen, second, again) in enumerate(launch(run_all, 2, 2)):
        for name, found in zip(SCENARIOS, seen, strict=True):
            assert_equal(LAW, found, parts(name, 2, rank))
        assert_equal(LAW, second, parts("calls", 2, rank))
        assert_equal(LAW, again, second)


def test_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom ranks import calls\nfrom weft.transforms.transports.distributed import Distributed\n"
        "transport = Distributed()\nstates, outs = calls(2, transport)\n"
        f"torch.save((states, outs), f'{tmp_path}/' + str(transport.rank))\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=120)
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


@pytest.mark.parametrize(
    ("backend", "device", "seen"),
    [
        ("nccl", "cpu", "backend='nccl' for a device of type cpu"),
        ("peer", "cpu", "backend='peer' for a device of type cpu"),
        ("gloo", "cuda:0", "backend='gloo' for a device of type cuda"),
        ("mpi", "cpu", "backend='mpi' for a device of type cpu"),
        ("nccl", "cuda:99", f"{torch.cuda.device_count()} GPUs"),
    ],
)
def test_a_back_end_that_cannot_serve_the_device_is_refused(
    monkeypatch: pytest.MonkeyPatch, backend: Any, device: str, seen: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(DeviceError) as error:
        Distributed(backend=backend, device=device)
    assert error.value.call == f"Distributed(backend='{backend}', device='{device}')"
    assert error.value.seen == seen


# What differs between ranks


def count_stages(num_stages: int) -> str:
    return told(lambda: pipeline([scale] * num_stages, transport=Distributed(timeout=5)))


def test_a_process_for_each_stage() -> None:
    assert (
        launch(count_stages, 2, 3)
        == [
            "ProgramError: pipeline(..., transport=Distributed(device='cpu', backend='gloo'))\n"
            "  saw: 3 stages and 2 processes\n  instead: a process for each stage"
        ]
        * 2
    )


def other(p: Any, s: Any, batch: Any, x: Any) -> Any:
    y = (batch if x is None else x) * p
    return s + y.cos().sum(), y


def closing_over(value: Any) -> Callable[..., Any]:
    def stage(p: Any, s: Any, batch: Any, x: Any) -> Any:
        return s, (batch if x is None else x) * p + value

    return stage


def with_helper(p: Any, s: Any, batch: Any, x: Any) -> Any:
    return s, helper(batch if x is None else x)


def helper(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _other_helper(x: torch.Tensor) -> torch.Tensor:
    return x + 2


def beside(_: Any, p: torch.Tensor, s: torch.Tensor, batch: torch.Tensor, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return scale(p, s, batch, x)


def differ(what: str) -> str:
    """Take a step in which rank 1 has something else."""
    torch.set_num_threads(1)
    transport = Distributed(timeout=5)
    mine = transport.rank == 1
    stage: Callable[..., Any] = scale
    if what == "stage":
        stage = other if mine else scale
    elif what == "closure":
        stage = closing_over(1 + mine)
    elif what == "partial":
        stage = partial(beside, torch.ones(()) if mine else None)
    elif what == "helper":
        globals()["helper"] = _other_helper if mine else helper
        stage = with_helper
    batch = torch.arange(4.0)
    schema = Schema.parse("[2] float64" if mine else "[2] float32") if what == "schema" else None
    microbatches = (2 + mine) if what == "microbatches" else 2
    made = pipeline(
        [stage] * transport.num_ranks,
        microbatches=microbatches,
        schema=schema,
        advance=None if what == "advance" and mine else advance,
        transport=transport,
    )
    state: Any = [torch.zeros(())]
    if what == "batch":
        batch = torch.arange(5.0 if mine else 4.0)
    if what == "later batch":
        state, _ = made([torch.ones(())], state, batch)
        batch = torch.arange(5.0 if mine else 6.0)
    return told(lambda: made([torch.ones(())], state, batch))


@pytest.mark.parametrize(
    ("what", "zero", "one"),
    [
        ("stage", "stage 0: scale", "stage 0: other"),
        ("closure", "stage 0: stage", "stage 0: stage"),
        ("partial", "stage 0: partial", "stage 0: partial"),
        ("helper", "stage 0: with_helper", "stage 0: with_helper"),
        ("microbatches", "mb 0: [2] float32", "mb 0: [1] float32"),
        ("schema", "send to 1 [mb 0]: [2] float32", "send to 1 [mb 0]: [2] float64"),
        ("advance", "advance: advance", "advance: none"),
        ("batch", "mb 1: [2] float32", "mb 1: [3] float32"),
        ("later batch", "mb 0: [3] float32", "mb 0: [2] float32"),
    ],
)
def test_what_differs_is_named_by_both_ranks(what: str, zero: str, one: str) -> None:
    first, second = launch(differ, 2, what)
    step = 2 if what == "later batch" else 1
    for rank, told_by in enumerate((first, second)):
        call, seen, instead = told_by.splitlines()
        assert call == f"ProgramError: step {step} of rank {rank}"
        mine, theirs = (zero, one) if rank == 0 else (one, zero)
        assert seen.startswith(f"  saw: '{mine}")
        assert f"', where rank {1 - rank} has '{theirs}" in seen
        assert instead.startswith("  instead: the same code, configuration and batches on every rank")


def test_of_three_ranks_all_name_the_one_that_differs() -> None:
    said = launch(differ, 3, "stage")
    assert [text.splitlines()[0] for text in said] == [f"ProgramError: step 1 of rank {rank}" for rank in range(3)]
    assert "where rank 1 has 'stage 0: other" in said[0]
    assert "where rank 0 has 'stage 0: scale" in said[1]
    assert "where rank 1 has 'stage 0: other" in said[2]


def differ_in_what_ran_before() -> str:
    """Rank 1 takes a step that both have agreed on, while rank 0 takes one that they have not."""
    transport = Distributed(timeout=5)
    made = pipeline([scale] * 2, transport=transport)
    state, _ = made([torch.ones(())], [torch.ones(())], torch.ones(3))
    batch = torch.ones(3 if transport.rank else 2)
    return told(lambda: made([torch.ones(())], state, batch))


def test_a_rank_in_another_program_is_named() -> None:
    first, second = launch(differ_in_what_ran_before, 2)
    assert first.startswith("ProgramError: step 2 of rank 0: 'agree on the programs'\n  saw: rank 1 is at 'recv from 0")
    assert second.startswith("RankError: rank 1: 'recv from 0 [mb 0]'\n  saw: rank 0 failed at 'agree on the programs'")


# What travels


class Given:
    """A link on which one value arrives."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def send(self, _: Any, value: Any, /) -> None:
        raise AssertionError(f"{value} is sent")

    def recv(self, _: Any, /) -> Any:
        return self.value

    def fence(self, effect: Any, /) -> None:
        raise AssertionError(f"{effect} is performed")


def test_a_received_schema_that_differs_is_named_with_the_declared_one() -> None:
    made = pipeline([scale] * 2, schema=Schema.parse("[2] float32"))
    worker = Worker(1, scale, None, None, None, [None])
    with pytest.raises(ProgramError) as error:
        worker.perform(made.programs(1)[1].effects[0], Given(torch.zeros(3, dtype=torch.float64)))
    assert str(error.value) == (
        "rank 1: 'recv from 0 [mb 0]: [2] float32'\n  saw: a value of schema [3] float64\n"
        "  instead: return [2] float32 from the stage"
    )


def send_another_schema() -> str:
    transport = Distributed(timeout=5)
    made = pipeline([scale] * 2, schema=Schema.parse("[2] float64"), transport=transport)
    return told(lambda: made([torch.ones(())], [torch.ones(())], torch.ones(2)))


def test_all_ranks_name_both_schemas() -> None:
    first, second = launch(send_another_schema, 2)
    assert first.startswith(
        "ProgramError: rank 0: 'send to 1 [mb 0]: [2] float64'\n  saw: a value of schema [2] float32"
    )
    assert second.startswith("RankError: rank 1: 'recv from 0 [mb 0]: [2] float64'\n  saw: rank 0 failed at 'send to 1")
    assert "a value of schema [2] float32" in second


def shapes_that_follow_from_data() -> str:
    def stage(p: Any, s: Any, batch: torch.Tensor, x: Any) -> Any:
        return s, batch[batch > 0] if x is None else x

    made = pipeline([stage, stage], transport=Distributed(timeout=5))
    _, out = made([None], [None], torch.tensor([1.0, -1.0]))
    assert out.shape == (1,)
    return told(lambda: made([None], [None], torch.tensor([1.0, 1.0])))


def test_shapes_that_follow_from_data_are_refused() -> None:
    first, second = launch(shapes_that_follow_from_data, 2)
    assert first == (
        "ProgramError: rank 0: 'send to 1 [mb 0]'\n  saw: [2] float32, of shapes [(2,)], where for the same class of "
        "batch it sent [1] float32, of shapes [(1,)]\n  instead: shapes that follow from the batch's class alone"
    )
    assert "rank 0 failed at 'send to 1 [mb 0]': ProgramError" in second


def test_the_texts_that_ranks_compare_are_those_of_their_plans() -> None:
    made = pipeline([scale] * 2)
    plan, same = Plan(made.programs(1)), Plan(made.programs(1))
    assert (plan.digest, plan.text) == (same.digest, same.text)
    assert plan.text.splitlines()[0].startswith("weft ")
    assert Plan(made.programs(2)).digest != plan.digest
