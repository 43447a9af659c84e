"""`microbatch`: run a step on parts of its batch, one after the other. By law it changes nothing."""

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar, cast

import attrs
import torch
from torch import Tensor

from weft.arguments import is_int, kind_of
from weft.batch import Batch
from weft.descriptor import BatchDescriptor
from weft.donation import clone, declare_donated, donated_argnames
from weft.errors import CaptureError, DescriptorError, ProgramError
from weft.torchapi import in_dispatch_mode
from weft.transforms.graphs.calls.borrowing import declare_lending, lends
from weft.transforms.pipelines.pipeline_checks import check_step
from weft.transforms.pipelines.transports.worker import of_length
from weft.trees import (
    Axes,
    find_descriptors,
    leaf_axes,
    leaves_with_names,
    map_sized,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
)

F = TypeVar("F", bound=Callable[..., Any])


def split(batch: Any, parts: int) -> tuple[Any, ...]:
    """Cut a batch into at most `parts` batches of whole requests, as even in their number as can be.

    Args:
        batch: a `Batch`; or any tree of tensors whose first dimensions agree, which is cut along it.
        parts: at least 1. A batch of fewer requests is cut into one part a request.

    A ragged `Batch` is cut where its tensors say, which reads `query_start_loc` on the host: inside a captured
    function cut uniform batches only, or capture the parts (`pipeline(map(graphify, stages))`).

    >>> [str(b.descriptor) for b in split(Batch.decode([5, 6, 7]), 2)]
    ['uniform x1, 1 reqs', 'uniform x1, 2 reqs']
    """
    if not is_int(parts, 1):
        seen = "fewer than one part" if isinstance(parts, int) else "no number of parts"
        raise DescriptorError(f"split(batch, {parts!r})", seen, "a number of micro-batches >= 1")
    if not isinstance(batch, Batch) and find_descriptors(batch):
        raise DescriptorError(
            f"split({type(batch).__name__}, {parts})",
            "a sized value of another class, whose descriptor only its author can cut",
            "pass a weft.Batch or plain tensors, or cut it yourself and call the step on each part",
        )
    count = batch.descriptor.num_reqs if isinstance(batch, Batch) else _common_length(batch)
    parts = min(parts, count) or 1
    if parts == 1:
        return (batch,)
    bounds = [count * i // parts for i in range(parts + 1)]
    if isinstance(batch, Batch):
        return _split_batch(batch, bounds)
    return tuple(
        tree_map(lambda x, a=a, b=b: x[a:b] if isinstance(x, Tensor) else x, batch) for a, b in pairwise(bounds)
    )


def _split_batch(batch: Batch, bounds: Sequence[int]) -> tuple[Batch, ...]:
    old = batch.descriptor
    # A list of Python ints decides the shapes of the parts; only a uniform class knows it without a host read.
    if old.query_len is not None:
        starts = [r * old.query_len for r in bounds]
    else:
        if in_dispatch_mode():
            raise CaptureError(
                f"split(<'{old}'>, {len(bounds) - 1}) inside a captured function",
                "a ragged batch, whose parts have sizes that only its tensors know",
                "capture the parts: pipeline(map(graphify, stages)); or a ladder of uniform classes alone",
            )
        all_starts = batch.query_start_loc.tolist()
        starts = [all_starts[r] for r in bounds[:-1]] + [old.num_tokens]
    spans = zip(bounds, bounds[1:], starts, starts[1:], strict=False)
    return tuple(_part(batch, (a, b), (first, end)) for a, b, first, end in spans)


def _part(batch: Batch, reqs: tuple[int, int], tokens: tuple[int, int]) -> Batch:
    """The requests from one to another, and their tokens, of every field that says what it follows."""
    old, (a, b), (first, end) = batch.descriptor, reqs, tokens
    spans = {"num_reqs": slice(a, b), "num_reqs+1": slice(a, b + 1), "num_tokens": slice(first, end)}
    own = BatchDescriptor(end - first, b - a, old.query_len, old.num_active_loras)

    def cut(value: Tensor, axes: Axes) -> Tensor:
        return value[tuple(spans[name] if name else slice(None) for name in axes.dims)]

    part: Batch = map_sized(cut, batch, own)
    return attrs.evolve(part, query_start_loc=part.query_start_loc - part.query_start_loc[:1])


def _common_length(tree: Any) -> int:
    shapes = {name: tuple(x.shape) for name, x in leaves_with_names(tree) if isinstance(x, Tensor)}
    lengths = {shape[0] if shape else None for shape in shapes.values()}
    if len(lengths) != 1 or None in lengths:
        raise DescriptorError(
            "split(batch, ...)",
            f"tensors whose first dimensions do not agree: {shapes}"
            if shapes
            else f"no tensor in {tree!r:.60}" + ("" if tree is None else f", {kind_of(tree)}"),
            "pass a weft.Batch, or a tree of tensors with one common first dimension",
        )
    return int(lengths.pop() or 0)


def join(outputs: Sequence[Any], parts: Sequence[Any]) -> Any:
    """Put the parts' outputs together again: sized fields along their named dimension, other tensors along the first.

    Every tensor must hold one entry a request (of plain tensors, a row) or a token of its part. Sizes are all that is
    checked: a sum over 2 rows of 2 columns has the size of a result of 2 rows, and is joined as one.

    Args:
        outputs: what the step returned for each part.
        parts: the batches that it was for.

    Raises:
        DescriptorError: the outputs have different structures, hold a descriptor other than their part's, or a leaf
            of another size than its part's requests or tokens: a loss, a parameter, a Python value.
    """
    if len(outputs) == 1:
        return outputs[0]
    call = f"join of {len(outputs)} micro-batches"
    whole = _whole(parts)
    for out, part in zip(outputs, parts, strict=True):
        if found := [d for d in find_descriptors(out) if whole is None or d != part.descriptor]:
            raise DescriptorError(
                call, f"an output of descriptor '{found[0]}', not its part's", "return it without one"
            )
    outputs = [map_sized(lambda value, _: value, out, whole) for out in outputs]
    leaves, structure = tree_flatten(outputs[0])
    if any(tree_structure(out) != structure for out in outputs[1:]):
        raise DescriptorError(call, "outputs of different structures", "return the same structure for every batch")
    dims = [_batch_dim(axes) for axes in leaf_axes(outputs[0])]
    for out, part in zip(outputs, parts, strict=True):
        for (name, leaf), dim in zip(leaves_with_names(out), dims, strict=True):
            if leaf is not None and not (isinstance(leaf, Tensor) and leaf.shape[dim : dim + 1] in _sizes(part)):
                shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else repr(leaf)
                seen = f"output {name or '(the whole)'} is {shape}, not one entry a request or a token of its part"
                raise DescriptorError(call, seen, "return such tensors, and reduce them outside")
    columns = zip(dims, leaves, *(tree_leaves(out) for out in outputs[1:]), strict=True)
    joined = [None if first is None else torch.cat([first, *rest], dim) for dim, first, *rest in columns]
    return tree_unflatten(joined, structure)


def _whole(parts: Sequence[Any]) -> BatchDescriptor | None:
    """The class of the batch that was cut into `parts`; None for plain tensors."""
    if not all(isinstance(part, Batch) for part in parts):
        return None
    found = [part.descriptor for part in parts]
    tokens, reqs = sum(d.num_tokens for d in found), sum(d.num_reqs for d in found)
    return BatchDescriptor(tokens, reqs, found[0].query_len, max(d.num_active_loras for d in found))


def _sizes(part: Any) -> set[tuple[int, ...]]:
    if isinstance(part, Batch):
        return {(part.descriptor.num_reqs,), (part.descriptor.num_tokens,)}
    return {(_common_length(part),)}


def _batch_dim(axes: Axes | None) -> int:
    """The first dimension that follows the batch."""
    return 0 if axes is None else next((d for d in range(len(axes.dims)) if axes.name(d)), 0)


def microbatch(step: F, parts: int) -> F:
    """The step `(params, state, batch) -> (state, out)` run on at most `parts` parts of its batch, the state threaded
    through.

    It changes nothing if the step is separable by rows: what it returns for a request (of plain tensors, a row) depends
    on that request, the params and the state of that request alone, and every output tensor holds one entry a request
    or a token. The state must be one a request, or a sum over requests: not a mean over the batch, or a running mean
    that is updated once a step, since the step runs once a part. Sizes are checked (`join`), separability cannot be: a
    `batch.sum(0)` of as many columns as a part has rows is joined, and wrong.

    Args:
        step: such a function.
        parts: at least 1. A batch of fewer requests is cut into one part a request.

    Raises:
        ProgramError: `parts` is no such number, or the step returns anything but `(state, out)`.
        DescriptorError: a batch that cannot be cut, or outputs that cannot be joined.

    >>> import torch
    >>> double = microbatch(lambda params, state, batch: (state + len(batch), 2 * batch), 2)
    >>> double(None, 0, torch.arange(3))
    (3, tensor([0, 2, 4]))
    """

    name = getattr(step, "__name__", step)
    if not callable(step) or not is_int(parts, 1):
        seen = "no number of parts" if callable(step) else "no function"
        raise ProgramError(f"microbatch({name!s:.60}, {parts!r})", seen, "a step and an int >= 1")
    check_step(f"microbatch({name!s:.60}, {parts})", step)

    @functools.wraps(step)
    def run(params: Any, state: Any, batch: Any) -> Any:
        outputs = []
        batches = split(batch, parts)
        for part in batches:
            made = step(params, state, part)
            if not isinstance(made, tuple) or len(made) != 2:
                seen = f"it returned {kind_of(made)}{of_length(made)}"
                raise ProgramError(f"microbatch({name}, {parts})", seen, "return (state, out)")
            state, out = made
            outputs.append(clone(out) if lends(step) else out)  # the next part overwrites what is lent
        return state, join(outputs, batches)

    return cast(F, declare_lending(declare_donated(run, donated_argnames(step)), False))
