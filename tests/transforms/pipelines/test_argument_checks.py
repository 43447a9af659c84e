"""The arguments that `pipeline` and `compose` refuse, and their errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusal import refused
from scaling import PARAMS, STATES, scale, stepped

import weft
from weft.errors import DescriptorError, ProgramError
from weft.stages.custom.module import from_module
from weft.transforms.pipelines.pipeline import compose, pipeline
from weft.transforms.pipelines.transports.threads import Threads


@pytest.mark.parametrize("transform", [compose, pipeline])
def test_no_stage(transform: Callable[..., Any]) -> None:
    instead = "a list of stages (params, state, batch, x) -> (state, y)"
    with refused(ProgramError, f"{transform.__name__}([])", "no stage", instead):
        transform([])


def test_a_value_of_another_schema_is_named() -> None:
    schema = weft.Schema.parse("[3, 2] float32")
    stages = [lambda p, s, batch, x: (s, batch.double()), lambda p, s, batch, x: (s, x)]
    step = pipeline(stages, schema=schema)
    call = f"rank 0: 'send to 1 [mb 0]: {schema}'"
    problem = "a value of schema [3, 2] float64"
    with refused(ProgramError, call, problem, f"return {schema} from the stage"):
        step((None, None), (None, None), torch.ones(3, 2))


@pytest.mark.parametrize(
    ("name", "params", "state"), [("params", PARAMS, STATES[:2]), ("state", PARAMS[:2], ())]
)
def test_a_wrong_number_of_entries_is_named(name: str, params: Any, state: Any) -> None:
    count = len(params) if name == "params" else len(state)
    with pytest.raises(ProgramError) as error:
        pipeline([scale] * 2)(params, state, torch.ones(1))
    assert (
        str(error.value)
        == f"pipeline(<2 stages>)(params, state, batch)\n  saw: {name} has {count} entries\n"
        "  instead: pass a tuple or list with one entry a stage"
    )


@pytest.mark.parametrize(("params", "state"), [(PARAMS, STATES[:2]), (PARAMS[:2], ())])
def test_compose_names_a_wrong_number_of_entries_too(params: Any, state: Any) -> None:
    with pytest.raises(ProgramError, match="entries"):
        compose([scale] * 2)(params, state, torch.ones(1))


@pytest.mark.parametrize("transform", [pipeline, compose])
@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ([], "no stage"),
        (scale, "one function"),
        ([scale, torch.nn.Linear(1, 1)], "stage 1 is an nn.Module"),
        ([from_module(torch.nn.Linear(1, 1))], "stage 0 is a ModuleStage, no function"),
        (3, "an int"),
        (None, "None"),
        ({"first": scale}, "a dict"),
        (
            [scale, stepped],
            (
                "stage 1, stepped(s: torch.Tensor, batch: torch.Tensor, out: torch.Tensor) ->"
                " torch.Tensor"
            ),
        ),
        ("ab", "a str"),
        (
            [scale, pipeline([scale] * 2)],
            "stage 1 is itself a pipeline of 2 stages, a step (params, state, batch)",
        ),
    ],
)
def test_what_is_no_list_of_stages_is_refused(transform: Any, stages: Any, problem: str) -> None:
    with pytest.raises(ProgramError) as error:
        transform(stages)
    assert error.value.problem == problem


@pytest.mark.parametrize("microbatches", [0, -1, 2.0, "2", True])
def test_no_number_of_parts_is_refused(microbatches: Any) -> None:
    with pytest.raises(ProgramError) as error:
        pipeline([scale] * 2, microbatches=microbatches)
    assert error.value.call == f"pipeline(<2 stages>, microbatches={microbatches!r})"


@pytest.mark.parametrize(
    ("options", "problem", "instead"),
    [
        (
            {"transport": "threads"},
            "transport='threads'",
            "Local(), Threads() or Distributed(), of weft.transforms",
        ),
        (
            {"transport": Threads},
            "transport=Threads, the class",
            "Local(), Threads() or Distributed(), of weft.transforms",
        ),
        (
            {"advance": True},
            "advance=True",
            "a function (state, batch, out) -> state; for a weft.Batch, weft.advance",
        ),
        (
            {"advance": lambda s, out: s},
            "<lambda>(s, out)",
            "a function (state, batch, out) -> state",
        ),
        (
            {"schema": "[3] float32"},
            "schema is a str",
            "weft.Schema.parse(text), or weft.Schema.of(value)",
        ),
    ],
)
def test_what_is_no_option_is_refused(options: Any, problem: str, instead: str) -> None:
    with pytest.raises(ProgramError) as error:
        pipeline([scale] * 2, **options)
    assert (error.value.problem, error.value.instead) == (problem, instead)


@pytest.mark.parametrize("microbatches", [0, 2.0, "2"])
def test_programs_of_no_number_of_parts_are_refused(microbatches: Any) -> None:
    step = pipeline([scale] * 2, microbatches=3)
    assert step.programs() is step.programs(3)
    with pytest.raises(ProgramError) as error:
        step.programs(microbatches)
    assert error.value.call == f"pipeline(<2 stages>).programs({microbatches!r})"


def test_params_are_looked_at_before_the_batch() -> None:
    """With `step(batch, params, state)` in the wrong order, the error is about params."""
    with pytest.raises(ProgramError, match="params is a Tensor"):
        pipeline([scale] * 2, microbatches=2)(torch.ones(3), PARAMS[:2], STATES[:2])  # type: ignore[arg-type]


def test_a_batch_without_a_tensor_is_named() -> None:
    with pytest.raises(DescriptorError, match=r"no tensor in 2\.0, a float"):
        pipeline([scale] * 2, microbatches=2)(PARAMS[:2], STATES[:2], 2.0)
