"""The simulator: closed forms, a ticking clock as a second definition, and the effects of higher
costs or more capacity."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st
from ticking import NAMES, Ticking, costs_of, prices, programs_of_any_kind, schedules

from weft.effects import Broadcast, Fence, Program, Recv, Run, Send
from weft.errors import CostError, ProgramError
from weft.transforms.pipelines.schedule import decode_jobs, make_programs, streaming
from weft.transforms.pipelines.timing.costs import Costs
from weft.transforms.pipelines.timing.simulate import simulate
from weft.transforms.pipelines.timing.timeline import busy_shares

# closed forms

SIZES = [(s, m) for s in (1, 2, 3, 5, 8) for m in (1, 2, 7)]


@pytest.mark.parametrize(("stages", "mbs"), SIZES)
@pytest.mark.parametrize("transfer", [0.0, 0.5, 2.0, 3.0])
@pytest.mark.parametrize("capacity", [1, 2, 9])
def test_streaming_takes_fill_and_a_stage_for_each_further_micro_batch(
    stages: int, mbs: int, transfer: float, capacity: int
) -> None:
    costs = Costs(
        [2.0] * stages, latency=transfer / 2, bytes_per_second=8, message_bytes=4 * transfer
    )
    # The edge is the bottleneck if it is slower than the stages
    slowest = max(2.0, transfer) if stages > 1 else 2.0
    expected = 2.0 * stages + transfer * (stages - 1) + slowest * (mbs - 1)
    timeline = simulate(streaming(stages, mbs), costs, capacity=capacity)
    assert timeline.step_time == expected
    assert busy_shares(timeline) == tuple([mbs * 2.0 / expected] * stages)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_a_decode_loop_of_a_cohort_a_stage_idles_only_while_it_fills_and_drains(
    stages: int, more: int
) -> None:
    jobs = decode_jobs(stages + more, 5)
    timeline = simulate(make_programs(stages, jobs), Costs([1.0] * stages), capacity=stages + more)
    assert timeline.step_time == len(jobs) + stages - 1
    for rank in range(stages):
        runs = [
            e
            for e in timeline.events
            if e.rank == rank and isinstance(e.effect, Run) and e.end > e.start
        ]
        assert [(e.start, e.end) for e in runs] == [
            (rank + i, rank + i + 1) for i in range(len(jobs))
        ]


@pytest.mark.parametrize("stages", [1, 2, 3, 7])
def test_one_cohort_leaves_all_stages_but_one_idle(stages: int) -> None:
    timeline = simulate(make_programs(stages, decode_jobs(1, 6)), Costs([1.0] * stages))
    assert timeline.step_time == 6 * stages
    assert timeline.bubble == pytest.approx([(stages - 1) / stages] * stages)


def test_transfers_of_one_edge_go_one_after_the_other_and_those_of_a_broadcast_side_by_side() -> (
    None
):
    sends = tuple(Send(1, mb) for mb in range(3))
    programs = [Program(0, 2, sends), Program(1, 2, tuple(Recv(0, mb) for mb in range(3)))]
    ends = [e.end for e in simulate(programs, Costs([], latency=2.0), capacity=3).events]
    assert ends == [0, 0, 0, 2, 4, 6]
    programs = [Program(rank, 4, (Broadcast(0, 0),)) for rank in range(4)]
    assert [e.end for e in simulate(programs, Costs([], latency=2.0)).events] == [0, 2, 2, 2]


def test_a_send_waits_for_room_until_the_receiver_has_taken_a_message() -> None:
    programs = [
        Program(0, 2, (Send(1, 0), Send(1, 1), Send(1, 2))),
        Program(1, 2, (Run("stage 1", 9), Recv(0, 0), Run("stage 1", 0), Recv(0, 1), Recv(0, 2))),
    ]
    waited = [
        [e.waited for e in simulate(programs, Costs([0, 5]), capacity=n).events[:3]]
        for n in (1, 2, 3)
    ]
    assert waited == [[0, 5, 5], [0, 0, 5], [0, 0, 0]]


def test_a_fence_waits_until_its_micro_batch_was_received() -> None:
    programs = [
        Program(0, 2, (Send(1, 0), Send(1, 1), Fence(0), Fence(1))),
        Program(1, 2, (Recv(0, 0), Run("stage 1", 0), Recv(0, 1))),
    ]
    fences = simulate(programs, Costs([0, 4], latency=3.0), capacity=2).events[2:4]
    assert [(e.end, e.waited) for e in fences] == [(3, 3), (7, 4)]


def test_each_effect_costs_its_launch_and_is_no_bubble_only_where_it_runs() -> None:
    timeline = simulate(streaming(2, 2, feedback=True), Costs([1, 1], advance=0.5, launch=0.25))
    first, last = ([e for e in timeline.events if e.rank == rank] for rank in range(2))
    assert [e.end - e.start - e.waited for e in first] == [
        1.25,
        0.25,
        1.25,
        0.25,
        0.25,
        0.75,
        0.25,
        0.75,
    ]
    assert [e.end - e.start - e.waited for e in last] == [
        0.25,
        1.25,
        0.25,
        0.75,
        0.25,
        1.25,
        0.25,
        0.75,
    ]
    assert busy_shares(timeline) == (4 / timeline.step_time,) * 2


def test_costs_may_depend_on_the_micro_batch() -> None:
    costs = Costs(
        lambda stage, mb: 10.0**mb * (stage + 1), message_bytes=lambda mb: mb, bytes_per_second=1
    )
    ends = {(e.rank, str(e.effect)): e.end for e in simulate(streaming(2, 2), costs).events}
    assert (ends[0, "run stage 0 [mb 1]"], ends[1, "recv from 0 [mb 1]"]) == (11, 12)
    assert ends[1, "run stage 1 [mb 1]"] == 32


# a second definition, and more cost or capacity


@given(programs_of_any_kind() | schedules(), prices, st.integers(1, 3))
def test_it_is_what_a_ticking_clock_finds(
    programs: list[Program], price: dict[str, int], capacity: int
) -> None:
    ticking = Ticking(programs, price, capacity)
    ticking.run()
    timeline = simulate(programs, costs_of(price), capacity=capacity)
    for rank in range(len(programs)):
        expected = [
            (effect, start, end) for whose, effect, start, end in ticking.moments if whose == rank
        ]
        assert [(e.effect, e.start, e.end) for e in timeline.events if e.rank == rank] == expected
    assert timeline.peak_bytes == tuple(ticking.peak(rank) for rank in range(len(programs)))


@given(
    programs_of_any_kind() | schedules(),
    prices,
    st.sampled_from(NAMES),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_no_cost_that_grows_ends_any_effect_sooner(
    programs: list[Program], price: dict[str, int], name: str, by: int, capacity: int
) -> None:
    grown = {**price, name: price[name] + by}
    before, after = (
        simulate(programs, costs_of(p), capacity=capacity).events for p in (price, grown)
    )
    assert all(
        a.end >= b.end for b, a in zip(ends_in_order(before), ends_in_order(after), strict=True)
    )


@given(programs_of_any_kind() | schedules(), prices, st.integers(1, 3))
def test_no_capacity_ends_any_effect_later(
    programs: list[Program], price: dict[str, int], capacity: int
) -> None:
    less, more = (
        simulate(programs, costs_of(price), capacity=n).events for n in (capacity, capacity + 1)
    )
    assert all(
        m.end <= n.end for n, m in zip(ends_in_order(less), ends_in_order(more), strict=True)
    )


def ends_in_order(events: Sequence[Any]) -> list[Any]:
    """The events by rank; a rank's events are in program order whatever their costs."""
    return [
        event for _, group in itertools.groupby(events, key=lambda e: e.rank) for event in group
    ]


# errors


def test_programs_that_do_not_end_are_refused() -> None:
    with pytest.raises(ProgramError, match="no rank can go on"):
        simulate([Program(r, 2, (Recv(1 - r, 0), Send(1 - r, 0))) for r in range(2)], Costs([1, 1]))


@pytest.mark.parametrize("capacity", [0, -1, 1.5])
def test_an_edge_that_holds_nothing_is_refused(capacity: Any) -> None:
    with pytest.raises(ProgramError) as error:
        simulate(streaming(2, 1), Costs([1, 1]), capacity=capacity)
    assert (error.value.problem, error.value.instead) == (f"{capacity=}", "a whole number >= 1")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "stage": ({"stages": [1.0, float("nan")]}, "stages[1]=nan"),
    "advance": ({"stages": [], "advance": -1.0}, "advance=-1.0"),
    "latency": ({"stages": [], "latency": float("inf")}, "latency=inf"),
    "one number": ({"stages": 1e-3}, "stages=0.001"),
    "bandwidth": ({"stages": [], "bytes_per_second": 0.0}, "bytes_per_second=0.0"),
    "bytes": ({"stages": [], "message_bytes": -4}, "message_bytes=-4"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_cost_that_cannot_be_is_refused(name: str) -> None:
    arguments, problem = BAD[name]
    with pytest.raises(CostError) as error:
        Costs(**arguments)
    assert error.value.problem == problem


MISSING: dict[str, tuple[Costs, str]] = {
    "no stage": (Costs([1.0]), "no cost of 'stage 1'"),
    "function": (Costs(lambda stage, mb: -1.0), "stages(0, 0)=-1.0"),
    "bytes": (Costs([1, 1], message_bytes=lambda mb: -8), "message_bytes(0)=-8"),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_cost_that_is_missing_or_wrong_is_named(name: str) -> None:
    costs, problem = MISSING[name]
    with pytest.raises(CostError) as error:
        simulate(streaming(2, 1), costs)
    assert error.value.problem == problem


def test_a_run_of_something_else_has_no_cost() -> None:
    with pytest.raises(CostError, match="no cost of 'draft'"):
        simulate([Program(0, 1, (Run("draft", 0),))], Costs([1.0]))


@pytest.mark.parametrize(
    ("programs", "costs", "problem"),
    [
        (streaming(1, 1)[0], Costs([1.0]), "programs=Program(rank=0"),
        (streaming(1, 1), (1.0,), "costs is a tuple"),
    ],
)
def test_what_cannot_be_simulated_is_named(programs: Any, costs: Any, problem: str) -> None:
    with pytest.raises(ProgramError) as error:
        simulate(programs, costs)
    assert error.value.call == "simulate(programs, costs, capacity=2)"
    assert error.value.problem.startswith(problem)
