"""Schedules pass their check at every size, and the check catches each planted fault."""

from collections.abc import Callable, Sequence

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.effects import Broadcast, Effect, Program, Recv, Run, Schema, Send, TensorSchema
from weft.errors import ProgramError
from weft.transforms.checker import Step, check, interleave
from weft.transforms.schedule import streaming

SCHEMA = Schema((TensorSchema("h", ("num_tokens", 4), torch.float32),))
OTHER = Schema((TensorSchema("h", ("num_tokens", 8), torch.float32),))
SIZES = [(ranks, mbs) for ranks in (1, 2, 3, 5, 8) for mbs in (1, 2, 3, 7)]


@pytest.mark.parametrize(("ranks", "mbs"), SIZES)
@pytest.mark.parametrize("feedback", [False, True])
def test_streaming_passes_for_every_size(ranks: int, mbs: int, feedback: bool) -> None:
    programs = streaming(ranks, mbs, schema=SCHEMA, feedback=feedback)
    check(programs)
    for capacity in (1, 2, mbs):
        ran = list(interleave(programs, capacity=capacity))
        assert_each_effect_once_in_order(programs, ran)
        assert_bounded(ran, capacity)


def assert_each_effect_once_in_order(programs: Sequence[Program], ran: Sequence[Step]) -> None:
    for program in programs:
        assert tuple(step.effect for step in ran if step.rank == program.rank) == program.effects


def assert_bounded(ran: Sequence[Step], capacity: int) -> None:
    """No edge ever holds more than `capacity` messages, nor fewer than none."""
    held: dict[tuple[int, int], int] = {}
    for step in ran:
        match step.effect:
            case Send(to):
                held[step.rank, to] = held.get((step.rank, to), 0) + 1
            case Recv(source):
                held[source, step.rank] -= 1
        assert all(0 <= n <= capacity for n in held.values())
    assert not any(held.values())


def test_stages_of_different_micro_batches_overlap() -> None:
    """While rank 1 runs micro-batch 0, rank 0 is already at the next: that is what a pipeline is for."""
    runs = [(s.rank, s.effect.microbatch) for s in interleave(streaming(2, 3)) if isinstance(s.effect, Run)]
    assert runs.index((0, 1)) < runs.index((1, 1))
    assert runs.index((0, 2)) < runs.index((1, 2))


def test_a_rank_runs_each_micro_batch_once_then_advances() -> None:
    first, last = streaming(2, 2, feedback=True)
    assert [str(e) for e in first.effects] == [
        "run stage 0 [mb 0]", "send to 1 [mb 0]", "run stage 0 [mb 1]", "send to 1 [mb 1]",
        "broadcast from 1 [mb 0]", "run advance [mb 0]", "broadcast from 1 [mb 1]", "run advance [mb 1]",
    ]  # fmt: skip
    assert [str(e) for e in last.effects][:3] == ["recv from 0 [mb 0]", "run stage 1 [mb 0]", "recv from 0 [mb 1]"]


Fault = Callable[[list[Effect]], None]


def planted(rank: int, fault: Fault, feedback: bool = False) -> tuple[Program, ...]:
    """A good schedule of three ranks and two micro-batches with one fault on one rank."""
    programs = list(streaming(3, 2, schema=SCHEMA, feedback=feedback))
    effects = list(programs[rank].effects)
    fault(effects)
    programs[rank] = attrs.evolve(programs[rank], effects=tuple(effects))
    return tuple(programs)


def position(effects: list[Effect], text: str) -> int:
    return next(i for i, e in enumerate(effects) if str(e).startswith(text))


def replaced(text: str, effect: Effect) -> Fault:
    return lambda effects: effects.__setitem__(position(effects, text), effect)


def without(text: str) -> Fault:
    return lambda effects: effects.__delitem__(position(effects, text))


def swapped(a: str, b: str) -> Fault:
    def fault(effects: list[Effect]) -> None:
        i, j = position(effects, a), position(effects, b)
        effects[i], effects[j] = effects[j], effects[i]

    return fault


ORDER = "the same micro-batches in the same order, and one schema, on both ends of an edge"
PAIRING = "give every send a recv, and order them so that one message an edge is enough"
FAULTS: dict[str, tuple[int, Fault, str, str]] = {
    "recvs swapped": (1, swapped("recv from 0 [mb 0]", "recv from 0 [mb 1]"),
        f"rank 0: 'send to 1 [mb 0]: {SCHEMA}' meets rank 1: 'recv from 0 [mb 1]: {SCHEMA}'", ORDER),
    "sends swapped": (0, swapped("send to 1 [mb 0]", "send to 1 [mb 1]"),
        f"rank 0: 'send to 1 [mb 1]: {SCHEMA}' meets rank 1: 'recv from 0 [mb 0]: {SCHEMA}'", ORDER),
    "schema": (1, replaced("recv from 0 [mb 1]", Recv(0, 1, OTHER)),
        f"rank 0: 'send to 1 [mb 1]: {SCHEMA}' meets rank 1: 'recv from 0 [mb 1]: {OTHER}'", ORDER),
    "no schema": (1, replaced("recv from 0 [mb 1]", Recv(0, 1)),
        f"rank 0: 'send to 1 [mb 1]: {SCHEMA}' meets rank 1: 'recv from 0 [mb 1]'", ORDER),
    "last recv missing": (2, without("recv from 1 [mb 1]"),
        f"rank 1: 'send to 2 [mb 1]: {SCHEMA}' is never received", "a recv on rank 2"),
    "all recvs missing": (1, lambda effects: [effects.pop(position(effects, "recv")) for _ in range(2)] and None,
        f"no rank can go on. Waiting: rank 0: 'send to 1 [mb 1]: {SCHEMA}'", PAIRING),
    "send missing": (1, without("send to 2 [mb 1]"),
        f"no rank can go on. Waiting: rank 2: 'recv from 1 [mb 1]: {SCHEMA}'. At their end: ranks [0, 1]", PAIRING),
    "sent to the wrong rank": (0, replaced("send to 1 [mb 1]", Send(2, 1, SCHEMA)),
        f"no rank can go on. Waiting: rank 1: 'recv from 0 [mb 1]: {SCHEMA}'", PAIRING),
    "received from the wrong rank": (2, replaced("recv from 1 [mb 0]", Recv(0, 0, SCHEMA)),
        "no rank can go on. Waiting: rank 1: 'send to 2 [mb 1]", PAIRING),
    "sent twice": (1, lambda effects: effects.append(Send(2, 1, SCHEMA)), "is never received", "a recv on rank 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_check_catches(name: str) -> None:
    rank, fault, seen, instead = FAULTS[name]
    with pytest.raises(ProgramError) as error:
        check(planted(rank, fault))
    assert seen in error.value.seen
    assert error.value.instead == instead
    assert error.value.call.startswith("check of ")


BROADCASTS: dict[str, Fault] = {
    "missing": without("broadcast from 2 [mb 1]"),
    "of another root": replaced("broadcast from 2 [mb 1]", Broadcast(0, 1)),
    "swapped": swapped("broadcast from 2 [mb 0]", "broadcast from 2 [mb 1]"),
}


@pytest.mark.parametrize("name", BROADCASTS)
@pytest.mark.parametrize("rank", range(3))
def test_the_check_catches_a_broadcast(name: str, rank: int) -> None:
    with pytest.raises(ProgramError, match=r"no rank can go on\. Waiting: "):
        check(planted(rank, BROADCASTS[name], feedback=True))


def test_a_deadlock_of_two_ranks_that_wait_for_each_other() -> None:
    programs = [Program(r, 2, (Recv(1 - r, 0), Send(1 - r, 0))) for r in range(2)]
    with pytest.raises(ProgramError) as error:
        check(programs)
    assert error.value.seen == (
        "no rank can go on. Waiting: rank 0: 'recv from 1 [mb 0]'; rank 1: 'recv from 0 [mb 0]'"
    )


def test_a_deadlock_that_a_larger_buffer_hides_is_one() -> None:
    programs = [Program(0, 2, (Send(1, 0), Send(1, 1), Send(1, 2), Recv(1, 3))),
                Program(1, 2, (Send(0, 3), Send(0, 4), Recv(0, 0), Recv(0, 1), Recv(0, 2)))]  # fmt: skip
    with pytest.raises(ProgramError, match="no rank can go on"):
        check(programs)
    programs[0] = Program(0, 2, (Send(1, 0), Send(1, 1), Send(1, 2), Recv(1, 3), Recv(1, 4)))
    list(interleave(programs, capacity=3))


@pytest.mark.parametrize("programs", [streaming(3, 1)[:2], streaming(3, 1)[::-1], streaming(2, 1) + streaming(1, 1)])
def test_programs_of_other_ranks_are_refused(programs: Sequence[Program]) -> None:
    with pytest.raises(ProgramError, match=r"program \d says it is of rank \d of \d") as error:
        check(programs)
    assert error.value.instead == "give the programs of all ranks, in order"


def runs(*whats: str) -> tuple[Effect, ...]:
    return tuple(Run(what, 0) for what in whats)


UNMADE: dict[str, list[Program]] = {
    "sent before it is made": [
        Program(0, 2, (Send(1, 0), *runs("stage 0"))), Program(1, 2, (Recv(0, 0), *runs("stage 1")))],
    "run before it is received": [
        Program(0, 2, (*runs("stage 0"), Send(1, 0))), Program(1, 2, (*runs("stage 1"), Recv(0, 0)))],
    "sent twice": [
        Program(0, 2, (*runs("stage 0"), Send(1, 0), Send(1, 0))),
        Program(1, 2, (Recv(0, 0), Recv(0, 0), *runs("stage 1")))],
    "broadcast before it is made": [Program(0, 1, (Broadcast(0, 0), *runs("stage 0", "advance")))],
    "broadcast from no rank": [Program(0, 1, (*runs("stage 0"), Broadcast(7, 0), *runs("advance")))],
    "advanced without the output": [
        Program(0, 2, (*runs("stage 0"), Send(1, 0), *runs("advance"))),
        Program(1, 2, (Recv(0, 0), *runs("stage 1", "advance")))],
}  # fmt: skip


@pytest.mark.parametrize("name", UNMADE)
def test_the_check_catches_a_value_that_is_not_there(name: str) -> None:
    """The messages pair up, but the transport would look for a value that nobody made."""
    with pytest.raises(ProgramError):
        check(UNMADE[name])


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 4), st.integers(1, 3), st.booleans(), st.data())
def test_no_single_message_can_be_dropped(ranks: int, mbs: int, feedback: bool, data: st.DataObject) -> None:
    programs = list(streaming(ranks, mbs, feedback=feedback))
    rank = data.draw(st.integers(0, ranks - 1))
    effects = list(programs[rank].effects)
    messages = [i for i, e in enumerate(effects) if not isinstance(e, Run)]
    del effects[data.draw(st.sampled_from(messages))]
    programs[rank] = attrs.evolve(programs[rank], effects=tuple(effects))
    with pytest.raises(ProgramError):
        check(programs)
