"""The fast path of a graphified call: recorded calls, and the guards that a new call must pass to
repeat one.

The general path asks torch for each property of each argument, and hashes all of them. When it
answers a call by a replay, it stores a short key and two guards in C++ (torch's own, which
`torch.compile` uses); together they are at least as strict as the full key. A call that fails a
guard takes the general path again, so a guard may be too strict but never too lax.

A call that differs from an earlier one only in its copied arguments, such as a batch of another
size, takes the general path too, but reuses the key of its arguments by reference: a model's
parameters are a thousand tensors.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import attrs
from torch import Tensor, is_inference_mode_enabled as is_inference_mode

from weft.ops.transfers.collective import current_place
from weft.settings import is_batch_invariant
from weft.torchapi.private import function_modes, global_state_check, is_capturing, tensors_check
from weft.transforms.graphs.calls.aliasing import Storages
from weft.transforms.graphs.calls.call import Call, Roles, make_call
from weft.transforms.graphs.calls.key import KnownReferences
from weft.transforms.graphs.calls.reader import (
    Argument,
    CallLayout,
    ForeignError,
    ReadCall,
    argument_expressions,
    write_reader,
)
from weft.values.bounded import BoundedDict
from weft.values.donation import refuse_donated, take_node, take_tensor


def modes_around() -> tuple[Any, ...]:
    """The function modes, batch invariance and rank that a call is made under. Each combination has
    separate fast paths. Most calls have none of these."""
    modes = function_modes()
    place = current_place()
    if is_batch_invariant():
        modes = (*modes, "batch invariant")
    if place is None:
        return modes
    return (*modes, place)


class Value(Protocol):
    """A value that may be used as long as `holds` returns True, or always if `holds` is None."""

    @property
    def holds(self) -> Callable[[], bool] | None: ...


T = TypeVar("T", bound=Value)

MAX_FORMS = 256
# The most argument structures with a fast path per call form; calls of further structures take the
# general path.
MAX_FAST_PATHS = 128
MAX_KEYS = 4096
MAX_KNOWN = 64
MAX_PER_KEY = 8
# Stands in a table for a key whose calls have more than `MAX_PER_KEY` layouts; their values are
# under the key extended by the strides.
_CROWDED: Final[tuple[Any, ...]] = (None,)


@attrs.frozen(eq=False)
class Guarded(Generic[T]):
    """A value, and the guards that a call of its key must pass to use it.

    Args:
        value: returns the value; None if it is gone.
        condition: a condition on the value, or None.
        donated: the storages that the call donates; None if it donates nothing.
    """

    value: Callable[[], T | None]
    condition: Callable[[T], bool] | None
    state_holds: Callable[[], bool]
    tensors_hold: Callable[..., bool]
    inference: bool
    in_capture: Callable[[], bool]
    donated: Storages | None


def _guarded(
    value: Callable[[], T | None],
    condition: Callable[[T], bool] | None,
    tensors: Sequence[Any],
    donated: Sequence[Any] = (),
) -> Guarded[T] | None:
    """Guard a value by these tensors and the current global state; None if a tensor occurs twice
    among them, which torch's guard does not accept."""
    check = tensors_check(tensors)
    # Torch's guard refuses an object that occurs twice, and so would refuse the call itself.
    if not check(*tensors):
        return None
    return Guarded(
        value,
        condition,
        global_state_check(),
        check,
        is_inference_mode(),
        is_capturing(),
        Storages(donated) if donated else None,
    )


# Guarded values by the key of a call.
Table = BoundedDict[Any, tuple[Guarded[T], ...]]


def _find(
    table: Table[T], key: Any, tensors: Sequence[Any], copied: Sequence[Tensor] = ()
) -> T | None:
    """Find the first value for a call of this key whose guards pass for its tensors in the current
    state; None if there is none. `copied` are the copied ones of the tensors."""
    try:
        candidates = table.get(key)
    except TypeError:  # the general path raises the error that names the unhashable value
        return None
    if candidates is _CROWDED:
        # Strides are read only here, since reading them for each call takes longer than most
        # guards.
        candidates = table.get((key, *map(Tensor.stride, tensors)))
    for guarded in candidates or ():
        if (
            guarded.tensors_hold(*tensors)
            and guarded.state_holds()
            and is_inference_mode() is guarded.inference
            and not guarded.in_capture()
            and (value := guarded.value()) is not None
            and (value.holds is None or value.holds())
            and (guarded.condition is None or guarded.condition(value))
        ):
            # A copied argument that shares memory with a donated one is refused: the general path
            # says so.
            if guarded.donated is not None and guarded.donated.hold(copied):
                return None
            return value
    return None


def _store(table: Table[T], key: Any, tensors: Sequence[Any], guarded: Guarded[T]) -> None:
    """Store a value in front of the key's other values; the oldest one may be dropped."""
    candidates = table.get(key)
    if candidates is _CROWDED or (candidates is not None and len(candidates) == MAX_PER_KEY):
        table[key] = _CROWDED
        key = (key, *map(Tensor.stride, tensors))
    table[key] = (guarded, *table.get(key, ()))[:MAX_PER_KEY]


@attrs.frozen(eq=False)
class FastPath(Generic[T]):
    """The recorded calls of one argument structure.

    Args:
        layout: reads the arguments of a call of this structure.
        num_donated: the number of its leaves that are donated; they come first.
        plans: guarded plans, by the key of a call.
        cached_references: guarded keys of arguments by reference, by the first part of a call's
            key.
    """

    layout: CallLayout
    num_donated: int
    plans: Table[T] = attrs.field(factory=lambda: BoundedDict(MAX_KEYS))
    cached_references: Table[KnownReferences] = attrs.field(factory=lambda: BoundedDict(MAX_KNOWN))

    def read(self, args: Sequence[Any], kwargs: dict[str, Any]) -> ReadCall | None:
        """Read a call's arguments; None if it has another structure."""
        try:
            return self.layout.read(args, kwargs)
        except RuntimeError:  # a tensor without an address, such as a sparse one
            return None

    def find(self, read: ReadCall) -> T | None:
        """Find the plan of a call; None if no earlier call was like it."""
        if self.num_donated:
            copied = read[2][self.layout.num_references[1] :]
        else:
            copied = ()
        return _find(self.plans, read[0], read[2], copied)

    def find_known(self, read: ReadCall) -> KnownReferences | None:
        """Find the key of a call's arguments by reference; None if no earlier call had the same
        ones."""
        return _find(self.cached_references, read[0][0], read[2][: self.layout.num_references[1]])

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

    def add(
        self, read: ReadCall | None, call: Call, plan: T, condition: Callable[[T], bool] | None
    ) -> bool:
        """Store a plan for calls like this one, to be used while it exists and the condition holds;
        and the key of its arguments by reference, for calls that differ only in copied arguments.

        Returns:
            False if the call has another structure, or passes one tensor twice where the call that
            this fast path was made for passed two tensors.
        """
        if read is None:
            return False
        guarded = _guarded(weakref.ref(plan), condition, read[2], read[1][: self.num_donated])
        if guarded is None:
            return False
        _store(self.plans, read[0], read[2], guarded)
        if call.cached_references is None:
            entry = KnownReferences(call.reference_tree, call.reference_key())
            tensors = read[2]
            tensors = tensors[: self.layout.num_references[1]]
            references = _guarded(lambda: entry, None, tensors)
            assert references is not None, "a subset of tensors that are all in one place"
            _store(self.cached_references, read[0][0], tensors, references)
        return True


# A fast path that has no plan for a call, and the arguments as it read them.
Missed = tuple[FastPath[T], ReadCall]


class FastPaths(Generic[T]):
    """The fast paths of a function, by call form: the number of positional arguments, the keywords,
    and the function modes around the call. They hold plans weakly.

    Args:
        roles: the roles of the function's arguments.
        name: its name in messages.
        has_ladder: whether batches are padded.
    """

    def __init__(self, roles: Roles, name: str, has_ladder: bool) -> None:
        self.roles = roles
        self.name = name
        self.has_ladder = has_ladder
        self.by_form = BoundedDict[tuple[Any, ...], tuple[FastPath[T], ...]](MAX_FORMS)

    def known_call(
        self, missed: Sequence[Missed[T]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | None:
        """Make a `Call` from the arguments of a call that fast paths have missed, reusing the known
        key of its arguments by reference; None if no earlier call had the same ones."""
        for fast_path, read in missed:
            if (cached_references := fast_path.find_known(read)) is not None:
                leaves = read[1][: fast_path.layout.num_references[0]]
                return make_call(self.roles, self.name, args, kwargs, cached_references, leaves)
        return None

    def add(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        modes: tuple[Any, ...],
        call: Call,
        plan: T,
        condition: Callable[[T], bool] | None,
    ) -> None:
        """Store a plan for the next call like this one, to be used while it exists and the
        condition holds."""
        form = (len(args), *kwargs, *modes)
        existing = self.by_form.get(form, ())
        for fast_path in existing:
            if fast_path.add(fast_path.layout.read(args, kwargs), call, plan, condition):
                return
        if len(existing) < MAX_FAST_PATHS:
            new = self._make(args, kwargs, call)
        else:
            new = None
        if new is None:
            return
        self.by_form[form] = (*existing, new)
        new.add(new.layout.read(args, kwargs), call, plan, condition)

    def _make(self, args: Sequence[Any], kwargs: dict[str, Any], call: Call) -> FastPath[T] | None:
        """Make the fast path for calls like `call`, whose arguments are `args` and `kwargs`; None
        if generated code cannot read them."""
        expressions = argument_expressions(self.roles.signature, len(args), tuple(kwargs))
        takers = {key: f"{self.name}({key})" for key in self.roles.donated}

        def arguments(values: dict[str, Any]) -> list[Argument]:
            return [
                Argument(expressions[key], value, takers.get(key)) for key, value in values.items()
            ]

        pairs = zip(call.copied_leaves, call.copied_axes(), strict=True)
        padded = (
            {id(leaf) for leaf, spec in pairs if spec is not None}
            if self.has_ladder
            else frozenset[int]()
        )
        try:
            layout = write_reader(
                self.roles.signature,
                arguments(call.statics),
                arguments(call.references),
                arguments(call.copied),
                padded,
            )
        except ForeignError:
            return None
        read = layout.read(args, kwargs)
        expected = (*call.reference_leaves, *call.copied_leaves)
        if read is None or [id(leaf) for leaf in read[1]] != [id(leaf) for leaf in expected]:
            return None  # the arguments changed since the call was made
        return FastPath(layout, call.num_donated)
