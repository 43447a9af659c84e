"""Capture: record a function for one key on buffers of its own, and leave no trace in the caller's state."""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.errors import CaptureError, WeftError
from weft.padding import inert, padded_shape
from weft.torchapi import storage_id, unseen
from weft.transforms.graphs.backends import Backend, Recording
from weft.transforms.graphs.backends.audit import Audit, Inputs
from weft.transforms.graphs.calls.buffers import InputBufferPool
from weft.transforms.graphs.calls.call import Call, invoke
from weft.transforms.graphs.calls.results import Outputs, refuse_opaque, refuse_recorded, settle
from weft.transforms.graphs.options import Graphable
from weft.trees import Axes, leaf_axes, leaves_with_names, tree_flatten, tree_leaves, tree_unflatten

ONE_AT_A_TIME = threading.RLock()
"""Captures of other threads set the same random generators."""

SAVED_BYTES = 2**26


def _records(external: Iterable[Tensor]) -> bool:
    """Whether autograd records what is done with these tensors from outside."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in external)


@attrs.define(eq=False)
class Entry:
    """One captured graph.

    Args:
        recording: the graph.
        buffers: what it reads its copied inputs from.
        axes: of each buffer that is padded; None for the rest.
        external: the tensors from outside that it reads and that could require grad: while one does, the function
            itself must run under autograd.
        consults_switches: it chose kernels by `weft.torchapi.backend_switches`.
        padding_sources: a tensor of padding for each small buffer that is padded with one number; None for others.
        buffer_bytes: of the input buffers and the padding beside them, what this graph added to what others have.
        operators: that it repeats, and the seconds that its capture took.
        last_use: the number of the replay that used it last, by which the least used is found.
    """

    recording: Recording
    buffers: tuple[Any, ...]
    axes: tuple[Axes | None, ...]
    external: tuple[Tensor, ...]
    consults_switches: bool
    padding_sources: tuple[Tensor | None, ...]
    buffer_bytes: int
    operators: int = 0
    seconds: float = 0.0
    last_use: int = 0

    def runs_itself(self) -> bool:
        """Whether the function itself must run here, for autograd to see its operators."""
        return _records(self.external)

    @property
    def outputs(self) -> Outputs:
        """Its outputs, and where each leaf of a result comes from."""
        found: Outputs = self.recording.outputs
        return found


@attrs.frozen(eq=False)
class Prepared:
    """A function and input buffers of its own: what a capture, or a dry run, runs.

    Args:
        run: the function on the buffers, its new state written back.
        names: of the leaves.
        references: the leaves by reference, the caller's own tensors.
        buffers: for the copied leaves.
        given: aliases of both, which the next run is given; each run has its own.
        arguments: what the runs so far were given.
        axes: of the buffers that are padded.
        donated: the tensors that `run` may write.
        untouched: a context that leaves the donated tensors and the random generators as they were.
        rewind: inside that context, gives the donated tensors their values back for another run: a state that counts
            tokens, or pages, has room for one.
    """

    run: Callable[[], Outputs]
    names: tuple[str, ...]
    references: tuple[Any, ...]
    buffers: tuple[Any, ...]
    given: list[Any]
    arguments: list[weakref.ref[Tensor]]
    axes: tuple[Axes | None, ...]
    donated: tuple[Tensor, ...]
    untouched: Callable[[Audit], AbstractContextManager[None]]
    rewind: Callable[[], None]


def prepare(of: Graphable, call: Call, descriptor: Any, input_buffers: InputBufferPool) -> Prepared:
    """Make buffers in `input_buffers` for calls like `call`, padded to `descriptor` (as they are if that is None).

    With a descriptor the buffers hold padding only, which by contract (law L2) changes no state: so a state of over
    `SAVED_BYTES`, such as a KV cache, is not copied to be restored.
    """
    with torch.no_grad():
        example = call.copied if descriptor is None else inert(call.copied, descriptor)
        leaves, tree = tree_flatten(example)
        buffers = tuple(input_buffers.buffer(i, x) if isinstance(x, Tensor) else x for i, x in enumerate(leaves))
    axes = tuple([None] * len(buffers) if descriptor is None else leaf_axes(example))
    donated = _tensors({n: call.references[n] for n in of.roles.donated if n in call.references})
    saved = [x for x in donated if descriptor is None or x.nbytes <= SAVED_BYTES]
    originals, count, grad = (*call.reference_leaves, *buffers), len(call.reference_leaves), torch.is_grad_enabled()
    requiring = [not grad and isinstance(x, Tensor) and x.requires_grad for x in (*call.reference_leaves, *leaves)]
    homes = tree_unflatten(call.reference_leaves, call.reference_tree)
    before = Before(saved)
    given, arguments = _aliases(originals, requiring), list[weakref.ref[Tensor]]()

    def run() -> Outputs:
        before.changed = True
        own, given[:] = [*given], _aliases(originals, requiring)
        arguments.extend(weakref.ref(x) for x in own if isinstance(x, Tensor))
        references = tree_unflatten(own[:count], call.reference_tree)
        copied = tree_unflatten(own[count:], tree)
        with torch.set_grad_enabled(grad):
            result = invoke(of.fn, of.roles, {**call.statics, **references, **copied})
        return settle(result, [homes[n] for n in of.roles.donated if n in homes], call.reference_leaves)

    @contextmanager
    def untouched(audit: Audit) -> Iterator[None]:
        with torch.no_grad(), before.restored():
            try:
                yield
            finally:
                audit.random.restore()

    names, references = tuple(call.leaf_names()), tuple(call.reference_leaves)
    return Prepared(run, names, references, buffers, given, arguments, axes, tuple(donated), untouched, before.rewind)


def audit_of(of: Graphable, prepared: Prepared, device: torch.device) -> Audit:
    """The audit of one run."""
    own = {id(x) for x in prepared.donated}
    inputs = [*zip(prepared.names, (*prepared.references, *prepared.buffers), strict=True)]
    return Audit(
        f"graphify({of.name})",
        Inputs(
            writable=prepared.donated,
            names=[(label, x) for label, x in inputs if isinstance(x, Tensor) and id(x) not in own],
            buffers=_tensors(prepared.buffers),
            lent=_tensors(prepared.references),
            generators=[x for _, x in inputs if isinstance(x, torch.Generator)],
            arguments=prepared.arguments,
        ),
        rewind=prepared.rewind,
        collectives=of.collectives,
        on_device=device if device.type == "cuda" else None,
    )


def capture(of: Graphable, call: Call, mode: str, descriptor: Any, backend: Backend) -> Entry:
    """Record a function for calls like `call`, padded to `descriptor` (as they are where that is None).

    The donated arguments are saved and restored, and so are random generators.

    Raises:
        CaptureError: the audit refused what the function did, or a result of a padded call cannot be unpadded.
        torch.OutOfMemoryError: there is no room for it; then nothing changed, and nothing but input_buffers is held.
    """
    start = time.perf_counter()
    if backend.enter is not None:
        backend.enter()  # another graph may still be reading the buffers, in another stream
    input_buffers, before = backend.input_buffers, backend.input_buffers.nbytes
    prepared = prepare(of, call, descriptor, input_buffers)
    split_at = of.split_at if mode == "piecewise" else frozenset()
    audit = audit_of(of, prepared, backend.device)
    with ONE_AT_A_TIME, prepared.untouched(audit), _noted(of.name, descriptor):
        recording = backend.capture(prepared.run, audit, split_at)
        prepared.given.clear()
        external = tuple(x for x in audit.external.values() if x.is_floating_point() or x.is_complex())
        refuse_opaque(audit.call, recording.outputs, call)
        audit.refuse_leaks(recording.outputs.leaves)
    if not _records(external):
        refuse_recorded(audit.call, recording.outputs, call, prepared.buffers)
    if split_at and recording.num_pieces == 1:
        called = sorted(audit.called)
        shown = ", ".join(called[:10]) + (", ..." if len(called) > 10 else "")
        seen = f"no call of {', '.join(sorted(split_at))}, where it was to be cut into pieces"
        raise CaptureError(f"graphify({of.name})", seen, f"name an operator that it calls: {shown or 'it calls none'}")
    if descriptor is not None:
        _refuse_unsized(of.name, recording.outputs, descriptor, prepared.axes)
    if not of.borrow:
        recording = backend.lend_memory(recording, audit.own - {storage_id(x) for x in prepared.donated})
    pairs = zip(prepared.buffers, prepared.axes, strict=True)
    padding_sources = tuple(input_buffers.padding_source(i, buffer, spec) for i, (buffer, spec) in enumerate(pairs))
    took = input_buffers.nbytes - before, audit.launches, time.perf_counter() - start
    return Entry(
        recording, prepared.buffers, prepared.axes, external, audit.consults_switches(), padding_sources, *took
    )


@contextmanager
def _noted(name: str, descriptor: Any) -> Iterator[None]:
    """Tell an error of the function's own that it ran on padded arguments."""
    try:
        yield
    except Exception as error:
        if descriptor is not None and not isinstance(error, WeftError):
            error.add_note(f"in {name}, captured for '{descriptor}': only fields with weft.axes(...) are padded to it")
        raise


@attrs.define(eq=False)
class Before:
    """What donated tensors held before a function ran on them.

    Args:
        tensors: them.
        changed: whether it ran since they were as they had been.
    """

    tensors: list[Tensor]
    changed: bool = False
    _saved: list[Tensor] = attrs.field(init=False, factory=list)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give the tensors their values back on the way out, whatever happened."""
        self._saved = [x.clone() for x in self.tensors]
        try:
            yield
        finally:
            self.rewind()
            self._saved = []

    def rewind(self) -> None:
        """Give the tensors their values back, if the function ran."""
        if self.changed:
            self.changed = False
            for tensor, old in zip(self.tensors, self._saved, strict=True):
                tensor.copy_(old)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _aliases(leaves: Iterable[Any], requiring: Iterable[bool]) -> list[Any]:
    """The same storages under new tensors, so that donation inside the function, or `requires_grad_()`, does not mark
    the caller's; those that are `requiring` grad do so from the start."""
    with unseen():
        pairs = zip(leaves, requiring, strict=True)
        return [x.data.requires_grad_(requires) if isinstance(x, Tensor) else x for x, requires in pairs]


def _refuse_unsized(name: str, outputs: Outputs, descriptor: Any, of_buffers: tuple[Axes | None, ...]) -> None:
    """Raise if a result does not say how it is unpadded; `of_buffers` are the axes of the arguments, for an example."""
    result = tree_unflatten(list(outputs.leaves), outputs.structure)
    own = next((name for spec in of_buffers if spec for name in spec.dims if name), "num_reqs")
    leaves = zip(leaves_with_names(result), leaf_axes(result), outputs.references, strict=True)
    for (path, leaf), spec, reference in leaves:
        if leaf is None or reference is not None:
            continue
        shape = f"of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
        seen = f"the result's leaf {path or '(the whole)'} {shape}"
        if spec is None or not isinstance(leaf, Tensor):
            raise CaptureError(
                f"graphify({name}, ladder=...)",
                f"{seen} does not say which of its dimensions follow the batch, so it cannot be unpadded",
                f"return it in a sized class: @weft.pytree, with attrs.field(metadata=weft.axes({own!r}))",
            )
        if (expected := padded_shape(leaf, spec, descriptor)) != tuple(leaf.shape):
            raise CaptureError(
                f"graphify({name}, ladder=...)",
                f"{seen}, where its axes {spec.dims} say {expected} for '{descriptor}'",
                "return a tensor of the size that its field declares",
            )
