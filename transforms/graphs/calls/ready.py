"""Replays made ready: what must still hold for a call to repeat what an earlier one did, checked in a microsecond.

The general path asks torch for each property of each argument, and hashes all of them. A call that it answered by a
replay leaves behind a short key and two checks in C++ that say at least as much. Whatever fails them takes the general
path again, so that a check may be too strict, but never too lax.

A call that differs from an earlier one in what is copied alone, as a batch of another size does, takes the general path
with what was found out about its arguments by reference: a model's parameters are a thousand tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import attrs
from torch import is_inference_mode_enabled as is_inference_mode

from weft.donation import refuse_donated, take_node, take_tensor
from weft.torchapi import global_state_check, is_capturing, tensors_check
from weft.transforms.graphs.calls.call import Call, Recalled, Roles, take_apart_again
from weft.transforms.graphs.calls.reader import Argument, CallLayout, ForeignError, Seen, places, write_reader

T = TypeVar("T")

MAX_READERS = 8
"""Structures with a fast path, for each way to write a call; others take the general path."""
MAX_KEYS = 4096
MAX_RECALLED = 64
MAX_ALIKE = 8


@attrs.frozen(eq=False)
class Ready(Generic[T]):
    """A plan, and the checks that a call of its key must pass to be answered by it."""

    plan: T
    state_holds: Callable[[], bool]
    tensors_hold: Callable[..., bool]
    inference: bool
    in_capture: Callable[[], bool]


def _make_ready(plan: T, tensors: Sequence[Any], holds: Callable[[], bool] | None) -> Ready[T] | None:
    """`plan`, ready for such tensors, here, as long as `holds()`; None if a tensor is in two places."""
    check = tensors_check(tensors)
    if not check(*tensors):
        return None
    state = global_state_check()
    state_holds = state if holds is None else lambda: state() and holds()
    return Ready(plan, state_holds, check, is_inference_mode(), is_capturing())


def _first_ready(candidates: Sequence[Ready[T]], tensors: Sequence[Any]) -> T | None:
    """The first plan whose checks such tensors pass, here and now."""
    for ready in candidates:
        if (
            ready.tensors_hold(*tensors)
            and ready.state_holds()
            and is_inference_mode() is ready.inference
            and not ready.in_capture()
        ):
            return ready.plan
    return None


def _keep_ready(among: dict[Any, tuple[Ready[T], ...]], key: Any, made: Ready[T], most: int) -> None:
    if len(among) >= most:
        among.clear()
    among[key] = (made, *among.get(key, ()))[:MAX_ALIKE]


@attrs.frozen(eq=False)
class Reader(Generic[T]):
    """Calls of one structure: how to take them apart, and what is ready for them.

    Args:
        ready: by the key of a call.
        recalled: by the first part of a key: what is known of the arguments by reference.
    """

    layout: CallLayout
    donates: bool
    ready: dict[tuple[Any, ...], tuple[Ready[T], ...]] = attrs.field(factory=dict)
    recalled: dict[tuple[Any, ...], tuple[Ready[Recalled], ...]] = attrs.field(factory=dict)

    def find(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Seen, T] | None:
        """The call's parts and its plan, or None if no earlier call was like it."""
        if (seen := self.layout.read(args, kwargs)) is None:
            return None
        try:
            candidates = self.ready.get(seen[0], ())
        except TypeError:  # a value that cannot be hashed, which the general path names
            return None
        found = _first_ready(candidates, seen[2])
        return None if found is None else (seen, found)

    def recall(self, roles: Roles, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """The call, taken apart; None if no earlier one was like it in all but what is copied."""
        if (seen := self.layout.read(args, kwargs)) is None:
            return None
        leaves, tensors = self.layout.num_references
        try:
            candidates = self.recalled.get(seen[0][0], ())
        except TypeError:
            return None
        found = _first_ready(candidates, seen[2][:tensors])
        return None if found is None else take_apart_again(roles, name, args, kwargs, found, seen[1][:leaves])

    def move(self, seen: Seen) -> Sequence[Any]:
        """The leaves, after the donated ones changed hands."""
        _, leaves, _, donated = seen
        for node, taker in zip(donated, self.layout.nodes, strict=True):
            take_node(node, taker)
        moved = [*leaves]
        for index, taker in self.layout.aliased:
            refuse_donated(moved[index], call=taker)
            moved[index] = take_tensor(moved[index], taker)
        return moved

    def forget(self, gone: Callable[[T], bool]) -> None:
        """Drop the plans that are gone."""
        for key, ready in list(self.ready.items()):
            self.ready[key] = tuple(r for r in ready if not gone(r.plan))

    def remember(self, seen: Seen | None, call: Call, plan: T, holds: Callable[[], bool] | None) -> bool:
        """From now on `plan` is ready for calls like this one, as long as `holds()`; and what is known of its arguments
        by reference, for calls that differ in what is copied. False for a call of another structure, or with a tensor
        in two places that the call which this reader was made for had two tensors in."""
        if seen is None or (made := _make_ready(plan, seen[2], holds)) is None:
            return False
        _keep_ready(self.ready, seen[0], made, MAX_KEYS)
        if call.recalled is None:
            known = Recalled(call.reference_tree, call.reference_key())
            own = _make_ready(known, seen[2][: self.layout.num_references[1]], None)
            assert own is not None, "some of tensors that are all in one place"
            _keep_ready(self.recalled, seen[0][0], own, MAX_RECALLED)
        return True


def remember(
    readers: dict[tuple[Any, ...], tuple[Reader[T], ...]],
    roles: Roles,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: Call,
    plan: T,
    holds: Callable[[], bool] | None,
) -> None:
    """Make `plan` ready for the next call like this one, as long as `holds()`; `readers` are those of each way to write
    a call."""
    form = (len(args), *kwargs)
    found = readers.get(form, ())
    for reader in found:
        if reader.remember(reader.layout.read(args, kwargs), call, plan, holds):
            return
    made = make_reader(roles, name, args, kwargs, call) if len(found) < MAX_READERS else None
    if made is not None:
        readers[form] = (*found, made)
        made.remember(made.layout.read(args, kwargs), call, plan, holds)


def make_reader(
    roles: Roles, name: str, args: Sequence[Any], kwargs: dict[str, Any], call: Call
) -> "Reader[Any] | None":
    """The reader for calls like `call`, which `args` and `kwargs` make; None if generated code cannot read them."""
    where = places(roles.signature, len(args), tuple(kwargs))

    def arguments(values: dict[str, Any]) -> list[Argument]:
        takers = {key: f"{name}({key})" for key in roles.donated}
        return [Argument(where[key], value, takers.get(key)) for key, value in values.items()]

    try:
        layout = write_reader(
            roles.signature, arguments(call.statics), arguments(call.references), arguments(call.copied)
        )
    except ForeignError:
        return None
    seen = layout.read(args, kwargs)
    wanted = (*call.reference_leaves, *call.copied_leaves)
    if seen is None or [id(leaf) for leaf in seen[1]] != [id(leaf) for leaf in wanted]:
        return None  # the arguments are not what they were a moment ago
    return Reader(layout, bool(layout.nodes or layout.aliased))
