"""Files that a command writes."""

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
