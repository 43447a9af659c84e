"""`Graphs`: the memo of one graphified function, which captures graphs on demand, finds them by key and evicts them."""

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.descriptor import check_descriptor
from weft.errors import CacheMissError, CaptureError, DescriptorError
from weft.settings import MAY_REPLAY, config, count_capture, may_capture
from weft.transforms.graphs.backends import Backend, cuda_device, make_backend
from weft.transforms.graphs.calls.call import Call, check_sizes, key_of
from weft.transforms.graphs.calls.key import CacheInfo, Key
from weft.transforms.graphs.capture import Entry, capture
from weft.transforms.graphs.dispatch import Decision, dispatch
from weft.transforms.graphs.ladder import Ladder
from weft.transforms.graphs.misses import Inlines, Miss, Recaptures, nearest_miss, outside_name
from weft.transforms.graphs.options import Graphable
from weft.trees import find_descriptors

_NO_LADDER = "no ladder, so each signature has its own graph"
_LOG = logging.getLogger("weft")


@attrs.frozen
class Explanation:
    """What a call would do, and why. Its `str` is the reason.

    Args:
        decision: the mode and the class that the call would run under.
        captured: whether a graph for the call exists.
        reason: the reason in words.
    """

    decision: Decision[Any]
    captured: bool
    reason: str

    def __str__(self) -> str:
        return self.reason


@attrs.define(eq=False)
class Count:
    """The number of replays of graphs that may share memory, which are those captured since `cache_clear()`."""

    replays: int = 0


class Graphs:
    """The memo of a graphified function, its back ends (one per device), and its counts.

    Args:
        graphable: the function and its options.
        on_drop: called with each evicted graph, so that no other reference keeps it alive.
    """

    count: Count
    backends: dict[torch.device | None, Backend]
    memo: dict[Key, Entry]
    exhausted: str
    """The reason why nothing more is captured, once the device's memory was full; empty before."""

    def __init__(self, graphable: Graphable, on_drop: Callable[[Entry], None]) -> None:
        self.graphable = graphable
        self._on_drop = on_drop
        self.clear()

    def clear(self) -> None:
        """Drop all graphs, their memory and the counts, and end a freeze."""
        self.backends = {}
        self.memo = {}
        self.exhausted = ""
        self.frozen = False
        self.captures = self.eager = 0
        self.count = Count()
        self._recaptures = Recaptures(self.graphable.name, self.graphable.roles.donated)
        self._inlines = Inlines(self.graphable.name)

    def info(self) -> CacheInfo:
        """The counts since the last `clear()`."""
        return CacheInfo(self.captures, self.count.replays, self.eager, len(self.memo))

    def find(self, call: Call, decision: Decision[Any]) -> Entry | None:
        """Find the graph for a call and its dispatch decision; None if there is none. A graph that reads from outside
        what is no longer there is dropped.

        Raises:
            CacheMissError: it was dropped, and the function is frozen.
        """
        key = key_of(call, decision.mode, decision.descriptor)
        entry = self.memo.get(key)
        if entry is None or entry.outside.holds():
            return entry
        change = entry.outside.change()
        if self.frozen:
            instead = "keep what the function reads from outside, or pass it in as an argument"
            raise CacheMissError(f"{self.graphable.name}(...)", f"a miss after freeze(): {change}", instead)
        self._on_drop(self.memo.pop(key))
        return None

    def _captured_classes(self, call: Call, ladder: Ladder[Any]) -> Ladder[Any]:
        """The part of the ladder whose classes have a graph for calls like this one."""
        full = [d for d in ladder.full if key_of(call, "full", d) in self.memo]
        return Ladder(full, [d for d in ladder.piecewise if key_of(call, "piecewise", d) in self.memo])

    def blocked_reason(self) -> str:
        """The reason why nothing may be captured now; empty if captures are allowed."""
        return self.exhausted if may_capture() else "inside weft.no_capture()"

    def miss(self, call: Call, decision: Decision[Any]) -> Miss:
        """The difference between a call and the nearest captured one."""
        key = key_of(call, decision.mode, decision.descriptor)
        return nearest_miss(key, self.memo, call.leaf_names(), self.graphable.roles.donated)

    def obtain(self, call: Call) -> tuple[Decision[Any], Entry | None]:
        """Decide the mode and class of a call, and find or capture its graph; if nothing may be captured, choose among
        the graphs that exist."""
        decision = self.decide(call)
        if decision.mode == "none" or (entry := self.find(call, decision)) is not None:
            return decision, None if decision.mode == "none" else entry
        if not (why := self.blocked_reason()):
            try:
                return decision, self.capture(call, decision)
            except torch.OutOfMemoryError:
                why = self.note_full_memory(decision)
        decision = self._decide_among_captured(call, why)
        return decision, None if decision.mode == "none" else self.find(call, decision)

    def decide(self, call: Call) -> Decision[Any]:
        if self.graphable.ladder is None:
            return Decision("piecewise" if self.graphable.split_at else "full", None, _NO_LADDER)
        return dispatch(self.descriptor(call), self.graphable.ladder)

    def _decide_among_captured(self, call: Call, why: str) -> Decision[Any]:
        """Dispatch among the classes that have a graph, because nothing may be captured."""
        if self.graphable.ladder is None:
            return Decision("none", None, why)
        found = dispatch(self.descriptor(call), self._captured_classes(call, self.graphable.ladder))
        return attrs.evolve(found, reason=f"{why}: {found.reason}")

    def descriptor(self, call: Call) -> Any:
        """The class of the call's batch."""
        found = find_descriptors(call.copied)
        if len(found) == 1:
            check_descriptor(found[0], f"{self.graphable.name}(...)")
            self._check_kind(found[0])
            check_sizes(call, found[0], self.graphable.name)
            return found[0]
        raise CaptureError(
            f"graphify({self.graphable.name}, ladder=...)({', '.join(call.copied)})",
            f"arguments with more than one descriptor: {', '.join(map(str, found))}"
            if found
            else "a ladder, but no argument that holds a descriptor",
            "pass a weft.Batch (or your own class with a weft.descriptor_field()) with one descriptor, or leave the "
            "ladder out",
        )

    def _check_kind(self, descriptor: Any) -> None:
        """Raise DescriptorError if the ladder's descriptors are of another class."""
        other = next((d for d in self.graphable.ladder or () if type(d) is not type(descriptor)), None)
        if other is not None:
            own, kind = type(descriptor).__name__, type(other).__name__
            seen = f"a batch with a descriptor of class {own}, and a ladder of {kind}: '{other}'"
            raise DescriptorError(f"{self.graphable.name}(...)", seen, f"a ladder of {own}, or batches of {kind}")

    def note_inline(self, why: Callable[[], str | None]) -> None:
        """Count a call that ran the function itself because of `why`, and that could be captured otherwise."""
        self.eager += 1
        self._inlines.note(why, self.count.replays)

    def needs_autograd_reason(self, entry: Entry) -> str:
        """The reason why the function itself runs although its graph exists: it reads a tensor that requires grad."""
        name = outside_name(self.graphable.fn, next(x for x in entry.external if x.requires_grad))
        return (
            f"it reads {name} from outside, which requires grad, and autograd must see the operators; torch.no_grad() "
            "around the call, or requires_grad_(False) on what is not trained, lets it replay (for gradients inside "
            "the graph: torch.func.grad over parameters that are passed in)"
        )

    def rungs(self, call: Call) -> list[Decision[Any]]:
        """Every class of the ladder, largest first; without a ladder, this call's own decision."""
        if self.graphable.ladder is None:
            return [self.decide(call)]
        self.descriptor(call)
        pairs = [
            *(("full", d) for d in self.graphable.ladder.full),
            *(("piecewise", d) for d in self.graphable.ladder.piecewise),
        ]
        return [Decision(mode, descriptor, "a class of the ladder") for mode, descriptor in pairs]

    def explain(self, call: Call) -> Explanation:
        """Say what a call would do, and why, without doing it."""
        if not MAY_REPLAY.get():
            why = "inside weft.no_capture(replay=False)"
            return Explanation(Decision("none", None, why), False, f"runs eagerly: {why}")
        decision = self.decide(call)
        entry = None if decision.mode == "none" else self.find(call, decision)
        if entry is not None and entry.needs_autograd():
            why = self.needs_autograd_reason(entry)
            return Explanation(Decision("none", None, why), False, f"runs inline: {why}")
        missing = decision.mode != "none" and entry is None
        if missing and (why := self.blocked_reason()):
            decision, missing = self._decide_among_captured(call, why), False
        if decision.mode == "none":
            return Explanation(decision, False, f"runs eagerly: {decision.reason}")
        if not missing:
            return Explanation(decision, True, f"replays: {decision.reason}")
        verb = "would raise, because it is frozen" if self.frozen else "captures"
        return Explanation(decision, False, f"{verb}: {decision.reason}; {self.miss(call, decision)}")

    def capture(self, call: Call, decision: Decision[Any]) -> Entry:
        """Capture the graph for a call, and evict the least recently used one if there are too many.

        Raises:
            CacheMissError: the function is frozen.
            TooManyCapturesError: a context `assert_max_captures` has used up its captures.
            CaptureError: the function cannot be captured.
            torch.OutOfMemoryError: the device's memory is full.
        """
        name, find_miss = self.graphable.name, functools.partial(self.miss, call, decision)
        if self.frozen:
            miss = find_miss()
            instead = "capture this signature before freeze(), or call it with arguments like the captured ones"
            seen = f"a miss after freeze(): {miss.differs}"
            raise CacheMissError(f"{name}(...)", seen, f"{instead}: {miss.remedy}" if miss.remedy else instead)
        title = name if decision.descriptor is None else f"{name} for '{decision.descriptor}'"
        count_capture(title, lambda: attrs.astuple(find_miss()))
        if config.explain_cache_misses and self.memo:
            _LOG.warning("%s: no graph for this call: %s", name, find_miss())
        entry = capture(self.graphable, call, decision.mode, decision.descriptor, self.backend_for(call))
        if config.log_captures:
            size = (entry.recording.nbytes + entry.buffer_bytes) / 2**20
            _LOG.warning("captured %s, %s: %.3f s, %.2f MiB", title, decision.mode, entry.seconds, size)
        self.captures += 1
        key = key_of(call, decision.mode, decision.descriptor)
        self._insert(key, entry)
        self._recaptures.note(key, call.leaf_names(), self.count.replays)
        return entry

    def _insert(self, key: Key, entry: Entry) -> None:
        entry.last_use = self.count.replays
        while self.graphable.max_captures is not None and len(self.memo) >= self.graphable.max_captures:
            least = min(self.memo, key=lambda k: self.memo[k].last_use)
            self._on_drop(self.memo.pop(least))
        self.memo[key] = entry

    def note_full_memory(self, decision: Decision[Any]) -> str:
        """Stop capturing because the memory is full, warn, and return the reason."""
        title = "a call" if decision.descriptor is None else f"'{decision.descriptor}'"
        self.exhausted = f"the device's memory was full when {title} was to be captured"
        warnings.warn(
            f"{self.graphable.name}: {self.exhausted}; from now on it uses the {len(self.memo)} graphs that it has, "
            "and runs other calls eagerly. cache_clear() lets it capture again.",
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


def _tensors(call: Call) -> Iterator[Tensor]:
    return (x for x in chain(call.reference_leaves, call.copied_leaves) if isinstance(x, Tensor))
