"""`weft bench --eval`, shown: as a table, or as one JSON object."""

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.transforms.cli.evaluate import Score


def agree(scores: Sequence[Score]) -> bool:
    """Whether all modes and splits scored what the first one did."""
    return all(score.agrees(scores[0]) for score in scores)


def as_dict(file: str, scores: Sequence[Score]) -> dict[str, Any]:
    """Everything but the single tokens, for a JSON object; null for what is no finite number."""
    first = scores[0]
    return {
        "file": file,
        "dtype": first.dtype,
        "texts": len(first.logprobs),
        "tokens": first.num_tokens,
        "bytes": first.num_bytes,
        "questions": len(first.answers),
        "agree": agree(scores),
        "scores": [_row(score, first) for score in scores],
    }


def _row(score: Score, first: Score) -> dict[str, Any]:
    row = {
        "graph": score.graph,
        "stages": score.num_stages,
        "bits_per_byte": score.bits_per_byte,
        "bits_per_token": score.bits_per_token,
        "perplexity": score.perplexity,
        "accuracy": score.accuracy,
        "replayed": 1 - score.graphs["none"],
        "difference": score.difference(first),
        "agrees": score.agrees(first),
    }
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}


def show(file: str, scores: Sequence[Score], console: Console | None = None) -> None:
    """Print the table, and in a sentence whether the modes agree."""
    console, report = console or Console(highlight=False), as_dict(file, scores)
    counts = f"{report['tokens']} tokens, {report['bytes']} bytes, {report['questions']} questions"
    console.print(Text(f"{file}: {counts}, {report['dtype']}", style="bold"), soft_wrap=True)
    table = Table(header_style="dim", box=None, pad_edge=False)
    for index, name in enumerate(("graph", "pp", "bits/byte", "bits/tok", "ppl", "right", "replay", "differs")):
        table.add_column(name, no_wrap=True, justify="right" if index else "left")
    for row in report["scores"]:
        numbers = [_number(row[name]) for name in ("bits_per_byte", "bits_per_token", "perplexity")]
        right = "" if row["accuracy"] is None else f"{row['accuracy']:.1%}"
        differs = f"{row['difference']:.1e}" if row["agrees"] else "DIFFERS"
        table.add_row(row["graph"], str(row["stages"]), *numbers, right, f"{row['replayed']:.0%}", differs)
    console.print(table)
    console.print()
    if len(scores) > 1 or not report["agree"]:
        how = "score the same" if report["agree"] else "do NOT score the same"
        console.print(f"{len(scores)} modes and splits {how} ('differs': the most, of a token's logprob).")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5f}"
