"""`pipeline(stages, schedule=...)`: a function or edited programs, checked, simulated, executed by
every transport."""

from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from weft.effects import Program, Recv, Run, Send, parse_listing
from weft.errors import ProgramError
from weft.proofs._laws.engine.serving import stages_agree
from weft.proofs._laws.schedule import own_schedules_are_compositions
from weft.proofs._strategies.engine.traces import traces
from weft.proofs._strategies.schedules import Woven, woven_programs
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.microbatch import scan
from weft.transforms.pipelines.pipeline import compose, pipeline
from weft.transforms.pipelines.schedule import Job, make_programs
from weft.transforms.pipelines.timing.costs import Costs
from weft.transforms.pipelines.timing.simulate import simulate
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.launch import launch
from weft.transforms.pipelines.transports.local import Local
from weft.transforms.pipelines.transports.threads import Threads
from weft.transforms.pipelines.weaving import interleaved, weave
from weft.values.schema import Schema

NUM_STAGES = 4


def stage(param: Any, state: Any, batch: Any, x: Any) -> Any:
    x = batch if x is None else x
    return state + x.sum(), x * param + 1


def advance(state: Any, batch: Any, out: Any) -> Any:
    return state * 2 + out.sum()


PARAMS = [torch.tensor(float(index + 2)) for index in range(NUM_STAGES)]
BATCH = torch.arange(6.0)


def states() -> list[Any]:
    return [torch.tensor(float(index)) for index in range(NUM_STAGES)]


def edited() -> tuple[Program, ...]:
    """A pipeline's own programs, printed, edited as text, and parsed: rank 1 receives both messages
    before it runs."""
    text = str(pipeline([stage] * 2, microbatches=2))
    lines = [
        "  recv from 0 [mb 0]",
        "  run stage 1 [mb 0]",
        "  recv from 0 [mb 1]",
        "  run stage 1 [mb 1]",
    ]
    assert "\n".join(lines) in text
    return parse_listing(
        text.replace("\n".join(lines), "\n".join([lines[0], lines[2], lines[1], lines[3]]))
    )


def in_turn(num_stages: int, jobs: Any, **options: Any) -> Any:
    """A custom schedule: two ranks, each of which runs all its stages on a micro-batch before the
    next micro-batch."""
    runs = [
        [Run(f"stage {s}", mb) for mb in range(len(jobs)) for s in range(r, num_stages, 2)]
        for r in range(2)
    ]
    return weave(runs, jobs, **options)


SCHEDULES = {
    "ours": make_programs,
    "interleaved": interleaved(2),
    "one rank": interleaved(1),
    "own": in_turn,
}


def assert_same(result: Any, expected: Any) -> None:
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("transport", [Local, Threads])
@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_every_schedule_is_a_composition(name: str, transport: Any, microbatches: int) -> None:
    options: Any = {
        "microbatches": microbatches,
        "schedule": SCHEDULES[name],
        "transport": transport(),
    }
    whole = pipeline([stage] * NUM_STAGES, microbatches=microbatches)(PARAMS, states(), BATCH)
    assert_same(pipeline([stage] * NUM_STAGES, **options)(PARAMS, states(), BATCH), whole)
    assert_same(whole[1], compose([stage] * NUM_STAGES)(PARAMS, states(), BATCH)[1])
    fed = pipeline([stage] * NUM_STAGES, microbatches=microbatches, advance=advance)
    step = pipeline([stage] * NUM_STAGES, advance=advance, **options)
    if (
        microbatches == 1
    ):  # an advance with each part is not one with the whole, and its time depends on the schedule
        assert_same(step(PARAMS, states(), BATCH), fed(PARAMS, states(), BATCH))
        assert_same(scan(step, 3)(PARAMS, states(), BATCH), scan(fed, 3)(PARAMS, states(), BATCH))


def test_the_default_is_such_a_function() -> None:
    listed = str(pipeline([stage] * 3, microbatches=2, advance=advance))
    assert listed == str(
        pipeline([stage] * 3, microbatches=2, advance=advance, schedule=make_programs)
    )
    assert listed == str(pipeline([stage] * 3, microbatches=2, advance=advance, schedule=None))
    again = parse_listing(listed)
    assert listed == str(
        pipeline([stage] * 3, microbatches=2, advance=advance, schedule=lambda *_, **__: again)
    )


def test_edited_programs_are_simulated_and_run() -> None:
    programs = edited()
    plain = pipeline([stage] * 2, microbatches=2)
    costs = Costs((1e-3, 1e-3))
    assert simulate(programs, costs).step_time == pytest.approx(4e-3)  # rank 1 starts a stage later
    assert simulate(plain.programs(), costs).step_time == pytest.approx(3e-3)
    expected = plain(PARAMS[:2], states()[:2], BATCH)
    for transport in (Local(), Threads()):
        step = pipeline([stage] * 2, microbatches=2, schedule=programs, transport=transport)
        assert step.programs() == programs
        assert_same(step(PARAMS[:2], states()[:2], BATCH), expected)


def on_ranks(name: str) -> Any:
    """One step of a schedule in processes connected by gloo: this rank's states, and the output."""
    torch.set_num_threads(1)
    step = pipeline(
        [stage] * NUM_STAGES,
        microbatches=3,
        advance=advance,
        schedule=SCHEDULES[name],
        transport=Distributed(timeout=20),
    )
    rank = step.transport.rank  # type: ignore[attr-defined]
    mine: Any = [x[rank::2] for x in (PARAMS, states())]
    for _ in range(2):
        mine[1], out = step(*mine, BATCH)
    return rank, [x.tolist() for x in mine[1]], out.tolist()


@pytest.mark.parametrize("name", ["interleaved", "own"])
def test_processes_run_several_stages_each(name: str) -> None:
    step = pipeline([stage] * NUM_STAGES, microbatches=3, advance=advance, schedule=SCHEDULES[name])
    state = states()
    for _ in range(2):
        state, out = step(PARAMS, state, BATCH)
    for rank, mine, output in launch(on_ranks, 2, name):
        assert (mine, output) == ([x.tolist() for x in state[rank::2]], out.tolist())


def on_gpus(name: str, backend: Any) -> bool:
    """Whether this rank's states and the output equal those of one process on the same device."""
    transport = Distributed(backend=backend, timeout=20)
    with transport.device:
        options: Any = {"microbatches": 3, "advance": advance, "schedule": SCHEDULES[name]}
        params = [x.to(transport.device) for x in PARAMS]
        state = states()
        batch = BATCH.to(transport.device)
        whole = pipeline([stage] * NUM_STAGES, **options)
        mine: Any = [x.to(transport.device) for x in state[transport.rank :: 2]]
        every: Any = [x.to(transport.device) for x in state]
        step = pipeline([stage] * NUM_STAGES, transport=transport, **options)
        for _ in range(2):
            mine, out = step(params[transport.rank :: 2], mine, batch)
            every, expected = whole(params, every, batch)
        transport.synchronize()
        same = all(map(torch.equal, mine, every[transport.rank :: 2])) and torch.equal(
            out, expected
        )
    transport.close()
    return same


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["interleaved", "own"])
@pytest.mark.parametrize("backend", ["nccl", "peer"])
def test_gpus_run_several_stages_each(name: str, backend: str) -> None:
    assert launch(on_gpus, 2, name, backend) == [True, True]


def test_a_session_ends_each_submission() -> None:
    """With another schedule, the programs for more jobs need not continue those for fewer jobs."""
    jobs = [[Job()], [Job(after=0), Job(after=0)]]
    results = []
    for schedule in (make_programs, interleaved(2)):
        session = pipeline([stage] * NUM_STAGES, advance=advance, schedule=schedule).session(
            PARAMS, states()
        )
        outputs = session.submit([BATCH], jobs[0]) + session.submit([BATCH, 2 * BATCH], jobs[1])
        state, rest = session.close()
        results.append(
            (state, [out for _, out in sorted(outputs + rest, key=lambda pair: pair[0])])
        )
    assert_same(results[1][1][:1], results[0][1][:1])
    assert len(results[1][1]) == 3


def test_stages_that_lend_their_results_are_fenced() -> None:
    stages = [
        graphify(lambda p, s, batch, x: (s, (batch if x is None else x) * p), outputs="borrow")
        for _ in range(4)
    ]
    step = pipeline(stages, microbatches=3, schedule=interleaved(2))
    assert "fence" in str(step)
    none = [torch.zeros(())] * 4
    assert_same(step(PARAMS, none, BATCH)[1], BATCH * 2 * 3 * 4 * 5)


def test_a_whole_step_of_interleaved_stages_is_captured() -> None:
    step = pipeline([stage] * NUM_STAGES, microbatches=2, schedule=interleaved(2))
    assert_same(graphify(step)(PARAMS, states(), BATCH), step(PARAMS, states(), BATCH))


def test_a_schedule_of_another_signature_is_refused_with_its_own() -> None:
    def named(num_stages: int, jobs: Any) -> Any:
        return make_programs(num_stages, jobs)

    text = (
        r"schedule=...\)\n  saw: named\(num_stages.*\n.*\*, schema, advances, buffers\) -> programs"
    )
    with pytest.raises(ProgramError, match=text):
        pipeline([stage] * 3, schedule=named)


def test_a_declared_schema_is_put_into_programs_without_one() -> None:
    schema = Schema.parse("[3] float32")
    step = pipeline([stage] * NUM_STAGES, microbatches=2, schema=schema, schedule=in_turn)
    moved = [
        e for program in step.programs() for e in program.effects if isinstance(e, Send | Recv)
    ]
    assert {effect.schema for effect in moved} == {schema}
    fixed = pipeline([stage] * 2, microbatches=2, schema=schema, schedule=edited())
    assert all(
        e.schema == schema
        for p in fixed.programs()
        for e in p.effects
        if isinstance(e, Send | Recv)
    )


@settings(deadline=None, max_examples=40)
@given(woven_programs())
def test_drawn_schedules_are_compositions_in_threads(case: Woven) -> None:
    transport = Threads(timeout=10)
    try:
        own_schedules_are_compositions(case, transport)
    finally:
        transport.close()


@settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_an_engine_runs_interleaved_stages(data: st.DataObject) -> None:
    """Law L11 with several stages on each rank: a request gets the same tokens as when it runs
    alone, and all stages agree."""
    ranks, per_rank = data.draw(st.sampled_from(((2, 2), (1, 3), (1, 2))))
    trace = data.draw(traces(min_layers=ranks * per_rank, max_layers=ranks * per_rank))

    def interleaving(stages: Any, **options: Any) -> Any:
        return pipeline(stages, schedule=interleaved(ranks), **options)

    with mock.patch("weft.proofs._laws.engine.serving.pipeline", interleaving):
        stages_agree(trace, ranks * per_rank, data.draw(st.sampled_from(("none", "full"))))


def without(text: str, line: str) -> tuple[Program, ...]:
    assert line in text
    return parse_listing(text.replace(f"  {line}\n", "", 1))


FED = str(pipeline([stage] * 4, microbatches=2, advance=advance, schedule=interleaved(2)))
REFUSED: dict[str, tuple[Any, str]] = {
    "no schedule": (
        lambda: pipeline([stage] * 2, schedule=3),  # type: ignore[arg-type]
        (
            "pipeline(<2 stages>, schedule=3)\n  saw: schedule=3\n  instead: a function"
            " (num_stages, jobs, *, schema, advances, buffers) -> programs: interleaved(2); or the"
            " programs"
        ),
    ),
    "a function to no programs": (
        lambda: pipeline([stage] * 2, schedule=lambda *_, **__: "run"),
        "pipeline(<2 stages>): schedule(...)\n  saw: programs='run'",
    ),
    "programs of other stages": (
        lambda: pipeline([stage] * 2, microbatches=2, advance=advance, schedule=parse_listing(FED)),
        "the programs of its schedule\n  saw: programs of 4 stages, in a pipeline of 2",
    ),
    "a batch of fewer parts": (
        lambda: pipeline([stage] * 2, microbatches=2, schedule=edited())(
            PARAMS[:2], states()[:2], BATCH[:1]
        ),
        (
            "pipeline(<2 stages>)\n  saw: programs of 2 micro-batches, and a batch of 1\n  instead:"
            " a batch of as many parts, or a schedule (num_stages, jobs, ...) that makes the"
            " programs"
        ),
    ),
    "an output that does not return": (
        lambda: pipeline(
            [stage] * 2,
            microbatches=1,
            advance=advance,
            schedule=lambda n, jobs, **_: make_programs(n, [Job(feeds=False)] * len(jobs)),
        ),
        (
            "saw: micro-batch 0 feeds, and is not broadcast\n  instead: broadcast from 1 for the"
            " jobs with feeds=True"
        ),
    ),
    "no advance": (
        lambda: pipeline(
            [stage] * 2,
            advance=advance,
            schedule=lambda n, jobs, **_: make_programs(n, jobs, advances=False),
        ),
        "saw: no run advance\n  instead: a run advance for each micro-batch",
    ),
    "a job before its own tokens": (
        lambda: scan(
            pipeline(
                [stage] * 2,
                advance=advance,
                schedule=lambda n, jobs, **_: make_programs(
                    n, [attrs.evolve(job, after=None) for job in jobs]
                ),
            ),
            3,
        )(PARAMS[:2], states()[:2], BATCH),
        (
            "saw: rank 0 performs 'run stage 0 [mb 1]' too early: its job must wait for job 0\n"
            "  instead: broadcast and run advance [mb 0] before it"
        ),
    ),
    "a send that is gone": (
        lambda: pipeline(
            [stage] * 4, microbatches=2, schedule=without(FED, "send stage 0 to 1 [mb 1]")
        ),
        (
            "saw: rank 1 expects 'recv stage 0 from 0 [mb 1]' but gets 'send stage 2 to 1 [mb 0]'"
            " from rank 0"
        ),
    ),
    "a wrong interleaving, where each rank is right by itself": (
        lambda: pipeline(
            [stage] * 4,
            schedule=parse_listing(
                "rank 0 of 2\n  run stage 0 [mb 0]\n  recv stage 1 from 1 [mb 0]\n  send stage 0 to"
                " 1 [mb 0]\n  run stage 2 [mb 0]\n  send stage 2 to 1 [mb 0]\nrank 1 of 2\n  recv"
                " stage 0 from 0 [mb 0]\n  run stage 1 [mb 0]\n  send stage 1 to 0 [mb 0]\n  recv"
                " stage 2 from 0 [mb 0]\n  run stage 3 [mb 0]"
            ),
        ),
        (
            "saw: no rank can go on: rank 0: 'recv stage 1 from 1 [mb 0]' waits for rank 1; rank 1:"
            " 'recv stage 0 from 0 [mb 0]' waits for rank 0: a cycle"
        ),
    ),
    "micro-batches out of order": (
        lambda: pipeline(
            [stage],
            microbatches=2,
            schedule=parse_listing("rank 0 of 1\n  run stage 0 [mb 1]\n  run stage 0 [mb 0]"),
        ),
        "saw: runs of the micro-batches [1, 0], where there are 2, in order",
    ),
    "an output that overtakes a result": (
        lambda: pipeline(
            [stage] * 4, microbatches=2, advance=advance, schedule=parse_listing(overtaking())
        ),
        (
            "saw: rank 1 performs 'broadcast from 1 [mb 0]' first, but rank 0's 'recv stage 1 from"
            " 1 [mb 1]', which reads the same channel, expects another message"
        ),
    ),
    "programs of other classes": (
        lambda: pipeline([stage] * 2, schedule=classed())(PARAMS[:2], states()[:2], BATCH),
        "saw: programs for micro-batches ('another',), and a batch of (",
    ),
    "devices for stages, and not for ranks": (
        lambda: pipeline(
            [stage] * 4, schedule=interleaved(2), transport=Threads(devices=["cpu"] * 4)
        ),
        "saw: 4 devices for 2 ranks",
    ),
}


def overtaking() -> str:
    """Rank 1 broadcasts micro-batch 0 before it sends the result of stage 1 that rank 0 receives
    first."""
    first = FED.index("rank 0 of 2")
    last = FED.index("rank 1 of 2")
    lines = ["  recv stage 0 from 0 [mb 1]", "  run stage 1 [mb 1]", "  send stage 1 to 0 [mb 1]"]
    assert "\n".join(lines) in FED[last:]
    rest = (
        FED[last:]
        .replace("\n".join(lines) + "\n", "")
        .replace("  run advance [mb 0]\n", "  run advance [mb 0]\n" + "\n".join(lines) + "\n")
    )
    return FED[first:last] + rest


def classed() -> list[Program]:
    return [
        attrs.evolve(program, classes=("another",))
        for program in make_programs(2, [Job(feeds=False)], advances=False)
    ]


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_the_work_is_refused(case: str) -> None:
    call, said = REFUSED[case]
    with pytest.raises(ProgramError) as error:
        call()
    assert said in str(error.value)
