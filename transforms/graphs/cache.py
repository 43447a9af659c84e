"""The graphs of one function: captured at need, found by key, and the least used dropped where there are too many."""

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
from weft.transforms.graphs.calls.memo import CacheInfo, Key
from weft.transforms.graphs.capture import Entry, capture
from weft.transforms.graphs.dispatch import Decision, dispatch
from weft.transforms.graphs.ladder import Ladder
from weft.transforms.graphs.misses import Inlines, Miss, Recaptures, nearest_miss, outside_name
from weft.transforms.graphs.options import Graphable
from weft.trees import find_descriptors

_NO_LADDER = "no ladder, so each signature has a graph of its own"
_LOG = logging.getLogger("weft")


@attrs.frozen
class Explanation:
    """What a call would do, and why. `str` of it is the reason.

    Args:
        decision: the mode and the class that it would run under.
        captured: whether there is a graph for it.
        reason: in words.
    """

    decision: Decision[Any]
    captured: bool
    reason: str

    def __str__(self) -> str:
        return self.reason


@attrs.define(eq=False)
class Count:
    """The replays of graphs that may share memory: those captured since `cache_clear()`."""

    replays: int = 0


class Graphs:
    """The memo of a graphified function, its back ends (one a device), and its counts.

    Args:
        of: the function.
        forget: told of a graph that was dropped, so that nobody keeps it alive.
    """

    count: Count
    backends: dict[torch.device | None, Backend]
    memo: dict[Key, Entry]
    exhausted: str
    """Why nothing more is captured: the device's memory was full. Empty as long as it was not."""

    def __init__(self, of: Graphable, forget: Callable[[Entry], None]) -> None:
        self.of = of
        self._forget = forget
        self.clear()

    def clear(self) -> None:
        """Drop all graphs, their memory and the counts; thaw."""
        self.backends = {}
        self.memo = {}
        self.exhausted = ""
        self.frozen = False
        self.captures = self.eager = 0
        self.count = Count()
        self._recaptures = Recaptures(self.of.name, self.of.roles.donated)
        self._inlines = Inlines(self.of.name)

    def info(self) -> CacheInfo:
        """The counts."""
        return CacheInfo(self.captures, self.count.replays, self.eager, len(self.memo))

    def find(self, call: Call, decision: Decision[Any]) -> Entry | None:
        """The graph for a call that was dispatched so, if there is one."""
        return self.memo.get(key_of(call, decision.mode, decision.descriptor))

    def _at_hand(self, call: Call, ladder: Ladder[Any]) -> Ladder[Any]:
        """The classes of the ladder that have a graph for calls like this one."""
        full = [d for d in ladder.full if key_of(call, "full", d) in self.memo]
        return Ladder(full, [d for d in ladder.piecewise if key_of(call, "piecewise", d) in self.memo])

    def closed(self) -> str:
        """Why nothing may be captured now; empty if something may."""
        return self.exhausted if may_capture() else "inside weft.no_capture()"

    def missed(self, call: Call, decision: Decision[Any]) -> Miss:
        """In what a call differs from those that have a graph."""
        key = key_of(call, decision.mode, decision.descriptor)
        return nearest_miss(key, self.memo, call.leaf_names(), self.of.roles.donated)

    def obtain(self, call: Call) -> tuple[Decision[Any], Entry | None]:
        """The decision about a call, and the graph that it needs: there, or captured now, or another that is there."""
        decision = self.decide(call)
        if decision.mode == "none" or (entry := self.find(call, decision)) is not None:
            return decision, None if decision.mode == "none" else entry
        if not (why := self.closed()):
            try:
                return decision, self.capture(call, decision)
            except torch.OutOfMemoryError:
                why = self.exhaust(decision)
        decision = self._decide_at_hand(call, why)
        return decision, None if decision.mode == "none" else self.find(call, decision)

    def decide(self, call: Call) -> Decision[Any]:
        if self.of.ladder is None:
            return Decision("piecewise" if self.of.split_at else "full", None, _NO_LADDER)
        return dispatch(self.descriptor(call), self.of.ladder)

    def _decide_at_hand(self, call: Call, why: str) -> Decision[Any]:
        """The decision where nothing may be captured: among the classes that have a graph."""
        if self.of.ladder is None:
            return Decision("none", None, why)
        found = dispatch(self.descriptor(call), self._at_hand(call, self.of.ladder))
        return attrs.evolve(found, reason=f"{why}: {found.reason}")

    def descriptor(self, call: Call) -> Any:
        """The class of the call's batch."""
        found = find_descriptors(call.copied)
        if len(found) == 1:
            check_descriptor(found[0], f"{self.of.name}(...)")
            self._check_kind(found[0])
            check_sizes(call, found[0], self.of.name)
            return found[0]
        raise CaptureError(
            f"graphify({self.of.name}, ladder=...)({', '.join(call.copied)})",
            f"arguments of more than one descriptor: {', '.join(map(str, found))}"
            if found
            else "a ladder, but no argument that holds a descriptor",
            "pass a weft.Batch (or a class of your own with a weft.descriptor_field()) of one class, or leave the "
            "ladder out",
        )

    def _check_kind(self, descriptor: Any) -> None:
        """Raise DescriptorError if the ladder is of another kind of descriptor."""
        other = next((d for d in self.of.ladder or () if type(d) is not type(descriptor)), None)
        if other is not None:
            own, kind = type(descriptor).__name__, type(other).__name__
            seen = f"a batch with a descriptor of class {own}, and a ladder of {kind}: '{other}'"
            raise DescriptorError(f"{self.of.name}(...)", seen, f"a ladder of {own}, or batches of {kind}")

    def note_inline(self, why: Callable[[], str | None]) -> None:
        """Count a call for which the function itself ran, though it could be captured but for `why`."""
        self.eager += 1
        self._inlines.note(why, self.count.replays)

    def why_itself(self, entry: Entry) -> str:
        """Why the function itself runs although there is a graph of it."""
        name = outside_name(self.of.fn, next(x for x in entry.external if x.requires_grad))
        return (
            f"it reads {name} from outside, which requires grad, and autograd must see the operators; torch.no_grad() "
            "around the call, or requires_grad_(False) on what is not trained, lets it replay (for gradients inside "
            "the graph: torch.func.grad over parameters that are passed in)"
        )

    def rungs(self, call: Call) -> list[Decision[Any]]:
        """Every class of the ladder, largest first; without one, what this call needs."""
        if self.of.ladder is None:
            return [self.decide(call)]
        self.descriptor(call)
        pairs = [*(("full", d) for d in self.of.ladder.full), *(("piecewise", d) for d in self.of.ladder.piecewise)]
        return [Decision(mode, descriptor, "a class of the ladder") for mode, descriptor in pairs]

    def explain(self, call: Call) -> Explanation:
        """What would be done about a call, and why."""
        if not MAY_REPLAY.get():
            why = "inside weft.no_capture(replay=False)"
            return Explanation(Decision("none", None, why), False, f"runs eagerly: {why}")
        decision = self.decide(call)
        entry = None if decision.mode == "none" else self.find(call, decision)
        if entry is not None and entry.runs_itself():
            why = self.why_itself(entry)
            return Explanation(Decision("none", None, why), False, f"runs inline: {why}")
        missing = decision.mode != "none" and entry is None
        if missing and (why := self.closed()):
            decision, missing = self._decide_at_hand(call, why), False
        if decision.mode == "none":
            return Explanation(decision, False, f"runs eagerly: {decision.reason}")
        if not missing:
            return Explanation(decision, True, f"replays: {decision.reason}")
        verb = "would raise, being frozen" if self.frozen else "captures"
        return Explanation(decision, False, f"{verb}: {decision.reason}; {self.missed(call, decision)}")

    def capture(self, call: Call, decision: Decision[Any]) -> Entry:
        """Capture the graph for a call, and drop the least used one if that is one too many.

        Raises:
            CacheMissError: the function is frozen.
            TooManyCapturesError: a context `assert_max_captures` has had its captures.
            CaptureError: the function cannot be captured.
            torch.OutOfMemoryError: there is no room.
        """
        name, missed = self.of.name, functools.partial(self.missed, call, decision)
        if self.frozen:
            miss = missed()
            instead = "capture this signature before freeze(), or call with arguments like the captured ones"
            seen = f"a miss after freeze(): {miss.differs}"
            raise CacheMissError(f"{name}(...)", seen, f"{instead}: {miss.remedy}" if miss.remedy else instead)
        what = name if decision.descriptor is None else f"{name} for '{decision.descriptor}'"
        count_capture(what, lambda: attrs.astuple(missed()))
        if config.explain_cache_misses and self.memo:
            _LOG.warning("%s: no graph for this call: %s", name, missed())
        entry = capture(self.of, call, decision.mode, decision.descriptor, self.backend_for(call))
        if config.log_captures:
            size = (entry.recording.nbytes + entry.buffer_bytes) / 2**20
            _LOG.warning("captured %s, %s: %.3f s, %.2f MiB", what, decision.mode, entry.seconds, size)
        self.captures += 1
        key = key_of(call, decision.mode, decision.descriptor)
        self._keep(key, entry)
        self._recaptures.note(key, call.leaf_names(), self.count.replays)
        return entry

    def _keep(self, key: Key, entry: Entry) -> None:
        entry.last_use = self.count.replays
        while self.of.max_captures is not None and len(self.memo) >= self.of.max_captures:
            least = min(self.memo, key=lambda k: self.memo[k].last_use)
            self._forget(self.memo.pop(least))
        self.memo[key] = entry

    def exhaust(self, decision: Decision[Any]) -> str:
        """Remember that the memory is full, and say so. Returns the reason for what is done instead."""
        what = "a call" if decision.descriptor is None else f"'{decision.descriptor}'"
        self.exhausted = f"the device's memory was full when {what} was to be captured"
        warnings.warn(
            f"{self.of.name}: {self.exhausted}; from now on it uses the {len(self.memo)} graphs that it has, and runs "
            "eagerly what none of them covers. cache_clear() begins anew.",
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
        """A back end where the tensors of a call are, with a pool of its own."""
        return make_backend(self.of.backend, _tensors(call))


def _tensors(call: Call) -> Iterator[Tensor]:
    return (x for x in chain(call.reference_leaves, call.copied_leaves) if isinstance(x, Tensor))
