"""`Timeline`: the events of a run, simulated or measured; `measure` records a timeline, and
`compare` compares two."""

import json
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import attrs
import torch

from weft.arguments.checks import Rule, check_values
from weft.blocks import Blocks
from weft.display.durations import duration
from weft.display.plots import axes_for, new_axes
from weft.display.tables import element
from weft.effects import Effect, Run
from weft.errors import ProgramError
from weft.transforms.pipelines.timing.chrome_trace import trace_of
from weft.transforms.pipelines.timing.drawing import draw_plot, draw_svg, draw_text
from weft.transforms.pipelines.timing.events import (
    Event,
    busy_seconds,
    last_end,
    num_ranks,
    ranks_in_words,
)


@attrs.frozen
class Timeline:
    """The events of all ranks, made by `make_timeline`.

    Args:
        events: the events, by rank and then in order; the first one starts at 0.
        peak_bytes: for each rank, the peak of the bytes of messages from or to it that were sent
            but not yet received. This is the size of the buffers that it needs. None if messages
            were not counted.

    >>> print(make_timeline([Event(0, Run("stage 0", 0), 5.0, 6.0), Event(1, Run("stage 1", 0), 6.0, 8.0)]).as_text(40))
         s |0              |2         bubble
    rank 0 00000000                      67%
    rank 1         00000000000000000     33%
    0-9 runs that micro-batch (its last
    digit); blank: idle
    2 ranks, 3 s
    """

    events: tuple[Event, ...]
    peak_bytes: tuple[float, ...] | None = None

    @property
    def step_time(self) -> float:
        """Seconds from the first start to the last end."""
        return last_end(self.events)

    @property
    def bubble(self) -> tuple[float, ...]:
        """The share of the step time in which each rank waited, sent, launched, took part in
        collectives, or had nothing to do."""
        # By rounding, the busy shares may exceed 1.
        return tuple(max(0.0, 1.0 - share) for share in busy_shares(self))

    def as_text(self, width: int = 80) -> str:
        """One row per rank, in lines of at most `width` characters."""
        if self.peak_bytes is None:
            peak_text = ""
        else:
            peak_text = (
                f"; most bytes of messages a rank holds: {max(self.peak_bytes, default=0):,.0f}"
            )
        summary = f"{ranks_in_words(num_ranks(self.events))}, {duration(self.step_time)}{peak_text}"
        return "\n".join(
            [draw_text(self.events, self.bubble, width), *textwrap.wrap(summary, width)]
        )

    def __str__(self) -> str:
        return self.as_text()

    def _repr_html_(self) -> str:
        return self.as_svg()

    def as_svg(self) -> str:
        """The picture that a notebook shows, as SVG text. To save it:
        `Path("step.svg").write_text(timeline.as_svg())`."""
        return draw_svg(self.events, self.bubble)

    def plot(self, *, ax: Any = None) -> Any:
        """Draw the same picture in matplotlib axes (None: new ones), and return them.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        ax = axes_for("timeline.plot()", ax, 9.0, 1.3 + 0.55 * num_ranks(self.events))
        draw_plot(ax, self.events, self.bubble, self.step_time, duration(self.step_time))
        return ax

    def save(self, path: Path | str) -> None:
        """Write it in Chrome's trace event format, which https://ui.perfetto.dev and
        `chrome://tracing` open: a thread for each rank, and an arrow from each send to its receive.
        Times are in microseconds, to the nanosecond.

        Args:
            path: a file whose name ends in `.json`.

        Raises:
            ProgramError: the name ends otherwise, or the file cannot be written.
        """
        call = f"timeline.save({str(path)!r:.200})"
        if Path(path).suffix != ".json":
            problem = f"a name that ends in {Path(path).suffix!r}"
            instead = 'a .json file, as in timeline.save("step.json"); as_svg() gives a picture'
            raise ProgramError(call, problem, instead)
        try:
            Path(path).write_text(json.dumps(trace_of(self.events)), encoding="utf-8")
        except (OSError, ValueError) as error:
            problem = f"{getattr(error, 'strerror', error)}"
            instead = "a file that can be written, in a folder that exists"
            raise ProgramError(call, problem, instead) from error


def busy_shares(timeline: Timeline) -> tuple[float, ...]:
    """The share of the step time in which each rank ran stages and advanced."""
    whole = timeline.step_time or 1.0
    return tuple(seconds / whole for seconds in busy_seconds(timeline.events))


def make_timeline(events: Iterable[Event], peak_bytes: Sequence[float] | None = None) -> "Timeline":
    """The timeline of events, simulated or measured, in any order.

    Args:
        events: the events, with times in seconds of one clock; the earliest time becomes 0.
        peak_bytes: as for the class; None if unknown.
    """
    ordered = sorted(events, key=lambda event: (event.rank, event.start))
    zero = min((event.start for event in ordered), default=0.0)
    return Timeline(
        tuple(_moved(event, zero) for event in ordered),
        None if peak_bytes is None else tuple(peak_bytes),
    )


def _moved(event: Event, zero: float) -> Event:
    start = event.start - zero
    end = event.end - zero
    # Subtracting `zero` rounds, so that the event could become shorter than its wait.
    return attrs.evolve(event, start=start, end=end, waited=min(event.waited, end - start))


@attrs.frozen
class Comparison:
    """The relative errors of a simulated timeline: each error is (simulated - measured) / measured.

    Args:
        step_time: the error of the step time.
        busy: the error of each rank's busy share.
        simulated, measured: the timelines.
    """

    step_time: float
    busy: tuple[float, ...]
    simulated: Timeline = attrs.field(repr=False)
    measured: Timeline = attrs.field(repr=False)

    def __str__(self) -> str:
        busy = "".join(f"\n  rank {rank} busy {error:+.1%}" for rank, error in enumerate(self.busy))
        return f"simulated against measured:\n  step time {self.step_time:+.1%}{busy}"

    def _both(self) -> tuple[tuple[str, Timeline], ...]:
        error = f" ({self.step_time:+.1%})"
        return (f"simulated{error}", self.simulated), ("measured", self.measured)

    @property
    def _span(self) -> float:
        return max(self.simulated.step_time, self.measured.step_time)

    def _repr_html_(self) -> str:
        drawn = (draw_svg(t.events, t.bubble, f"{name}: ", self._span) for name, t in self._both())
        return element("div", *drawn)

    def plot(self) -> Any:
        """Both timelines as a matplotlib figure, one above the other on the same time axis.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        high = 1.6 + 1.1 * num_ranks(self.measured.events)
        call = "compare(simulated, measured).plot()"
        figure, places = new_axes(call, 9.0, high, nrows=2, ncols=1, sharex=True)
        for ax, (name, one) in zip(places, self._both(), strict=True):
            draw_plot(ax, one.events, one.bubble, self._span, f"{name}: {duration(one.step_time)}")
            ax.label_outer()
        return figure


def compare(simulated: Timeline, measured: Timeline) -> Comparison:
    """The relative errors of the step time and of each rank's busy share.

    Raises:
        ProgramError: the timelines are of different programs.

    >>> run = Run("stage 0", 0)
    >>> print(compare(make_timeline([Event(0, run, 0.0, 1.1)]), make_timeline([Event(0, run, 7.0, 8.0)])))
    simulated against measured:
      step time +10.0%
      rank 0 busy +0.0%
    """
    pair = {"simulated": simulated, "measured": measured}
    rule: Rule = Timeline, "Timelines: of a Recorder, recorder.timeline()"
    check_values("compare(simulated, measured)", dict.fromkeys(pair, rule), pair, ProgramError)
    ran, did = (_runs(timeline) for timeline in (simulated, measured))
    if ran != did:
        rank, what = next(
            (rank, run)
            for rank, run in [*ran, *did]
            if ((rank, run) in ran) != ((rank, run) in did)
        )
        if (rank, what) in ran:
            where = "simulated"
        else:
            where = "measured"
        problem = f"rank {rank}: '{what}' is in the {where} timeline alone"
        raise ProgramError(
            "compare(simulated, measured)", problem, "timelines of the same programs"
        )
    errors = (
        _relative(*pair) for pair in zip(busy_shares(simulated), busy_shares(measured), strict=True)
    )
    step_time = _relative(simulated.step_time, measured.step_time)
    return Comparison(step_time, tuple(errors), simulated, measured)


def _runs(timeline: Timeline) -> dict[tuple[int, Run], None]:
    """The runs of each rank, in order (as the keys of a dict)."""
    return {
        (event.rank, event.effect): None
        for event in timeline.events
        if isinstance(event.effect, Run)
    }


def _relative(value: float, true: float) -> float:
    if value == true:
        return 0.0
    if true:
        return (value - true) / true
    return float("inf")


_MEASURING = Blocks["Recorder"]("weft.measuring")


@attrs.frozen(eq=False)
class _Moment:
    """A time on the host's clock, and an event of a device's stream, whose time is known only
    later."""

    host: float
    event: torch.cuda.Event | None = None

    def seconds(self, zero: "_Moment") -> float:
        """The time on the host's clock. The time of a device's event is measured from `zero`, an
        earlier moment on the same device."""
        if self.event is None or zero.event is None:
            return self.host
        return zero.host + float(zero.event.elapsed_time(self.event)) / 1e3


class Recorder:
    """The effects performed so far; call `timeline()` when the run is over.

    Args:
        device: `cpu`: times come from the host's clock, which all processes of a machine share.
            `cuda`: times come from the device's current stream, so that the time of a kernel counts
            and the time of its launch does not.
    """

    def __init__(self, device: Literal["cpu", "cuda"]) -> None:
        self._on_device = device == "cuda"
        # By device
        self._zeros: dict[int, _Moment] = {}
        self._spans: list[tuple[int, Effect, _Moment, _Moment, _Moment]] = []
        # Now, since it synchronizes the device: in the first span, that would delay the first
        # effect.
        self._zero()

    @contextmanager
    def span(self, rank: int, effect: Effect) -> Iterator[None]:
        """Record the effect that is performed within this context."""
        # In each span, since a thread may go from one GPU to another, and CUDA measures no time
        # between events of two devices.
        zero = self._zero()
        start = self._now()
        yield
        self._spans.append((rank, effect, zero, start, self._now()))

    def _zero(self) -> _Moment:
        """A moment that is known on both clocks, the host's and the current device's. The device is
        synchronized first, so that it is idle at this moment."""
        if not self._on_device:
            return self._now()
        device = torch.cuda.current_device()
        if device not in self._zeros:
            torch.cuda.synchronize(device)
            self._zeros[device] = self._now()
        return self._zeros[device]

    def _now(self) -> _Moment:
        if not self._on_device:
            return _Moment(time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return _Moment(time.perf_counter(), event)

    def events(self) -> list[Event]:
        """The recorded events, in the order in which they were recorded, in seconds of the host's
        clock. The whole time of an event that is not a `Run` counts as a wait."""
        # CUDA measures the time between two events only once both have happened.
        for device in self._zeros:
            torch.cuda.synchronize(device)
        events = []
        for rank, effect, zero, start, end in self._spans:
            begins = start.seconds(zero)
            ends = end.seconds(zero)
            events.append(
                Event(rank, effect, begins, ends, 0.0 if isinstance(effect, Run) else ends - begins)
            )
        return events

    def timeline(self) -> Timeline:
        """The timeline of the ranks in this process. If the ranks are in several processes, pass
        the `events()` of all of them to `make_timeline`."""
        return make_timeline(self.events())


@contextmanager
def measure(device: Literal["cpu", "cuda"] = "cpu") -> Iterator[Recorder]:
    """Record the effects of the pipelines that are called in this context.

    Args:
        device: the clock, in seconds: the host's (`cpu`), or events on the GPU's streams (`cuda`).

    >>> from weft.transforms.pipelines.pipeline import pipeline
    >>> step = pipeline([lambda p, s, batch, x: (s, batch), lambda p, s, batch, x: (s, x)])
    >>> with measure() as recorder:
    ...     _ = step((None, None), (None, None), torch.ones(2))
    >>> [str(event.effect) for event in recorder.timeline().events]
    ['run stage 0 [mb 0]', 'send to 1 [mb 0]', 'recv from 0 [mb 0]', 'run stage 1 [mb 0]']
    """
    recorder = Recorder(device)
    with _MEASURING.block(recorder):
        yield recorder


def measuring() -> Recorder | None:
    """The recorder of the innermost `measure` block around this call, if there is one."""
    recorders = _MEASURING.values()
    if recorders:
        return recorders[-1]
    return None
