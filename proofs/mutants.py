"""Bugs planted on purpose: for each law, versions of weft that break it. A law that misses its mutant is not a law.

Each is a real bug of an engine that patched a mutable runner, or its nearest kin here; while a mutant is planted, weft
computes wrong results.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import attrs
import torch
from torch import Tensor

from weft.batch import Batch
from weft.descriptor import BatchDescriptor
from weft.donation import donates
from weft.effects import Run
from weft.outputs import Output
from weft.padding import inert, pad
from weft.proofs.suite import Law, find
from weft.state import State, advance, resolve
from weft.transforms.backends.tape import Operation
from weft.transforms.dispatch import Decision, dispatch
from weft.transforms.ladder import Ladder
from weft.transforms.memo import LeafKey, leaf_key
from weft.transforms.microbatch import join, split
from weft.transforms.results import Outputs
from weft.transforms.schedule import interleave
from weft.transforms.transfer import CopyIn, Handover, hand_over
from weft.trees import find_descriptors, tree_flatten, tree_unflatten


@attrs.frozen
class Mutant:
    """A planted bug and the law that must catch it.

    Args:
        name: what is wrong.
        law: the law that breaks.
        plant: a context in which weft has the bug.
    """

    name: str
    law: Law
    plant: Callable[[], AbstractContextManager[Any]]

    def __str__(self) -> str:
        return f"{self.law.number}: {self.name}"


def _replace(home: str, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    """A context in which `name` of the module (or class) `home` is `value`."""
    # By import_module: a package may show a function under the name of the module that defines it.
    return lambda: mock.patch.object(import_module(home), name, value)


def _nothing(self: CopyIn, leaves: Sequence[Any]) -> None:
    pass


def _stale_tail(buffer: Tensor, shape: Sequence[int]) -> Iterator[Tensor]:
    return iter(())


def _blind_dispatch(descriptor: Any, ladder: Sequence[Any]) -> Any:
    if isinstance(descriptor, BatchDescriptor) and descriptor.num_tokens == descriptor.num_reqs:
        descriptor = BatchDescriptor.uniform(descriptor.num_reqs)
    return dispatch(descriptor, ladder)


class _Idle(Operation):
    """An operator of the tape that does not run again where a capture in pieces is cut."""

    def run(self) -> None:
        if self.func._schema.name not in ("weft::paged_attention", "aten::mm", "aten::sort", "aten::_softmax"):
            super().run()


def _largest(descriptor: Any, ladder: Ladder[Any]) -> Any:
    covering = [d for d in ladder if d.covers(descriptor)]
    return Decision("full", covering[0], "the largest") if covering else dispatch(descriptor, ladder)


def _lost_dispatch(descriptor: Any, ladder: Sequence[Any]) -> Any:
    return dispatch(descriptor, ())


def _key_without_address(leaf: Any, shape: Any, by_reference: bool) -> Any:
    key = leaf_key(leaf, shape, by_reference)
    return attrs.evolve(key, address=None) if isinstance(key, LeafKey) else key


def _head_reads_the_tail(state: State, batch: Batch) -> Any:
    found = resolve(state, batch)
    last = found.last_index
    return attrs.evolve(found, last_index=torch.where(last == last.max(), found.input_ids.shape[0] - 1, last))


@donates("state")
def _padding_is_row_0(state: State, batch: Batch, out: Output) -> State:
    return advance(state, attrs.evolve(batch, rows=batch.rows.clamp(min=0)), out)


def _rank_0_never_advances(programs: Any) -> Iterator[Any]:
    return (s for s in interleave(programs) if not (s.rank == 0 and s.effect == Run("advance", s.effect.microbatch)))


def _split_backwards(batch: Any, parts: int) -> tuple[Any, ...]:
    return split(batch, parts)[::-1]


def _join_backwards(outputs: Sequence[Any], parts: Sequence[Any]) -> Any:
    return join(outputs[::-1], parts[::-1])


def _live(tree: Any, descriptor: Any) -> Any:
    own = find_descriptors(tree)[0]
    return pad(tree, descriptor) if descriptor.covers(own) else inert(tree, descriptor)


@contextmanager
def _live_warm_up() -> Iterator[None]:
    """As for a state that is too large to be saved."""
    with _replace(_CAPTURE, "inert", _live)(), _replace(_CAPTURE, "SAVED_BYTES", -1)():
        yield


@contextmanager
def _unrestored(tensors: list[Tensor]) -> Iterator[None]:
    yield


def _home_without_writing(value: Any, home: Tensor | None) -> Any:
    return value if home is None else home


def _swapped(outputs: Outputs, buffers: Sequence[Any], borrow: bool) -> Handover:
    def swap(made: Any, references: Any, build: Callable[..., Any]) -> Any:
        leaves, structure = tree_flatten(build(made, references))
        return tree_unflatten([*leaves[1:2], *leaves[:1], *leaves[2:]], structure)

    planned = hand_over(outputs, buffers, borrow)
    return attrs.evolve(planned, build=partial(swap, build=planned.build))


def _borrowing(outputs: Outputs, buffers: Sequence[Any], borrow: bool) -> Handover:
    return hand_over(outputs, buffers, True)


_GRAPHIFY, _CAPTURE = "weft.transforms.graphify", "weft.transforms.capture"
_TRANSFER, _RESULTS, _LOCAL = "weft.transforms.transfer", "weft.transforms.results", "weft.transforms.transports.local"
_TAPE = "weft.transforms.backends.tape"
_LAWS, _CALL = "weft.proofs.laws.compare", "weft.transforms.call"
_PIPELINE, _MICROBATCH, _DECODER = "weft.transforms.pipeline", "weft.transforms.microbatch", "weft.stages.decoder"

MUTANTS = (
    Mutant(
        "a replay reads its capture's inputs", find("L1", "models"), lambda: mock.patch.object(CopyIn, "fill", _nothing)
    ),
    Mutant("a larger batch's tail stays", find("L1", "models"), _replace(_TRANSFER, "tails", _stale_tail)),
    Mutant("new state is not written", find("L1", "pure"), _replace(_RESULTS, "_write_back", _home_without_writing)),
    Mutant("two results change places", find("L1", "pure"), _replace(_GRAPHIFY, "hand_over", _swapped)),
    Mutant("the key forgets addresses", find("L1", "pure"), _replace(_CALL, "leaf_key", _key_without_address)),
    Mutant("dispatch finds no graph", find("L1", "models"), _replace(_GRAPHIFY, "dispatch", _lost_dispatch)),
    Mutant("a capture counts as a step", find("L1", "ladder"), _replace(_CAPTURE, "_restored", _unrestored)),
    Mutant("padding points to row 0", find("L2", "inert"), _replace(_LAWS, "advance", _padding_is_row_0)),
    Mutant("the head reads the tail", find("L2", "stages"), _replace(_DECODER, "resolve", _head_reads_the_tail)),
    Mutant(
        "rank 0 does not learn the tokens", find("L3", "models"), _replace(_LOCAL, "interleave", _rank_0_never_advances)
    ),
    Mutant("outputs are joined backwards", find("L3", "func"), _replace(_PIPELINE, "join", _join_backwards)),
    Mutant("attention is not run again", find("L5", "models"), _replace(_TAPE, "Operation", _Idle)),
    Mutant("a split operator is not run again", find("L5", "pure"), _replace(_TAPE, "Operation", _Idle)),
    Mutant("dispatch takes the largest", find("L6", "least"), _replace(_GRAPHIFY, "dispatch", _largest)),
    Mutant("dispatch finds no graph", find("L6", "start"), _replace(_GRAPHIFY, "dispatch", _lost_dispatch)),
    Mutant("equal shape is taken for equal class", find("L7"), _replace(_GRAPHIFY, "dispatch", _blind_dispatch)),
    Mutant("the warm-up runs on the live batch", find("L8", "models"), _live_warm_up),
    Mutant("the state is not restored", find("L8", "pure"), _replace(_CAPTURE, "_restored", _unrestored)),
    Mutant("results are borrowed", find("L9"), _replace(_GRAPHIFY, "hand_over", _borrowing)),
    Mutant("donation leaves the old value alive", find("L9"), _replace(_GRAPHIFY, "donate", lambda tree, to: tree)),
    Mutant("micro-batches run backwards", find("L13"), _replace(_MICROBATCH, "split", _split_backwards)),
)
"""All planted bugs, at least one for each row of `weft.proofs.suite.LAWS`."""
