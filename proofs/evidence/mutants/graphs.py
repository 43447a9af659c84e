"""Planted bugs of graphs: in their keys, their replays and their captures."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import attrs
from torch import Tensor

from weft.batches.padding import inert, pad, padded_shape
from weft.proofs.evidence.mutants.mutant import Mutant, replace
from weft.proofs.evidence.runs.suite import find
from weft.transforms.graphs.backends.tape import Operation, TapeBackend, TapeRecording
from weft.transforms.graphs.cache import Cache, Entry
from weft.transforms.graphs.calls.buffers import CopyIn, GroupedCopy, tails
from weft.transforms.graphs.calls.builder import Template
from weft.transforms.graphs.calls.call import hashable_signature, key_of
from weft.transforms.graphs.calls.fast_path import FastPath
from weft.transforms.graphs.calls.key import LeafKey, leaf_key
from weft.transforms.graphs.calls.results import Handover, Outputs, hand_over
from weft.transforms.graphs.capture import Graph, SavedTensors
from weft.values.trees import find_descriptors, tree_flatten, tree_unflatten

_CACHE = "weft.transforms.graphs.cache"
_MEMORY = "weft.transforms.graphs.memory"
_KEY = "weft.transforms.graphs.calls.key"
_GRAPHIFIED = "weft.transforms.graphs.graphified"
_CAPTURE = "weft.transforms.graphs.capture"
_CALL = "weft.transforms.graphs.calls.call"
_BUFFERS = "weft.transforms.graphs.calls.buffers"
_RESULTS = "weft.transforms.graphs.calls.results"
_FAST_PATH = "weft.transforms.graphs.calls.fast_path"
_READER = "weft.transforms.graphs.calls.reader"
_TAPE = "weft.transforms.graphs.backends.tape"
_PADDING = "weft.batches.padding"


def _nothing(self: CopyIn, leaves: Sequence[Any]) -> None:
    pass


# The tail is what a smaller batch leaves of a buffer, and must be cleared of the larger batch
# before. It takes two calls of one graph, the larger one first.
def _stale_tail(buffer: Tensor, shape: Sequence[int]) -> Iterator[Tensor]:
    return iter(())


def _one_stale_row(buffer: Tensor, shape: Sequence[int]) -> Iterator[Tensor]:
    # Only one row is stale: a test that looks at the first row of padding, or pads by one graph of
    # the right size, does not come to it.
    return (tail[:-1] for tail in tails(buffer, shape))


def _first_side(buffer: Tensor, shape: Sequence[int]) -> Iterator[Tensor]:
    # A buffer of two padded dimensions has two tails. Batches of tokens have one and stay right, so
    # that images are needed.
    return (tail for tail in tails(buffer, shape) if tail.shape[1:] == buffer.shape[1:])


def _padding_of_ones(value: Tensor, spec: Any, descriptor: Any) -> Tensor:
    # The mask of an image is padded by the same function as its pixels: with ones, padding counts.
    target = value.new_ones(padded_shape(value, spec, descriptor))
    target[tuple(slice(size) for size in value.shape)].copy_(value)
    return target


def _forgetting(field: str) -> Callable[[], AbstractContextManager[Any]]:
    """Leaves one field out of a tensor's key."""

    def forgetful(leaf: Any, shape: Any, by_reference: bool) -> Any:
        key = leaf_key(leaf, shape, by_reference)
        # Calls that differ in this field alone then share a graph. A call that differs in another
        # field too still gets its own, which is why the law changes one thing at a time.
        nothing = dict[str, Any]({field: None})
        if isinstance(key, LeafKey):
            return attrs.evolve(key, **nothing)
        return key

    return replace(_CALL, "leaf_key", forgetful)


@contextmanager
def _no_statics() -> Iterator[None]:
    def blind(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: attrs.evolve(make(*args), statics=())

    # Signatures are made for calls and keys for graphs; either one alone would tell static values
    # apart.
    signed = replace(_GRAPHIFIED, "hashable_signature", blind(hashable_signature))
    with signed(), replace(_CACHE, "key_of", blind(key_of))():
        yield


def _key_without_loras(call: Any, mode: str, descriptor: Any, signature: Any = None) -> Any:
    return key_of(
        call, mode, descriptor and attrs.evolve(descriptor, num_active_loras=0), signature
    )


def _no_check(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    # The number of arguments still counts, so that only what the tensors are is unchecked.
    return lambda *args: len(args) == len(tensors)


# The reader of the fast path is generated source, and this leaves a comparison out of it. The slow
# path still compares: the second call of a kind is the first that can go wrong.
def _write_no_value(writer: Any, expression: str, value: Any, weakly: bool = False) -> None:
    pass


def _known_blindly(self: FastPath[Any], read: Any) -> Any:
    """The remembered references of one call are used for every other call of the same structure."""
    return next(
        (guarded.value() for entries in self.cached_references.values() for guarded in entries),
        None,
    )


class _Idle(Operation):
    """The operator at which a capture in pieces is cut does not run again in a replay."""

    def run(self) -> None:
        if self.func._schema.name not in (
            # Where the laws of pieces cut: attention for models, the others for pure functions. A
            # function that has none of these is not cut, and passes.
            "weft::paged_attention",
            "aten::mm",
            "aten::sort",
            "aten::_softmax",
        ):
            super().run()


@contextmanager
def _held_weakly() -> Iterator[None]:
    """The tape does not keep tensors that it reads alive: once their owner drops one, others write
    to its memory."""
    owners: list[tuple[weakref.ref[Tensor], Tensor]] = []

    def alias(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        owners.append((weakref.ref(value), value.detach()))
        return owners[-1][1]

    def replay(recording: TapeRecording) -> None:
        for owner, tensor in owners:
            if owner() is None and tensor.is_floating_point():
                # In place of the next owner of the memory. Freed memory often still holds the old
                # values, and a test would pass by luck.
                tensor.fill_(float("nan"))
        run(recording)

    run = TapeRecording.replay
    with replace(_TAPE, "_alias", alias)(), mock.patch.object(TapeRecording, "replay", replay):
        yield


def _live(tree: Any, descriptor: Any) -> Any:
    actual = find_descriptors(tree)[0]
    if descriptor.covers(actual):
        return pad(tree, descriptor)
    return inert(tree, descriptor)


@contextmanager
def _live_warm_up() -> Iterator[None]:
    """Treats the state as too large to be saved; once, or it would run out of pages before the law
    is checked."""
    # A limit below zero is smaller than any state, so that none is saved before the capture's runs.
    once = replace(_TAPE, "TapeBackend", lambda: TapeBackend(warm=[True]))
    with replace(_CAPTURE, "inert", _live)(), replace(_CAPTURE, "SAVED_BYTES", -1)(), once():
        yield


def _drop_in_use(self: Cache, key: Any, graph: Graph) -> None:
    """The memory of a graph is dropped, and it still answers calls."""
    for old in self.graphs():
        # The recording is frozen. Without operations a replay changes nothing, as one whose memory
        # is gone.
        object.__setattr__(old.recording, "operations", ())
    self.entries[key] = Entry(graph, key.references)


class _Unrestored(SavedTensors):
    # Results are right: only the state shows that the runs of the capture counted as steps.
    def rewind(self) -> None:
        self.changed = False


# The call returns the memory of the state with the old values in it. A function that updates its
# state in place has the new ones there already.
def _home_without_writing(value: Any, home: Tensor | None) -> Any:
    if home is None:
        return value
    return home


def _swapped(outputs: Outputs, buffers: Sequence[Any], borrow: bool, descriptor: Any) -> Handover:
    def swap(tensors: Any, references: Any, build: Callable[..., Any]) -> Any:
        leaves, structure = tree_flatten(build(tensors, references))
        return tree_unflatten([*leaves[1:2], *leaves[:1], *leaves[2:]], structure)

    planned = hand_over(outputs, buffers, borrow, descriptor)
    return attrs.evolve(planned, build=partial(swap, build=planned.build))


def _borrowing(outputs: Outputs, buffers: Sequence[Any], borrow: bool, descriptor: Any) -> Handover:
    # The result is right at the call, and changes with the next replay: someone must hold it until
    # then.
    return hand_over(outputs, buffers, True, descriptor)


def _lending_inputs(
    outputs: Outputs, buffers: Sequence[Any], borrow: bool, descriptor: Any
) -> Handover:
    # An argument that is returned as it came is the graph's input buffer, which the next call
    # fills. Only a function that returns one, or a view of one, shows it.
    return hand_over(outputs, (), borrow, descriptor)


def _for_the_graph_s_class(
    self: Template, descriptor: Any, builder: Callable[..., Any] = Template.builder
) -> Any:
    # What is wrong is the class that comes with the result, which only padded images have.
    return builder(self, None)


@contextmanager
def _blind_to_func() -> Iterator[None]:
    """A call inside a torch.func transform is treated as a plain one, on both paths."""
    with ExitStack() as stack:
        for home, name, value in (
            # Two questions, one on each path. The slow path alone would still see the transform.
            (_CALL, "in_functorch_transform", False),
            (_GRAPHIFIED, "in_plain_surroundings", True),
        ):
            stack.enter_context(replace(home, name, lambda value=value: value)())
        yield


_FILL_NOTHING = partial(mock.patch.object, CopyIn, "fill", _nothing)
_CALLS, _IMAGES = find("L1", "calls"), find("L1", "images")


@attrs.frozen(eq=False)
class _PadsOnce(GroupedCopy):
    """Writes padding only at the first call of a plan."""

    _calls: list[None] = attrs.field(factory=list, init=False)

    def copy(self, leaves: Sequence[Any]) -> None:
        if not self._calls:
            GroupedCopy.copy(self, leaves)
        # From the second call on only values are copied. A plan is for one shape, so it takes a
        # call of another shape in between to leave something in the padding.
        for target, value in zip(
            self.targets, self.pick(leaves) if self._calls else (), strict=False
        ):
            target.copy_(value)
        self._calls.append(None)


# The bugs of `graphify`, its back ends and its padding.
GRAPHS = (
    Mutant("a replay reads its capture's inputs", find("L1", "models"), _FILL_NOTHING),
    Mutant(
        "a larger batch's tail stays", find("L1", "models"), replace(_BUFFERS, "tails", _stale_tail)
    ),
    Mutant(
        "one row of padding is stale",
        find("L1", "models"),
        replace(_BUFFERS, "tails", _one_stale_row),
    ),
    Mutant(
        "new state is not written",
        find("L1", "pure"),
        replace(_RESULTS, "_write_back", _home_without_writing),
    ),
    Mutant("two results change places", find("L1", "pure"), replace(_CACHE, "hand_over", _swapped)),
    Mutant("the key forgets addresses", find("L1", "pure"), _forgetting("address")),
    Mutant(
        "padding is written once",
        find("L1", "functions under a ladder"),
        replace(_BUFFERS, "GroupedCopy", _PadsOnce),
    ),
    Mutant(
        "a capture counts as a step",
        find("L1", "functions under a ladder"),
        replace(_CAPTURE, "SavedTensors", _Unrestored),
    ),
    Mutant("the key forgets shapes", _CALLS, _forgetting("shape")),
    Mutant("the key forgets strides", _CALLS, _forgetting("stride")),
    Mutant("the key forgets types", _CALLS, _forgetting("dtype")),
    Mutant("the key forgets devices", _CALLS, _forgetting("device")),
    Mutant("the key forgets lazy conjugates", _CALLS, _forgetting("flags")),
    Mutant("the key forgets static values", _CALLS, _no_statics),
    Mutant(
        "the key takes 1, 1.0 and True for one",
        _CALLS,
        replace(_KEY, "value_key", lambda value: (object, value)),
    ),
    Mutant(
        "the fast path checks no tensor", _CALLS, replace(_FAST_PATH, "tensors_check", _no_check)
    ),
    Mutant(
        "the fast path forgets static values",
        _CALLS,
        replace(_READER, "_write_value", _write_no_value),
    ),
    Mutant(
        "any parameters are recalled",
        _CALLS,
        partial(mock.patch.object, FastPath, "find_known", _known_blindly),
    ),
    Mutant(
        "only one side of an image is padded anew", _IMAGES, replace(_BUFFERS, "tails", _first_side)
    ),
    Mutant(
        "an image has the class of its graph",
        _IMAGES,
        partial(mock.patch.object, Template, "builder", _for_the_graph_s_class),
    ),
    Mutant(
        "padding counts as pixels",
        find("L2", "images"),
        replace(_PADDING, "grow", _padding_of_ones),
    ),
    Mutant("attention is not run again", find("L5", "models"), replace(_TAPE, "Operation", _Idle)),
    Mutant(
        "a split operator is not run again", find("L5", "pure"), replace(_TAPE, "Operation", _Idle)
    ),
    Mutant("the key forgets the LoRAs", find("L7"), replace(_CACHE, "key_of", _key_without_loras)),
    # Outputs are right; the warm-up has taken a step on the caller's state, which the law reads.
    Mutant("the warm-up runs on the live batch", find("L8", "models"), _live_warm_up),
    Mutant(
        "the state is not restored",
        find("L8", "pure"),
        replace(_CAPTURE, "SavedTensors", _Unrestored),
    ),
    Mutant(
        "results are borrowed", find("L9", "ownership"), replace(_CACHE, "hand_over", _borrowing)
    ),
    Mutant(
        # All results are right. What is broken is the promise that a donated state says so when it
        # is used.
        "donation leaves the old value alive",
        find("L9", "ownership"),
        replace(_GRAPHIFIED, "donate", lambda tree, to: tree),
    ),
    Mutant(
        "input buffers are lent",
        find("L9", "borrowed"),
        replace(_CACHE, "hand_over", _lending_inputs),
    ),
    Mutant("a live input is held weakly", find("L9", "keeps"), _held_weakly),
    Mutant(
        "a graph in use is dropped",
        find("L9", "dropped"),
        partial(mock.patch.object, Cache, "_insert", _drop_in_use),
    ),
    Mutant(
        # Classes that are not measured are interpolated: a ladder so short that each class is
        # measured gives the right sum.
        "an estimate forgets classes",
        find("L14"),
        replace(_MEMORY, "interpolate", lambda points, size: 0),
    ),
    Mutant(
        "an estimate leaves its steps in the state",
        find("L14"),
        replace(_CAPTURE, "SavedTensors", _Unrestored),
    ),
    Mutant(
        "a torch.func transform is not inlined", find("L15", "functions of graphs"), _blind_to_func
    ),
    Mutant(
        "a replay reads its capture's inputs", find("L15", "graphs of functions"), _FILL_NOTHING
    ),
)
