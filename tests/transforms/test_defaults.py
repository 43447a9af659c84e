"""An option that is given as its default changes nothing, and every default can be written by a
caller."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import find, given, settings, strategies as st
from torch import Tensor

import weft
import weft.transforms
from weft.errors import ProgramError
from weft.proofs._strategies.compositions.layers import LAYERS
from weft.transforms.pipelines.schedule import make_programs

X = torch.arange(4.0)
MESH = weft.Mesh(ranks=2)
Options = dict[str, Any]


def double(x: Tensor) -> Tensor:
    return x * 2


def stage(params: Any, state: Any, batch: Tensor, x: Tensor | None) -> tuple[Any, Tensor]:
    return state, double(batch if x is None else x)


def piped(step: Any) -> Any:
    return step((None, None), (None, None), X)


def on_ranks(local: Callable[[Tensor], Tensor]) -> Any:
    return weft.shard(local, MESH, weft.Replicate(), weft.PerRank())(X)


def exactly(options: Options) -> Tensor:
    with weft.batch_invariant(**options):
        return double(X)


# A call of each public transform that has options, with some of them.
CALLS: dict[str, Callable[[Options], Any]] = {
    "all_gather": lambda options: on_ranks(lambda x: weft.all_gather(x, "ranks", **options)),
    "all_reduce": lambda options: on_ranks(lambda x: weft.all_reduce(x, "ranks", **options)),
    "batch_invariant": exactly,
    "compose": lambda options: piped(weft.compose([stage, stage], **options)),
    "graphify": lambda options: weft.graphify(double, **options)(X),
    "piecewise": lambda options: weft.piecewise(double, split_at="aten::mul", **options)(X),
    "pipeline": lambda options: piped(weft.pipeline([stage, stage], **options)),
    "reduce_scatter": lambda options: on_ranks(
        lambda x: weft.reduce_scatter(x, "ranks", **options)
    ),
    "while_loop": lambda options: weft.while_loop(lambda x: x.sum() < 99, double, X, **options),
}
POSITIONAL = {"fn": "what is transformed; without it the call is a decorator"}


def public(name: str) -> Any:
    return getattr(weft, name, None) or getattr(weft.transforms, name)


def defaults(function: Any) -> Options:
    """The options of a function, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {
        p.name: p.default
        for p in parameters
        if p.default is not p.empty and p.name not in POSITIONAL
    }


def test_every_transform_with_options_is_called() -> None:
    transforms = {name for layer in LAYERS.values() for name in layer.uses}
    assert {name for name in transforms if defaults(public(name))} == CALLS.keys()


@st.composite
def given_defaults(draw: st.DrawFn) -> tuple[str, Options]:
    """A transform, and some of its options as they are by default."""
    name = draw(st.sampled_from(sorted(CALLS)))
    options = defaults(public(name))
    chosen = draw(st.sets(st.sampled_from(sorted(options)), min_size=1))
    return name, {option: options[option] for option in sorted(chosen)}


def check_given(case: tuple[str, Options]) -> None:
    name, options = case
    torch.testing.assert_close(CALLS[name](options), CALLS[name]({}), rtol=0, atol=0)


@given(given_defaults())
@settings(max_examples=40, deadline=None)
def test_an_option_that_is_given_as_its_default_changes_nothing(case: tuple[str, Options]) -> None:
    check_given(case)


def test_a_default_that_is_refused_when_it_is_given_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = weft.pipeline

    @functools.wraps(plain)
    def refusing(stages: Any, **options: Any) -> Any:
        if "schedule" in options:
            raise ProgramError("pipeline", "schedule=None", "a schedule")
        return plain(stages, **options)

    monkeypatch.setattr(weft, "pipeline", refusing)

    def is_refused(case: tuple[str, Options]) -> bool:
        try:
            check_given(case)
        except ProgramError:
            return True
        return False

    options = settings(database=None, deadline=None, max_examples=500)
    name, defaults = find(given_defaults(), is_refused, settings=options)
    assert name == "pipeline"
    assert defaults["schedule"] is None


def functions() -> Iterator[tuple[str, Any]]:
    """The public functions of weft."""
    for home in (weft, weft.transforms):
        for name in home.__all__:
            if isinstance(value := getattr(home, name), types.FunctionType):
                yield name, value


def hidden(function: Any) -> list[str]:
    """The options whose default is nothing that a caller can write, such as a function."""
    kinds = (bool, int, float, str, tuple, type(None))
    return [name for name, default in defaults(function).items() if not isinstance(default, kinds)]


@pytest.mark.parametrize(("name", "function"), [*functions()])
def test_defaults_can_be_written(name: str, function: Any) -> None:
    assert hidden(function) == []


def test_a_default_that_is_a_function_is_found() -> None:
    def pipeline(stages: Any, *, schedule: Any = make_programs) -> None: ...

    assert hidden(pipeline) == ["schedule"]
