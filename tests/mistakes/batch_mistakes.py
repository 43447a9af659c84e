"""Mistakes with batches and their classes, ladders, padding, and state that is donated or lent."""

import attrs
import torch
from answers import LIMITS, Mistake, X, f, g, model
from own_batches import Length, Signal
from refusal import USE_THE_NEW
from torch import Tensor

import weft
from weft.errors import CaptureError, DescriptorError, DonatedError, StaleResultError
from weft.transforms import make_runner, make_state


@attrs.frozen
class NoOrder:
    """A descriptor that forgot `covers`."""

    size: int


def donated_twice() -> None:
    step = weft.graphify(g, donate_argnames="state")
    state = torch.zeros(3)
    step(state, X)
    step(state, X)


def a_dead_state() -> None:
    runner = make_runner(model(), LIMITS, mode="none")
    (state,) = make_state(model(), runner.layouts, lengths=[16])
    runner.stages[0](runner.params[0], state, weft.Batch.ragged([0], [[5]]), None)
    _ = state.kv_pages


def a_borrowed_result() -> None:
    step = weft.graphify(f, outputs="borrow")
    with weft.check_borrowed():
        step(X)
        first = step(X)
        step(X)
        _ = first + 1


@attrs.define
class Unhashable:
    size: int

    def covers(self, other: "Unhashable") -> bool:
        return self.size >= other.size


@weft.pytree
@attrs.frozen(eq=False)
class Picture:
    length: Length = attrs.field(metadata=weft.descriptor_field())
    x: Tensor = attrs.field(metadata=weft.axes("steps", "steps"))


ONE = weft.BatchDescriptor.uniform(1)
LADDER = [ONE]


MISTAKES = {
    "ladder: a mode of another name": Mistake(
        lambda: weft.make_ladder("cudagraph", LIMITS),
        DescriptorError,
        "make_ladder('cudagraph', Limits(max_num_reqs=4, max_num_tokens=16, query_lens=(1,),"
        " active_loras=(0,)), sizes=None, capability='full')",
        "an unknown mode",
        "one of none, piecewise, full_decode_only, full, full_and_piecewise",
    ),
    "ladder: a number for limits": Mistake(
        lambda: weft.make_ladder("full", 8),
        DescriptorError,
        "make_ladder('full', 8, sizes=None, capability='full')",
        "limits that are not a weft.Limits",
        "weft.Limits(max_num_reqs, max_num_tokens)",
    ),
    "ladder: a class without covers": Mistake(
        lambda: weft.graphify(f, ladder=[NoOrder(4)]),
        CaptureError,
        "graphify(f, ...)",
        "ladder=[NoOrder(size=4)]; NoOrder has no method covers",
        "a sequence of descriptors, as from weft.make_ladder(mode, limits), or of a hashable class"
        " (such as an @attrs.frozen one) with a method covers(other)",
    ),
    "ladder: a tensor where a batch should be": Mistake(
        lambda: weft.graphify(f, ladder=weft.make_ladder("full", LIMITS))(X),
        CaptureError,
        "graphify(f, ladder=...)(x)",
        "a ladder, but no argument that holds a descriptor",
        "pass a weft.Batch (or your own class with a weft.descriptor_field()) with one descriptor,"
        " or leave the ladder out",
    ),
    "dispatch: a batch for its class": Mistake(
        lambda: weft.dispatch(weft.Batch.decode([0]), weft.make_ladder("full", LIMITS)),
        DescriptorError,
        "dispatch(Batch, Ladder)",
        "a batch where its class should be",
        "dispatch(batch.descriptor, ladder)",
    ),
    "batch: a row for rows": Mistake(
        lambda: weft.Batch.decode(3),
        DescriptorError,
        "Batch.decode(rows)",
        "rows is 3, an int",
        "rows of the state, as in [0, 2]",
    ),
    "batch: texts for token ids": Mistake(
        lambda: weft.Batch.ragged([0], ["The"]),
        DescriptorError,
        "Batch.ragged(rows, token_ids)",
        "token_ids[0] is 'The', a str",
        "model.encode(token_ids[0])",
    ),
    "batch: a class that contradicts itself": Mistake(
        lambda: weft.BatchDescriptor(7, 2, query_len=3),
        DescriptorError,
        "BatchDescriptor(7, 2, query_len=3)",
        "num_tokens=7 is not num_reqs*query_len=2*3",
        "BatchDescriptor.uniform(num_reqs=2, query_len=3), or query_len=None",
    ),
    "pad: a number for a class": Mistake(
        lambda: weft.pad(weft.Batch.decode([0]), 4),
        DescriptorError,
        "weft.pad(Batch, 4)",
        "4 where a descriptor should be",
        "a hashable value with a method covers(other): a weft.BatchDescriptor, or an @attrs.frozen"
        " class",
    ),
    "pad: to a smaller class": Mistake(
        lambda: weft.pad(weft.Batch.decode([0, 1]), weft.BatchDescriptor.uniform(1)),
        DescriptorError,
        "weft.pad(Batch, uniform x1, 1 reqs)",
        "the batch is uniform x1, 2 reqs, which that descriptor does not cover",
        "pad to a descriptor d with d.covers(batch.descriptor)",
    ),
    "donation: the old state again": Mistake(
        donated_twice,
        DonatedError,
        "g(...)",
        "state, a tensor of shape (3,) that was donated to g(state)",
        USE_THE_NEW,
    ),
    "donation: a field of the old state": Mistake(
        a_dead_state,
        DonatedError,
        "State.kv_pages",
        "this State was donated to stage 0 of 1(state)",
        USE_THE_NEW,
    ),
    "donation: a borrowed result too late": Mistake(
        a_borrowed_result,
        StaleResultError,
        "add(...)",
        "a borrowed result of f, which 1 later replay has overwritten",
        'use it before the next call, clone it, or write graphify(..., outputs="safe")',
    ),
    "batch: a class that cannot be hashed": Mistake(
        lambda: weft.graphify(f, ladder=[Unhashable(4)]),
        CaptureError,
        "graphify(f, ...)",
        "ladder=[Unhashable(size=4)]; Unhashable cannot be hashed",
        "<any>(such as an @attrs.frozen one) with a method covers(other)",
    ),
    "batch: a query length for several": Mistake(
        lambda: weft.Limits(4, 16, query_lens=1),
        DescriptorError,
        "weft.Limits(4, 16, query_lens=1)",
        "an int",
        "a tuple of whole numbers: query_lens=(1,)",
    ),
    "batch: a size below one": Mistake(
        lambda: weft.make_ladder("full", weft.Limits(4, 16), sizes=[-1]),
        DescriptorError,
        "make_ladder('full', <any>, sizes=[-1], <any>)",
        "sizes=[-1]",
        "sizes of at least 1, or None for the usual rungs",
    ),
    "batch: a table of one class": Mistake(
        lambda: weft.dispatch_table(LADDER, ONE),
        DescriptorError,
        "dispatch_table(list, BatchDescriptor)",
        "one class",
        "dispatch_table(ladder, [descriptor, ...])",
    ),
    "batch: a table the other way round": Mistake(
        lambda: weft.dispatch_table(LADDER, weft.make_ladder("full", weft.Limits(4, 16))),
        DescriptorError,
        "dispatch_table(list, Ladder)",
        "a ladder where the classes of batches should be",
        "dispatch_table(ladder, [descriptor, ...])",
    ),
    "batch: a size to plot that no class has": Mistake(
        lambda: weft.dispatch_table(LADDER, LADDER).plot("tokens"),
        DescriptorError,
        "dispatch_table(...).plot('tokens')",
        "a size that these classes do not have",
        "one of num_tokens, num_reqs, query_len, num_active_loras, or None: the first that is"
        " padded",
    ),
    "batch: a token that is half": Mistake(
        lambda: weft.Batch.ragged([0], [[5, 1.5]]),
        DescriptorError,
        "Batch.ragged(rows, token_ids)",
        "token_ids[0] holds 1.5, a float",
        "whole numbers",
    ),
    "batch: a row by name": Mistake(
        lambda: weft.Batch.decode(["A"]),
        DescriptorError,
        "Batch.decode(rows)",
        "rows holds 'A', a str",
        "whole numbers",
    ),
    "batch: a number for a name of a size": Mistake(
        lambda: weft.axes(0),
        DescriptorError,
        "weft.axes(0)",
        "0, an int",
        'names of sizes of the descriptor, as in axes("num_tokens"); None for a size of its own',
    ),
    "batch: more names than dimensions": Mistake(
        lambda: weft.pad(Picture(Length(3), X), Length(4)),
        DescriptorError,
        "Picture(x=<tensor of shape (3,)>)",
        "1 dimensions in a field with axes('steps', 'steps')",
        "a name for each dimension, or for the first ones",
    ),
    "batch: a class that the tensors contradict": Mistake(
        lambda: weft.pad(Signal(Length(2), X), Length(4)),
        DescriptorError,
        "weft.pad(Signal, Length(steps=4))",
        "a tensor of shape (3,) in a batch of class 'Length(steps=2)', which needs (2,)",
        "give the batch the descriptor of its tensors",
    ),
}
