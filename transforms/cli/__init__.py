"""The command line: `weft generate`, `weft bench`, `weft demo`, `weft plan`, `weft doctor`.

Nothing here imports torch before a command runs, so that `weft --help` answers at once.
"""

import argparse
import contextlib
import difflib
import io
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from weft import __version__
from weft.errors import ConfigWarning, WeftError
from weft.json_text import write_json
from weft.transforms.cli.bench_options import add_bench
from weft.transforms.cli.choices import DTYPES, MODES, TRANSPORTS, add_timeout
from weft.transforms.cli.drafts import add_drafts, check_drafts
from weft.transforms.cli.files import printable
from weft.transforms.cli.presets import PRESETS

if TYPE_CHECKING:
    from weft.transforms.engine.generate import Completion

_INTERRUPTED, _BROKEN_PIPE = 130, 141
"""What a shell reports of a process that SIGINT, or SIGPIPE, ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments after the program's name; None: the process's own.

    Returns:
        0; 1 from a demo, or from `bench --eval`, that found a difference, and from `generate` if a completion ended
        with an error; 2 for bad input, with the error on stderr; 130 after Ctrl-C; 141 where nobody reads the output
        any more.

    Raises:
        SystemExit: from argparse, for `--help` (0) and for arguments that it refuses (2).
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an ASCII terminal is no reason to fail
    try:
        try:
            arguments = parse(argv)
            with _short_warnings():
                return int(arguments.command(arguments))
        finally:
            sys.stdout.flush()
    except WeftError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return _BROKEN_PIPE


@contextlib.contextmanager
def _short_warnings() -> Iterator[None]:
    """Inside, a warning is a line on stderr, without the line of code that gave it; of torchrun's ranks the first one
    alone tells of a configuration."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"warning: {printable(str(message))}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        if os.environ.get("RANK", "0") != "0":
            warnings.simplefilter("ignore", ConfigWarning)
        yield


def _drop_stdout() -> None:
    """Send what is still buffered nowhere: the interpreter would flush it at exit, and complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; those that a command does not have are refused by that command, with the nearest that it has."""
    arguments, strange = build_parser().parse_known_args(argv)
    if strange:
        parser: argparse.ArgumentParser = arguments.parser
        near = difflib.get_close_matches(strange[0].partition("=")[0], parser.format_help().split(), n=1)
        remedy = f"{near[0]}, or see {parser.prog} --help" if near else f"see {parser.prog} --help"
        parser.error(f"unrecognized arguments: {' '.join(strange)} (instead: {remedy})")
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `command`, a function of the parsed arguments, and `parser`, its own."""
    parser = argparse.ArgumentParser(prog="weft", description="Model steps as pure functions on PyTorch.")
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_generate(commands.add_parser("generate", help="complete prompts with a checkpoint", allow_abbrev=False))
    add_bench(commands.add_parser("bench", help="time an engine, or score a file of tasks", allow_abbrev=False))
    _add_demo(commands.add_parser("demo", help="see that graphs and pipelines change nothing", allow_abbrev=False))
    _add_plan(commands.add_parser("plan", help="predict a pipeline from a config.json", allow_abbrev=False))
    _add_doctor(commands.add_parser("doctor", help="versions, devices, back ends", allow_abbrev=False))
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.description = "Complete prompts, all in one batch, and print the completions in the order of the prompts."
    parser.add_argument("--model", required=True, metavar="DIR", help="a checkpoint folder in Hugging Face's format")
    prompts = parser.add_argument_group("prompts", "at least one; each may be repeated, in any mixture")
    prompts.add_argument("--prompt", dest="prompts", action="append", type=_text, metavar="TEXT", help="as text")
    prompts.add_argument(
        "--prompt-ids", dest="prompts", action="append", type=_ids, metavar="1,2,3", help="as token ids"
    )
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens for each prompt (default 64)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, metavar="S", help="of all random choices (default: a fresh one)")
    parser.add_argument("--adapter", metavar="DIR", help="a LoRA, as PEFT saves it")
    add_drafts(parser)
    parser.add_argument(
        "--pp", type=int, metavar="N", help="pipeline stages, a process for each (default 1; torchrun's processes)"
    )
    parser.add_argument(
        "--transport",
        choices=TRANSPORTS,
        help="what carries messages between stages (default: nccl between GPUs, gloo between processes on the CPU; "
        "local: all stages in this process)",
    )
    add_timeout(parser)
    parser.add_argument("--graph", choices=MODES, default="full", help="what is captured and replayed (default full)")
    parser.add_argument("--device", metavar="D", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights and the KV cache (default: the checkpoint's)")
    parser.add_argument("--json", action="store_true", help="one JSON object a completion, one a line")
    parser.set_defaults(command=_generate)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Generate from three prompts eagerly, graphified, pipelined over 2 stages, and both, with the checkpoint that "
        "weft ships; compare tokens, logits and state after every step. Exits 1 if they are not equal."
    )
    parser.add_argument("--device", metavar="D", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens for each prompt (default 64)")
    parser.set_defaults(command=_demo)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predict a decode loop over pipeline stages from config.json alone: the split of the layers, the programs, the "
        "timeline, tokens/s, and how many cohorts. Costs are bytes over bandwidth, not measured."
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="DIR", help="a folder with a config.json; needs no weights")
    model.add_argument("--preset", choices=PRESETS, help="the dimensions of a known model")
    parser.add_argument("--pp", required=True, type=int, metavar="N", help="pipeline stages")
    parser.add_argument("--cohorts", type=int, metavar="C", help="that take turns (default: what is fastest)")
    parser.add_argument("--steps", type=int, default=2, metavar="K", help="of each cohort in the timeline (default 2)")
    parser.add_argument("--requests", type=int, default=128, metavar="R", help="that decode together (default 128)")
    parser.add_argument("--context", type=int, metavar="T", help="tokens of each (default 1024, or half the positions)")
    parser.add_argument(
        "--bandwidth", type=float, default=4800.0, metavar="GB/s", help="of memory (default 4800, an H200's data sheet)"
    )
    parser.add_argument(
        "--link", type=float, default=math.inf, metavar="GB/s", help="between ranks (default: no limit)"
    )
    parser.add_argument("--latency", type=float, default=0.0, metavar="US", help="of a transfer (default 0)")
    parser.add_argument("--capacity", type=int, default=2, metavar="M", help="messages that an edge holds (default 2)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--svg", metavar="FILE", help="also write the timeline's picture, for a browser")
    parser.set_defaults(command=_plan)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = "Say what weft would run on here: versions, devices, graph back ends, kernels; and why."
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(command=_doctor)


def _text(text: str) -> str:
    """A prompt; refuses bytes that are no text, which Python smuggles into `sys.argv` as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid UTF-8: pass text, or --prompt-ids") from error
    return text


def _ids(text: str) -> list[int]:
    """Token ids from `1,2,3`; none from an empty text, which `generate` refuses as an empty prompt."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if wrong := [part for part in parts if not re.fullmatch("[0-9]{1,18}", part)]:
        raise argparse.ArgumentTypeError(
            f"{text!r} holds {wrong[0]!r}, which is no token id: write whole numbers and commas, as in 1,2,3"
        )
    return [int(part) for part in parts]


def _generate(arguments: argparse.Namespace) -> int:
    if not arguments.prompts:
        arguments.parser.error("no prompt: give at least one --prompt TEXT or --prompt-ids 1,2,3")
    check_drafts(arguments)
    from weft.transforms.cli.generate import Wanted, complete

    given = {name: value for name, value in vars(arguments).items() if name in attrs.fields_dict(Wanted)}
    wanted = Wanted(stages=arguments.pp, **given)
    completed = complete(wanted, progress=sys.stderr.isatty())
    if completed is None:
        return 0  # a rank that is not the first: that one prints
    prompts, completions = completed
    if arguments.json:
        print("\n".join(write_json(attrs.asdict(completion)) for completion in completions))
    else:
        _print_completions(prompts, completions)
    failed = [completion.error for completion in completions if completion.error is not None]
    for error in failed:
        print(f"error: {printable(str(error))}", file=sys.stderr)
    return 1 if failed else 0


def _print_completions(prompts: Sequence[str], completions: "Sequence[Completion]") -> None:
    """Each completion behind its prompt; as ids, in the form that `--prompt-ids` takes, where there is no tokenizer."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids = ",".join(map(str, completion.token_ids))
        new = f",{ids}" if completion.text is None else completion.text
        count, reason = len(completion.token_ids), completion.finish_reason
        title = f"[{index + 1} of {len(prompts)}] {count} token{'s' * (count != 1)}, {reason}"
        console.print(Text(title, style="dim"))
        console.print(Text.assemble((printable(prompt), "bold"), printable(new)), end="\n\n")


def _demo(arguments: argparse.Namespace) -> int:
    from weft.transforms.cli.demo_report import demo

    return 0 if demo(arguments.device, arguments.max_tokens, progress=sys.stderr.isatty()) else 1


def _plan(arguments: argparse.Namespace) -> int:
    from weft.transforms.cli.plan import Wanted, predict
    from weft.transforms.cli.plan_report import as_json, show, write_svg

    names = ("model", "preset", "cohorts", "steps", "requests", "context", "bandwidth", "link", "latency", "capacity")
    found = predict(Wanted(stages=arguments.pp, **{name: getattr(arguments, name) for name in names}))
    if arguments.svg is not None:
        write_svg(found, arguments.svg)
    if arguments.json:
        print(as_json(found))
    else:
        show(found)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from weft.transforms.cli.doctor import examine, show

    report = examine()
    if arguments.json:
        print(json.dumps(attrs.asdict(report), indent=2))
    else:
        show(report)
    return 0
