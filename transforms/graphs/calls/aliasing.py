"""Shared memory among the arguments of a call: which tensors overlap, and what a donated tensor
rules out for the others."""

from bisect import bisect
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from weft.errors import DonatedError
from weft.torchapi.private import is_functorch_wrapped_tensor, storage_id

_COPY = "pass a copy of it (weft.clone), or do not donate"


class Arguments(Protocol):
    """The leaves of a call: those by reference, of which the donated ones come first, and the
    copied ones."""

    @property
    def reference_leaves(self) -> list[Any]: ...

    @property
    def copied_leaves(self) -> list[Any]: ...

    @property
    def num_donated(self) -> int: ...

    def leaf_names(self) -> list[str]:
        """The path of each leaf as the caller would write it, those by reference first."""


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have a byte in common.

    numpy's answer is exact; its search took 25 ms at most on thousands of random views of up to ten
    dimensions. torch has no such function: `torch._C._overlaps` compares storages, but two storages
    may share memory, for example that of one numpy array.

    >>> import torch
    >>> x = torch.arange(6)
    >>> overlap(x[:4], x[3:]), overlap(x[:3], x[3:]), overlap(x[::2], x[1::2])
    (True, False, False)
    """
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    return bool(np.shares_memory(_same_layout(a), _same_layout(b)))


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements of a tensor share memory, as in an expanded one.

    `torch._debug_has_internal_overlap` answers "too hard" for a view as simple as `x[::2]`.

    >>> import torch
    >>> x = torch.arange(4)
    >>> overlaps_itself(x), overlaps_itself(x.expand(2, 4)), overlaps_itself(x.unfold(0, 3, 1))
    (False, True, True)
    """
    if x.is_contiguous() or not x.numel():
        return False
    rest = _same_layout(x)
    # If two indices have one address, consider the first dimension in which they differ. Shifting
    # both there moves one of them to index 0, so it is enough to compare index 0 with the rest.
    while rest.ndim:
        if len(rest) > 1 and np.shares_memory(rest[:1], rest[1:]):
            return True
        rest = rest[0, ...]  # with `...` still an array: `rest[0]` of 1-d would read the element
    return False


class _Layout:
    """A tensor's element addresses, on any device, as an array interface for numpy, which must not
    read the elements."""

    def __init__(self, x: Tensor) -> None:
        size = x.element_size()
        start = x.untyped_storage().data_ptr() + x.storage_offset() * size
        self.__array_interface__ = {
            "version": 3,
            "data": (start, True),
            "typestr": f"|V{size}",
            "shape": tuple(x.shape),
            "strides": tuple(stride * size for stride in x.stride()),
        }


def _same_layout(x: Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.void]]":
    return np.asarray(_Layout(x))


def refuse_shared(call: Arguments, name: str) -> None:
    """Raise if a donated argument shares memory with another donated argument, or its storage with
    another argument by reference: the order of the writes would then decide the result."""
    leaves = call.reference_leaves
    count = call.num_donated
    donated = {
        i: x for i, x in enumerate(leaves[:count]) if isinstance(x, Tensor) and not x.is_meta
    }
    nearby = _nearby(donated)
    for index, leaf in donated.items():
        if overlaps_itself(leaf):
            raise _refusal(
                call,
                name,
                "{}, which is donated, has elements that share memory, as an expanded tensor has",
                index,
            )
        earlier = (i for i in nearby[index] if overlap(donated[i], leaf))
        if (other := next(earlier, None)) is not None:
            instead = (
                "donate it once, and use it in both places inside the function (a copy would become"
                " a second value), or do not donate"
            )
            problem = "{} shares memory with {}, and both are donated"
            raise _refusal(call, name, problem, index, other, instead=instead)
    owners = {
        storage_id(x): i
        for i, x in enumerate(leaves[:count])
        if isinstance(x, Tensor) and x.numel()
    }
    for index, leaf in enumerate(leaves[count:], count):
        if isinstance(leaf, Tensor) and (owner := owners.get(storage_id(leaf))) is not None:
            raise _refusal(
                call, name, "{} shares its storage with {}, which is donated", index, owner
            )


def _nearby(tensors: dict[int, Tensor]) -> dict[int, list[int]]:
    """For each tensor, the tensors before it between whose first and last bytes lie some of its
    own, in order."""
    spans = sorted((*_span(x), i) for i, x in tensors.items())
    nearby: dict[int, list[int]] = {i: [] for i in tensors}
    open_spans = list[tuple[int, int]]()
    for start, stop, index in spans:
        open_spans = [(end, i) for end, i in open_spans if end > start]
        for _, other in open_spans:
            nearby[max(index, other)].append(min(index, other))
        open_spans.append((stop, index))
    return {i: sorted(indices) for i, indices in nearby.items()}


def refuse_donated_twice(call: Arguments, name: str, first: int) -> None:
    """Raise if another argument is a tensor that this call donates, or if a copied argument lies in
    the memory of a donated one: the function itself would see its writes to that memory through the
    copied argument, and a replay would not. `first` is the index of the first leaf that no earlier
    call has checked."""
    leaves = (*call.reference_leaves, *call.copied_leaves)
    count = call.num_donated
    donated = {id(x): i for i, x in enumerate(leaves[:count]) if isinstance(x, Tensor)}
    for index, leaf in enumerate(leaves[first:], first):
        if id(leaf) in donated:
            raise _refusal(call, name, "{} is a tensor that the same call donates", index)
    spans = [(*_span(leaves[i]), i) for i in donated.values() if _has_memory(leaves[i])]
    for index, leaf in enumerate(call.copied_leaves, len(call.reference_leaves)):
        if not isinstance(leaf, Tensor) or not _has_memory(leaf):
            continue
        start, stop = _span(leaf)
        for other, last, owner in spans:
            if start < last and other < stop and overlap(leaf, leaves[owner]):
                raise _refusal(
                    call, name, "{} is a view of {}, which the same call donates", index, owner
                )


def _has_memory(tensor: Tensor) -> bool:
    plain = (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not is_functorch_wrapped_tensor(tensor)
    )
    return plain and tensor.numel() > 0


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first address of a tensor's elements, and the address after the last one."""
    size = tensor.element_size()
    start = tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * size
    if not tensor.numel():
        return start, start
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (int(last) + 1) * size


def _refusal(
    call: Arguments, name: str, problem: str, *indices: int, instead: str = _COPY
) -> DonatedError:
    names = call.leaf_names()
    text = problem.format(*(names[i] for i in indices))
    return DonatedError(f"{name}(...)", text, instead)


class Storages:
    """The storages of the tensors that a call donates; no copied tensor may lie in them."""

    def __init__(self, donated: Sequence[Any]) -> None:
        storages = [x.untyped_storage() for x in donated if isinstance(x, Tensor)]
        spans = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages if s.nbytes()})
        self._starts = [start for start, _ in spans]
        self._ends = [end for _, end in spans]

    def meet(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage has a byte in common with one of the storages. Two storages
        may overlap, for example if both are memory of one numpy array."""
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        end = storage.data_ptr() + storage.nbytes()
        return any(a < end and start < b for a, b in zip(self._starts, self._ends, strict=True))

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of these tensors begins in one of the storages."""
        for tensor in tensors if self._starts else ():
            address = tensor.data_ptr()
            if (index := bisect(self._starts, address)) and address < self._ends[index - 1]:
                return True
        return False
