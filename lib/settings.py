"""`weft.config`, and the contexts `batch_invariant`, `no_capture` and `assert_max_captures`."""

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
    """Switches for log messages about captures, which go to the logger `weft` at level WARNING (so
    Python prints them by default).

    Args:
        explain_cache_misses: at each capture after the first, log how the call differs from the
            captured ones.
        log_captures: log each capture, its time and the memory of its graph.

    With either switch, each new reason why a call runs without a graph is logged once; for example,
    no class of the ladder covers the batch. `cache_info().eager_reasons`, and the
    `stats().eager_reasons` of an engine, count them.

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
    """The captures so far inside one `assert_max_captures(most)` context."""

    most: int
    captures: list[str] = attrs.field(factory=list)


_COUNTS = Blocks[_Count]("weft.counts")
# Whether calls that have a graph replay it.
_NO_CAPTURE = Blocks[bool]("weft.no_capture")
_BATCH_INVARIANT = Blocks[bool]("weft.batch_invariant")
# Guards the count below: contexts begin and end in several threads.
_LOCK = threading.Lock()
# The number of `batch_invariant()` contexts that are open in all threads.
_OPEN = [0]
# Whether any is open. `torch.compile` cannot read context variables, so compiled functions are
# batch invariant while a context is open in any thread. A bool and not the number, because
# `torch.compile` compiles again each time that the value changes.
ANYWHERE = [False]


@contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Make weft's operators batch invariant inside, in this thread: bit for bit, a token's result
    depends only on the token, its context and the parameters, not on the rest of the batch or on
    where a prompt was cut.

    The order of each sum depends only on the shapes of the parameters and on the token's position.
    On the CPU, weft's operators run in one thread, without autocast; they raise DeviceError if
    float32 products have another precision or oneDNN is off. Torch's own operators are not changed:
    their products may depend on the number of rows. The context is part of the key of `graphify`. A
    model loaded with `batch_invariant=True` always runs in it.

    Args:
        enabled: False turns off an outer context.

    >>> import torch, weft
    >>> from weft.ops.products.linear import linear
    >>> x, weight = torch.randn(5, 64), torch.randn(32, 64)
    >>> with weft.batch_invariant():
    ...     torch.equal(linear(x, weight)[:1], linear(x[:1], weight))
    True
    """
    check_values(f"weft.batch_invariant({enabled!r})", _RULES, {"enabled": enabled}, ArgumentError)
    # A bool counts as 0 or 1, so a context that is not enabled counts for nothing.
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
    """Forbid captures inside, in this thread: a call without a graph runs under another graph that
    covers it, or runs the function itself.

    Args:
        replay: whether calls that have a graph replay it. With False every graphified function runs
            as plain Python, for a debugger or prints inside it (like `jax.disable_jit()`).

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
    """Raise before capture number `most + 1` inside, in this thread: for tests, and around a loop
    that should only replay.

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
    """Count a capture that is about to begin, in all contexts around it. `miss` returns its cause
    and a remedy.

    Raises:
        TooManyCapturesError: one of the contexts does not allow it.
    """
    # First check all contexts, then count: a refused capture counts in none.
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
