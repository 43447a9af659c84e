"""`weft.config`, and the contexts: those in which graphs may not be captured, and
`batch_invariant`."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from weft.arguments.checks import Rule, check_values, is_int, kind_of
from weft.blocks import Blocks
from weft.errors import ArgumentError, CaptureError, TooManyCapturesError


@attrs.define
class Config:
    """Messages about captures, to the logger `weft` at level WARNING, which Python prints by
    default.

    Args:
        explain_cache_misses: at each capture after the first, log how the call differs from the
            captured ones.
        log_captures: log each capture, its time and the memory of its graph.

    With either, each new reason why a call runs without a graph is logged once, such as a class
    that no class of the ladder covers. `cache_info().eager_reasons`, and `stats().eager_reasons` of
    an engine, count them.

    >>> import weft
    >>> weft.config.log_capture = True
    Traceback (most recent call last):
        ...
    weft.errors.ArgumentError: weft.config.log_capture = True
      saw: 'log_capture', which is no setting
      instead: explain_cache_misses or log_captures
    """

    explain_cache_misses: bool = False
    log_captures: bool = False

    def __setattr__(self, name: str, value: Any) -> None:
        call = f"weft.config.{name} = {value!r:.60}"
        names = [field.name for field in attrs.fields(Config)]
        if name in names and isinstance(value, bool):
            object.__setattr__(self, name, value)
        else:
            unknown = f"{name!r}, which is no setting", " or ".join(names)
            raise ArgumentError(
                call, *(unknown if name not in names else (kind_of(value), "True or False"))
            )


config = Config()
_RULES: dict[str, Rule] = {
    "most": (lambda most: is_int(most, 0), "an int >= 0"),
    "enabled": (bool, "True or False"),
}


@attrs.define
class _Count:
    """The captures inside one context `assert_max_captures(n)`."""

    most: int
    captures: list[str] = attrs.field(factory=list)


_COUNTS = Blocks[_Count]("weft.counts")
# Whether calls that have a graph replay it.
_NO_CAPTURE = Blocks[bool]("weft.no_capture")
_BATCH_INVARIANT = Blocks[bool]("weft.batch_invariant")
_LOCK = threading.Lock()
# The number of `batch_invariant()` contexts in all threads.
_OPEN = [0]
# Whether there is one. `torch.compile` reads no context variables: so compiled functions are batch
# invariant while there is one in any thread. It compiles again when this changes, so it is not the
# number.
ANYWHERE = [False]


@contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Make weft's operators batch invariant inside, in this thread: a token's result is a function
    of the token, its context and the parameters, bit for bit, whatever else is in the batch, and
    wherever a prompt was cut.

    Each sum has an order that depends on the shapes of the parameters and on the token's position
    alone. On the CPU its operators run in one thread, without autocast, and raise DeviceError for
    another precision of float32 products or without oneDNN. Torch's own operators are not changed:
    the number of rows may change their products. `graphify` has the context in its key. A model
    loaded with `batch_invariant=True` runs in it, whatever is around the call.

    Args:
        enabled: False leaves an outer context.

    >>> import torch, weft
    >>> from weft.ops.products.linear import linear
    >>> x, weight = torch.randn(5, 64), torch.randn(32, 64)
    >>> with weft.batch_invariant():
    ...     torch.equal(linear(x, weight)[:1], linear(x[:1], weight))
    True
    """
    check_values(f"weft.batch_invariant({enabled!r})", _RULES, {"enabled": enabled}, ArgumentError)
    _count_contexts(enabled)
    try:
        with _BATCH_INVARIANT.block(enabled):
            yield
    finally:
        _count_contexts(-enabled)


def is_batch_invariant() -> bool:
    """Whether `batch_invariant()` is around this call."""
    return bool(_BATCH_INVARIANT.around()) and _BATCH_INVARIANT.values()[-1:] == (True,)


def _count_contexts(change: int) -> None:
    with _LOCK:
        _OPEN[0] += change
        ANYWHERE[0] = _OPEN[0] > 0


@contextmanager
def no_capture(*, replay: bool = True) -> Iterator[None]:
    """Forbid captures inside, in this thread: a call without a graph runs under another graph, or
    runs the function itself.

    Args:
        replay: whether calls that have a graph replay it. False: every graphified function runs as
            if it were not, to step through it with a debugger or to print from it (as
            `jax.disable_jit()` does).

    >>> import torch, weft
    >>> f = weft.graphify(lambda x: x + 1)
    >>> with weft.no_capture():
    ...     y = f(torch.zeros(2))
    >>> f.cache_info()
    CacheInfo(captures=0, replays=0, eager=1, currsize=0)
    """
    with _NO_CAPTURE.block(replay):
        yield


@contextmanager
def assert_max_captures(most: int) -> Iterator[None]:
    """Raise at the capture after the `most`-th inside, in this thread, before it begins: in tests,
    and around a loop that should replay.

    Raises:
        CaptureError: `most` is not a number of captures.
        TooManyCapturesError: an AssertionError that names the captures, and how the last one
            differs.

    >>> import torch, weft
    >>> f = weft.graphify(lambda x: x + 1)
    >>> with weft.assert_max_captures(1):
    ...     for _ in range(3):
    ...         y = f(torch.zeros(2))
    """
    check_values(f"weft.assert_max_captures({most!r})", _RULES, {"most": most}, CaptureError)
    with _COUNTS.block(_Count(most)):
        yield


def may_capture() -> bool:
    """Whether no context forbids a capture here."""
    return not _NO_CAPTURE.values()


def may_replay() -> bool:
    """Whether no context forbids a replay here: false inside `no_capture(replay=False)`."""
    return not _NO_CAPTURE.around() or all(_NO_CAPTURE.values())


def count_capture(what: str, miss: Callable[[], tuple[str, str]]) -> None:
    """Count a capture that is about to begin in all contexts. `miss` returns its cause, and a
    remedy.

    Raises:
        TooManyCapturesError: one of the contexts does not allow it.
    """
    for count in _COUNTS.values():
        if len(count.captures) >= count.most:
            difference, remedy = miss()
            raise TooManyCapturesError(
                f"with weft.assert_max_captures({count.most}): {what}",
                f"one capture more ({difference}), after: {'; '.join(count.captures) or 'none'}",
                f"{remedy or 'call with arguments like the captured ones'}, or allow more captures",
            )
    for count in _COUNTS.values():
        count.captures.append(what)
