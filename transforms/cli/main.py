"""`main`, which runs one command, and the parser of all commands. Building it imports neither torch, rich nor numpy."""

import argparse
import contextlib
import difflib
import importlib
import io
import math
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from weft import __version__
from weft.errors import CheckpointError, ConfigError, ConfigWarning, WeftError
from weft.transforms.cli import shared
from weft.transforms.cli.presets import PRESETS, WORKLOADS
from weft.transforms.cli.shared import MODES, number, printable, whole

_INTERRUPTED, _BROKEN_PIPE = 130, 141
"""The codes by which a shell reports a process that SIGINT, or SIGPIPE, ended."""

_FLAGS = {
    "backend": "--transport",
    "device": "--device",
    "dtype": "--dtype",
    "graph": "--graph",
    "max_num_reqs": "--max-num-seqs",
    "max_num_tokens": "--max-num-tokens",
    "max_tokens": "--max-tokens",
    "num_tokens": "--speculate",
    "pipeline": "--pp",
    "run_ahead": "--run-ahead",
    "seed": "--seed",
    "temperature": "--temperature",
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
            arguments = parse(words)
            with _short_warnings():
                return run_command(arguments)
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


def run_command(arguments: argparse.Namespace) -> int:
    """Import the module of a command, run it, and return the exit code."""
    command: Any = importlib.import_module(f"weft.transforms.cli.{arguments.command}")
    return int(command.run(arguments))


def in_flags(error: WeftError, words: Sequence[str]) -> str:
    """The text of an error in the words of the command line: a Python call becomes the command as written, and a
    Python argument its flag."""
    written = error.call.startswith(("weft generate ", "weft bench ", "weft plan ", "weft demo ", "--"))
    call = error.call if written else f"weft {shlex.join(words)}"
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


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments. A command refuses a flag that it does not have, and names the nearest flag that it has."""
    parser, commands = _build()
    arguments, strange = parser.parse_known_args(words)
    if strange:
        command = commands[arguments.command]
        flags = [word.strip(".,;]") for word in command.format_help().split() if word.startswith("--")]
        near = difflib.get_close_matches(strange[0].partition("=")[0], flags, n=1)
        remedy = f"{near[0]}, or see {command.prog} --help" if near else f"see {command.prog} --help"
        command.error(f"unrecognized arguments: {' '.join(strange)} (instead: {remedy})")
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; it sets `command`, the name of the command's module."""
    return _build()[0]


def _build() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser, and that of each command."""
    parser = argparse.ArgumentParser(prog="weft", description="Model steps as pure functions on PyTorch.")
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    made = {}
    for name, (fill, usage, help) in _COMMANDS.items():
        usage = f"weft {name} {usage}".strip()
        made[name] = commands.add_parser(name, help=help, usage=usage, allow_abbrev=False)
        fill(made[name])
    return parser, made


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.description = "Complete prompts, all in one batch, and print the completions in the order of the prompts."
    parser.add_argument("--model", required=True, metavar="DIR", help="a checkpoint folder in Hugging Face's format")
    prompts = parser.add_argument_group("prompts", "at least one; both flags may be repeated, in any order")
    prompts.add_argument("--prompt", dest="prompts", action="append", type=_text, metavar="TEXT", help="a text")
    prompts.add_argument("--prompt-ids", dest="prompts", action="append", type=_ids, metavar="1,2,3", help="token ids")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens", type=whole(1), default=64, metavar="N", help="tokens to generate per prompt (default 64)"
    )
    sampling.add_argument(
        "--temperature", type=shared.temperature, default=0.0, metavar="T", help="0, the default, is greedy"
    )
    sampling.add_argument(
        "--seed", type=shared.seed, metavar="S", help="seed of all random choices (default: a fresh one)"
    )
    sampling.add_argument("--adapter", metavar="DIR", help="a LoRA adapter, as PEFT saves it")
    shared.add_speculation(sampling)
    how = parser.add_argument_group("how it runs")
    how.add_argument(
        "--pp", type=whole(1), metavar="N", help="pipeline stages, one process each (default 1; under torchrun, all)"
    )
    how.add_argument("--graph", choices=MODES, default="full", help="graph mode (default full)")
    shared.add_transport(how)
    shared.add_model(how)
    shared.add_json(parser, "print one JSON object per completion, one per line")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve many requests that all arrive at once, and measure when the host reads each token. With --eval, score a "
        "file of tasks in each graph mode and split instead, and exit with 1 if the scores differ."
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="DIR", help="a checkpoint folder in Hugging Face's format")
    model.add_argument("--preset", choices=PRESETS, help="the dimensions of a known model, with random weights")
    parser.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        help="auto loads the folder's weights, dummy draws random ones (default: auto; with --preset dummy)",
    )
    shared.add_json(parser)
    parser.add_argument("--out", metavar="FILE", help="write the JSON object to a file, too")

    what = parser.add_argument_group("what is measured")
    count, sizes = whole(1, 2**20), ", ".join(f"{name} {a} and {b}" for name, (a, b) in WORKLOADS.items())
    what.add_argument("--workload", choices=WORKLOADS, help=f"tokens in and out: {sizes} (default decode)")
    what.add_argument("--input-len", type=count, metavar="N", help="tokens of each prompt; needs --output-len")
    what.add_argument("--output-len", type=count, metavar="N", help="tokens of each completion; needs --input-len")
    what.add_argument("--num-prompts", type=count, metavar="N", help="requests (default 128)")
    what.add_argument("--temperature", type=shared.temperature, metavar="T", help="0 is greedy (default 1)")
    what.add_argument(
        "--seed", type=shared.seed, metavar="S", help="seed of random weights, prompts and samples (default 0)"
    )
    what.add_argument(
        "--eval",
        metavar="FILE",
        help='score each line of a file instead: {"text": ...} by its perplexity, {"prompt": ..., "answer": ...} by '
        "whether the greedy completion is the answer",
    )

    how = parser.add_argument_group("how it runs")
    how.add_argument(
        "--max-num-seqs", type=count, default=128, metavar="N", help="requests that run at once (default 128)"
    )
    how.add_argument(
        "--max-num-tokens",
        type=whole(1, 2**17),
        metavar="N",
        help="tokens per step (default 2048; with --eval the value of --max-num-seqs, so that mode full replays "
        "prompts too)",
    )
    how.add_argument(
        "--pp",
        type=_splits,
        metavar="N",
        help="pipeline stages, one process each (default 1; under torchrun, all); with --eval several too: 1,2,3",
    )
    how.add_argument(
        "--graph",
        choices=(*MODES, "all"),
        help="graph mode (default full_and_piecewise; with --eval all of them, one by one)",
    )
    how.add_argument(
        "--run-ahead",
        type=whole(0, 2**20),
        default=1,
        metavar="K",
        help="steps that are launched before the first of them is read (default 1)",
    )
    shared.add_speculation(how)
    shared.add_transport(how)
    shared.add_model(how)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Generate from three prompts with the checkpoint that weft ships: eagerly, graphified, pipelined over 2 "
        "stages, and both. Compare tokens, logits and state after every step, and exit with 1 if they differ."
    )
    shared.add_device(parser)
    parser.add_argument(
        "--max-tokens", type=whole(1), default=64, metavar="N", help="tokens to generate per prompt (default 64)"
    )


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predict a decode loop over pipeline stages from config.json alone: tokens/s and what bounds them, the split "
        "of the layers, the number of cohorts, the timeline and the programs. Costs are bytes over bandwidth."
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="DIR", help="a folder with a config.json; weights are not needed")
    model.add_argument("--preset", choices=PRESETS, help="the dimensions of a known model")
    parser.add_argument("--pp", required=True, type=whole(1), metavar="N", help="pipeline stages")
    load = parser.add_argument_group("the load")
    load.add_argument(
        "--requests", type=whole(1), default=128, metavar="R", help="requests that decode together (default 128)"
    )
    load.add_argument(
        "--context",
        type=whole(0),
        metavar="T",
        help="tokens before the one that is generated (default 1024, or half of the model's positions)",
    )
    load.add_argument(
        "--cohorts",
        type=whole(1, 1000),
        metavar="C",
        help="groups of requests that take turns (default: the number that is fastest)",
    )
    load.add_argument(
        "--steps", type=whole(1), default=2, metavar="K", help="steps of each cohort in the timeline (default 2)"
    )
    machine = parser.add_argument_group("the machine")
    machine.add_argument(
        "--bandwidth",
        type=number(lambda value: 0 < value < math.inf, "a finite number > 0, in GB/s"),
        default=4800.0,
        metavar="GB/s",
        help="memory bandwidth of a device (default 4800, an H200's data sheet)",
    )
    machine.add_argument(
        "--link",
        type=number(lambda value: value > 0, "a number > 0, in GB/s"),
        default=math.inf,
        metavar="GB/s",
        help="bandwidth between two ranks (default: no limit)",
    )
    machine.add_argument(
        "--latency",
        type=number(lambda value: 0 <= value < math.inf, "a finite number >= 0, in microseconds"),
        default=0.0,
        metavar="US",
        help="microseconds of a transfer, whatever its size (default 0)",
    )
    machine.add_argument(
        "--capacity", type=whole(1), default=2, metavar="M", help="messages that an edge holds (default 2)"
    )
    shared.add_json(parser)
    parser.add_argument("--svg", metavar="FILE", help="write a picture of the timeline, too")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show what weft would run on here, and why: versions, devices, graph back ends, kernels."
    shared.add_json(parser)


_COMMANDS = {
    "demo": (_add_demo, "[options]", "see that graphs and pipelines change no result"),
    "doctor": (_add_doctor, "[options]", "show versions, devices and back ends"),
    "generate": (_add_generate, "--model DIR --prompt TEXT [options]", "complete prompts with a checkpoint"),
    "bench": (_add_bench, "(--model DIR | --preset NAME) [options]", "measure serving, or score a file of tasks"),
    "plan": (_add_plan, "(--model DIR | --preset NAME) --pp N [options]", "predict a pipeline from a config.json"),
}
"""Of each command: the function that adds its options, their usage, and a line of help."""


def _text(text: str) -> str:
    """A prompt. Python passes bytes that are not text as lone surrogates, which are refused."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid UTF-8: pass text, or --prompt-ids") from error
    if not text:
        raise argparse.ArgumentTypeError("'' is empty: write at least one letter to go on from")
    return text


def _ids(text: str) -> list[int]:
    """Token ids from `1,2,3`."""
    parts = [part.strip() for part in text.split(",")]
    if wrong := [part for part in parts if not re.fullmatch("[0-9]{1,18}", part)]:
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} holds {wrong[0]!r:.60}, which is not a token id: write whole numbers and commas, as in 1,2,3"
        )
    return [int(part) for part in parts]


def _splits(text: str) -> list[int]:
    """Numbers of stages from `1,2,3`."""
    if not re.fullmatch(r"0*[1-9][0-9]{0,5}(,0*[1-9][0-9]{0,5})*", text):
        raise argparse.ArgumentTypeError(f"{text!r:.60}: write a whole number >= 1, or several, as in 1,2,3")
    return [int(part) for part in text.split(",")]
