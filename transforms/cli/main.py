"""`main`, which runs one command, and the parser of all commands. Building it imports neither torch, rich nor numpy."""

import argparse
import contextlib
import difflib
import importlib
import io
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from weft import __version__
from weft.errors import CheckpointError, ConfigError, ConfigWarning, WeftError
from weft.transforms.cli.options import GENERAL, GROUPS, MODEL, Bench, Demo, Doctor, Generate, Options, Plan, flag_of
from weft.transforms.cli.printing import printable

_INTERRUPTED, _BROKEN_PIPE = 130, 141
"""The codes by which a shell reports a process that SIGINT, or SIGPIPE, ended."""

_SAME = (
    "cohorts", "context", "device", "dtype", "graph", "max_num_tokens", "max_tokens", "run_ahead", "seed", "steps",
    "temperature",
)  # fmt: skip
_FLAGS = {name: flag_of(name) for name in _SAME} | {
    "backend": "--transport",
    "max_num_reqs": "--max-num-seqs",
    "num_tokens": "--speculate",
    "pipeline": "--pp",
}
"""The flags that set arguments of the Python functions, by the names of the arguments."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments after the program's name; None: those of the process.

    Returns:
        0 for success; 1 if `demo` or `bench --eval` found a difference, or if a completion of `generate` ended with an
        error; 2 for bad input, with the error on stderr; 130 after Ctrl-C; 141 if the reader of stdout is gone.

    Raises:
        SystemExit: from argparse, for `--help` (0) and for arguments that it refuses (2).
    """
    words = sys.argv[1:] if argv is None else [*argv]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an ASCII terminal shows what it can
    try:
        try:
            options = parse(words)
            with _short_warnings():
                return run_command(options)
        finally:
            sys.stdout.flush()
    except WeftError as error:
        print(f"error: {printable(in_flags(error, words))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return _BROKEN_PIPE


def run_command(options: Options) -> int:
    """Import the module of a command, run it, and return the exit code."""
    command: Any = importlib.import_module(f"weft.transforms.cli.{options.command}")
    return int(command.run(options))


def in_flags(error: WeftError, words: Sequence[str]) -> str:
    """The text of an error in the words of the command line: a Python argument becomes its flag. A Python call becomes
    the command as written, or, if it shows one argument alone, the flag of that one."""
    call, only = error.call, re.fullmatch(r"[^='\"]*[( ](\w+)=([^=]*)\)", error.call)
    if only and only[1] in _FLAGS:
        call = f"weft {words[0]} {_FLAGS[only[1]]} {only[2]}"
    elif not call.startswith((f"weft {words[0]} ", "--")):
        call = f"weft {shlex.join(words)}"
    seen, instead = error.seen, error.instead
    if not isinstance(error, ConfigError | CheckpointError):  # whose names are those of files' fields
        names = re.compile(rf"\b({'|'.join(_FLAGS)})=")
        seen, instead = (names.sub(lambda found: f"{_FLAGS[found[1]]} ", text) for text in (seen, instead))
    return str(WeftError(call, seen, instead))


@contextlib.contextmanager
def _short_warnings() -> Iterator[None]:
    """Within, a warning is one line on stderr, without its line of code. Under torchrun only the first rank warns about
    a configuration."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"warning: {printable(str(message))}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        if os.environ.get("RANK", "0") != "0":
            warnings.simplefilter("ignore", ConfigWarning)
        yield


def _drop_stdout() -> None:
    """Discard what is still buffered: the interpreter would flush it at exit, and complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_COMMANDS: tuple[type[Options], ...] = (Demo, Doctor, Generate, Bench, Plan)


def parse(words: Sequence[str]) -> Options:
    """The options of the command that the words call. It refuses a flag that the command does not have, and names the
    nearest flag that it has.

    Raises:
        RequestError: flags that contradict each other.
        SystemExit: from argparse, for `--help` (0) and for arguments that it refuses (2).
    """
    namespace, strange = build_parser().parse_known_args(words)
    given = vars(namespace)
    own, parser = given.pop("own"), given.pop("parser")
    if strange:
        flags = [word.strip(".,;]") for word in parser.format_help().split() if word.startswith("--")]
        near = difflib.get_close_matches(strange[0].partition("=")[0], flags, n=1)
        remedy = f"{near[0]}, or see {parser.prog} --help" if near else f"see {parser.prog} --help"
        parser.error(f"unrecognized arguments: {' '.join(strange)} (instead: {remedy})")
    options: Options = own(**given, given=frozenset(given))
    options.check()
    return options


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; it sets `own` and `parser`, the class and the parser of the command."""
    parser = argparse.ArgumentParser(prog="weft", description="Model steps as pure functions on PyTorch.")
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for own in _COMMANDS:
        told: dict[str, Any] = {"help": own.summary, "description": own.__doc__}
        usage = f"weft {own.command} {own.usage}"
        made = commands.add_parser(own.command, usage=usage, allow_abbrev=False, **told)
        made.set_defaults(own=own, parser=made)
        _add_flags(made, own)
    return parser


def _add_flags(parser: argparse.ArgumentParser, own: type[Options]) -> None:
    """Add the flags of a command. Only flags that are given reach the parser's result."""
    fields = [field for field in attrs.fields(own) if field.metadata]
    for group, description in GROUPS.items():
        target: Any = parser
        members = [field for field in fields if field.metadata["group"] == group]
        if members and group == MODEL:
            target = parser.add_mutually_exclusive_group(required=True)
        elif members and group != GENERAL:
            target = parser.add_argument_group(group, description)
        for field in members:
            told = {**field.metadata["kind"], "help": field.metadata["help"]}
            if field.default is attrs.NOTHING:
                told["required"] = True
            elif type(field.default) in (int, float, str) and "default" not in told["help"]:
                told["help"] += f" (default {field.default})"
            if field.metadata["needs"]:
                told["help"] += f"; needs {flag_of(field.metadata['needs'])}"
            for flag, keywords in {flag_of(field.name): told, **field.metadata["also"]}.items():
                target.add_argument(flag, dest=field.name, default=argparse.SUPPRESS, **keywords)
