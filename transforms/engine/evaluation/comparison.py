"""`trace_run`, `compare_runs` and `compare_alone`: record a model's run, and compare two runs step
by step."""

from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import COUNT, check_values
from weft.batches.batch import Batch
from weft.batches.descriptor import BatchDescriptor
from weft.batches.outputs import Output
from weft.batches.state import State
from weft.display.quantities import error_size
from weft.display.tables import Table, Tabled
from weft.errors import RequestError
from weft.stages.model import Model
from weft.transforms.engine.setup import Runner, make_runner, make_state
from weft.transforms.graphs.ladder import Limits
from weft.values.trees import leaves_with_names

# The fields of a state that are equal on all stages.
TABLES = (
    ".block_table",
    ".positions",
    ".last_tokens",
    ".adapters",
    ".mrope_position_deltas",
    ".sampling.floats",
    ".sampling.ints",
)

# Absolute, in float32, between ways whose matrix products have different shapes. In equal shapes
# the bits are equal; those of a batch-invariant model always are.
TOLERANCE = 1e-4


_SIZES = "logits", "KV pages"


@attrs.frozen
class Way:
    """A way to run a model.

    Args:
        name: its name in reports.
        num_stages: pipeline stages, all in this process.
        mode: one of `weft.transforms.MODES`.
    """

    name: str
    num_stages: int
    mode: str


@attrs.frozen(eq=False)
class TracedStep:
    """Copies of the results of one step.

    Args:
        descriptor: the batch's.
        seconds: from the call until the tokens are on the host.
        tokens: [2, num_reqs], the row and the new token of each request in the batch.
        logits: [num_reqs, vocab_size].
        kv_pages: the KV pages of all layers, concatenated over the stages.
        tables: [num_stages, num_bytes], the parts of each stage's state that describe the requests
            (`TABLES`).
    """

    descriptor: BatchDescriptor
    seconds: float
    tokens: Tensor
    logits: Tensor
    kv_pages: Tensor
    tables: Tensor


@attrs.frozen(eq=False, repr=False)
class RunTrace(Tabled):
    """The results of a run, step by step. It prints as a table of one row.

    Args:
        way: the number of stages, and the graph mode.
        prompts: the token ids of each prompt.
        steps: the results of each step.
        token_ids: the generated tokens of each prompt.
        calls: the numbers of calls that captured, replayed, and ran eagerly.
        batch_invariant: whether the model was batch invariant.
    """

    way: Way
    prompts: list[list[int]]
    steps: tuple[TracedStep, ...]
    token_ids: list[list[int]]
    calls: Mapping[str, int]
    batch_invariant: bool = False

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second over the decode steps; None if there are none. The first step of each
        batch class does not count, since it may capture a graph."""
        # Reversed, so that each class keeps its first step.
        met = {step.descriptor: step for step in reversed(self.steps)}
        steady = [s for s in self.steps if s.descriptor.is_uniform and met[s.descriptor] is not s]
        if steady:
            return sum(s.descriptor.num_reqs for s in steady) / sum(s.seconds for s in steady)
        return None

    @property
    def row(self) -> dict[str, Any]:
        """The way, its tokens per second, and its calls, as text."""
        rate = self.tokens_per_second
        return {
            "way": self.way.name,
            "tokens/s": None if rate is None else f"{rate:,.0f}",
            **self.calls,
        }

    def _table(self) -> Table:
        """A table of one row."""
        return Table.of([self.row])


@attrs.frozen(repr=False)
class RunComparison(Tabled):
    """The differences between two runs, over all steps. It prints as a table of one row.

    Args:
        way, against: the ways of the two runs.
        steps: the number of compared steps, up to and including the first one whose tokens differ.
        tokens: whether all tokens are identical.
        tables: whether the request tables of all stages are bitwise equal; None: they were not
            compared.
        sizes: the largest absolute difference of the logits, and of the KV pages if they were
            compared.
        bitwise: whether these are bitwise equal.
        allowed: the largest difference that is allowed.
    """

    way: Way
    against: Way
    steps: int
    tokens: bool
    tables: bool | None
    sizes: Mapping[str, float]
    bitwise: bool
    allowed: float

    @property
    def row(self) -> dict[str, str]:
        """The ways, what is equal, the largest and the allowed differences, and the verdict, as
        text."""
        words = {True: "equal", False: "DIFFER", None: ""}
        return {
            "way": self.way.name,
            "against": self.against.name,
            "tokens": words[self.tokens],
            "tables": words[self.tables],
            **{name: error_size(self.sizes[name]) if name in self.sizes else "" for name in _SIZES},
            "allowed": error_size(self.allowed),
            "verdict": "BROKEN" if [*self.faults()] else "holds",
        }

    def _table(self) -> Table:
        """A table of one row."""
        return Table.of([self.row])

    def faults(self) -> Iterator[str]:
        """The differences that are not allowed, as text."""
        if not self.tokens:
            yield f"the tokens differ in step {self.steps}, the last that was compared"
        if self.tables is False:
            yield "a stage's request table differs"
        for name, size in self.sizes.items():
            if not size <= self.allowed:  # not `>`: NaN is not allowed either
                yield f"the {name} differ by {error_size(size)}, allowed {error_size(self.allowed)}"
        if not (self.allowed or self.bitwise or any(self.sizes.values())):
            yield "zeros differ in sign"


def trace_run(
    model: Model, way: Way, prompts: Sequence[Sequence[int]], max_tokens: int
) -> RunTrace:
    """Generate greedily in one way, and record the results of every step.

    Args:
        model: from `weft.load`.
        way: the number of stages, and the graph mode.
        prompts: the token ids of each prompt, all in one batch.
        max_tokens: the most tokens to generate for each.

    >>> import weft
    >>> model, prompts = weft.load("demo", "cpu", "float32"), [[65, 66, 67], [97]]
    >>> eager, graphs = (trace_run(model, Way("", 1, mode), prompts, 3) for mode in ("none", "full"))
    >>> list(compare_runs(graphs, eager).faults())
    []
    """
    check_values(
        f"trace_run(model, way, prompts, {max_tokens!r})",
        {"max_tokens": COUNT},
        {"max_tokens": max_tokens},
    )
    limits = Limits(len(prompts), sum(map(len, prompts)))
    runner = make_runner(model, limits, num_stages=way.num_stages, mode=way.mode, keep_logits=True)
    state = make_state(model, runner.layouts, [len(ids) + max_tokens for ids in prompts])
    batch = Batch.ragged(range(len(prompts)), prompts, device=model.device)
    generated: list[list[int]] = [[] for _ in prompts]
    rows = [*range(len(prompts))]
    steps = []
    while rows:
        start = perf_counter()
        state, out = runner.step(runner.params, state, batch)
        for row, token in zip(rows, out.token_ids.tolist(), strict=True):
            generated[row].append(token)
        steps.append(_keep(batch, out, state, perf_counter() - start))
        ends = model.config.eos_token_ids
        rows = [
            row
            for row in rows
            if len(generated[row]) < max_tokens and generated[row][-1] not in ends
        ]
        if rows:
            batch = Batch.decode(rows, device=model.device)
    trace_fields = tuple(steps), generated, _calls(runner, steps), model.functions.batch_invariant
    return RunTrace(way, [[*ids] for ids in prompts], *trace_fields)


def _keep(batch: Batch, out: Output, state: Sequence[State], seconds: float) -> TracedStep:
    assert out.logits is not None
    # As bytes, since the tables have several dtypes and are compared bit for bit.
    tables = [
        [x.flatten().view(torch.uint8) for name, x in leaves_with_names(s) if name in TABLES]
        for s in state
    ]
    kept = TracedStep(
        batch.descriptor,
        seconds,
        torch.stack([batch.rows, out.token_ids]),
        out.logits.clone(),
        torch.cat([stage.kv_pages for stage in state]),
        torch.stack([torch.cat(parts) for parts in tables]),
    )
    if out.logits.is_cuda:
        # Wait, so that the copies do not count in the next step's time.
        torch.cuda.synchronize(out.logits.device)
    return kept


def _calls(runner: Runner, steps: Sequence[TracedStep]) -> dict[str, int]:
    """Captures, replays and eager calls, of the whole step or of each stage on each micro-batch."""
    infos = [graph.cache_info() for graph in runner.graphs]
    stages = len(runner.layouts)
    if infos:
        eager = 0
    else:
        eager = sum(stages * min(stages, step.descriptor.num_reqs) for step in steps)
    return {
        "captures": sum(info.captures for info in infos),
        "replays": sum(info.replays for info in infos),
        "eager calls": eager + sum(info.eager for info in infos),
    }


def compare_runs(trace: RunTrace, reference: RunTrace) -> RunComparison:
    """Compare two runs up to the first step whose tokens differ, since later steps have different
    inputs.

    Args:
        trace, reference: runs of one model from the same prompts. Their bits have to be equal if
            both compute in the same shapes (that is, with the same number of stages), or if the
            model is batch invariant.

    Raises:
        RequestError: the prompts differ.
    """
    if trace.prompts != reference.prompts:
        description = f"{trace.prompts!r:.80} and {reference.prompts!r:.80}"
        raise RequestError(
            "compare_runs(trace, reference)",
            f"prompts {description}",
            "two runs from the same prompts",
        )
    # Not strict: after a token that differs, one run may end sooner.
    same = [
        torch.equal(a.tokens, b.tokens) for a, b in zip(trace.steps, reference.steps, strict=False)
    ]
    if False in same:
        steps = same.index(False) + 1
    else:
        steps = len(same)
    pairs = [*zip(trace.steps[:steps], reference.steps[:steps], strict=True)]
    values = {
        "logits": [(a.logits, b.logits) for a, b in pairs],
        "KV pages": [(a.kv_pages, b.kv_pages) for a, b in pairs],
    }
    in_same_shapes = trace.way.num_stages == reference.way.num_stages
    return RunComparison(
        trace.way,
        reference.way,
        steps,
        tokens=all(same) and len(trace.steps) == len(reference.steps),
        # All stages have equal tables, so one of the reference's stages stands for all.
        tables=all(bool((a.tables == b.tables[:1]).all()) for a, b in pairs),
        allowed=0.0 if in_same_shapes or _are_invariant(trace, reference) else TOLERANCE,
        **_differences(values),
    )


def compare_alone(trace: RunTrace, alone: Sequence[RunTrace]) -> RunComparison:
    """Compare a run of several prompts with runs of each prompt alone: the tokens, and the logits
    up to the first token that differs. If the model is batch invariant, the bits have to be equal.

    Args:
        trace: a run.
        alone: a run of each of its prompts, in the same order.

    Raises:
        RequestError: the prompts differ.
    """
    if [single.prompts for single in alone] != [[prompt] for prompt in trace.prompts]:
        problem = f"prompts {trace.prompts!r:.80} and {[single.prompts for single in alone]!r:.80}"
        raise RequestError("compare_alone(trace, alone)", problem, "a run of each of the prompts")
    pairs = list[tuple[Tensor, Tensor]]()
    for row, single in enumerate(alone):
        together = [
            step.logits[step.tokens[0] == row]
            for step in trace.steps
            if (step.tokens[0] == row).any()
        ]
        tokens = zip(trace.token_ids[row], single.token_ids[0], strict=False)
        same = next((i + 1 for i, (a, b) in enumerate(tokens) if a != b), len(together))
        pairs += [(a, b.logits) for a, b in zip(together[:same], single.steps[:same], strict=False)]
    return RunComparison(
        trace.way,
        Way("alone", alone[0].way.num_stages, alone[0].way.mode),
        len(trace.steps),
        tokens=trace.token_ids == [single.token_ids[0] for single in alone],
        tables=None,
        allowed=0.0 if _are_invariant(trace, *alone) else TOLERANCE,
        **_differences({"logits": pairs}),
    )


def _are_invariant(*traces: RunTrace) -> bool:
    return all(trace.batch_invariant for trace in traces)


def _differences(values: Mapping[str, Sequence[tuple[Tensor, Tensor]]]) -> dict[str, Any]:
    """The largest difference of each kind of values, and whether all values are bitwise equal."""
    return {
        "sizes": {
            name: float(torch.stack([(a - b).abs().max() for a, b in pairs]).max())
            for name, pairs in values.items()
        },
        # By bytes: by value, 0.0 equals -0.0, and NaN differs from itself.
        "bitwise": all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for pairs in values.values()
            for a, b in pairs
        ),
    }
