"""`weft bench --eval`: score texts and questions in each graph mode and split, which must not change the scores."""

import gc
import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import attrs
import torch
from rich.text import Text
from tqdm import tqdm

from weft.arguments.json_text import parse_json
from weft.sampling import SamplingParams
from weft.stages.model import Model
from weft.transforms.cli.models import check_models, open_model, read_config
from weft.transforms.cli.options import Bench
from weft.transforms.cli.printing import console, table
from weft.transforms.cli.ranks import Here, in_ranks
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits
from weft.transforms.engine.outputs import CompletionState

_MAX_CONTEXT = 4096
_MAX_FILE = 2**26
"""The most characters of a task file."""
_FORMS = 'one JSON object per line: {"text": "..."}, or {"prompt": "...", "answer": "..."}'
_ROUNDING = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
"""Bits per token by which modes may differ: batches are padded to other shapes, whose products round differently."""


@attrs.frozen
class Task:
    """One line of a task file: a text to be scored, or a prompt with its right answer.

    Args:
        line: its number, from 1.
        text: the text, or the prompt.
        answer: None for a text; else the completion of as many tokens is right if it is the answer.
    """

    line: int
    text: str
    answer: str | None = None


@attrs.frozen
class Score:
    """The score of a model in one mode and split.

    Args:
        graph, num_stages: the mode and the split.
        num_bytes: bytes of the scored texts, without each text's first token, which nothing predicts.
        logprobs: of the scored tokens, one list per text.
        answers: the completion of each question, and whether it is right.
        replayed: the share of the steps that ran as graphs.
        dtype: of the weights.
    """

    graph: str
    num_stages: int
    num_bytes: int
    logprobs: list[list[float]]
    answers: list[tuple[str, bool]]
    replayed: float
    dtype: str

    @property
    def num_tokens(self) -> int:
        """The number of scored tokens."""
        return sum(map(len, self.logprobs))

    @property
    def bits(self) -> float:
        """The bits of all scored tokens."""
        return -math.fsum(logprob for own in self.logprobs for logprob in own) / math.log(2)

    @property
    def bits_per_token(self) -> float | None:
        """None if no token is scored."""
        return self.bits / self.num_tokens if self.num_tokens else None

    def difference(self, other: "Score") -> float:
        """The largest difference of a token's logprob, in nats; infinite if one is NaN, or missing."""
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        found = (abs(a - b) for own, theirs in pairs for a, b in zip_longest(own, theirs, fillvalue=math.nan))
        return max((math.inf if math.isnan(one) else one for one in found), default=0.0)

    def agrees(self, other: "Score") -> bool:
        """Whether all answers are equal, and the bits per token up to rounding."""
        mine, theirs = self.bits_per_token, other.bits_per_token
        if self.answers != other.answers or mine is None or theirs is None:
            return self.answers == other.answers and mine is theirs
        return abs(mine - theirs) <= _ROUNDING[self.dtype]

    def row(self, first: "Score") -> dict[str, Any]:
        """The score as one row of the report, with its difference from the first one."""
        bits = self.bits_per_token
        right = [is_right for _, is_right in self.answers]
        return {
            "graph": self.graph,
            "stages": self.num_stages,
            "bits_per_byte": self.bits / self.num_bytes if self.num_bytes else None,
            "bits_per_token": bits,
            "perplexity": None if bits is None else 2**bits,
            "accuracy": sum(right) / len(right) if right else None,
            "replayed": self.replayed,
            "difference": self.difference(first),
            "agrees": self.agrees(first),
        }


def evaluate(options: Bench, *, progress: bool) -> dict[str, Any] | None:
    """The report, with the scores mode by mode and split by split; None on a rank of torchrun that is not the first.

    Raises:
        RequestError: what `read_tasks` refuses, or a question longer than the model has positions for.
        Whatever `check_models`, `weft.load`, `Engine` and `in_ranks` raise.
    """
    tasks, scores = read_tasks(options), list[Score]()
    splits = [attrs.evolve(options, pp=pp) for pp in options.splits]
    for split in splits:
        check_models(split, read_config(options.model))
    for split in splits:
        found = in_ranks(score_modes, split, split, tasks, progress)
        if found is None:
            return None
        scores += found
    first = scores[0]
    return {
        "file": options.eval,
        "dtype": first.dtype,
        "texts": len(first.logprobs),
        "tokens": first.num_tokens,
        "bytes": first.num_bytes,
        "questions": len(first.answers),
        "agree": all(score.agrees(first) for score in scores),
        "scores": [score.row(first) for score in scores],
    }


def read_tasks(options: Bench) -> list[Task]:
    """The tasks of a file; empty lines are skipped.

    Raises:
        RequestError: the file cannot be read, a line is not a task, or there is none.
    """
    flag, text = f"--eval {options.eval}", ""
    try:
        with Path(str(options.eval)).open(encoding="utf-8") as file:
            text = file.read(_MAX_FILE + 1)
    except (OSError, ValueError) as error:
        options.refuse(flag, f"it cannot be read: {error}", "a file of UTF-8 text")
    if len(text) > _MAX_FILE:
        options.refuse(flag, f"more than {_MAX_FILE} characters", "a part of it")
    tasks = [_task(options, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not tasks:
        options.refuse(flag, "no task in it", _FORMS)
    return tasks


def _task(options: Bench, number: int, line: str) -> Task:
    flag, found = f"--eval {options.eval}", None
    try:
        found = parse_json(line)
    except ValueError as error:
        options.refuse(flag, f"line {number} is not JSON: {error}", _FORMS)
    names = sorted(found) if isinstance(found, dict) else []
    if names not in (["text"], ["answer", "prompt"]):
        options.refuse(flag, f"line {number} has {', '.join(map(repr, names)) or 'no names'}", _FORMS)
    for name in names:
        if not isinstance(found[name], str) or not found[name]:
            seen = f"line {number} has {name}={found[name]!r:.200}"
            options.refuse(flag, seen, f"{name} is a string, and not empty")
    return Task(number, found.get("text") or found["prompt"], found.get("answer"))


def score_modes(here: Here, options: Bench, tasks: Sequence[Task], progress: bool) -> list[Score]:
    """The scores of one model in each mode, with an engine for each.

    A pipeline has one cohort, so that every split runs the same batches.
    """
    shows = progress and here.first
    model, scores = open_model(options, here, progress=shows), []
    most = min(model.config.max_position_embeddings, _MAX_CONTEXT)
    for task in tasks:
        length = 0 if task.answer is None else len(model.encode(task.text)) + _num_tokens(model, task.answer)
        if length > most:
            seen = f"line {task.line} has {length} tokens, including the answer"
            options.refuse(f"--eval {options.eval}", seen, f"at most {most}")
    limits = EngineLimits(
        max_num_reqs=options.max_num_seqs,
        max_num_tokens=options.tokens_per_step,
        max_model_len=most,
        num_cohorts=1,
    )
    for graph in tqdm(options.graphs, desc="eval", unit="mode", disable=not shows):
        scores.append(_score(here, options, model, graph, limits, tasks))
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # the next engine takes what memory is free
    return scores


def _score(here: Here, options: Bench, model: Model, graph: str, limits: EngineLimits, tasks: Sequence[Task]) -> Score:
    engine = Engine(
        model,
        limits,
        pipeline=here.num_stages,
        graph=graph,
        transport=here.transport,
        run_ahead=options.run_ahead,
        seed=0,
    )
    greedy, scored = SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, prompt_logprobs=0)
    texts, most = [task.text for task in tasks if task.answer is None], limits.max_model_len or _MAX_CONTEXT
    questions = [(task.text, task.answer) for task in tasks if task.answer is not None]
    parts = [[engine.add(part, scored, max_tokens=1) for part in windows(model.encode(text), most)] for text in texts]
    asked = [engine.add(prompt, greedy, max_tokens=_num_tokens(model, answer)) for prompt, answer in questions]
    tracks: dict[str, CompletionState] = {output.id: output.track for output in engine}
    answers = [tracks[name].text for name in asked]
    modes = engine.stats().modes
    return Score(
        graph,
        here.num_stages,
        sum(_scored_bytes(model, text) for text in texts),
        [[logprob for name in names for logprob in tracks[name].prompt_logprobs] for names in parts],
        [(text, text == answer) for text, (_, answer) in zip(answers, questions, strict=True)],
        1 - modes.get("none", 0) / max(sum(modes.values()), 1),
        str(model.dtype).removeprefix("torch."),
    )


def windows(ids: Sequence[int], most: int) -> Iterator[list[int]]:
    """Parts of fewer than `most` tokens, to leave room for the token that is generated. Each part begins with the last
    token of the one before, so that every token but the first is predicted once.

    >>> list(windows([1, 2, 3, 4, 5, 6], 4))
    [[1, 2, 3], [3, 4, 5], [5, 6]]
    """
    for start in range(0, len(ids) - 1, most - 2):
        yield list(ids[start : start + most - 1])


def _num_tokens(model: Model, answer: str) -> int:
    assert model.tokenizer is not None, "the prompt was encoded with it"
    return len(model.tokenizer.encode(answer, add_special_tokens=False).ids)


def _scored_bytes(model: Model, text: str) -> int:
    """The bytes of a text after its first token, which may be a special one without bytes."""
    assert model.tokenizer is not None, "the text was encoded with it"
    return len(text[model.tokenizer.encode(text).offsets[0][1] :].encode())


def show(report: dict[str, Any]) -> None:
    """Print the report as a table, and whether the modes agree."""
    out, rows = console(), []
    counts = f"{report['tokens']} tokens, {report['bytes']} bytes, {report['questions']} questions"
    out.print(Text(f"{report['file']}: {counts}, {report['dtype']}", style="bold"), soft_wrap=True)
    numbers = {"bits/byte": "bits_per_byte", "bits/tok": "bits_per_token", "ppl": "perplexity"}
    for score in report["scores"]:
        row = {"graph": score["graph"], "pp": score["stages"]}
        row |= {name: "" if score[key] is None else f"{score[key]:.5f}" for name, key in numbers.items()}
        row["right"] = "" if score["accuracy"] is None else f"{score['accuracy']:.1%}"
        row["replay"] = f"{score['replayed']:.0%}"
        rows.append(row | {"differs": f"{score['difference']:.1e}" if score["agrees"] else "DIFFERS"})
    out.print(table("", rows))
    out.print()
    if len(rows) > 1:
        how = "score the same" if report["agree"] else "do NOT score the same"
        out.print(f"{len(rows)} modes and splits {how} ('differs': the largest difference of a token's logprob).")
