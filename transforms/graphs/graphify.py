"""`graphify` makes a pure function replay: it memoizes one captured graph per key and does not
change the results. `piecewise` does the same, but splits each graph at named operators.

step = graphify(step, ladder=make_ladder("full", limits))
state, out = step(params, state, batch)      # captures this batch's class once, then replays it
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, Unpack, overload

from weft.arguments.checks import names_arguments
from weft.errors import CaptureError
from weft.torchapi.inductor import Compiler
from weft.transforms.graphs.graphified import Graphified
from weft.transforms.graphs.ladder import Ladder
from weft.transforms.graphs.options import CommonOptions, GraphifyOptions, Operators, make_graphable
from weft.transforms.graphs.verify import Verified

P = ParamSpec("P")
R = TypeVar("R")


@overload
def graphify(fn: Callable[P, R], **options: Unpack[GraphifyOptions]) -> Graphified[P, R]: ...
@overload
def graphify(
    fn: None = ..., **options: Unpack[GraphifyOptions]
) -> Callable[[Callable[P, R]], Graphified[P, R]]: ...
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
    verify: int | None = None,
    compiler: Compiler | None = None,
    strict: bool = False,
) -> Graphified[P, R] | Callable[[Callable[P, R]], Graphified[P, R]]:
    """Make a pure function replay: same signature, same result, one captured graph per key.

    The key (`weft.transforms.graphs.calls.call.key_of`) holds the tree structure of the arguments;
    static and other non-tensor values; each tensor's shape, dtype, stride and device; the batch's
    class; the addresses of arguments captured by reference; and the call's surroundings (grad mode,
    autocast, function modes, torch's global switches). Unless results are borrowed, no later call
    changes them. Inside another capture or a torch.func transform, and where autograd would record,
    the function itself runs.

    In `eval()`, `nn.MultiheadAttention` and the transformers of torch.nn have a fast path: one
    operator for a whole layer. A graphified function never takes it, neither in a graph nor where
    the function itself runs. So its results have the bits of a call under
    `torch.backends.mha.set_fastpath_enabled(False)`, and differ in the last digits from a plain
    call with the fast path. Where values differ beyond that, the capture is refused: an
    `nn.TransformerEncoder` with a padding mask returns zeros for padding on its fast path, unless
    it has `enable_nested_tensor=False`.

    Each call compares what the function reads from outside its arguments, as far as that is cheap.
    These changes lead to a new capture: a tensor has other memory; a parameter of a module was
    replaced; a module that reads its mode has switched it; a global or a nonlocal names another
    object; a function, module or tensor was replaced in a list, in a dict or among the attributes
    of an object. Any other change inside an object (a number, another object) is not seen, because
    Python code runs at the capture only; `verify` finds it. If the recorded run itself makes such a
    change, for example to a counter, in a module or plain object that the function names, however
    deep, the capture is refused with an error that gives the path.

    A function that `torch.compile` has compiled is captured too, by itself or inside `fn`: calls
    outside of a capture compile it until none compiles any more, and then its kernels are recorded.
    A class for which it compiles once more is a capture like any other. It must be compiled as a
    whole: one with graph breaks is refused. So is one that uses CUDA graphs of its own
    (`mode="reduce-overhead"`, `mode="max-autotune"`): take `mode="default"` or
    `mode="max-autotune-no-cudagraphs"`.

    `torch.cuda.is_current_stream_capturing()` is True during every capture, even without a GPU. So
    code that skips host reads inside CUDA graphs skips them in captures on a CPU too.

    Args:
        fn: a pure function over pytrees of tensors. Without it, `graphify` is a decorator.
        ladder: the classes that may be captured (`make_ladder`). A call's batch is padded to the
            least class that covers it, and runs eagerly if none does. None: every signature is
            captured as it is. Under a ladder, padding must not change the donated tensors: captures
            run on padding, and a donated tensor of over 64 MiB is not saved before a capture.
        split_at: names of operators (`weft::paged_attention`) that stay outside the graphs in mode
            piecewise: the classes of the ladder's `piecewise` part (without a ladder, all
            signatures) are captured as the pieces between these operators. A function that calls
            none of them is one piece under a ladder, and is refused without one.
        donate_argnames: arguments whose storage the function takes, such as the state (in addition
            to those that `weft.donates` declares). The first part of the result with the structure
            of such an argument is its next value, and is kept in its storage. Donated arguments are
            captured by reference, so pass on what the call returned: a new state is a miss.
        static_argnames: arguments with hashable values that are not tensors; they are part of the
            key. An object of a class that defines no `__eq__` is equal only to itself, whatever it
            holds: as with `jax.jit`, a change inside it after the capture is not seen.
        reference_argnames: arguments that are captured by reference and not copied: a call with
            tensors at other addresses is a miss. None: `params`, if there is such an argument.
        backend: `cuda`, `tape`, or None to choose by the device of the arguments.
        outputs: `safe`: results are copies, which no later call changes. `borrow`: results are the
            graph's own buffers, which the next replay overwrites; for callers that are done with
            the results before they call again (`weft.check_borrowed()` finds later uses).
        max_captures: the most graphs to hold; beyond it, the least recently used is dropped. None:
            any number.
        collectives: whether collective operations (torch.distributed) may be captured. Every rank
            must then capture and replay in the same order.
        verify: at every `verify`-th call, also run the function itself and compare the results bit
            by bit; for tests and debugging. It finds what a replay cannot see: a Python value that
            has changed outside the arguments. With a compiler it compares within the tolerances of
            `torch.testing`.
        compiler: `inductor`: the operators that a capture would have recorded are compiled by
            torch's compiler first, and the graph holds what that makes: fewer kernels, other
            rounding. On a CPU this is what makes a graph fast. Donated arguments are written in
            place, weft's operators stay whole, and random numbers are those of the function. The
            classes of a ladder share a compilation where their operators differ in sizes alone.
            Compiled code is kept on disk, in Inductor's own cache. Any other compiler that
            `torch.compile(backend=...)` takes may be named or passed, such as `aot_eager`, to find
            out whether a fault is the compiler's. None: nothing is compiled.
        strict: with a compiler, a function that cannot be compiled is an error. Otherwise a warning
            says so, once, and the function is captured uncompiled.

    Raises:
        CaptureError: at the first call, if the function reads tensors on the host, branches on
            them, has results whose shapes depend on data, seeds a random generator, keeps tensors
            outside, counts in an object, or writes to tensors that it does not own; the error names
            the line. Also if an argument or a result cannot be part of a key: subclasses of Tensor,
            arbitrary objects.
        CompilerError: there is no such compiler; or `strict`, and at the first call the function
            cannot be compiled: it uses sparse tensors, operators without a fake implementation,
            `split_at`, collectives, `weft.while_loop` or `weft.batch_invariant()`.
        CacheMissError: a miss after `freeze()`.
        VerificationError: a replay differs from the function itself (`verify`); the error names the
            first operator that differs.

    The address of a copied argument modulo 16 bytes is part of its signature, because kernels are
    chosen by alignment and the last bits depend on the kernel. So rows of a matrix may have up to
    four graphs; clones of the rows have one.

    If the device's memory is full at a capture, a warning says so; that call and later ones then
    use the graphs that exist, or run the function itself.

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
        "verify": verify,
        "compiler": compiler,
        "strict": strict,
    }
    if fn is None:
        return lambda f: graphify(f, **options)
    if isinstance(
        fn, staticmethod | classmethod
    ):  # `@graphify` stands above `@staticmethod`, but the descriptor has to be the outer one
        outer: Any = type(fn)(graphify(fn.__func__, **options))
        return outer  # type: ignore[no-any-return]
    graphable = make_graphable(fn, options)
    if verify is None:
        return Graphified(graphable)
    return Verified(graphable)


@overload
def piecewise(
    fn: Callable[P, R],
    *,
    split_at: Operators,
    ladder: Sequence[Any] | None = ...,
    **options: Unpack[CommonOptions],
) -> Graphified[P, R]: ...
@overload
def piecewise(
    fn: None = ...,
    *,
    split_at: Operators,
    ladder: Sequence[Any] | None = ...,
    **options: Unpack[CommonOptions],
) -> Callable[[Callable[P, R]], Graphified[P, R]]: ...
def piecewise(
    fn: Callable[P, R] | None = None,
    *,
    split_at: Operators,
    ladder: Sequence[Any] | None = None,
    **options: Unpack[CommonOptions],
) -> Graphified[P, R] | Callable[[Callable[P, R]], Graphified[P, R]]:
    """`graphify` in pieces: the capture is interrupted at each operator of `split_at`, which stays
    outside the graphs.

    Use it when a function should replay except for one operator that cannot be captured, or that
    needs values on the host (an attention kernel that plans its launch). It takes any function,
    because the function is recorded as it runs and not traced. The pieces share one memory pool,
    and only the split operator runs between two of them.

    Args:
        fn: a pure function over pytrees of tensors. Without it, `piecewise` is a decorator.
        split_at: names of operators, as in `weft::paged_attention` or `aten::sort`, or operators
            themselves, as in `torch.ops.aten.sort`.
        ladder: the classes that may be captured in pieces; None: every signature is captured as it
            is.
        options: the other options of `graphify`.

    Raises:
        CaptureError: at the first call, if the function never calls a split operator; and whatever
            `graphify` refuses.

    >>> import torch
    >>> f = piecewise(lambda x: torch.sort(x * 2).values + 1, split_at="aten::sort")
    >>> f(torch.tensor([3.0, 1.0])), f(torch.tensor([0.0, -1.0]))
    (tensor([3., 7.]), tensor([-1.,  1.]))
    """
    if isinstance(split_at, list | tuple | set | frozenset) and not split_at:
        instead = (
            "the operators to cut at, as in split_at='aten::sort'; or weft.graphify, for one graph"
        )
        raise CaptureError(
            f"weft.piecewise({getattr(fn, '__name__', '...')})", f"split_at={split_at!r}", instead
        )
    if ladder is None:
        pieces = None
    else:
        pieces = Ladder(piecewise=tuple(ladder))
    if fn is None:
        return graphify(split_at=split_at, ladder=pieces, **options)
    return graphify(fn, split_at=split_at, ladder=pieces, **options)
