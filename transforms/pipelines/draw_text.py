"""A timeline as text: one row a rank, time from left to right, the digit of the micro-batch that runs.

    ms |0          |2             bubble
rank 0 0000001111111222222           25%
rank 1 ......0000000111111222222     25%
"""

import textwrap
from collections.abc import Sequence

from weft.effects import Run
from weft.errors import CostError
from weft.transforms.pipelines.events import ADVANCE, Event, last_end, num_ranks
from weft.units import ticks, unit_of

LEAST_WIDTH = 40
_LEGEND = {
    "0": "0-9 runs that micro-batch (its last digit)",
    "+": "+ advances",
    "-": "- sends, launches",
    ".": ". waits",
}
_SHARE = len("  bubble")


def draw_text(events: Sequence[Event], bubbles: Sequence[float], width: int) -> str:
    """The rows, with a scale above and a legend below, in lines of at most `width` characters."""
    if width < LEAST_WIDTH:
        raise CostError(f"as_text(width={width})", "no room", f"a width >= {LEAST_WIDTH}")
    names = [f"rank {rank}" for rank in range(num_ranks(events))]
    margin = max(map(len, names), default=0) + 1
    columns, span = width - margin - _SHARE, last_end(events)
    rows = [_row([event for event in events if event.rank == rank], span, columns) for rank in range(len(names))]
    lines = [f"{unit_of(span)[1]:>{margin - 1}} {_scale(span, columns)}  bubble"]
    for name, row, bubble in zip(names, rows, bubbles, strict=True):
        lines.append(f"{name:<{margin}}{row}{bubble:>{_SHARE}.0%}")
    seen = {"0" if char.isdecimal() else char for row in rows for char in row}
    legend = "; ".join(text for char, text in _LEGEND.items() if char in seen)
    return "\n".join([*lines, *textwrap.wrap(legend, width)])


def _scale(span: float, columns: int) -> str:
    """A `|` in the column of each round moment, and the moment behind it."""
    size, _ = unit_of(span)
    line = [" "] * columns
    for moment in ticks(span, columns // 10 + 1):
        at, label = int(moment / span * columns * (1 + 1e-9)) if span else 0, f"|{moment / size:g}"
        if at + len(label) <= columns:
            line[at : at + len(label)] = label
    return "".join(line)


def _row(events: Sequence[Event], span: float, columns: int) -> str:
    """In each column what the rank did most of that time; a blank where that is nothing."""
    share: list[dict[str, float]] = [{" ": 1.0} for _ in range(columns)]
    for event in events:
        for char, start, end in ((_char(event), event.start, event.active), (".", event.active, event.end)):
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
        return "-"
    return "+" if event.effect.what == ADVANCE else str(event.effect.microbatch % 10)
