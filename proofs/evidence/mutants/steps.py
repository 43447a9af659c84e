"""Planted bugs of steps: in dispatch, padding in a model, pipelines, sampling and the order of
requests."""

from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import attrs
import torch
from torch import Tensor

from weft.batches.batch import Batch
from weft.batches.descriptor import BatchDescriptor, Descriptor, arguments_of
from weft.batches.outputs import Output
from weft.batches.state import State, _find_adapters, advance, resolve
from weft.effects import Effect, Run
from weft.ops.sampling.logits import SEED
from weft.ops.sampling.sample import count_tokens, sample_rows
from weft.ops.sampling.table import SamplingTable
from weft.proofs.evidence.mutants.mutant import Mutant, replace
from weft.proofs.evidence.runs.suite import find
from weft.torchapi.private import in_dispatch_mode
from weft.transforms.graphs.dispatch import Decision, dispatch
from weft.transforms.graphs.ladder import Ladder, as_ladder
from weft.transforms.pipelines.parts import join, split
from weft.transforms.pipelines.worker import Link, Worker
from weft.values.donation import donates

_GRAPHS = "weft.transforms.graphs.cache"
_COMPARE = "weft.proofs._laws.compare"
_STATE = "weft.batches.state"
_INPUTS = "weft.stages.inputs"
_HEAD = "weft.stages.head"
_PIPELINE = "weft.transforms.pipelines.pipeline"
_MICROBATCH = "weft.transforms.pipelines.microbatch"


def _in_capture() -> bool:
    # The tape captures in a dispatch mode, and a GPU on a capturing stream.
    return in_dispatch_mode() or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )


def _blind_dispatch(descriptor: Any, ladder: Sequence[Any]) -> Any:
    # One token for each request looks like a decode. A prompt of one token is not one: it must not
    # run in a graph that takes its requests to continue.
    if isinstance(descriptor, BatchDescriptor) and descriptor.num_tokens == descriptor.num_reqs:
        descriptor = BatchDescriptor.uniform(descriptor.num_reqs, 1, descriptor.num_active_loras)
    return dispatch(descriptor, ladder)


def _largest(descriptor: Any, ladder: Ladder[Any]) -> Any:
    covering = [d for d in ladder if d.covers(descriptor)]
    if covering:
        # The result is right, and only padded more than it needs to be.
        return Decision("full", covering[0], "the largest")
    return dispatch(descriptor, ladder)


def _by_one_side(descriptor: Any, ladder: Any) -> Any:
    covering = [d for d in as_ladder(ladder).full if d.covers(descriptor)]
    if not covering:
        return dispatch(descriptor, ladder)
    return attrs.evolve(
        # Among classes of different heights this is right; two of one height differ in their width.
        dispatch(descriptor, ladder),
        descriptor=min(covering, key=lambda d: d.height),
    )


def _covers_as_tuples(self: Any, other: Any) -> bool:
    sizes, other_sizes = (tuple(arguments_of(each).values()) for each in (self, other))
    # Tuples compare by their first difference: (2, 1) would cover (1, 2). Classes of one size are
    # right.
    return sizes >= other_sizes


def _dispatch_without_loras(descriptor: Any, ladder: Any) -> Any:
    if isinstance(descriptor, BatchDescriptor):
        # The tokens may even be right, where the adapters change little: the law reads which graph
        # ran.
        descriptor = attrs.evolve(descriptor, num_active_loras=0)
    return dispatch(descriptor, ladder)


def _adapters_of_neighbours(state: State, batch: Batch) -> Any:
    adapters, active = _find_adapters(state, batch)
    # Requests of one adapter, or a batch of one, stay right.
    return None if adapters is None else adapters.roll(1), active


def _lost_dispatch(descriptor: Any, ladder: Sequence[Any]) -> Any:
    # All results are right, since the step runs without a graph. Only the counts show it: no
    # capture and no replay where the ladder has a class.
    return dispatch(descriptor, ())


def _head_reads_the_tail(state: State, batch: Batch) -> Any:
    resolved = resolve(state, batch)
    last = resolved.last_index
    return attrs.evolve(
        # Without padding the last request's last token is the last of the batch, so an unpadded
        # step is right.
        resolved,
        last_index=torch.where(last == last.max(), resolved.input_ids.shape[0] - 1, last),
    )


@donates("state")
def _padding_is_row_0(state: State, batch: Batch, out: Output) -> State:
    # Padding has row -1. A batch without padding stays right, as do all outputs of the step itself.
    return advance(state, attrs.evolve(batch, rows=batch.rows.clamp(min=0)), out)


_perform = Worker.perform


def _rank_0_never_advances(self: Worker, effect: Effect, link: Link) -> None:
    # The step's outputs are right: the state of one rank is a token behind, for the next step.
    if not (self.rank == 0 and effect == Run("advance", effect.microbatch)):
        _perform(self, effect, link)


def _advances_outside_graphs_alone(self: Worker, effect: Effect, link: Link) -> None:
    # Without graphs all is right, so that L3 holds and only L4, which commutes both, can fail.
    (_rank_0_never_advances if _in_capture() else _perform)(self, effect, link)


def _split_backwards(batch: Any, parts: int) -> tuple[Any, ...]:
    # One micro-batch is its own reverse.
    return split(batch, parts)[::-1]


def _join_backwards(outputs: Sequence[Any], parts: Sequence[Any], batch: Any) -> Any:
    return join(outputs[::-1], parts[::-1], batch)


def _join_backwards_in_graphs(outputs: Sequence[Any], parts: Sequence[Any], batch: Any) -> Any:
    return (_join_backwards if _in_capture() else join)(outputs, parts, batch)


def _with_seeds(table: SamplingTable, seeds: Any) -> SamplingTable:
    ints = table.ints.clone()
    ints[:, SEED] = seeds
    return attrs.evolve(table, ints=ints)


def _baked_seed(logits: Tensor, table: SamplingTable, *where: Any) -> Any:
    """The host passes the seed to the kernel as a Python number, which a capture freezes."""
    # 77 stands for any number that the host knew at the capture: a graph would draw by it forever.
    return sample_rows(logits, _with_seeds(table, 77) if _in_capture() else table, *where)


def _seed_of_place(logits: Tensor, table: SamplingTable, rows: Tensor, *where: Any) -> Any:
    seeds = table.ints[:, SEED].scatter(
        # The place in the batch is the row as long as nothing ends, or is reordered.
        0,
        rows.clamp(min=0),
        torch.arange(len(rows), device=rows.device),
    )
    return sample_rows(logits, _with_seeds(table, seeds), rows, *where)


def _rules_of_the_first(logits: Tensor, table: SamplingTable, rows: Tensor, *where: Any) -> Any:
    """One request's parameters are used for the whole batch."""
    # Requests with equal parameters stay right, as does the first one.
    floats = table.floats[rows[:1]].expand_as(table.floats).contiguous()
    return sample_rows(logits, attrs.evolve(table, floats=floats), rows, *where)


def _counts_nothing(table: SamplingTable, *what: Any) -> SamplingTable:
    """Penalties see the prompt alone."""
    return table


def _counts_chunks(
    table: SamplingTable, rows: Tensor, token_ids: Tensor, kept: Tensor
) -> SamplingTable:
    """A discarded draw after a chunk of a prompt is counted."""
    # A draw after a chunk is thrown away, and its token must not be penalised: only prompts in
    # several chunks, with penalties, show it.
    return count_tokens(table, rows, token_ids, torch.ones_like(kept))


def _in_order_of_rows(state: State, batch: Batch) -> Any:
    """Requests are sorted, as attention back ends prefer, and not restored to their order."""
    resolved = resolve(state, batch)
    return attrs.evolve(
        # A batch whose requests are in that order already stays right.
        resolved,
        last_index=resolved.last_index[batch.rows.argsort(descending=True)],
    )


# The bugs of `dispatch`, `pipeline`, `microbatch` and the models' stages.
STEPS = (
    Mutant(
        "dispatch finds no graph",
        find("L1", "models"),
        replace(_GRAPHS, "dispatch", _lost_dispatch),
    ),
    Mutant(
        "padding points to row 0",
        find("L2", "padding is inert"),
        replace(_COMPARE, "advance", _padding_is_row_0),
    ),
    Mutant(
        "the head reads the tail",
        find("L2", "stages"),
        replace(_INPUTS, "resolve", _head_reads_the_tail),
    ),
    Mutant(
        "rank 0 does not learn the tokens",
        find("L3", "models"),
        partial(mock.patch.object, Worker, "perform", _rank_0_never_advances),
    ),
    Mutant(
        "outputs are joined backwards",
        find("L3", "func"),
        replace(_PIPELINE, "join", _join_backwards),
    ),
    Mutant(
        "in a graph, rank 0 does not learn the tokens",
        find("L4", "models"),
        partial(mock.patch.object, Worker, "perform", _advances_outside_graphs_alone),
    ),
    Mutant(
        "in a graph, outputs are joined backwards",
        find("L4", "func"),
        replace(_PIPELINE, "join", _join_backwards_in_graphs),
    ),
    Mutant(
        "dispatch takes the largest", find("L6", "least"), replace(_GRAPHS, "dispatch", _largest)
    ),
    Mutant(
        "dispatch finds no graph", find("L6", "start"), replace(_GRAPHS, "dispatch", _lost_dispatch)
    ),
    Mutant(
        "dispatch looks at one side alone",
        find("L6", "images"),
        replace(_GRAPHS, "dispatch", _by_one_side),
    ),
    Mutant(
        "an inherited order compares sizes as tuples",
        find("L6", "images"),
        lambda: mock.patch.object(Descriptor, "covers", _covers_as_tuples),
    ),
    Mutant(
        "equal shape is taken for equal class",
        find("L7"),
        replace(_GRAPHS, "dispatch", _blind_dispatch),
    ),
    Mutant(
        "a graph of 0 LoRAs is taken for 1",
        find("L7"),
        replace(_GRAPHS, "dispatch", _dispatch_without_loras),
    ),
    Mutant(
        "a token has the adapter of its neighbour",
        find("L11", "adapters"),
        replace(_STATE, "_find_adapters", _adapters_of_neighbours),
    ),
    Mutant(
        "micro-batches run backwards", find("L13"), replace(_MICROBATCH, "split", _split_backwards)
    ),
    Mutant(
        "a seed of the host is baked into a graph",
        find("L16"),
        replace(_HEAD, "sample_rows", _baked_seed),
    ),
    Mutant(
        "a seed goes with the place in the batch",
        find("L16"),
        replace(_HEAD, "sample_rows", _seed_of_place),
    ),
    Mutant(
        "all requests have the first one's sampling parameters",
        find("L16"),
        replace(_HEAD, "sample_rows", _rules_of_the_first),
    ),
    Mutant(
        "generated tokens are not counted",
        find("L16"),
        replace(_STATE, "count_tokens", _counts_nothing),
    ),
    Mutant(
        "tokens after a chunk are counted",
        find("L16"),
        replace(_STATE, "count_tokens", _counts_chunks),
    ),
    Mutant(
        "a token has the adapter of its neighbour",
        find("L17"),
        replace(_STATE, "_find_adapters", _adapters_of_neighbours),
    ),
    Mutant(
        "requests are sorted and not put back",
        find("L17"),
        replace(_INPUTS, "resolve", _in_order_of_rows),
    ),
)
