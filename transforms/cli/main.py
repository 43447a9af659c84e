"""`main`, which runs one command, and the parser of all commands. Building the parser imports
neither torch, rich nor numpy."""

import argparse
import contextlib
import importlib
import io
import os
import re
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from weft import __version__
from weft.arguments.checks import nearest
from weft.batches.sampling import SamplingParams
from weft.errors import CheckpointError, ConfigError, ConfigWarning, WeftError
from weft.transforms.cli.fields import Options, flag_of, flagged
from weft.transforms.cli.options import Bench, Demo, Doctor, Generate, Plan, Serve, Verify
from weft.transforms.cli.printing import printable

# The exit codes that a shell reports for a process that SIGINT (2) or SIGPIPE (13) ended: 128 more.
_INTERRUPTED = 130
_BROKEN_PIPE = 141

# The flags for arguments of Python functions whose names differ from the flags'.
_RENAMED = {
    "backend": "--transport",
    "max_num_reqs": "--max-num-seqs",
    "num_tokens": "--speculate",
    "pipeline": "--pp",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments after the program's name; None: those of the process.

    Returns:
        0 for success; 1 if `demo`, `verify` or `bench --eval` found a difference, if a completion
        of `generate` ended with an error, or if the model of `plan` does not fit; 2 for bad input,
        with the error on stderr; 130 after Ctrl-C; 141 if the reader of stdout is gone.

    Raises:
        SystemExit: from argparse, for `--help` (0) and for arguments that it refuses (2); and on
            the ranks of torchrun that print nothing (0).
    """
    words = sys.argv[1:] if argv is None else [*argv]
    if isinstance(sys.stdout, io.TextIOWrapper):
        # In an ASCII terminal, escape other characters instead of raising UnicodeEncodeError.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                if os.environ.get("RANK", "0") != "0":  # under torchrun only the first rank warns
                    warnings.simplefilter("ignore", ConfigWarning)
                return run_command(parse(words))
        finally:
            # Here, so that a broken pipe raises inside this function and not at the exit.
            sys.stdout.flush()
    except WeftError as error:
        print(f"error: {printable(in_flags(error, words))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # At exit, the interpreter flushes stdout again, and would print the same error.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as one line, without the source line that Python adds."""
    print(f"warning: {printable(str(message))}", file=sys.stderr)


def run_command(options: Options) -> int:
    """Import the module of a command, run it, and return the exit code."""
    command: Any = importlib.import_module(f"weft.transforms.cli.{options.command}")
    return int(command.run(options))


def in_flags(error: WeftError, words: Sequence[str]) -> str:
    """The text of an error in terms of the command line instead of Python.

    A Python argument becomes its flag. A Python call becomes the command as the user wrote it, or
    the one flag concerned if the call shows one argument only.
    """
    flags = {
        field.name: flag_of(field.name) for field in flagged(COMMANDS.get(words[0], Options))
    } | _RENAMED
    call = error.call
    only = re.fullmatch(r"[^='\"]*[( ](\w+)=([^=]*)\)", error.call)
    if only and only[1] in flags:
        call = f"weft {words[0]} {flags[only[1]]} {only[2]}"
    elif not call.startswith((f"weft {words[0]} ", "--")):
        call = f"weft {shlex.join(words)}"
    problem = error.problem
    instead = error.instead
    # In those two errors, `name=` is a field of a file and not an argument.
    if not isinstance(error, ConfigError | CheckpointError):
        problem, instead = (_with_flags(text, flags) for text in (problem, instead))
    return str(WeftError(call, problem, instead))


def _with_flags(text: str, flags: Mapping[str, str]) -> str:
    """The text with Python arguments replaced by flags: `attention='auto'` becomes
    `--attention auto`."""
    text = text.replace(_ADAPTERS, "--adapter DIR")
    if "batch_invariant" not in flags:  # the command (`verify`) is always batch invariant
        text = text.replace("; or leave out batch_invariant=True", "")
    names = "|".join(flags)
    text = re.sub(rf"\b({names})=True\b", lambda match: flags[match[1]], text)
    text = re.sub(rf"\b({names})='([\w.-]+)'", lambda match: f"{flags[match[1]]} {match[2]}", text)
    text = re.sub(rf"\b({names})=", lambda match: f"{flags[match[1]]} ", text)
    return re.sub(r"weft\.load\(path, (--[\w-]+)\)", r"\1", text)


_ADAPTERS = "adapters=[weft.load_adapter(model, folder)]"
COMMANDS: dict[str, type[Options]] = {
    options_class.command: options_class
    for options_class in (Demo, Doctor, Generate, Verify, Serve, Bench, Plan)
}


# vLLM's names for flags of weft.
_ELSEWHERE = {"--tensor-parallel-size": "--tp", "--pipeline-parallel-size": "--pp"}
_SAMPLING = [flag_of(field.name) for field in attrs.fields(SamplingParams)]
_IN_PYTHON = "in Python, weft.generate(..., sampling=weft.SamplingParams(...))"


def parse(words: Sequence[str]) -> Options:
    """Parse the command line; an unknown command or flag is refused with the nearest known one.

    Raises:
        RequestError: flags that contradict each other.
        SystemExit: from argparse, for `--help` (0) and for arguments that it refuses (2).
    """
    # First without required flags: if one is missing because of a typo, the error is to show the
    # typo.
    parser = build_parser(requires=False)
    if words and words[0] not in COMMANDS and not words[0].startswith("-"):
        near = [f"weft {name}" for name in nearest(words[0], COMMANDS)]
        remedy = ", or ".join((*near, "see weft --help"))
        parser.error(f"no command {words[0]!r:.60} (instead: {remedy})")
    namespace, strange = parser.parse_known_args(words)
    if strange:
        parser = namespace.parser
        flags = [
            word.strip(".,;]") for word in parser.format_help().split() if word.startswith("--")
        ]
        word = strange[0].partition("=")[0]
        near = nearest(word, flags)
        if (
            not word.startswith("-")
            and "--model" in flags
            and getattr(namespace, "model", None) is None
        ):
            near = [f"--model {word}"]
        elif not near and (
            (word in _SAMPLING and "--prompt" in flags) or _ELSEWHERE.get(word) in flags
        ):
            near = [_ELSEWHERE.get(word, _IN_PYTHON)]
        remedy = ", or ".join((*near, f"see {parser.prog} --help"))
        parser.error(f"unrecognized arguments: {' '.join(strange)} (instead: {remedy})")
    namespace = build_parser().parse_args(words)
    options_class = COMMANDS[namespace.parser.prog.split()[-1]]
    del namespace.parser
    options = options_class(**vars(namespace), explicit=frozenset(vars(namespace)))
    options.check()
    return options


def build_parser(*, requires: bool = True) -> argparse.ArgumentParser:
    """The parser of all commands; its result has the command's own parser as `parser`.

    Args:
        requires: whether to refuse a command that lacks a required argument.
    """
    parser = argparse.ArgumentParser(
        prog="weft", description="Model steps as pure functions on PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, options_class in COMMANDS.items():
        told: dict[str, Any] = {
            "help": options_class.summary,
            "description": options_class.__doc__,
            "usage": f"weft {name} {options_class.usage}",
        }
        command_parser = commands.add_parser(name, allow_abbrev=False, **told)
        command_parser.set_defaults(parser=command_parser)
        _add_flags(command_parser, options_class, requires)
    return parser


def _add_flags(
    parser: argparse.ArgumentParser, options_class: type[Options], requires: bool
) -> None:
    """Add the flags of a command. The parser's result has only the flags that the user gave."""
    groups: dict[str, Any] = {"options": parser}
    for field in flagged(options_class):
        name = field.metadata["group"]
        help = field.metadata["help"]
        if name == "model" and name not in groups:
            groups[name] = parser.add_mutually_exclusive_group(required=requires)
        elif name not in groups:
            groups[name] = parser.add_argument_group(name)
        if "positional" in field.metadata["kind"]:
            word: dict[str, Any] = {"metavar": field.metadata["kind"]["metavar"], "help": help}
            if not (requires and field.default is attrs.NOTHING):
                word |= {"nargs": "?", "default": argparse.SUPPRESS}
            groups[name].add_argument(field.name, **word)
            continue
        if type(field.default) in (int, float, str) and "default" not in help:
            help += f" (default {str(field.default).removesuffix('.0')})"
        told = {
            "help": help,
            "required": requires and field.default is attrs.NOTHING,
            **field.metadata["kind"],
        }
        for flag, keywords in {flag_of(field.name): told, **field.metadata["also"]}.items():
            groups[name].add_argument(flag, dest=field.name, default=argparse.SUPPRESS, **keywords)
