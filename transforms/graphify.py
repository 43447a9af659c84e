"""`graphify`: a pure function that replays. It memoizes one captured graph for each key, and changes nothing else.

step = graphify(step, ladder=make_ladder("full", limits))
state, out = step(params, state, batch)      # captures this batch's class once, and replays it from then on
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

import attrs
import torch
from torch import Tensor
from tqdm.auto import tqdm

from weft.descriptor import Descriptor
from weft.donation import donate, donated_argnames, donates
from weft.errors import CacheMissError, CaptureError
from weft.padding import unpad
from weft.torchapi import in_plain_surroundings
from weft.transforms.backends import Backend, make_backend
from weft.transforms.call import Call, Roles, check_sizes, inline_reason, key_of, signature_of, take_apart
from weft.transforms.capture import Entry, capture
from weft.transforms.dispatch import Decision, dispatch
from weft.transforms.ladder import Ladder, as_ladder
from weft.transforms.memo import CacheInfo, Key, check_hashable, check_plain, nearest_difference
from weft.transforms.ready import MAX_READERS, Reader, make_reader
from weft.transforms.results import Outputs
from weft.transforms.transfer import Handover, hand_over, plan_copies
from weft.trees import find_descriptors, tree_flatten, tree_leaves, tree_unflatten

P = ParamSpec("P")
R = TypeVar("R")

_MAX_PLANS = 4096
_NO_LADDER = "no ladder, so each signature has a graph of its own"


@attrs.frozen(eq=False)
class Replay:
    """How calls of one signature are answered by a graph.

    Args:
        entry: the graph.
        fill: fills its input buffers from the leaves of a call, those by reference first; None if it has none.
        run: replays it.
        handover: makes the result.
    """

    entry: Entry
    fill: Callable[[Sequence[Any]], None] | None
    run: Callable[[], None]
    handover: Handover


@attrs.frozen(eq=False)
class Plan:
    """What to do with calls of one signature: `replay`, or run eagerly if that is None."""

    decision: Decision[Any]
    replay: Replay | None = None


@attrs.frozen
class Explanation:
    """What a call would do, and why. `str` of it is the reason."""

    decision: Decision[Any]
    captured: bool
    reason: str

    def __str__(self) -> str:
        return self.reason


class Graphified(Generic[P, R]):
    """What `graphify` returns: the function, and the graphs captured of it."""

    _memo: dict[Key, Entry]
    _plans: dict[Key, Plan]
    _readers: dict[tuple[Any, ...], tuple[Reader[Replay], ...]]
    _backend: Backend | None
    _frozen: bool
    _captures: int
    _replays: int
    _eager: int

    def __init__(
        self,
        fn: Callable[P, R],
        roles: Roles,
        ladder: Ladder[Any] | Sequence[Any] | None,
        split_at: Iterable[str],
        backend: str | None,
        borrow: bool,
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self._roles = roles
        self._backend_name = backend
        self._borrow = borrow
        self._lock = threading.RLock()
        self.ladder = None if ladder is None else as_ladder(ladder)
        self.split_at = frozenset(split_at)
        self.cache_clear()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The fast path: a call like an earlier one is answered as that one was; any other by `_call`."""
        if in_plain_surroundings():
            for reader in self._readers.get((len(args), *kwargs), ()):
                if (found := reader.find(args, kwargs)) is not None:
                    seen, replay = found
                    with self._lock:
                        return self._replay(replay, reader.move(seen) if reader.donates else seen[1])
        return self._call(args, kwargs)

    def _replay(self, replay: Replay, leaves: Sequence[Any]) -> R:
        """Fill the buffers from the leaves of a call (after the donated ones changed hands), replay, hand over."""
        if replay.fill is not None:
            replay.fill(leaves)
        replay.run()
        self._replays += 1
        handover = replay.handover
        return handover.build(handover.copies(handover.made), leaves)  # type: ignore[no-any-return]

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """The general path: any call, the first of its kind included."""
        call = take_apart(self._roles, self._name, args, kwargs)
        if inline_reason(call):
            return self._fn(*args, **kwargs)
        with self._lock:
            signature = self._signature(call)
            plan = self._plans.get(signature) or self._plan(call, signature)
            if plan.replay is None:
                self._eager += 1
                return self._fn(*args, **kwargs)
            if plan.replay.entry.needs_autograd and torch.is_grad_enabled():
                return self._fn(*args, **kwargs)
            if in_plain_surroundings():
                self._remember(args, kwargs, call, plan.replay)
            return self._replay(plan.replay, (*self._moved(call), *call.copied_leaves))

    def _moved(self, call: Call) -> list[Any]:
        """The leaves by reference, after the donated ones changed hands."""
        donated = self._roles.donated
        return tree_leaves(
            {
                name: donate(value, to=f"{self._name}({name})") if name in donated else value
                for name, value in call.references.items()
            }
        )

    def _remember(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call, replay: Replay) -> None:
        """Let the next call like this one take the fast path."""
        form = (len(args), *kwargs)
        readers = self._readers.get(form, ())
        for reader in readers:
            if (seen := reader.layout.read(args, kwargs)) is not None:
                reader.remember(seen, replay)
                return
        if len(readers) < MAX_READERS and (made := make_reader(self._roles, self._name, args, kwargs, call)):
            self._readers[form] = (*readers, made)
            if (seen := made.layout.read(args, kwargs)) is not None:
                made.remember(seen, replay)

    def _signature(self, call: Call) -> Key:
        signature = signature_of(call)
        check_hashable(signature, f"{self._name}(...)", call.leaf_names)
        return signature

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: the instance is the first argument, and a value of the key."""
        return self if instance is None else functools.partial(self, instance)

    def _plan(self, call: Call, signature: Key) -> Plan:
        """Dispatch a signature seen for the first time, and capture what it needs."""
        check_plain((*call.reference_leaves, *call.copied_leaves), f"{self._name}(...)", call.leaf_names)
        decision = self._decide(call)
        plan = Plan(decision)
        if decision.mode != "none":
            entry = self._entry(call, decision)
            plan = Plan(decision, self._make_replay(entry, call, decision))
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[signature] = plan
        return plan

    def _make_replay(self, entry: Entry, call: Call, decision: Decision[Any]) -> Replay:
        leaves, first = (*call.reference_leaves, *call.copied_leaves), len(call.reference_leaves)
        copies = plan_copies(entry.buffers, entry.blanks, entry.axes, leaves, first)
        handover = hand_over(self._cut(entry.outputs, call, decision), entry.buffers, self._borrow)
        return Replay(entry, copies.fill if copies else None, entry.recording.replay, handover)

    def _decide(self, call: Call) -> Decision[Any]:
        if self.ladder is None:
            return Decision("piecewise" if self.split_at else "full", None, _NO_LADDER)
        return dispatch(self._descriptor(call), self.ladder)

    def _descriptor(self, call: Call) -> Any:
        """The class of the call's batch."""
        found = find_descriptors(call.copied)
        if len(found) == 1:
            check_sizes(call, found[0], self._name)
            return found[0]
        raise CaptureError(
            f"graphify({self._name}, ladder=...)({', '.join(call.copied)})",
            f"arguments of more than one descriptor: {', '.join(map(str, found))}"
            if found
            else "a ladder, but no argument that holds a descriptor",
            "pass a weft.Batch (or a sized class of your own) of one class, or leave the ladder out",
        )

    def _entry(self, call: Call, decision: Decision[Any]) -> Entry:
        key = key_of(call, decision.mode, decision.descriptor)
        if (entry := self._memo.get(key)) is not None:
            return entry
        if self._frozen:
            raise CacheMissError(
                f"{self._name}(...)",
                f"a miss after freeze(): {nearest_difference(key, self._memo, call.leaf_names())}",
                "capture this signature before freeze(), or call with arguments like the captured ones",
            )
        if self._backend is None:
            leaves = (*call.reference_leaves, *call.copied_leaves)
            self._backend = make_backend(self._backend_name, [x for x in leaves if isinstance(x, Tensor)])
        self._memo[key] = entry = capture(
            self._fn,
            self._name,
            self._roles,
            call,
            decision.descriptor,
            self._backend,
            self.split_at if decision.mode == "piecewise" else frozenset(),
        )
        self._captures += 1
        return entry

    def _cut(self, outputs: Outputs, call: Call, decision: Decision[Any]) -> Outputs:
        """The outputs as views of the size that this call's own batch has."""
        if decision.descriptor is None or (own := self._descriptor(call)) == decision.descriptor:
            return outputs
        views, structure = tree_flatten(unpad(tree_unflatten(list(outputs.leaves), outputs.structure), own))
        return Outputs(structure, tuple(views), outputs.references)

    def capture(self, *args: P.args, **kwargs: P.kwargs) -> CacheInfo:
        """Capture every class of the ladder, largest first (without one: this call's signature), with a progress bar.

        The arguments serve as examples: nothing is donated, and no state changes.
        """
        call = take_apart(self._roles, self._name, args, kwargs)
        self._signature(call)
        if self.ladder is not None:
            self._descriptor(call)
        check_plain((*call.reference_leaves, *call.copied_leaves), f"{self._name}(...)", call.leaf_names)
        decisions = [self._decide(call)]
        if self.ladder is not None:
            pairs = [*(("full", d) for d in self.ladder.full), *(("piecewise", d) for d in self.ladder.piecewise)]
            decisions = [Decision(mode, descriptor, "a class of the ladder") for mode, descriptor in pairs]
        with self._lock:
            for decision in tqdm(decisions, desc=f"capture {self._name}", unit="graph", leave=False, disable=None):
                self._entry(call, decision)
        return self.cache_info()

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Explanation:
        """What this call would do (replay, capture, or run the function itself) and why, without doing it."""
        call = take_apart(self._roles, self._name, args, kwargs)
        if reason := inline_reason(call):
            return Explanation(Decision("none", None, reason), False, f"runs inline: {reason}")
        self._signature(call)
        decision = self._decide(call)
        if decision.mode == "none":
            return Explanation(decision, False, f"runs eagerly: {decision.reason}")
        key = key_of(call, decision.mode, decision.descriptor)
        if key in self._memo:
            return Explanation(decision, True, f"replays: {decision.reason}")
        verb = "would raise, being frozen" if self._frozen else "captures"
        missed = nearest_difference(key, self._memo, call.leaf_names())
        return Explanation(decision, False, f"{verb}: {decision.reason}; {missed}")

    def freeze(self) -> "Graphified[P, R]":
        """From now on a miss raises CacheMissError, which names the field that differed, instead of capturing."""
        self._frozen = True
        return self

    def cache_info(self) -> CacheInfo:
        """Captures, replays, eager calls, and graphs held."""
        return CacheInfo(self._captures, self._replays, self._eager, len(self._memo))

    def num_pieces(self) -> tuple[int, ...]:
        """For each graph held, in the order of capture, the number of pieces that it is in."""
        return tuple(entry.recording.num_pieces for entry in self._memo.values())

    def cache_clear(self) -> None:
        """Drop all graphs, their memory and the counts; a frozen function thaws."""
        self._memo = {}
        self._plans = {}
        self._readers = {}
        self._backend = None
        self._frozen = False
        self._captures = self._replays = self._eager = 0

    def __repr__(self) -> str:
        return f"<graphify({self._name}), {len(self._memo)} graphs>"


@overload
def graphify(
    fn: Callable[P, R],
    *,
    ladder: Ladder[Any] | Sequence[Any] | None = ...,
    split_at: str | Iterable[str] = ...,
    donate_argnames: str | Iterable[str] = ...,
    static_argnames: str | Iterable[str] = ...,
    reference_argnames: str | Iterable[str] | None = ...,
    backend: str | None = ...,
    outputs: Literal["safe", "borrow"] = ...,
) -> Graphified[P, R]: ...
@overload
def graphify(
    fn: None = ...,
    *,
    ladder: Ladder[Any] | Sequence[Any] | None = ...,
    split_at: str | Iterable[str] = ...,
    donate_argnames: str | Iterable[str] = ...,
    static_argnames: str | Iterable[str] = ...,
    reference_argnames: str | Iterable[str] | None = ...,
    backend: str | None = ...,
    outputs: Literal["safe", "borrow"] = ...,
) -> Callable[[Callable[P, R]], Graphified[P, R]]: ...
def graphify(
    fn: Callable[P, R] | None = None,
    *,
    ladder: Ladder[Any] | Sequence[Any] | None = None,
    split_at: str | Iterable[str] = (),
    donate_argnames: str | Iterable[str] = (),
    static_argnames: str | Iterable[str] = (),
    reference_argnames: str | Iterable[str] | None = None,
    backend: str | None = None,
    outputs: Literal["safe", "borrow"] = "safe",
) -> Graphified[P, R] | Callable[[Callable[P, R]], Graphified[P, R]]:
    """Make a pure function replay: same signature, same result, one captured graph a key.

    The key is the tree structure, static and other non-tensor values, each tensor's shape, dtype, stride and device,
    the class of the batch, and the addresses of what is captured by reference. Results are safe unless borrowed: a
    later call does not change them. Inside another capture, a torch.func transform, or where autograd would record,
    the function itself runs.

    Args:
        fn: a pure function over pytrees of tensors. Left out, `graphify` is a decorator.
        ladder: the classes that may be captured (`make_ladder`); a call's batch is padded to the least that covers it,
            and runs eagerly if none does. None: every signature is captured as it is. A step under a ladder must treat
            padding as inert: a donated tensor of over 64 MiB is not saved while its capture runs on padding.
        split_at: operators by name (`weft::paged_attention`) that stay outside the graphs in mode piecewise: the
            classes of the ladder's `piecewise` part, or without a ladder all, are captured as pieces between them.
        donate_argnames: arguments whose storage the function takes, such as the state (beside those that `weft.donates`
            declares). A part of the result with their structure is their next value, and is kept in their storage.
        static_argnames: arguments of hashable values that are no tensors and are part of the key.
        reference_argnames: captured by reference, not copied: a call with tensors elsewhere is a miss. None: `params`,
            if there is such an argument.
        backend: `cuda`, `tape`, or None to choose by the device of the arguments.
        outputs: `safe`: results are copies, which no later call changes. `borrow`: they are the graph's own buffers,
            for a caller that is done with them before it calls again: its next replay overwrites them.

    Raises:
        CaptureError: at the first call, if the function reads tensors on the host, branches on them, has results whose
            shapes depend on data, or writes to what it does not own; it names the line.

    >>> import torch
    >>> @graphify
    ... def f(x, y):
    ...     return torch.sin(x) + y
    >>> f(torch.zeros(2), torch.ones(2)), f(torch.zeros(2), torch.zeros(2))
    (tensor([1., 1.]), tensor([0., 0.]))
    >>> f.cache_info()
    CacheInfo(captures=1, replays=2, eager=0, currsize=1)
    """
    if fn is None:
        return lambda f: graphify(
            f,
            ladder=ladder,
            split_at=split_at,
            donate_argnames=donate_argnames,
            static_argnames=static_argnames,
            reference_argnames=reference_argnames,
            backend=backend,
            outputs=outputs,
        )
    signature, static = inspect.signature(fn), _names(static_argnames)
    call = f"graphify({getattr(fn, '__name__', fn)}, ...)"
    if outputs not in ("safe", "borrow"):
        raise CaptureError(call, f"outputs={outputs!r}", "outputs='safe' or 'borrow'")
    if ladder is not None and (isinstance(ladder, str) or not all(isinstance(d, Descriptor) for d in ladder)):
        raise CaptureError(
            call, f"ladder={ladder!r}", "a sequence of descriptors, as from weft.make_ladder(mode, limits)"
        )
    if isinstance(ladder, Ladder) and ladder.piecewise and not split_at:
        raise CaptureError(
            call, "a ladder with classes for pieces, and no split_at", "split_at='weft::paged_attention'"
        )
    declared = donated_argnames(fn)
    extra = tuple(name for name in _names(donate_argnames) if name not in declared)
    if reference_argnames is None:
        reference_argnames = [name for name in signature.parameters if name == "params"]
    references = _names(reference_argnames)
    for name in (*extra, *static, *references):
        if name not in signature.parameters:
            raise CaptureError(
                call,
                f"donate_argnames, static_argnames or reference_argnames hold {name!r}, which is no argument of it",
                f"one of {', '.join(signature.parameters)}",
            )
    donated = (*declared, *extra)
    by_reference = (*donated, *(name for name in references if name not in donated))
    roles = Roles(signature, static, donated, by_reference)
    wrapped = donates(*extra)(fn) if extra else fn
    return Graphified(wrapped, roles, ladder, _names(split_at), backend, outputs == "borrow")


def _names(given: str | Iterable[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
