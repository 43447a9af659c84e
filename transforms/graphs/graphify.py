"""`graphify` makes a pure function replay: it memoizes one captured graph for each key, and changes nothing else.
`piecewise` does so with graphs that are interrupted at named operators.

step = graphify(step, ladder=make_ladder("full", limits))
state, out = step(params, state, batch)      # captures this batch's class once, and replays it from then on
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, Unpack, overload

from weft.arguments import names_arguments
from weft.errors import CaptureError
from weft.transforms.graphs.graphified import Graphified
from weft.transforms.graphs.ladder import Ladder
from weft.transforms.graphs.options import CommonOptions, GraphifyOptions, Operators, make_graphable

P = ParamSpec("P")
R = TypeVar("R")


@overload
def graphify(fn: Callable[P, R], **options: Unpack[GraphifyOptions]) -> Graphified[P, R]: ...
@overload
def graphify(fn: None = ..., **options: Unpack[GraphifyOptions]) -> Callable[[Callable[P, R]], Graphified[P, R]]: ...
@names_arguments(
    donate="donate_argnames=[...]",
    donate_argnums="donate_argnames=[...], by name",
    static_argnums="static_argnames=[...], by name",
    mode="ladder=weft.make_ladder(mode, limits)",
)
def graphify(
    fn: Callable[P, R] | None = None,
    *,
    ladder: Ladder[Any] | Sequence[Any] | None = None,
    split_at: Operators = (),
    donate_argnames: str | Iterable[str] = (),
    static_argnames: str | Iterable[str] = (),
    reference_argnames: str | Iterable[str] | None = None,
    backend: str | None = None,
    outputs: Literal["safe", "borrow"] = "safe",
    max_captures: int | None = None,
    collectives: bool = False,
) -> Graphified[P, R] | Callable[[Callable[P, R]], Graphified[P, R]]:
    """Make a pure function replay: same signature, same result, one captured graph a key.

    The key is the tree structure, static and other non-tensor values, each tensor's shape, dtype, stride and device,
    the class of the batch, the addresses of what is captured by reference, and what holds around the call: autograd's
    mode, autocast, function modes, torch's switches. Results are safe unless borrowed: a later call does not change
    them. Inside another capture, a torch.func transform, or where autograd would record, the function itself runs.
    Code that leaves host reads out of CUDA graphs leaves them out of any capture: in one,
    `torch.cuda.is_current_stream_capturing()` is True, with or without a GPU.

    Args:
        fn: a pure function over pytrees of tensors. Left out, `graphify` is a decorator.
        ladder: the classes that may be captured (`make_ladder`); a call's batch is padded to the least that covers it,
            and runs eagerly if none does. None: every signature is captured as it is. A step under a ladder must treat
            padding as inert: a donated tensor of over 64 MiB is not saved while its capture runs on padding.
        split_at: operators by name (`weft::paged_attention`) that stay outside the graphs in mode piecewise: the
            classes of the ladder's `piecewise` part, or without a ladder all, are captured as pieces between them.
        donate_argnames: arguments whose storage the function takes, such as the state (beside those that `weft.donates`
            declares). The first part of the result with their structure is their next value, and is kept in their
            storage. They are captured by reference: pass on what the call returned; a new state is a miss.
        static_argnames: arguments of hashable values that are no tensors and are part of the key.
        reference_argnames: captured by reference, not copied: a call with tensors elsewhere is a miss. None: `params`,
            if there is such an argument.
        backend: `cuda`, `tape`, or None to choose by the device of the arguments.
        outputs: `safe`: results are copies, which no later call changes. `borrow`: they are the graph's own buffers,
            for a caller that is done with them before it calls again: the next replay overwrites them
            (`weft.check_borrowed()` finds a use after that).
        max_captures: graphs held at most: of more, the least recently used is dropped. None: any number.
        collectives: whether collective operations (torch.distributed) may be captured. Every rank must then capture and
            replay in the same order.

    Raises:
        CaptureError: at the first call, if the function reads tensors on the host, branches on them, has results whose
            shapes depend on data, seeds a random generator, keeps tensors outside, or writes to what it does not own;
            it names the line. An argument or a result that no key tells: subclasses of Tensor, objects.
        CacheMissError: a miss after `freeze()`.

    Where the device's memory is full at a capture, a warning says so; the call, and later ones, then use the graphs
    that there are, or run the function itself.

    >>> import torch
    >>> @graphify
    ... def f(x, y):
    ...     return torch.sin(x) + y
    >>> f(torch.zeros(2), torch.ones(2)), f(torch.zeros(2), torch.zeros(2))
    (tensor([1., 1.]), tensor([0., 0.]))
    >>> f.cache_info()
    CacheInfo(captures=1, replays=2, eager=0, currsize=1)
    """
    options: GraphifyOptions = {
        "ladder": ladder,
        "split_at": split_at,
        "donate_argnames": donate_argnames,
        "static_argnames": static_argnames,
        "reference_argnames": reference_argnames,
        "backend": backend,
        "outputs": outputs,
        "max_captures": max_captures,
        "collectives": collectives,
    }
    if fn is None:
        return lambda f: graphify(f, **options)
    return Graphified(make_graphable(fn, options))


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
