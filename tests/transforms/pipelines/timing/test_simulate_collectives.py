"""Collectives in the simulator: closed forms, sharded functions, lanes, pictures, planted bugs, and
refusals."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any
from xml.etree import ElementTree

import attrs
import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st
from refusal import refused
from ticking import Ticking, costs_of, prices, programs_of_any_kind

import weft
from weft.effects import Effect, Fence, Program, Recv, Run, Send, parse_listing
from weft.errors import CostError, ProgramError
from weft.meshes.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    PPermute,
    ReduceScatter,
)
from weft.meshes.mesh import group_of
from weft.transforms.pipelines.lanes import lane_rank, spread
from weft.transforms.pipelines.machine import interleave
from weft.transforms.pipelines.pipeline import pipeline
from weft.transforms.pipelines.schedule import decode_jobs, make_programs
from weft.transforms.pipelines.timing.costs import (
    BY_NODE,
    ONE_STEP,
    Costs,
    all_reduce_ways,
    effect_seconds,
)
from weft.transforms.pipelines.timing.events import num_ranks
from weft.transforms.pipelines.timing.hardware import Machine
from weft.transforms.pipelines.timing.simulate import _Clocks, simulate
from weft.transforms.pipelines.timing.timeline import Timeline, busy_shares
from weft.values.schema import Schema, TensorSchema

SCHEMA = Schema((TensorSchema("x", (4, 8), torch.float32),))
SIZE = 4 * 8 * 4
MESH = weft.Mesh(pipeline=2, tensor=2)


def meeting(effect: Collective, parts: int = 1) -> list[Program]:
    """Programs of all ranks of a collective, each with some parts before it."""
    runs = tuple(Run(f"part {index}", 0) for index in range(parts))
    return [Program(rank, len(effect.ranks), (*runs, effect)) for rank in effect.ranks]


@pytest.mark.parametrize("ranks", [(1,), (0, 0), (0, 1, 2), (0, 1, -1)])
def test_a_collective_among_other_ranks_is_refused(ranks: tuple[int, ...]) -> None:
    programs = [Program(rank, 2, (AllReduce(ranks, 0, SCHEMA),)) for rank in range(2)]
    with pytest.raises(
        ProgramError,
        match=r"saw: rank 0: 'all_reduce .*\n  instead: different ranks from 0 to 1, and 0 ",
    ):
        simulate(programs, Costs())


IMPOSSIBLE: dict[str, tuple[str, str]] = {
    "reduce_scatter sum dim 0 among 0, 1 [mb 0]: x[5] float32": (
        "which cuts 5 into 2 parts",
        "a dimension 0 that is a multiple of 2",
    ),
    "all_to_all dim -1 to 0 among 0, 1 [mb 0]: x[4, 3] float32": (
        "which cuts 3 into 2 parts",
        "a dimension -1 that is a multiple of 2",
    ),
    "all_to_all dim 0 to 2 among 0, 1 [mb 0]: x[4, 3] float32": (
        "along dimension 2 of 2",
        "one of its dimensions",
    ),
    "all_gather dim 0 among 0, 1 [mb 0]: x[] float32": (
        "along dimension 0 of 0",
        "one of its dimensions",
    ),
    "all_reduce sum among 0, 1 [mb 0]: x[2] float32, y[2] float32": ("of 2 tensors", "one tensor"),
}
POSSIBLE = (
    "reduce_scatter sum dim -1 among 0, 1 [mb 0]: x[5, 4] float32",
    "reduce_scatter sum dim 0 among 0, 1 [mb 0]: x[num_tokens] float32",
    "all_to_all dim 0 to 1 among 0, 1 [mb 0]: x[4, 3] float32",
    "reduce_scatter sum dim 7 among 0, 1 [mb 0]",
)


@pytest.mark.parametrize("text", [*IMPOSSIBLE, *POSSIBLE])
def test_a_collective_that_its_shape_does_not_allow_is_refused(text: str) -> None:
    programs = parse_listing("\n".join(f"rank {rank} of 2\n  {text}" for rank in range(2)))
    if text in POSSIBLE:
        assert len(list(interleave(programs))) == 2
        return
    problem, instead = IMPOSSIBLE[text]
    with refused(ProgramError, "check of 2 programs", f"rank 0: '{text}'<any>{problem}", instead):
        list(interleave(programs))


def test_it_begins_when_the_last_rank_has_come_and_ends_on_all_at_once() -> None:
    costs = Costs(parts=lambda part, rank: 1.0 + rank, launch=0.5, collective=lambda effect: 4.0)
    events = simulate(meeting(AllReduce((0, 1, 2))), costs).events
    met = [event for event in events if isinstance(event.effect, Collective)]
    assert [(event.start, event.wait, event.work, event.waited) for event in met] == [
        (1.5, (1.5, 3.5), (3.5, 8.0), 2.0),
        (2.5, (2.5, 3.5), (3.5, 8.0), 1.0),
        (3.5, (3.5, 3.5), (3.5, 8.0), 0.0),
    ]


def test_groups_side_by_side_do_not_wait_for_each_other() -> None:
    effects = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    programs = [
        Program(rank, 4, (Run("part 0", 0), AllReduce(ranks))) for rank, ranks in effects.items()
    ]
    ends = [
        event.end
        for event in simulate(
            programs, Costs(parts=lambda p, r: r, collective=lambda e: 1.0)
        ).events
    ]
    assert ends[1::2] == [2, 2, 4, 4]


LATENCY = 1e-6
SPEED = 1e9
BYTES = SIZE / SPEED
CLOSED: dict[str, tuple[Collective, float]] = {
    "one step": (AllReduce((0, 1), schema=SCHEMA), LATENCY + BYTES),
    "to three others": (AllGather((0, 1, 2, 3), schema=SCHEMA), LATENCY + 3 * BYTES),
    "a part to each": (ReduceScatter((0, 1, 2, 3), schema=SCHEMA), LATENCY + 3 / 4 * BYTES),
    "a part from each": (AllToAll((0, 1, 2, 3), schema=SCHEMA), LATENCY + 3 / 4 * BYTES),
    "once": (PPermute((0, 1, 2), schema=SCHEMA, pairs=((0, 1), (1, 2))), LATENCY + BYTES),
    "alone": (AllReduce((0,), schema=SCHEMA), 0.0),
    "a ring": (
        AllReduce((0, 1, 2, 3), schema=Schema((TensorSchema("x", (1024, 1024), torch.bfloat16),))),
        6 * (LATENCY + 2**21 / 4 / SPEED),
    ),
}


@pytest.mark.parametrize("case", CLOSED)
def test_it_takes_the_faster_of_one_step_and_a_ring(case: str) -> None:
    effect, expected = CLOSED[case]
    costs = Costs(parts=[0.0], latency=LATENCY, bytes_per_second=SPEED)
    assert effect_seconds(costs, effect) == pytest.approx(expected)
    assert simulate(meeting(effect), costs).step_time == pytest.approx(expected)


def between(nodes: int, size: int, slower: float, count: int) -> tuple[Costs, AllReduce]:
    """The costs of nodes with this number of GPUs and slower links between nodes, and an all-reduce
    of this number of values over all ranks."""
    machine = Machine(
        latency=LATENCY, link=SPEED, gpus_per_node=size, node_link=SPEED / slower, node_latency=5e-6
    )
    costs = Costs(latency=machine.latency_of, bytes_per_second=machine.link_of, gpus_per_node=size)
    return costs, AllReduce(
        tuple(range(nodes * size)), schema=Schema((TensorSchema("x", (count,), torch.float32),))
    )


def test_a_sum_over_nodes_goes_in_three_phases() -> None:
    """4 GB over 2 nodes of 8 GPUs: each rank sums an eighth within its node, and then together with
    one rank of the other node."""
    costs, effect = between(2, 8, 8, 10**9)
    within = LATENCY + 7 / 8 * 4 * 10**9 / SPEED
    across = 5e-6 + 4 * 10**9 / 8 / (SPEED / 8)
    assert effect_seconds(costs, effect) == pytest.approx(within + across + within)
    assert all_reduce_ways(costs, effect)[BY_NODE] == effect_seconds(costs, effect)
    flat = attrs.evolve(costs, gpus_per_node=None)
    assert effect_seconds(flat, effect) == pytest.approx(30 * (5e-6 + 4 * 10**9 / 16 / (SPEED / 8)))
    small = attrs.evolve(effect, schema=Schema((TensorSchema("x", (1,), torch.float32),)))
    assert (
        effect_seconds(costs, small)
        == all_reduce_ways(costs, small)[ONE_STEP]
        < all_reduce_ways(costs, small)[BY_NODE]
    )


@given(st.integers(1, 5), st.integers(1, 8), st.floats(1, 100), st.integers(1, 10**9))
def test_a_sum_over_nodes_is_within_its_bounds(
    nodes: int, size: int, slower: float, count: int
) -> None:
    """It is never slower than the ways that ignore nodes. It is never faster than the transfer of
    the bytes that must leave a node (Patarasuk and Yuan) over all of its links at once."""
    costs, effect = between(nodes, size, slower, count)
    seconds = effect_seconds(costs, effect)
    assert seconds <= effect_seconds(attrs.evolve(costs, gpus_per_node=None), effect)
    assert seconds >= 2 * (nodes - 1) / nodes * 4 * count / size / (SPEED / slower) * (1 - 1e-9)
    assert (BY_NODE in all_reduce_ways(costs, effect)) == (nodes > 1 and size > 1)


def test_nodes_with_unequal_shares_of_the_ranks_have_no_phases() -> None:
    costs, _ = between(2, 4, 8, 1)
    assert BY_NODE not in all_reduce_ways(costs, AllReduce((2, 3, 4), schema=SCHEMA))


def test_ranks_far_apart_take_longer() -> None:
    costs = Costs(
        latency=lambda ranks: 1.0 if len({rank // 2 for rank in ranks}) == 1 else 5.0,
        bytes_per_second=lambda ranks: math.inf,
    )
    assert [
        effect_seconds(costs, AllReduce(ranks, schema=SCHEMA)) for ranks in ((0, 1), (1, 2))
    ] == [1, 5]


# planted bugs that the ticking clock detects


@settings(phases=[Phase.generate], database=None, derandomize=True, max_examples=200)
@given(programs_of_any_kind(), prices)
def agrees(programs: list[Program], price: dict[str, int]) -> None:
    """The simulator agrees with a ticking clock."""
    ticking = Ticking(programs, price, 1)
    ticking.run()
    events = simulate(programs, costs_of(price), capacity=1).events
    expected = sorted((rank, start, end) for rank, _, start, end in ticking.moments)
    assert sorted((event.rank, event.start, event.end) for event in events) == expected


def begins_with_the_first(self: _Clocks, effect: Collective) -> float:
    """Waits for nobody."""
    return min(self.now[each] for each in effect.ranks)


def forgets_the_last(self: _Clocks, effect: Collective) -> float:
    """Waits for all ranks but the last one of the group."""
    return max(self.now[each] for each in effect.ranks[: max(1, len(effect.ranks) - 1)])


@pytest.mark.slow
@pytest.mark.parametrize("bug", [begins_with_the_first, forgets_the_last])
def test_planted_bugs_are_seen(bug: Callable[..., float], monkeypatch: pytest.MonkeyPatch) -> None:
    agrees()
    monkeypatch.setattr(_Clocks, "_all_there", bug)
    with pytest.raises((AssertionError, CostError)):
        agrees()


# sharded functions


def mlp(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Columns of `up` and rows of `down`."""
    return weft.all_reduce(torch.relu(x @ params["up"]) @ params["down"], "tensor")


def test_the_programs_of_a_sharded_function_are_simulated() -> None:
    placements = {"up": weft.Shard(1), "down": weft.Shard(0)}
    f = weft.shard(mlp, weft.Mesh(tensor=2), (placements, weft.Replicate()), weft.Replicate())
    programs = f.programs({"up": torch.ones(4, 8), "down": torch.ones(8, 4)}, torch.ones(3, 4))
    timeline = simulate(programs, Costs(parts=[2.0, 0.5], latency=1.0, bytes_per_second=3 * 4 * 4))
    assert timeline.step_time == 2.0 + (1.0 + 1.0) + 0.5
    assert busy_shares(timeline) == (2.5 / 4.5,) * 2
    uneven = simulate(
        programs, Costs(parts=lambda part, rank: 2.0 + rank, latency=1.0, bytes_per_second=48)
    )
    assert [event.waited for event in uneven.events] == [0, 1, 0, 0, 0, 0]


# lanes


def stage(params: Any, state: Any, batch: torch.Tensor, x: torch.Tensor | None) -> Any:
    """A stage with a collective."""
    return state, weft.all_reduce(batch if x is None else x, "tensor")


@pytest.mark.parametrize("cohorts", [1, 2, 3])
def test_each_lane_has_the_timeline_of_one_pipeline(cohorts: int) -> None:
    costs = Costs([2.0, 3.0], advance=0.5, latency=0.25, launch=0.125)
    lane = make_programs(2, decode_jobs(cohorts, 3))
    alone = simulate(lane, costs).events
    both = simulate(spread(lane, MESH), costs).events
    for rank in MESH:
        rank_events = [(e.start, e.end, e.waited) for e in both if e.rank == rank]
        assert rank_events == [
            (e.start, e.end, e.waited) for e in alone if e.rank == lane_rank(MESH, rank)
        ]


def test_a_pipeline_over_a_mesh_is_simulated() -> None:
    step = pipeline([stage, stage], microbatches=2, mesh=MESH)
    timeline = simulate(step.programs(), Costs([1.0, 1.0]))
    assert (num_ranks(timeline.events), timeline.step_time) == (4, 3.0)


def parted(program: Program, count: int) -> Iterator[Effect]:
    """The effects of a rank, with each run of a stage cut by collectives with the rank's other
    lane."""
    for effect in program.effects:
        if not isinstance(effect, Run) or effect.stage is None:
            yield effect
            continue
        for _ in range(count):
            yield Run("part 0", effect.microbatch)
            yield AllReduce(group_of(MESH, program.rank, "tensor"), effect.microbatch, SCHEMA)


@given(st.integers(1, 3), st.integers(0, 3), st.integers(0, 3), st.integers(1, 3))
def test_collectives_inside_a_stage_are_part_of_its_run(
    cohorts: int, work: int, latency: int, count: int
) -> None:
    lanes = spread(make_programs(2, decode_jobs(cohorts, 3)), MESH)
    inside = Costs([float(count * (work + 7 * latency))] * 2, latency=latency)
    outside = Costs(parts=[float(work)], latency=latency, collective=lambda effect: 7 * latency)
    cut = [attrs.evolve(program, effects=tuple(parted(program, count))) for program in lanes]
    whole = [
        (e.rank, e.end) for e in simulate(lanes, inside).events if not isinstance(e.effect, Run)
    ]
    events = [
        e for e in simulate(cut, outside).events if not isinstance(e.effect, Run | Collective)
    ]
    assert [(e.rank, e.end) for e in events] == whole
    assert not any(
        e.waited for e in simulate(cut, outside).events if isinstance(e.effect, Collective)
    )


# pictures


def uneven() -> Timeline:
    costs = Costs(parts=lambda part, rank: 1.0 + rank, collective=lambda effect: 2.0)
    return simulate(meeting(AllReduce((0, 1))), costs)


def test_the_text_shows_collectives_and_waits_for_them() -> None:
    assert uneven().as_text(79).splitlines()[1:4] == [
        "rank 0 " + "0" * 16 + "." * 16 + "=" * 32 + "     75%",
        "rank 1 " + "0" * 32 + "=" * 32 + "     50%",
        "0-9 runs that micro-batch (its last digit); = collective; . waits",
    ]


def test_the_picture_shows_them_too() -> None:
    svg = uneven().as_svg()
    words = {node.text for node in ElementTree.fromstring(svg).iter()}
    assert {"collective", "waits"} <= words
    assert not {"sent", "sends, launches"} & words
    assert "rank 0: all_reduce sum among 0, 1 [mb 0]; 1 s to 4 s, waited 1 s" in svg


def test_the_legend_fits_with_all_kinds_of_effects() -> None:
    ranks = (0, 1)
    effects = {
        0: (Run("stage 0", 0), Send(1, 0), AllReduce(ranks), Fence(0), Run("advance", 0)),
        1: (Recv(0, 0), AllReduce(ranks)),
    }
    costs = Costs([1.0], advance=1.0, launch=0.5, latency=4.0, collective=lambda effect: 1.0)
    svg = simulate(
        [Program(rank, 2, rank_effects) for rank, rank_effects in effects.items()], costs
    ).as_svg()
    entries = re.findall(r"translate\((\d+) 0\).*?<text.*?>(.*?)</text>", svg)
    assert len(entries) == 9
    assert all(int(x) + 19 + 6.2 * len(words) <= 920 for x, words in entries)


# refusals


def test_a_collective_that_one_rank_lacks_is_refused() -> None:
    programs = meeting(AllReduce((0, 1)))
    with pytest.raises(ProgramError, match="waits for rank 1, which is at its end"):
        simulate([programs[0], attrs.evolve(programs[1], effects=())], Costs(parts=[1.0]))


WRONG: dict[str, tuple[Collective, Costs, str, str]] = {
    "no schema": (
        AllReduce((0, 1)),
        Costs(parts=[1.0]),
        "bytes are not known",
        "a schema of numbers",
    ),
    "names": (
        AllReduce((0, 1), schema=Schema((TensorSchema("x", ("num_tokens",), torch.float32),))),
        Costs(parts=[1.0]),
        "bytes are not known",
        "Costs(collective=...)",
    ),
    "a negative time": (
        AllReduce((0, 1)),
        Costs(parts=[1.0], collective=lambda e: -1.0),
        "=-1.0",
        "number >= 0",
    ),
    "no speed": (
        AllReduce((0, 1), schema=SCHEMA),
        Costs(parts=[1.0], bytes_per_second=lambda ranks: 0.0),
        "bytes_per_second((0, 1))=0.0",
        "a number > 0",
    ),
    "no part": (AllReduce((0, 1)), Costs([1.0]), "no cost of 'part 0'", "a Run of 'part N'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_cost_that_is_missing_or_wrong_is_named(case: str) -> None:
    effect, costs, problem, instead = WRONG[case]
    with pytest.raises(CostError) as error:
        simulate(meeting(effect), costs)
    assert problem in error.value.problem
    assert instead in error.value.instead


def test_what_cannot_be_a_cost_of_collectives_is_refused() -> None:
    with pytest.raises(CostError, match="a function from a collective to its seconds"):
        Costs(collective=1.0)  # type: ignore[arg-type]
    with pytest.raises(CostError, match=r"parts\[0\]=-1"):
        Costs(parts=[-1])
