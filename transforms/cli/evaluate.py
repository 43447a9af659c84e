"""What `weft bench --eval` computes: how well a model knows texts and answers questions, in each graph mode and split,
which must change neither."""

import gc
import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import attrs
import torch
from tqdm import tqdm

from weft.errors import RequestError
from weft.sampling import SamplingParams
from weft.stages.model import Model
from weft.transforms.cli.bench_figures import GraphUse
from weft.transforms.cli.ranks import Here, Place, check_stages, in_ranks
from weft.transforms.cli.sources import Source
from weft.transforms.cli.tasks import Question, Text, read_tasks
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.setup import EngineLimits
from weft.transforms.engine.tracking import Track

_MAX_CONTEXT = 4096
_ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Bits a token by which modes may differ: batches are padded to other shapes, whose products round otherwise."""


@attrs.frozen
class Wanted:
    """The options of `weft bench --eval`.

    Args:
        file: the tasks.
        graphs: the modes.
        splits: numbers of stages; None: one, or torchrun's.
        max_num_seqs: requests under way at once.
        max_num_tokens: tokens of a step. As many as there are requests, or fewer, are within the whole graphs of mode
            `full`, which so runs the prompts too.
        place: where the stages run; of how many, each split says.
    """

    source: Source
    file: str
    graphs: Sequence[str]
    splits: Sequence[int] | None
    max_num_seqs: int
    max_num_tokens: int
    run_ahead: int
    place: Place


@attrs.frozen
class Score:
    """What a model scored in one mode and split.

    Args:
        graph, num_stages: the mode and the split.
        num_bytes: of the texts that are scored: all but each text's first token, which nothing predicts.
        logprobs: of the tokens of these, a list a text.
        answers: the completion of each question, and whether it is right.
        graphs: what ran it: the share of the steps in each mode.
        dtype: of the weights.
    """

    graph: str
    num_stages: int
    num_bytes: int
    logprobs: list[list[float]]
    answers: list[tuple[str, bool]]
    graphs: dict[str, float]
    dtype: str

    @property
    def num_tokens(self) -> int:
        """That are scored."""
        return sum(map(len, self.logprobs))

    @property
    def bits_per_token(self) -> float | None:
        """None where no token is scored."""
        return self._bits / self.num_tokens if self.num_tokens else None

    @property
    def bits_per_byte(self) -> float | None:
        """None where no byte is scored."""
        return self._bits / self.num_bytes if self.num_bytes else None

    @property
    def perplexity(self) -> float | None:
        """Of a token."""
        return None if self.bits_per_token is None else 2**self.bits_per_token

    @property
    def accuracy(self) -> float | None:
        """The share of the questions that are answered right; None where there is none."""
        return sum(right for _, right in self.answers) / len(self.answers) if self.answers else None

    @property
    def _bits(self) -> float:
        return -math.fsum(logprob for own in self.logprobs for logprob in own) / math.log(2)

    def difference(self, other: "Score") -> float:
        """The greatest between the logprobs of a token, in nats; infinite where one is NaN, or missing."""
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        found = (abs(a - b) for own, theirs in pairs for a, b in zip_longest(own, theirs, fillvalue=math.nan))
        return max((math.inf if math.isnan(one) else one for one in found), default=0.0)

    def agrees(self, other: "Score") -> bool:
        """Whether it is the same but for rounding: the completions of all questions, and the bits a token."""
        if self.answers != other.answers:
            return False
        mine, theirs = self.bits_per_token, other.bits_per_token
        if mine is None or theirs is None:
            return mine is theirs
        return abs(mine - theirs) <= _ROUNDING[getattr(torch, self.dtype)]


def evaluate(wanted: Wanted, *, progress: bool) -> list[Score] | None:
    """The scores, mode by mode and split by split; None on a rank of torchrun's that is not the first.

    Raises:
        RequestError: what `read_tasks` refuses, a question that is longer than the model has positions for, or more
            stages than layers.
        Whatever `weft.load`, `Engine` and `in_ranks` raise.
    """
    texts, questions = read_tasks(wanted.file)
    scores: list[Score] = []
    splits: Sequence[int | None] = wanted.splits or [None]
    for stages in splits:
        check_stages(attrs.evolve(wanted.place, stages=stages), wanted.source.config().num_layers)
    for stages in splits:
        place = attrs.evolve(wanted.place, stages=stages)
        found = in_ranks(score_modes, place, wanted, texts, questions, progress)
        if found is None:
            return None
        scores += found
    return scores


def score_modes(
    here: Here, wanted: Wanted, texts: Sequence[Text], questions: Sequence[Question], progress: bool
) -> list[Score]:
    """The scores of each mode, by an engine of its own, over one model.

    A pipeline has one cohort, so that every split runs the same batches.
    """
    shows = progress and here.first
    model, scores = wanted.source.open(here, progress=shows), []
    _check_lengths(wanted, model, questions)
    for graph in tqdm(wanted.graphs, desc="eval", unit="mode", disable=not shows):
        scores.append(_score(here, wanted, model, graph, texts, questions))
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # the next engine takes what memory is free
    return scores


def _check_lengths(wanted: Wanted, model: Model, questions: Sequence[Question]) -> None:
    for question in questions:
        length = len(model.encode(question.prompt)) + _num_tokens(model, question.answer)
        if length > (most := _context(model)):
            seen = f"line {question.line} has {length} tokens, those of the answer included"
            raise RequestError(f"weft bench --eval {wanted.file}", seen, f"at most {most}")


def _score(
    here: Here, wanted: Wanted, model: Model, graph: str, texts: Sequence[Text], questions: Sequence[Question]
) -> Score:
    most = _context(model)
    rows = wanted.max_num_seqs
    engine = Engine(
        model,
        EngineLimits(max_num_reqs=rows, max_num_tokens=wanted.max_num_tokens, max_model_len=most, num_cohorts=1),
        pipeline=here.num_stages,
        graph=graph,
        transport=here.transport,
        run_ahead=wanted.run_ahead,
        seed=0,
    )
    before = engine.stats()
    greedy, scored = SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, prompt_logprobs=0)
    parts = [[engine.add(part, scored, max_tokens=1) for part in windows(model.encode(t.text), most)] for t in texts]
    asked = [engine.add(q.prompt, greedy, max_tokens=_num_tokens(model, q.answer)) for q in questions]
    tracks: dict[str, Track] = {}
    for output in engine:
        tracks[output.id] = output.track
    answers = [tracks[name].text for name in asked]
    return Score(
        graph,
        here.num_stages,
        sum(_scored_bytes(model, one.text) for one in texts),
        [[logprob for name in names for logprob in tracks[name].prompt_logprobs] for names in parts],
        [(text, text == question.answer) for text, question in zip(answers, questions, strict=True)],
        GraphUse.between(before, engine.stats()).shares,
        str(model.dtype).removeprefix("torch."),
    )


def windows(ids: Sequence[int], most: int) -> Iterator[list[int]]:
    """Parts of fewer than `most` tokens, so that there is room for the one that is generated. Each begins with the last
    token of the one before, so that all tokens but the first are predicted, once.

    >>> list(windows([1, 2, 3, 4, 5, 6], 4))
    [[1, 2, 3], [3, 4, 5], [5, 6]]
    """
    for start in range(0, len(ids) - 1, most - 2):
        yield list(ids[start : start + most - 1])


def _context(model: Model) -> int:
    return min(model.config.max_position_embeddings, _MAX_CONTEXT)


def _num_tokens(model: Model, answer: str) -> int:
    assert model.tokenizer is not None, "the prompt was encoded with it"
    return len(model.tokenizer.encode(answer, add_special_tokens=False).ids)


def _scored_bytes(model: Model, text: str) -> int:
    """The bytes of a text behind its first token, which may be a special one of no bytes."""
    assert model.tokenizer is not None, "the text was encoded with it"
    return len(text[model.tokenizer.encode(text).offsets[0][1] :].encode())
