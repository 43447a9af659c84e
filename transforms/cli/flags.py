"""The kinds of values that flags take: how each is parsed from text, and which are refused.

Importing this module imports neither torch, rich nor numpy.
"""

import argparse
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

# The kind of an option's value: keywords of `argparse.ArgumentParser.add_argument`.
Kind = Mapping[str, Any]


def value(
    metavar: str, convert: Callable[[str], Any], allowed: Callable[[Any], bool], instead: str
) -> Kind:
    """A value that is converted from text; `instead` describes the allowed values in errors.

    >>> value("X", float, lambda x: x > 0, "a number > 0")["type"]("2.5")
    2.5
    """

    def parse(text: str) -> Any:
        try:
            if allowed(parsed := convert(text)):
                return parsed
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r:.60}: write {instead}")

    return {"metavar": metavar, "type": parse}


def whole(metavar: str, least: int = 1, most: int = 10**9) -> Kind:
    """A whole number within limits."""
    return value(
        metavar, int, lambda n: least <= n <= most, f"a whole number from {least} to {most}"
    )


def _text(text: str) -> str:
    """A prompt. Python decodes invalid UTF-8 on the command line to lone surrogates; refuse it."""
    if re.search("[\ud800-\udfff]", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not valid UTF-8: pass text, or --prompt-ids")
    if not text:
        raise argparse.ArgumentTypeError("'' is empty: write at least one letter to go on from")
    return text


def _ids(text: str) -> list[int]:
    """Token ids from `1,2,3`."""
    parts = [part.strip() for part in text.split(",")]
    # `\d` would also match digits of other scripts. A number of 18 digits always fits into an
    # int64.
    if wrong := [part for part in parts if not re.fullmatch("[0-9]{1,18}", part)]:
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} holds {wrong[0]!r:.60}, which is not a token id: write whole numbers and"
            " commas, as in 1,2,3"
        )
    return [int(part) for part in parts]


def _named_folder(text: str) -> tuple[str, str] | None:
    name, _, folder = text.partition("=")
    if name and folder:
        return (name, folder)
    return None


def _splits(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


NAMED = value(
    "MODULE:F",
    str,
    lambda parsed: re.fullmatch(r"[\w.]+:\w+", parsed) is not None,
    "module:function, as in steering:steered",
)
DIR, FILE, DEVICE, NAME = ({"metavar": name} for name in ("DIR", "FILE", "D", "NAME"))
DIRS = {"metavar": "DIR", "action": "append"}
WORD = {"metavar": "MODEL", "positional": True}
CERTIFICATES = {"metavar": "CERTIFICATES", "positional": True}
SWITCH = {"action": "store_true"}
TEXT_ONCE = {"metavar": "TEXT"}
TEXT = {"metavar": "TEXT", "type": _text, "action": "append"}
ADAPTER = {
    **value("NAME=DIR", _named_folder, bool, "a name, = and a folder, as in sql=adapters/sql"),
    "action": "append",
}
IDS = {
    "metavar": "1,2,3",
    "type": _ids,
    "action": "append",
    "help": "token ids; may be repeated, too",
}
COUNT, SEED = whole("N", 1, 2**20), whole("S", -(2**63), 2**63 - 1)
SPLITS = value(
    "N",
    _splits,
    lambda parsed: 1 <= min(parsed) <= max(parsed) < 10**6,
    "a whole number >= 1, or several: 1,2,3",
)
TEMPERATURE = value("T", float, lambda x: 0 <= x <= 1e38, "a finite number >= 0; 0 is greedy")
SECONDS = value(
    "S",
    float,
    lambda x: 0 < x <= 1e6,
    "a number of seconds, greater than 0 and at most 1e6, as in 30",
)
BANDWIDTH = value("GB/s", float, lambda x: 0 < x < math.inf, "a finite number > 0, in GB/s")
GIGABYTES = value("GB", float, lambda x: 0 < x < math.inf, "a finite number > 0, in GB")
LINK = value("GB/s", float, lambda x: x > 0, "a number > 0, in GB/s")
LATENCY = value("US", float, lambda x: 0 <= x < math.inf, "a finite number >= 0, in microseconds")
# These repeat names in weft.stages.choices, which would import torch.
DTYPES = "float32", "bfloat16", "float16"
KV_DTYPES = ("float8_e4m3fn",)
EXPERTS = "columns", "whole"
# Likewise of weft.ops.attention.backends.
ATTENTION = (
    "auto",
    "reference",
    "triton",
    "torch",
    "flashinfer",
)
POLICIES = "fcfs", "priority"
TRANSPORTS = "local", "threads", "gloo", "nccl", "peer"
