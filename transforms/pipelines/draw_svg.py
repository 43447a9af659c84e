"""A timeline as an inline SVG: a row a rank, a box a run, coloured by its micro-batch; each event says what it is."""

from collections.abc import Iterator, Sequence
from html import escape

from weft.display import COLOURS
from weft.effects import Broadcast, Fence, Recv, Run
from weft.transforms.pipelines.events import ADVANCE, Event, how_many, last_end, num_ranks
from weft.units import duration, ticks, unit_of

_WIDTH, _LEFT, _RIGHT, _TOP = 920, 70, 70, 34
_ROW, _BOX = 34, 24
_DIGIT = 7  # pixels, a little more than a digit of 11 px takes
_MARK, _WAIT, _WORK = "#333", "#e2e2e2", "#9a9a9a"
_MARKS = {"received": -4, "sent": _BOX - 1, "fence": _BOX // 2 - 2}  # pixels below the top of a box


def draw_svg(events: Sequence[Event], bubbles: Sequence[float], title: str = "", span: float | None = None) -> str:
    """The whole picture, with an axis of `span` seconds (None: up to the last end) and a legend."""
    ranks, end = num_ranks(events), last_end(events)
    span = end if span is None else span
    bottom = _TOP + ranks * _ROW
    height = bottom + 58
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'role="img" aria-label="timeline of a pipeline" style="max-width:100%" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(_LEFT, 18, f"{title}{how_many(ranks)}, {duration(end)}", "start", bold=True),
        _text(_WIDTH - 6, 18, "bubble", "end"),
        *_axis(span, bottom),
    ]
    for rank, bubble in enumerate(bubbles):
        middle = _TOP + rank * _ROW + _BOX / 2 + 4
        parts += [_text(_LEFT - 8, middle, f"rank {rank}", "end"), _text(_WIDTH - 6, middle, f"{bubble:.0%}", "end")]
    parts += [_event(event, span) for event in events]
    return "\n".join([*parts, *_legend(bottom + 44), "</svg>"])


def _at(moment: float, span: float) -> float:
    return _LEFT + (moment / span if span else 0.0) * (_WIDTH - _LEFT - _RIGHT)


def _text(x: float, y: float, text: str, anchor: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#222"{weight}>{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> str:
    place = f'x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"'
    return f'<rect {place} fill="{fill}" stroke="{stroke}" stroke-width="0.5"/>'


def _axis(span: float, bottom: float) -> Iterator[str]:
    size, name = unit_of(span)
    for moment in ticks(span, 9):
        x = _at(moment, span)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{bottom}" stroke="#ddd"/>'
        yield _text(x, bottom + 14, f"{moment / size:g} {name}", "middle")


def _event(event: Event, span: float) -> str:
    """What it did, then what it waited; with a mark where it is over."""
    top = _TOP + event.rank * _ROW
    start, active, end = (_at(moment, span) for moment in (event.start, event.active, event.end))
    parts = [f"<title>{escape(_title(event))}</title>"]
    if isinstance(event.effect, Run):
        parts += _run(event, start, active - start, top)
    else:
        parts.append(_rect(start, top + _BOX / 2 - 3, active - start, 6, _WORK))
        parts.append(_rect(end - 0.75, top + _MARKS[_kind(event)], 1.5, 5, _MARK))
    if event.waited:
        parts.insert(1, _rect(active, top + 3, end - active, _BOX - 6, _WAIT))
    return f"<g>{''.join(parts)}</g>"


def _kind(event: Event) -> str:
    match event.effect:
        case Recv():
            return "received"
        case Broadcast(root) if root != event.rank:
            return "received"
        case Fence():
            return "fence"
    return "sent"


def _run(event: Event, x: float, width: float, top: float) -> Iterator[str]:
    assert isinstance(event.effect, Run)
    colour, label = COLOURS[event.effect.microbatch % len(COLOURS)], str(event.effect.microbatch)
    if event.effect.what == ADVANCE:
        yield _rect(x, top + 7, width, _BOX - 14, colour, "#555")
        return
    yield _rect(x, top, width, _BOX, colour, "#555")
    if width >= _DIGIT * len(label) + 2:
        yield _text(x + width / 2, top + _BOX / 2 + 4, label, "middle")


def _title(event: Event) -> str:
    waited = f", waited {duration(event.waited)}" if event.waited else ""
    return f"rank {event.rank}: {event.effect}; {duration(event.start)} to {duration(event.end)}{waited}"


def _legend(y: float) -> Iterator[str]:
    entries = (
        (_rect(0, y - 9, 14, 10, COLOURS[0], "#555"), 14, "runs a stage; number and colour: the micro-batch"),
        (_rect(0, y - 7, 14, 6, COLOURS[0], "#555"), 14, "advances"),
        (_rect(0, y - 9, 14, 10, _WAIT), 14, "waits"),
        (_rect(0, y - 6, 14, 4, _WORK), 14, "sends, launches"),
        (_rect(0, y - 12, 1.5, 5, _MARK), 2, "received"),
        (_rect(0, y - 6, 1.5, 5, _MARK), 2, "fence"),
        (_rect(0, y - 1, 1.5, 5, _MARK), 2, "sent"),
    )
    x = float(_LEFT)
    for shape, wide, words in entries:
        yield f'<g transform="translate({x:.0f} 0)">{shape}{_text(wide + 5, y, words, "start")}</g>'
        x += wide + 5 + 6.2 * len(words) + 18
