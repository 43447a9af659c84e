"""`capture` records a function for one key on its own input buffers, and restores the caller's
state afterwards."""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from weft.batches.padding import inert, padded_shape
from weft.errors import CaptureError, WeftError
from weft.ops.constants import constant
from weft.torchapi.frames import clear_frames
from weft.torchapi.private import is_fake, storage_id, switches_put_back, unowned, unseen
from weft.torchapi.watching import OperatorWatch
from weft.transforms.graphs.backends import Backend, Recording
from weft.transforms.graphs.backends.audit import Audit, Inputs
from weft.transforms.graphs.backends.randomness import UnknownGenerator
from weft.transforms.graphs.calls.aliasing import Storages
from weft.transforms.graphs.calls.buffers import InputBufferPool
from weft.transforms.graphs.calls.call import Call, invoke
from weft.transforms.graphs.calls.key import OF_OTHERS
from weft.transforms.graphs.calls.results import (
    Outputs,
    make_outputs,
    refuse_opaque,
    refuse_requiring_grad,
)
from weft.transforms.graphs.compiler.compilations import (
    Compilations,
    failure_text,
    record_compiled,
)
from weft.transforms.graphs.compiler.program import Program
from weft.transforms.graphs.compiler.trace import Traced, Tracer, trace
from weft.transforms.graphs.dispatch import Decision
from weft.transforms.graphs.one_at_a_time import ONE_AT_A_TIME
from weft.transforms.graphs.options import Graphable
from weft.transforms.graphs.outside import Outside, PythonState
from weft.values.containers import changed_container, containers_in
from weft.values.trees import (
    Axes,
    leaf_axes,
    leaves_with_names,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)

# The size in bytes up to which a donated tensor is saved while a capture runs on padding.
# 64 MiB: states of tests and notebooks are saved, and caches of engines, which take most of a
# device, are not (there is no room for a copy).
SAVED_BYTES = 2**26


def _autograd_records(external: Iterable[Tensor]) -> bool:
    """Whether autograd records operations on these external tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in external)


@attrs.define(eq=False)
class Graph:
    """One captured graph.

    Args:
        title: what was captured, as texts name it (`title_of`).
        recording: the graph.
        buffers: its input buffers, for the copied arguments.
        axes: the axes of each buffer that is padded; None for the siblings.
        external: the tensors from outside that it reads and that could require grad. While one of
            them does and grad mode is on, the function itself must run.
        outside: everything that it reads from outside, to see whether that has changed.
        consults_switches: whether it chose kernels by `weft.torchapi.private.backend_switches`.
        padding_sources: a tensor of padding for each small buffer that is padded with one number;
            None for the siblings.
        buffer_bytes: the bytes that this graph added to the shared input buffers and padding
            sources.
        operators: the number of operators that it repeats, or that it was compiled from.
        seconds: the duration of its capture.
        last_use: the number of the last replay that used it, for finding the least recently used
            graph.
        watch: what watched the recorded run; None if nothing did.
        program: what a compiler made of it; None: it repeats the operators as they are.
        why_not_compiled: why the function's compiler made nothing of it; empty if it did, or if
            there is none.
    """

    title: str
    recording: Recording
    buffers: tuple[Any, ...]
    axes: tuple[Axes | None, ...]
    external: tuple[Tensor, ...]
    outside: Outside
    consults_switches: bool
    padding_sources: tuple[Tensor | None, ...]
    buffer_bytes: int
    operators: int = 0
    seconds: float = 0.0
    last_use: int = 0
    watch: OperatorWatch | None = None
    program: Program | None = None
    why_not_compiled: str = ""

    def needs_autograd(self) -> bool:
        """Whether the function itself must run now, because autograd must see its operators."""
        return _autograd_records(self.external)

    @property
    def outputs(self) -> Outputs:
        """The outputs of the recording."""
        outputs: Outputs = self.recording.outputs
        return outputs


@attrs.frozen(eq=False)
class Prepared:
    """A function with its own input buffers, ready for a capture or a dry run.

    Args:
        run: runs the function on the buffers, and writes its next state back.
        names: makes the names of the leaves.
        references: the leaves by reference: the caller's own tensors, or fake ones.
        buffers: the buffers for the copied leaves.
        run_buffers: the same, or the fake tensors that a run has in their place.
        aliases: aliases of references and buffers for the next run; each run has new ones.
        arguments: weak references to the arguments of all runs so far.
        returned: weak references to the tensors that the last run returned.
        axes: the axes of the buffers that are padded.
        num_donated: the number of donated leaves, which come first, and which `run` may write.
        restored: a context that restores the donated tensors and the random generators on exit.
        rewind: inside that context, restores the donated tensors for another run. A state that
            counts tokens or pages has room for one run only.
        refuse_changes: takes the text of the call, and raises an error if the last run changed
            state that the function keeps in Python.
    """

    run: Callable[[], Outputs]
    names: Callable[[], list[str]]
    references: tuple[Any, ...]
    buffers: tuple[Any, ...]
    run_buffers: tuple[Any, ...]
    aliases: list[Any]
    arguments: list[weakref.ref[Tensor]]
    returned: list[weakref.ref[Tensor]]
    axes: tuple[Axes | None, ...]
    num_donated: int
    restored: Callable[[Audit], AbstractContextManager[None]]
    rewind: Callable[[], None]
    refuse_changes: Callable[[str], None]


def prepare(
    graphable: Graphable,
    call: Call,
    descriptor: Any,
    input_buffers: InputBufferPool,
    fake: Callable[[Tensor], Tensor] | None = None,
) -> Prepared:
    """Make buffers in `input_buffers` for calls like `call`, padded to `descriptor`, or unpadded if
    `descriptor` is None. With `fake`, the function runs on the tensors that it returns in place of
    the arguments by reference and the buffers.

    With a descriptor the buffers hold only padding, which by contract (law L2) changes no state. So
    a state of over `SAVED_BYTES`, such as a KV cache, is not saved.
    """
    with torch.no_grad():
        if descriptor is None:
            example = call.copied
        else:
            # Padding alone, so that a capture for a class changes no row of the caller's state.
            example = inert(call.copied, descriptor)
        leaves, tree = tree_flatten(example)
        buffers = tuple(
            input_buffers.buffer(i, x) if isinstance(x, Tensor) else x for i, x in enumerate(leaves)
        )
    axes = tuple([None] * len(buffers) if descriptor is None else leaf_axes(example))
    reference_leaves: Sequence[Any] = call.reference_leaves
    run_buffers: Sequence[Any] = buffers
    if fake is not None:
        reference_leaves = _faked(fake, reference_leaves)
        run_buffers = _faked(fake, buffers)
    donated = [x for x in call.reference_leaves[: call.num_donated] if isinstance(x, Tensor)]
    kept = _unwritten(graphable, donated, call.reference_leaves[call.num_donated :])
    saved = [x for x in donated if is_saved(x, descriptor)]
    if fake is not None:
        # A run on fake tensors writes nothing.
        kept, saved = _faked(fake, kept), []
    originals, count, grad = (
        (*reference_leaves, *run_buffers),
        len(reference_leaves),
        torch.is_grad_enabled(),
    )
    # Noted before any run: a run may change what autograd says of the caller's tensors.
    likes = [_Like.of(x) for x in (*call.reference_leaves, *call.copied_leaves)]
    state = SavedTensors(saved)
    in_python = PythonState(graphable.fn)
    aliases, arguments = _aliases(originals, likes, grad), list[weakref.ref[Tensor]]()
    returned = list[weakref.ref[Tensor]]()

    def run() -> Outputs:
        state.changed = True
        # The next run's aliases are made before this run, which may change what autograd says of
        # the originals.
        current_aliases, aliases[:] = [*aliases], _aliases(originals, likes, grad)
        arguments.extend(weakref.ref(x) for x in current_aliases if isinstance(x, Tensor))
        references = tree_unflatten(current_aliases[:count], call.reference_tree)
        copied = tree_unflatten(current_aliases[count:], tree)
        containers = containers_in(references | copied)
        # The run's own changes of Python state are found by comparing it with the state noted here.
        in_python.begin_run()
        with torch.set_grad_enabled(grad), constant(kept), _unchanged_switches(graphable.name):
            result = invoke(
                graphable.fn,
                graphable.roles,
                {**call.statics, **references, **copied},
                call.keywords,
            )
        returned[:] = [weakref.ref(x) for x in tree_leaves(result) if isinstance(x, Tensor)]
        if (changed := changed_container(containers)) is not None:
            problem = (
                f"it changes its argument {changed} in place, which a replay does not do to the"
                " caller's"
            )
            raise CaptureError(
                f"graphify({graphable.name})", problem, "return a new one with the new values"
            )
        # New objects: the function may have marked the aliases that it was called with
        # (`requires_grad_()`, donation), and they are not written through.
        targets = tree_unflatten(_plain_aliases(reference_leaves), call.reference_tree)
        donated = [targets[n] for n in graphable.roles.donated if n in targets]
        return make_outputs(result, donated, reference_leaves)

    @contextmanager
    def restored(audit: Audit) -> Iterator[None]:
        # Without gradients: restoring a parameter's value is a write in place, which autograd
        # refuses.
        with torch.no_grad(), state.restored():
            # Also after an error: a refused capture must leave no trace.
            try:
                yield
            finally:
                audit.random.restore()
                audit.restore_gradients()

    return Prepared(
        run=run,
        names=call.leaf_names,
        references=tuple(reference_leaves),
        buffers=buffers,
        run_buffers=tuple(run_buffers),
        aliases=aliases,
        arguments=arguments,
        returned=returned,
        axes=axes,
        num_donated=call.num_donated,
        restored=restored,
        rewind=state.rewind,
        refuse_changes=in_python.refuse_changes,
    )


def is_saved(donated: Tensor, descriptor: Any) -> bool:
    """Whether a donated tensor is saved before a capture for a class runs on it."""
    return descriptor is None or donated.nbytes <= SAVED_BYTES


def _faked(fake: Callable[[Tensor], Tensor], leaves: Iterable[Any]) -> list[Any]:
    return [fake(x) if isinstance(x, Tensor) else x for x in leaves]


@contextmanager
def _unchanged_switches(name: str) -> Iterator[None]:
    """Context of a run: puts torch's settings back afterwards, and refuses a run that left one
    changed."""
    # Even if the run is refused, the settings must be as before: the caller goes on after the
    # error.
    put_back = switches_put_back()
    changed = list[str]()
    try:
        yield
    finally:
        changed += put_back()
    if changed:
        problem = (
            f"it changes a setting of torch ({', '.join(changed)}) for the code after it, which a"
            " replay does not do"
        )
        instead = (
            "set it before the call; or in a context that ends in the function, such as with"
            " torch.no_grad():"
        )
        raise CaptureError(f"graphify({name})", problem, instead)


def _unwritten(
    graphable: Graphable, donated: Sequence[Tensor], leaves: Iterable[Any]
) -> list[Tensor]:
    """The leaves by reference that the function cannot write. The audit refuses writes to them,
    except by collectives. A leaf that shares memory with a donated one can be written."""
    # A collective writes its argument, also where the function only reads the result.
    if graphable.collectives:
        return []
    storages = Storages(donated)
    tensors = (x for x in leaves if isinstance(x, Tensor) and x.layout is torch.strided)
    return [x for x in tensors if not storages.meet(x)]


def audit_of(graphable: Graphable, prepared: Prepared, device: torch.device) -> Audit:
    """Make the audit of one run."""
    return Audit(
        f"graphify({graphable.name})",
        Inputs(
            leaves=(*prepared.references, *prepared.run_buffers),
            labels=prepared.names,
            num_donated=prepared.num_donated,
            num_references=len(prepared.references),
            arguments=prepared.arguments,
            returned=prepared.returned,
        ),
        rewind=prepared.rewind,
        collectives=graphable.collectives,
        on_device=device if device.type == "cuda" else None,
    )


def title_of(name: str, descriptor: Any) -> str:
    """A function's name, and the class for which it is captured, if there is one."""
    if descriptor is None:
        return name
    return f"{name} for '{descriptor}'"


def capture(
    graphable: Graphable,
    call: Call,
    mode: str,
    descriptor: Any,
    backend: Backend,
    watch: Callable[[Prepared], OperatorWatch] | None = None,
    compilations: Compilations | None = None,
) -> Graph:
    """Record a function for calls like `call`, padded to `descriptor`, or unpadded if `descriptor`
    is None. `watch` makes a watch for the next run; the graph keeps the watch of the recorded run.
    With `compilations`, what is recorded is compiled first.

    The donated arguments and the random generators are saved and restored.

    Raises:
        CaptureError: the audit refused something that the function did, or a result of a padded
            call cannot be unpadded.
        torch.OutOfMemoryError: the device's memory is full. Then no state has changed, and only
            input buffers are still allocated.
    """
    start = time.perf_counter()
    input_buffers = backend.input_buffers
    # The pool is shared by all graphs, so a graph is charged only with what it adds.
    before = backend.input_buffers.nbytes
    split_at = _split_at(graphable, mode)
    with ONE_AT_A_TIME:
        captured = None
        failure: Exception | None = None
        if compilations is not None:
            captured, failure = _compile(
                graphable, call, split_at, mode, descriptor, backend, compilations
            )
        if captured is None:
            captured = _record(graphable, call, split_at, descriptor, backend, watch)
        if compilations is not None and failure is not None:
            # Only now: if the function raises an error of its own, that is what the user sees.
            compilations.note_failure(graphable, title_of(graphable.name, descriptor), failure)
    prepared = captured.prepared
    audit = captured.audit
    recording = captured.recording
    external = tuple(x for x in audit.external.values() if x.is_floating_point() or x.is_complex())
    # If autograd records on external tensors, calls run the function itself, whose results may
    # require grad.
    if not _autograd_records(external):
        leaves = (*prepared.references, *prepared.run_buffers)
        refuse_requiring_grad(audit.call, captured.outputs, call, leaves)
    if split_at and descriptor is None and recording.num_pieces == 1:
        # Without a ladder only: one piece means that the function never calls an operator of
        # `split_at`, which is a misspelt name more often than an intention.
        called = sorted(audit.called)
        shown = ", ".join(called[:10]) + (", ..." if len(called) > 10 else "")
        problem = f"no call of {', '.join(sorted(split_at))}, which split_at names"
        raise CaptureError(
            f"graphify({graphable.name})",
            problem,
            f"name an operator that it calls: {shown or 'it calls none'}",
        )
    if descriptor is not None:
        _refuse_unsized(graphable.name, recording.outputs, descriptor, prepared.axes)
    # Results are copied after each replay, so later captures may reuse the memory of the outputs.
    if not graphable.borrow:
        references = {storage_id(x) for x in call.reference_leaves if isinstance(x, Tensor)}
        recording = backend.release_output_memory(recording, captured.allocated)
        recording = attrs.evolve(recording, outputs=_without_owning(recording.outputs, references))
    pairs = zip(prepared.buffers, prepared.axes, strict=True)
    with backend.allocating():
        padding_sources = tuple(
            input_buffers.padding_source(i, buffer, spec) for i, (buffer, spec) in enumerate(pairs)
        )
    return Graph(
        title_of(graphable.name, descriptor),
        recording,
        prepared.buffers,
        prepared.axes,
        external,
        Outside(
            graphable.fn,
            [*audit.external.values()],
            thorough=backend.device.type == "cpu",
            without_gradient=audit.without_gradient,
            with_mode_in_key=graphable.roles.modules(call.statics),
        ),
        audit.consults_switches(),
        padding_sources,
        buffer_bytes=input_buffers.nbytes - before,
        operators=audit.launches,
        seconds=time.perf_counter() - start,
        watch=captured.watch,
        program=captured.program,
        why_not_compiled="" if failure is None else failure_text(failure),
    )


def _split_at(graphable: Graphable, mode: str) -> frozenset[str]:
    """The operators that stay outside the graphs of a mode."""
    if mode == "piecewise":
        return graphable.split_at
    return frozenset()


@attrs.frozen(eq=False)
class _Captured:
    """A recording, and what it was made with.

    Args:
        recording: the recording.
        prepared: the function and its buffers.
        audit: the audit of the run.
        outputs: the outputs of the run.
        allocated: the storages that replays allocate or overwrite, as `storage_id` gives them.
        watch: what watched the run.
        program: what a compiler made of the run; None if it is recorded as it is.
    """

    recording: Any
    prepared: Prepared
    audit: Audit
    outputs: Outputs
    allocated: Set[int]
    watch: OperatorWatch | None = None
    program: Program | None = None


def _record(
    graphable: Graphable,
    call: Call,
    split_at: frozenset[str],
    descriptor: Any,
    backend: Backend,
    watch: Callable[[Prepared], OperatorWatch] | None,
) -> _Captured:
    """Record a function as it is."""
    with backend.allocating():
        prepared = prepare(graphable, call, descriptor, backend.input_buffers)
    watches: list[OperatorWatch] = []

    def watched() -> Outputs:
        assert watch is not None
        # A back end may run the function more than once; the last run is the recorded one.
        # A new watch for each run, and the last one wins.
        watches[:] = [watch(prepared)]
        with watches[0]:
            return prepared.run()

    # Made under the lock, because it saves the states of generators that captures set.
    audit = audit_of(graphable, prepared, backend.device)
    with prepared.restored(audit), _with_padding_note(graphable.name, descriptor):
        run = prepared.run if watch is None else watched
        recording = _checked(lambda: backend.capture(run, audit, split_at), prepared, audit, call)
    allocated = audit.owned_storages - audit.writable
    watched_by = next(iter(watches), None)
    return _Captured(recording, prepared, audit, recording.outputs, allocated, watched_by)


def _checked(record: Callable[[], Any], prepared: Prepared, audit: Audit, call: Call) -> Any:
    """Record a run, refuse it if it changed or kept something, and give its outputs new objects."""
    # Recorded here, so that no caller's variable keeps the outputs.
    recording = record()
    # They would keep the caller's tensors alive for as long as the graph.
    prepared.aliases.clear()
    prepared.refuse_changes(audit.call)
    refuse_opaque(audit.call, recording.outputs, call)
    audit.refuse_leaks(recording.outputs.leaves)
    recording = attrs.evolve(
        recording, outputs=_renewed(recording.outputs, audit.owned_storages - audit.writable)
    )
    # With new output objects, a result that is still alive is one that the function keeps.
    audit.refuse_kept_results()
    return recording


def _compile(
    graphable: Graphable,
    call: Call,
    split_at: frozenset[str],
    mode: str,
    descriptor: Any,
    backend: Backend,
    compilations: Compilations,
    *,
    records: bool = True,
) -> tuple[_Captured | None, Exception | None]:
    """Compile a function, and record what the compiler made if `records`; or return why it cannot
    be compiled."""
    # On other pools than the back end's: most classes are traced for their sizes only.
    trace_class = partial(_trace, graphable, call, backend)
    siblings = _similar_classes(graphable, call, mode, descriptor)
    try:
        buffers = backend.input_buffers if records else InputBufferPool()
        traced, prepared, audit = trace_class(descriptor, buffers)
        sizes = sizes_of(prepared.axes, descriptor)
        program = compilations.program_for(
            traced,
            sizes,
            [
                (partial(_traced_only, trace_class, other), sizes_of(prepared.axes, other))
                for other in siblings
            ],
            split_at,
        )
    except WeftError:
        raise
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        clear_frames(error)  # they hold the tensors of the trace
        return None, error
    if not records:
        return None, None
    donated = [x for x in call.reference_leaves[: call.num_donated] if isinstance(x, Tensor)]
    donated = [x for x in donated if is_saved(x, descriptor)]
    recording = record_compiled(
        program, sizes, traced, audit, backend, call.reference_leaves, donated, split_at
    )
    inputs = (*call.reference_leaves, *prepared.buffers)
    allocated = {storage_id(x) for x in recording.outputs.leaves if isinstance(x, Tensor)}
    allocated -= {storage_id(x) for x in inputs if isinstance(x, Tensor)}
    captured = _Captured(recording, prepared, audit, traced.outputs, allocated, program=program)
    return captured, None


def compile_class(
    graphable: Graphable,
    call: Call,
    decision: Decision[Any],
    backend: Backend,
    compilations: Compilations,
) -> None:
    """Compile a function for a class, for its capture later on. If it cannot be compiled, that
    capture says so.

    Raises:
        CaptureError: the function cannot be captured.
    """
    mode, descriptor = decision.mode, decision.descriptor
    with ONE_AT_A_TIME:
        split_at = _split_at(graphable, mode)
        _compile(graphable, call, split_at, mode, descriptor, backend, compilations, records=False)


def _trace(
    graphable: Graphable, call: Call, backend: Backend, descriptor: Any, buffers: InputBufferPool
) -> tuple[Traced, Prepared, Audit]:
    """Trace a function for a class."""
    try:
        return _trace_once(graphable, call, backend, descriptor, buffers, rehearse=False)
    except (CaptureError, UnknownGenerator) as error:
        refusal = error
    # A first run may do what later ones do not: fill a cache, make a generator known.
    try:
        return _trace_once(graphable, call, backend, descriptor, buffers, rehearse=True)
    except (WeftError, UnknownGenerator):
        raise
    except Exception:
        # It may have met a tensor of the first run, which the function keeps.
        raise refusal from None


def _trace_once(
    graphable: Graphable,
    call: Call,
    backend: Backend,
    descriptor: Any,
    buffers: InputBufferPool,
    *,
    rehearse: bool,
) -> tuple[Traced, Prepared, Audit]:
    tracer = Tracer()
    with backend.allocating():
        prepared = prepare(graphable, call, descriptor, buffers, tracer.fake)
    audit = audit_of(graphable, prepared, backend.device)
    with prepared.restored(audit), _with_padding_note(graphable.name, descriptor):
        traced = _checked(
            lambda: trace(
                prepared.run,
                audit,
                tracer,
                unable_to_loop=backend.unable_to_loop,
                rehearse=rehearse,
            ),
            prepared,
            audit,
            call,
        )
    return traced, prepared, audit


def _traced_only(trace_class: Callable[..., tuple[Traced, Prepared, Audit]], other: Any) -> Traced:
    return trace_class(other, InputBufferPool())[0]


def sizes_of(axes: Sequence[Axes | None], descriptor: Any) -> dict[str, int]:
    """The sizes that a class gives, by the names of the descriptor's attributes."""
    names = {name for spec in axes if spec is not None for name in spec.sizes()}
    return {name: int(getattr(descriptor, name)) for name in sorted(names)}


# The smallest size for which a compilation is shared: torch's operators treat 0 and 1 in other ways.
_LEAST_SHARED = 2


def _similar_classes(graphable: Graphable, call: Call, mode: str, descriptor: Any) -> list[Any]:
    """A few other classes of the ladder that may share a compilation with one."""
    ladder = graphable.ladder
    if ladder is None or descriptor is None:
        return []
    axes = leaf_axes(call.copied)
    mine = sizes_of(axes, descriptor)
    if min(mine.values(), default=0) < _LEAST_SHARED:
        return []
    similar = [
        other
        for other in (ladder.piecewise if mode == "piecewise" else ladder.full)
        if other != descriptor
        and min(sizes_of(axes, other).values()) >= _LEAST_SHARED
        and _rest_of(other, mine) == _rest_of(descriptor, mine)
    ]
    # The farthest apart, so that numbers that are equal by chance differ in one of them.
    similar.sort(key=lambda other: sum(sizes_of(axes, other).values()))
    return [similar[0], *similar[-1:]] if len(similar) > 1 else similar


def _rest_of(descriptor: Any, sizes: Iterable[str]) -> dict[str, Any]:
    """The fields of a descriptor besides its sizes."""
    if not attrs.has(type(descriptor)):
        return {}
    values = attrs.asdict(descriptor, recurse=False)
    return {name: value for name, value in values.items() if name not in sizes}


@contextmanager
def _with_padding_note(name: str, descriptor: Any) -> Iterator[None]:
    """Add to an error raised by the function itself a note that it ran on padded arguments."""
    try:
        yield
    # Errors of weft already name the class of the batch.
    except Exception as error:
        if descriptor is not None and not isinstance(error, WeftError):
            error.add_note(
                f"in {name}, captured for '{descriptor}': only fields with weft.axes(...) are"
                " padded to it"
            )
        raise


@attrs.define(eq=False)
class SavedTensors:
    """Saves the values of donated tensors before a function runs on them, and restores them.

    Args:
        tensors: the donated tensors.
        changed: whether the function has run since the tensors last held these values.
    """

    tensors: list[Tensor]
    changed: bool = False
    _saved: list[Tensor] = attrs.field(init=False, factory=list)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context that restores the tensors on exit, also after an error."""
        self._saved = [x.clone() for x in self.tensors]
        try:
            yield
        finally:
            self.rewind()
            self._saved = []

    def rewind(self) -> None:
        """Restore the tensors, if the function ran since they were saved or restored."""
        # A copy of a large state is expensive, and often no run has happened since the last one.
        if self.changed:
            self.changed = False
            for tensor, old in zip(self.tensors, self._saved, strict=True):
                tensor.copy_(old)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@attrs.frozen(eq=False)
class _Like:
    """A caller's leaf, and what autograd says of it before any run. Once a run has written to the
    base of a view that was made without gradients, autograd no longer tells.

    Args:
        leaf: the tensor or value.
        requires_grad: whether it is a tensor that requires grad.
        is_result: whether it requires grad as the result of an operator, and not as a leaf.
    """

    leaf: Any
    requires_grad: bool
    is_result: bool

    @classmethod
    def of(cls, leaf: Any) -> "_Like":
        """The leaf with its present state."""
        requires_grad = isinstance(leaf, Tensor) and leaf.requires_grad
        return cls(leaf, requires_grad, requires_grad and not leaf.is_leaf)


def _aliases(leaves: Iterable[Any], likes: Iterable[_Like], grad: bool) -> list[Any]:
    """New tensor objects on the same storages, so that donation or `requires_grad_()` inside the
    function does not mark the caller's tensors. They resemble the caller's: parameters stay
    parameters, leaves of autograd stay leaves, attributes are the same, and a tensor that was
    passed twice is one object. In grad mode (`grad`) none of them requires grad."""
    alias_by_id: dict[int, Any] = {}
    with unseen():
        return [
            alias_by_id.setdefault(id(like.leaf), _alias(x, like, grad))
            for x, like in zip(leaves, likes, strict=True)
        ]


def _alias(leaf: Any, like: _Like, grad: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    requires_grad = like.requires_grad and not grad
    alias = leaf.data
    if type(like.leaf) is nn.Parameter:
        # A function may ask `isinstance(x, Parameter)`.
        alias = nn.Parameter(alias, requires_grad)
    elif requires_grad:
        alias.requires_grad_()
        if like.is_result:
            with torch.enable_grad():
                # The result of an operator is not a leaf: `x.is_leaf` and `x.grad` behave as for
                # the caller's.
                alias = alias.view_as(alias)
    attributes = vars(like.leaf).items()
    vars(alias).update(
        {name: value for name, value in attributes if not name.startswith(OF_OTHERS)}
    )
    return alias


def _without_owning(outputs: Outputs, storages: Set[int]) -> Outputs:
    """The outputs; those that lie in these storages, such as views of parameters, do not keep the
    memory alive any more."""

    def released(leaf: Any) -> Any:
        is_view = (
            isinstance(leaf, Tensor)
            and leaf.layout is torch.strided
            and storage_id(leaf) in storages
        )
        # An empty storage holds no memory that could be freed.
        if is_view and leaf.untyped_storage().nbytes():
            return unowned(leaf)
        return leaf

    return attrs.evolve(outputs, leaves=tuple(map(released, outputs.leaves)))


def _renewed(outputs: Outputs, storages: Set[int]) -> Outputs:
    """The outputs; those that lie in these storages are new tensor objects over the same memory."""
    objects: dict[int, Any] = {}

    def renewed(leaf: Any) -> Any:
        plain = type(leaf) is Tensor or (isinstance(leaf, Tensor) and is_fake(leaf))
        if not plain or leaf.requires_grad or storage_id(leaf) not in storages:
            return leaf
        return objects.setdefault(id(leaf), leaf.data)

    with unseen():
        return attrs.evolve(outputs, leaves=tuple(map(renewed, outputs.leaves)))


def _plain_aliases(leaves: Iterable[Any]) -> list[Any]:
    with unseen():
        return [x.data if isinstance(x, Tensor) else x for x in leaves]


def _refuse_unsized(
    name: str, outputs: Outputs, descriptor: Any, buffer_axes: tuple[Axes | None, ...]
) -> None:
    """Raise if a result does not declare its padded axes; the error's example uses an axis of the
    arguments."""
    result = tree_unflatten(list(outputs.leaves), outputs.structure)
    example_axis = next(
        (name for spec in buffer_axes if spec for name in spec.dims if name), "num_reqs"
    )
    leaves = zip(leaves_with_names(result), leaf_axes(result), outputs.references, strict=True)
    for (path, leaf), spec, reference in leaves:
        if leaf is None or reference is not None:
            continue
        if isinstance(leaf, Tensor):
            shape = f"of shape {tuple(leaf.shape)}"
        else:
            shape = repr(leaf)
        problem = f"the result's leaf {path or '(the whole)'} {shape}"
        if spec is None or not isinstance(leaf, Tensor):
            raise CaptureError(
                f"graphify({name}, ladder=...)",
                f"{problem} does not declare which of its dimensions follow the batch, so it cannot be"
                " unpadded",
                "return it in a sized class: @weft.pytree, with"
                f" attrs.field(metadata=weft.axes({example_axis!r})), or weft.axes(None) for a"
                " tensor of one size in all batches; or donate the argument that it replaces, such"
                ' as a state: donate_argnames=["state"]',
            )
        if (expected := padded_shape(leaf, spec, descriptor)) != tuple(leaf.shape):
            raise CaptureError(
                f"graphify({name}, ladder=...)",
                f"{problem}, but its axes {spec.dims} give {expected} for '{descriptor}'",
                "return a tensor of the size that its field declares",
            )
