"""`weft demo`: generate from three prompts in four ways, and compare what they computed after every step."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from time import perf_counter

import attrs
import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor
from tqdm import tqdm

from weft.batch import Batch
from weft.descriptor import BatchDescriptor
from weft.errors import RequestError
from weft.outputs import Output
from weft.stages.model import DEMO, Model, load
from weft.stages.params import num_bytes
from weft.state import State
from weft.transforms.cli.shared import console, printable, table
from weft.transforms.engine.inputs import encode_prompt
from weft.transforms.engine.runner import Runner, make_runner, make_state
from weft.transforms.graphs.ladder import Limits
from weft.trees import leaves_with_names

PROMPTS = ("The function returns", "A list is", "In Python, ")

TABLES = (
    ".block_table", ".positions", ".last_tokens", ".adapters", ".mrope_position_deltas", ".sampling.floats",
    ".sampling.ints",
)  # fmt: skip
"""The parts of a state that are equal on all stages."""

TOLERANCE = 1e-4
"""Absolute, in float32, between ways whose matrix products have other shapes; in equal shapes, the bits are equal."""


@attrs.frozen
class Way:
    """A way to run the model: a number of pipeline stages, and a graph mode."""

    name: str
    num_stages: int
    mode: str


EAGER = Way("eager", 1, "none")
GRAPHIFIED = Way("graphified", 1, "full")
PIPELINED = Way("pipelined", 2, "none")
BOTH = Way("both", 2, "full")
WAYS = (EAGER, GRAPHIFIED, PIPELINED, BOTH)

COMPARISONS = ((GRAPHIFIED, EAGER), (PIPELINED, EAGER), (BOTH, EAGER), (BOTH, PIPELINED))
"""The ways that are compared; bitwise if they have the same number of stages, and so of micro-batches."""


@attrs.frozen(eq=False)
class Step:
    """Copies of the results of one step.

    Args:
        descriptor: the batch's.
        token_ids: (row, token) of each request in the batch.
        logits: [num_reqs, vocab_size].
        kv_pages: of all layers, those of the stages concatenated.
        tables: the parts of each stage's state that describe the requests (`TABLES`).
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
    """A whole run: its steps, the tokens of each prompt, and the calls that captured, replayed or ran eagerly."""

    way: Way
    steps: tuple[Step, ...]
    token_ids: tuple[tuple[int, ...], ...]
    captures: int
    replays: int
    eager: int

    @property
    def tokens_per_second(self) -> float | None:
        """Over the decode steps, without the first of each batch class; None if there is none."""
        met = {step.descriptor: step for step in reversed(self.steps)}
        steady = [s for s in self.steps if s.descriptor.is_uniform and met[s.descriptor] is not s]
        return sum(s.descriptor.num_reqs for s in steady) / sum(s.seconds for s in steady) if steady else None


@attrs.frozen
class Comparison:
    """The differences of two runs, over all steps.

    Args:
        steps: compared steps, up to the first one whose tokens differ.
        tokens: whether all tokens are identical.
        logits, kv_pages: the largest absolute difference.
        tables: whether the request tables of all stages are bitwise equal.
        bitwise: whether logits and KV pages are bitwise equal.
        exact: whether they must be; else they may differ by `TOLERANCE`.
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
        """Whether both computed the same."""
        # Written so that a NaN does not hold.
        close = self.logits <= self.allowed and self.kv_pages <= self.allowed
        return self.tokens and self.tables and close and (self.bitwise or not self.exact)

    @property
    def allowed(self) -> float:
        """The difference that logits and KV pages may have."""
        return 0.0 if self.exact else TOLERANCE

    def faults(self) -> Iterator[str]:
        """The differences that are not allowed, in words."""
        if not self.tokens:
            yield f"the tokens differ in step {self.steps}, the last that was compared"
        if not self.tables:
            yield "a stage's request table differs"
        for name, size in (("logits", self.logits), ("KV pages", self.kv_pages)):
            if not size <= self.allowed:
                yield f"the {name} differ by {_size(size)}, allowed {_size(self.allowed)}"
        if self.exact and not self.bitwise and self.logits == self.kv_pages == 0:
            yield "zeros differ in sign"


def run(arguments: argparse.Namespace) -> int:
    """Run the four ways, compare them and print the result; the exit code is 1 if a comparison does not hold.

    Raises:
        DeviceError: this machine does not have the device.
        RequestError: more tokens than the model has positions for.
    """
    model, max_tokens, out = load(DEMO, arguments.device, "float32"), arguments.max_tokens, console()
    prompts = _encode(model, max_tokens)
    with few_threads(model.device):
        bar = tqdm(WAYS, "demo", leave=False, disable=not sys.stderr.isatty())
        traces = [trace(model, way, prompts, max_tokens) for way in bar]
        by_way = {trace.way: trace for trace in traces}
        found = [compare(by_way[way], by_way[against]) for way, against in COMPARISONS]
        threads = f" with {torch.get_num_threads()} thread" if model.device.type == "cpu" else ""
    size = f"{model.config.num_layers} layers, {num_bytes(model.params) / 2**20:.1f} MiB in float32"
    out.print(f"{model.config.architecture}, {size}, on {model.device}{threads}")
    out.print(f"{len(PROMPTS)} prompts in one batch, up to {max_tokens} tokens each, greedy\n")
    _show_texts(out, model, traces)
    _show_speed(out, model, traces)
    _show_comparisons(out, found)
    _show_verdict(out, traces, found)
    return 0 if all(comparison.holds for comparison in found) else 1


@contextmanager
def few_threads(device: torch.device) -> Iterator[None]:
    """Within, torch computes with one thread on the CPU: with matrices this small, more threads wait for each other."""
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
    if max_tokens > most:
        seen = f"{max_tokens} tokens; after the longest prompt the model has {most} positions"
        raise RequestError(call, seen, f"a number from 1 to {most}")
    return prompts


def trace(model: Model, way: Way, prompts: Sequence[Sequence[int]], max_tokens: int) -> Trace:
    """Generate greedily from `prompts` in one way, and keep the results of every step."""
    limits = Limits(len(prompts), sum(map(len, prompts)))
    runner = make_runner(model, limits, num_stages=way.num_stages, mode=way.mode, keep_logits=True)
    state = make_state(model, runner.layouts, [len(ids) + max_tokens for ids in prompts])
    batch: Batch | None = Batch.ragged(range(len(prompts)), prompts, device=model.device)
    generated: list[list[int]] = [[] for _ in prompts]
    steps = []
    while batch is not None:
        start = perf_counter()
        state, out = runner.step(runner.params, state, batch)
        for row, token in zip(batch.rows.tolist(), out.token_ids.tolist(), strict=True):
            generated[row].append(token)
        steps.append(_keep(batch, out, state, perf_counter() - start))
        batch = _next_batch(model, generated, max_tokens)
    return Trace(way, tuple(steps), tuple(map(tuple, generated)), *_counts(runner, steps))


def _next_batch(model: Model, generated: Sequence[Sequence[int]], max_tokens: int) -> Batch | None:
    """A decode batch of the requests that have not ended; None if all have."""
    ends = model.config.eos_token_ids
    rows = [row for row, own in enumerate(generated) if len(own) < max_tokens and own[-1] not in ends]
    return Batch.decode(rows, device=model.device) if rows else None


def _keep(batch: Batch, out: Output, state: Sequence[State], seconds: float) -> Step:
    assert out.logits is not None
    tokens = tuple(zip(batch.rows.tolist(), out.token_ids.tolist(), strict=True))
    tables = tuple(tuple(x.clone() for name, x in leaves_with_names(s) if name in TABLES) for s in state)
    kept = Step(batch.descriptor, tokens, out.logits.clone(), torch.cat([s.kv_pages for s in state]), tables, seconds)
    if out.logits.is_cuda:
        torch.cuda.synchronize(out.logits.device)  # the next step's time is to be without the copies
    return kept


def _counts(runner: Runner, steps: Sequence[Step]) -> tuple[int, int, int]:
    """Captures, replays and eager calls: of the whole step, or of each stage on each micro-batch."""
    if runner.graphs:
        infos = [graph.cache_info() for graph in runner.graphs]
        return sum(i.captures for i in infos), sum(i.replays for i in infos), sum(i.eager for i in infos)
    stages = len(runner.layouts)
    return 0, 0, sum(stages * min(stages, step.descriptor.num_reqs) for step in steps)


def compare(trace: Trace, reference: Trace) -> Comparison:
    """Compare two runs up to the first step whose tokens differ: later steps have different inputs."""
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


def _show_texts(out: Console, model: Model, traces: Sequence[Trace]) -> None:
    """The texts, once if all ways agree."""
    agree = len({trace.token_ids for trace in traces}) == 1
    rows = []
    for trace in traces[: 1 if agree else None]:
        for index, (prompt, ids) in enumerate(zip(PROMPTS, trace.token_ids, strict=True)):
            text = Text.assemble((prompt, "bold"), printable(model.decode(list(ids)) or ""))
            rows.append({"": index + 1, "text": text} if agree else {"way": trace.way.name, "text": text})
    out.print(table("texts, the same in all four ways" if agree else "texts", rows, left=2))
    out.print()


def _show_speed(out: Console, model: Model, traces: Sequence[Trace]) -> None:
    rows = []
    for trace in traces:
        rate = "" if trace.tokens_per_second is None else f"{trace.tokens_per_second:,.0f}"
        counts = {"captures": trace.captures, "replays": trace.replays, "eager calls": trace.eager}
        rows.append({"way": trace.way.name, "tokens/s": rate, **counts})
    out.print(table("speed", rows))
    on_tape = "On the CPU, graphs are tapes: they check what a CUDA graph would do, and save no time."
    out.print(
        "tokens/s: decode steps, without the first of each batch class, timed from the call until the tokens are on "
        "the host. A call is a whole step, or one of 2 pipeline stages on one micro-batch. "
        f"{on_tape if model.device.type == 'cpu' else 'Graphs are CUDA graphs.'}\n",
        style="dim",
    )


def _show_comparisons(out: Console, found: Sequence[Comparison]) -> None:
    rows = []
    for c in found:
        row = {"way": c.way.name, "against": c.against.name}
        row |= {"tokens": "equal" if c.tokens else "DIFFER", "tables": "equal" if c.tables else "DIFFER"}
        row |= {"logits": _size(c.logits), "KV pages": _size(c.kv_pages), "allowed": _size(c.allowed)}
        rows.append(row | {"verdict": "holds" if c.holds else "BROKEN"})
    out.print(table("largest difference after any step", rows, left=4))
    out.print(
        "tables: each stage's requests. KV pages: all layers. allowed 0: both ways compute in the same shapes, so the "
        "bits are equal. A pipelined batch runs as micro-batches, and matrix products of other shapes round "
        "differently.\n",
        style="dim",
    )


def _show_verdict(out: Console, traces: Sequence[Trace], found: Sequence[Comparison]) -> None:
    broken = [c for c in found if not c.holds]
    for c in broken:
        out.print(f"{c.way.name} against {c.against.name}: {'; '.join(c.faults())}", style="red")
    if broken:
        out.print("NOT EQUAL: the four ways did not compute the same.", style="bold red")
    else:
        logits, state = max(c.logits for c in found), max(c.kv_pages for c in found)
        out.print(
            f"EQUAL after each of {len(traces[0].steps)} steps: identical tokens; logits within {_size(logits)} and "
            f"state within {_size(state)} of the eager run's, allowed {_size(TOLERANCE)}, and 0 in the same shapes.",
            style="bold green",
        )


def _size(difference: float) -> str:
    return f"{difference:.1e}" if difference else "0"
