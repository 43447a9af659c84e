"""What `weft demo` does: three prompts in four ways, and whether all four computed the same, step by step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from time import perf_counter

import attrs
import torch
from torch import Tensor
from tqdm import tqdm

from weft.batch import Batch
from weft.descriptor import BatchDescriptor
from weft.errors import RequestError
from weft.outputs import Output
from weft.stages.model import Model
from weft.state import State
from weft.transforms.engine.intake import encode_prompt
from weft.transforms.engine.runner import Runner, make_runner, make_state
from weft.transforms.graphs.ladder import Limits
from weft.trees import leaves_with_names

PROMPTS = ("The function returns", "A list is", "In Python, ")

TABLES = (
    ".block_table", ".positions", ".last_tokens", ".adapters", ".mrope_position_deltas", ".sampling.floats",
    ".sampling.ints",
)  # fmt: skip
"""The parts of a state that are alike on all stages."""

TOLERANCE = 1e-4
"""Absolute, in float32, where two ways run matrix products of other shapes; in the same shapes, bits are equal."""


@attrs.frozen
class Way:
    """A way to run the model: pipeline stages, and a graph mode."""

    name: str
    num_stages: int
    mode: str


EAGER = Way("eager", 1, "none")
GRAPHIFIED = Way("graphified", 1, "full")
PIPELINED = Way("pipelined", 2, "none")
BOTH = Way("both", 2, "full")
WAYS = (EAGER, GRAPHIFIED, PIPELINED, BOTH)

COMPARISONS = ((GRAPHIFIED, EAGER), (PIPELINED, EAGER), (BOTH, EAGER), (BOTH, PIPELINED))
"""What is held against what; bitwise where the number of stages, and so of micro-batches, is the same."""


@attrs.frozen(eq=False)
class Step:
    """What one step left behind: copies, which no later step changes.

    Args:
        descriptor: the batch's.
        token_ids: (row, token) of each request in the batch.
        logits: [num_reqs, vocab_size].
        kv_pages: of all layers, the stages' put together.
        tables: of each stage, what it knows of the requests (`TABLES`).
        seconds: from the call until the tokens are on the host.
    """

    descriptor: BatchDescriptor
    token_ids: tuple[tuple[int, int], ...]
    logits: Tensor
    kv_pages: Tensor
    tables: tuple[tuple[Tensor, ...], ...]
    seconds: float


@attrs.frozen(eq=False)
class Trace:
    """A whole run: its steps, the tokens of each prompt, and how often a graph, or the function itself, was called."""

    way: Way
    steps: tuple[Step, ...]
    token_ids: tuple[tuple[int, ...], ...]
    captures: int
    replays: int
    eager: int

    @property
    def tokens_per_second(self) -> float | None:
        """Over the decode steps whose batch class the run has met before; None if there is none."""
        met = {step.descriptor: step for step in reversed(self.steps)}
        steady = [s for s in self.steps if s.descriptor.is_uniform and met[s.descriptor] is not s]
        return sum(s.descriptor.num_reqs for s in steady) / sum(s.seconds for s in steady) if steady else None


@attrs.frozen
class Comparison:
    """Two runs, held against each other after every step.

    Args:
        steps: that were compared, up to the first whose tokens differ.
        tokens: whether all tokens are identical.
        logits, kv_pages: the largest absolute difference.
        tables: whether every stage's table of requests is bitwise the other run's.
        bitwise: whether logits and KV pages are the same bits.
        exact: whether they must be; else the differences may be `TOLERANCE`.
    """

    way: Way
    against: Way
    steps: int
    tokens: bool
    logits: float
    kv_pages: float
    tables: bool
    bitwise: bool
    exact: bool

    @property
    def holds(self) -> bool:
        """Whether the two computed the same."""
        # Written so that a NaN does not hold.
        close = self.logits <= self.allowed and self.kv_pages <= self.allowed
        return self.tokens and self.tables and close and (self.bitwise or not self.exact)

    @property
    def allowed(self) -> float:
        """The difference that logits and KV pages may have."""
        return 0.0 if self.exact else TOLERANCE


def trace_all(model: Model, max_tokens: int, *, progress: bool = False) -> list[Trace]:
    """Run the four ways.

    Raises:
        RequestError: `max_tokens` is less than 1, or more than the model has positions for.
    """
    prompts = _encode(model, max_tokens)
    with few_threads(model.device):
        return [run(model, way, prompts, max_tokens) for way in tqdm(WAYS, "demo", leave=False, disable=not progress)]


def compare_all(traces: Sequence[Trace]) -> list[Comparison]:
    """Hold the ways against each other, as `COMPARISONS` says."""
    by_way = {trace.way: trace for trace in traces}
    return [compare(by_way[way], by_way[against]) for way, against in COMPARISONS]


@contextmanager
def few_threads(device: torch.device) -> Iterator[None]:
    """One thread on the CPU: for matrices as small as this model's, more of them mostly wait for each other."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _encode(model: Model, max_tokens: int) -> list[list[int]]:
    call = f"weft demo --max-tokens {max_tokens}"
    prompts = [encode_prompt(model, prompt, call) for prompt in PROMPTS]
    most = model.config.max_position_embeddings - max(map(len, prompts))
    if not 1 <= max_tokens <= most:
        seen = f"max_tokens={max_tokens}; beside the longest prompt the model has {most} positions"
        raise RequestError(call, seen, f"a number from 1 to {most}")
    return prompts


def run(model: Model, way: Way, prompts: Sequence[Sequence[int]], max_tokens: int) -> Trace:
    """Generate greedily from `prompts` in one way, and keep what every step left behind."""
    limits = Limits(len(prompts), sum(map(len, prompts)))
    runner = make_runner(model, limits, num_stages=way.num_stages, mode=way.mode, keep_logits=True)
    state = make_state(model, runner.layouts, [len(ids) + max_tokens for ids in prompts])
    batch: Batch | None = Batch.ragged(range(len(prompts)), prompts, device=model.device)
    said: list[list[int]] = [[] for _ in prompts]
    steps = []
    while batch is not None:
        start = perf_counter()
        state, out = runner.step(runner.params, state, batch)
        for row, token in zip(batch.rows.tolist(), out.token_ids.tolist(), strict=True):
            said[row].append(token)
        steps.append(_keep(batch, out, state, perf_counter() - start))
        batch = _next_batch(model, said, max_tokens)
    return Trace(way, tuple(steps), tuple(map(tuple, said)), *_counts(runner, steps))


def _next_batch(model: Model, said: Sequence[Sequence[int]], max_tokens: int) -> Batch | None:
    """A decode of the requests that go on; None: all have ended."""
    ends = model.config.eos_token_ids
    rows = [row for row, own in enumerate(said) if len(own) < max_tokens and own[-1] not in ends]
    return Batch.decode(rows, device=model.device) if rows else None


def _keep(batch: Batch, out: Output, state: Sequence[State], seconds: float) -> Step:
    assert out.logits is not None
    tokens = tuple(zip(batch.rows.tolist(), out.token_ids.tolist(), strict=True))
    tables = tuple(tuple(x.clone() for name, x in leaves_with_names(s) if name in TABLES) for s in state)
    kept = Step(batch.descriptor, tokens, out.logits.clone(), torch.cat([s.kv_pages for s in state]), tables, seconds)
    if out.logits.is_cuda:
        torch.cuda.synchronize(out.logits.device)  # the copies are no part of the next step's time
    return kept


def _counts(runner: Runner, steps: Sequence[Step]) -> tuple[int, int, int]:
    """Captures, replays and eager calls, of the whole step or of each stage on each micro-batch."""
    if runner.graphs:
        infos = [graph.cache_info() for graph in runner.graphs]
        return sum(i.captures for i in infos), sum(i.replays for i in infos), sum(i.eager for i in infos)
    stages = len(runner.layouts)
    return 0, 0, sum(stages * min(stages, step.descriptor.num_reqs) for step in steps)


def compare(trace: Trace, reference: Trace) -> Comparison:
    """Hold two runs against each other, as far as they have the same tokens: beyond, there is nothing to compare."""
    pairs: list[tuple[Step, Step]] = []
    tokens = True
    for a, b in zip_longest(trace.steps, reference.steps):
        if a is None or b is None or a.logits.shape != b.logits.shape:
            tokens = False
            break
        pairs.append((a, b))
        if a.token_ids != b.token_ids:
            tokens = False
            break
    logits = [(a.logits, b.logits) for a, b in pairs]
    kv_pages = [(a.kv_pages, b.kv_pages) for a, b in pairs]
    tables = [(x, y) for a, b in pairs for table in a.tables for x, y in zip(table, b.tables[0], strict=True)]
    return Comparison(
        trace.way,
        reference.way,
        steps=len(pairs),
        tokens=tokens,
        logits=_largest(logits),
        kv_pages=_largest(kv_pages),
        tables=_bitwise(tables),
        bitwise=_bitwise(logits) and _bitwise(kv_pages),
        exact=trace.way.num_stages == reference.way.num_stages,
    )


def _largest(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The largest absolute difference; NaN if there is one anywhere."""
    return float(torch.stack([(a - b).abs().max() for a, b in pairs]).max())


def _bitwise(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
