"""`weft bench --eval`: score texts and questions in each graph mode and split, which must not change the scores."""

import gc
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from rich.text import Text
from tqdm import tqdm

from weft.stages.model import Model
from weft.transforms.cli.models import check_models, open_model, read_config
from weft.transforms.cli.options import Bench
from weft.transforms.cli.printing import console, show_tables, table
from weft.transforms.cli.ranks import Here, in_ranks, world_size
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.evaluation.scoring import Score, Task, read_tasks, score
from weft.transforms.engine.options import EngineLimits

_MAX_CONTEXT = 4096


def evaluate(options: Bench, *, progress: bool) -> dict[str, Any] | None:
    """The report, with the scores mode by mode and split by split; None on a rank of torchrun that is not the first.

    Raises:
        RequestError: what `read_tasks` or `score` refuses.
    """
    with options.about(f"--eval {options.eval}"):
        tasks = read_tasks(str(options.eval))
    splits = [attrs.evolve(options, pp=pp) for pp in options.splits]
    for split in splits:
        check_models(split, read_config(options.model))
    scores, labels = list[Score](), list[dict[str, Any]]()
    for split in splits:
        found = in_ranks(score_modes, split, split, tasks, progress)
        if found is None:
            return None
        scores += found
        labels += [{"graph": graph, "stages": split.stages or world_size()} for graph in options.graphs]
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


def score_modes(here: Here, options: Bench, tasks: Sequence[Task], progress: bool) -> list[Score]:
    """The scores of one model in each mode, with an engine for each."""
    shows = progress and here.first
    model, scores = open_model(options, here, progress=shows), []
    for graph in tqdm(options.graphs, desc="eval", unit="mode", disable=not shows):
        scores.append(_score(here, options, model, graph, tasks))
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # the next engine takes what memory is free
    return scores


def _score(here: Here, options: Bench, model: Model, graph: str, tasks: Sequence[Task]) -> Score:
    """The score in one mode. A pipeline has one cohort, so that every split runs the same batches."""
    limits = EngineLimits(
        max_num_reqs=options.max_num_seqs,
        max_num_tokens=options.tokens_per_step,
        max_model_len=min(model.config.max_position_embeddings, _MAX_CONTEXT),
        num_cohorts=1,
    )
    stages, transport, ahead = here.num_stages, here.transport, options.run_ahead
    engine = Engine(model, limits, pipeline=stages, graph=graph, transport=transport, run_ahead=ahead, seed=0)
    with options.about(f"--eval {options.eval}"):
        return score(engine, tasks)


def show(report: dict[str, Any]) -> None:
    """Print the report as a table, and whether the modes agree."""
    out, rows = console(), []
    counts = f"{report['tokens']} tokens, {report['bytes']} bytes, {report['questions']} questions"
    out.print(Text(f"{report['file']}: {counts}, {report['dtype']}", style="bold"), soft_wrap=True)
    numbers = {"bits/byte": "bits_per_byte", "bits/tok": "bits_per_token", "ppl": "perplexity"}
    for one in report["scores"]:
        row = {"graph": one["graph"], "pp": one["stages"]}
        row |= {name: "" if one[key] is None else f"{one[key]:.5f}" for name, key in numbers.items()}
        row["right"] = "" if one["accuracy"] is None else f"{one['accuracy']:.1%}"
        row["replay"] = f"{one['replayed']:.0%}"
        rows.append(row | {"differs": f"{one['difference']:.1e}" if one["agrees"] else "DIFFERS"})
    show_tables(out, table("", rows))
    if len(rows) > 1:
        how = "score the same" if report["agree"] else "do NOT score the same"
        out.print(f"{len(rows)} modes and splits {how} ('differs': the largest difference of a token's logprob).")
