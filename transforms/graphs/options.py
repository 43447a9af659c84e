"""The options of `graphify`, checked against the function's signature."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypedDict

import attrs
from torch import Tensor, nn

from weft.arguments.checks import is_int, nearest
from weft.batches.descriptor import Descriptor
from weft.errors import CaptureError, CompilerError
from weft.torchapi.inductor import Compiler, compilers
from weft.torchapi.private import before_compilation, operator_name
from weft.transforms.graphs.backends import NAMES, no_backend
from weft.transforms.graphs.calls.call import Roles
from weft.transforms.graphs.ladder import Ladder, as_ladder
from weft.values.donation import donated_argnames, donates

Names = str | Iterable[str]


# Operators by name (`aten::sort`), or as `torch.ops.aten.sort`.
Operators = str | Any | Iterable[str | Any]


class CommonOptions(TypedDict, total=False):
    """The keyword arguments of `graphify` and `piecewise`, for type checkers."""

    donate_argnames: Names
    static_argnames: Names
    reference_argnames: Names | None
    backend: str | None
    outputs: Literal["safe", "borrow"]
    max_captures: int | None
    collectives: bool
    verify: int | None
    compiler: Compiler | None
    strict: bool


class GraphifyOptions(CommonOptions, total=False):
    """All keyword arguments of `graphify`."""

    ladder: Ladder[Any] | Sequence[Any] | None
    split_at: Operators


@attrs.frozen(eq=False)
class Graphable:
    """A function and its checked options.

    Args:
        fn: the function, with its donated arguments declared on it (`weft.donates`).
        name: its name in messages.
        roles: the roles of its arguments.
        ladder: the classes that may be captured; None: any signature.
        split_at: operators that stay outside the graphs in mode piecewise.
        backend: the back end's name, as `make_backend` takes it.
        borrow: whether results are lent.
        max_captures: the most graphs to hold; None: any number.
        collectives: whether collective operations may be captured.
        verify: every `verify`-th call is compared with the function itself; None: no call is.
        compiler: what compiles the graphs; None: they repeat the operators as they are.
        strict: whether a function that cannot be compiled is an error.
    """

    fn: Callable[..., Any]
    name: str
    roles: Roles
    ladder: Ladder[Any] | None
    split_at: frozenset[str]
    backend: str | None
    borrow: bool
    max_captures: int | None
    collectives: bool
    verify: int | None = None
    compiler: Compiler | None = None
    strict: bool = False


def make_graphable(fn: Callable[..., Any], options: GraphifyOptions) -> Graphable:
    """Check the options against `fn`.

    Raises:
        CaptureError: an option is invalid, or names an argument that `fn` does not have.
    """
    name = getattr(fn, "__name__", type(before_compilation(fn)).__name__)
    call = f"graphify({(name if callable(fn) else fn)!s:.60}, ...)"
    _check_function(call, fn)
    _check(call, options)
    (signature, own_signature), declared = _signatures_of(call, fn), donated_argnames(fn)
    static = names_in(options["static_argnames"])
    extra = tuple(n for n in names_in(options["donate_argnames"]) if n not in declared)
    by_name = options["reference_argnames"]
    if by_name is None:
        references = tuple(n for n in signature.parameters if n == "params")
    else:
        references = names_in(by_name)
    for option, names in (("donate", extra), ("static", static), ("reference", references)):
        for argument in names:
            if argument not in signature.parameters:
                problem = f"{option}_argnames holds {argument!r}, which is not one of its arguments"
                if signature.parameters:
                    instead = f"one of {', '.join(signature.parameters)}"
                else:
                    instead = "no names: it has none"
                raise CaptureError(call, problem, instead)
    donated = (*declared, *extra)
    # Only names that were passed can conflict: `params`, the default reference, may be static.
    given_references = () if by_name is None else references
    if both := next((n for n in static if n in (*donated, *given_references)), None):
        problem = f"{both!r} in static_argnames, and in donate_argnames or reference_argnames"
        raise CaptureError(call, problem, "one of them: a static argument is not a tensor")
    by_reference = (*donated, *(n for n in references if n not in donated))
    ladder = options["ladder"]
    return Graphable(
        fn=donates(*extra)(fn) if extra else fn,
        name=name,
        roles=Roles(signature, own_signature, static, donated, by_reference, _module_of(fn)),
        ladder=None if ladder is None else as_ladder(ladder),
        split_at=frozenset(operators_in(call, options["split_at"])),
        backend=options["backend"],
        borrow=options["outputs"] == "borrow",
        max_captures=options["max_captures"],
        collectives=options["collectives"],
        verify=options["verify"],
        compiler=options["compiler"],
        strict=options["strict"],
    )


def _module_of(fn: Any) -> nn.Module | None:
    """The module that a function is, is a method of, or declares to call (`__weft_module__`)."""
    candidates = (fn, getattr(fn, "__self__", None), getattr(fn, "__weft_module__", None))
    return next((module for module in candidates if isinstance(module, nn.Module)), None)


def names_in(names: Names) -> tuple[str, ...]:
    """One name or several, as a tuple."""
    if isinstance(names, str):
        return (names,)
    return tuple(names)


def operators_in(call: str, operators: Operators) -> Iterator[str]:
    """The names of operators, as `namespace::name`."""
    for operator in (
        operators if isinstance(operators, list | tuple | set | frozenset) else (operators,)
    ):
        name = operator if isinstance(operator, str) else operator_name(operator)
        if name is None or "::" not in name:
            instead = (
                "operators by name, as in 'weft::paged_attention' or 'aten::sort', or as"
                " torch.ops.aten.sort"
            )
            raise CaptureError(
                call, f"split_at={getattr(operator, '__name__', repr(operator))}", instead
            )
        yield name.partition(".")[0]


def _signatures_of(
    call: str, fn: Callable[..., Any]
) -> tuple[inspect.Signature, inspect.Signature]:
    """The signature that names the arguments, and the function's own signature.

    They differ for a decorator that uses `functools.wraps` and adds, drops or renames arguments:
    `inspect.signature` reports the wrapped function's, but a call must fit the wrapper's. A wrapper
    that takes `*args` or `**kwargs` has no names to offer, so the wrapped function's are used."""
    try:
        signature = named = inspect.signature(fn)
        with contextlib.suppress(
            ValueError
        ):  # an object with __get__, such as a graphified function, has none
            signature = inspect.signature(fn, follow_wrapped=False)
        variadic = any(
            p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values()
        )
        return (named if variadic else signature), signature
    except (ValueError, TypeError):
        name = getattr(fn, "__name__", "fn")
        instead = f"a function that calls it, such as lambda x: {name}(x)"
        raise CaptureError(call, "a builtin, whose argument names are unknown", instead) from None


def _check_function(call: str, fn: Any) -> None:
    if isinstance(fn, Tensor):
        problem = f"a tensor of shape {tuple(fn.shape)}, the result of a call"
        raise CaptureError(
            "graphify(<a Tensor>, ...)",
            problem,
            "the function itself: graphify(f), and not graphify(f(x))",
        )
    if not callable(fn):
        raise CaptureError(call, f"{fn!r:.60}, which is not a function", "a function over tensors")
    if any(
        test(fn)
        for test in (
            inspect.isgeneratorfunction,
            inspect.iscoroutinefunction,
            inspect.isasyncgenfunction,
        )
    ):
        problem = "a function that yields or awaits, so that a call does not run it"
        raise CaptureError(call, problem, "a function that returns all its results")


def _check_names(call: str, option: str, value: Any) -> None:
    if value is None or isinstance(value, str):
        names = (value,)
    else:
        names = value
    if isinstance(names, Iterable) and all(name is None or isinstance(name, str) for name in names):
        return
    raise CaptureError(call, f"{option}={value!r:.60}", f"{option}=[...], the names of arguments")


def _missing_protocol(rung: Any) -> str:
    """What a rung of a ladder lacks to be a descriptor, in words; empty if it is a descriptor."""
    kind = type(rung).__name__
    if not callable(getattr(rung, "covers", None)):
        if isinstance(rung, str):
            return ""
        return f"{kind} has no method covers"
    if isinstance(rung, Descriptor):
        return ""
    return f"{kind} cannot be hashed"


def check_compiler(call: str, compiler: Any) -> None:
    """Check that torch has this compiler.

    Raises:
        CompilerError: it has none of this name.
    """
    # The names of the others are known only once torch's compiler is imported, which takes seconds.
    if compiler is None or compiler == "inductor" or callable(compiler):
        return
    names = compilers()
    if compiler not in names:
        near = nearest(compiler, names) if isinstance(compiler, str) else []
        problem = f"compiler={compiler!r:.60}, which is no compiler of torch"
        instead = " or ".join(f"compiler={name!r}" for name in dict.fromkeys([*near, "inductor"]))
        raise CompilerError(call, problem, f"{instead}; without it, nothing is compiled")


def _check(call: str, options: GraphifyOptions) -> None:
    for option in ("donate_argnames", "static_argnames", "reference_argnames"):
        _check_names(call, option, options[option])
    ladder = options["ladder"]
    outputs = options["outputs"]
    if outputs not in ("safe", "borrow"):
        raise CaptureError(call, f"outputs={outputs!r}", "outputs='safe' or 'borrow'")
    if ladder is not None and (isinstance(ladder, str) or any(map(_missing_protocol, ladder))):
        instead = (
            "a sequence of descriptors, as from weft.make_ladder(mode, limits), or of a hashable"
            " class (such as "
        )
        instead += "an @attrs.frozen one) with a method covers(other)"
        problem = f"ladder={ladder!r}" + next(
            (f"; {lack}" for lack in map(_missing_protocol, ladder) if lack), ""
        )
        raise CaptureError(call, problem, instead)
    # `dispatch` needs a reflexive `covers`, so that a batch of exactly a captured class finds it.
    for rung in ladder or ():
        if (covers := rung.covers(rung)) is not True:
            problem = f"{rung!r}.covers(itself) is {covers!r}"
            instead = "a covers(other) that returns True or False"
            raise CaptureError(call, problem, instead)
    if isinstance(ladder, Ladder) and ladder.piecewise and not options["split_at"]:
        problem = "a ladder with classes for pieces, and no split_at"
        instead = (
            "split_at='weft::paged_attention', or a ladder of whole graphs:"
            " weft.make_ladder('full', limits)"
        )
        raise CaptureError(call, problem, instead)
    if options["backend"] not in (None, *NAMES):
        raise no_backend(options["backend"])
    check_compiler(call, options["compiler"])
    counts = (
        ("max_captures", options["max_captures"], "any number"),
        ("verify", options["verify"], "no comparison"),
    )
    for option, value, meaning in counts:
        if value is not None and not is_int(value, 1):
            raise CaptureError(call, f"{option}={value!r}", f"an int >= 1, or None for {meaning}")
