"""The checks of a single rank's program: planted faults, also of buffers, are refused."""

import pytest
from planting import (
    FED,
    SCHEMA,
    Fault,
    before,
    planted,
    position,
    program,
    refused,
    replaced,
    swapped,
    without,
)

from weft.effects import Broadcast, Effect, Fence, Recv, Run, Send
from weft.errors import ProgramError
from weft.transforms.pipelines.checker import check
from weft.transforms.pipelines.schedule import streaming

VALUES = "recv, then run, then send or broadcast, then fence and advance, each once a micro-batch"
OWN: dict[str, tuple[int, Fault, str, str]] = {
    "a stage of another rank": (
        1,
        replaced("run stage 1 [mb 1]", Run("stage 2", 1)),
        "'run stage 2 [mb 1]' on rank 1 of 3",
        "run stage 1, or run advance",
    ),
    "no stage": (
        1,
        replaced("run stage 1 [mb 1]", Run("stages", 1)),
        "'run stages [mb 1]' on rank 1 of 3",
        "run stage 1, or run advance",
    ),
    "a send past the next": (
        0,
        replaced("send to 1 [mb 1]", Send(2, 1, SCHEMA)),
        f"'send to 2 [mb 1]: {SCHEMA}' on rank 0 of 3",
        "send to 1",
    ),
    "a send to itself": (
        1,
        replaced("send to 2 [mb 1]", Send(1, 1, SCHEMA)),
        f"'send to 1 [mb 1]: {SCHEMA}' on rank 1 of 3",
        "send to 2",
    ),
    "a send to no rank": (
        1,
        replaced("send to 2 [mb 1]", Send(-1, 1, SCHEMA)),
        f"'send to -1 [mb 1]: {SCHEMA}' on rank 1 of 3",
        "send to 2",
    ),
    "a send from the last": (
        2,
        replaced("broadcast from 2 [mb 0]", Send(3, 0)),
        "'send to 3 [mb 0]' on rank 2 of 3",
        "a broadcast: the last rank sends to none",
    ),
    "a recv from elsewhere": (
        2,
        replaced("recv from 1 [mb 0]", Recv(0, 0, SCHEMA)),
        f"'recv from 0 [mb 0]: {SCHEMA}' on rank 2 of 3",
        "recv from 1",
    ),
    "a recv on the first": (
        0,
        lambda effects: effects.insert(0, Recv(2, 0)),
        "'recv from 2 [mb 0]' on rank 0 of 3",
        "no recv: the first stage runs on the batch",
    ),
    "a broadcast from elsewhere": (
        0,
        replaced("broadcast from 2 [mb 0]", Broadcast(0, 0)),
        "'broadcast from 0 [mb 0]' on rank 0 of 3",
        "broadcast from 2, the last rank",
    ),
    "a broadcast from no rank": (
        0,
        replaced("broadcast from 2 [mb 0]", Broadcast(7, 0)),
        "'broadcast from 7 [mb 0]' on rank 0 of 3",
        "broadcast from 2, the last rank",
    ),
    "run before received": (
        1,
        swapped("recv from 0 [mb 0]", "run stage 1 [mb 0]"),
        "'run stage 1 [mb 0]' without 'recv from 0 [mb 0]' before it",
        VALUES,
    ),
    "never received": (
        2,
        without("recv from 1 [mb 1]"),
        "'run stage 2 [mb 1]' without 'recv from 1 [mb 1]' before it",
        VALUES,
    ),
    "sent before it is made": (
        0,
        swapped("send to 1 [mb 1]", "run stage 0 [mb 1]"),
        f"'send to 1 [mb 1]: {SCHEMA}' without 'run stage 0 [mb 1]' before it",
        VALUES,
    ),
    "returned before it is made": (
        2,
        swapped("run stage 2 [mb 1]", "broadcast from 2 [mb 1]"),
        "'broadcast from 2 [mb 1]' without 'run stage 2 [mb 1]' before it",
        VALUES,
    ),
    "advanced before it returned": (
        1,
        swapped("broadcast from 2 [mb 1]", "run advance [mb 1]"),
        "'run advance [mb 1]' without 'broadcast from 2 [mb 1]' before it",
        VALUES,
    ),
    "advanced without what returned": (
        1,
        without("broadcast from 2 [mb 1]"),
        "'run advance [mb 1]' without 'broadcast from 2 [mb 1]' before it",
        VALUES,
    ),
    "fenced before it is sent": (
        0,
        lambda effects: effects.insert(0, Fence(0)),
        "'fence [mb 0]' without 'send to 1 [mb 0]' before it",
        VALUES,
    ),
    "sent twice": (
        0,
        lambda effects: effects.append(Send(1, 1)),
        "'send to 1 [mb 1]' once more",
        VALUES,
    ),
    "received twice": (
        1,
        lambda effects: effects.append(Recv(0, 0)),
        "'recv from 0 [mb 0]' once more",
        VALUES,
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_what_one_rank_does_wrong(name: str) -> None:
    rank, change, problem, instead = OWN[name]
    error = refused(planted(FED, rank, change))
    assert (error.call, error.problem, error.instead) == (
        f"check of rank {rank}'s program",
        problem,
        instead,
    )


@pytest.mark.parametrize("what", ["stage 0", "advance"])
def test_run_twice(what: str) -> None:
    error = refused(planted(FED, 0, lambda effects: effects.append(Run(what, 1))))
    assert "micro-batches [0, 1, 1]" in error.problem


def test_advance_needs_no_broadcast_where_the_job_does_not_feed() -> None:
    check(
        [
            program(0, 2, "run stage 0 [mb 0]", "send to 1 [mb 0]", "run advance [mb 0]"),
            program(1, 2, "recv from 0 [mb 0]", "run stage 1 [mb 0]", "run advance [mb 0]"),
        ]
    )
    error = refused(planted(streaming(1, 1, feedback=True), 0, lambda effects: effects.reverse()))
    assert error.problem == "'run advance [mb 0]' without 'run stage 0 [mb 0]' before it"


def test_inputs_may_wait_for_their_stage() -> None:
    """A rank may receive ahead of its runs, since each input is a separate value."""
    programs = planted(
        streaming(2, 3, buffers=1), 1, before("recv from 0 [mb 1]", "run stage 1 [mb 0]")
    )
    check(programs, buffers=1)


def test_a_second_fence_waits_for_nothing() -> None:
    check(
        planted(streaming(2, 2, buffers=1), 0, lambda effects: effects.append(Fence(0))), buffers=1
    )


# Buffers.


def overwritten(change: Fault, rank: int = 0, buffers: int = 1, mbs: int = 3) -> ProgramError:
    programs = streaming(2, mbs, feedback=True, buffers=buffers)
    check(programs, buffers=buffers)
    error = refused(planted(programs, rank, change), buffers)
    assert error.call == f"check of rank {rank}'s program"
    return error


def test_a_run_into_a_buffer_without_a_fence() -> None:
    error = overwritten(without("fence [mb 1]"))
    assert (
        error.problem
        == "'run stage 0 [mb 2]' overwrites what 'run stage 0 [mb 1]' made, with no 'fence [mb 1]'"
        " before it"
    )
    assert error.instead == "'fence [mb 1]' before 'run stage 0 [mb 2]'"
    assert "with no 'fence [mb 0]'" in overwritten(without("fence [mb 0]"), rank=1).problem
    assert (
        "with no 'fence [mb 0]'"
        in overwritten(swapped("fence [mb 0]", "run stage 0 [mb 2]"), buffers=2).problem
    )


def test_a_run_into_a_buffer_that_is_yet_to_be_sent() -> None:
    """No send is in flight when the next run overwrites the result, so nothing is left to send."""
    early = before("run stage 0 [mb 1]", "send to 1 [mb 0]")
    error = overwritten(early)
    assert error.problem.endswith(
        "overwrites what 'run stage 0 [mb 0]' made, with no 'send to 1 [mb 0]' before it"
    )
    for enough in (None, 2):
        check(planted(streaming(2, 3, feedback=True, buffers=enough), 0, early), buffers=enough)


def test_a_run_into_a_buffer_whose_output_is_yet_to_be_read() -> None:
    """The last rank advances with the output that its stage left in the buffer."""

    def late(effects: list[Effect]) -> None:
        effects.append(effects.pop(position(effects, "run advance [mb 0]")))

    error = overwritten(late, rank=1)
    assert error.problem.endswith(
        "overwrites what 'run stage 1 [mb 0]' made, with no 'run advance [mb 0]' before it"
    )
    # Elsewhere it is a separate value
    check(planted(streaming(2, 3, feedback=True, buffers=1), 0, late), buffers=1)


def test_fewer_buffers_than_the_programs_were_made_for() -> None:
    programs = streaming(2, 4, buffers=2)
    check(programs, buffers=2)
    check(programs, buffers=3)
    assert "with no 'fence [mb 0]' before it" in refused(programs, 1).problem
    assert "with no 'fence [mb 0]' before it" in refused(streaming(2, 4), 3).problem
