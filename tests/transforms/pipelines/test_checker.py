"""The checker refuses each planted fault, and its error names the fault and the remedy."""

import re
from collections.abc import Sequence
from typing import Any, get_args

import attrs
import pytest
from hypothesis import HealthCheck, find, given, settings
from planting import FED, OTHER, SCHEMA, Fault, before, planted, program, refused, replaced, without

from weft.effects import Broadcast, Effect, Fence, Program, Recv, Run, Send, parse_effect
from weft.errors import ProgramError
from weft.meshes.collectives import Collective
from weft.proofs._laws.schedule import (
    broken_programs_are_refused,
    checker_is_right,
    schedules_are_right,
)
from weft.proofs._strategies.programs import (
    FAULTS,
    Broken,
    any_effects,
    broken_programs,
    edited_programs,
)
from weft.proofs.checks.programs_exhaustive import fault, fenced
from weft.proofs.strategies import Scheduled, programs
from weft.transforms.pipelines.checker import check
from weft.transforms.pipelines.machine import Edge, Machine, Step, interleave, puts, takes
from weft.transforms.pipelines.pipeline import pipeline
from weft.transforms.pipelines.schedule import Job, make_programs, streaming

# Messages between ranks.

ORDER = "the same micro-batches in the same order, and one schema, on both ends of an edge"
PAIRING = "give every send a recv, and order them so that one message an edge is enough"
PLAIN = streaming(3, 2, schema=SCHEMA)

MEETINGS: dict[str, tuple[int, Fault, str, str]] = {
    "recvs swapped": (
        2,
        before("recv from 1 [mb 1]", "recv from 1 [mb 0]"),
        (
            f"rank 2 expects 'recv from 1 [mb 1]: {SCHEMA}' but gets"
            f" 'send to 2 [mb 0]: {SCHEMA}' from rank 1"
        ),
        ORDER,
    ),
    "schema": (
        1,
        replaced("recv from 0 [mb 1]", Recv(0, 1, OTHER)),
        (
            f"rank 1 expects 'recv from 0 [mb 1]: {OTHER}' but gets"
            f" 'send to 1 [mb 1]: {SCHEMA}' from rank 0"
        ),
        ORDER,
    ),
    "no schema": (
        1,
        replaced("recv from 0 [mb 1]", Recv(0, 1)),
        (f"rank 1 expects 'recv from 0 [mb 1]' but gets 'send to 1 [mb 1]: {SCHEMA}' from rank 0"),
        ORDER,
    ),
    "schema of what returns": (
        0,
        replaced("broadcast from 2 [mb 1]", Broadcast(2, 1, SCHEMA)),
        (
            f"rank 0 expects 'broadcast from 2 [mb 1]: {SCHEMA}' but gets"
            f" 'broadcast from 2 [mb 1]' from rank 2"
        ),
        ORDER,
    ),
    "send missing": (
        1,
        without("send to 2 [mb 1]"),
        (
            f"no rank can go on: rank 2: 'recv from 1 [mb 1]: {SCHEMA}' waits for rank 1; "
            "rank 1: 'broadcast from 2 [mb 1]' waits for rank 2: a cycle"
        ),
        PAIRING,
    ),
    "nothing returns": (
        2,
        without("broadcast from 2 [mb 1]"),
        (
            "no rank can go on: rank 0: 'broadcast from 2 [mb 1]' waits for rank 2, which is at"
            " its end"
        ),
        PAIRING,
    ),
}


@pytest.mark.parametrize("name", MEETINGS)
def test_what_meets_and_what_waits(name: str) -> None:
    rank, change, problem, instead = MEETINGS[name]
    error = refused(planted(FED, rank, change))
    assert (error.call, error.instead) == ("check of 3 programs", instead)
    assert problem in error.problem


def test_a_chain_ends_with_the_rank_that_is_at_its_end() -> None:
    error = refused(planted(PLAIN, 0, without("send to 1 [mb 1]")))
    assert (
        error.problem
        == f"no rank can go on: rank 1: 'recv from 0 [mb 1]: {SCHEMA}' waits for rank 0, which is"
        " at its end"
    )


def test_what_nobody_receives() -> None:
    rank_programs = make_programs(2, [Job(), Job()], advances=False)
    error = refused(planted(rank_programs, 0, without("broadcast from 1 [mb 1]")))
    assert error.problem == "rank 1: 'broadcast from 1 [mb 1]' is never received"
    assert error.instead == "a broadcast on rank 0"


def test_a_cycle_in_words() -> None:
    """Rank 0 waits for an output before it sends the input from which rank 1 computes it."""
    rank_programs = [
        program(0, 2, "run stage 0 [mb 0]", "broadcast from 1 [mb 0]", "send to 1 [mb 0]"),
        program(1, 2, "recv from 0 [mb 0]", "run stage 1 [mb 0]", "broadcast from 1 [mb 0]"),
    ]
    assert (
        refused(rank_programs).problem
        == "no rank can go on: rank 0: 'broadcast from 1 [mb 0]' waits for rank 1; "
        "rank 1: 'recv from 0 [mb 0]' waits for rank 0: a cycle"
    )


def test_a_deadlock_that_a_larger_buffer_hides_is_one() -> None:
    """Rank 0 receives returned outputs only after it has sent everything, so it runs too far ahead
    for edges of one message."""

    def late(effects: list[Effect]) -> None:
        effects.sort(key=lambda e: isinstance(e, Broadcast) or str(e).startswith("run advance"))

    rank_programs = planted(streaming(2, 6, feedback=True), 0, late)
    assert (
        refused(rank_programs).problem
        == "no rank can go on: rank 0: 'send to 1 [mb 3]' waits for rank 1; "
        "rank 1: 'broadcast from 1 [mb 1]' waits for rank 0: a cycle"
    )
    list(interleave(rank_programs, capacity=3))


def test_a_fence_that_waits_for_ever() -> None:
    rank_programs = [
        program(
            0,
            2,
            "run stage 0 [mb 0]",
            "send to 1 [mb 0]",
            "run stage 0 [mb 1]",
            "send to 1 [mb 1]",
            "fence [mb 1]",
            "broadcast from 1 [mb 0]",
            "broadcast from 1 [mb 1]",
        ),
        program(
            1,
            2,
            "recv from 0 [mb 0]",
            "run stage 1 [mb 0]",
            "broadcast from 1 [mb 0]",
            "fence [mb 0]",
            "recv from 0 [mb 1]",
            "run stage 1 [mb 1]",
            "broadcast from 1 [mb 1]",
        ),
    ]
    assert (
        refused(rank_programs).problem
        == "no rank can go on: rank 0: 'fence [mb 1]' waits for rank 1; rank 1: 'fence [mb 0]'"
        " waits for rank 0: a cycle"
    )


# Properties that ranks must share.


def test_programs_of_other_ranks_are_refused() -> None:
    for rank_programs in (
        streaming(3, 1)[:2],
        streaming(3, 1)[::-1],
        streaming(2, 1) + streaming(1, 1),
    ):
        error = refused(rank_programs)
        assert error.problem.startswith("program ")
        assert " says it is of rank " in error.problem
        assert error.instead == "give the programs of all ranks, in order"


@pytest.mark.parametrize(
    ("rank_programs", "buffers", "problem"), [((), None, "no program"), (PLAIN, 0, "buffers=0")]
)
def test_no_program_and_no_buffer_are_refused(
    rank_programs: Sequence[Program], buffers: int | None, problem: str
) -> None:
    assert refused(rank_programs, buffers).problem == problem


def test_a_class_that_differs_on_one_rank() -> None:
    rank_programs = [
        attrs.evolve(p, classes=("uniform 2 reqs", "ragged 3 tokens, 2 reqs")) for p in PLAIN
    ]
    check(rank_programs)
    error = refused(
        [
            *rank_programs[:2],
            attrs.evolve(rank_programs[2], classes=("uniform 2 reqs", "uniform 2 reqs")),
        ]
    )
    assert (
        error.problem == "rank 0 has micro-batches ('uniform 2 reqs', 'ragged 3 tokens, 2 reqs'), "
        "and rank 2 ('uniform 2 reqs', 'uniform 2 reqs')"
    )
    assert error.instead == "make the batch by the same pure function on every rank"


def test_one_class_a_micro_batch() -> None:
    error = refused([attrs.evolve(p, classes=("a", "b", "c")) for p in PLAIN])
    assert (error.problem, error.instead) == (
        "rank 0 runs micro-batches [0, 1]",
        "each of the 3 from 0 on, once",
    )


def test_a_micro_batch_that_one_rank_omits() -> None:
    def omit(effects: list[Effect]) -> None:
        effects[:] = [e for e in effects if e.microbatch != 1]

    error = refused(planted(FED, 1, omit))
    assert error.problem == "rank 0 runs micro-batches [0, 1], and rank 1 [0]"
    assert error.instead == "the same micro-batches in the same order on every rank"
    gap = [attrs.evolve(p, effects=tuple(e for e in p.effects if e.microbatch)) for p in FED]
    assert refused(gap).problem == "rank 0 runs micro-batches [1]"


def test_an_order_that_differs_though_the_edges_agree() -> None:
    """Rank 1 receives 0 and 1, but runs and sends 1 and 0, which rank 2 accepts; the ranks' states
    would differ."""
    last = ("recv from 1 [mb 1]", "run stage 2 [mb 1]", "recv from 1 [mb 0]", "run stage 2 [mb 0]")
    rank_programs = [
        program(
            0, 3, "run stage 0 [mb 0]", "send to 1 [mb 0]", "run stage 0 [mb 1]", "send to 1 [mb 1]"
        ),
        program(
            1,
            3,
            "recv from 0 [mb 0]",
            "recv from 0 [mb 1]",
            "run stage 1 [mb 1]",
            "send to 2 [mb 1]",
            "run stage 1 [mb 0]",
            "send to 2 [mb 0]",
        ),
        program(2, 3, *last),
    ]
    list(interleave(rank_programs))
    assert refused(rank_programs).problem == "rank 0 runs micro-batches [0, 1], and rank 1 [1, 0]"


def test_another_order_on_all_ranks_is_right() -> None:
    renamed = ([attrs.evolve(e, microbatch=1 - e.microbatch) for e in p.effects] for p in FED)
    check(
        [attrs.evolve(p, effects=tuple(effects)) for p, effects in zip(FED, renamed, strict=True)]
    )


def test_an_advance_missing_on_one_rank() -> None:
    error = refused(planted(FED, 1, without("run advance [mb 1]")))
    assert error.problem == "rank 1 advances with micro-batches [0] of 2, and rank 0 with [0, 1]"
    assert error.instead == "every rank advances with each micro-batch once, or none with any"


def test_an_advance_missing_on_all_ranks() -> None:
    rank_programs = FED
    for rank in range(3):
        rank_programs = planted(rank_programs, rank, without("run advance [mb 1]"))
    assert (
        refused(rank_programs).problem
        == "rank 0 advances with micro-batches [0] of 2, and rank 0 with [0]"
    )


# The machine.


def test_what_an_effect_puts_and_takes() -> None:
    assert puts(Step(0, Send(1, 0)), 3) == (Edge(0, 1, "stages"),)
    assert puts(Step(2, Broadcast(2, 0)), 3) == (Edge(2, 0, "returns"), Edge(2, 1, "returns"))
    assert puts(Step(0, Broadcast(2, 0)), 3) == puts(Step(0, Run("advance", 0)), 3) == ()
    assert takes(Step(1, Recv(0, 0))) == Edge(0, 1, "stages")
    assert takes(Step(0, Broadcast(2, 0))) == Edge(2, 0, "returns")
    assert takes(Step(2, Broadcast(2, 0))) is takes(Step(0, Fence(0))) is None


def test_a_broadcast_is_no_barrier() -> None:
    """A broadcast's root continues once the message is sent, even if no other rank has reached the
    broadcast."""
    rank_programs = [
        program(0, 2, "run stage 0 [mb 0]", "broadcast from 1 [mb 0]"),
        program(1, 2, "broadcast from 1 [mb 0]"),
    ]
    machine = Machine(rank_programs)
    assert machine.ready() == [Step(0, Run("stage 0", 0)), Step(1, Broadcast(1, 0))]
    machine.move(Step(1, Broadcast(1, 0)))
    assert machine.next(1) is None
    assert machine.ready() == [Step(0, Run("stage 0", 0))]


def test_a_fence_waits_until_all_that_was_sent_of_its_micro_batch_is_received() -> None:
    machine = Machine(
        [program(0, 2, "send to 1 [mb 0]", "fence [mb 0]"), program(1, 2, "recv from 0 [mb 0]")]
    )
    machine.move(Step(0, Send(1, 0)))
    assert machine.blockers(Step(0, Fence(0))) == (1,)
    assert machine.blockers(Step(0, Fence(1))) == ()
    machine.move(Step(1, Recv(0, 0)))
    assert machine.ready() == [Step(0, Fence(0))]


# Thousands of programs.

QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)


@pytest.mark.nightly
def test_of_thousands_of_programs_no_broken_one_passes_and_no_right_one_is_refused() -> None:
    """A case of `broken_programs` has a dozen programs; the law for `edited_programs` decides which
    of them are correct."""
    refused_ones = accepted = 0

    @settings(deadline=None, max_examples=200, suppress_health_check=QUIET)
    @given(broken_programs())
    def broken(case: Broken) -> None:
        nonlocal refused_ones, accepted
        broken_programs_are_refused(case)
        refused_ones = refused_ones + len(case.wrong)
        accepted = accepted + 1

    @settings(deadline=None, max_examples=800, suppress_health_check=QUIET)
    @given(edited_programs())
    def edited(case: Scheduled) -> None:
        nonlocal refused_ones, accepted
        checker_is_right(case)
        right = fault(case.programs, buffers=case.buffers) is None and fenced(
            case.programs, case.buffers
        )
        refused_ones = refused_ones + (not right)
        accepted = accepted + right

    @settings(deadline=None, max_examples=400, suppress_health_check=QUIET)
    @given(programs())
    def scheduled(case: Scheduled) -> None:
        nonlocal accepted
        schedules_are_right(case)
        accepted += 1

    for examples in (broken, edited, scheduled):
        examples()
    assert refused_ones >= 2000
    assert accepted >= 800


@pytest.mark.parametrize("kind", get_args(Collective))
@pytest.mark.parametrize("place", range(3))
def test_a_collective_is_refused_wherever_it_stands(kind: type[Collective], place: int) -> None:
    """A worker would not perform it, and would silently return something else."""
    effect = kind((0, 1))
    rank_programs = [
        planted(make_programs(2, [Job(feeds=False)], advances=False), rank, put(effect, place))[
            rank
        ]
        for rank in (0, 1)
    ]
    error = refused(rank_programs)
    assert (error.call, error.problem) == (
        "check of rank 0's program",
        f"'{effect}' on rank 0 of 2",
    )
    assert (
        error.instead
        == "a collective inside a stage (weft.all_reduce(x, axis)), with weft.shard(stage, mesh,"
        " ...) or weft.pipeline(stages, mesh=mesh): a program of a pipeline performs none"
    )
    with pytest.raises(ProgramError, match=re.escape(f"'{effect}' on rank 0 of 2")):
        pipeline([lambda p, s, batch, x: (s, batch)] * 2, schedule=rank_programs)


def put(effect: Effect, place: int) -> Fault:
    return lambda effects: effects.insert(place, effect)


@pytest.mark.slow
def test_any_effect_of_the_union_is_drawn() -> None:
    """The strategy draws new kinds of effects automatically. A kind that needs a value that the
    strategy cannot make fails here."""
    for kind in get_args(Effect):
        drawn = find(any_effects(2, 2), lambda effect, kind=kind: isinstance(effect, kind))
        assert parse_effect(str(drawn)) == drawn


@pytest.mark.slow
def test_each_named_fault_breaks_some_programs() -> None:
    faults: set[str] = set()

    @settings(deadline=None, max_examples=100, suppress_health_check=QUIET)
    @given(broken_programs())
    def collect(case: Broken) -> None:
        faults.update(case.wrong)

    collect()
    assert faults == {*FAULTS, "another class", "another root"}


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        (PLAIN[0], "programs=Program(rank=0"),
        ([str(p) for p in PLAIN], "programs=['rank 0 of"),
        (pipeline([lambda p, s, batch, x: (s, batch)]), "programs=<pipeline of 1 stages"),
    ],
)
def test_what_is_no_list_of_programs_is_refused(argument: Any, problem: str) -> None:
    error = refused(argument)
    assert error.problem.startswith(problem)
    assert (
        error.instead
        == "the programs of all ranks: step.programs(), weft.effects.parse_listing(text)"
    )
