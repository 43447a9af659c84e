"""The steady state of a decode loop, compared with simulated loops and all cycles of its graph, and
planted bugs."""

import math
from collections.abc import Hashable
from typing import Any
from unittest import mock

import networkx
import pytest
from hypothesis import given, settings, strategies as st

from weft.effects import Run
from weft.transforms.pipelines.schedule import decode_jobs, make_programs
from weft.transforms.pipelines.timing import steady
from weft.transforms.pipelines.timing.costs import Costs
from weft.transforms.pipelines.timing.simulate import simulate
from weft.transforms.pipelines.timing.steady import (
    Arc,
    decode_bodies,
    greatest_ratio,
    seconds_per_job,
)

# A multiple of every number up to 6: the cycles of loops this small repeat after this many jobs.
PERIODS = 60

small = st.integers(0, 4)
# Costs of one to four stages, in whole ticks.
costs = st.builds(
    lambda each, advance, latency, launch, message, output: Costs(
        each, advance, latency, 1, message, output, launch=launch
    ),
    st.lists(small, min_size=1, max_size=4),
    *[small] * 5,
)


def simulated(num_stages: int, cohorts: int, costs: Costs, capacity: int, jobs: int) -> float:
    """The seconds of this number of jobs in a loop, after the same number of earlier jobs."""
    programs = make_programs(num_stages, decode_jobs(cohorts, math.ceil(2 * jobs / cohorts) + 2))
    events = simulate(programs, costs, capacity=capacity).events
    runs = (
        event
        for event in events
        if event.effect == Run(f"stage {num_stages - 1}", event.effect.microbatch)
    )
    ends = {event.effect.microbatch: event.end for event in runs}
    return ends[2 * jobs] - ends[jobs]


@settings(max_examples=30)
@given(costs, st.integers(1, 8), st.integers(1, 3))
def test_it_is_that_of_a_long_simulation(costs: Costs, cohorts: int, capacity: int) -> None:
    num_stages = len(costs.stages)  # type: ignore[arg-type]
    seconds = seconds_per_job(num_stages, cohorts, costs, capacity)
    took = simulated(num_stages, cohorts, costs, capacity, 2 * PERIODS)
    most = 1 + sum(costs.stages) + 9 * 4  # type: ignore[arg-type]
    assert abs(took - 2 * PERIODS * seconds) <= most  # whatever the period is
    if abs(seconds * PERIODS - round(seconds * PERIODS)) < 1e-9:
        assert took == pytest.approx(2 * PERIODS * seconds, abs=1e-6)


def test_it_is_that_of_many_stages_and_cohorts() -> None:
    costs = Costs(
        [1.0 + 0.25 * (stage % 3 == 1) for stage in range(9)], latency=0.125, launch=0.0625
    )
    for cohorts in (1, 4, 9, 10, 17):
        seconds = seconds_per_job(9, cohorts, costs, 2)
        assert seconds * PERIODS == pytest.approx(simulated(9, cohorts, costs, 2, PERIODS))


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 9))
def test_the_effects_of_a_job_are_those_of_every_later_one(
    num_stages: int, cohorts: int, more: int
) -> None:
    job = max(cohorts, num_stages + 1) + 1 + more
    bodies = decode_bodies(num_stages, cohorts)
    for program, body in zip(
        make_programs(num_stages, decode_jobs(cohorts, job + 2)), bodies, strict=True
    ):
        first, last = (
            program.effects.index(Run(f"stage {program.rank}", mb)) for mb in (job - 1, job)
        )
        later = [
            str(effect).replace(f"mb {effect.microbatch}", "")
            for effect in program.effects[first + 1 : last + 1]
        ]
        assert [effect.microbatch - job for effect in program.effects[first + 1 : last + 1]] == [
            effect.microbatch for effect in body
        ]
        assert later == [str(effect).replace(f"mb {effect.microbatch}", "") for effect in body]


@st.composite
def graphs(draw: st.DrawFn) -> dict[Hashable, list[Arc]]:
    """Strongly connected graphs: a ring, and some arcs."""
    size = draw(st.integers(1, 6))
    arcs: dict[Hashable, list[Arc]] = {
        node: [((node - 1) % size, float(draw(small)), int(node == 0))] for node in range(size)
    }
    for _ in range(draw(st.integers(0, 8))):
        source, target = (draw(st.integers(0, size - 1)) for _ in range(2))
        arcs[target].append((source, float(draw(small)), draw(st.integers(1, 3))))
    return arcs


@given(graphs())
def test_the_greatest_ratio_is_that_of_all_cycles(arcs: dict[Hashable, list[Arc]]) -> None:
    graph = networkx.MultiDiGraph()
    for target, incoming_arcs in arcs.items():
        for number, (source, weight, delay) in enumerate(incoming_arcs):
            graph.add_edge(source, (target, number), weight=weight, delay=delay)
            graph.add_edge((target, number), target, weight=0.0, delay=0)
    best = 0.0
    for cycle in networkx.simple_cycles(networkx.DiGraph(graph)):
        pairs = [graph[a][b][0] for a, b in zip(cycle, (*cycle[1:], cycle[0]), strict=True)]
        best = max(
            best, sum(pair["weight"] for pair in pairs) / sum(pair["delay"] for pair in pairs)
        )
    assert greatest_ratio(arcs) == pytest.approx(best)


def without_arcs(kind: str) -> Any:
    """The greatest ratio of a graph in which the transfers of an edge run in parallel, or edges
    hold any number of messages."""

    def kept(node: Hashable, arc: Arc, index: int) -> bool:
        if kind == "transfers":
            return arc[0] != node or not isinstance(node, steady.Edge)
        return index == 0 or isinstance(node, steady.Edge) or isinstance(arc[0], steady.Edge)

    return lambda arcs: greatest_ratio(
        {
            node: [arc for index, arc in enumerate(node_arcs) if kept(node, arc, index)]
            for node, node_arcs in arcs.items()
        }
    )


# Costs, cohorts, capacity, and the seconds of a job without and with the bug.
PLANTED: dict[str, tuple[Costs, int, int, float, float]] = {
    "transfers": (Costs([0.0, 0.0], latency=9.0, launch=1.0), 8, 3, 9.0, 23 / 3),
    "room": (
        Costs([0, 2, 1, 5], 1, 9, 1, message_bytes=5, output_bytes=9, launch=1),
        3,
        1,
        29.0,
        26.0,
    ),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_bugs_are_seen(kind: str) -> None:
    costs, cohorts, capacity, took, wrong = PLANTED[kind]
    num_stages = len(costs.stages)  # type: ignore[arg-type]
    assert simulated(num_stages, cohorts, costs, capacity, PERIODS) == PERIODS * took
    assert seconds_per_job(num_stages, cohorts, costs, capacity) == took
    with mock.patch.object(steady, "greatest_ratio", without_arcs(kind)):
        assert seconds_per_job(num_stages, cohorts, costs, capacity) == pytest.approx(wrong)
