"""Faults: what a user's code raises for one request, or logits that leave it no token, ends that request alone; what
raises in a step itself ends the engine."""

import math
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from weft.errors import EngineError, LogitsError, RequestError, WeftError


class Whole:
    """A context that is whole, or never entered again: what raises within leaves the host and the device at odds. It is
    not entered within itself either.

    Args:
        call: what runs in it, for errors.
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
        """Whether it will not be entered again."""
        return bool(self._broken)

    def check(self, call: str) -> None:
        """Raise EngineError where it is broken; `call` is what was to be done."""
        if self._broken:
            seen = f"an earlier step that raised {self._broken}; how far its requests came is not known"
            raise EngineError(call, seen, "another weft.Engine(...), and its requests again")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._inside = False
        if error is not None:
            self._broken = traceback.format_exception_only(error)[-1].strip().splitlines()[0]


def blame(error: BaseException, call: str, instead: str) -> RequestError:
    """What was raised on behalf of one request, as the error of that request; a RequestError stays.

    Args:
        call, instead: of that error.

    Raises:
        BaseException: it is no error of a request, but an interrupt or the like. A panic of a Rust extension is one,
            though it is no Exception.
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
    """What is raised inside is the error of one request, as `blame` makes it."""
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
    """The rows in which there is a fault, and the place of the first one in each."""
    faulty = (row for row, own in enumerate(logprobs) if any(map(is_fault, own)))
    return {row: next(i for i, x in enumerate(logprobs[row]) if is_fault(x)) for row in faulty}


def fault_of(id: str, logprob: float, num_tokens: int) -> WeftError:
    """The error of a request whose next token has no logprob.

    Args:
        id: of the request.
        logprob: that was returned in its place.
        num_tokens: before it, those of the prompt included.
    """
    call = f"request {id!r}"
    if math.isnan(logprob):
        instead = "look for weights that are not finite, or for an overflow of the dtype"
        return LogitsError(call, f"logits that are NaN behind {num_tokens} tokens", instead)
    seen = f"no token that can be drawn behind {num_tokens} tokens: those that the request allows have logits of -inf"
    return RequestError(call, seen, "allow another token, or look at the model's logits")
