"""Ranges in torch's profiles: where replays, captures, effects and an engine's steps begin and
end."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

import weft
from weft.torchapi.ranges import is_profiled

LIMITS = weft.EngineLimits(max_num_reqs=2, max_num_tokens=16, max_model_len=64)


def affine(params: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ params)


def stage(params: Any, state: Any, batch: Tensor, x: Tensor | None) -> tuple[Any, Tensor]:
    return state, torch.tanh(params * (batch if x is None else x))


def doubled(batch: weft.Batch) -> weft.Batch:
    return attrs.evolve(batch, input_ids=2 * batch.input_ids)


def profiled(call: Callable[[], Any]) -> list[FunctionEvent]:
    """The events of a profile of the call, in order."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    return sorted(profiler.events(), key=lambda event: event.time_range.start)


def ranges(events: list[FunctionEvent]) -> list[str]:
    """weft's ranges, each after the ranges around it."""
    return [" > ".join(around(event)) for event in events if event.name.startswith("weft: ")]


def around(event: FunctionEvent) -> list[str]:
    """The names of weft's ranges around an event, the outermost first, and its own if it is one."""
    names = []
    at: FunctionEvent | None = event
    while at is not None:
        if at.name.startswith("weft: "):
            names.append(at.name)
        at = at.cpu_parent
    return names[::-1]


def test_a_capture_and_a_replay_are_named_by_the_function() -> None:
    graph = weft.graphify(affine)
    weight = torch.ones(3, 3)
    events = profiled(lambda: [graph(weight, torch.ones(2, 3)) for _ in range(2)])
    assert ranges(events) == ["weft: capture affine", *["weft: replay affine"] * 2]
    within = [around(event) for event in events if event.name == "aten::tanh"]
    assert within[-2:] == [["weft: replay affine"]] * 2
    assert {tuple(names) for names in within[:-2]} == {("weft: capture affine",)}


def test_a_ladder_adds_the_class() -> None:
    ladder = [weft.BatchDescriptor(4, 2)]
    graph = weft.graphify(doubled, ladder=ladder)
    batch = weft.Batch.ragged([0], [[1, 2, 3]])
    graph.capture(batch)
    assert ranges(profiled(lambda: graph(batch))) == [
        "weft: replay doubled for 'ragged 4 tokens, 2 reqs'"
    ]


def test_effects_of_a_pipeline_are_around_the_replays_in_them() -> None:
    step = weft.pipeline([weft.graphify(stage), stage])
    params = [torch.ones(()), torch.ones(())]
    step(params, [None, None], torch.ones(3))
    assert ranges(profiled(lambda: step(params, [None, None], torch.ones(3)))) == [
        "weft: rank 0: run stage 0 [mb 0]",
        "weft: rank 0: run stage 0 [mb 0] > weft: replay stage",
        "weft: rank 0: send to 1 [mb 0]",
        "weft: rank 1: recv from 0 [mb 0]",
        "weft: rank 1: run stage 1 [mb 0]",
    ]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("num_stages", [1, 2])
def test_steps_of_an_engine(num_stages: int) -> None:
    model = weft.load("demo", "cpu")
    engine = weft.Engine(model, LIMITS, pipeline=num_stages)
    engine.warm_up()
    engine.add("A list is", max_tokens=2)
    events = ranges(profiled(lambda: list(engine)))
    assert events[0] == "weft: schedule"
    assert events[1] == "weft: launch"
    assert {name for name in events if " > " not in name} == {
        "weft: schedule",
        "weft: launch",
        "weft: read",
    }
    within = {1: "weft: launch > weft: replay ", 2: "weft: launch > weft: rank 1: run stage 1 "}
    assert [name for name in events if name.startswith(within[num_stages])]
    if num_stages == 2:
        replays = [name for name in events if "replay" in name]
        assert replays
        assert all(name.count(" > ") == 2 and ": run stage" in name for name in replays)


@pytest.mark.parametrize("make", [weft.graphify, lambda step: torch.func.vmap(step)])
def test_inside_a_capture_or_a_transform_there_are_none(make: Any) -> None:
    """A range is two operators, which a graph would repeat."""
    inside: list[bool] = []

    def step(x: Tensor) -> Tensor:
        inside.append(is_profiled())
        _, y = weft.pipeline([stage])([torch.ones(())], [None], x)
        return y

    x = torch.rand(2, 3)
    expected = make(step)(x)
    events = profiled(lambda: torch.testing.assert_close(make(step)(x), expected))
    assert inside
    assert not any(inside)
    assert not [name for name in ranges(events) if "rank" in name]


def test_a_graph_has_the_same_operators_under_a_profiler() -> None:
    def step(x: Tensor) -> Tensor:
        _, y = weft.pipeline([stage, stage])([torch.ones(())] * 2, [None] * 2, x)
        return y

    x = torch.rand(2, 3)
    plain = weft.graphify(step).lower(x).as_text()
    texts: list[str] = []
    profiled(lambda: texts.append(weft.graphify(step).lower(x).as_text()))
    assert texts == [plain]
