"""A timeline in matplotlib's axes: a row a rank, a box a run, coloured by its micro-batch, as in the SVG."""

from collections.abc import Sequence
from typing import Any

from weft.display import COLOURS
from weft.effects import Run
from weft.transforms.pipelines.events import ADVANCE, Event, num_ranks
from weft.units import unit_of

_HIGH, _LOW = 0.7, 0.3
_WAITS = (0.6, 0.6, 0.6, 0.3)
"""Grey through which the background is seen, light or dark."""
_LEGEND = "colour and number: the micro-batch; low boxes: advances; grey: waits"


def draw_plot(ax: Any, events: Sequence[Event], bubbles: Sequence[float], span: float, title: str) -> None:
    """Draw events into axes whose time goes to `span` seconds."""
    size, unit = unit_of(span)
    ranks = num_ranks(events)
    for event in events:
        start, active, wide = event.start / size, event.active / size, event.waited / size
        if wide:
            ax.broken_barh([(active, wide)], (event.rank - _LOW / 2, _LOW), facecolors=_WAITS, zorder=1)
        if isinstance(event.effect, Run) and active > start:
            _run(ax, event, start, active - start, span / size)
    ax.set_yticks(range(ranks), [f"rank {rank}\nbubble {bubbles[rank]:.0%}" for rank in range(ranks)])
    ax.set_ylim(ranks - 0.5, -0.5)
    ax.set_xlim(0, span / size or 1.0)
    ax.set(xlabel=f"{unit} ({_LEGEND})", title=title)


def _run(ax: Any, event: Event, start: float, wide: float, span: float) -> None:
    assert isinstance(event.effect, Run)
    number, advances = event.effect.microbatch, event.effect.what == ADVANCE
    high = _LOW if advances else _HIGH
    colour = COLOURS[number % len(COLOURS)]
    place = (event.rank - high / 2, high)
    ax.broken_barh([(start, wide)], place, facecolors=colour, edgecolors="#555", linewidth=0.5, zorder=2)
    if not advances and wide > 0.02 * span * len(str(number)):
        ax.text(start + wide / 2, event.rank, str(number), ha="center", va="center", fontsize=8, color="#222")
