"""`piecewise`: a function as graphs between named operators, which run by themselves at every call."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from weft.transforms.graphify import Graphified, graphify
from weft.transforms.ladder import Ladder

P = ParamSpec("P")
R = TypeVar("R")


def piecewise(
    fn: Callable[P, R],
    *,
    split_at: str | Iterable[str],
    ladder: Sequence[Any] | None = None,
    donate_argnames: str | Iterable[str] = (),
    static_argnames: str | Iterable[str] = (),
    reference_argnames: str | Iterable[str] | None = None,
    backend: str | None = None,
) -> Graphified[P, R]:
    """`graphify` in pieces: the capture is interrupted at each operator of `split_at`, which stays outside the graphs.

    For what cannot be captured, or should see the host's values (an attention kernel that plans its launch), inside a
    function of which the rest should replay. Any function: it is not traced, but recorded as it runs. The pieces share
    one memory pool, and between two of them runs nothing but the operator.

    Args:
        fn: a pure function over pytrees of tensors.
        split_at: names of operators, as in `weft::paged_attention` or `aten::sort`.
        ladder: the classes that may be captured in pieces; None: every signature is captured as it is.
        donate_argnames, static_argnames, reference_argnames, backend: as `graphify` takes them.

    Raises:
        CaptureError: at the first call, if the function never calls a split operator; and all that `graphify` refuses.

    >>> import torch
    >>> f = piecewise(lambda x: torch.sort(x * 2).values + 1, split_at="aten::sort")
    >>> f(torch.tensor([3.0, 1.0])), f(torch.tensor([0.0, -1.0]))
    (tensor([3., 7.]), tensor([-1.,  1.]))
    """
    return graphify(
        fn,
        ladder=None if ladder is None else Ladder(piecewise=tuple(ladder)),
        split_at=split_at,
        donate_argnames=donate_argnames,
        static_argnames=static_argnames,
        reference_argnames=reference_argnames,
        backend=backend,
    )
