"""`measure`: what the ranks of this process do when, by the clock, to hold against what `simulate` predicts."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import attrs
import torch

from weft.effects import Effect, Run
from weft.transforms.pipelines.events import Event
from weft.transforms.pipelines.timeline import Timeline

_MEASURING: ContextVar["Recorder | None"] = ContextVar("weft_measuring", default=None)


@attrs.frozen(eq=False)
class _Moment:
    """A moment of the host's clock; or of a device's, which is known later."""

    host: float
    event: torch.cuda.Event | None = None


class Recorder:
    """What was performed so far; `timeline()` when it is over.

    Args:
        device: `cpu`: moments are of the host's clock, which all processes of a machine share. `cuda`: they are of the
            device's current stream, so that a launch costs nothing and what it launched does.
    """

    def __init__(self, device: Literal["cpu", "cuda"]) -> None:
        self._on_device = device == "cuda"
        self._zeros: dict[int, _Moment] = {}
        self._spans: list[tuple[int, Effect, int, _Moment, _Moment]] = []
        if self._on_device:
            self._zero(torch.cuda.current_device())

    @contextmanager
    def span(self, rank: int, effect: Effect) -> Iterator[None]:
        """An effect is performed inside."""
        device = torch.cuda.current_device() if self._on_device else -1
        if self._on_device and device not in self._zeros:
            self._zero(device)
        start = self._now()
        yield
        self._spans.append((rank, effect, device, start, self._now()))

    def _zero(self, device: int) -> None:
        torch.cuda.synchronize(device)
        self._zeros[device] = self._now()
        torch.cuda.synchronize(device)

    def _now(self) -> _Moment:
        if not self._on_device:
            return _Moment(time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return _Moment(time.perf_counter(), event)

    def events(self) -> list[Event]:
        """In the order in which they ended, of each rank; seconds of the host's clock. What is no `Run` waited all its
        time."""
        for device in self._zeros:
            torch.cuda.synchronize(device)
        found = []
        for rank, effect, device, start, end in self._spans:
            begins, ends = self._seconds(device, start), self._seconds(device, end)
            found.append(Event(rank, effect, begins, ends, 0.0 if isinstance(effect, Run) else ends - begins))
        return found

    def _seconds(self, device: int, moment: _Moment) -> float:
        if moment.event is None:
            return moment.host
        zero = self._zeros[device]
        assert zero.event is not None, "a moment of a device is measured from another one"
        return zero.host + float(zero.event.elapsed_time(moment.event)) / 1e3

    def timeline(self) -> Timeline:
        """Of the ranks that run here; of ranks in other processes, `Timeline.of` all their `events()`."""
        return Timeline.of(self.events())


@contextmanager
def measure(device: Literal["cpu", "cuda"] = "cpu") -> Iterator[Recorder]:
    """Record what pipelines do that are called inside.

    Args:
        device: whose clock it is: the host's, or that of the GPU's streams, by events. Times are in seconds.

    >>> from weft.transforms.pipelines.pipeline import pipeline
    >>> step = pipeline([lambda p, s, batch, x: (s, batch), lambda p, s, batch, x: (s, x)])
    >>> with measure() as recorder:
    ...     _ = step((None, None), (None, None), torch.ones(2))
    >>> [str(event.effect) for event in recorder.timeline().events]
    ['run stage 0 [mb 0]', 'send to 1 [mb 0]', 'recv from 0 [mb 0]', 'run stage 1 [mb 0]']
    """
    recorder = Recorder(device)
    token = _MEASURING.set(recorder)
    try:
        yield recorder
    finally:
        _MEASURING.reset(token)


def measuring() -> Recorder | None:
    """What records here, if anything does."""
    return _MEASURING.get()
