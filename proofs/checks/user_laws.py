"""The laws of pure functions that `weft.proofs.check` runs on a user's function."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, func

from weft.batches.padding import pad, unpad
from weft.batches.state import State
from weft.proofs.checks.bits import same_bits, wants_rows
from weft.proofs.checks.difference import LawViolation, visible
from weft.proofs.checks.search import copies
from weft.proofs.checks.subject import Arguments, Subject
from weft.transforms.graphs.calls.borrowing import lends
from weft.transforms.graphs.graphified import roles_of
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.microbatch import microbatch
from weft.values.trees import find_descriptors, tree_flatten, tree_leaves, tree_map, tree_unflatten

Calls = Sequence[Arguments]


@attrs.frozen
class UserLaw:
    """A law for one function, checked on a sequence of its calls.

    Args:
        name: the name in `check(..., laws=...)`.
        number: the number in `weft.proofs.evidence.runs.suite`; empty for purity, which the other
            laws presuppose.
        promise: the statement that must hold.
        run: raises LawViolation if it does not hold, and returns the number of results compared.
        needs: describes what the law needs and the function lacks; empty if it lacks nothing.
        on_request: whether the law runs only on request, since only the user knows whether it must
            hold.
        captures: whether the law captures the function, so that a call that cannot be captured
            violates it.
    """

    name: str
    number: str
    promise: str
    run: Callable[[Subject, Calls], int]
    needs: Callable[[Subject], str] = lambda subject: ""
    on_request: bool = False
    captures: bool = False


def pure(subject: Subject, calls: Calls) -> int:
    """Equal arguments give equal results, whatever was called before; a call changes neither
    earlier results nor arguments that are not donated."""
    results = []
    for call in calls:
        arguments = copies(call)
        result = subject.call(subject.fn, arguments)
        results.append((result, copies(result)))
        kept = {
            name: value
            for name, value in arguments.items()
            if name not in roles_of(subject.graph).donated
        }
        subject.expect(kept, {name: call[name] for name in kept}, ("after the call", "as passed"))
    # In reverse order, so that each call follows other calls than the first time.
    for call, (_, copy) in reversed(list(zip(calls, results, strict=True))):
        subject.expect(
            subject.call(subject.fn, copies(call)), copy, ("the second time", "the first time")
        )
    for result, copy in results:
        subject.expect(result, copy, ("after later calls", "when returned"))
    return 3 * len(calls) + _compare_with_a_first_call(subject, calls)


def _compare_with_a_first_call(subject: Subject, calls: Calls) -> int:
    """Compare the last call, which follows others, with the same call in a process that has seen no
    other; return the number of comparisons."""
    if len(calls) < 2:
        return 0
    in_order = subject.ask(("outcomes", calls))
    if in_order is None:
        alone = None
    else:
        alone = subject.ask(("outcomes", calls[-1:]))
    # Without such a process there is nothing to compare, and a function may refuse drawn arguments.
    if alone is None or in_order[-1].error:
        return 0
    if alone[0].error:
        text = f"after other calls {subject.name} returns, as the first call it raises"
        raise LawViolation(f"{text}\n{alone[0].error}")
    subject.expect(in_order[-1].result, alone[0].result, ("after other calls", "as the first call"))
    return 1


def graph(subject: Subject, calls: Calls) -> int:
    """L1: a replay returns the same as the function at the same padded shape, including the next
    state."""
    graphed = subject.fresh()
    for replayed, expected, _ in subject.replays(calls, graphed):
        subject.expect(replayed, expected, (f"graphify({subject.name})", subject.name))
    return graphed.cache_info().replays


def replay(subject: Subject, calls: Calls) -> int:
    """L9: later replays do not change an earlier call's results, except the state, whose storage
    they take over."""
    graphed = subject.fresh()
    results = []
    for replayed, _, call in subject.replays(calls, graphed):
        result = subject.beside_the_state(replayed, call)
        results.append((result, copies(result)))
    for result, copy in results:
        subject.expect(result, copy, ("after later replays", "when returned"))
    if graphed.cache_info().replays:
        return len(results)
    return 0


def trace(subject: Subject, calls: Calls) -> int:
    """L8: explaining, lowering and capturing a call do not change its arguments."""
    for call in calls:
        graphed = subject.fresh()
        arguments = copies(call)
        subject.call(graphed.explain, arguments)
        subject.attempt(
            f"graphify({subject.name}).capture", partial(subject.call, graphed.capture, arguments)
        )
        subject.expect(arguments, call, ("after the capture", "before"))
    return len(calls)


def padding(subject: Subject, calls: Calls) -> int:
    """L2: a batch padded to a class of the ladder gives the same results as the batch itself."""
    count = 0
    for call in calls:
        descriptors = find_descriptors(subject.copied(call))
        wider = [
            d
            for d in subject.graph.ladder or ()
            if descriptors and d.covers(descriptors[0]) and d != descriptors[0]
        ]
        for descriptor in wider:
            expected = subject.call(subject.fn, copies(call))
            wide = {
                **copies(subject.referenced(call)),
                **pad(copies(subject.copied(call)), descriptor),
            }
            unpadded = unpad(
                subject.attempt(
                    f"{subject.name}, padded,", partial(subject.call, subject.fn, wide)
                ),
                descriptors[0],
            )
            names = (f"padded to '{descriptor}'", f"as it is, '{descriptors[0]}'")
            subject.expect(_of_requests(unpadded), _of_requests(expected), names, subject.tolerance)
            count += 1
    return count


def _of_requests(tree: Any) -> Any:
    """The tree with each `State` replaced by its requests' part."""

    def visible_part(node: Any) -> Any:
        if isinstance(node, State):
            return visible([node])
        return node

    return tree_map(visible_part, tree, is_leaf=lambda node: isinstance(node, State))


def microbatches(subject: Subject, calls: Calls) -> int:
    """L13: the step on two or three parts of its batch gives the same result as on the whole
    batch."""
    for call in calls:
        expected = subject.call(subject.fn, copies(call))
        for parts in (2, 3):
            name = f"microbatch({subject.name}, {parts})"
            cut = microbatch(subject.fn, parts)
            result = subject.attempt(name, partial(subject.call, cut, copies(call)))
            subject.expect(
                _of_requests(result),
                _of_requests(expected),
                (name, subject.name),
                subject.tolerance,
            )
    return 2 * len(calls)


def bits(subject: Subject, calls: Calls) -> int:
    """L20: in `weft.batch_invariant()`, neither padding a batch nor cutting it changes a bit."""
    return same_bits(subject, calls, _of_requests)


Floats = tuple[Tensor, ...]
# Transforms of torch.func for a function from floating-point tensors to a tuple of them.
FUNC: dict[str, Callable[[Callable[..., Floats], Floats], Any]] = {
    "vmap": lambda fn, xs: func.vmap(fn)(*(torch.stack([x, x]) for x in xs)),
    "grad": lambda fn, xs: func.grad(_loss(fn), argnums=tuple(range(len(xs))))(*xs),
    "jvp": lambda fn, xs: func.jvp(fn, xs, tuple(map(torch.ones_like, xs))),
}


def _loss(fn: Callable[..., Floats]) -> Callable[..., Tensor]:
    return lambda *xs: torch.stack([y.square().sum() for y in fn(*xs)]).sum()


def functorch(subject: Subject, calls: Calls) -> int:
    """L15: torch.func of the graph, and the graph of torch.func, equal torch.func of the function
    if that does not raise."""
    count = 0
    for call in calls:
        warm = subject.fresh()
        subject.attempt(f"graphify({subject.name})", partial(subject.call, warm, copies(call)))
        fn = _on_floats(subject, subject.fn, call)
        graphed = _on_floats(subject, warm, call)
        xs = tuple(x for x in tree_leaves(copies(call)) if _is_float(x))
        for name, apply in FUNC.items() if xs else ():
            count += _compare_transformed(subject, name, apply, fn, graphed, xs)
    return count


def _compare_transformed(
    subject: Subject,
    name: str,
    apply: Callable[..., Any],
    fn: Callable[..., Floats],
    graphed: Any,
    xs: Floats,
) -> int:
    try:
        expected = apply(fn, xs)
    except Exception:
        return 0  # torch.func cannot transform the function itself
    outside = f"{name} of graphify({subject.name})"
    inside = f"graphify of {name} of {subject.name}"
    result = subject.attempt(outside, lambda: apply(graphed, xs))
    subject.expect(result, expected, (outside, f"{name} of {subject.name}"))
    result = subject.attempt(inside, lambda: graphify(lambda *floats: apply(fn, floats))(*xs))
    subject.expect(result, expected, (inside, f"{name} of {subject.name}"))
    return 2


def _on_floats(subject: Subject, fn: Callable[..., Any], call: Arguments) -> Callable[..., Floats]:
    """The call as a function from its floating-point tensors to the floating-point tensors of its
    result."""

    def on_floats(*xs: Tensor) -> Floats:
        leaves, structure = tree_flatten(call)
        floats = iter(xs)
        arguments = [next(floats) if _is_float(x) else copies(x) for x in leaves]
        result = subject.call(fn, tree_unflatten(arguments, structure))
        return tuple(x for x in tree_leaves(result) if _is_float(x))

    return on_floats


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _wants_a_ladder(subject: Subject) -> str:
    if subject.graph.ladder is not None:
        return ""
    return "needs a ladder"


def _wants_copies(subject: Subject) -> str:
    if lends(subject.graph):
        return "lends results"
    return ""


# The laws in the order in which they are checked.
# `pure` comes first, because the others presuppose it.
LAWS = (
    UserLaw("pure", "", "equal arguments, equal results", pure),
    UserLaw("graph", "L1", "a graph of it is it, bitwise", graph, captures=True),
    UserLaw("replay", "L9", "results outlive later replays", replay, _wants_copies, captures=True),
    UserLaw("trace", "L8", "captures leave no trace", trace, captures=True),
    UserLaw("pad", "L2", "padding changes nothing", padding, _wants_a_ladder),
    UserLaw("func", "L15", "vmap, grad, jvp pass through", functorch, captures=True),
    UserLaw("microbatch", "L13", "2 and 3 parts are the whole", microbatches, on_request=True),
    UserLaw("bits", "L20", "padded or in parts, the same bits", bits, wants_rows, on_request=True),
)
