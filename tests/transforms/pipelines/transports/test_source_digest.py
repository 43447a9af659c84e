"""Digests of stages' sources: changes that they detect or ignore; all processes compute the same
ones."""

import functools
import linecache
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.transports.agreement import source_digest

WIDTH = 4
depth = 4


def of(fn: Callable[..., Any]) -> str:
    return source_digest("stage 0", fn).split()[-1]


def closing_over(value: Any) -> Callable[..., Any]:
    return lambda x: (x, value)


@attrs.frozen
class Config:
    """A configuration that stages close over."""

    width: int
    sizes: tuple[int, ...] = ()
    device: Any = None


def helped(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A stage whose helper in its module is `fn`."""
    namespace: dict[str, Any] = {"helper": fn}
    exec("def stage(x):\n    return helper(x)", namespace)
    stage: Callable[..., Any] = namespace["stage"]
    return stage


@attrs.frozen
class Called:
    """A stage that is an object."""

    factor: int

    def __call__(self, x: Any) -> Any:
        return x * self.factor


def scaled(fn: Callable[..., Any], by: float) -> Callable[..., Any]:
    """A transform as a user would write it."""

    @functools.wraps(fn)
    def run(x: Any) -> Any:
        return by * fn(x)

    return run


DIFFERENT: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (lambda x: x.sin(), lambda x: x.cos()),
    (lambda x: x + 1, lambda x: x + 2),
    (lambda x: [i + 1 for i in x], lambda x: [i + 2 for i in x]),
    (lambda x, y=1: x, lambda x, y=2: x),
    (closing_over(1), closing_over(1.5)),
    (closing_over(torch.float16), closing_over(torch.bfloat16)),
    (closing_over([1, 2]), closing_over([2, 1])),
    (closing_over({"a": 1}), closing_over({"a": 2})),
    (closing_over(Config(1)), closing_over(Config(2))),
    (closing_over(Config(1, (1,))), closing_over(Config(1, (2,)))),
    (closing_over(lambda x: x + 1), closing_over(lambda x: x - 1)),
    (helped(lambda x: x + 1), helped(lambda x: x - 1)),
    (helped(helped(lambda x: x + 1)), helped(helped(lambda x: x - 1))),
    (functools.partial(max, 1), functools.partial(max, 2)),
    (Called(1), Called(2)),
    (graphify(lambda x: x + 1), graphify(lambda x: x - 1)),
    (scaled(helped, 2.0), scaled(helped, 3.0)),
    (scaled(graphify(lambda x: x + 1), 2.0), scaled(graphify(lambda x: x - 1), 2.0)),
]


@pytest.mark.parametrize("pair", DIFFERENT, ids=range(len(DIFFERENT)))
def test_a_difference_in_source_or_values_changes_it(
    pair: tuple[Callable[..., Any], Callable[..., Any]],
) -> None:
    one, other = pair
    assert of(one) == of(one) != of(other)


SAME: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (closing_over(torch.zeros(1)), closing_over(torch.ones(2))),
    (closing_over(torch.device("cpu")), closing_over(torch.device("meta"))),
    (
        closing_over(Config(1, device=torch.device("cpu"))),
        closing_over(Config(1, device=torch.device("meta"))),
    ),
]


@pytest.mark.parametrize("pair", SAME, ids=range(len(SAME)))
def test_values_that_may_differ_from_rank_to_rank_do_not(
    pair: tuple[Callable[..., Any], Callable[..., Any]],
) -> None:
    assert of(pair[0]) == of(pair[1])


def test_constants_of_a_module_count_and_its_variables_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stage(x: Any) -> Any:
        return x * WIDTH + depth

    before = of(stage)
    monkeypatch.setitem(globals(), "depth", 5)
    assert of(stage) == before
    monkeypatch.setitem(globals(), "WIDTH", 5)
    assert of(stage) != before


def test_a_module_that_a_stage_uses_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in (("one", "x + 1"), ("two", "x - 1")):
        (tmp_path / f"helpers_{name}.py").write_text(f"def help(x):\n    return {text}\n")
        namespace: dict[str, Any] = {"helpers": import_module(f"helpers_{name}")}
        exec("def stage(x):\n    return helpers.help(x)", namespace)
        digests.append(of(namespace["stage"]))
    assert digests[0] != digests[1]


def test_a_file_that_changes_after_its_import_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "helpers_changed.py"
    source.write_text("def help(x):\n    return x + 1\n")
    stage = import_module("helpers_changed").help
    before = of(stage)
    source.write_text("def help(x):\n    return x - 1  # not what this process runs\n")
    linecache.checkcache(str(source))  # as a traceback does
    assert of(stage) == before


def test_functions_that_call_each_other_have_one() -> None:
    namespace: dict[str, Any] = {}
    exec(
        "def even(n):\n    return n == 0 or odd(n - 1)\ndef odd(n):\n    return n and even(n - 1)",
        namespace,
    )
    assert of(namespace["even"]) != of(namespace["odd"])


def test_a_cell_that_is_not_filled_yet_is_passed_over() -> None:
    def stage(x: Any) -> Any:
        return later(x)

    before = of(stage)
    later = closing_over(1)
    assert of(stage) != before


_PROGRAM = """
from weft.stages.config import parse_config
from weft.transforms.pipelines.transports.agreement import source_digest
print(source_digest("stage 0", lambda x: x in {"a", "b", "c", "d"} or x in ("a", {"e": {"f", "g"}})))
print(source_digest("advance", parse_config))
"""


@pytest.mark.nightly
def test_it_is_the_same_in_every_process() -> None:
    said = {
        subprocess.run(
            [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        for _ in range(3)
    }
    assert len(said) == 1
