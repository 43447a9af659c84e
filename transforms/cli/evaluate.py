"""`weft bench --eval`: score texts and questions in each graph mode and split, which must not change the scores."""

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from rich.text import Text
from tqdm import tqdm

from weft.display.tables import Table
from weft.stages.model import Model
from weft.transforms.cli.models import make_engine, open_model, read_config
from weft.transforms.cli.options import Bench
from weft.transforms.cli.printing import heading
from weft.transforms.cli.ranks import Here, in_ranks, world_size
from weft.transforms.engine.evaluation.scoring import Score, Task, read_tasks, score

_MAX_CONTEXT = 4096


def evaluate(options: Bench) -> dict[str, Any]:
    """The report, with the scores mode by mode and split by split.

    Raises:
        RequestError: what `read_tasks` or `score` refuses.
    """
    with options.about(f"--eval {options.eval}"):
        tasks = read_tasks(str(options.eval))
    splits = [attrs.evolve(options, pp=pp) for pp in options.splits]
    for split in splits:
        read_config(split)
    scores = [one for split in splits for one in in_ranks(score_modes, split, split, tasks)]
    labels = [{"graph": graph, "stages": s.stages or world_size()} for s in splits for graph in options.graphs]
    first = scores[0]
    compared = [{"difference": one.difference(first), "agrees": one.agrees(first)} for one in scores]
    return {
        "file": options.eval,
        "dtype": first.dtype,
        "texts": len(first.logprobs),
        "tokens": first.num_tokens,
        "bytes": first.num_bytes,
        "questions": len(first.answers),
        "agree": all(one["agrees"] for one in compared),
        "scores": [a | one.figures | b for a, one, b in zip(labels, scores, compared, strict=True)],
    }


def score_modes(here: Here, options: Bench, tasks: Sequence[Task]) -> list[Score]:
    """The scores of one model in each mode, with an engine for each."""
    model, scores = open_model(options, here), []
    for graph in tqdm(options.graphs, desc="eval", unit="mode", disable=not here.progress):
        scores.append(_score(here, options, model, graph, tasks))
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # the next engine takes what memory is free
    return scores


def _score(here: Here, options: Bench, model: Model, graph: str, tasks: Sequence[Task]) -> Score:
    """The score in one mode. A pipeline has one cohort, so that every split runs the same batches."""
    length = min(model.config.max_position_embeddings, _MAX_CONTEXT)
    engine = make_engine(options, here, model, graph, length, num_cohorts=1)
    with options.about(f"--eval {options.eval}"):
        return score(engine, tasks)


def tables(report: dict[str, Any]) -> Iterator[Any]:
    """The report, to be read: the scores, and whether the modes agree."""
    counts = f"{report['tokens']} tokens, {report['bytes']} bytes, {report['questions']} questions"
    yield heading(f"{report['file']}: {counts}, {report['dtype']}")
    numbers, rows = {"bits/byte": "bits_per_byte", "bits/tok": "bits_per_token", "ppl": "perplexity"}, []
    for one in report["scores"]:
        row = {"graph": one["graph"], "pp": one["stages"]}
        row |= {name: "" if one[key] is None else f"{one[key]:.5f}" for name, key in numbers.items()}
        row["right"] = "" if one["accuracy"] is None else f"{one['accuracy']:.1%}"
        row["replay"] = f"{one['replayed']:.0%}"
        rows.append(row | {"differs": f"{one['difference']:.1e}" if one["agrees"] else "DIFFERS"})
    yield from (Table.of(rows), "")
    if len(rows) > 1:
        how = "score the same" if report["agree"] else "do NOT score the same"
        yield Text(f"{len(rows)} modes and splits {how} ('differs': the largest difference of a token's logprob).")
