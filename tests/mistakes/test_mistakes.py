"""Deliberate mistakes, one for each step that a new user takes, and what is said of each: the call,
what was seen, and what to write instead. The texts are whole, so that a change of a message is a
change here, to be read as a user would.
"""

import re
from importlib import import_module
from operator import attrgetter
from typing import Any

import batch_mistakes
import engine_mistakes
import generate_mistakes
import graphify_mistakes
import laws_mistakes
import pipeline_mistakes
import pytest
from answers import Mistake, X, as_written
from shell_mistakes import COMMANDS
from torch import Tensor

import weft
from weft.errors import WeftError
from weft.transforms.cli.main import main

TABLES = (
    graphify_mistakes,
    batch_mistakes,
    pipeline_mistakes,
    generate_mistakes,
    engine_mistakes,
    laws_mistakes,
)
MISTAKES: dict[str, Mistake] = {
    name: mistake for table in TABLES for name, mistake in table.MISTAKES.items()
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_the_call_what_was_seen_and_the_remedy(mistake: str) -> None:
    error = MISTAKES[mistake].answer()
    text = as_written(error)
    assert re.fullmatch(MISTAKES[mistake].pattern(), text), f"{text}\nand not\n{MISTAKES[mistake]}"
    assert isinstance(error, WeftError)
    for part in (error.call, error.problem, error.instead):
        assert part.strip()
    assert "object at 0x" not in str(error)
    assert max(map(len, str(error).splitlines())) < 200


@pytest.mark.parametrize(
    ("name", "meant"),
    {
        "jit": "weft.graphify",
        "vmap": "torch.func.vmap",
        "grad": "torch.func.grad",
        "simulate": "weft.transforms.simulate",
        "MODES": "weft.transforms.MODES",
    }.items(),
)
def test_a_name_that_is_elsewhere_is_answered(name: str, meant: str) -> None:
    with pytest.raises(AttributeError) as error:
        getattr(weft, name)
    assert str(error.value) == f"module 'weft' has no attribute {name!r}; use {meant}"


@pytest.mark.parametrize("name", ["nothing_like_it", "__wrapped__"])
def test_a_name_that_is_nowhere_is_refused_without_a_hint(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"^module 'weft' has no attribute '{name}'$"):
        getattr(weft, name)


def test_each_name_of_others_is_answered_by_one_that_there_is() -> None:
    for meant in weft._MEANT.values():
        assert callable(attrgetter(meant.partition(".")[2])(import_module(meant.split(".")[0])))
    assert not {*weft._MEANT} & {*weft.__all__}


@pytest.mark.parametrize("mistake", COMMANDS)
def test_a_mistake_in_a_shell_is_answered(mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv, text = COMMANDS[mistake]
    try:
        code: object = main(argv)
    except SystemExit as left:  # argparse
        code = left.code
    assert code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err


def test_an_error_inside_a_stage_is_the_users_own_and_says_where() -> None:
    def forgets(params: Any, state: Any, batch: Tensor, x: Any) -> Any:
        return state, x * params

    with pytest.raises(TypeError, match="unsupported operand") as error:
        weft.pipeline([forgets, pipeline_mistakes.stage])([X, X], [None, None], X)
    note = "in stage 0 (forgets); x is None on the first stage, which computes from the batch"
    assert note in error.value.__notes__


def test_there_are_at_least_30_of_every_step() -> None:
    assert len(MISTAKES) == sum(len(table.MISTAKES) for table in TABLES)
    assert len(MISTAKES) + len(COMMANDS) >= 30
    steps = {mistake.partition(":")[0] for mistake in MISTAKES}
    assert steps >= {
        "graphify",
        "ladder",
        "pad",
        "donation",
        "pipeline",
        "load",
        "generate",
        "engine",
        "sampling",
    }
    assert steps >= {"adapter", "speculation", "laws"}


def test_the_line_that_is_named_is_the_users_own() -> None:
    with pytest.raises(WeftError) as error:
        weft.graphify(lambda x: x * x.max().item())(X)
    assert re.search(rf"at {re.escape(__file__)}:\d+: .*x\.max\(\)\.item\(\)", str(error.value))
