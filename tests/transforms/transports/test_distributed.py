"""Processes: what Local gives, by gloo; what differs between ranks is found and named; what is refused."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import SCENARIOS, advance, run_all, run_scenario, scale, told

from weft.effects import Schema
from weft.errors import DeviceError, ProgramError
from weft.proofs.laws import LawViolation, assert_equal
from weft.transforms.pipeline import pipeline
from weft.transforms.schedule import Job, make_programs
from weft.transforms.transports.distributed import Distributed
from weft.transforms.transports.launch import launch
from weft.transforms.transports.local import Local
from weft.transforms.transports.messages import ProcessLink
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


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("-1", "2"), ("0", "0"), ("0", "two")])
def test_a_place_that_cannot_be_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ProgramError) as error:
        Distributed()
    assert error.value.seen == f"RANK='{rank}', WORLD_SIZE='{size}' in the environment"
    assert error.value.instead.startswith("0 <= RANK < WORLD_SIZE: torchrun")


def test_an_environment_that_names_no_store_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ProgramError, match="MASTER_ADDR expected, but not set") as error:
        Distributed(device="cpu")
    assert error.value.call == "Distributed() on rank 0 of 1"


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


def other_advance(s: torch.Tensor, batch: torch.Tensor, out: Any) -> torch.Tensor:
    return s - batch.sum()


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
        advance={"advance": None, "other advance": other_advance}.get(what, advance) if mine else advance,
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
        ("other advance", "advance: advance", "advance: other_advance"),
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


def odd_values() -> dict[str, Any]:
    """What torch stores in other ways than its bytes in order."""
    turned = torch.tensor([1.0 + 2.0j, 3.0 - 4.0j])
    return {
        "one of a stride": torch.arange(6.0)[4::4],
        "one, negated": turned[:1].conj().imag,
        "negated": turned.conj().imag,
        "conjugated": turned.conj(),
        "expanded": torch.tensor(3, dtype=torch.int8).expand(2, 2),
        "transposed": torch.arange(6.0).reshape(2, 3).t()[::2],
        "empty": torch.empty(0, 3, dtype=torch.bool),
        "none": None,
        "no number": float("nan"),
    }


def send_odd_values() -> list[dict[str, Any]]:
    stages = [lambda p, s, batch, x: (s, odd_values()), lambda p, s, batch, x: (s, x)]
    step = pipeline(stages, transport=Distributed(timeout=5))
    return [step([None], [None], torch.ones(1))[1] for _ in range(2)]


def test_values_arrive_however_they_are_stored() -> None:
    for got in launch(send_odd_values, 2):
        for found in got:
            assert repr(found.pop("no number")) == "nan"  # which is unequal to itself, and still the same
            assert_equal("odd values", found, {name: x for name, x in odd_values().items() if name != "no number"})


def send_refused() -> dict[str, str]:
    values: dict[str, Any] = {
        "sparse": lambda: torch.eye(2).to_sparse(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "elsewhere": lambda: torch.ones(2, device="meta"),
        "requires grad": lambda: torch.ones(2, requires_grad=True),
    }
    said = {}
    for name, make in values.items():
        stages = [lambda p, s, batch, x, make=make: (s, make()), lambda p, s, batch, x: (s, x)]
        step = pipeline(stages, transport=Distributed(timeout=5))
        said[name] = told(lambda step=step: step([None], [None], torch.ones(1)))
    return said


def test_what_would_arrive_as_something_else_is_refused() -> None:
    seen = {
        "sparse": "a tensor that is sparse_coo\n  instead: return plain tensors from the stage",
        "nested": "a tensor that is nested\n  instead: return plain tensors from the stage",
        "elsewhere": "a tensor on 'meta'\n  instead: return tensors on 'cpu' from the stage",
        "requires grad": "a tensor that requires grad, which does not come back from another process\n"
        "  instead: torch.no_grad() around the call, or detach() in the stage; for gradients transport=Local()",
    }
    first, second = launch(send_refused, 2)
    assert first == {name: f"ProgramError: rank 0: 'send to 1 [mb 0]'\n  saw: {text}" for name, text in seen.items()}
    for text in second.values():
        assert "rank 0 failed at 'send to 1 [mb 0]': ProgramError" in text


def send_equal_values() -> str:
    """1, and then True, which is another value."""
    stages = [lambda p, s, batch, x: (s, (batch, p)), lambda p, s, batch, x: (s, x)]
    step = pipeline(stages, transport=Distributed(timeout=5))
    step([1], [None], torch.ones(1))
    return told(lambda: step([True], [None], torch.ones(1)))


def test_a_value_that_is_no_tensor_is_not_taken_for_another_one_that_is_equal() -> None:
    first, _ = launch(send_equal_values, 2)
    assert first == (
        "ProgramError: rank 0: 'send to 1 [mb 0]'\n  saw: [0][1] float32, of shapes [(1,)], beside [True], where for "
        "the same class of batch it sent [0][1] float32, of shapes [(1,)], beside [1]\n"
        "  instead: what is no tensor by the batch's class alone, or else as a tensor"
    )


def under_grad() -> str:
    step = pipeline([scale] * 2, transport=Distributed(timeout=5))
    loss = torch.func.grad(lambda p: step([p], [torch.zeros(())], torch.ones(2))[1].sum())
    return told(lambda: loss(torch.ones(())))


def test_a_transform_of_torch_func_does_not_reach_other_processes() -> None:
    for text in launch(under_grad, 2):
        assert text.startswith(
            "ProgramError: pipeline(..., transport=Distributed(device='cpu', backend='gloo')) inside a torch.func "
            "transform\n  saw: ranks outside the thread in which vmap, grad, jvp or vjp is active\n"
        )


def leave_a_session() -> tuple[str, str, Any]:
    """What returns of a session that is not closed must not be taken for what returns of another one."""
    step = pipeline([scale] * 2, advance=advance, transport=Distributed(timeout=5))
    params, state, jobs = [torch.ones(())], [torch.zeros(())], [Job()]
    session = step.session(params, state)
    session.submit([torch.ones(2)], jobs)
    again = told(lambda: step.session(params, state).submit([5 * torch.ones(2)], jobs))
    called = told(lambda: step(params, state, 7 * torch.ones(2)))
    session.close()
    return again, called, step(params, state, 7 * torch.ones(2))[1]


def test_messages_of_a_session_that_was_left_are_not_received_by_another_call() -> None:
    for again, called, out in launch(leave_a_session, 2):
        assert again == called
        assert again == (
            "ProgramError: pipeline(..., transport=Distributed(device='cpu', backend='gloo'))\n"
            "  saw: messages under way of a session that was not closed, which this call would receive\n"
            "  instead: session.close() first, on every rank; or a transport for each"
        )
        assert out.tolist() == [7.0, 7.0]


def call_in_a_stage() -> str:
    transport = Distributed(timeout=5)
    inner = pipeline([scale] * 2, transport=transport)

    def stage(p: Any, s: Any, batch: torch.Tensor, x: Any) -> Any:
        return s, inner([torch.ones(())], [torch.zeros(())], batch if x is None else x)[1]

    return told(lambda: pipeline([stage, stage], transport=transport)([None], [None], torch.ones(2)))


def test_a_call_within_a_call_is_refused_at_once() -> None:
    first, second = launch(call_in_a_stage, 2)
    assert first.startswith(
        "ProgramError: pipeline(..., transport=Distributed(device='cpu', backend='gloo'))\n  saw: a call"
    )
    assert "rank 0 failed at 'run stage 0 [mb 0]': ProgramError" in second


class Draining:
    """An end whose sends are under way until they are waited for."""

    def __init__(self) -> None:
        self.drained = 0

    def drain(self) -> None:
        self.drained += 1


@pytest.mark.parametrize(("buffers", "drained"), [(None, 0), (1, 1)])
def test_a_run_waits_for_what_the_one_before_sent_of_buffers_that_it_overwrites(
    buffers: int | None, drained: int
) -> None:
    """A micro-batch that feeds nothing may still be on its way when a run ends: the next has no fence for it."""
    programs = make_programs(2, [Job(feeds=False)], buffers=buffers)
    assert "fence" not in str(programs[0])
    end: Any = Draining()
    watch: Any = SimpleNamespace(rank=0, num_ranks=2)
    ProcessLink(end, watch, torch.device("cpu")).begin(Plan(programs, buffers), 1)
    assert end.drained == drained


def test_the_texts_that_ranks_compare_are_those_of_their_plans() -> None:
    made = pipeline([scale] * 2)
    plan, same = Plan(made.programs(1)), Plan(made.programs(1))
    assert (plan.digest, plan.text) == (same.digest, same.text)
    assert plan.text.splitlines()[0].startswith("weft ")
    assert Plan(made.programs(2)).digest != plan.digest


def run_on_gpus(num_ranks: int, backend: Any) -> list[str]:
    """The scenarios that differ from what one process gives on the same device."""
    transport, wrong = Distributed(backend=backend, timeout=20), []
    with transport.device:
        for name in SCENARIOS:
            if name == "requests":  # whose batches are the CPU's
                continue
            seen = SCENARIOS[name](num_ranks, transport)
            transport.synchronize()
            try:
                assert_equal(name, seen, parts(name, num_ranks, transport.rank))
            except LawViolation as error:
                wrong.append(str(error))
    transport.close()
    return wrong


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["nccl", "peer"])
def test_on_gpus_it_gives_what_local_gives(backend: str) -> None:
    assert launch(run_on_gpus, 2, 2, backend) == [[], []]
