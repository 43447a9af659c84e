"""Parts of a batch: `split` cuts a batch into whole requests or rows, and `join` joins the step's
outputs for the parts."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from weft.arguments.checks import COUNT, is_int, kind_of
from weft.batches.descriptor import arguments_of
from weft.batches.splitting import (
    axis_sizes,
    cut_sized,
    find_bounds,
    parse_axis,
    read_starts,
    resized,
    sized_tensors,
)
from weft.errors import DescriptorError, WeftError
from weft.transforms.pipelines.argument_checks import Mistake
from weft.values.containers import map_tensors, opened
from weft.values.donation import refuse_donated_in
from weft.values.trees import (
    Axes,
    find_descriptors,
    leaf_axes,
    leaves_with_names,
    map_sized,
    sized_fields,
    tree_leaves,
    tree_structure,
    tree_unflatten,
)

_OTHER_STRUCTURE: Mistake = (
    "outputs of different structures",
    "return the same structure for every batch",
)


@runtime_checkable
class Splits(Protocol):
    """A batch whose class defines how it is split. It may also have a method `join(outputs)`, which
    is called on the whole batch with the outputs of its parts and returns the whole output."""

    def split(self, parts: int, /) -> tuple[Self, ...]:
        """The parts, in order: at least one and at most `parts` batches."""


def split(batch: Any, parts: int) -> tuple[Any, ...]:
    """Cut a batch into at most `parts` parts, whose numbers of requests (or rows) differ by at most
    one.

    1. If `parts` is 1, the batch itself is the only part, whatever its class.
    2. A batch whose class has a method `split(parts)`, such as `weft.Batch`, is cut by it.
    3. A batch whose fields name one axis (`weft.axes`) is cut along this axis. If they name two
       axes, one integer field with `axes("first+1")` must hold, for each entry of the first axis,
       its start in the second axis, followed by the end of the last entry.
    4. In all other trees, including attrs classes, dataclasses and mappings, tensors are cut along
       their first dimensions, which must be equal.

    If some fields of a class name axes, its other fields go to every part unchanged, as do Python
    values. The steps that run on the parts must be separable by the entries that are cut (see
    `microbatch`).

    Args:
        batch: the batch.
        parts: at least 1. A batch of fewer requests is cut into one part per request.

    Raises:
        DescriptorError: a batch that cannot be cut, or a method `split` that does not return 1 to
            `parts` batches.
        CaptureError: inside a captured function, a batch that must be cut at the values of a
            tensor, such as a ragged `Batch`. Cut only uniform batches there, or capture the stages
            instead (`pipeline(map(graphify, stages))`).
        DonatedError: a tensor was donated before.

    >>> from weft.batches.batch import Batch
    >>> [str(b.descriptor) for b in split(Batch.decode([5, 6, 7]), 2)]
    ['uniform x1, 1 reqs', 'uniform x1, 2 reqs']
    >>> split({"x": torch.arange(3), "name": "a"}, 2)
    ({'x': tensor([0]), 'name': 'a'}, {'x': tensor([1, 2]), 'name': 'a'})
    """
    if not is_int(parts, 1):
        raise DescriptorError(f"split(batch, {parts!r})", f"parts={parts!r}", COUNT[1])
    call = f"split(<{type(batch).__name__}>, {parts})"
    # Check here: the parts are views, which do not carry the mark of a donated tensor.
    refuse_donated_in(call, batch=batch)
    if parts == 1:
        return (batch,)
    if splits(batch):
        return _checked(batch.split(parts), type(batch).__name__, parts)
    try:
        return tuple((_split_named if sized_fields(batch) else _split_rows)(call, batch, parts))
    except WeftError:
        raise
    except Exception as error:
        # Raised by a class that refuses the values of a part
        raise DescriptorError(
            call, f"{type(error).__name__}: {error}", _own_methods(batch)
        ) from error


def splits(batch: Any) -> bool:
    """Whether the class of a batch has a `split` method in the sense of `Splits`. The methods
    `split` of tensors and strings do something else."""
    return isinstance(batch, Splits) and not isinstance(batch, type | Tensor | str | bytes)


def _checked(returned: Any, kind: str, parts: int) -> tuple[Any, ...]:
    if isinstance(returned, tuple | list) and 1 <= len(returned) <= parts:
        return tuple(returned)
    if isinstance(returned, tuple | list):
        problem = f"it returned {len(returned)} parts"
    else:
        problem = f"it returned {kind_of(returned)}"
    raise DescriptorError(
        f"{kind}.split({parts})", problem, f"return a tuple of 1 to {parts} batches"
    )


def _own_methods(batch: Any) -> str:
    """The remedy that works for every batch, as text for an error."""
    if type(batch).__module__ == "builtins":
        kind = "a custom class"
    else:
        kind = f"class {type(batch).__name__}"
    return (
        f"in {kind} a method split(parts) that returns a tuple of batches, and join(outputs) if"
        " they need one"
    )


def _split_named(call: str, batch: Any, parts: int) -> Iterator[Any]:
    """The parts of a batch whose fields name axes."""
    descriptor = next(iter(find_descriptors(batch)), None)
    sizes = _check_sizes(call, batch, descriptor)
    starts = _field_of_starts(batch)
    if len(sizes) == 1:
        [(axis, size)] = sizes.items()
        for start, end in pairwise(find_bounds(size, parts)):
            yield cut_sized(batch, {axis: (start, end)}, resized(descriptor, {axis: end - start}))
    elif starts is None:
        problem = f"axes {', '.join(sizes)}, and no single field of starts that connects two axes"
        instead = _own_methods(batch)
        if len(sizes) == 2:
            problem = f"axes {', '.join(sizes)}, and no field that says how they go together"
            named = " or ".join(f'axes("{axis}+1")' for axis in sizes)
            instead += (
                "; or, where an entry of one has some of the other to itself, an integer field of"
                f" starts, {named}"
            )
        raise DescriptorError(call, problem, instead)
    else:
        field, first, second = starts
        bounds = find_bounds(sizes[first], parts)
        start_values = read_starts(call, getattr(batch, field))
        if (
            # Entries before the first start would be in no part, and so would silently be missing.
            start_values[0] != 0
            or sorted(start_values) != start_values
            or start_values[-1] > sizes[second]
        ):
            problem = (
                f"{field} = {start_values!s:.60}, which are not starts in {second}={sizes[second]}"
            )
            raise DescriptorError(call, problem, f"starts from 0 on; or {_own_methods(batch)}")
        # The last part goes to the end of the axis, not to the last start: padding may follow it.
        ends = [*(start_values[bound] for bound in bounds[:-1]), sizes[second]]
        for entries, span in zip(pairwise(bounds), pairwise(ends), strict=True):
            part_descriptor = resized(
                descriptor, {first: entries[1] - entries[0], second: span[1] - span[0]}
            )
            yield cut_sized(batch, {first: entries, second: span}, part_descriptor, field)


def _check_sizes(call: str, batch: Any, descriptor: Any) -> dict[str, int]:
    """The sizes of a batch's axes. Raises DescriptorError if the batch has two descriptors, if a
    tensor's size differs from its axis, or if the descriptor has a size that no field names."""
    if len(find_descriptors(batch)) > 1:
        raise DescriptorError(
            call, "two descriptors in one batch", "one descriptor for all of its fields"
        )
    sizes = axis_sizes(batch, descriptor)
    for value, spec in sized_tensors(batch):
        for dim, name in enumerate(spec.dims):
            axis, more = parse_axis(name or "")
            if axis and value.shape[dim] != sizes[axis] + more:
                problem = f"a tensor of shape {tuple(value.shape)} where {axis} is {sizes[axis]}"
                raise DescriptorError(call, problem, "give the batch the descriptor of its tensors")
    if descriptor is None:
        arguments = {}
    else:
        arguments = arguments_of(descriptor)
    if unnamed := [name for name, size in arguments.items() if name not in sizes and is_int(size)]:
        problem = (
            f"the descriptor '{descriptor}' has {' and '.join(unnamed)}, but no field names an axis"
            f" {' or '.join(unnamed)}, so the descriptor of a part is unknown"
        )
        raise DescriptorError(call, problem, _own_methods(batch))
    return sizes


def _field_of_starts(batch: Any) -> tuple[str, str, str] | None:
    """The one integer field of starts, which has the size of one of two axes plus 1. Returns its
    name, that axis and the other axis."""
    fields = {name: (getattr(batch, name), spec.dims) for name, spec in sized_fields(batch).items()}
    candidates = [
        (name, dims[0].removesuffix("+1"))
        for name, (value, dims) in fields.items()
        if isinstance(value, Tensor)
        and value.dim() == len(dims) == 1
        and not value.is_floating_point()
        if dims[0] is not None and dims[0].endswith("+1")
    ]
    if len(candidates) != 1:
        return None
    [(field, first)] = candidates
    other_axes = [axis for axis in axis_sizes(batch, None) if axis != first]
    if len(other_axes) == 1:
        return (field, first, other_axes[0])
    return None


def _split_rows(call: str, batch: Any, parts: int) -> Iterator[Any]:
    """The parts of a tree of tensors, cut along their first dimensions."""
    # Every part would keep the descriptor of the whole batch, with its sizes.
    if find_descriptors(batch):
        problem = f"{kind_of(batch)} around a batch that has a descriptor"
        raise DescriptorError(call, problem, "that batch, with the rest in its fields (weft.axes)")
    count = _common_length(call, batch)
    _check_values(call, batch, count)
    for start, end in pairwise(find_bounds(count, parts)):
        yield map_tensors(operator.itemgetter(slice(start, end)), batch)


def _common_length(call: str, tree: Any) -> int:
    """The number of rows of a tree of tensors."""
    shapes = {
        name: tuple(x.shape) for name, x in leaves_with_names(opened(tree)) if isinstance(x, Tensor)
    }
    lengths = {shape[0] if shape else None for shape in shapes.values()}
    if len(lengths) == 1 and None not in lengths:
        return int(lengths.pop() or 0)
    problem = f"tensors whose first dimensions do not agree: {shapes}"
    if not shapes:
        problem = f"no tensor in {tree!r:.60}" + ("" if tree is None else f", {kind_of(tree)}")
    raise DescriptorError(
        call,
        problem,
        f"tensors with a row for each entry, and the rest in params; or {_own_methods(tree)}",
    )


def _check_values(call: str, batch: Any, count: int) -> None:
    """Raise DescriptorError for leaves that look like rows but are not tensors, since every part
    would get all of them."""
    for name, leaf in leaves_with_names(opened(batch), is_leaf=_is_list_of_values):
        problem = ""
        instead = "a tensor; or a tuple, if every part takes all of it"
        if isinstance(leaf, list) and len(leaf) == count:
            problem = (
                f"{name or 'it'} is a list of {count} Python values, as many as there are rows"
            )
        elif getattr(leaf, "shape", None) and not isinstance(leaf, Tensor):
            problem = f"{name or 'it'} is {kind_of(leaf)}, not a tensor"
            instead = "torch.as_tensor(...) of it"
        if problem:
            raise DescriptorError(call, problem, instead)


def _is_list_of_values(node: Any) -> bool:
    return isinstance(node, list) and not any(
        isinstance(leaf, Tensor) for leaf in tree_leaves(node)
    )


def join(outputs: Sequence[Any], parts: Sequence[Any], batch: Any = None) -> Any:
    """Join the outputs of the parts of a batch, by the batch's method `join(outputs)` if it has
    one; otherwise join fields with axes along their named dimension, and other tensors along the
    first dimension.

    Every tensor must hold one entry per request (for plain tensors, per row) or per token of its
    part. For a custom class, it must hold one entry per entry of an axis that the class names. Only
    sizes are checked: a sum over 2 rows of 2 columns has the size of a result for 2 rows, and is
    joined as if it were one.

    Args:
        outputs: the step's output for each part.
        parts: the parts.
        batch: the batch that was split. Needed only if its class has a method `join`.

    Raises:
        DescriptorError: the outputs have different structures, hold a descriptor that is not their
            part's, or hold a leaf whose size is not the part's number of requests or tokens, such
            as a loss, a parameter or a Python value.
        DonatedError: an output was donated before.
    """
    refuse_donated_in("join(outputs, parts)", outputs=outputs)
    # Not checked: the step ran on the whole batch, so that its output needs no entry per request.
    if len(outputs) == 1:
        return outputs[0]
    call = f"join of {len(outputs)} micro-batches"
    if splits(parts[0]) and callable(getattr(parts[0], "join", None)):
        if not splits(batch):
            raise DescriptorError(
                call,
                f"{type(parts[0]).__name__} has a method join(outputs), which needs the batch",
                "join(outputs, parts, batch)",
            )
        return batch.join(list(outputs))
    descriptors = [find_descriptors(part) for part in parts]
    sizes = _sizes_of(parts, descriptors)
    whole = _whole(call, descriptors, sizes, batch)
    sized_outputs = [map_sized(lambda value, _: value, out, whole) for out in outputs]
    structure = tree_structure(sized_outputs[0])
    specs = leaf_axes(sized_outputs[0])
    for out, sized, part_descriptors in zip(outputs, sized_outputs, descriptors, strict=True):
        if tree_structure(sized) == structure:
            mistake = None
        else:
            mistake = _OTHER_STRUCTURE
        if strange := [d for d in find_descriptors(out) if d not in part_descriptors]:
            mistake = (
                f"an output of descriptor '{strange[0]}', not its part's",
                "return it without one",
            )
        if mistake is not None:
            raise DescriptorError(call, *mistake)
    if sized_fields(outputs[0]):
        starts = _field_of_starts(outputs[0])
    else:
        starts = None
    names = [name for name, _ in leaves_with_names(sized_outputs[0])]
    joined = list[Any]()
    for name, spec, *column in zip(names, specs, *map(tree_leaves, sized_outputs), strict=True):
        if starts is not None and name == f".{starts[0]}":
            joined.append(_join_starts(column))
            continue
        dim = _batch_dim(spec)
        for leaf, part_sizes in zip(column, sizes, strict=True):
            if (mistake := _mistake_in_leaf(name, leaf, spec, dim, part_sizes)) is not None:
                raise DescriptorError(call, *mistake)
        joined.append(None if column[0] is None else torch.cat(column, dim))
    return tree_unflatten(joined, structure)


def _sizes_of(parts: Sequence[Any], descriptors: Sequence[Sequence[Any]]) -> list[dict[str, int]]:
    """For each part, the sizes that its output may have, by axis; the axis is "" if the part names
    none."""
    first = parts[0]
    if not all(sized_fields(part) for part in parts):
        return [{"": _common_length("join", part)} for part in parts]
    if not all(descriptors) or not all(type(part) is type(first) for part in parts):
        return [
            axis_sizes(part, part_descriptors[0] if part_descriptors else None)
            for part, part_descriptors in zip(parts, descriptors, strict=True)
        ]
    # Parts of one class have the same axes, and their descriptors hold the sizes.
    names = axis_sizes(first, descriptors[0][0])
    return [
        {name: getattr(part_descriptors[0], name) for name in names}
        for part_descriptors in descriptors
    ]


def _join_starts(starts: Sequence[Tensor]) -> Tensor:
    """The starts of all entries in the whole batch, from their starts within each part."""
    joined = [starts[0]]
    for part_starts in starts[1:]:
        # A part's starts begin with 0 and end with its length, so the last value so far is the
        # offset of the next part.
        joined.append(part_starts[1:] + joined[-1][-1:])
    return torch.cat(joined)


def _mistake_in_leaf(
    name: str, leaf: Any, spec: Axes | None, dim: int, sizes: Mapping[str, int]
) -> Mistake | None:
    """The mistake in a leaf of a part's output, if its size along `dim` is none of the part's sizes
    (or only that of its axis, if it names one); None if there is no mistake."""
    if leaf is None:
        return None
    axis = None if spec is None else spec.name(dim)
    # Each part has the extra entry. Only for starts is it known how to make one of them
    # (`_join_starts`).
    if axis is not None and "+" in axis:
        problem = (
            f"output {name} has size {axis} in each part, so the joined output would be too long"
        )
        return problem, "return it without that field"
    expected = {sizes[axis]} if axis is not None and axis in sizes else set(sizes.values())
    if isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] in expected:
        return None
    shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else f"{leaf!r:.60}"
    problem = (
        f"output {name or '(the whole)'} is {shape}, not one entry a request or a token of its part"
    )
    return problem, "return such tensors, and reduce them outside"


def _whole(
    call: str, descriptors: Sequence[Sequence[Any]], sizes: Sequence[Mapping[str, int]], batch: Any
) -> Any:
    """The descriptor of the whole batch, computed from the descriptors and sizes of its parts; None
    if the parts have no descriptors."""
    if not all(descriptors):
        return None
    whole = resized(
        descriptors[0][0],
        {name: sum(part_sizes[name] for part_sizes in sizes) for name in sizes[0] if name},
    )
    if batch is not None and whole not in (was := find_descriptors(batch)):
        kind = type(batch).__name__
        problem = (
            f"parts that together are '{whole}', where the {kind} is '{next(iter(was), None)}'"
        )
        raise DescriptorError(
            call, problem, f"in class {kind} a method join(outputs) beside its split"
        )
    return whole


def _batch_dim(axes: Axes | None) -> int:
    """The first dimension that has a name, and so grows with the batch."""
    if axes is None:
        return 0
    return next((d for d in range(len(axes.dims)) if axes.name(d)), 0)
