"""Capture: record a function for one key on buffers of its own, and leave no trace in the caller's state."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.errors import CaptureError, WeftError
from weft.padding import inert, padded_shape
from weft.transforms.backends import Backend, Recording
from weft.transforms.backends.audit import Audit
from weft.transforms.call import Call, invoke
from weft.transforms.options import Graphable
from weft.transforms.results import Outputs, settle
from weft.trees import Axes, leaf_axes, leaves_with_names, tree_flatten, tree_leaves, tree_unflatten

SAVED_BYTES = 2**26
BLANK_BYTES = 2**20
"""Padding up to this size is copied from a tensor of padding, in the launch of the values; larger tails are filled."""


@attrs.define(eq=False)
class Entry:
    """One captured graph.

    Args:
        recording: the graph.
        buffers: what it reads its copied inputs from.
        axes: of each buffer that is padded; None for the rest.
        needs_autograd: it reads a tensor from outside that requires grad, so that under autograd the function itself
            must run.
        blanks: for each buffer that is padded with one number, a tensor of padding; None for large ones, and the rest.
        last_use: the number of the replay that used it last, by which the least used is found.
    """

    recording: Recording
    buffers: tuple[Any, ...]
    axes: tuple[Axes | None, ...]
    needs_autograd: bool
    blanks: tuple[Tensor | None, ...]
    last_use: int = 0

    def runs_itself(self) -> bool:
        """Whether the function itself must run here, for autograd to see its operators."""
        return self.needs_autograd and torch.is_grad_enabled()

    @property
    def outputs(self) -> Outputs:
        """Its outputs, and where each leaf of a result comes from."""
        return self.recording.outputs  # type: ignore[no-any-return]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the input buffers and the padding beside them."""
        return sum(x.nbytes for x in (*self.buffers, *self.blanks) if isinstance(x, Tensor))


@attrs.frozen(eq=False)
class Prepared:
    """A function and input buffers of its own: what a capture, or a dry run, runs.

    Args:
        run: the function on the buffers, its new state written back.
        names: of the leaves.
        references: the leaves by reference, the caller's own tensors.
        buffers: for the copied leaves.
        axes: of the buffers that are padded.
        donated: the tensors that `run` may write.
        untouched: a context that leaves the donated tensors and the random generators as they were.
    """

    run: Callable[[], Outputs]
    names: tuple[str, ...]
    references: tuple[Any, ...]
    buffers: tuple[Any, ...]
    axes: tuple[Axes | None, ...]
    donated: tuple[Tensor, ...]
    untouched: Callable[[Audit], AbstractContextManager[None]]


def prepare(of: Graphable, call: Call, descriptor: Any, device: torch.device) -> Prepared:
    """Make input buffers for calls like `call`, padded to `descriptor` (as they are where that is None).

    With a descriptor the buffers hold padding only, which by contract (law L2) changes no state: so a state of over
    `SAVED_BYTES`, such as a KV cache, is not copied to be restored.
    """
    with torch.no_grad():
        example = call.copied if descriptor is None else inert(call.copied, descriptor)
        leaves, tree = tree_flatten(example)
        buffers = tuple(torch.empty_like(x).copy_(x) if isinstance(x, Tensor) else x for x in leaves)
    axes = tuple([None] * len(buffers) if descriptor is None else leaf_axes(example))
    donated = _tensors({n: call.references[n] for n in of.roles.donated if n in call.references})
    saved = [x for x in donated if descriptor is None or x.nbytes <= SAVED_BYTES]

    def run() -> Outputs:
        references = tree_unflatten([_alias(x) for x in call.reference_leaves], call.reference_tree)
        homes = tree_unflatten(call.reference_leaves, call.reference_tree)
        copied = tree_unflatten(list(buffers), tree)
        with torch.enable_grad():  # no argument requires grad here; what the function makes itself may
            result = invoke(of.fn, of.roles, {**call.statics, **references, **copied})
        return settle(result, [homes[n] for n in of.roles.donated if n in homes], call.reference_leaves)

    @contextmanager
    def untouched(audit: Audit) -> Iterator[None]:
        with torch.no_grad(), _restored(saved), _generators_restored(audit, device):
            yield

    names, references = tuple(call.leaf_names()), tuple(call.reference_leaves)
    return Prepared(run, names, references, buffers, axes, tuple(donated), untouched)


def audit_of(of: Graphable, prepared: Prepared, device: torch.device) -> Audit:
    """The audit of one run."""
    own = {id(x) for x in prepared.donated}
    inputs = zip(prepared.names, (*prepared.references, *prepared.buffers), strict=True)
    others = [(label, x) for label, x in inputs if isinstance(x, Tensor) and id(x) not in own]
    return Audit(
        f"graphify({of.name})", prepared.donated, others, collectives=of.collectives, on_device=device.type == "cuda"
    )


def capture(of: Graphable, call: Call, mode: str, descriptor: Any, backend: Backend) -> Entry:
    """Record a function for calls like `call`, padded to `descriptor` (as they are where that is None).

    The donated arguments are saved and restored, and so are random generators.

    Raises:
        CaptureError: the audit refused what the function did, or a result of a padded call cannot be unpadded.
        torch.OutOfMemoryError: there is no room for it; then nothing is held, and nothing changed.
    """
    prepared = prepare(of, call, descriptor, backend.device)
    split_at = of.split_at if mode == "piecewise" else frozenset()
    audit = audit_of(of, prepared, backend.device)
    with prepared.untouched(audit), _noted(of.name, descriptor):
        recording = backend.capture(prepared.run, audit, split_at)
        audit.refuse_leaks(recording.outputs.leaves)
    if split_at and recording.num_pieces == 1:
        called = sorted(audit.called)
        shown = ", ".join(called[:10]) + (", ..." if len(called) > 10 else "")
        seen = f"no call of {', '.join(sorted(split_at))}, where it was to be cut into pieces"
        raise CaptureError(f"graphify({of.name})", seen, f"name an operator that it calls: {shown or 'it calls none'}")
    if descriptor is not None:
        _refuse_unsized(of.name, recording.outputs, descriptor, prepared.axes)
    needs_autograd = any(x.requires_grad for x in audit.external.values())
    blanks = tuple(_blank(buffer, spec) for buffer, spec in zip(prepared.buffers, prepared.axes, strict=True))
    return Entry(recording, prepared.buffers, prepared.axes, needs_autograd, blanks)


def _blank(buffer: Any, spec: Axes | None) -> Tensor | None:
    if spec is None or isinstance(spec.pad, str) or buffer.nbytes > BLANK_BYTES:
        return None
    return torch.full_like(buffer, spec.pad)


@contextmanager
def _noted(name: str, descriptor: Any) -> Iterator[None]:
    """Tell an error of the function's own that it ran on padded arguments."""
    try:
        yield
    except Exception as error:
        if descriptor is not None and not isinstance(error, WeftError):
            error.add_note(f"in {name}, captured for '{descriptor}': only fields with weft.axes(...) are padded to it")
        raise


@contextmanager
def _restored(tensors: list[Tensor]) -> Iterator[None]:
    """Give the tensors their values back on the way out, whatever happened."""
    saved = [x.clone() for x in tensors]
    try:
        yield
    finally:
        for tensor, old in zip(tensors, saved, strict=True):
            tensor.copy_(old)


@contextmanager
def _generators_restored(audit: Audit, device: torch.device) -> Iterator[None]:
    """Draw no random numbers, as far as anybody can tell: from the default generators, and from those of the audit."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    states = [g.get_state() for g in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        audit.restore_generators()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _alias(leaf: Any) -> Any:
    """The same storage under a new tensor, so that donation inside the function does not mark the caller's."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


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
