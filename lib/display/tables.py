"""`Table`, which prints in a terminal and in a notebook; and the HTML and SVG of other pictures in
notebooks.

The HTML is small and escaped, without scripts or style sheets. Text takes the colour of the page,
except that a part with a background also sets its text colour. So it can be read in light and dark
themes.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Literal

import attrs

# Light enough for black digits; neighbours differ for colour-blind eyes too.
COLOURS = (
    "#8ecae6",
    "#ffb703",
    "#b7e4c7",
    "#f4a6c0",
    "#cdb4db",
    "#f6e27a",
    "#8fb8a8",
    "#f08a5d",
    "#a9b8f0",
    "#d9d2c5",
)
_PIECE = "display: inline-block; white-space: pre"
# This makes a bar as wide as the text below it: with a width of 0 it does not widen the box, and
# the minimum width of 100 % then fills the box.
_BAR = "display: block; width: 0; min-width: 100%; height: 2em; border-bottom: 1px solid"
_CELL = "text-align: left; padding: 0.1em 0.8em 0.1em 0"
_TABLE = "border-collapse: collapse; color: inherit; font-size: inherit"
_WHOLE = "; white-space: nowrap"
_MOST = 48
_SHORT = 40
_NUMBER = re.compile(r"[-+]?[\d,.]+(e[-+]?\d+)?( ?(%|s|ms|us|bytes|[KMG]iB))?")


@attrs.frozen(repr=False)
class Table:
    """Rows of text below the names of their columns. A terminal shows it aligned, `rich` also fits
    it to the terminal's width, and a notebook shows HTML.

    Args:
        header: the names of the columns.
        rows: each as long as the header.
        title: the line above the table; empty: no line.

    >>> print(Table(("size", "name"), (("8", "a"), ("16", "b")), "two rows"))
    two rows
    size  name
       8  a
      16  b
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], title: str = "") -> "Table":
        """A table of rows, each a mapping from the names of the columns to their values; None is
        shown as an empty cell.

        >>> print(Table.of([{"name": "a", "size": 8}, {"name": "b", "size": None}]))
        name  size
        a        8
        b
        """
        lines = [*rows]
        cells = (
            tuple("" if value is None else str(value) for value in line.values()) for line in lines
        )
        return cls(tuple(lines[0]), tuple(cells), title)

    @property
    def right(self) -> tuple[bool, ...]:
        """For each column, whether it holds only numbers, which are aligned to the right."""
        columns = [
            [row[index] for row in self.rows if row[index]] for index in range(len(self.header))
        ]
        return tuple(bool(column) and all(map(_NUMBER.fullmatch, column)) for column in columns)

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        ways = [str.rjust if right else str.ljust for right in self.right]
        if self.title:
            shown = [self.title]
        else:
            shown = []
        for line in lines:
            cells = (way(cell, width) for way, cell, width in zip(ways, line, widths, strict=True))
            shown.append("  ".join(cells).rstrip())
        return "\n".join(shown)

    __repr__ = __str__

    # Not by rich: its HTML is one <pre> in fixed colours, with lines of box-drawing characters.
    def _repr_html_(self) -> str:
        header, *rows = ([*map(text, line)] for line in (self.header, *self.rows))
        markup = html_table(header, rows, self.right)
        if self.title:
            return titled(text(self.title), markup)
        return markup

    def __rich__(self) -> Any:
        from rich.align import Align
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            box=None, pad_edge=False, title_justify="left", title_style="bold", header_style="dim"
        )
        table.title = Text(self.title) if self.title else None
        for name, right in zip(self.header, self.right, strict=True):
            if right:
                side: Literal["left", "right"] = "right"
            else:
                side = "left"
            table.add_column(
                Align(Text(name), side, vertical="bottom"), justify=side, overflow="fold"
            )
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table


class Tabled(ABC):
    """A base class for frozen values that are shown as a table, in a terminal and in a notebook."""

    __slots__ = ()

    @abstractmethod
    def _table(self) -> Table:
        """The value as a table."""

    def __str__(self) -> str:
        return str(self._table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def __rich__(self) -> Any:
        return self._table().__rich__()


def element(name: str, *inside: str, style: str = "", title: str = "") -> str:
    """An HTML element around markup; `title` is plain text."""
    attribute_values = {"style": style, "title": title}
    attributes = "".join(
        f' {key}="{escape(value)}"' for key, value in attribute_values.items() if value
    )
    return f"<{name}{attributes}>{''.join(inside)}</{name}>"


def text(value: object) -> str:
    """A value as text, escaped for HTML."""
    return escape(str(value))


def html_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[bool] = ()
) -> str:
    """An HTML table whose cells are markup; `right` says which columns are aligned to the right."""
    ends = [*right, *[False] * (len(header) - len(right))]
    styles = [_CELL.replace("left", "right") if end else _CELL for end in ends]

    def line(name: str, cells: Sequence[str]) -> str:
        pairs = (
            (cell, style + _WHOLE * (len(cell) <= _SHORT))
            for cell, style in zip(cells, styles, strict=True)
        )
        return element("tr", *(element(name, cell, style=style) for cell, style in pairs))

    head = element("thead", line("th", header))
    body = (line("td", row) for row in rows)
    return element("table", head, element("tbody", *body), style=_TABLE)


def titled(title: str, *parts: str) -> str:
    """A title above the parts of a picture; the title and the parts are markup."""
    return element("div", element("div", element("b", title), style="margin: 0.3em 0"), *parts)


def chip(label: str, colour: int) -> str:
    """A label on one of the `COLOURS`."""
    shape = "color: #222; border-radius: 0.3em; padding: 0 0.4em"
    return element(
        "span", text(label), style=f"background: {COLOURS[colour % len(COLOURS)]}; {shape}"
    )


def columns(
    titles: Sequence[str], cells: Sequence[Sequence[tuple[int, str]]], most: int = 40
) -> str:
    """Columns of lines; before each line stands its number, on the colour of that number. A long
    column shows its first lines and how many more there are.

    Args:
        titles: the titles of the columns.
        cells: for each column, the number and the text of each line; a text with a colon is shown
            up to the colon, and in full as a tooltip.
        most: the most lines that a column shows.
    """
    tall = max(map(len, cells), default=0)
    rows = [
        [_numbered(*column[i]) if i < len(column) else "" for column in cells]
        for i in range(min(tall, most))
    ]
    if tall > most:
        rows.append(
            [f"… {len(column) - most} more" if len(column) > most else "" for column in cells]
        )
    return html_table([*map(text, titles)], rows)


def _numbered(number: int, line: str) -> str:
    short, colon, _ = line.partition(":")
    return element(
        "span",
        f"{chip(str(number), number)} {text(short)}",
        style=_WHOLE[2:],
        title=line if colon else "",
    )


def strip(groups: Sequence[tuple[int, int]], *, joined: bool = False) -> str:
    """Groups of boxes in a row, as an SVG.

    Args:
        groups: for each group, the number of boxes and the index of their colour.
        joined: whether to leave out the lines between the boxes of a group.
    """
    x = 1.0
    boxes = []
    left = _MOST
    for count, colour in groups:
        shown = min(count, left)
        if joined:
            wide = shown * 11
        else:
            wide = 10
        if joined and shown:
            step = [x]
        else:
            step = [x + 11 * index for index in range(shown)]
        boxes += [_box(at, wide, COLOURS[colour % len(COLOURS)]) for at in step]
        x = x + 11 * shown + 4
        left = left - shown
        if count > shown:
            boxes.append(f'<text x="{x:g}" y="11" font-size="12" fill="currentColor">…</text>')
            x += 14
            break
    size = f'width="{x:g}" height="14" viewBox="0 0 {x:g} 14"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="vertical-align:'
        f' middle">{"".join(boxes)}</svg>'
    )


def bars_over_text(pieces: Sequence[tuple[str, float, str]], most: int = 160) -> str:
    """Pieces of a text, each under a bar of its width. Of a long text, only the first pieces are
    shown, and how many more there are.

    Args:
        pieces: for each piece, its text, the height of its bar from 0 to 1, and its tooltip.
        most: the most pieces that are shown.
    """
    elements = []
    for piece, height, title in pieces[:most]:
        bar = f'<rect y="{1 - height:.3f}" width="1" height="{height:.3f}" fill="{COLOURS[0]}"/>'
        drawn = f'<svg viewBox="0 0 1 1" preserveAspectRatio="none" style="{_BAR}">{bar}</svg>'
        shown = piece.replace("\n", "↵") or "·"
        elements.append(element("span", drawn, escape(shown), style=_PIECE, title=title))
        elements += ["<br/>"] * piece.count("\n")
    if len(pieces) > most:
        elements.append(f" … {len(pieces) - most} more")
    return element("div", *elements, style="font-family: monospace; margin: 0.3em 0")


def _box(x: float, width: float, fill: str) -> str:
    return (
        f'<rect x="{x:g}" y="2" width="{width:g}" height="10" fill="{fill}" stroke="#555"'
        ' stroke-width="0.5"/>'
    )
