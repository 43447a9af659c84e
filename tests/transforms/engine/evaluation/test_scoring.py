"""Scores of an engine's model: a task file is read, a second score on the same engine is the same, and limits hold."""

import json
from pathlib import Path
from typing import Any

import pytest

from weft.errors import RequestError
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.evaluation.scoring import Task, read_tasks, score
from weft.transforms.engine.options import EngineLimits


def engine(max_model_len: int) -> Engine:
    limits = EngineLimits(max_num_reqs=4, max_model_len=max_model_len, num_cohorts=1)
    return Engine(load(DEMO, "cpu", "float32"), limits, graph="none", seed=0)


def test_tasks_of_a_file_are_scored_again_to_the_same_bits(tmp_path: Path) -> None:
    lines = [{"text": "A list is a list. " * 4}, {"prompt": "A list i", "answer": "s"}]
    (tmp_path / "tasks.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    tasks = read_tasks(tmp_path / "tasks.jsonl")
    assert [task.name for task in tasks] == ["line 1", "line 3"]
    own = engine(32)
    first, again = score(own, tasks), score(own, tasks)
    header, row = str(first).splitlines()
    assert header.split() == ["bits/byte", "bits/tok", "ppl", "right", "replay"]
    assert row.split()[1] == f"{first.bits_per_token:.5f}"
    assert first == again
    assert (first.num_tokens, len(first.answers), first.replayed) == (4 * 18 - 1, 1, 0.0)
    assert first.difference(again) == 0.0
    assert first.agrees(again)


def test_a_question_longer_than_the_engines_limit_is_named() -> None:
    with pytest.raises(RequestError, match=r"(?s)score\(engine, tasks\).*the last one has 33 tokens.*at most 32"):
        score(engine(32), [Task("a"), Task("a" * 30, "abc", name="the last one")])


@pytest.mark.parametrize("wrong", [{"text": ""}, {"text": 5}, {"text": "a", "answer": ""}])
def test_a_task_without_text_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="instead: a string that is not empty"):
        Task(**wrong)
