"""`Cache`: the graphs of one graphified function, captured on demand, found by key and evicted.

An entry has a graph and the plans by which calls of different signatures replay it. Only the entry
holds them: the other tables, which find a plan without its key, have weak references. So the memory
of an evicted entry is freed at once.
"""

import functools
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.batches.descriptor import check_accepted, check_descriptor
from weft.errors import CacheMissError, CaptureError, DescriptorError
from weft.ops.transfers.collective import others_wait
from weft.settings import config, count_capture, may_capture, may_replay
from weft.torchapi.inductor import compiler_name
from weft.torchapi.private import backend_switches
from weft.torchapi.ranges import profile_range
from weft.transforms.graphs.backends import Backend, cuda_device, make_backend
from weft.transforms.graphs.calls.buffers import plan_copies
from weft.transforms.graphs.calls.call import Call, check_call, check_sizes, key_of
from weft.transforms.graphs.calls.fast_path import FastPaths
from weft.transforms.graphs.calls.key import CacheInfo, Key, TreeKey, Weakly
from weft.transforms.graphs.calls.results import Handover, hand_over
from weft.transforms.graphs.capture import Graph, capture, title_of
from weft.transforms.graphs.compiler.compilations import Compilations, CompiledRecording
from weft.transforms.graphs.dispatch import Decision, dispatch
from weft.transforms.graphs.explain import (
    INLINE,
    EagerCalls,
    Explanation,
    Inlines,
    Miss,
    Recaptures,
    nearest_miss,
    outside_name,
    shortened,
)
from weft.transforms.graphs.ladder import Ladder
from weft.transforms.graphs.listing import writer_of
from weft.transforms.graphs.memory import class_of
from weft.transforms.graphs.options import Graphable
from weft.values.trees import find_descriptors

_NO_LADDER = "no ladder, so each signature has its own graph"
NO_REPLAY = "inside weft.no_capture(replay=False)"
_LOG = logging.getLogger("weft")
# Plans are cheap to make again; calls with ever new signatures must not fill the memory.
_MAX_SIGNATURES = 4096


@attrs.frozen(eq=False, weakref_slot=True)
class Plan:
    """How a graph answers the calls of one signature.

    Args:
        graph: the graph.
        wait_for_last_replay: makes the current stream wait for the last replay, if that ran on
            another stream; None on the CPU.
        fill: fills the graph's input buffers from the leaves of a call, those by reference first;
            None if the graph has no buffers.
        run: replays the graph.
        handover: makes the result.
    """

    graph: Graph
    wait_for_last_replay: Callable[[], None] | None
    fill: Callable[[Sequence[Any]], None] | None
    run: Callable[[], None]
    handover: Handover
    holds: Callable[[], bool] | None
    """Returns whether everything that the graph reads from outside its arguments is unchanged;
    None: it reads nothing from there."""

    def may_run(self) -> bool:
        """Whether the graph may replay now: not inside `no_capture(replay=False)`, and not where
        autograd would record."""
        return may_replay() and not self.graph.needs_autograd()

    def reads_the_same(self) -> bool:
        """Whether everything that the graph reads from outside its arguments is unchanged."""
        return self.holds is None or self.holds()

    def condition(self) -> "Callable[[Plan], bool] | None":
        """The condition that this plan adds to the guards of the fast path and to `holds`: no
        tensor that the graph reads from outside requires grad by now, and torch's back-end switches
        still choose the same kernels. None: no condition."""
        if self.graph.consults_switches:
            switches = backend_switches()
        else:
            switches = None
        if switches is None and not (self.graph.external and torch.is_grad_enabled()):
            return None
        # The plan is an argument: a closure over it would keep an evicted graph alive.
        return lambda plan: (
            not plan.graph.needs_autograd() and (switches is None or backend_switches() == switches)
        )


def make_plan(
    graph: Graph,
    call: Call,
    padded: Any,
    unpadded: Any,
    borrow: bool,
    wait_for_last_replay: Callable[[], None] | None,
) -> Plan:
    """Plan how a graph of class `padded` answers calls like `call`, of class `unpadded`."""
    leaves = (*call.reference_leaves, *call.copied_leaves)
    num_references = len(call.reference_leaves)
    copies = plan_copies(graph.buffers, graph.padding_sources, graph.axes, leaves, num_references)
    handover = hand_over(
        graph.outputs, graph.buffers, borrow, None if padded == unpadded else unpadded
    )
    fill = copies.fill if copies else None
    replay = graph.recording.replay
    if isinstance(graph.recording, CompiledRecording) and not borrow and padded == unpadded:
        replay, results, take = graph.recording.new_results()
        handover = attrs.evolve(handover, outputs=results, clone_or_lend=take)
    holds = graph.outside.holds
    return Plan(graph, wait_for_last_replay, fill, replay, handover, holds)


@attrs.frozen
class Eager:
    """Says that the function itself answers a call, and why."""

    reason: str


@attrs.frozen(eq=False)
class Entry:
    """A graph and the plans that replay it, by signature.

    Args:
        references: the key's part for arguments by reference. Calls with an equal part take this
            object, so that later comparisons are of identity.
        statics: weak references to static arguments; the entry is dropped when one of them dies.
    """

    graph: Graph
    references: TreeKey
    statics: tuple[weakref.ref[Any], ...] = ()
    plans: dict[Key, Plan] = attrs.field(factory=dict)


@attrs.define(eq=False)
class Count:
    """The number of replays of all graphs captured since `cache_clear()`, which may share
    memory."""

    replays: int = 0


class Cache:
    """The graphs of a graphified function, its back ends (one per device), and its counts.

    Args:
        graphable: the function and its options.
    """

    count: Count
    backends: dict[torch.device | None, Backend]
    entries: dict[Key, Entry]
    fast_paths: FastPaths[Plan]
    exhausted: str
    """The reason why nothing more is captured, once the device's memory was full; empty before."""

    def __init__(self, graphable: Graphable) -> None:
        self.graphable = graphable
        self.clear()

    def clear(self) -> None:
        """Drop all graphs, their memory and the counts, and end a freeze."""
        self.backends = {}
        self.entries = {}
        self._plans: dict[Key, weakref.ref[Plan] | Eager] = {}
        self.fast_paths = FastPaths(
            self.graphable.roles, self.graphable.name, self.graphable.ladder is not None
        )
        # Once the memory was full, further attempts would only make each call slower.
        self.exhausted = ""
        self.frozen = False
        self.captures = 0
        self.eager_calls = EagerCalls(self.graphable.name)
        self.count = Count()
        self._recaptures = Recaptures(self.graphable.name, self.graphable.roles.donated)
        self._outside_change = ""
        self._inlines = Inlines(self.graphable.name)
        self.compilations = (
            None if self.graphable.compiler is None else Compilations(self.graphable.compiler)
        )

    def info(self) -> CacheInfo:
        """The counts since the last `clear()`."""
        eager = self.eager_calls
        return CacheInfo(
            self.captures, self.count.replays, eager.number, len(self.entries), dict(eager.counts)
        )

    def graphs(self) -> list[Graph]:
        """The graphs held, in the order of capture."""
        return [entry.graph for entry in self.entries.values()]

    def plan(self, call: Call, signature: Key) -> tuple[Plan | Eager, bool]:
        """The plan for a call with this key before dispatch, or the reason why the function itself
        runs; and whether later calls will find it. Captures a graph if there is none."""
        # A weak reference is dead once the plan's entry was evicted.
        # The lookup by the unpadded key comes first, because dispatch and the padded key cost more.
        if (cached := self._plans.get(signature)) is not None:
            answer = cached if isinstance(cached, Eager) else cached()
            if isinstance(answer, Eager) or (answer is not None and answer.reads_the_same()):
                return answer, True
        check_call(call, self.graphable.name)
        decision, key = self._obtain(call, signature)
        if key is None:
            eager = Eager(decision.reason)
            # Inside no_capture() the answer is not kept: outside it, the same call may be captured.
            if may_capture():
                self._make_room_for_a_signature()
                self._plans[signature] = eager
            return eager, may_capture()
        # Comparing hundreds of parameters' keys takes longer than a small replay; after this, equal
        # keys are the same object, and `==` stops at identity.
        call.take_reference_key(self.entries[key].references)
        plan = self.make_plan(self.entries[key].graph, call, decision)
        if may_capture():
            self._make_room_for_a_signature()
            self._plans[signature] = weakref.ref(plan)
            self.entries[key].plans[signature] = plan
        return plan, may_capture()

    def _make_room_for_a_signature(self) -> None:
        """Forget all plans if there are too many: calls of ever new signatures must not fill the
        memory."""
        if len(self._plans) >= _MAX_SIGNATURES:
            self._plans.clear()
            for entry in self.entries.values():
                entry.plans.clear()

    def make_plan(self, graph: Graph, call: Call, decision: Decision[Any]) -> Plan:
        """Plan how a graph answers calls like this one."""
        padded = decision.descriptor
        if padded is None:
            unpadded = None
        else:
            unpadded = find_descriptors(call.copied)[0]
        backend = self.backend_for(call)
        # Replays read the tables of copies, which a plan holds.
        with backend.allocating():
            return make_plan(
                graph, call, padded, unpadded, self.graphable.borrow, backend.wait_for_last_replay
            )

    def key(self, call: Call, decision: Decision[Any], signature: Key | None = None) -> Key:
        """The key of a call under a dispatch decision; `signature` is the key before dispatch, if
        it is known."""
        return key_of(call, decision.mode, decision.descriptor, signature)

    def find(self, key: Key) -> Graph | None:
        """Find a graph; None if there is none, or if something that it reads from outside changed.

        Raises:
            CacheMissError: something that it reads from outside changed, and the function is
                frozen.
        """
        entry = self.entries.get(key)
        if entry is None or (holds := entry.graph.outside.holds) is None or holds():
            if entry is None:
                return None
            return entry.graph
        # `holds` is quick and strict; `change` then accepts equal plain values.
        # An equal number in a new object fails the quick test by identity.
        if not (change := entry.graph.outside.change()):
            return entry.graph
        if self.frozen:
            instead = "keep what the function reads from outside, or pass it in as an argument"
            raise CacheMissError(
                f"{self.graphable.name}(...)", f"a miss after freeze(): {change}", instead
            )
        self._outside_change = change
        return None

    def _captured_classes(self, call: Call, ladder: Ladder[Any]) -> Ladder[Any]:
        """The part of the ladder whose classes have a graph for calls like this one."""
        # Graphs of other dtypes or parameters do not answer this call, so a captured class of the
        # ladder is not enough: its key must exist.
        full = [d for d in ladder.full if key_of(call, "full", d) in self.entries]
        return Ladder(
            full, [d for d in ladder.piecewise if key_of(call, "piecewise", d) in self.entries]
        )

    def blocked_reason(self) -> str:
        """The reason why nothing may be captured now; empty if captures are allowed."""
        if may_capture():
            return self.exhausted
        return "inside weft.no_capture()"

    def miss(self, call: Call, key: Key) -> Miss:
        """The difference between a call and the nearest captured one."""
        return nearest_miss(key, self.entries, call.leaf_names(), self.graphable.roles.donated)

    def _obtain(self, call: Call, signature: Key) -> tuple[Decision[Any], Key | None]:
        """Decide the mode and class of a call, and find or capture its graph; if nothing may be
        captured, choose among the graphs that exist."""
        decision = self.decide(call)
        if decision.mode == "none":
            return decision, None
        key = self.key(call, decision, signature)
        if self.find(key) is not None:
            return decision, key
        # A full memory is found out by trying: what a capture needs is not known before.
        if not (why := self.blocked_reason()):
            try:
                self.capture(call, decision, key)
                return decision, key
            except torch.OutOfMemoryError:
                why = self.note_full_memory(decision)
        decision = self._decide_among_captured(call, why)
        key = self.key(call, decision, signature)
        return decision, None if decision.mode == "none" or self.find(key) is None else key

    def decide(self, call: Call) -> Decision[Any]:
        if self.graphable.ladder is None:
            return Decision("piecewise" if self.graphable.split_at else "full", None, _NO_LADDER)
        return dispatch(self.descriptor(call), self.graphable.ladder)

    def _decide_among_captured(self, call: Call, why: str) -> Decision[Any]:
        """Dispatch among the classes that have a graph, because nothing may be captured."""
        if self.graphable.ladder is None:
            return Decision("none", None, why)
        decision = dispatch(
            self.descriptor(call), self._captured_classes(call, self.graphable.ladder)
        )
        return attrs.evolve(decision, reason=f"{why}: {decision.reason}")

    def descriptor(self, call: Call) -> Any:
        """The class of the call's batch."""
        descriptors = find_descriptors(call.copied)
        if len(descriptors) == 1:
            check_descriptor(descriptors[0], f"{self.graphable.name}(...)")
            self._check_kind(descriptors[0])
            check_sizes(call, descriptors[0], self.graphable.name)
            check_accepted(self.graphable.fn, descriptors[0])
            return descriptors[0]
        raise CaptureError(
            f"graphify({self.graphable.name}, ladder=...)({', '.join(call.copied)})",
            (
                f"arguments with more than one descriptor: {', '.join(map(str, descriptors))}"
                if descriptors
                else "a ladder, but no argument that holds a descriptor"
            ),
            "pass a weft.Batch (or your own class with a weft.descriptor_field()) with one"
            " descriptor, or leave the ladder out",
        )

    def _check_kind(self, descriptor: Any) -> None:
        """Raise DescriptorError if the ladder's descriptors are of another class."""
        other = next(
            (d for d in self.graphable.ladder or () if type(d) is not type(descriptor)), None
        )
        if other is not None:
            batch_kind = type(descriptor).__name__
            kind = type(other).__name__
            problem = f"a batch with a descriptor of class {batch_kind}, and a ladder of {kind}: '{other}'"
            raise DescriptorError(
                f"{self.graphable.name}(...)",
                problem,
                f"a ladder of {batch_kind}, or batches of {kind}",
            )

    def note_inline(self, why: Callable[[], str | None]) -> None:
        """Count a call that could be captured but for the reason `why`, and so ran the function
        itself."""
        self.eager_calls.note(INLINE)
        self._inlines.note(why, self.count.replays)

    def needs_autograd_reason(self, graph: Graph) -> str:
        """The reason why the function itself runs although its graph exists: it reads a tensor that
        requires grad."""
        name = outside_name(self.graphable.fn, next(x for x in graph.external if x.requires_grad))
        return (
            f"it reads {name} from outside, which requires grad, and autograd must see the"
            " operators; torch.no_grad() around the call, or requires_grad_(False) on what is not"
            " trained, lets it replay (for gradients inside the graph: torch.func.grad over"
            " parameters that are passed in)"
        )

    def rungs(self, call: Call) -> list[Decision[Any]]:
        """Every class of the ladder, largest first; without a ladder, this call's own decision."""
        if self.graphable.ladder is None:
            return [self.decide(call)]
        # Only for its checks: a call that does not fit the ladder is refused before any capture.
        self.descriptor(call)
        pairs = [
            *(("full", d) for d in self.graphable.ladder.full),
            *(("piecewise", d) for d in self.graphable.ladder.piecewise),
        ]
        return [Decision(mode, descriptor, "a class of the ladder") for mode, descriptor in pairs]

    def explain(self, call: Call) -> Explanation:
        """Say what a call would do, and why, without doing it."""
        if not may_replay():
            return Explanation(
                Decision("none", None, NO_REPLAY), False, f"runs eagerly: {NO_REPLAY}"
            )
        decision = self.decide(call)
        key = self.key(call, decision)
        if decision.mode == "none":
            graph = None
        else:
            graph = self.find(key)
        if graph is not None and graph.needs_autograd():
            why = self.needs_autograd_reason(graph)
            return Explanation(Decision("none", None, why), False, f"runs inline: {why}")
        missing = decision.mode != "none" and graph is None
        if missing and (why := self.blocked_reason()):
            decision = self._decide_among_captured(call, why)
            missing = False
        if decision.mode == "none":
            # `explain` asks in the same order as a call, or it would name another reason.
            return Explanation(decision, False, f"runs eagerly: {decision.reason}")
        if not missing:
            compiled = self._compilation_text(self.key(call, decision))
            return Explanation(decision, True, f"replays: {decision.reason}{compiled}")
        if self.frozen:
            verb = "would raise, because it is frozen"
        else:
            verb = "captures"
        return Explanation(decision, False, f"{verb}: {decision.reason}; {self.miss(call, key)}")

    def _compilation_text(self, key: Key) -> str:
        """By what the graph of a key is compiled, and which graphs have the same compilation; empty
        if there is no compiler."""
        if self.graphable.compiler is None:
            return ""
        graph = self.entries[key].graph
        name = compiler_name(self.graphable.compiler)
        if graph.program is None:
            return f"; not compiled by {name}: {graph.why_not_compiled}"
        siblings = [
            class_of(sibling)
            for sibling, entry in self.entries.items()
            if sibling != key and entry.graph.program is graph.program
        ]
        if not siblings:
            return f"; compiled by {name}"
        return f"; compiled by {name}, with the graphs for {shortened(siblings, ', ')}"

    def capture(self, call: Call, decision: Decision[Any], key: Key) -> Graph:
        """Capture the graph for a call, and evict the least recently used one if there are too
        many.

        Raises:
            CacheMissError: the function is frozen.
            TooManyCapturesError: a context `assert_max_captures` has used up its captures.
            CaptureError: the function cannot be captured.
            torch.OutOfMemoryError: the device's memory is full.
        """
        name = self.graphable.name
        find_miss = functools.partial(self.miss, call, key)
        if self.frozen:
            miss = find_miss()
            instead = (
                "capture this signature before freeze(), or call it with arguments like the"
                " captured ones"
            )
            problem = f"a miss after freeze(): {miss.differs}"
            raise CacheMissError(
                f"{name}(...)", problem, f"{instead}: {miss.remedy}" if miss.remedy else instead
            )
        title = title_of(name, decision.descriptor)
        # Before the capture: `assert_max_captures` must prevent it, not report it.
        count_capture(title, lambda: attrs.astuple(find_miss()))
        if config.explain_cache_misses and self.entries:
            _LOG.warning("%s: no graph for this call: %s", name, find_miss())
        if decision.mode == "piecewise":
            split_at = self.graphable.split_at
        else:
            split_at = frozenset[str]()
        # `verify` compares a differing run, operator by operator, with the recorded one.
        if self.graphable.verify:
            # Without `verify` no operator is noted, since the note of every operator would take
            # memory for the life of the graph.
            writer = functools.partial(writer_of, split_at=split_at)
        else:
            writer = None
        backend = self.backend_for(call)
        with profile_range("weft: capture {}", title):
            graph = capture(
                self.graphable,
                call,
                decision.mode,
                decision.descriptor,
                backend,
                writer,
                self.compilations,
            )
        if config.log_captures:
            size = (graph.recording.nbytes + graph.buffer_bytes) / 2**20
            _LOG.warning(
                "captured %s, %s: %.3f s, %.2f MiB", title, decision.mode, graph.seconds, size
            )
        self.captures += 1
        # After the capture has succeeded, so that a refused one evicts nothing.
        self._insert(key, graph)
        self._recaptures.note(key, call.leaf_names, self.count.replays, self._outside_change)
        self._outside_change = ""
        return graph

    def _insert(self, key: Key, graph: Graph) -> None:
        # A new graph counts as just used, or the first eviction would take it.
        graph.last_use = self.count.replays
        # An entry whose outside has changed would only hold memory.
        self.entries = {
            k: entry for k, entry in self.entries.items() if not entry.graph.outside.has_changed()
        }
        while (
            self.graphable.max_captures is not None
            and len(self.entries) >= self.graphable.max_captures
        ):
            del self.entries[min(self.entries, key=lambda k: self.entries[k].graph.last_use)]
        # Weakly, or each entry would refer to the cache that holds it: a reference cycle.
        drop = functools.partial(_drop, weakref.ref(self), key)
        weak_statics = (
            value.reference() for _, (_, value, *_) in key.statics if isinstance(value, Weakly)
        )
        self.entries[key] = Entry(
            graph, key.references, tuple(weakref.ref(value, drop) for value in weak_statics)
        )

    def note_full_memory(self, decision: Decision[Any]) -> str:
        """Stop capturing because the memory is full, warn, and return the reason. Called in the
        handler of the error, which is raised again if other ranks wait for this one."""
        if others_wait():
            # The other ranks stand in the collective that this rank's capture would have taken part
            # in: only an error, which ends them by name, prevents a hang.
            raise
        if decision.descriptor is None:
            title = "a call"
        else:
            title = f"'{decision.descriptor}'"
        self.exhausted = f"the device's memory was full when {title} was to be captured"
        warnings.warn(
            f"{self.graphable.name}: {self.exhausted}; from now on it uses the {len(self.entries)}"
            " graphs that it has, and runs other calls eagerly. cache_clear() lets it capture"
            " again.",
            RuntimeWarning,
            stacklevel=2,
        )
        return self.exhausted

    def backend_for(self, call: Call) -> Backend:
        """The back end for calls with tensors on this call's device."""
        device = cuda_device(_tensors(call))
        if device not in self.backends:
            self.backends[device] = self.new_backend(call)
        return self.backends[device]

    def new_backend(self, call: Call) -> Backend:
        """Make a back end on the device of a call's tensors, with its own memory pool."""
        return make_backend(self.graphable.backend, _tensors(call))


def _drop(cache: "weakref.ref[Cache]", key: Key, reference: Any) -> None:
    """Drop the entry of a static argument that has died."""
    if (owner := cache()) is not None:
        owner.entries.pop(key, None)


def _tensors(call: Call) -> Iterator[Tensor]:
    return (x for x in chain(call.reference_leaves, call.copied_leaves) if isinstance(x, Tensor))
