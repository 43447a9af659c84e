"""Tables and files that commands print and write. It imports neither torch, numpy nor rich."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.display.tables import Table
from weft.transforms.cli.options import Options

if TYPE_CHECKING:
    from rich.console import Console


def printable(text: str) -> str:
    """`text` with every character that could control a terminal replaced.

    >>> printable("a\\x1b[31mb\\n")
    'a\N{REPLACEMENT CHARACTER}[31mb\\n'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def check_file(options: Options, flag: str, file: str | None) -> None:
    """Refuse a path that no file can have, before the work starts whose result it is for."""
    folder, instead = os.path.dirname(file or "") or ".", "a file in a folder that exists"
    if file == "" or os.path.isdir(file or ""):
        options.refuse(f"{flag} {file}", f"{file!r:.300} is a folder", instead)
    if not os.path.isdir(folder):
        options.refuse(f"{flag} {file}", f"there is no folder {folder!r:.300}", instead)


def write_file(options: Options, flag: str, file: str, text: str) -> None:
    """Write a text to the file that a flag names.

    Raises:
        RequestError: the file cannot be written.
    """
    try:
        Path(file).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        options.refuse(
            f"{flag} {file}", f"{reason}: {file:.300}", "a file that can be written, in a folder that exists"
        )


def console() -> "Console":
    """The terminal, or the pipe, that tables are printed to."""
    from rich.console import Console

    return Console(highlight=False)


def show_tables(out: "Console", *tables: Table) -> None:
    """Print tables, each before an empty line."""
    for one in tables:
        out.print(one)
        out.print()


def table(title: str, rows: Iterable[Mapping[str, Any]]) -> Table:
    """A table of rows; each maps the names of the columns, the same in every row, to what is shown."""
    lines = [*rows]
    return Table(tuple(lines[0]), tuple(tuple(map(str, line.values())) for line in lines), title)
