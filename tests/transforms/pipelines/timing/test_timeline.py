"""Timelines: shares, text, SVG, measured timelines, and comparisons."""

import itertools
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, strategies as st

from weft.display.durations import ticks
from weft.effects import Broadcast, Recv, Run, Send
from weft.errors import CostError, ProgramError
from weft.transforms.pipelines.pipeline import pipeline
from weft.transforms.pipelines.schedule import decode_jobs, make_programs, streaming
from weft.transforms.pipelines.timing.costs import Costs
from weft.transforms.pipelines.timing.events import Event
from weft.transforms.pipelines.timing.simulate import simulate
from weft.transforms.pipelines.timing.timeline import (
    Comparison,
    Recorder,
    Timeline,
    busy_shares,
    compare,
    make_timeline,
    measure,
)


def decoding(stages: int, cohorts: int, steps: int) -> Timeline:
    costs = Costs([1e-3] * stages, advance=2e-4, latency=5e-5, launch=5e-5, message_bytes=4096)
    return simulate(make_programs(stages, decode_jobs(cohorts, steps)), costs)


def test_the_text_has_a_row_a_rank_and_a_digit_for_what_runs() -> None:
    costs = Costs([2e-3, 2e-3, 3e-3], advance=1e-3, message_bytes=2048)
    assert str(simulate(streaming(3, 3, feedback=True), costs)).splitlines() == [
        "    ms |0                  |5                  |10                 |15    bubble",
        "rank 0 000000001111111122222222....+++++............++++............++++     44%",
        "rank 1 ........0000000011111111222222222++++........++++............++++     44%",
        "rank 2 ................000000000000+++++111111111111++++222222222222++++     25%",
        "0-9 runs that micro-batch (its last digit); + advances; . waits",
        "3 ranks, 16 ms; most bytes of messages a rank holds: 2,048",
    ]


@pytest.mark.parametrize("width", [40, 80, 133])
@pytest.mark.parametrize("ranks", [1, 2, 12])
def test_lines_keep_to_the_width(width: int, ranks: int) -> None:
    text = decoding(ranks, ranks, 2).as_text(width)
    rows = [line for line in text.splitlines() if re.match(r"rank \d", line)]
    assert max(map(len, text.splitlines())) <= width
    assert len(rows) == ranks
    assert {len(row) for row in rows} == {width}


def test_the_legend_has_what_is_drawn_and_nothing_else() -> None:
    alone = simulate(streaming(1, 1), Costs([1.0])).as_text()
    assert "0-9 runs that micro-batch (its last digit)\n1 rank, 1 s" in alone
    first = simulate(streaming(2, 1), Costs([1.0, 1.0]))
    assert first.as_text().splitlines()[3] == (
        "0-9 runs that micro-batch (its last digit); . waits; blank: idle"
    )
    assert ">idle</text>" in first.as_svg()
    assert ">idle</text>" not in simulate(streaming(1, 1), Costs([1.0])).as_svg()
    assert "waits" in decoding(2, 1, 1).as_text(40)
    launched = simulate(streaming(2, 2, feedback=True), Costs([1, 1], advance=1, launch=1)).as_text(
        200
    )
    assert (
        "0-9 runs that micro-batch (its last digit); + advances; - sends, launches; . waits"
        in launched
    )


def test_no_time_and_no_events_can_be_drawn() -> None:
    assert make_timeline([]).step_time == 0
    assert "0 ranks" in str(make_timeline([]))
    nothing = simulate(streaming(2, 1), Costs([0, 0]))
    assert busy_shares(nothing) == (0, 0)
    assert ElementTree.fromstring(nothing._repr_html_()) is not None


def test_a_narrow_text_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"as_text\(width=39\)\n  saw: no room\n  instead: a width >= 40"
    ):
        decoding(1, 1, 1).as_text(39)


@given(st.floats(1e-9, 1e9), st.integers(1, 12))
def test_ticks_are_round_even_and_few(span: float, most: int) -> None:
    positions = ticks(span, most)
    assert positions[0] == 0
    assert len(positions) <= most
    assert positions[-1] <= span * (1 + 1e-9)
    if len(positions) > 1:
        assert positions == pytest.approx([index * positions[1] for index in range(len(positions))])
        assert f"{positions[1]:e}"[0] in "125"
        assert set(f"{positions[1]:.6e}"[2:8]) == {"0"}
    if most >= 4:
        assert len(positions) >= 2


# the picture

WIDE = 6.0  # pixels of a digit


def texts(svg: str) -> list[tuple[float, float, str, str]]:
    root = ElementTree.fromstring(svg)
    nodes = (node for node in root.iter() if node.tag.endswith("text"))
    return [
        (float(n.attrib["x"]), float(n.attrib["y"]), n.attrib["text-anchor"], n.text or "")
        for n in nodes
    ]


@pytest.mark.parametrize(("stages", "cohorts", "steps"), [(1, 1, 1), (4, 4, 3), (12, 24, 6)])
def test_the_picture_has_an_event_for_each_and_labels_that_do_not_touch(
    stages: int, cohorts: int, steps: int
) -> None:
    timeline = decoding(stages, cohorts, steps)
    svg = timeline._repr_html_()
    titles = re.findall("<title>(.*?)</title>", svg)
    assert len(titles) == len(timeline.events)
    assert titles[0] == "rank 0: run stage 0 [mb 0]; 0 us to 1.05 ms"
    lines: dict[float, list[tuple[float, float]]] = {}
    without_legend = svg.split('<g transform="')[0] + "</svg>"
    for x, y, anchor, text in texts(without_legend):
        wide = WIDE * len(text)
        left = x - {"start": 0, "middle": wide / 2, "end": wide}[anchor]
        lines.setdefault(y, []).append((left, left + wide))
    for spans in lines.values():
        ordered = sorted(spans)
        assert all(right <= left for (_, right), (left, _) in itertools.pairwise(ordered))
        assert ordered[0][0] >= 0
        assert ordered[-1][1] <= 920


def test_the_picture_has_a_legend_of_what_is_drawn_and_no_background() -> None:
    alone = simulate(streaming(1, 1), Costs([1.0])).as_svg()
    fed = decoding(3, 3, 2).as_svg()
    words = {text for _, _, _, text in texts(fed)} - {text for _, _, _, text in texts(alone)}
    assert {"advances", "waits", "sends, launches", "received", "sent"} <= words
    assert "runs; number and colour: micro-batch" in alone
    assert "fence" not in fed
    assert "white" not in fed
    assert fed.count("<line") == fed.count('stroke="currentColor"')


def test_a_number_is_in_the_box_of_what_runs_only_where_it_fits() -> None:
    roomy, tight = (decoding(2, 2, steps)._repr_html_() for steps in (4, 300))
    inside = re.findall(
        r"<g><title>rank 0: run stage 0 \[mb (\d+)\].*?</title><rect.*?/><text.*?>(\d+)</text>",
        roomy,
    )
    assert (
        [mb for mb, _ in inside] == [label for _, label in inside] == [str(mb) for mb in range(8)]
    )
    assert re.search(r"mb 599\].*?</title><rect.*?/><text", tight) is None


# a measured run


def test_a_measured_run_draws_as_a_simulated_one() -> None:
    simulated = decoding(3, 3, 2)
    later = [
        attrs.evolve(e, start=e.start + 1024.0, end=e.end + 1024.0)
        for e in reversed(simulated.events)
    ]
    by_rank = [e for rank in range(3) for e in reversed(later) if e.rank == rank]
    measured = make_timeline(by_rank, simulated.peak_bytes)
    assert measured.step_time == pytest.approx(simulated.step_time)
    assert str(measured) == str(simulated)
    assert re.sub(r"\d+\.\d+", "", measured._repr_html_()) == re.sub(
        r"\d+\.\d+", "", simulated._repr_html_()
    )


def test_a_measured_run_need_not_count_its_messages() -> None:
    measured = make_timeline(
        [Event(0, Run("stage 0", 0), 3.0, 5.0), Event(1, Run("stage 1", 0), 5.0, 7.0, 1.0)]
    )
    assert (measured.step_time, busy_shares(measured), measured.bubble) == (
        4,
        (0.5, 0.25),
        (0.5, 0.75),
    )
    assert str(measured).endswith("2 ranks, 4 s")


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        ((0, 2.0, 1.0), "finite seconds with start <= end"),
        ((0, 0.0, math.nan), "finite seconds"),
        ((0, -math.inf, 0.0), "finite seconds"),
        ((-1, 0.0, 1.0), "a rank >= 0"),
        ((0, 0.0, 1.0, -0.5), "0 <= waited"),
        ((0, 0.0, 1.0, 1.5), "waited <= end - start"),
    ],
)
def test_an_event_that_cannot_be_is_refused(arguments: Any, instead: str) -> None:
    rank, *moments = arguments
    with pytest.raises(CostError) as error:
        Event(rank, Send(1, 0), *moments)
    assert instead in error.value.instead


def test_a_pipeline_is_recorded_inside_of_measure_alone() -> None:
    step = pipeline([lambda p, s, batch, x: (s, batch), lambda p, s, batch, x: (s, x)])
    with measure() as outer:
        with measure() as inner:
            step((None, None), (None, None), torch.ones(2))
        assert outer.events() == []
    step((None, None), (None, None), torch.ones(2))
    performed = [
        "run stage 0 [mb 0]",
        "send to 1 [mb 0]",
        "recv from 0 [mb 0]",
        "run stage 1 [mb 0]",
    ]
    assert [str(event.effect) for event in inner.timeline().events] == performed


@attrs.define(eq=False)
class Gpus:
    """Stand-ins for the host's clock, and for GPUs that run the launched work in order."""

    now: float = 16.0
    current: int = 0
    ends: list[float] = attrs.field(factory=lambda: [0.0, 0.0])

    def moment(self) -> float:
        """The time at which the current GPU reaches work that is launched now."""
        return max(self.now, self.ends[self.current])

    def launch(self, seconds: float) -> None:
        self.ends[self.current] = self.moment() + seconds

    def synchronize(self, device: int) -> None:
        self.now = max(self.now, self.ends[device])

    def event(self, *, enable_timing: bool = False) -> "GpuEvent":
        return GpuEvent(self, enable_timing)


@attrs.define(eq=False)
class GpuEvent:
    """A stand-in for `torch.cuda.Event`, which knows its time once the GPU has reached it."""

    gpus: Gpus
    is_timed: bool
    device: int = -1
    moment: float = math.nan

    def record(self) -> None:
        self.device = self.gpus.current
        self.moment = self.gpus.moment()

    def elapsed_time(self, other: "GpuEvent") -> float:
        assert self.is_timed
        assert other.is_timed
        assert self.device == other.device
        assert max(self.moment, other.moment) <= self.gpus.now, "an event that is not over"
        return (other.moment - self.moment) * 1e3


@given(
    st.lists(st.sampled_from([0.0, 0.5, 4.0]), min_size=2, max_size=2),
    st.lists(
        st.tuples(
            st.integers(0, 1), st.sampled_from([0.0, 0.25, 3.0]), st.sampled_from([0.0, 1.0, 2.0])
        )
    ),
)
def test_on_a_gpu_an_effect_takes_the_time_of_its_kernels(
    before: list[float], effects: list[tuple[int, float, float]]
) -> None:
    """Each GPU may be busy before it is measured, and the host may wait before it launches."""
    gpus = Gpus()
    gpus.ends = [gpus.now + seconds for seconds in before]
    expected: list[tuple[float, float]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: gpus.now)
        patch.setattr(torch.cuda, "current_device", lambda: gpus.current)
        patch.setattr(torch.cuda, "synchronize", gpus.synchronize)
        patch.setattr(torch.cuda, "Event", gpus.event)
        recorder = Recorder("cuda")
        for gpus.current, waits, takes in effects:
            gpus.now += waits
            with recorder.span(gpus.current, Run("stage 0", 0)):
                start = gpus.moment()
                gpus.launch(takes)
                expected.append((start, gpus.moment()))
        times = [(event.start, event.end) for event in recorder.events()]
    assert times == [(pytest.approx(start), pytest.approx(end)) for start, end in expected]


# compare


def test_errors_are_relative_to_what_was_measured() -> None:
    simulated = simulate(streaming(2, 2), Costs([1.0, 1.0]))
    measured = simulate(streaming(2, 2), Costs([1.0, 2.0]))
    comparison = compare(simulated, measured)
    assert comparison.step_time == pytest.approx((3 - 5) / 5)
    assert comparison.busy == pytest.approx(((2 / 3 - 2 / 5) / (2 / 5), (2 / 3 - 4 / 5) / (4 / 5)))
    assert str(comparison).splitlines()[1] == "  step time -40.0%"
    assert (
        repr(comparison)
        == f"Comparison(step_time={comparison.step_time!r}, busy={comparison.busy!r})"
    )
    assert compare(measured, measured) == Comparison(0.0, (0.0, 0.0), measured, measured)


def test_timelines_of_other_programs_are_not_compared() -> None:
    pair = [simulate(streaming(2, mbs), Costs([1.0, 1.0])) for mbs in (2, 3)]
    for (simulated, measured), where in zip(
        (pair, pair[::-1]), ("measured", "simulated"), strict=True
    ):
        with pytest.raises(ProgramError) as error:
            compare(simulated, measured)
        assert (
            error.value.problem == f"rank 0: 'run stage 0 [mb 2]' is in the {where} timeline alone"
        )


def test_what_is_no_timeline_is_not_compared() -> None:
    timeline = simulate(streaming(2, 1), Costs([1.0, 1.0]))
    with measure() as recorder, pytest.raises(ProgramError) as error:
        compare(timeline, recorder)  # type: ignore[arg-type]
    assert error.value.problem == "measured is a Recorder"


def test_the_picture_for_a_file_is_that_of_a_notebook() -> None:
    timeline = simulate(streaming(2, 1), Costs([1.0, 1.0]))
    assert timeline.as_svg() == timeline._repr_html_()
    assert timeline.as_svg().startswith("<svg ")


# a file


def saved(timeline: Timeline, folder: Path) -> list[dict[str, Any]]:
    """The events of a trace, read back."""
    file = folder / "step.json"
    timeline.save(file)
    trace = json.loads(file.read_text(encoding="utf-8"))
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


@pytest.mark.parametrize(("stages", "cohorts", "steps"), [(1, 1, 1), (3, 3, 2)])
def test_a_trace_has_the_events(stages: int, cohorts: int, steps: int, tmp_path: Path) -> None:
    timeline = decoding(stages, cohorts, steps)
    events = saved(timeline, tmp_path)
    complete = [event for event in events if event["ph"] == "X"]
    assert [(event["tid"], event["name"]) for event in complete] == [
        (event.rank, str(event.effect)) for event in timeline.events
    ]
    for written, event in zip(complete, timeline.events, strict=True):
        assert written["ts"] / 1e6 == pytest.approx(event.start, abs=1e-9)
        assert written["dur"] / 1e6 == pytest.approx(event.end - event.start, abs=2e-9)
        assert written["args"]["waited"] / 1e6 == pytest.approx(event.waited, abs=1e-9)
        assert written["args"]["microbatch"] == event.effect.microbatch
    threads = [event for event in events if event["name"] == "thread_name"]
    assert [(event["tid"], event["args"]["name"]) for event in threads] == [
        (rank, f"rank {rank}") for rank in range(stages)
    ]
    assert {event["pid"] for event in events} == {0}


def test_events_of_a_rank_do_not_overlap_in_a_trace(tmp_path: Path) -> None:
    """A viewer drops a complete event that ends after the next one on its thread has begun."""
    third = 1e-6 / 3
    runs = [Event(0, Run("stage 0", mb), mb * third, (mb + 1) * third) for mb in range(100)]
    complete = [event for event in saved(make_timeline(runs), tmp_path) if event["ph"] == "X"]
    for before, after in itertools.pairwise(complete):
        assert round(1e3 * (before["ts"] + before["dur"])) <= round(1e3 * after["ts"])


def arrows(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The names of the two events that each arrow joins."""
    complete = [event for event in events if event["ph"] == "X"]

    def named(end: dict[str, Any]) -> str:
        [name] = [
            event["name"]
            for event in complete
            if event["tid"] == end["tid"]
            and event["ts"] <= end["ts"] < event["ts"] + event["dur"]
            and event["cat"] in ("send", "recv", "broadcast")
        ]
        return f"rank {end['tid']}: {name}"

    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert all(end["bp"] == "e" for end in ends.values())
    return [(named(starts[number]), named(ends[number])) for number in starts]


def test_arrows_go_from_sends_to_their_receives(tmp_path: Path) -> None:
    """Twice, as two calls of a pipeline do, and without the receive of the last message."""
    events = []
    for run in range(2):
        start = 10.0 * run
        events += [
            Event(0, Send(1, 0), start, start + 1),
            Event(1, Recv(0, 0, stage=0), start + 1, start + 2),
            Event(1, Broadcast(1, 0), start + 3, start + 4),
            Event(0, Broadcast(1, 0), start + 3, start + 5),
        ]
    events.append(Event(0, Send(1, 1), 20.0, 21.0))
    pair = [
        ("rank 0: send to 1 [mb 0]", "rank 1: recv stage 0 from 0 [mb 0]"),
        ("rank 1: broadcast from 1 [mb 0]", "rank 0: broadcast from 1 [mb 0]"),
    ]
    trace = saved(make_timeline(events), tmp_path)
    assert sorted(arrows(trace)) == sorted(2 * pair)
    times = [(event["ts"] // 1e7, event["ph"]) for event in trace if event["ph"] in ("s", "f")]
    assert times == [(run, end) for run in (0, 1) for end in "sf"] * 2, "each in its own run"


@pytest.mark.parametrize(
    ("name", "problem", "instead"),
    [
        (
            "step.svg",
            "a name that ends in '.svg'",
            'a .json file, as in timeline.save("step.json"); as_svg() gives a picture',
        ),
        (
            "step",
            "a name that ends in ''",
            'a .json file, as in timeline.save("step.json"); as_svg() gives a picture',
        ),
        (
            "nowhere/step.json",
            "No such file or directory",
            "a file that can be written, in a folder that exists",
        ),
    ],
)
def test_a_trace_that_cannot_be_written_is_refused(
    name: str, problem: str, instead: str, tmp_path: Path
) -> None:
    with pytest.raises(ProgramError) as error:
        decoding(1, 1, 1).save(tmp_path / name)
    assert error.value.call == f"timeline.save({str(tmp_path / name)!r})"
    assert (error.value.problem, error.value.instead) == (problem, instead)
    assert not list(tmp_path.iterdir())
