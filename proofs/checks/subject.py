"""`Subject`: the user's function under test, and how to call it, eagerly and by a graph."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import attrs
from torch import Tensor

from weft.batches.padding import pad, unpad
from weft.errors import CaptureError, CheckError
from weft.proofs.checks.difference import LawViolation, find_difference
from weft.proofs.checks.elements import Tolerance
from weft.proofs.checks.fresh import FreshProcesses
from weft.proofs.checks.search import copies
from weft.transforms.graphs.calls.call import invoke
from weft.transforms.graphs.calls.results import find_next_value
from weft.transforms.graphs.graphified import Graphified, roles_of
from weft.values.keys import value_key
from weft.values.trees import (
    find_descriptors,
    tree_flatten,
    tree_leaves,
    tree_structure,
    tree_unflatten,
)

# One call's arguments by name, defaults included.
Arguments = dict[str, Any]


# A question for a process that has made no other call: what a capture refuses in the only call
# (`Subject.refusal`), or what the calls return in this order (`Subject.outcomes`).
Question = tuple[Literal["refusal", "outcomes"], Sequence[Arguments]]


@attrs.frozen(eq=False)
class Outcome:
    """The result of a call, or the text of the error that it raised."""

    result: Any
    error: str = ""


@attrs.frozen(eq=False)
class Subject:
    """The function under test, the options to graphify it with, and a tolerance.

    Args:
        graph: the graphified function, which is only copied and captures nothing itself.
        name: the function's name in messages.
        tolerance: applies if two runs have different shapes.
        processes: processes that have seen no call of the function; None: there are none.
    """

    graph: Graphified[..., Any]
    name: str
    tolerance: Tolerance
    processes: FreshProcesses | None = None

    def answer(self, question: Question) -> Any:
        """Answer a question in this process."""
        what, calls = question
        if what == "refusal":
            return self.refusal(calls[0])
        return self.outcomes(calls)

    def ask(self, question: Question) -> Any:
        """The answer of a process that has seen no call of the function; None if there is none."""
        if self.processes is None:
            return None
        return self.processes.ask(question)

    def refusal(self, call: Arguments) -> str:
        """What a capture refuses in this call; empty if it refuses nothing."""
        try:
            self.call(self.fresh(), copies(call))
        except CaptureError as error:
            return (
                f"graphify({self.name}) raises {type(error).__name__}, and {self.name} does"
                f" not:\n{error}"
            )
        except Exception:
            return ""  # raised by the function itself
        return ""

    def outcomes(self, calls: Sequence[Arguments]) -> list["Outcome"]:
        """The results of calls, made in this order."""
        return [self._outcome(call) for call in calls]

    def _outcome(self, call: Arguments) -> "Outcome":
        try:
            return Outcome(copies(self.call(self.fn, copies(call))))
        except Exception as error:
            return Outcome(None, f"{type(error).__name__}: {error}")

    @property
    def fn(self) -> Callable[..., Any]:
        """The function itself."""
        fn: Callable[..., Any] = self.graph.__wrapped__
        return fn

    def fresh(self) -> Graphified[..., Any]:
        """The function graphified anew, with no graph captured yet."""
        return copy.copy(self.graph)

    def call(self, fn: Callable[..., Any], arguments: Arguments) -> Any:
        """Call the function, or a transform of it, with arguments by name."""
        return invoke(fn, roles_of(self.graph), arguments)

    def bind(self, args: Any) -> Arguments:
        """The arguments by name, with defaults for those that were not given.

        Raises:
            CheckError: the function has no such arguments.
        """
        signature = roles_of(self.graph).signature
        try:
            if isinstance(args, tuple):
                bound = signature.bind(*args)
            else:
                bound = signature.bind_partial()
            if isinstance(args, dict):
                if unknown := [name for name in args if name not in signature.parameters]:
                    raise TypeError(f"no argument {unknown[0]!r}")
                bound.arguments.update(
                    {name: args[name] for name in signature.parameters if name in args}
                )
                signature.bind(*bound.args, **bound.kwargs)
        except TypeError as error:
            instead = f"arguments for {self.name}{signature}"
            raise CheckError(
                f"weft.proofs.check({self.name}, args=...)", f"{error}", instead
            ) from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def referenced(self, arguments: Arguments) -> Arguments:
        """The arguments that a graph reads in place."""
        return {
            name: arguments[name] for name in roles_of(self.graph).by_reference if name in arguments
        }

    def donated(self, arguments: Arguments) -> Arguments:
        """The donated arguments, whose storage the function takes over."""
        return {name: arguments[name] for name in roles_of(self.graph).donated if name in arguments}

    def copied(self, arguments: Arguments) -> Arguments:
        """The arguments that a graph copies before it is replayed."""
        return {
            name: value
            for name, value in arguments.items()
            if name not in roles_of(self.graph).by_reference
        }

    def expect(
        self, actual: Any, expected: Any, names: tuple[str, str], tolerance: Tolerance | None = None
    ) -> None:
        """Raise LawViolation unless the two results are equal, bitwise if no tolerance is given."""
        if (difference := find_difference(actual, expected, tolerance)) is not None:
            raise LawViolation(difference.text(*names))

    def attempt(self, what: str, run: Callable[[], Any]) -> Any:
        """Call `run` and return its result; raise LawViolation if it raises, since the function
        itself does not."""
        try:
            return run()
        except Exception as error:
            raise LawViolation(
                f"{what} raises {type(error).__name__}, and {self.name} does not:\n{error}"
            ) from error

    def beside_the_state(self, result: Any, call: Arguments) -> Any:
        """A call's result without the next values of donated arguments, which the next call may
        overwrite."""
        leaves, structure = tree_flatten(result)
        for span in _next_spans(result, self.donated(call)).values():
            leaves[span.start : span.stop] = [None] * len(span)
        return tree_unflatten(leaves, structure)

    def replays(
        self, calls: Sequence[Arguments], graph: Graphified[..., Any]
    ) -> Iterator[tuple[Any, Any, Arguments]]:
        """Yield pairs of results, of the graph and of the function, each with its call.

        Each call runs twice, so that one of its replays follows replays of other calls. It runs on
        the state that the previous call returned, and also with the values of other calls whose
        shapes agree.
        """
        worlds = [_World(self, call) for call in calls]
        for _ in range(2):
            for world in worlds:
                for call in calls:
                    if call is world.drawn_call or kinds(call) == kinds(world.drawn_call):
                        pair = world.step(graph, call)
                        if pair is not None:
                            yield *pair, call


@attrs.define(eq=False)
class _World:
    """One call's params and state, which a graph reads in place: a copy for the function, and one
    for the graph."""

    subject: Subject
    drawn_call: Arguments
    eager: Arguments = attrs.field(init=False)
    graphed: Arguments = attrs.field(init=False)
    fresh: bool = attrs.field(init=False, default=True)

    def __attrs_post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start again from the values as drawn."""
        references = self.subject.referenced(self.drawn_call)
        self.eager = copies(references)
        self.graphed = copies(references)
        self.fresh = True

    def step(self, graph: Graphified[..., Any], call: Arguments) -> tuple[Any, Any] | None:
        """Run the graph and the function on the values of a call, and return both results.

        Returns None if the function itself raises: it need not accept values that were not drawn
        together, nor the state that it returned.
        """
        subject, copied = self.subject, self.subject.copied(call)
        graph_arguments = {**self.graphed, **copies(copied)}
        # The function must run at the graph's padded shape: only there are the bits the same.
        padded = subject.call(graph.explain, graph_arguments).decision.descriptor
        descriptors = find_descriptors(copied)
        values = copies(copied)
        eager = {**self.eager, **(pad(values, padded) if padded else values)}
        try:
            expected = subject.call(subject.fn, eager)
        except Exception:
            # These values were drawn together, so the error is the function's own.
            if self.fresh and call is self.drawn_call:
                raise
            self.reset()
            return None
        if padded:
            expected = unpad(expected, descriptors[0])
        actual = subject.attempt(
            f"graphify({subject.name})", lambda: subject.call(graph, graph_arguments)
        )
        self._advance(actual, expected)
        return actual, expected

    def _advance(self, actual: Any, expected: Any) -> None:
        """Continue from the call's result if it has the next value of every donated argument;
        otherwise reset."""
        kept = self.subject.donated(self.drawn_call)
        spans = _next_spans(expected, kept)
        if tree_structure(actual) != tree_structure(expected) or len(spans) < len(kept):
            if kept:
                return self.reset()
            return None
        for references, result in ((self.eager, expected), (self.graphed, actual)):
            leaves = tree_leaves(result)
            parts = {name: [leaves[i] for i in span] for name, span in spans.items()}
            references.update(
                {name: tree_unflatten(parts[name], tree_structure(kept[name])) for name in parts}
            )
        self.fresh = not kept
        return None


def _next_spans(result: Any, donated: Arguments) -> dict[str, range]:
    """For each donated argument, the range of the result's leaves that is its next value."""
    spans: dict[str, range] = {}
    taken: set[int] = set()
    for name, old in donated.items():
        if (span := find_next_value(result, old, taken)) is not None:
            spans[name] = span
            taken.update(span)
    return spans


def kinds(arguments: Arguments) -> tuple[Any, ...]:
    """A key that is equal for calls whose values may replace each other."""
    leaves, structure = tree_flatten(arguments)
    return structure, [
        (x.shape, x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else value_key(x)
        for x in leaves
    ]
