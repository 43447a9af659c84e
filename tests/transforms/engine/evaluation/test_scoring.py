"""Scores of an engine's model: a task file is read, a second score on the same engine is the same,
and limits hold."""

import json
import math
from pathlib import Path
from typing import Any

import attrs
import pytest

from weft.errors import RequestError
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.evaluation.scoring import Score, Task, read_tasks, score
from weft.transforms.engine.options import EngineLimits


def engine(max_model_len: int) -> Engine:
    limits = EngineLimits(max_num_reqs=4, max_model_len=max_model_len, num_cohorts=1)
    return Engine(load(DEMO, "cpu", "float32"), limits, graph="none", seed=0)


def test_tasks_of_a_file_are_scored_again_to_the_same_bits(tmp_path: Path) -> None:
    lines = [{"text": "A list is a list. " * 4}, {"prompt": "A list i", "answer": "s"}]
    (tmp_path / "tasks.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    tasks = read_tasks(tmp_path / "tasks.jsonl")
    assert [task.name for task in tasks] == ["line 1", "line 3"]
    scorer = engine(32)
    first = score(scorer, tasks)
    again = score(scorer, tasks)
    header, row = str(first).splitlines()
    assert header.split() == ["bits/byte", "bits/tok", "ppl", "right", "replay"]
    assert row.split()[1] == f"{first.bits_per_token:.5f}"
    assert first == again
    assert (first.num_tokens, len(first.answers), first.replayed) == (4 * 18 - 1, 1, 0.0)
    assert first.difference(again) == 0.0
    assert first.agrees(again)


TEXTS = Score(
    num_bytes=4,
    logprobs=[[math.log(0.5)], [math.log(0.125)]],
    answers=[],
    replayed=0.5,
    dtype="float32",
)
QUESTIONS = Score(
    num_bytes=0, logprobs=[], answers=[("a", True), ("b", False)], replayed=1.0, dtype="float32"
)


def test_figures_are_those_of_the_probabilities() -> None:
    figures = {
        "bits_per_byte": 1.0,
        "bits_per_token": 2.0,
        "perplexity": 4.0,
        "accuracy": None,
        "replayed": 0.5,
    }
    assert TEXTS.figures == pytest.approx(figures)
    figures = {
        "bits_per_byte": None,
        "bits_per_token": None,
        "perplexity": None,
        "accuracy": 0.5,
        "replayed": 1.0,
    }
    assert QUESTIONS.figures == figures
    assert [*TEXTS.row.values()] == ["1.00000", "2.00000", "4.00000", None, "50%"]
    assert [*QUESTIONS.row.values()] == [None, None, None, "50.0%", "100%"]


def test_scores_agree_up_to_rounding_and_in_every_answer() -> None:
    both = attrs.evolve(TEXTS, answers=QUESTIONS.answers)
    for one in (TEXTS, QUESTIONS, both):
        assert one.agrees(one)
    near = attrs.evolve(TEXTS, logprobs=[[math.log(0.5) + 1e-7], [math.log(0.125)]])
    assert TEXTS.agrees(near)
    assert not TEXTS.agrees(
        attrs.evolve(TEXTS, logprobs=[[math.log(0.5) + 1e-2], [math.log(0.125)]])
    )
    assert not both.agrees(QUESTIONS)
    assert not QUESTIONS.agrees(both)
    assert not both.agrees(attrs.evolve(both, answers=[("a", True), ("c", False)]))
    assert not QUESTIONS.agrees(attrs.evolve(QUESTIONS, answers=[("a", True)]))


@pytest.mark.parametrize(
    ("before", "after", "replayed"),
    [
        ({}, {"none": 1, "full": 3}, 0.75),
        ({"none": 4, "full": 1}, {"none": 4, "full": 7}, 1.0),
        ({"full": 2}, {"full": 2, "none": 2}, 0.0),
        ({}, {"full": 5}, 1.0),
        ({"full": 5}, {"full": 5}, 1.0),
    ],
)
def test_the_share_of_graphs_is_of_the_steps_of_this_score(
    before: dict[str, int], after: dict[str, int], replayed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = engine(32)
    stats = scorer.stats()
    counts = iter((before, after))
    monkeypatch.setattr(scorer, "stats", lambda: attrs.evolve(stats, modes=next(counts)))
    assert score(scorer, [Task("A list")]).replayed == replayed


def test_a_question_longer_than_the_engines_limit_is_named() -> None:
    with pytest.raises(
        RequestError, match=r"(?s)score\(engine, tasks\).*the last one has 33 tokens.*at most 32"
    ):
        score(engine(32), [Task("a"), Task("a" * 30, "abc", name="the last one")])


@pytest.mark.parametrize("wrong", [{"text": ""}, {"text": 5}, {"text": "a", "answer": ""}])
def test_a_task_without_text_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="instead: a string that is not empty"):
        Task(**wrong)
