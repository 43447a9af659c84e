"""`weft demo`: generate from three prompts in four ways, and compare what they computed after every step."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter

import attrs
import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor
from tqdm import tqdm

from weft.batch import Batch
from weft.descriptor import BatchDescriptor
from weft.outputs import Output
from weft.stages.model import DEMO, Model, load
from weft.stages.params import num_bytes
from weft.state import State
from weft.transforms.cli.options import Demo
from weft.transforms.cli.printing import console, printable, table
from weft.transforms.engine.inputs import encode_prompt
from weft.transforms.engine.setup import Runner, make_runner, make_state
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
        seconds: from the call until the tokens are on the host.
        tokens: [2, num_reqs], the row and the token of each request in the batch.
        logits: [num_reqs, vocab_size].
        kv_pages: of all layers, those of the stages concatenated.
        tables: [num_stages, num_bytes], the parts of each stage's state that describe the requests (`TABLES`).
    """

    descriptor: BatchDescriptor
    seconds: float
    tokens: Tensor
    logits: Tensor
    kv_pages: Tensor
    tables: Tensor


@attrs.frozen(eq=False)
class Trace:
    """A whole run: its steps, the tokens of each prompt, and the calls that captured, replayed or ran eagerly."""

    way: Way
    steps: tuple[Step, ...]
    token_ids: list[list[int]]
    calls: Mapping[str, int]

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
        tables: whether the request tables of all stages are bitwise equal.
        sizes: the largest absolute difference of the logits, and of the KV pages.
        bitwise: whether logits and KV pages are bitwise equal.
    """

    way: Way
    against: Way
    steps: int
    tokens: bool
    tables: bool
    sizes: Mapping[str, float]
    bitwise: bool

    @property
    def allowed(self) -> float:
        """The difference that logits and KV pages may have: none where both ways compute in the same shapes."""
        return 0.0 if self.way.num_stages == self.against.num_stages else TOLERANCE

    def faults(self) -> Iterator[str]:
        """The differences that are not allowed, in words."""
        if not self.tokens:
            yield f"the tokens differ in step {self.steps}, the last that was compared"
        if not self.tables:
            yield "a stage's request table differs"
        for name, size in self.sizes.items():
            if not size <= self.allowed:  # nor is a NaN allowed
                yield f"the {name} differ by {_size(size)}, allowed {_size(self.allowed)}"
        if not (self.allowed or self.bitwise or any(self.sizes.values())):
            yield "zeros differ in sign"


def run(options: Demo) -> int:
    """Run the four ways, compare them and print the result; the exit code is 1 if a comparison does not hold.

    Raises:
        DeviceError: this machine does not have the device.
        RequestError: more tokens than the model has positions for.
    """
    model, max_tokens, out = load(DEMO, options.device, "float32"), options.max_tokens, console()
    prompts = [encode_prompt(model, prompt, "weft demo") for prompt in PROMPTS]
    if max_tokens > (most := model.config.max_position_embeddings - max(map(len, prompts))):
        seen = f"{max_tokens} tokens; after the longest prompt the model has {most} positions"
        options.refuse(f"--max-tokens {max_tokens}", seen, f"a number from 1 to {most}")
    with few_threads(model.device):
        bar = tqdm(WAYS, "demo", leave=False, disable=not sys.stderr.isatty())
        traces = {way: trace(model, way, prompts, max_tokens) for way in bar}
        found = [compare(traces[way], traces[against]) for way, against in COMPARISONS]
        threads = f" with {torch.get_num_threads()} thread" if model.device.type == "cpu" else ""
    size = f"{model.config.num_layers} layers, {num_bytes(model.params) / 2**20:.1f} MiB in float32"
    out.print(f"{model.config.architecture}, {size}, on {model.device}{threads}")
    out.print(f"{len(PROMPTS)} prompts in one batch, up to {max_tokens} tokens each, greedy\n")
    _show_texts(out, model, [*traces.values()])
    _show_speed(out, model, [*traces.values()])
    _show_comparisons(out, found)
    return _show_verdict(out, found)


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


def trace(model: Model, way: Way, prompts: Sequence[Sequence[int]], max_tokens: int) -> Trace:
    """Generate greedily from `prompts` in one way, and keep the results of every step."""
    limits = Limits(len(prompts), sum(map(len, prompts)))
    runner = make_runner(model, limits, num_stages=way.num_stages, mode=way.mode, keep_logits=True)
    state = make_state(model, runner.layouts, [len(ids) + max_tokens for ids in prompts])
    batch = Batch.ragged(range(len(prompts)), prompts, device=model.device)
    generated: list[list[int]] = [[] for _ in prompts]
    rows, steps = [*range(len(prompts))], []
    while rows:
        start = perf_counter()
        state, out = runner.step(runner.params, state, batch)
        for row, token in zip(rows, out.token_ids.tolist(), strict=True):
            generated[row].append(token)
        steps.append(_keep(batch, out, state, perf_counter() - start))
        ends = model.config.eos_token_ids
        rows = [row for row in rows if len(generated[row]) < max_tokens and generated[row][-1] not in ends]
        batch = Batch.decode(rows, device=model.device) if rows else batch
    return Trace(way, tuple(steps), generated, _calls(runner, steps))


def _keep(batch: Batch, out: Output, state: Sequence[State], seconds: float) -> Step:
    assert out.logits is not None
    tables = [[x.flatten().view(torch.uint8) for name, x in leaves_with_names(s) if name in TABLES] for s in state]
    kept = Step(
        batch.descriptor,
        seconds,
        torch.stack([batch.rows, out.token_ids]),
        out.logits.clone(),
        torch.cat([stage.kv_pages for stage in state]),
        torch.stack([torch.cat(parts) for parts in tables]),
    )
    if out.logits.is_cuda:
        torch.cuda.synchronize(out.logits.device)  # the next step's time is to be without the copies
    return kept


def _calls(runner: Runner, steps: Sequence[Step]) -> dict[str, int]:
    """Captures, replays and eager calls: of the whole step, or of each stage on each micro-batch."""
    infos, stages = [graph.cache_info() for graph in runner.graphs], len(runner.layouts)
    eager = 0 if infos else sum(stages * min(stages, step.descriptor.num_reqs) for step in steps)
    return {
        "captures": sum(info.captures for info in infos),
        "replays": sum(info.replays for info in infos),
        "eager calls": eager + sum(info.eager for info in infos),
    }


def compare(trace: Trace, reference: Trace) -> Comparison:
    """Compare two runs up to the first step whose tokens differ: later steps have different inputs."""
    same = [torch.equal(a.tokens, b.tokens) for a, b in zip(trace.steps, reference.steps, strict=False)]
    steps = same.index(False) + 1 if False in same else len(same)
    pairs = [*zip(trace.steps[:steps], reference.steps[:steps], strict=True)]
    values = {
        "logits": [(a.logits, b.logits) for a, b in pairs],
        "KV pages": [(a.kv_pages, b.kv_pages) for a, b in pairs],
    }
    return Comparison(
        trace.way,
        reference.way,
        steps,
        tokens=all(same),
        tables=all(bool((a.tables == b.tables[:1]).all()) for a, b in pairs),
        sizes={name: float(torch.stack([(a - b).abs().max() for a, b in own]).max()) for name, own in values.items()},
        bitwise=all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for own in values.values() for a, b in own),
    )


def _show_texts(out: Console, model: Model, traces: Sequence[Trace]) -> None:
    """The texts, once if all ways agree."""
    agree = all(trace.token_ids == traces[0].token_ids for trace in traces)
    out.print(Text("texts, the same in all four ways" if agree else "texts", style="bold"))
    for trace in traces[: 1 if agree else None]:
        for index, (prompt, ids) in enumerate(zip(PROMPTS, trace.token_ids, strict=True)):
            label = f"{index + 1}  " if agree else f"{trace.way.name:<10}  "
            out.print(Text.assemble((label, "dim"), (prompt, "bold"), printable(model.decode(ids) or "")))
    out.print()


def _show_speed(out: Console, model: Model, traces: Sequence[Trace]) -> None:
    rates = ("" if trace.tokens_per_second is None else f"{trace.tokens_per_second:,.0f}" for trace in traces)
    rows = [{"way": trace.way.name, "tokens/s": rate, **trace.calls} for trace, rate in zip(traces, rates, strict=True)]
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
        row |= {name: _size(size) for name, size in c.sizes.items()}
        rows.append({**row, "allowed": _size(c.allowed), "verdict": "BROKEN" if [*c.faults()] else "holds"})
    out.print(table("largest difference after any step", rows))
    out.print(
        "tables: each stage's requests. KV pages: all layers. allowed 0: both ways compute in the same shapes, so the "
        "bits are equal. A pipelined batch runs as micro-batches, and matrix products of other shapes round "
        "differently.\n",
        style="dim",
    )


def _show_verdict(out: Console, found: Sequence[Comparison]) -> int:
    """Print whether all ways are equal; returns the exit code."""
    broken = [c for c in found if [*c.faults()]]
    for c in broken:
        out.print(f"{c.way.name} against {c.against.name}: {'; '.join(c.faults())}", style="red")
    if broken:
        out.print("NOT EQUAL: the four ways did not compute the same.", style="bold red")
        return 1
    logits, state = (max(c.sizes[name] for c in found) for name in ("logits", "KV pages"))
    out.print(
        f"EQUAL after each of {found[0].steps} steps: identical tokens; logits within {_size(logits)} and "
        f"state within {_size(state)} of the eager run's, allowed {_size(TOLERANCE)}, and 0 in the same shapes.",
        style="bold green",
    )
    return 0


def _size(difference: float) -> str:
    return f"{difference:.1e}" if difference else "0"
