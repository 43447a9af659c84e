"""`score`: the perplexity and the accuracy, on texts and questions, of the model that an engine
runs."""

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import attrs

from weft.arguments.checks import Rule, check_values
from weft.arguments.json_text import read_json_lines
from weft.batches.sampling import SamplingParams
from weft.display.tables import Table, Tabled
from weft.errors import RequestError
from weft.stages.model import Model
from weft.transforms.engine.completion import CompletionState
from weft.transforms.engine.engine import Engine

_FORMS = (
    'one JSON object per line, of texts that are not empty: {"text": "..."}, or {"prompt": "...",'
    ' "answer": "..."}'
)
# The most bits per token by which modes may differ: they pad batches to different shapes, whose
# matrix products round differently.
_ROUNDING = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}

_TASK_RULES: dict[str, Rule] = {
    "text": (lambda text: isinstance(text, str) and text, "a string that is not empty"),
    "answer": (
        lambda value: value is None or (isinstance(value, str) and value),
        "a string that is not empty, or None",
    ),
}


@attrs.frozen
class Task:
    """A text to be scored, or a prompt with its right answer.

    Args:
        text: the text, or the prompt.
        answer: None for a text. Otherwise the right answer: the model's completion of as many
            tokens has to equal it.
        name: its name in errors.

    Raises:
        RequestError: the text or the answer is empty, or is not a string.
    """

    text: str
    answer: str | None = None
    name: str = "a task"

    def __attrs_post_init__(self) -> None:
        check_values("Task(...)", _TASK_RULES, {"text": self.text, "answer": self.answer})


# The column title of each figure, and its format.
_COLUMNS = {
    "bits_per_byte": ("bits/byte", ".5f"),
    "bits_per_token": ("bits/tok", ".5f"),
    "perplexity": ("ppl", ".5f"),
    "accuracy": ("right", ".1%"),
    "replayed": ("replay", ".0%"),
}


@attrs.frozen(repr=False)
class Score(Tabled):
    """The score of a model on tasks. It prints as a table of its figures.

    Args:
        num_bytes: bytes of the scored texts, without each text's first token, which has no
            prediction.
        logprobs: the logprobs of the scored tokens, one list per text.
        answers: the completion of each question, and whether it is right.
        replayed: the share of steps that ran as graphs.
        dtype: the dtype of the weights.
    """

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
        """The information content of all scored tokens, in bits."""
        # `fsum` rounds once. A running sum would add an error for each token, in the figure that
        # modes are compared by.
        return -math.fsum(
            logprob for text_logprobs in self.logprobs for logprob in text_logprobs
        ) / math.log(2)

    @property
    def bits_per_token(self) -> float | None:
        """The mean bits of a scored token; None if no token is scored."""
        if self.num_tokens:
            return self.bits / self.num_tokens
        return None

    @property
    def figures(self) -> dict[str, float | None]:
        """The figures by name; a figure of texts, or of questions, is None if there are none."""
        bits = self.bits_per_token
        right = [is_right for _, is_right in self.answers]
        return {
            "bits_per_byte": self.bits / self.num_bytes if self.num_bytes else None,
            "bits_per_token": bits,
            "perplexity": None if bits is None else 2**bits,
            "accuracy": sum(right) / len(right) if right else None,
            "replayed": self.replayed,
        }

    @property
    def row(self) -> dict[str, str | None]:
        """The figures as text, by column."""
        named = ((*_COLUMNS[name], figure) for name, figure in self.figures.items())
        return {
            column: None if figure is None else format(figure, spec)
            for column, spec, figure in named
        }

    def _table(self) -> Table:
        """A table of one row."""
        return Table.of([self.row])

    def difference(self, other: "Score") -> float:
        """The largest difference between two logprobs of a token, in nats; infinite if one is NaN
        or missing."""
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        differences = (
            abs(a - b)
            for ours, theirs in pairs
            # NaN for a missing logprob: it becomes infinite below, where `max` alone would overlook
            # it.
            for a, b in zip_longest(ours, theirs, fillvalue=math.nan)
        )
        return max((math.inf if math.isnan(one) else one for one in differences), default=0.0)

    def agrees(self, other: "Score") -> bool:
        """Whether all answers are equal, and the bits per token are equal up to rounding."""
        mine = self.bits_per_token
        theirs = other.bits_per_token
        if self.answers != other.answers or mine is None or theirs is None:
            return self.answers == other.answers and mine is theirs
        return abs(mine - theirs) <= _ROUNDING[self.dtype]


def score(engine: Engine, tasks: Sequence[Task]) -> Score:
    """Score tasks greedily. Long texts are cut into windows, each of which begins with the last
    token of the previous one.

    Args:
        engine: an idle engine of a model with a tokenizer. Scores in all graph modes and splits are
            equal to the last bit only if the engines run the same batches, as with
            `EngineLimits(num_cohorts=1)`.
        tasks: texts and questions, from `read_tasks` or your own.

    Raises:
        RequestError: a question with its answer is longer than the engine's limit; or the model has
            no tokenizer.

    >>> import weft
    >>> engine = Engine(weft.load("demo", "cpu"), graph="none")
    >>> result = score(engine, [Task("return"), Task("A list i", answer="s")])
    >>> result.num_tokens, len(result.answers)
    (5, 1)
    """
    model = engine.model
    most = _max_tokens(engine)
    greedy = SamplingParams(temperature=0.0)
    # 0: the logprob of each prompt token itself, without those of the likeliest tokens.
    scored = SamplingParams(temperature=0.0, prompt_logprobs=0)
    texts = [task.text for task in tasks if task.answer is None]
    questions = [(task.text, task.answer) for task in tasks if task.answer is not None]
    for task in tasks:
        if task.answer is None:
            continue
        length = len(model.encode(task.text)) + _num_tokens(model, task.answer)
        if length > most:
            problem = f"{task.name} has {length} tokens, including the answer"
            raise RequestError("score(engine, tasks)", problem, f"at most {most}")
    parts = [
        # A request generates at least one token; only the logprobs of its prompt are used.
        [engine.add(part, scored, max_tokens=1) for part in windows(model.encode(text), most)]
        for text in texts
    ]
    question_ids = [
        engine.add(prompt, greedy, max_tokens=_num_tokens(model, answer))
        for prompt, answer in questions
    ]
    # The counts of an engine go back to its start, so steps before these tasks are subtracted.
    before = engine.stats().modes
    tracks: dict[str, CompletionState] = {output.id: output.track for output in engine}
    answers = [tracks[name].text for name in question_ids]
    modes = {mode: count - before.get(mode, 0) for mode, count in engine.stats().modes.items()}
    return Score(
        sum(_scored_bytes(model, text) for text in texts),
        [
            [logprob for name in names for logprob in tracks[name].prompt_logprobs]
            for names in parts
        ],
        [(text, text == answer) for text, (_, answer) in zip(answers, questions, strict=True)],
        1 - modes.get("none", 0) / max(sum(modes.values()), 1),
        str(model.dtype).removeprefix("torch."),
    )


def read_tasks(file: str | Path) -> list[Task]:
    """Read tasks from a file: one JSON object per line, `{"text": ...}` or `{"prompt": ...,
    "answer": ...}`. Empty lines are skipped.

    Raises:
        RequestError: the file cannot be read, a line is not a task, or the file has no task.
    """
    call = f"read_tasks({str(file)!r})"
    return [
        _task(call, name, record)
        for name, record in read_json_lines(Path(file), call, "task", _FORMS)
    ]


def _task(call: str, name: str, record: Any) -> Task:
    fault = ""
    if isinstance(record, dict):
        fields = sorted(record)
    else:
        fields = []
    empty = [field for field in fields if not isinstance(record[field], str) or not record[field]]
    if fields not in (["text"], ["answer", "prompt"]):
        fault = f"has {', '.join(map(repr, fields)) or 'no names'}"
    elif empty:
        fault = f"has {empty[0]}={record[empty[0]]!r:.200}"
    if fault:
        raise RequestError(call, f"{name} {fault}", _FORMS)
    return Task(record.get("text") or record["prompt"], record.get("answer"), name)


def windows(ids: Sequence[int], most: int) -> Iterator[list[int]]:
    """Cut a text into parts of fewer than `most` tokens, to leave room for the token that is
    generated. Each part begins with the last token of the previous one, so that every token except
    the first is predicted exactly once.

    >>> list(windows([1, 2, 3, 4, 5, 6], 4))
    [[1, 2, 3], [3, 4, 5], [5, 6]]
    """
    for start in range(0, len(ids) - 1, most - 2):
        yield list(ids[start : start + most - 1])


def _max_tokens(engine: Engine) -> int:
    """The most tokens of a request."""
    pages = engine.limits.budget.max_pages * engine.limits.page_size
    return min(engine.model.config.max_position_embeddings, pages)


def _num_tokens(model: Model, answer: str) -> int:
    assert model.tokenizer is not None, "the prompt was encoded with it"
    return len(model.tokenizer.encode(answer, add_special_tokens=False).ids)


def _scored_bytes(model: Model, text: str) -> int:
    """The bytes of a text after its first token, which may be a special one without bytes."""
    assert model.tokenizer is not None, "the text was encoded with it"
    return len(text[model.tokenizer.encode(text).offsets[0][1] :].encode())
