"""How a command drafts tokens. Nothing here imports torch before the command runs."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.transforms.cli.ranks import Here
    from weft.transforms.engine.speculation import Speculation


def add_drafts(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Add the options."""
    parser.add_argument(
        "--speculate",
        type=int,
        metavar="K",
        help="draft so many tokens a step, to be verified in it: by prompt lookup, or with --draft. No token changes",
    )
    parser.add_argument("--draft", metavar="DIR", help="a checkpoint of the same vocabulary that drafts")


def check_drafts(arguments: argparse.Namespace) -> None:
    """Refuse a draft model without a number of drafts."""
    if arguments.draft is not None and arguments.speculate is None:
        arguments.parser.error("--draft DIR goes with --speculate K")


def open_drafts(here: "Here", count: int | None, folder: str | None, dtype: str | None) -> "Speculation | None":
    """What the options ask for, on this rank; the draft model is loaded on the first one.

    Raises:
        RequestError: no number of drafts.
        Whatever `weft.load` raises.
    """
    from weft.stages.config import load_config
    from weft.stages.model import load
    from weft.transforms.engine.speculation import Speculation

    if count is None:
        return None
    if folder is None:
        return Speculation(count)
    return Speculation(count, model=load(folder, here.device, dtype) if here.first else load_config(folder))
