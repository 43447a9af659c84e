"""Prints and writes the results of commands. Importing this module imports neither torch, numpy nor
rich."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weft.transforms.cli.fields import Options


def printable(text: str) -> str:
    """`text` with every character that could control a terminal replaced.

    >>> printable("a\\x1b[31mb\\n")
    'a\N{REPLACEMENT CHARACTER}[31mb\\n'
    """
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def check_file(options: Options, flag: str, file: str | None) -> None:
    """Refuse a path that cannot be written, before the work starts whose result goes there."""
    # By the folder alone: to open the file for writing would empty it, and the work may still fail.
    folder = os.path.dirname(file or "") or "."
    instead = "a file in a folder that exists"
    if file == "" or os.path.isdir(file or ""):
        options.refuse(f"{flag} {file}", f"{file!r:.300} is a folder", instead)
    if not os.path.isdir(folder):
        options.refuse(f"{flag} {file}", f"there is no folder {folder!r:.300}", instead)


def write_file(options: Options, flag: str, file: str | None, text: str) -> None:
    """Write a text to the file that a flag names; do nothing if it was not given.

    Raises:
        RequestError: the file cannot be written.
    """
    try:
        if file is not None:
            Path(file).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        problem = f"{getattr(error, 'strerror', error)}: {file:.300}"
        options.refuse(
            f"{flag} {file}", problem, "a file that can be written, in a folder that exists"
        )


def show(parts: Iterable[Any]) -> None:
    """Print texts, tables and other objects of rich. Plain text is neither wrapped nor cut."""
    from rich.console import Console

    # rich would colour numbers and paths, and read `[bold]` or `:smile:` in a completion as markup.
    out = Console(highlight=False)
    for part in parts:
        out.print(part, markup=False, emoji=False, crop=False, soft_wrap=isinstance(part, str))


def heading(text: str) -> Any:
    """A bold line, which is neither wrapped nor cut."""
    from rich.text import Text

    return Text(text, style="bold", no_wrap=True, overflow="ignore")
