"""`piecewise`: a function as graphs between named operators, which run by themselves at every call."""

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack, overload

from weft.errors import CaptureError
from weft.transforms.graphs.graphified import Graphified
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.ladder import Ladder
from weft.transforms.graphs.options import CommonOptions, Operators

P = ParamSpec("P")
R = TypeVar("R")


@overload
def piecewise(
    fn: Callable[P, R], *, split_at: Operators, ladder: Sequence[Any] | None = ..., **options: Unpack[CommonOptions]
) -> Graphified[P, R]: ...
@overload
def piecewise(
    fn: None = ..., *, split_at: Operators, ladder: Sequence[Any] | None = ..., **options: Unpack[CommonOptions]
) -> Callable[[Callable[P, R]], Graphified[P, R]]: ...
def piecewise(
    fn: Callable[P, R] | None = None,
    *,
    split_at: Operators,
    ladder: Sequence[Any] | None = None,
    **options: Unpack[CommonOptions],
) -> Graphified[P, R] | Callable[[Callable[P, R]], Graphified[P, R]]:
    """`graphify` in pieces: the capture is interrupted at each operator of `split_at`, which stays outside the graphs.

    For what cannot be captured, or should see the host's values (an attention kernel that plans its launch), inside a
    function of which the rest should replay. Any function: it is not traced, but recorded as it runs. The pieces share
    one memory pool, and between two of them runs nothing but the operator.

    Args:
        fn: a pure function over pytrees of tensors. Left out, `piecewise` is a decorator.
        split_at: operators by name, as in `weft::paged_attention` or `aten::sort`, or as `torch.ops.aten.sort`.
        ladder: the classes that may be captured in pieces; None: every signature is captured as it is.
        options: the rest, as `graphify` takes them.

    Raises:
        CaptureError: at the first call, if the function never calls a split operator; and all that `graphify` refuses.

    >>> import torch
    >>> f = piecewise(lambda x: torch.sort(x * 2).values + 1, split_at="aten::sort")
    >>> f(torch.tensor([3.0, 1.0])), f(torch.tensor([0.0, -1.0]))
    (tensor([3., 7.]), tensor([-1.,  1.]))
    """
    if isinstance(split_at, list | tuple | set | frozenset) and not split_at:
        instead = "the operators to cut at, as in split_at='aten::sort'; or weft.graphify, for one graph"
        raise CaptureError(f"weft.piecewise({getattr(fn, '__name__', '...')})", f"split_at={split_at!r}", instead)
    pieces = None if ladder is None else Ladder(piecewise=tuple(ladder))
    if fn is None:
        return graphify(split_at=split_at, ladder=pieces, **options)
    return graphify(fn, split_at=split_at, ladder=pieces, **options)
