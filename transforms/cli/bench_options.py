"""The options of `weft bench`. Nothing here imports torch before the command runs."""

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.json_text import write_json
from weft.transforms.cli.choices import DTYPES, MODES, TRANSPORTS, add_timeout
from weft.transforms.cli.drafts import add_drafts, check_drafts
from weft.transforms.cli.files import write_file
from weft.transforms.cli.presets import PRESETS

if TYPE_CHECKING:
    from weft.transforms.cli.ranks import Place
    from weft.transforms.cli.sources import Source

WORKLOADS = {"decode": (2, 512), "prefill": (512, 64), "mixed": (512, 512)}
"""Tokens of each prompt and of each completion."""

_DEFAULTS = {"num_prompts": 128, "temperature": 1.0, "seed": 0}
"""Of options that say what is timed. They are filled in late: `--eval`, which has no use for them, refuses them."""


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the options, and the function that runs the command."""
    parser.description = (
        "Serve many requests at once, all there from the start, and time the tokens where the host reads them. Or, "
        "with --eval, score a file of tasks in each graph mode and split, and exit with 1 if they differ."
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="DIR", help="a checkpoint folder in Hugging Face's format")
    model.add_argument("--preset", choices=PRESETS, help="the dimensions of a known model")
    parser.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        help="the folder's weights, or random ones drawn on the device (default auto; of a preset dummy)",
    )
    _add_what(parser)
    _add_how(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write that object to a file too")
    parser.set_defaults(command=_bench)


def _add_what(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is measured")
    sizes = ", ".join(f"{name} {a} to {b}" for name, (a, b) in WORKLOADS.items())
    what.add_argument("--workload", choices=WORKLOADS, help=f"tokens in and out: {sizes} (default decode)")
    what.add_argument("--input-len", type=int, metavar="N", help="tokens of each prompt, with --output-len")
    what.add_argument("--output-len", type=int, metavar="N", help="tokens of each completion, with --input-len")
    what.add_argument("--num-prompts", type=int, metavar="N", help="requests (default 128)")
    what.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default 1)")
    what.add_argument("--seed", type=int, metavar="S", help="of random weights, prompts and samples (default 0)")
    what.add_argument(
        "--eval",
        metavar="FILE",
        help='instead: score the lines of a file, {"text": ...} by their perplexity, {"prompt": ..., "answer": ...} by '
        "whether the greedy completion is the answer",
    )


def _add_how(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how it runs")
    how.add_argument("--max-num-seqs", type=int, default=128, metavar="N", help="under way at once (default 128)")
    how.add_argument(
        "--max-num-tokens",
        type=int,
        metavar="N",
        help="of a step (default 2048; with --eval --max-num-seqs, so that mode full replays prompts too)",
    )
    how.add_argument(
        "--pp",
        type=_splits,
        metavar="N",
        help="pipeline stages, a process for each (default 1; torchrun's processes); with --eval also several: 1,2,3",
    )
    how.add_argument(
        "--graph", choices=(*MODES, "all"), help="a mode (default full_and_piecewise; with --eval all, one by one)"
    )
    how.add_argument("--run-ahead", type=int, default=1, metavar="K", help="steps launched before one is read (1)")
    add_drafts(how)
    how.add_argument("--transport", choices=TRANSPORTS, help="what carries messages between stages; as in generate")
    add_timeout(how)
    how.add_argument("--device", metavar="D", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    how.add_argument("--dtype", choices=DTYPES, help="of the weights and the KV cache (default: the checkpoint's)")


def _splits(text: str) -> list[int]:
    """Numbers of stages from `1,2,3`."""
    if not re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number, or several with commas, as in 1,2,3")
    return [int(part) for part in text.split(",")]


def _bench(arguments: argparse.Namespace) -> int:
    out = arguments.out
    if out is not None and (os.path.isdir(out) or not os.path.isdir(out.parent)):
        arguments.parser.error(f"--out {out!s:.300}: a file in a folder that is there")
    return _eval(arguments) if arguments.eval is not None else _time(arguments)


def _time(arguments: argparse.Namespace) -> int:
    for name, default in _DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    input_len, output_len = _lengths(arguments)
    if arguments.graph == "all" or len(arguments.pp or [1]) > 1:
        arguments.parser.error("one run is timed: --graph all, and several numbers for --pp, go with --eval")
    source, place = _source(arguments), _place(arguments)
    from weft.transforms.cli.bench import Wanted, bench
    from weft.transforms.cli.bench_report import as_dict, show

    check_drafts(arguments)
    names = ("num_prompts", "max_num_seqs", "temperature", "seed", "run_ahead", "speculate", "draft")
    wanted = Wanted(
        source=source,
        input_len=input_len,
        output_len=output_len,
        max_num_tokens=2048 if arguments.max_num_tokens is None else arguments.max_num_tokens,
        graph=arguments.graph or "full_and_piecewise",
        place=place,
        **{name: getattr(arguments, name) for name in names},
    )
    found = bench(wanted, progress=sys.stderr.isatty())
    if found is None:
        return 0  # a rank that is not the first: that one prints
    if not _write(arguments, as_dict(wanted, found)):
        show(wanted, found)
    return 0


def _lengths(arguments: argparse.Namespace) -> tuple[int, int]:
    given = (arguments.input_len, arguments.output_len)
    if (given[0] is None) != (given[1] is None):
        arguments.parser.error("--input-len and --output-len go together")
    if given[0] is not None and arguments.workload is not None:
        arguments.parser.error("--workload says both lengths: leave it out, or --input-len and --output-len")
    return WORKLOADS[arguments.workload or "decode"] if given[0] is None else given


def _eval(arguments: argparse.Namespace) -> int:
    names = ("workload", "input_len", "output_len", "speculate", "draft", *_DEFAULTS)
    if useless := [name for name in names if getattr(arguments, name) is not None]:
        arguments.parser.error(f"--{useless[0].replace('_', '-')} says what is timed, and --eval times nothing")
    source, place = _source(arguments), _place(arguments)
    if source.dummy:
        arguments.parser.error("--eval scores the weights and the tokenizer of --model DIR, not random weights")
    from weft.transforms.cli.evaluate import Wanted, evaluate
    from weft.transforms.cli.evaluate_report import agree, as_dict, show

    tokens = arguments.max_num_seqs if arguments.max_num_tokens is None else arguments.max_num_tokens
    graphs = MODES if arguments.graph in (None, "all") else (arguments.graph,)
    limits = (arguments.max_num_seqs, tokens, arguments.run_ahead)
    scores = evaluate(
        Wanted(source, arguments.eval, graphs, arguments.pp, *limits, place), progress=sys.stderr.isatty()
    )
    if scores is None:
        return 0
    if not _write(arguments, as_dict(arguments.eval, scores)):
        show(arguments.eval, scores)
    return 0 if agree(scores) else 1


def _source(arguments: argparse.Namespace) -> "Source":
    if arguments.preset is not None and arguments.load_format == "auto":
        arguments.parser.error("--load-format auto: a preset has no weights; --load-format dummy, or --model DIR")
    from weft.transforms.cli.sources import Source

    dummy = arguments.preset is not None or arguments.load_format == "dummy"
    return Source(arguments.model, arguments.preset, dummy, arguments.dtype)


def _place(arguments: argparse.Namespace) -> "Place":
    from weft.transforms.cli.ranks import Place

    stages = arguments.pp[0] if arguments.pp else None
    return Place("weft bench", stages, arguments.transport, arguments.device, arguments.timeout)


def _write(arguments: argparse.Namespace, report: dict[str, Any]) -> bool:
    """Write the report where it was asked for; returns whether that is the standard output."""
    text = write_json(report, indent=2)
    if arguments.out is not None:
        write_file(arguments.out, text + "\n", f"weft bench --out {arguments.out}")
    if arguments.json:
        print(text)
    return bool(arguments.json)
