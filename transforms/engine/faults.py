"""Faults: invalid arguments are refused; user code that raises for one request, or logits without a possible token, end
that request alone; an error in a step itself ends the engine."""

import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import UnionType
from typing import Any

from weft.arguments.checks import is_int, kind_of
from weft.errors import EngineError, LogitsError, RequestError, WeftError

Rule = tuple[type | UnionType | Callable[[Any], object], str]
"""The type of an argument, or a function that says whether its value is valid; and the `instead` of the error."""
COUNT: Rule = (lambda value: is_int(value, 1), "a whole number >= 1")
COUNT_OR_NONE: Rule = (lambda value: value is None or is_int(value, 1), "a whole number >= 1, or None")


def check_values(
    call: str, rules: Mapping[str, Rule], values: Mapping[str, Any], error: type[WeftError] = RequestError
) -> None:
    """Raise `error` for the first value that breaks the rule of its name."""
    for name, value in values.items():
        rule, instead = rules[name]
        if isinstance(rule, type | UnionType):
            holds, seen = isinstance(value, rule), f"{name} is {kind_of(value)}"
        else:
            holds, seen = bool(rule(value)), f"{name}={value!r:.200}"
        if not holds:
            raise error(call, seen, instead)


class StepGuard:
    """A context that cannot be entered again once something was raised in it, because the host and the device may
    disagree from then on. It cannot be entered while it is entered, either.

    Args:
        call: the call that it guards, for errors.
    """

    def __init__(self, call: str) -> None:
        self.call = call
        self._broken, self._inside = "", False

    def __enter__(self) -> None:
        if self._inside:
            raise EngineError(self.call, "a call from within a step", "a mask that leaves the engine alone")
        self.check(self.call)
        self._inside = True

    @property
    def is_broken(self) -> bool:
        """Whether something was raised in it."""
        return bool(self._broken)

    def check(self, call: str) -> None:
        """Raise EngineError if it is broken; `call` is the user's call."""
        if self._broken:
            seen = f"an earlier step that raised {self._broken}; how far its requests came is not known"
            raise EngineError(call, seen, "another weft.Engine(...), and its requests again")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._inside = False
        if error is not None:
            self._broken = traceback.format_exception_only(error)[-1].strip().splitlines()[0]


def blame(error: BaseException, call: str, instead: str) -> RequestError:
    """Turn what user code raised for a request into that request's error; a RequestError stays as it is.

    Args:
        call, instead: of that error.

    Raises:
        BaseException: the error itself, if it is an interrupt or the like. A panic of a Rust extension is not an
            `Exception`, but counts as an error of the request.
    """
    if isinstance(error, RequestError):
        return error
    if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
        raise error
    blamed = RequestError(call, traceback.format_exception_only(error)[-1].strip(), instead)  # str(error) may raise too
    blamed.__cause__ = error
    return blamed


@contextmanager
def blamed(call: str, instead: str) -> Iterator[None]:
    """A context in which whatever is raised becomes the error of one request (`blame`)."""
    try:
        yield
    except BaseException as error:
        if (found := blame(error, call, instead)) is error:
            raise
        raise found from error


def is_fault(logprob: float) -> bool:
    """Whether a logprob says that no token was drawn: NaN, as the logits were, or -inf."""
    return not logprob > -math.inf


def find_faults(logprobs: Sequence[Sequence[float]]) -> dict[int, int]:
    """The rows with a fault, and the index of the first one in each."""
    faulty = (row for row, own in enumerate(logprobs) if any(map(is_fault, own)))
    return {row: next(i for i, x in enumerate(logprobs[row]) if is_fault(x)) for row in faulty}


def fault_error(id: str, logprob: float, num_tokens: int) -> WeftError:
    """The error of a request for which no token was drawn.

    Args:
        id: of the request.
        logprob: the one in the place of the token's.
        num_tokens: tokens before it, the prompt included.
    """
    call = f"request {id!r}"
    if math.isnan(logprob):
        instead = "look for weights that are not finite, or for an overflow of the dtype"
        return LogitsError(call, f"logits that are NaN after {num_tokens} tokens", instead)
    seen = f"no token that can be drawn after {num_tokens} tokens: those that the request allows have logits of -inf"
    return RequestError(call, seen, "allow another token, or look at the model's logits")
