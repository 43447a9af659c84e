"""What a command writes: files, and text that a terminal can take."""

import os
from pathlib import Path

from weft.errors import ProgramError


def write_file(file: str | os.PathLike[str], text: str, call: str) -> None:
    """Write a text.

    Args:
        call: for the error.

    Raises:
        ProgramError: the file cannot be written.
    """
    try:
        Path(file).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        instead = "a file, in a folder that exists, that may be written"
        reason = error.strerror if isinstance(error, OSError) else error
        raise ProgramError(f"{call:.300}", f"{reason}: {file!s:.300}", instead) from error


def printable(text: str) -> str:
    """`text` with what could steer a terminal replaced.

    >>> printable("a\\x1b[31mb\\n")
    'a\N{REPLACEMENT CHARACTER}[31mb\\n'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
