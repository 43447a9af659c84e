"""What steps of `while_loop` after the loop's end need: a carry on which the body can run, and
derivatives that are 0.

`torch.where` drops the result of such a step. But its derivative is 0 times the step's derivative,
which is nan where the step's is infinite or nan.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.torchapi.private import (
    FunctionMode,
    in_vmap,
    is_batched,
    is_differentiated,
    is_differentiated_by_row,
)
from weft.values.trees import tree_map


class _OfOtherRows(torch.autograd.Function):
    """Under `vmap`, replaces each row of a tensor where a condition does not hold by one row where
    it does. It is called only on values that have no derivative."""

    @staticmethod
    def forward(live: Tensor, x: Tensor) -> Tensor:
        if not live.dim() or not live.numel():
            return x.clone()
        rows = x.flatten(0, live.dim() - 1)
        first = live.flatten().to(torch.int64).argmax()[None]
        mask = live.reshape(live.shape + (1,) * (x.dim() - live.dim()))
        return torch.where(mask, x, rows[first])

    @staticmethod
    def setup_context(*_: Any, **__: Any) -> None:
        pass

    @staticmethod
    def backward(_: Any, *__: Any) -> Any:
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, live: Tensor, x: Tensor) -> Any:
        sizes = (info.batch_size, *[-1] * live.dim()), (info.batch_size, *[-1] * x.dim())
        pairs = zip((live, x), in_dims, sizes, strict=True)
        rows = [y.expand(size) if dim is None else y.movedim(dim, 0) for y, dim, size in pairs]
        return _OfOtherRows.apply(*rows), 0


def safe_start(live: Tensor, x: Any) -> Any:
    """A leaf of the first carry on which every row can run the body: rows whose loop never begins
    get the values of a row whose loop does."""
    if not isinstance(x, Tensor):
        return x
    if in_vmap():
        other = _OfOtherRows.apply(live, x.detach())
    else:
        other = x.detach()
    return torch.where(live, x, other)


def safe_next(live: Tensor, x: Tensor, last: Tensor) -> Tensor:
    """A leaf of the next carry on which every row can run the body: rows whose loop has ended keep
    the last carry on which the body ran."""
    return torch.where(live, x, last.detach())


class DerivativesWhere(FunctionMode):
    """Makes the derivatives of a step with respect to closed-over tensors 0 where a flag does not
    hold.

    Args:
        live: the flag of each row.
        carry: the leaves of the carry, whose derivatives the loop itself handles.
        anywhere: whether `live` holds in some row. Then each row that is not live has the carry of
            a live row, so the sum of all rows' derivatives is nan only if a live row's is; tensors
            that all rows share need no `where`.
    """

    def __init__(self, live: Tensor, carry: Sequence[Any], *, anywhere: bool) -> None:
        super().__init__()
        self._live = live
        self._anywhere = anywhere
        self._inside = {id(x): weakref.ref(x) for x in carry if isinstance(x, Tensor)}
        self._limited: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # the read of an attribute, such as `x.T`
            result = func(*args)
            if self._is_inside(args[0]):
                return result
            return tree_map(self._limit, result)
        if not (_writes(name) or "out" in kwargs or name in _OF_MEMORY):
            args, kwargs = tree_map(self._limit, (args, kwargs))
        result = func(*args, **kwargs)
        tree_map(self._note, result)
        return result

    def _is_inside(self, x: Any) -> bool:
        noted = self._inside.get(id(x))
        return noted is not None and noted() is x

    def _note(self, x: Any) -> None:
        if isinstance(x, Tensor):
            self._inside[id(x)] = weakref.ref(x)

    def _limit(self, x: Any) -> Any:
        """The tensor with its derivative cut where the flag does not hold, if the step closes over
        it and it has a derivative."""
        if not isinstance(x, Tensor) or self._is_inside(x) or not is_differentiated(x):
            return x
        if self._anywhere and not (is_batched(x) or is_differentiated_by_row(x)):
            return x
        if id(x) not in self._limited:
            limited = torch.where(self._live, x, x.detach())
            self._note(limited)
            self._limited[id(x)] = x, limited  # with x itself, so that no other gets its id
        return self._limited[id(x)][1]


# Functions of torch about a tensor's memory: no derivative passes through them.
_OF_MEMORY = frozenset({"untyped_storage", "storage", "data_ptr"})


def _writes(name: str) -> bool:
    """Whether a function of torch of this name writes its first argument, which then is no
    closed-over tensor: a body must not write those."""
    return (
        name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
        or name.startswith("__i")
    )
