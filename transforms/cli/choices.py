"""What options of several commands take: the names that other modules define, without their import of torch."""

import argparse
import math

MODES = ("none", "piecewise", "full_decode_only", "full", "full_and_piecewise")
"""What `--graph` takes: `weft.transforms.graphs.ladder.MODES`."""

DTYPES = ("float32", "bfloat16", "float16")
"""What `--dtype` takes: the names in `weft.stages.model.DTYPES`."""

TRANSPORTS = ("local", "threads", "gloo", "nccl", "peer")
"""What `--transport` takes."""


def add_timeout(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Add `--timeout`."""
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="seconds that a stage may keep another one waiting before both stop (default 30); a process that loads "
        "is waited for",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}: write a number of seconds, more than 0 and 1e6 at most, as in 30")
    return seconds
