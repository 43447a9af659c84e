"""`Graphified`: what `graphify` returns, a function that memoizes one captured graph for each key, and replays it."""

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import attrs
import torch
from tqdm.auto import tqdm

from weft.donation import donate
from weft.errors import CaptureError
from weft.settings import MAY_REPLAY, may_capture
from weft.torchapi import in_plain_surroundings, uncompiled
from weft.transforms.graphs.ahead import compile_ahead
from weft.transforms.graphs.cache import Explanation, Graphs
from weft.transforms.graphs.calls.borrowing import lend, watches_borrows
from weft.transforms.graphs.calls.call import (
    Call,
    Roles,
    check_call,
    hashable_signature,
    holds_in_mode,
    inline_reason,
    inside_another,
    num_donated,
    runs_inline,
    take_apart,
)
from weft.transforms.graphs.calls.memo import CacheInfo, Key, but_grad_mode
from weft.transforms.graphs.calls.ready import Reader, remember
from weft.transforms.graphs.capture import Entry
from weft.transforms.graphs.captured import CapturedGraphs, captured_graphs
from weft.transforms.graphs.dispatch import Decision
from weft.transforms.graphs.ladder import Ladder
from weft.transforms.graphs.lower import Compiled, Lowered, lower
from weft.transforms.graphs.memory import MemoryAnalysis, MemoryEstimate, analysis_of, estimate
from weft.transforms.graphs.misses import miss_between
from weft.transforms.graphs.options import Graphable
from weft.transforms.graphs.replay import Plan, Replay, keep_in_place, make_replay
from weft.trees import find_descriptors, tree_leaves

P = ParamSpec("P")
R = TypeVar("R")

_MAX_PLANS = 4096
_BAR_AFTER = 1.0
"""Seconds of a capture until a progress bar shows: in a notebook a bar stays, so that many short ones are noise."""
_ALL: "weakref.WeakSet[Graphified[..., Any]]" = weakref.WeakSet()
_TAKE_CALLS = ("capture", "compile_ahead", "explain", "lower", "memory_estimate")
"""Its methods that take the arguments of a call."""


class Graphified(Generic[P, R]):
    """What `graphify` returns: the function, and the graphs captured of it."""

    __wrapped__: Callable[P, R]
    _plans: dict[Key, Plan]
    _readers: dict[tuple[Any, ...], tuple[Reader[Replay], ...]]

    def __init__(self, of: Graphable) -> None:
        functools.update_wrapper(self, of.fn)
        self.__weft_lends__ = of.borrow
        self._of = of
        self._fn: Callable[P, R] = of.fn
        self._lock = threading.RLock()
        self._graphs = Graphs(of, self._forget)
        self._plans, self._readers = {}, {}
        _ALL.add(self)

    @property
    def ladder(self) -> Ladder[Any] | None:
        """The classes that may be captured; None: any signature."""
        return self._of.ladder

    @property
    def roles(self) -> Roles:
        """How its arguments enter a graph."""
        return self._of.roles

    @property
    def split_at(self) -> frozenset[str]:
        """The operators that stay outside the graphs of mode piecewise."""
        return self._of.split_at

    @uncompiled
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The fast path: a call like an earlier one is answered as that one was; any other by `_call`."""
        call = None
        if in_plain_surroundings() and MAY_REPLAY.get():
            readers = self._readers.get((len(args), *kwargs), ())
            for reader in readers:
                if (found := reader.find(args, kwargs)) is not None:
                    seen, replay = found
                    with self._lock:
                        return self._replay(replay, reader.move(seen) if reader.donates else seen[1])
            recalled = (reader.recall(self._of.roles, self._of.name, args, kwargs) for reader in readers)
            call = next((call for call in recalled if call is not None), None)
        return self._call(args, kwargs, call)

    def _replay(self, replay: Replay, leaves: Sequence[Any]) -> R:
        """Fill the buffers from the leaves of a call (after the donated ones changed hands), replay, hand over."""
        if replay.enter is not None:
            replay.enter()
        if replay.fill is not None:
            replay.fill(leaves)
        try:
            replay.run()
        except Exception as error:
            raise self._noted(error) from None
        count, handover = self._graphs.count, replay.handover
        count.replays = replay.entry.last_use = count.replays + 1
        result: R = handover.build(handover.copies(handover.made), leaves)
        return result

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], recalled: Call | None = None) -> R:
        """The general path: any call, the first of its kind included; `recalled` is it, taken apart."""
        call = recalled or take_apart(self._of.roles, self._of.name, args, kwargs)
        if runs_inline(call):
            return self._inline(call, args, kwargs)
        with self._lock:
            signature = hashable_signature(call, self._of.name)
            plan = self._plans.get(signature) or self._plan(call, signature)
            if plan.replay and plan.replay.may_run() and in_plain_surroundings() and signature in self._plans:
                holds = holds_in_mode(call, self._of.roles, plan.replay.holds())
                remember(self._readers, self._of.roles, self._of.name, args, kwargs, call, plan.replay, holds)
        return self._answer(plan.replay, call, args, kwargs)

    def _inline(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Run the function itself; as part of another capture or transform it does not count."""
        if inside_another() is None:
            with self._lock:
                self._graphs.note_inline(lambda: inline_reason(call))
        return self._fn(*args, **kwargs)

    def _answer(self, replay: Replay | None, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Replay; or run the function itself where there is no graph, or one that may not run here."""
        if replay is None or not replay.may_run():
            with self._lock:
                if replay is not None and replay.entry.runs_itself():
                    self._graphs.note_inline(functools.partial(self._graphs.why_itself, replay.entry))
                else:
                    self._graphs.eager += 1
            return keep_in_place(self._fn(*args, **kwargs), self._of.roles, call)
        with self._lock:
            result = self._replay(replay, (*self._moved(call), *call.copied_leaves))
            return (
                lend(result, replay.entry.outputs, self._of.name, self._graphs.count) if watches_borrows() else result
            )

    def _noted(self, error: Exception) -> Exception:
        """An error that an operator raised in a replay, with a note on what was donated."""
        if donated := ", ".join(self._of.roles.donated):
            error.add_note(
                f"{self._of.name} took {donated} before its replay failed: their storage holds what it had written by "
                "then. Go on from a copy (weft.clone)."
            )
        return error

    def _moved(self, call: Call) -> list[Any]:
        """The leaves by reference, after the donated ones changed hands."""
        roles, count = self._of.roles, num_donated(call, self._of.roles)
        taken = {name: call.references[name] for name in roles.donated if name in call.references}
        moved = [donate(value, to=f"{self._of.name}({name})") for name, value in taken.items()]
        return [*tree_leaves(moved), *call.reference_leaves[count:]]

    def _forget(self, entry: Entry) -> None:
        """Answer no call by this graph any more."""
        self._plans = {k: p for k, p in self._plans.items() if p.replay is None or p.replay.entry is not entry}
        for readers in self._readers.values():
            for reader in readers:
                reader.forget(lambda replay: replay.entry is entry)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: the instance is the first argument, and a value of the key."""
        return self if instance is None else Method(self, instance)

    def _plan(self, call: Call, signature: Key) -> Plan:
        """Dispatch a signature seen for the first time, and capture what it needs."""
        check_call(call, self._of.roles, self._of.name)
        decision, entry = self._graphs.obtain(call)
        replay = None if entry is None else self._replay_of(entry, call, decision)
        plan = Plan(decision, replay)
        if may_capture():
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[signature] = plan
        return plan

    def _replay_of(self, entry: Entry, call: Call, decision: Decision[Any]) -> Replay:
        padded = decision.descriptor
        own = None if padded is None else find_descriptors(call.copied)[0]
        if (enter := self._graphs.backend_for(call).enter) is not None:
            enter()  # a plan's tables go to the device in this stream, and a replay in another one waits for it
        return make_replay(entry, call, padded, own, self._of.borrow, enter)

    def _example(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call whose arguments serve as examples: nothing in it is donated."""
        call = take_apart(self._of.roles, self._of.name, args, kwargs)
        hashable_signature(call, self._of.name)
        check_call(call, self._of.roles, self._of.name)
        return call

    def capture(self, *args: P.args, **kwargs: P.kwargs) -> CacheInfo:
        """Capture every class of the ladder, largest first (without one: this call's signature), with a progress bar.

        The arguments serve as examples: nothing is donated, and no state changes. If the device's memory is full, a
        warning says so, and later calls use the graphs that there are.

        Raises:
            CaptureError: the ladder has more classes than `max_captures`; and what a call raises.
        """
        call = self._example(args, kwargs)
        rungs, most = self._graphs.rungs(call), self._of.max_captures
        if most is not None and len(rungs) > most:
            seen = f"a ladder of {len(rungs)} classes, and max_captures={most}"
            raise CaptureError(f"{self._of.name}.capture(...)", seen, "call it, so that it captures what is needed")
        with self._lock:
            bar: dict[str, Any] = {"unit": "graph", "leave": False, "disable": None, "delay": _BAR_AFTER}
            for decision in tqdm(rungs, desc=f"capture {self._of.name}", **bar):
                if self._graphs.find(call, decision) is None:
                    try:
                        self._graphs.capture(call, decision)
                    except torch.OutOfMemoryError:
                        self._graphs.exhaust(decision)
                        break
        return self.cache_info()

    def compile_ahead(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Compile the kernels that `capture` will launch, several at once, with a progress bar. A CPU has none.

        Nothing is captured, and no state changes. The function runs once a class, while weft's own operators give
        zeros: it is for functions of these, transfers excepted. Without it, a capture compiles one after the other.
        """
        call = self._example(args, kwargs)
        with self._lock:
            if self._graphs.backend_for(call).device.type == "cuda":
                compile_ahead(self._of, call, self._graphs)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> "Lowered[R]":
        """Run the function once on buffers of its own, without a trace, and write down what it does.

        The result prints as a listing of its operators; its `compile()` captures the graph for such calls.
        """
        call = self._example(args, kwargs)
        decision = self._graphs.decide(call)
        if decision.mode == "none":
            instead = "a ladder with a class that covers it, or call the function itself"
            raise CaptureError(f"{self._of.name}.lower(...)", decision.reason, instead)
        with self._lock:
            backend = self._graphs.backend_for(call)
            return lower(self._of, call, decision, backend.device, functools.partial(self._compile, call, decision))

    def _compile(self, call: Call, decision: Decision[Any], lowered: "Lowered[R]") -> "Compiled[R]":
        call = attrs.evolve(call)  # what it says of its keys may have changed: a parameter that was put elsewhere
        with self._lock:
            entry = self._graphs.find(call, decision) or self._graphs.capture(call, decision)
            replay = self._replay_of(entry, call, decision)
        signature = hashable_signature(call, self._of.name)

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
            given = take_apart(self._of.roles, self._of.name, args, kwargs)
            if runs_inline(given):
                return self._inline(given, args, kwargs)
            if (other := hashable_signature(given, self._of.name)) != signature:
                if but_grad_mode(other) == but_grad_mode(signature):
                    return self._call(args, kwargs)
                lowered.refuse(miss_between(other, signature, given.leaf_names(), self._of.roles.donated))
            return self._answer(replay, given, args, kwargs)

        return Compiled(lowered, entry, run)

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Explanation:
        """What this call would do (replay, capture, or run the function itself) and why, without doing it."""
        call = take_apart(self._of.roles, self._of.name, args, kwargs)
        if reason := inline_reason(call):
            return Explanation(Decision("none", None, reason), False, f"runs inline: {reason}")
        hashable_signature(call, self._of.name)
        return self._graphs.explain(call)

    def freeze(self) -> "Graphified[P, R]":
        """From now on a miss raises CacheMissError, which names the field that differed, instead of capturing.

        A batch that no class of the ladder covers is no miss: it runs eagerly, as before (`cache_info().eager`). So
        does a call that autograd must see, or one with a sparse argument (`explain`). Nor is there a miss inside
        `weft.no_capture()`, where nothing would be captured anyway."""
        self._graphs.frozen = True
        return self

    def cache_info(self) -> CacheInfo:
        """Captures, replays, eager calls, and graphs held."""
        return self._graphs.info()

    def captured(self) -> tuple[tuple[str, Any], ...]:
        """The mode and the class (None without a ladder) of each graph held, in the order of capture."""
        return tuple((key.mode, key.descriptor) for key in self._graphs.memo)

    def graphs(self) -> CapturedGraphs:
        """Each graph held, in the order of capture: pieces, operators, bytes and seconds, as a table and as a plot."""
        return captured_graphs(self._of.name, self._graphs.memo.items(), self._graphs.info())

    def num_pieces(self) -> tuple[int, ...]:
        """For each graph held, in the order of capture, the number of pieces that it is in."""
        return tuple(entry.recording.num_pieces for entry in self._graphs.memo.values())

    def memory_analysis(self) -> MemoryAnalysis:
        """What the graphs held take, as measured at their capture."""
        return analysis_of(self._graphs.memo.values())

    def memory_estimate(self, *args: P.args, **kwargs: P.kwargs) -> MemoryEstimate:
        """What the graphs of the ladder will take (without one: this call's), before they are captured.

        The arguments serve as examples. A few classes are captured in a pool of their own, and dropped again.
        """
        call = self._example(args, kwargs)
        with self._lock:
            return estimate(self._of, call, self._graphs.rungs(call), lambda: self._graphs.new_backend(call))

    def cache_clear(self) -> None:
        """Drop all graphs, their memory and the counts; a frozen function thaws."""
        with self._lock:
            self._graphs.clear()
            self._plans, self._readers = {}, {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy (`copy.deepcopy` of a module that holds it) is of a copy of the function, and has no graphs yet."""
        return Graphified, (self._of,)

    def _repr_html_(self) -> str:
        return self.graphs()._repr_html_()

    def __repr__(self) -> str:
        return f"<graphify({self._of.name}), {len(self._graphs.memo)} graphs>"


class Method:
    """A graphified function bound to an instance, its first argument. All else is the function's."""

    def __init__(self, function: Any, instance: Any) -> None:
        self.__func__ = function
        self.__self__ = instance
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__func__, name)
        return functools.partial(found, self.__self__) if name in _TAKE_CALLS else found

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.__func__)
        return signature.replace(parameters=[*signature.parameters.values()][1:])

    def __repr__(self) -> str:
        return f"<{self.__func__!r} of {self.__self__!r}>"


def clear_caches() -> None:
    """`cache_clear()` of every graphified function that is alive."""
    for graphified in list(_ALL):
        graphified.cache_clear()
