"""The fast path of a graphified call: recorded calls, and the guards that a new call must pass to repeat one.

The general path asks torch for each property of each argument, and hashes all of them. When it answers a call by a
replay, it stores a short key and two guards in C++ (torch's own, as `torch.compile` uses them), which are at least as
strict. A call that fails a guard takes the general path again, so a guard may be too strict but never too lax.

A call that differs from an earlier one only in its copied arguments, such as a batch of another size, takes the general
path with the key of its arguments by reference already known: a model's parameters are a thousand tensors.
"""

from bisect import bisect
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import attrs
from torch import Tensor, is_inference_mode_enabled as is_inference_mode

from weft.donation import refuse_donated, take_node, take_tensor
from weft.torchapi.private import global_state_check, is_capturing, tensors_check
from weft.transforms.graphs.calls.call import Call, KnownReferences, Roles, make_call_from_known, num_donated
from weft.transforms.graphs.calls.reader import (
    Argument,
    CallLayout,
    ForeignError,
    ReadCall,
    argument_expressions,
    write_reader,
)

T = TypeVar("T")

MAX_FAST_PATHS = 8
"""Argument structures with a fast path, per call form; calls of further structures take the general path."""
MAX_KEYS = 4096
MAX_KNOWN = 64
MAX_PER_KEY = 8


@attrs.frozen(eq=False)
class Guarded(Generic[T]):
    """A value, and the guards that a call of its key must pass to use it.

    Args:
        donated: the storages that the call donates.
    """

    value: T
    state_holds: Callable[[], bool]
    tensors_hold: Callable[..., bool]
    inference: bool
    in_capture: Callable[[], bool]
    donated: "Storages"


def _guarded(
    value: T, tensors: Sequence[Any], guard: Callable[[], bool] | None, donated: Sequence[Any] = ()
) -> Guarded[T] | None:
    """Guard `value` by these tensors, the current global state and `guard`; None if a tensor stands in two places."""
    check = tensors_check(tensors)
    if not check(*tensors):
        return None
    state = global_state_check()
    state_holds = state if guard is None else lambda: state() and guard()
    return Guarded(value, state_holds, check, is_inference_mode(), is_capturing(), Storages(donated))


class Storages:
    """The storages of the tensors that a call donates, in which no copied tensor may lie."""

    def __init__(self, donated: Sequence[Any]) -> None:
        storages = [x.untyped_storage() for x in donated if isinstance(x, Tensor)]
        spans = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages if s.nbytes()})
        self._starts, self._ends = [start for start, _ in spans], [end for _, end in spans]

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of these tensors begins in one of the storages."""
        for tensor in tensors if self._starts else ():
            address = tensor.data_ptr()
            if (index := bisect(self._starts, address)) and address < self._ends[index - 1]:
                return True
        return False


def _first_passing(candidates: Sequence[Guarded[T]], tensors: Sequence[Any], copied: Sequence[Tensor] = ()) -> T | None:
    """The first value whose guards pass for these tensors, those copied among them, in the current state."""
    for guarded in candidates:
        if (
            guarded.tensors_hold(*tensors)
            and guarded.state_holds()
            and is_inference_mode() is guarded.inference
            and not guarded.in_capture()
        ):
            return None if guarded.donated.hold(copied) else guarded.value
    return None


def _store(table: dict[Any, tuple[Guarded[T], ...]], key: Any, guarded: Guarded[T], max_keys: int) -> None:
    if len(table) >= max_keys:
        table.clear()
    table[key] = (guarded, *table.get(key, ()))[:MAX_PER_KEY]


@attrs.frozen(eq=False)
class FastPath(Generic[T]):
    """The recorded calls of one argument structure.

    Args:
        layout: reads the arguments of a call of this structure.
        num_donated: the number of its leaves that are donated; they come first.
        replays: guarded replays, by the key of a call.
        known: guarded keys of arguments by reference, by the first part of a call's key.
    """

    layout: CallLayout
    num_donated: int
    replays: dict[tuple[Any, ...], tuple[Guarded[T], ...]] = attrs.field(factory=dict)
    known: dict[tuple[Any, ...], tuple[Guarded[KnownReferences], ...]] = attrs.field(factory=dict)

    def find(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[ReadCall, T] | None:
        """Read the call's arguments and find its replay; None if no earlier call was like it."""
        if (read := self.layout.read(args, kwargs)) is None:
            return None
        try:
            candidates = self.replays.get(read[0], ())
        except TypeError:  # the general path raises the error that names the unhashable value
            return None
        copied = read[2][self.layout.num_references[1] :] if self.num_donated else ()
        replay = _first_passing(candidates, read[2], copied)
        return None if replay is None else (read, replay)

    def find_known(self, roles: Roles, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Make the call from a known key of its arguments by reference; None if no earlier call had the same ones."""
        if (read := self.layout.read(args, kwargs)) is None:
            return None
        num_leaves, num_tensors = self.layout.num_references
        try:
            candidates = self.known.get(read[0][0], ())
        except TypeError:
            return None
        known = _first_passing(candidates, read[2][:num_tensors])
        return None if known is None else make_call_from_known(roles, name, args, kwargs, known, read[1][:num_leaves])

    def take_donated(self, read: ReadCall) -> Sequence[Any]:
        """Take the donated arguments from the caller, and return all leaves."""
        _, leaves, _, donated = read
        for node, taker in zip(donated, self.layout.nodes, strict=True):
            take_node(node, taker)
        taken = [*leaves]
        for index, taker in self.layout.aliased:
            refuse_donated(taken[index], call=taker)
            taken[index] = take_tensor(taken[index], taker)
        return taken

    def drop(self, is_evicted: Callable[[T], bool]) -> None:
        """Drop the replays of evicted graphs."""
        for key, candidates in list(self.replays.items()):
            self.replays[key] = tuple(guarded for guarded in candidates if not is_evicted(guarded.value))

    def add(self, read: ReadCall | None, call: Call, replay: T, guard: Callable[[], bool] | None) -> bool:
        """Store `replay` for calls like this one, as long as `guard()` holds, and the key of its arguments by reference
        for calls that differ in copied arguments only.

        Returns:
            False if the call has another structure, or one tensor in two places where the call that this fast path was
            made for had two tensors.
        """
        if read is None or (guarded := _guarded(replay, read[2], guard, read[1][: self.num_donated])) is None:
            return False
        _store(self.replays, read[0], guarded, MAX_KEYS)
        if call.known is None:
            known = KnownReferences(call.reference_tree, call.reference_key())
            references = _guarded(known, read[2][: self.layout.num_references[1]], None)
            assert references is not None, "a subset of tensors that are all in one place"
            _store(self.known, read[0][0], references, MAX_KNOWN)
        return True


def add_fast_path(
    fast_paths: dict[tuple[Any, ...], tuple[FastPath[T], ...]],
    roles: Roles,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: Call,
    replay: T,
    guard: Callable[[], bool] | None,
) -> None:
    """Store `replay` for the next call like this one, as long as `guard()` holds; `fast_paths` are keyed by call form
    (the number of positional arguments, and the keywords)."""
    form = (len(args), *kwargs)
    existing = fast_paths.get(form, ())
    for fast_path in existing:
        if fast_path.add(fast_path.layout.read(args, kwargs), call, replay, guard):
            return
    new = make_fast_path(roles, name, args, kwargs, call) if len(existing) < MAX_FAST_PATHS else None
    if new is not None:
        fast_paths[form] = (*existing, new)
        new.add(new.layout.read(args, kwargs), call, replay, guard)


def make_fast_path(
    roles: Roles, name: str, args: Sequence[Any], kwargs: dict[str, Any], call: Call
) -> "FastPath[Any] | None":
    """Make the fast path for calls like `call`, whose arguments are `args` and `kwargs`; None if generated code cannot
    read them."""
    expressions = argument_expressions(roles.signature, len(args), tuple(kwargs))

    def arguments(values: dict[str, Any]) -> list[Argument]:
        takers = {key: f"{name}({key})" for key in roles.donated}
        return [Argument(expressions[key], value, takers.get(key)) for key, value in values.items()]

    try:
        layout = write_reader(
            roles.signature, arguments(call.statics), arguments(call.references), arguments(call.copied)
        )
    except ForeignError:
        return None
    read = layout.read(args, kwargs)
    expected = (*call.reference_leaves, *call.copied_leaves)
    if read is None or [id(leaf) for leaf in read[1]] != [id(leaf) for leaf in expected]:
        return None  # the arguments changed since the call was made
    return FastPath(layout, num_donated(call, roles))
