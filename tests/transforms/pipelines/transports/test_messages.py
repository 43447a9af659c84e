"""Messages between processes: schemas, values in any storage layout, and refusals."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import advance, scale, told

from weft.errors import ProgramError
from weft.meshes.collectives import AllGather, AllReduce
from weft.ops.transfers.collective import Member
from weft.ops.transfers.transfer import find
from weft.proofs import assert_equal
from weft.transforms.pipelines.checker import CheckedPrograms
from weft.transforms.pipelines.pipeline import pipeline
from weft.transforms.pipelines.schedule import Job, make_programs
from weft.transforms.pipelines.transports.agreement import Agreement
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.launch import launch
from weft.transforms.pipelines.transports.messaging.messages import ProcessLink
from weft.transforms.pipelines.transports.watching.records import Position
from weft.transforms.pipelines.worker import StageRun, Worker
from weft.values.schema import Schema


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
    step = pipeline([scale] * 2, schema=Schema.parse("[2] float32"))
    worker = Worker(1, [StageRun(1, scale, None, None)], None, [None])
    with pytest.raises(ProgramError) as error:
        worker.perform(step.programs(1)[1].effects[0], Given(torch.zeros(3, dtype=torch.float64)))
    assert (
        str(error.value)
        == "rank 1: 'recv from 0 [mb 0]: [2] float32'\n  saw: a value of schema [3] float64\n"
        "  instead: return [2] float32 from the stage"
    )


def send_another_schema() -> str:
    transport = Distributed(timeout=5)
    step = pipeline([scale] * 2, schema=Schema.parse("[2] float64"), transport=transport)
    return told(lambda: step([torch.ones(())], [torch.ones(())], torch.ones(2)))


def test_all_ranks_name_both_schemas() -> None:
    first, second = launch(send_another_schema, 2)
    assert first.startswith(
        "ProgramError: rank 0: 'send to 1 [mb 0]: [2] float64'\n  saw: a value of schema [2]"
        " float32"
    )
    assert second.startswith(
        "RankError: rank 1: 'recv from 0 [mb 0]: [2] float64'\n  saw: rank 0 failed at 'send to 1"
    )
    assert "a value of schema [2] float32" in second


def collectives_of_one_value() -> list[tuple[int, ...]]:
    transport = Distributed(timeout=5)
    member: Member = find(transport.member, "a collective")
    effects = AllReduce((0, 1)), AllGather((0, 1), dim=-1)
    shapes = [
        tuple(member.perform(effect, x).shape)
        for x in (torch.ones(()), torch.ones(1, 1), torch.ones(4, 4)[1:2, 1:2])
        for effect in effects[: 1 + x.ndim]
    ]
    transport.close()
    return shapes


def test_a_collective_keeps_the_dimensions_of_a_single_value() -> None:
    assert launch(collectives_of_one_value, 2) == [[(), (1, 1), (1, 2), (1, 1), (1, 2)]] * 2


def shapes_that_follow_from_data() -> str:
    def stage(p: Any, s: Any, batch: torch.Tensor, x: Any) -> Any:
        return s, batch[batch > 0] if x is None else x

    step = pipeline([stage, stage], transport=Distributed(timeout=5))
    _, out = step([None], [None], torch.tensor([1.0, -1.0]))
    assert out.shape == (1,)
    return told(lambda: step([None], [None], torch.tensor([1.0, 1.0])))


def test_shapes_that_follow_from_data_are_refused() -> None:
    first, second = launch(shapes_that_follow_from_data, 2)
    assert (
        first
        == "ProgramError: rank 0: 'send to 1 [mb 0]'\n  saw: [2] float32, of shapes [(2,)], where"
        " for the same class of batch it sent [1] float32, of shapes [(1,)]\n  instead: shapes"
        " that depend on the batch's class only"
    )
    assert "rank 0 failed at 'send to 1 [mb 0]': ProgramError" in second


def odd_values() -> dict[str, Any]:
    """Tensors whose elements torch does not store as bytes in order."""
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
        for values in got:
            # NaN is not equal to itself, but it is the same value
            assert repr(values.pop("no number")) == "nan"
            assert_equal(
                "odd values",
                values,
                {name: x for name, x in odd_values().items() if name != "no number"},
            )


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
    problems = {
        "sparse": "a tensor that is sparse_coo\n  instead: return plain tensors from the stage",
        "nested": "a tensor that is nested\n  instead: return plain tensors from the stage",
        "elsewhere": "a tensor on 'meta'\n  instead: return tensors on 'cpu' from the stage",
        "requires grad": (
            "a tensor that requires grad, which does not come back from another process\n  instead:"
            " torch.no_grad() around the call, or detach() in the stage; for gradients"
            " transport=Local()"
        ),
    }
    first, second = launch(send_refused, 2)
    assert first == {
        name: f"ProgramError: rank 0: 'send to 1 [mb 0]'\n  saw: {text}"
        for name, text in problems.items()
    }
    for text in second.values():
        assert "rank 0 failed at 'send to 1 [mb 0]': ProgramError" in text


def send_equal_values() -> str:
    """Sends 1 and then True, which counts as a different value."""
    stages = [lambda p, s, batch, x: (s, (batch, p)), lambda p, s, batch, x: (s, x)]
    step = pipeline(stages, transport=Distributed(timeout=5))
    step([1], [None], torch.ones(1))
    return told(lambda: step([True], [None], torch.ones(1)))


def test_a_value_that_is_no_tensor_is_not_taken_for_another_one_that_is_equal() -> None:
    first, _ = launch(send_equal_values, 2)
    assert (
        first
        == "ProgramError: rank 0: 'send to 1 [mb 0]'\n  saw: [0][1] float32, of shapes [(1,)],"
        " beside [True], where for the same class of batch it sent [0][1] float32, of shapes"
        " [(1,)], beside [1]\n  instead: values other than tensors that depend on the batch's"
        " class only; or tensors in their place"
    )


def under_grad() -> str:
    step = pipeline([scale] * 2, transport=Distributed(timeout=5))
    loss = torch.func.grad(lambda p: step([p], [torch.zeros(())], torch.ones(2))[1].sum())
    return told(lambda: loss(torch.ones(())))


def test_a_transform_of_torch_func_does_not_reach_other_processes() -> None:
    for text in launch(under_grad, 2):
        assert text.startswith(
            "ProgramError: pipeline(..., transport=Distributed(device='cpu', backend='gloo'))"
            " inside a torch.func transform\n  saw: ranks outside the thread in which vmap, grad,"
            " jvp or vjp is active\n"
        )


def leave_a_session() -> tuple[str, str, Any]:
    """An output of an unclosed session must not be received as an output of another session."""
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
        assert (
            again
            == "ProgramError: pipeline(..., transport=Distributed(device='cpu', backend='gloo'))\n "
            " saw: messages under way of a session that was not closed, which this call would"
            " receive\n  instead: session.close() first, on every rank; or a transport for each"
        )
        assert out.tolist() == [7.0, 7.0]


def call_in_a_stage() -> str:
    transport = Distributed(timeout=5)
    inner = pipeline([scale] * 2, transport=transport)

    def stage(p: Any, s: Any, batch: torch.Tensor, x: Any) -> Any:
        return s, inner([torch.ones(())], [torch.zeros(())], batch if x is None else x)[1]

    return told(
        lambda: pipeline([stage, stage], transport=transport)([None], [None], torch.ones(2))
    )


def test_a_call_within_a_call_is_refused_at_once() -> None:
    first, second = launch(call_in_a_stage, 2)
    assert first.startswith(
        "ProgramError: pipeline(..., transport=Distributed(device='cpu', backend='gloo'))\n  saw: a"
        " call"
    )
    assert "rank 0 failed at 'run stage 0 [mb 0]': ProgramError" in second


class Draining:
    """An end whose sends stay in flight until somebody waits for them."""

    def __init__(self) -> None:
        self.drained = 0

    def drain(self) -> None:
        self.drained += 1


@pytest.mark.parametrize(("buffers", "drained"), [(None, 0), (1, 1)])
def test_a_run_waits_for_what_the_one_before_sent_of_buffers_that_it_overwrites(
    buffers: int | None, drained: int
) -> None:
    """A micro-batch that does not feed may be in flight when a run ends, and the next run has no
    fence for it."""
    programs = make_programs(2, [Job(feeds=False)], buffers=buffers)
    assert "fence" not in str(programs[0])
    end: Any = Draining()
    monitor: Any = SimpleNamespace(rank=0, num_ranks=2, here=Position())
    wire: Any = None
    ProcessLink(end, monitor, wire, Agreement(0), torch.device("cpu")).begin(
        CheckedPrograms(programs, buffers), 1
    )
    assert end.drained == drained


def test_the_texts_that_ranks_compare_are_those_of_their_plans() -> None:
    step = pipeline([scale] * 2)
    checked = CheckedPrograms(step.programs(1))
    same = CheckedPrograms(step.programs(1))
    assert (checked.digest, checked.text) == (same.digest, same.text)
    assert checked.text.splitlines()[0].startswith("weft ")
    assert CheckedPrograms(step.programs(2)).digest != checked.digest
