"""Drawings of a timeline: an SVG for notebooks and files, text for terminals, and matplotlib axes.

All three have one row per rank, time from left to right, and a box per run in the colour (or with
the digit) of its micro-batch. The SVG does not use matplotlib, which is optional and draws no
tooltips. The text does not use rich, which has no chart of intervals.
"""

import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from weft.display.durations import duration, ticks, unit_of
from weft.display.tables import COLOURS
from weft.effects import Broadcast, Fence, Recv, Run, Send
from weft.errors import CostError
from weft.meshes.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    PPermute,
    ReduceScatter,
)
from weft.transforms.pipelines.timing.events import (
    ADVANCE,
    Event,
    last_end,
    num_ranks,
    ranks_in_words,
)

# The SVG. Text and marks use the page's text colour, and there is no background, so that a dark
# page stays dark.

_WIDTH = 920
_LEFT = 70
_RIGHT = 70
_TOP = 34
_ROW = 34
_BOX = 24
# In pixels: a little more than the width of a digit of size 11 px
_DIGIT = 7
_PAGE = "currentColor"
_WAIT = "#8886"
_WORK = "#9a9a9a"
_MEET = "#5b5b5b"
# In pixels below the top of a box
_MARKS = {"received": -4, "sent": _BOX - 1, "fence": _BOX // 2 - 2}


def draw_svg(
    events: Sequence[Event], bubbles: Sequence[float], title: str = "", span: float | None = None
) -> str:
    """The whole picture, with an axis of `span` seconds (None: up to the last end) and a legend."""
    ranks = num_ranks(events)
    end = last_end(events)
    span = end if span is None else span
    bottom = _TOP + ranks * _ROW
    height = bottom + 58
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
            f' width="{_WIDTH}" height="{height}" role="img" aria-label="timeline of a pipeline"'
            ' style="max-width:100%" font-family="system-ui, sans-serif" font-size="11">'
        ),
        _text(_LEFT, 18, f"{title}{ranks_in_words(ranks)}, {duration(end)}", "start", bold=True),
        _text(_WIDTH - 6, 18, "bubble", "end"),
        *_axis(span, bottom),
    ]
    for rank, bubble in enumerate(bubbles):
        middle = _TOP + rank * _ROW + _BOX / 2 + 4
        parts += [
            _text(_LEFT - 8, middle, f"rank {rank}", "end"),
            _text(_WIDTH - 6, middle, f"{bubble:.0%}", "end"),
        ]
    parts += [_event(event, span) for event in events]
    return "\n".join([*parts, *_legend(events, bottom + 44), "</svg>"])


def _at(moment: float, span: float) -> float:
    # The span is 0 if all costs are.
    return _LEFT + (moment / span if span else 0.0) * (_WIDTH - _LEFT - _RIGHT)


def _text(
    x: float, y: float, text: str, anchor: str, *, bold: bool = False, fill: str = _PAGE
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        f' fill="{fill}"{weight}>{escape(text)}</text>'
    )


def _rect(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> str:
    place = f'x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"'
    return f'<rect {place} fill="{fill}" stroke="{stroke}" stroke-width="0.5"/>'


def _axis(span: float, bottom: float) -> Iterator[str]:
    size, name = unit_of(span)
    for moment in ticks(span, 9):
        x = _at(moment, span)
        line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{bottom}"'
        yield f'{line} stroke="{_PAGE}" stroke-opacity="0.15"/>'
        yield _text(x, bottom + 14, f"{moment / size:g} {name}", "middle")


def _event(event: Event, span: float) -> str:
    """The work of an event, its wait, and a mark at its end."""
    top = _TOP + event.rank * _ROW
    start, end = (_at(moment, span) for moment in event.work)
    parts = [f"<title>{escape(_tooltip(event))}</title>"]
    if isinstance(event.effect, Run):
        parts += _run(event, start, end - start, top)
    elif isinstance(event.effect, Collective):
        parts.append(_rect(start, top, end - start, _BOX, _MEET, "#555"))
    else:
        parts.append(_rect(start, top + _BOX / 2 - 3, end - start, 6, _WORK))
        parts.append(_rect(_at(event.end, span) - 0.75, top + _MARKS[_mark(event)], 1.5, 5, _PAGE))
    if event.waited:
        start, end = (_at(moment, span) for moment in event.wait)
        # After the title, and before the work and its mark: SVG paints in order, and a wait must
        # not cover them.
        parts.insert(1, _rect(start, top + 3, end - start, _BOX - 6, _WAIT))
    return f"<g>{''.join(parts)}</g>"


def _mark(event: Event) -> str:
    """The mark at the end of an event; for an event without a mark, its kind."""
    match event.effect:
        case Recv():
            return "received"
        case Broadcast(root):
            if root != event.rank:
                return "received"
            return "sent"
        case Fence():
            return "fence"
        case AllReduce() | AllGather() | ReduceScatter() | AllToAll() | PPermute():
            return "collective"
        case Run() | Send():
            return "sent"


def _run(event: Event, x: float, width: float, top: float) -> Iterator[str]:
    assert isinstance(event.effect, Run)
    colour = COLOURS[event.effect.microbatch % len(COLOURS)]
    label = str(event.effect.microbatch)
    if event.effect.what == ADVANCE:
        yield _rect(x, top + 7, width, _BOX - 14, colour, "#555")
        return
    yield _rect(x, top, width, _BOX, colour, "#555")
    if width >= _DIGIT * len(label) + 2:
        yield _text(x + width / 2, top + _BOX / 2 + 4, label, "middle", fill="#222")


def _tooltip(event: Event) -> str:
    if event.waited:
        waited = f", waited {duration(event.waited)}"
    else:
        waited = ""
    return (
        f"rank {event.rank}: {event.effect}; {duration(event.start)} to"
        f" {duration(event.end)}{waited}"
    )


def _drawn(events: Sequence[Event]) -> set[str]:
    """The kinds of elements in a picture of these events."""
    kinds = set[str]()
    for event in events:
        if isinstance(event.effect, Run):
            kinds.add("advance" if event.effect.what == ADVANCE else "stage")
        else:
            kinds.add(_mark(event))
            if event.work[1] > event.work[0] and not isinstance(event.effect, Collective):
                kinds.add("work")
        if event.waited:
            kinds.add("wait")
    span = last_end(events)
    for rank in range(num_ranks(events)):
        covered = sum(event.end - event.start for event in events if event.rank == rank)
        # Gaps of less than 1 %, such as between measured events, are hardly seen.
        if covered < 0.99 * span:
            kinds.add("idle")
    return kinds


def _legend(events: Sequence[Event], y: float) -> Iterator[str]:
    """The entries for the kinds that are drawn, side by side."""
    entries = {
        "stage": (
            _rect(0, y - 9, 14, 10, COLOURS[0], "#555"),
            14,
            "runs; number and colour: micro-batch",
        ),
        "advance": (_rect(0, y - 7, 14, 6, COLOURS[0], "#555"), 14, "advances"),
        "collective": (_rect(0, y - 9, 14, 10, _MEET, "#555"), 14, "collective"),
        "wait": (_rect(0, y - 9, 14, 10, _WAIT), 14, "waits"),
        "idle": (_rect(0, y - 9, 14, 10, "none", "#555"), 14, "idle"),
        "work": (_rect(0, y - 6, 14, 4, _WORK), 14, "sends, launches"),
        "received": (_rect(0, y - 12, 1.5, 5, _PAGE), 2, "received"),
        "fence": (_rect(0, y - 6, 1.5, 5, _PAGE), 2, "fence"),
        "sent": (_rect(0, y - 1, 1.5, 5, _PAGE), 2, "sent"),
    }
    x = float(_LEFT)
    drawn = _drawn(events)
    for kind, (shape, wide, words) in entries.items():
        if kind in drawn:
            yield (
                f'<g transform="translate({x:.0f}'
                f' 0)">{shape}{_text(wide + 5, y, words, "start")}</g>'
            )
            # The width of a text is not known here: assume 6.2 px for a character of 11 px.
            x += wide + 5 + 6.2 * len(words) + 13


# The text.

LEAST_WIDTH = 40
_LEGEND = {
    "0": "0-9 runs that micro-batch (its last digit)",
    "+": "+ advances",
    "=": "= collective",
    "-": "- sends, launches",
    ".": ". waits",
    " ": "blank: idle",
}
_SHARE = len("  bubble")


def draw_text(events: Sequence[Event], bubbles: Sequence[float], width: int) -> str:
    """A row per rank in characters, with a scale above and a legend below, in lines of at most
    `width` characters.

        ms |0          |2             bubble
    rank 0 0000001111111222222           25%
    rank 1 ......0000000111111222222     25%
    """
    if width < LEAST_WIDTH:
        raise CostError(f"as_text(width={width})", "no room", f"a width >= {LEAST_WIDTH}")
    names = [f"rank {rank}" for rank in range(num_ranks(events))]
    margin = max(map(len, names), default=0) + 1
    columns = width - margin - _SHARE
    span = last_end(events)
    rows = [
        _row([event for event in events if event.rank == rank], span, columns)
        for rank in range(len(names))
    ]
    lines = [f"{unit_of(span)[1]:>{margin - 1}} {_scale(span, columns)}  bubble"]
    for name, row, bubble in zip(names, rows, bubbles, strict=True):
        lines.append(f"{name:<{margin}}{row}{bubble:>{_SHARE}.0%}")
    chars = {"0" if char.isdecimal() else char for row in rows for char in row}
    legend = "; ".join(text for char, text in _LEGEND.items() if char in chars)
    return "\n".join([*lines, *textwrap.wrap(legend, width)])


def _scale(span: float, columns: int) -> str:
    """The scale: a `|` in the column of each round time, followed by the time."""
    size, _ = unit_of(span)
    line = [" "] * columns
    for moment in ticks(span, columns // 10 + 1):
        if span:
            # A little more: by rounding, `int` could otherwise put the mark one column too early.
            at = int(moment / span * columns * (1 + 1e-9))
        else:
            at = 0
        label = f"|{moment / size:g}"
        if at + len(label) <= columns:
            line[at : at + len(label)] = label
    return "".join(line)


def _row(events: Sequence[Event], span: float, columns: int) -> str:
    """A rank's row. Each column shows the character of what the rank did for most of that time, or
    a blank if it did nothing."""
    share: list[dict[str, float]] = [{" ": 1.0} for _ in range(columns)]
    for event in events:
        for char, start, end in ((_char(event), *event.work), (".", *event.wait)):
            if start < end:
                _cover(share, char, start / span * columns, end / span * columns)
    return "".join(max(column, key=lambda char: column[char]) for column in share)


def _cover(share: list[dict[str, float]], char: str, start: float, end: float) -> None:
    for index in range(int(start), min(len(share), int(end) + 1)):
        covered = min(end, index + 1) - max(start, index)
        share[index][char] = share[index].get(char, 0.0) + covered
        share[index][" "] -= covered


def _char(event: Event) -> str:
    if not isinstance(event.effect, Run):
        if isinstance(event.effect, Collective):
            return "="
        return "-"
    if event.effect.what == ADVANCE:
        return "+"
    return str(event.effect.microbatch % 10)


# The matplotlib axes.

_HIGH = 0.7
_LOW = 0.3
# Transparent, to suit both light and dark backgrounds
_GREY = (0.6, 0.6, 0.6, 0.3)
_PARTS = {
    "stage": "colour and number: the micro-batch",
    "advance": "low boxes: advances",
    "collective": "dark: collectives",
    "wait": "grey: waits",
    "idle": "blank: idle",
}


def draw_plot(
    ax: Any, events: Sequence[Event], bubbles: Sequence[float], span: float, title: str
) -> None:
    """Draw events into axes whose time axis ends at `span` seconds."""
    size, unit = unit_of(span)
    ranks = num_ranks(events)
    drawn = _drawn(events)
    for event in events:
        start = event.work[0] / size
        wide = (event.work[1] - event.work[0]) / size
        if event.waited:
            place = (event.wait[0] / size, event.waited / size)
            ax.broken_barh([place], (event.rank - _LOW / 2, _LOW), facecolors=_GREY, zorder=1)
        if isinstance(event.effect, Run) and wide > 0:
            _plot_run(ax, event, start, wide, span / size)
        elif isinstance(event.effect, Collective) and wide > 0:
            ax.broken_barh(
                [(start, wide)], (event.rank - _HIGH / 2, _HIGH), facecolors=_MEET, zorder=2
            )
    ax.set_yticks(
        range(ranks), [f"rank {rank}\nbubble {bubbles[rank]:.0%}" for rank in range(ranks)]
    )
    ax.set_ylim(ranks - 0.5, -0.5)
    ax.set_xlim(0, span / size or 1.0)
    legend = "; ".join(words for kind, words in _PARTS.items() if kind in drawn)
    ax.set(xlabel=f"{unit} ({legend})" if legend else unit, title=title)


def _plot_run(ax: Any, event: Event, start: float, wide: float, span: float) -> None:
    assert isinstance(event.effect, Run)
    number = event.effect.microbatch
    advances = event.effect.what == ADVANCE
    high = _LOW if advances else _HIGH
    colour = COLOURS[number % len(COLOURS)]
    place = (event.rank - high / 2, high)
    ax.broken_barh(
        [(start, wide)], place, facecolors=colour, edgecolors="#555", linewidth=0.5, zorder=2
    )
    if not advances and wide > 0.02 * span * len(str(number)):
        ax.text(
            start + wide / 2,
            event.rank,
            str(number),
            ha="center",
            va="center",
            fontsize=8,
            color="#222",
        )
