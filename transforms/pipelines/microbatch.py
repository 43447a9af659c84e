"""`microbatch` runs a step on parts of its batch, and `scan` runs a step repeatedly; also how a batch is split and
joined."""

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import COUNT, is_int, kind_of
from weft.batch import Batch
from weft.descriptor import BatchDescriptor
from weft.donation import clone, declare_donated, donated_argnames
from weft.effects import Schema
from weft.errors import CaptureError, DescriptorError
from weft.torchapi.private import in_dispatch_mode
from weft.transforms.graphs.calls.borrowing import declare_lending, lends
from weft.transforms.pipelines.argument_checks import Mistake, check_step
from weft.transforms.pipelines.worker import check_pair
from weft.trees import (
    Axes,
    TreeSpec,
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
    """Cut a batch into at most `parts` batches of whole requests, whose numbers of requests differ by at most one.

    Args:
        batch: a `Batch`; or any tree of tensors whose first dimensions agree, which are cut along it.
        parts: at least 1. A batch of fewer requests is cut into one part per request.

    A ragged `Batch` is cut by its `query_start_loc`, which is read on the host. So inside a captured function, cut only
    uniform batches, or capture the parts (`pipeline(map(graphify, stages))`).

    >>> [str(b.descriptor) for b in split(Batch.decode([5, 6, 7]), 2)]
    ['uniform x1, 1 reqs', 'uniform x1, 2 reqs']
    """
    mistake = None
    if not is_int(parts, 1):
        mistake = f"parts={parts!r}", COUNT[1]
    elif not isinstance(batch, Batch) and find_descriptors(batch):
        seen = f"{kind_of(batch)}, a sized value of another class, whose descriptor only its author can cut"
        mistake = seen, "pass a weft.Batch or plain tensors, or cut it yourself and call the step on each part"
    if mistake is not None:
        raise DescriptorError(f"split(batch, {parts!r})", *mistake)
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
    # Python ints decide the shapes of the parts; only a uniform class knows them without a host read.
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
    """The requests `reqs[0]:reqs[1]` and their tokens, cut from every field with named dimensions."""
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
    """Join the outputs of the parts of a batch: sized fields along their named dimension, other tensors along the
    first.

    Every tensor must hold one entry per request (for plain tensors, per row) or per token of its part. Only sizes are
    checked: a sum over 2 rows of 2 columns has the size of a result for 2 rows, and is joined as one.

    Args:
        outputs: the step's output for each part.
        parts: the parts.

    Raises:
        DescriptorError: the outputs have different structures, hold another descriptor than their part's, or hold a
            leaf whose size is not the part's number of requests or tokens: a loss, a parameter, a Python value.
    """
    if len(outputs) == 1:
        return outputs[0]
    whole = _whole(parts)
    found = [map_sized(lambda value, _: value, out, whole) for out in outputs]
    leaves, structure = tree_flatten(found[0])
    dims = [_batch_dim(axes) for axes in leaf_axes(found[0])]
    for out, own, part in zip(outputs, found, parts, strict=True):
        if (mistake := _mistake_in_output(out, own, part, structure, dims)) is not None:
            raise DescriptorError(f"join of {len(outputs)} micro-batches", *mistake)
    columns = zip(dims, leaves, *(tree_leaves(own) for own in found[1:]), strict=True)
    joined = [None if first is None else torch.cat([first, *rest], dim) for dim, first, *rest in columns]
    return tree_unflatten(joined, structure)


def _mistake_in_output(out: Any, own: Any, part: Any, structure: TreeSpec, dims: Sequence[int]) -> Mistake | None:
    """The mistake in the output of a part that cannot be joined.

    Args:
        out: the output.
        own: the same with the descriptor of the whole batch.
        part: the part.
        structure: of the first part's output.
        dims: for each leaf, the dimension that grows with the batch.
    """
    if strange := [d for d in find_descriptors(out) if not isinstance(part, Batch) or d != part.descriptor]:
        return f"an output of descriptor '{strange[0]}', not its part's", "return it without one"
    if tree_structure(own) != structure:
        return "outputs of different structures", "return the same structure for every batch"
    for (name, leaf), dim in zip(leaves_with_names(own), dims, strict=True):
        if leaf is not None and not (isinstance(leaf, Tensor) and leaf.shape[dim : dim + 1] in _sizes(part)):
            shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else repr(leaf)
            seen = f"output {name or '(the whole)'} is {shape}, not one entry a request or a token of its part"
            return seen, "return such tensors, and reduce them outside"
    return None


def _whole(parts: Sequence[Any]) -> BatchDescriptor | None:
    """The descriptor of the batch that was cut into `parts`; None for plain tensors."""
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
    """The first dimension that has a name, and so grows with the batch."""
    return 0 if axes is None else next((d for d in range(len(axes.dims)) if axes.name(d)), 0)


def microbatch(step: F, parts: int) -> F:
    """Run a step `(params, state, batch) -> (state, out)` on at most `parts` parts of its batch, and thread the state
    through.

    That changes nothing if the step is separable by rows: what it returns for a request (for plain tensors, a row)
    depends only on that request, the params and the state of that request, and every output tensor holds one entry per
    request or token. The state must have an entry per request, or be a sum over requests. It must not be a mean over
    the batch, or a running mean that is updated once per step, since the step runs once per part. Sizes are checked
    (`join`); separability cannot be: a `batch.sum(0)` with as many columns as a part has rows is joined, and wrong.

    Args:
        step: the step.
        parts: at least 1. A batch of fewer requests is cut into one part per request.

    Raises:
        ProgramError: `parts` is not such a number, or the step does not return `(state, out)`.
        DescriptorError: a batch that cannot be cut, or outputs that cannot be joined.

    >>> import torch
    >>> double = microbatch(lambda params, state, batch: (state + len(batch), 2 * batch), 2)
    >>> double(None, 0, torch.arange(3))
    (3, tensor([0, 2, 4]))
    """

    call = check_step("microbatch", step, "parts", parts)

    @functools.wraps(step)
    def run(params: Any, state: Any, batch: Any) -> Any:
        outputs = []
        batches = split(batch, parts)
        for part in batches:
            state, out = check_pair(call, step(params, state, part), "(state, out)")
            outputs.append(clone(out) if lends(step) else out)  # the next part overwrites a lent result
        return clone(state) if lends_state(step) else state, join(outputs, batches)

    return cast(F, declare_lending(declare_donated(run, donated_argnames(step)), False))


def lends_state(step: Callable[..., Any]) -> bool:
    """Whether the next call of a step or a stage may overwrite the state that this one returns. A donated state is
    kept in its own storage."""
    return lends(step) and not donated_argnames(step)


def after_first(tree: Any) -> Any:
    """A batch, or a tree with batches in it, without the fields that only the first stage reads."""
    return tree_map(
        lambda x: x.after_first() if isinstance(x, Batch) else x, tree, is_leaf=lambda x: isinstance(x, Batch)
    )


def class_of(batch: Any) -> Any:
    """The class of a batch, on which all ranks must agree: its descriptor; for plain tensors their schema."""
    found = find_descriptors(batch)
    return found[0] if found else Schema.of(batch)


def class_text(batch: Any) -> str:
    """The class of a batch (or of a value with a field `batch`) as text, which also says whether logprobs of targets
    come back. All ranks must agree on it, and the layout of the batch's messages follows from it."""
    targets = getattr(getattr(batch, "batch", batch), "targets", None)
    return f"{class_of(batch)}{'' if targets is None else ', with targets'}"


@runtime_checkable
class Repeats(Protocol):
    """A step that repeats itself better than one call after the other would, as a pipeline does."""

    def repeat(self, params: Any, state: Any, batch: Any, length: int, /) -> tuple[Any, list[Any]]:
        """The state after `length` steps on the same batch, and the output of each."""


def scan(step: Callable[[Any, Any, Any], tuple[Any, Any]], length: int) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """Run a step `length` times on the same batch, and thread the state through. That is a decode loop: a decode batch
    only names rows of the state, and the state holds their last tokens.

    Args:
        step: `(params, state, batch) -> (state, out)`. A pipeline overlaps its stages: its micro-batches are cohorts of
            requests, each of which waits only for its own tokens.
        length: at least 1.

    Returns:
        A step `(params, state, batch) -> (state, outs)`, where `outs` is the list of what each step returned. They are
        not stacked, as `jax.lax.scan` does, so that their dimensions keep the names by which a ladder pads and unpads.

    Raises:
        ProgramError: a length that is not a whole number >= 1, or a step that is not a function to `(state, out)`.

    >>> double = scan(lambda params, state, batch: (2 * state, state + batch), 3)
    >>> double(None, 1, 10)
    (8, [11, 12, 14])
    """
    call = check_step("scan", step, "length", length)
    whole: Any = step

    def run(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        if isinstance(whole, Repeats):
            return whole.repeat(params, state, batch, length)
        outs = []
        for _ in range(length):
            state, out = check_pair(call, step(params, state, batch), "(state, out)")
            outs.append(clone(out) if lends(step) else out)  # the next step overwrites a lent result
        return clone(state) if lends_state(step) else state, outs

    functools.update_wrapper(run, step, assigned=("__module__", "__name__", "__qualname__"), updated=())
    del vars(run)["__wrapped__"]
    return declare_donated(run, donated_argnames(step))
