"""Borrowed results: marks on functions that lend their results, and `weft.check_borrowed()`, which
finds a use of a borrowed result after a replay has overwritten it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import attrs
from torch import Tensor

from weft.blocks import Blocks
from weft.errors import StaleResultError
from weft.torchapi.private import FunctionMode, storage_id
from weft.values.trees import tree_leaves

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

_LOAN = "_weft_loan"
_OWNS = "__weft_owns_results__"
_LENDING = Blocks[bool]("weft.lending")
# Functions that do not read a tensor's elements: a stale result may be passed to them.
_METADATA = {
    *(
        "size",
        "stride",
        "dim",
        "numel",
        "data_ptr",
        "storage_offset",
        "is_contiguous",
        "untyped_storage",
    ),
    *(
        "element_size",
        "is_floating_point",
        "is_complex",
        "get_device",
        "nelement",
        "ndimension",
        "__len__",
        "__hash__",
    ),
}


class _Counts(Protocol):
    """The number of replays of graphs that share memory."""

    replays: int


@attrs.frozen(eq=False)
class Loan:
    """A borrowed result: its function's name, the replay count of the graphs that may overwrite it,
    and the number of the replay that made it."""

    name: str
    graphs: _Counts
    replay: int


class _Watch(FunctionMode):
    """Checks the tensors that every torch function is called with; views of a borrowed tensor are
    borrowed too."""

    only_looks = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name not in _METADATA and name not in ("__get__", "__set__"):
            for tensor in tensors:
                refuse_stale(tensor, call=f"{name}(...)")
        result = func(*args, **kwargs)
        loans = {
            storage_id(t): loan for t in tensors if (loan := getattr(t, _LOAN, None)) is not None
        }
        if loans and name not in _METADATA:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and (loan := loans.get(storage_id(leaf))) is not None:
                    setattr(leaf, _LOAN, loan)
        return result


@contextmanager
def check_borrowed() -> Iterator[None]:
    """Context in which any use of a borrowed result (`graphify(..., outputs="borrow")`), or of a
    view of one, raises once a later replay has overwritten it. It holds in this thread, and makes
    every torch function slower: use it in tests and debugging.

    Raises:
        StaleResultError: it names the function that lent the result, and the number of replays
            since.

    >>> import torch, weft
    >>> f = weft.graphify(lambda x: x * 2, outputs="borrow")
    >>> with weft.check_borrowed():
    ...     first, second = f(torch.ones(2)), f(torch.zeros(2))
    ...     kept = second + 1
    ...     lost = first + 1
    Traceback (most recent call last):
        ...
    weft.errors.StaleResultError: add(...)
      saw: a borrowed result of <lambda>, which 1 later replay has overwritten
      instead: use it before the next call, clone it, or write graphify(..., outputs="safe")
    """
    with _LENDING.block(True), _Watch():
        yield


def lends(fn: Callable[..., Any]) -> bool:
    """Whether the next call of `fn` may overwrite the result of this one: `fn` was graphified with
    `outputs="borrow"`, or is a transform of such a function (`functools.wraps` copies the mark)."""
    return bool(getattr(fn, "__weft_lends__", False))


def declare_lending(fn: F, lends: bool) -> F:
    """Mark `fn` as lending its results, or as not lending them, and return it."""
    vars(fn)["__weft_lends__"] = lends
    return fn


def owns_results(fn: Callable[..., Any]) -> bool:
    """Whether each result of `fn` is in new memory, which neither a later call nor the returned
    state shares: `fn` is graphified, or was marked. The mark refers to its function, so that a copy
    of the mark on a wrapper, whose results may differ, does not count."""
    return getattr(fn, _OWNS, None) is fn


def declare_owning(fn: F, owns: bool) -> F:
    """Mark `fn` as returning results in new memory, or as not doing so, and return it."""
    vars(fn)[_OWNS] = fn if owns else None
    return fn


def watches_borrows() -> bool:
    """Whether `check_borrowed()` is active here."""
    return bool(_LENDING.values())


def lend(result: R, outputs: Any, name: str, graphs: _Counts) -> R:
    """Mark the leaves of a result that lie in the graph's own outputs as borrowed."""
    storages = {storage_id(x) for x in outputs.leaves if isinstance(x, Tensor)}
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor) and storage_id(leaf) in storages:
            setattr(leaf, _LOAN, Loan(name, graphs, graphs.replays))
    return result


def refuse_stale(value: Any, *, call: str) -> None:
    """Raise StaleResultError if `value` is a borrowed result that was overwritten."""
    if isinstance(value, Tensor):
        loan = getattr(value, _LOAN, None)
    else:
        loan = None
    if loan is not None and (later := loan.graphs.replays - loan.replay):
        if later == 1:
            replays = "1 later replay has"
        else:
            replays = f"{later} later replays have"
        problem = f"a borrowed result of {loan.name}, which {replays} overwritten"
        raise StaleResultError(
            call,
            problem,
            'use it before the next call, clone it, or write graphify(..., outputs="safe")',
        )
