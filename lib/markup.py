"""HTML for notebooks: small, escaped, without a script, a style sheet or anything from elsewhere.

Text takes the colour of the page, and what has a colour of its own has it for its background and its text, so that both
themes can be read.
"""

from collections.abc import Iterable, Sequence
from html import escape

# Light enough for black digits, and neighbours apart for eyes that tell red from green or not.
COLOURS = ("#8ecae6", "#ffb703", "#b7e4c7", "#f4a6c0", "#cdb4db", "#f6e27a", "#8fb8a8", "#f08a5d", "#a9b8f0", "#d9d2c5")
_CELL = "text-align: left; padding: 0.1em 0.8em 0.1em 0"
_TABLE = "border-collapse: collapse; color: inherit; font-size: inherit"
_WHOLE = "; white-space: nowrap"
_MOST = 48
_SHORT = 40


def element(name: str, *inside: str, style: str = "", title: str = "") -> str:
    """An element around markup; the title is text."""
    given = {"style": style, "title": title}
    attributes = "".join(f' {key}="{escape(value)}"' for key, value in given.items() if value)
    return f"<{name}{attributes}>{''.join(inside)}</{name}>"


def text(value: object) -> str:
    """A value as text, escaped."""
    return escape(str(value))


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[bool] = ()) -> str:
    """A table of markup; `right` says of each column whether it is aligned so, as numbers are."""
    ends = [*right, *[False] * (len(header) - len(right))]
    styles = [_CELL.replace("left", "right") if end else _CELL for end in ends]

    def line(name: str, cells: Sequence[str]) -> str:
        pairs = ((cell, style + _WHOLE * (len(cell) <= _SHORT)) for cell, style in zip(cells, styles, strict=True))
        return element("tr", *(element(name, cell, style=style) for cell, style in pairs))

    head, body = element("thead", line("th", header)), (line("td", row) for row in rows)
    return element("table", head, element("tbody", *body), style=_TABLE)


def titled(title: str, *parts: str) -> str:
    """Parts of a picture below a line that says what it is; all of them markup."""
    return element("div", element("div", element("b", title), style="margin: 0.3em 0"), *parts)


def chip(label: str, colour: int) -> str:
    """A label on one of the `COLOURS`."""
    shape = "color: #222; border-radius: 0.3em; padding: 0 0.4em"
    return element("span", text(label), style=f"background: {COLOURS[colour % len(COLOURS)]}; {shape}")


def columns(titles: Sequence[str], cells: Sequence[Sequence[tuple[int, str]]], most: int = 40) -> str:
    """Columns of lines, each behind a number on its colour; of long ones the first lines, and how many more there are.

    Args:
        titles: of the columns.
        cells: by column, the number and the text of each line; what follows a colon is shown when pointed at.
    """
    tall = max(map(len, cells), default=0)
    rows = [[_numbered(*column[i]) if i < len(column) else "" for column in cells] for i in range(min(tall, most))]
    if tall > most:
        rows.append([f"… {len(column) - most} more" if len(column) > most else "" for column in cells])
    return table([*map(text, titles)], rows)


def _numbered(number: int, line: str) -> str:
    short, colon, _ = line.partition(":")
    return element("span", f"{chip(str(number), number)} {text(short)}", style=_WHOLE[2:], title=line if colon else "")


def strip(groups: Sequence[tuple[int, int]], *, joined: bool = False) -> str:
    """Boxes in a row, as an SVG: for each (how many, colour), those of a group side by side, with room between groups.

    Args:
        joined: without the lines between the boxes of a group.
    """
    x, boxes, left = 1.0, [], _MOST
    for count, colour in groups:
        shown = min(count, left)
        wide = shown * 11 if joined else 10
        step = [x] if joined and shown else [x + 11 * index for index in range(shown)]
        boxes += [_box(at, wide, COLOURS[colour % len(COLOURS)]) for at in step]
        x, left = x + 11 * shown + 4, left - shown
        if count > shown:
            boxes.append(f'<text x="{x:g}" y="11" font-size="12" fill="currentColor">…</text>')
            x += 14
            break
    size = f'width="{x:g}" height="14" viewBox="0 0 {x:g} 14"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="vertical-align: middle">{"".join(boxes)}</svg>'


def bars(heights: Sequence[tuple[float, str]], width: int = 6) -> str:
    """Bars side by side, as an SVG: for each its height from 0 to 1, and what it says when pointed at."""
    total, tall = max(len(heights), 1) * width, 36
    found = [
        f'<rect x="{index * width}" y="{tall * (1 - height):.1f}" width="{width - 1}" height="{tall * height + 1:.1f}" '
        f'fill="{COLOURS[0]}" stroke="#555" stroke-width="0.4"><title>{escape(label)}</title></rect>'
        for index, (height, label) in enumerate(heights)
    ]
    size = f'width="{total}" height="{tall + 2}" viewBox="0 0 {total} {tall + 2}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="max-width: 100%">{"".join(found)}</svg>'


def _box(x: float, width: float, fill: str) -> str:
    return f'<rect x="{x:g}" y="2" width="{width:g}" height="10" fill="{fill}" stroke="#555" stroke-width="0.5"/>'
