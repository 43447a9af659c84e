"""`weft demo`: three prompts in four ways, and the proof that all four computed the same, step by step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from time import perf_counter

import attrs
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from tqdm import tqdm

from weft.batch import Batch
from weft.cli import printable
from weft.descriptor import BatchDescriptor
from weft.errors import RequestError
from weft.stages.model import DEMO, Model, load
from weft.stages.params import num_bytes
from weft.state import State
from weft.transforms.generate import MAX_NUM_TOKENS, Runner, encode_prompts, make_runner, make_state, prefill_batches
from weft.transforms.ladder import Limits
from weft.trees import leaves_with_names

PROMPTS = ("The function returns", "A list is", "In Python, ")

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
        tables: of each stage, all of its state but the KV pages.
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


def demo(
    device: str | None = None, max_tokens: int = 64, *, console: Console | None = None, progress: bool = False
) -> bool:
    """Run the four ways, compare, print, and return whether all comparisons hold.

    Raises:
        DeviceError: this machine has no such device.
        RequestError: `max_tokens` is less than 1, or more than the model has positions for.
    """
    console = console or Console(highlight=False)
    model = load(DEMO, device, "float32")
    prompts = _encode(model, max_tokens)
    with _few_threads(model.device):
        _show_model(console, model, max_tokens)
        traces = [run(model, way, prompts, max_tokens) for way in tqdm(WAYS, "demo", leave=False, disable=not progress)]
        by_way = {trace.way: trace for trace in traces}
        found = [compare(by_way[way], by_way[against]) for way, against in COMPARISONS]
    _show_texts(console, model, traces)
    _show_speed(console, model, traces)
    _show_comparisons(console, found)
    _show_verdict(console, traces, found)
    return all(comparison.holds for comparison in found)


@contextmanager
def _few_threads(device: torch.device) -> Iterator[None]:
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
    prompts = encode_prompts(model, PROMPTS, call)
    most = model.config.max_position_embeddings - max(map(len, prompts))
    if not 1 <= max_tokens <= most:
        seen = f"max_tokens={max_tokens}; beside the longest prompt the model has {most} positions"
        raise RequestError(call, seen, f"a number from 1 to {most}")
    return prompts


def run(model: Model, way: Way, prompts: Sequence[Sequence[int]], max_tokens: int) -> Trace:
    """Generate greedily from `prompts` in one way, and keep what every step left behind."""
    limits = Limits(len(prompts), MAX_NUM_TOKENS)
    runner = make_runner(model, limits, num_stages=way.num_stages, mode=way.mode, keep_logits=True)
    lengths = [len(ids) + max_tokens for ids in prompts]
    state = make_state(model, runner.layouts, lengths, temperature=0.0, seeds=range(len(prompts)))
    said: list[list[int]] = [[] for _ in prompts]
    steps = []
    for batch in _batches(model, prompts, said, max_tokens):
        start = perf_counter()
        state, out = runner.step(runner.params, state, batch)
        sampled = out.token_ids.tolist()
        seconds = perf_counter() - start
        tokens = tuple(zip(batch.rows.tolist(), sampled, strict=True))
        assert out.logits is not None
        steps.append(_keep(batch, tokens, out.logits, state, seconds))
        for (row, token), kept in zip(tokens, batch.samples.tolist(), strict=True):
            said[row] += [token] if kept else []
    return Trace(way, tuple(steps), tuple(map(tuple, said)), *_counts(runner, steps))


def _batches(
    model: Model, prompts: Sequence[Sequence[int]], said: Sequence[Sequence[int]], max_tokens: int
) -> Iterator[Batch]:
    """The prefill, then decode batches of the requests that have not ended; reads what they `said` meanwhile."""
    yield from prefill_batches(prompts, MAX_NUM_TOKENS, model.device)
    ends = set(model.config.eos_token_ids)
    while rows := [row for row, ids in enumerate(said) if len(ids) < max_tokens and ends.isdisjoint(ids)]:
        yield Batch.decode(rows, device=model.device)


def _keep(
    batch: Batch, tokens: tuple[tuple[int, int], ...], logits: Tensor, state: Sequence[State], seconds: float
) -> Step:
    tables = tuple(tuple(x.clone() for name, x in leaves_with_names(s) if name != ".kv_pages") for s in state)
    kept = Step(batch.descriptor, tokens, logits.clone(), torch.cat([s.kv_pages for s in state]), tables, seconds)
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)  # the copies are no part of the next step's time
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


def _show_model(console: Console, model: Model, max_tokens: int) -> None:
    threads = f" with {torch.get_num_threads()} thread" if model.device.type == "cpu" else ""
    size = f"{model.config.num_layers} layers, {num_bytes(model.params) / 2**20:.1f} MiB in float32"
    console.print(f"{model.config.architecture}, {size}, on {model.device}{threads}")
    console.print(f"{len(PROMPTS)} prompts in one batch, up to {max_tokens} tokens each, greedy\n")


def _show_texts(console: Console, model: Model, traces: Sequence[Trace]) -> None:
    """The text once where all ways agree, else that of each."""
    agree = len({trace.token_ids for trace in traces}) == 1
    table = _table("the text, the same in all four ways" if agree else "the texts", "" if agree else "way", "text")
    for trace in traces[: 1 if agree else None]:
        for index, (prompt, ids) in enumerate(zip(PROMPTS, trace.token_ids, strict=True)):
            text = Text.assemble((prompt, "bold"), printable(model.decode(list(ids)) or ""))
            table.add_row(str(index + 1) if agree else trace.way.name, text)
    console.print(table)
    console.print()


def _show_speed(console: Console, model: Model, traces: Sequence[Trace]) -> None:
    numbers = ("tokens/s", "captures", "replays", "eager calls")
    table = _table("speed, and what was captured and replayed", "way", *numbers, right=numbers)
    for t in traces:
        rate = "" if t.tokens_per_second is None else f"{t.tokens_per_second:,.0f}"
        table.add_row(t.way.name, rate, str(t.captures), str(t.replays), str(t.eager))
    console.print(table)
    on_tape = "On the CPU graphs are tapes: they check what a CUDA graph would do, and save no time."
    note = on_tape if model.device.type == "cpu" else "Graphs are CUDA graphs."
    console.print(
        "tokens/s: of decode steps, the first of each batch class left out, timed from the call until the tokens are "
        f"on the host. Calls are of the whole step; pipelined, of each of 2 stages on each micro-batch. {note}\n",
        style="dim",
    )


def _show_comparisons(console: Console, found: Sequence[Comparison]) -> None:
    columns = ("way", "against", "tokens", "tables", "logits", "KV pages", "allowed", "verdict")
    table = _table("largest difference after any step", *columns, right=("logits", "KV pages", "allowed"))
    for c in found:
        tokens, tables = ("equal" if same else "DIFFER" for same in (c.tokens, c.tables))
        sizes, verdict = map(_size, (c.logits, c.kv_pages, c.allowed)), "holds" if c.holds else "BROKEN"
        table.add_row(c.way.name, c.against.name, tokens, tables, *sizes, verdict)
    console.print(table)
    console.print(
        "tables: of requests, of each stage. KV pages: of all layers, the stages' put together. allowed 0: the same "
        "shapes, so the same bits. Pipelined, a batch runs as micro-batches, and matrix products of other shapes round "
        "differently.\n",
        style="dim",
    )


def _show_verdict(console: Console, traces: Sequence[Trace], found: Sequence[Comparison]) -> None:
    broken = [c for c in found if not c.holds]
    for c in broken:
        console.print(f"{c.way.name} against {c.against.name}: {'; '.join(_faults(c))}", style="red")
    if broken:
        console.print("NOT EQUAL: the four ways did not compute the same.", style="bold red")
    else:
        logits, state = max(c.logits for c in found), max(c.kv_pages for c in found)
        console.print(
            f"EQUAL after each of {len(traces[0].steps)} steps: identical tokens; logits within {_size(logits)} and "
            f"state within {_size(state)} of the eager run's, allowed {_size(TOLERANCE)}, and 0 in the same shapes.",
            style="bold green",
        )


def _faults(c: Comparison) -> Iterator[str]:
    """What keeps a comparison from holding, in words."""
    if not c.tokens:
        yield f"the tokens differ in step {c.steps}, the last that was compared"
    if not c.tables:
        yield "a stage's request table differs"
    for name, size in (("logits", c.logits), ("KV pages", c.kv_pages)):
        if not size <= c.allowed:
            yield f"the {name} differ by {_size(size)}, allowed {_size(c.allowed)}"
    if c.exact and not c.bitwise and c.logits == c.kv_pages == 0:
        yield "zeros differ in sign"


def _size(difference: float) -> str:
    return f"{difference:.1e}" if difference else "0"


def _table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table
