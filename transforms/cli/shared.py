"""Options that several commands share, and printing. Importing it imports neither torch, numpy nor rich."""

import argparse
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import ProgramError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MODES = ("none", "piecewise", "full_decode_only", "full", "full_and_piecewise")
"""The values of `--graph`: `weft.transforms.graphs.ladder.MODES`, without its import of torch."""

DTYPES = ("float32", "bfloat16", "float16")
"""The values of `--dtype`: the names in `weft.stages.model.DTYPES`, without its import of torch."""

TRANSPORTS = ("local", "threads", "gloo", "nccl", "peer")
"""The values of `--transport`."""

MOST = 10**9
"""The largest count that any option takes."""


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """The type of an option that takes a whole number within limits.

    >>> whole(1)("12")
    12
    """

    def parse(text: str) -> int:
        if not re.fullmatch("[+-]?[0-9]{1,20}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r:.60}: write a whole number from {least} to {most}")
        return int(text)

    return parse


def number(allowed: Callable[[float], bool], instead: str) -> Callable[[str], float]:
    """The type of an option that takes a number; `instead` names those that are allowed.

    >>> number(lambda value: value > 0, "a number greater than 0")("2.5")
    2.5
    """

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not allowed(value):
            raise argparse.ArgumentTypeError(f"{text!r:.60}: write {instead}")
        return value

    return parse


temperature = number(lambda value: 0 <= value <= 1e38, "a finite number >= 0; 0 is greedy")
seed = whole(-(2**63), 2**63 - 1)

Options = argparse.ArgumentParser | argparse._ArgumentGroup


def add_device(parser: Options) -> None:
    """Add `--device`."""
    parser.add_argument("--device", metavar="D", help="cpu, cuda or cuda:N (default: cuda if there is a GPU)")


def add_json(parser: Options, help: str = "print one JSON object") -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help=help)


def add_model(parser: Options) -> None:
    """Add `--device` and `--dtype`, for a command that loads a model."""
    add_device(parser)
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of the weights and the KV cache (default: the checkpoint's)"
    )


def add_speculation(parser: Options) -> None:
    """Add `--speculate` and `--draft`."""
    parser.add_argument(
        "--speculate",
        type=whole(1, 1024),
        metavar="K",
        help="draft K tokens per step by prompt lookup, or with --draft, and verify them; the tokens stay the same",
    )
    parser.add_argument("--draft", metavar="DIR", help="a checkpoint with the same vocabulary that drafts")


def add_transport(parser: Options) -> None:
    """Add `--transport` and `--timeout`."""
    parser.add_argument(
        "--transport",
        choices=TRANSPORTS,
        help="carries messages between stages (default: nccl between GPUs, gloo between processes on the CPU; "
        "local runs all stages in this process)",
    )
    parser.add_argument(
        "--timeout",
        type=number(lambda value: 0 < value <= 1e6, "a number of seconds, greater than 0 and at most 1e6, as in 30"),
        default=30.0,
        metavar="S",
        help="seconds that a stage may keep another one waiting before both stop (default 30); loading is not counted",
    )


def printable(text: str) -> str:
    """`text` with every character that could control a terminal replaced.

    >>> printable("a\\x1b[31mb\\n")
    'a\N{REPLACEMENT CHARACTER}[31mb\\n'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def write_file(file: str, text: str, call: str) -> None:
    """Write a text; `call` is the flag as written.

    Raises:
        ProgramError: the file cannot be written.
    """
    try:
        Path(file).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        instead = "a file that can be written, in a folder that exists"
        raise ProgramError(f"{call:.300}", f"{reason}: {file!s:.300}", instead) from error


def check_writable(file: str | None, call: str) -> None:
    """Refuse a path that no file can have, before the work starts whose result it is for.

    Raises:
        ProgramError: the path is a folder, or its folder does not exist.
    """
    if file is None:
        return
    if not file or os.path.isdir(file):
        raise ProgramError(f"{call:.300}", f"{file!r:.300} is a folder", "a file in a folder that exists")
    if not os.path.isdir(os.path.dirname(file) or "."):
        seen = f"there is no folder {os.path.dirname(file)!r:.300}"
        raise ProgramError(f"{call:.300}", seen, "a file in a folder that exists")


def console() -> "Console":
    """The terminal, or the pipe, that tables are printed to."""
    from rich.console import Console

    return Console(highlight=False)


def table(title: str | None, rows: Iterable[Mapping[str, Any]], *, left: int = 1) -> "Table":
    """A table without rules.

    Args:
        rows: each maps the names of the columns, the same in every row, to what is shown.
        left: how many columns, from the first, are aligned to the left; the others are to the right.
    """
    from rich.table import Table
    from rich.text import Text

    lines: Sequence[Mapping[str, Any]] = list(rows)
    made = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for index, name in enumerate(lines[0]):
        is_left = index < left
        made.add_column(name, vertical="bottom", overflow="fold", justify="left" if is_left else "right")
    for line in lines:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in line.values()))
    return made


def counted(number: int, noun: str) -> str:
    """A number and its noun.

    >>> counted(1, "step"), counted(2, "step")
    ('1 step', '2 steps')
    """
    return f"{number} {noun}{'s' * (number != 1)}"
