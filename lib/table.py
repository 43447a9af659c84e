"""`Table`: rows of text that a terminal shows aligned, `rich` with rules, and a notebook as HTML; and what is shown as
one."""

import re
from abc import ABC, abstractmethod
from typing import Any

import attrs

from weft.markup import table, text, titled

_NUMBER = re.compile(r"[-+]?[\d,.]+(e[-+]?\d+)?( ?(%|s|ms|us|bytes|[KMG]iB))?")


@attrs.frozen(repr=False)
class Table:
    """Rows of text below their names.

    Args:
        header: the names.
        rows: as long as the header, each.
        title: what it is; a line of its own. Empty: no line.

    >>> print(Table(("size", "name"), (("8", "a"), ("16", "b")), "two rows"))
    two rows
    size  name
       8  a
      16  b
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""

    @property
    def right(self) -> tuple[bool, ...]:
        """Of each column whether it holds numbers alone, and is aligned to the right."""
        columns = [[row[index] for row in self.rows if row[index]] for index in range(len(self.header))]
        return tuple(bool(column) and all(map(_NUMBER.fullmatch, column)) for column in columns)

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        ways = [str.rjust if right else str.ljust for right in self.right]
        shown = [self.title] if self.title else []
        for line in lines:
            cells = (way(cell, width) for way, cell, width in zip(ways, line, widths, strict=True))
            shown.append("  ".join(cells).rstrip())
        return "\n".join(shown)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header, *rows = ([*map(text, line)] for line in (self.header, *self.rows))
        found = table(header, rows, self.right)
        return titled(text(self.title), found) if self.title else found

    def __rich__(self) -> Any:
        from rich.table import Table as RichTable
        from rich.text import Text

        made = RichTable(title=Text(self.title) if self.title else None, title_justify="left")
        for name, right in zip(self.header, self.right, strict=True):
            made.add_column(Text(name), justify="right" if right else "left")
        for row in self.rows:
            made.add_row(*map(Text, row))
        return made


class Tabled(ABC):
    """What is shown as a table, wherever one can be: a base of frozen values."""

    __slots__ = ()

    @abstractmethod
    def table(self) -> Table:
        """Its rows in words."""

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __rich__(self) -> Any:
        return self.table().__rich__()
