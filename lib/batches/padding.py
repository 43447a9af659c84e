"""Padding of a tree of sized values to a descriptor that covers them, and its inverse."""

from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.batches.descriptor import arguments_of, check_descriptor
from weft.errors import DescriptorError
from weft.values.donation import refuse_donated_in
from weft.values.trees import Axes, find_descriptors, leaf_axes, map_sized

T = TypeVar("T")


def padded_shape(value: Tensor, spec: Axes, descriptor: Any) -> tuple[int, ...]:
    """The shape that `value` has under `descriptor`."""
    extents = [spec.extent(dim, descriptor) for dim in range(value.dim())]
    return tuple(
        [
            size if extent is None else extent
            for size, extent in zip(value.shape, extents, strict=True)
        ]
    )


def write_padded(target: Tensor, value: Tensor, spec: Axes) -> None:
    """Write `value` into the leading corner of `target`, and the padding of `spec` into the rest.

    It overwrites all of `target`, so it can also refill the input buffers of a replay.
    """
    corner = target[tuple(slice(size) for size in value.shape)]
    # The padding goes over all of `target` first: one fill instead of one for each dimension.
    if target.shape != value.shape:
        if isinstance(spec.pad, str):
            target.copy_(last_entry(value, spec))
        else:
            target.fill_(spec.padding(target.dtype))
    corner.copy_(value)


def last_entry(value: Tensor, spec: Axes) -> Tensor:
    """The last entry of `value` along the padded dimensions, in a shape that broadcasts; 0 if
    `value` is empty."""
    if value.numel() == 0:
        return value.new_zeros((1,) * value.dim())
    return value[tuple(slice(-1 if spec.name(dim) else 0, None) for dim in range(value.dim()))]


def pad(tree: T, descriptor: Any) -> T:
    """Pad every sized value in `tree` to `descriptor`; other leaves pass through.

    Args:
        tree: a batch, intermediate tensors, or any tree that holds sized values (see
            `weft.values.trees.axes`).
        descriptor: must cover the descriptor of each batch in the tree.

    Returns:
        A new tree; a tensor that already has its size is not copied.

    Raises:
        DescriptorError: the descriptor does not cover a batch, or a tensor is larger than it
            allows.
        DonatedError: a tensor was donated.

    >>> from weft.batches.batch import Batch
    >>> from weft.batches.descriptor import BatchDescriptor
    >>> pad(Batch.decode([4, 7]), BatchDescriptor.uniform(4)).rows.tolist()
    [4, 7, -1, -1]
    """

    descriptors = find_descriptors(tree)

    def checked(value: Tensor, spec: Axes) -> Tensor:
        actual_shape = tuple(value.shape)
        # A tree with several batches does not say which of them a tensor belongs to.
        if len(descriptors) == 1:
            said = padded_shape(value, spec, descriptors[0])
        else:
            said = actual_shape
        shape = padded_shape(value, spec, descriptor)
        if said == actual_shape == shape:
            return value
        if said != actual_shape or any(
            new < old for new, old in zip(shape, actual_shape, strict=True)
        ):
            problem = f"a tensor of shape {actual_shape}, larger than that descriptor"
            instead = "pad to one that covers the batch"
            if said != actual_shape:
                problem = f"a tensor of shape {actual_shape} in a batch of class '{descriptors[0]}', which needs {said}"
                instead = "give the batch the descriptor of its tensors"
            raise DescriptorError(call, problem, instead)
        return grow(value, spec, descriptor)

    call = f"weft.pad({type(tree).__name__}, {descriptor})"
    refuse_donated_in(call, tree=tree)
    for one in (descriptor, *descriptors):
        check_descriptor(one, call)
    beyond = next(
        (uncovered for uncovered in descriptors if not descriptor.covers(uncovered)), None
    )
    if beyond is not None or all(axes is None for axes in leaf_axes(tree)):
        name = next(iter(arguments_of(descriptor)), "num_tokens")
        problem = "nothing in it that says which of its dimensions follow the batch"
        instead = f"pass a weft.Batch, or a class with attrs.field(metadata=weft.axes({name!r}))"
        if beyond is not None:
            problem = f"the batch is {beyond}, which that descriptor does not cover"
            instead = "pad to a descriptor d with d.covers(batch.descriptor)"
        raise DescriptorError(call, problem, instead)
    return map_sized(checked, tree, descriptor)


def grow(value: Tensor, spec: Axes, descriptor: Any) -> Tensor:
    """Pad one tensor to a descriptor that covers it, as `pad` does."""
    shape = padded_shape(value, spec, descriptor)
    if shape == value.shape:
        return value
    if not isinstance(spec.pad, str):
        # One operator instead of the several of `write_padded`: the host pads each step.
        more = [size - old for old, size in zip(value.shape, shape, strict=True)]
        # torch takes the last dimension first, and of each the padding before it and the padding
        # after it.
        return torch.constant_pad_nd(
            value,
            [end for last in reversed(more) for end in (0, last)],
            spec.padding(value.dtype),
        )
    target = value.new_empty(shape)
    write_padded(target, value, spec)
    return target


def unpad(tree: T, descriptor: Any) -> T:
    """Cut every sized value in `tree` down to `descriptor`: the inverse of `pad`.

    Use it to read a padded result.

    Args:
        tree: any tree that holds sized values.
        descriptor: the class that the values had before they were padded.

    Returns:
        A tree of views.

    Raises:
        DescriptorError: a value is smaller than the descriptor says.
        DonatedError: a tensor was donated.
    """

    call = f"weft.unpad({type(tree).__name__}, {descriptor})"
    refuse_donated_in(call, tree=tree)
    check_descriptor(descriptor, call)
    return map_sized(lambda value, spec: cut(value, spec, descriptor), tree, descriptor)


def cut(value: Tensor, spec: Axes, descriptor: Any) -> Tensor:
    """Cut one tensor down to a descriptor, as `unpad` does; a view."""
    shape = padded_shape(value, spec, descriptor)
    if any(new > old for new, old in zip(shape, value.shape, strict=True)):
        raise DescriptorError(
            f"weft.unpad(..., {descriptor})",
            f"a tensor of shape {tuple(value.shape)} where that descriptor has {shape}",
            "unpad to the descriptor that the batch had before it was padded",
        )
    if shape == tuple(value.shape):
        return value
    return value[tuple(slice(size) for size in shape)]


def inert(tree: T, descriptor: Any) -> T:
    """The tree under `descriptor`, all of it padding, for a warm-up that must leave no trace in any
    state."""

    def blank(value: Tensor, spec: Axes) -> Tensor:
        target = value.new_empty(padded_shape(value, spec, descriptor))
        # Of an empty value, so that no token of a request remains in the target.
        write_padded(target, value[(slice(0, 0),) * value.dim()], spec)
        return target

    return map_sized(blank, tree, descriptor)
