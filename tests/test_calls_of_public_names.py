"""Calls of every public function and class that leave an argument out, or have one that does not
exist: the error names the function and the argument, before anything has run."""

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest

from weft.proofs.evidence.pages.reference import FACES, names_of

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def public_calls() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Each public function or class with a signature of its own, once."""
    listed_ids = set[int]()
    for face in FACES:
        for name in names_of(face):
            value = getattr(import_module(face), name)
            is_error = isinstance(value, type) and issubclass(value, BaseException)
            is_protocol = getattr(value, "_is_protocol", False)
            if not callable(value) or is_error or is_protocol or id(value) in listed_ids:
                continue
            listed_ids.add(id(value))
            try:
                inspect.signature(value)
            except (TypeError, ValueError):  # unions and the like, which nobody calls
                continue
            yield name, value


CALLS = dict(public_calls())


def required(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    return [
        each for each in parameters if each.default is each.empty and each.kind not in _VARIADIC
    ]


@pytest.mark.parametrize("name", CALLS)
def test_a_missing_argument_is_named(name: str) -> None:
    """With each of the required arguments left out, by position and by keyword."""
    value = CALLS[name]
    parameters = [*inspect.signature(value).parameters.values()]
    for missing in required(parameters):
        remaining = [each for each in required(parameters) if each is not missing]
        before = [
            object()
            for each in remaining
            if each.kind is not each.KEYWORD_ONLY
            and parameters.index(each) < parameters.index(missing)
        ]
        after = {each.name: object() for each in remaining[len(before) :]}
        if any(each.kind is each.POSITIONAL_ONLY for each in remaining[len(before) :]):
            after = {}  # an argument without a name cannot follow the missing one
        with pytest.raises(TypeError) as caught:
            value(*before, **after)
        assert missing.name in str(caught.value), caught.value
        assert name.rpartition(".")[2] in str(caught.value), caught.value


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_that_does_not_exist_is_named(name: str) -> None:
    value = CALLS[name]
    parameters = [*inspect.signature(value).parameters.values()]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    by_position = [object() for each in required(parameters) if each.kind is not each.KEYWORD_ONLY]
    by_keyword = {
        each.name: object() for each in required(parameters) if each.kind is each.KEYWORD_ONLY
    }
    with pytest.raises(TypeError) as caught:
        value(*by_position, **by_keyword, nonesuch=1)
    assert "nonesuch" in str(caught.value), caught.value
    assert name.rpartition(".")[2] in str(caught.value), caught.value
