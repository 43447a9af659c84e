"""The public strategies, each in a test as a user writes it."""

import inspect
import re
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from hypothesis import find, given, settings, strategies as st

import weft
from weft.effects import Broadcast, Program, listing, parse_listing
from weft.proofs import assert_equal, strategies
from weft.proofs.strategies import Function, Mapping, Move, RankFunction, Scenario, Scheduled
from weft.stages.architectures import ARCHITECTURES
from weft.transforms import Job, check

FEW = settings(max_examples=20, deadline=None)


def test_the_docstring_lists_each_strategy() -> None:
    drawing = [name for name in strategies.__all__ if inspect.isfunction(getattr(strategies, name))]
    rows = re.findall(r"^\| `(\w+)\(", strategies.__doc__ or "", re.MULTILINE)
    assert sorted(rows) == sorted(drawing)


@FEW
@given(strategies.mappings())
def test_a_mapped_function_is_a_loop(mapping: Mapping) -> None:
    stacked = torch.stack(mapping.inputs)
    mapped = torch.func.vmap(mapping.fn, in_dims=(None, 0))(mapping.params, stacked)
    looped = torch.stack([mapping.fn(mapping.params, x) for x in mapping.inputs])
    assert_equal("a mapped function is a loop", mapped, looped, exact=False)


@FEW
@given(strategies.rank_functions())
def test_shards_of_a_function_are_the_function(function: RankFunction) -> None:
    sharded = function.to("cpu").sharded()
    state = weft.clone(function.state)
    expected_state = weft.clone(function.state)
    for x in function.inputs:
        expected_state, expected = function.whole(function.params, expected_state, x)
        state, y = sharded(function.params, state, x)
        assert_equal("shards", (state, y), (expected_state, expected), exact=False)


def one_by_one(num_stages: int, jobs: Sequence[Job], **options: Any) -> tuple[Program, ...]:
    """A schedule of a user: each micro-batch's result is taken in before the next one begins."""
    streamed = weft.transforms.make_programs(num_stages, jobs, **options)
    programs = []
    for program in streamed:
        in_order = sorted(program.effects, key=lambda effect: effect.microbatch)
        programs.append(attrs.evolve(program, effects=tuple(in_order)))
    return tuple(programs)


@FEW
@given(strategies.stage_lists(), st.integers(1, 4))
def test_a_schedule_of_a_user_is_composition(functions: list[Function], microbatches: int) -> None:
    stages = [function.fn for function in functions]
    params = [function.params for function in functions]
    states = [function.state for function in functions]
    x = torch.arange(24.0).view(6, 4).cos()
    scheduled = weft.pipeline(stages, microbatches=microbatches, schedule=one_by_one)
    expected = weft.compose(stages)(params, states, x)
    assert_equal("a schedule", scheduled(params, states, x), expected, exact=microbatches == 1)


@FEW
@given(st.integers(1, 4), strategies.job_lists())
def test_a_schedule_of_a_user_is_accepted(num_stages: int, jobs: tuple[Job, ...]) -> None:
    check(one_by_one(num_stages, jobs))


@FEW
@given(strategies.programs())
def test_programs_print_and_parse(scheduled: Scheduled) -> None:
    assert parse_listing(listing(scheduled.programs)) == scheduled.programs
    num_feeding = sum(job.feeds for job in scheduled.jobs)
    for program in scheduled.programs:
        results = [effect for effect in program.effects if isinstance(effect, Broadcast)]
        assert len(results) == num_feeding


@FEW
@given(strategies.scenarios(), st.data())
def test_a_split_of_a_model_is_the_model(scenario: Scenario, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, scenario.config.num_layers))
    whole = weft.compose(scenario.stages(1), advance=weft.advance)
    split = weft.pipeline(scenario.stages(num_stages), advance=weft.advance)
    whole_state = scenario.state(1)
    state = scenario.state(num_stages)
    for batch in scenario.batches():
        whole_state, expected = whole(scenario.params(1), whole_state, batch)
        state, out = split(scenario.params(num_stages), state, batch)
        assert_equal("a split model is the model", out, expected, exact=False)


@FEW
@given(strategies.scenarios())
def test_batches_are_of_the_moves(scenario: Scenario) -> None:
    for batch, moves in zip(scenario.batches(), scenario.moves, strict=True):
        assert batch.rows.tolist() == [move.row for move in moves]
        assert batch.descriptor.num_tokens == sum(max(1, move.prompt_tokens) for move in moves)
    first = attrs.evolve(scenario, moves=((Move(0, len(scenario.prompts[0])),),), uniform=(False,))
    assert first.batches()[0].input_ids.tolist() == list(scenario.prompts[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", [name for name, row in ARCHITECTURES.items() if not row.text_types]
)
def test_configurations_of_each_text_architecture_are_drawn(architecture: str) -> None:
    config = find(
        strategies.configs(min_layers=2), lambda config: config.architecture == architecture
    )
    assert config.num_layers == 2
