"""The GPU back end: `torch.cuda.CUDAGraph`, with one memory pool for all captures of one graphified
function.

A capture is one graph or several pieces: it is interrupted at each split operator, which every
replay runs eagerly between the graph before it and the graph after it.
"""

import contextlib
import functools
import gc
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.errors import CaptureError
from weft.torchapi.private import (
    current_stream_id,
    generator_id,
    kept_pool,
    replayer,
    stop_allocating_to_pool,
    storage_id,
    unowned,
)
from weft.torchapi.watching import OperatorWatch
from weft.transforms.graphs.backends.audit import Audit, External
from weft.transforms.graphs.backends.compiled import NotCompiled
from weft.transforms.graphs.backends.host_reads import refusal
from weft.transforms.graphs.backends.loops import looping, split_in_loop
from weft.transforms.graphs.backends.operators import is_sparse, tensors_in
from weft.transforms.graphs.backends.while_nodes import WhileNodes
from weft.transforms.graphs.calls.buffers import InputBufferPool
from weft.transforms.graphs.calls.results import Outputs
from weft.values.trees import tree_map


@attrs.frozen(eq=False)
class SplitCall:
    """A call of a split operator between two pieces: its arguments, and the tensors where the next
    piece reads its results.

    The tensors do not own their memory, which belongs to the pool, to an input buffer or to the
    caller.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Tensor, ...]

    def run(self) -> None:
        results = tensors_in(self.func(*self.args, **self.kwargs))
        for target, result in zip(self.targets, results, strict=True):
            target.copy_(result)


@attrs.frozen(eq=False)
class Piece:
    """A CUDA graph, and the split operator that runs before it (None for the first)."""

    before: SplitCall | None
    graph: torch.cuda.CUDAGraph


@attrs.frozen(eq=False)
class CudaRecording:
    """The pieces of a capture, their outputs in the pool, the tensors from outside that they read,
    the memory pools of their loops, and the compiled code whose kernels they launch."""

    pieces: tuple[Piece, ...]
    outputs: Any
    external: tuple[Tensor, ...]
    replay: Callable[[], None]
    nbytes: int
    driver_bytes: int
    loop_pools: tuple[Any, ...] = ()
    compiled: tuple[Any, ...] = ()

    @property
    def num_pieces(self) -> int:
        return len(self.pieces)


def _replay_of(pieces: tuple[Piece, ...]) -> Callable[[], None]:
    """Make the function that replays the pieces in order, with only the split operators between
    them."""
    if len(pieces) == 1:
        # The usual case has no Python loop between the caller and the launch.
        return replayer(pieces[0].graph)
    return functools.partial(
        _replay_pieces, [(piece.before, replayer(piece.graph)) for piece in pieces]
    )


def _replay_pieces(pieces: list[tuple[SplitCall | None, Callable[[], None]]]) -> None:
    for before, replay in pieces:
        if before is not None:
            before.run()
        replay()


class CudaBackend:
    """Captures on its own stream. The first capture follows an eager warm-up there, in which
    kernels compile and libraries create their workspaces.

    Memory that replays use is allocated on that stream too. The allocator reuses freed memory for
    later work on the stream that allocated it, and this stream does no work before it has waited
    for the last replay.

    The outputs of a capture stay referenced, so that no later capture in the pool reuses their
    memory, unless they are copied after every replay (`release_output_memory`).
    """

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.input_buffers = InputBufferPool()
        self._warmed_up: set[tuple[bool, int]] = set()
        # Whether captures so far called functions that torch.compile has compiled.
        self._calls_compiled = False
        self._while_nodes = WhileNodes(device)
        self._generators: dict[int, torch.Generator] = {}
        self._external = External()
        self._stream_id = current_stream_id(self.stream.device_index)
        self._last_stream = self.stream.cuda_stream

    @property
    def unable_to_loop(self) -> str | None:
        return self._while_nodes.look()

    def wait_for_last_replay(self) -> None:
        """Make the current stream wait for the stream of the last replay, because replays share
        buffers and a pool."""
        # Comparing two numbers; an event is only recorded when the stream has changed.
        if (current := self._stream_id()) != self._last_stream:
            self._wait_for(current)

    def _wait_for(self, current: int) -> None:
        last = torch.cuda.ExternalStream(self._last_stream, self.device)
        torch.cuda.current_stream(self.device).wait_stream(last)
        self._last_stream = current

    def __del__(self) -> None:
        """Make the stream wait once more: torch may hand the stream, and the memory freed there, to
        another user."""
        with contextlib.suppress(Exception):  # torch may be gone when the interpreter ends
            self.stream.wait_stream(torch.cuda.ExternalStream(self._last_stream, self.device))

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Context on the back end's own stream, after the last replay and after the work of the
        current stream."""
        self.wait_for_last_replay()
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                yield
        finally:
            # Also after a refusal: the restored values must be written after the values of the run.
            current.wait_stream(self.stream)

    def capture(
        self, fn: Callable[[], Any], audit: Audit, split_at: frozenset[str] = frozenset()
    ) -> CudaRecording:
        audit.read_earlier = self._external
        with self.allocating():
            return self._capture(fn, audit, split_at)

    def _capture(
        self, fn: Callable[[], Any], audit: Audit, split_at: frozenset[str]
    ) -> CudaRecording:
        """Warm up before the first capture of a kind; before later ones only if CUDA refuses a
        capture without it, or if a function may have to be compiled."""
        kind = (bool(split_at), threading.get_ident())  # each thread has its own library handles
        pool_user = None
        nbytes = 0
        if kind in self._warmed_up and not self._calls_compiled:
            try:
                recording = self._record(fn, audit, split_at)
                if not audit.has_unknown:
                    return recording
                # Keep these graphs until the next recording: they may be the pool's only ones, and
                # the allocator drops a pool that no graph uses.
                pool_user = recording.pieces
                nbytes = recording.nbytes
                del recording
            except NotCompiled:
                pass
            except (CaptureError, torch.OutOfMemoryError):
                raise
            except RuntimeError:
                pass  # a kernel not loaded yet, or a new generator; the eager run shows any other cause
        with looping(self._while_nodes.rehearsal(audit)):
            audit.rehearse(fn)
        # Errors of the eager run's kernels show here, and not inside the capture.
        self.stream.synchronize()
        self._generators.update((generator_id(g), g) for g in audit.random.generators)
        self._warmed_up.add(kind)
        self._calls_compiled = self._calls_compiled or audit.compiled.is_entered
        try:
            recording = self._record_or_unroll(fn, audit, split_at)
            del pool_user
            return attrs.evolve(recording, nbytes=recording.nbytes + nbytes)
        except (CaptureError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            fault = f"CUDA refused: {str(error).splitlines()[0]}"
            raise refusal(
                audit.call, fault, "move operations that wait for the device out of it", error
            ) from error

    def record(
        self,
        run: Callable[[], Any],
        audit: Audit,
        donated: Sequence[Tensor],
        split_at: frozenset[str],
    ) -> Any:
        """Record a compiled function, after a run in which its kernels load and libraries create
        their workspaces.

        Args:
            run: calls the compiled function, and returns the outputs.
            audit: the audit of the function that was compiled; it knows the random generators.
            donated: the tensors that the first run may change; they are restored.
            split_at: the operators that run between the pieces of the recording.
        """
        with self.allocating(), kept_pool(self.device, self.pool) as allocating:
            with _restored(donated, audit.random.generators):
                # In the graphs' pool, so that the recording reuses the memory.
                with allocating(), looping(self._while_nodes.rehearsal(audit)):
                    run()
                self.stream.synchronize()
            return self._record(run, audit, split_at, watched=False)

    def _record_or_unroll(
        self, fn: Callable[[], Any], audit: Audit, split_at: frozenset[str]
    ) -> CudaRecording:
        """Record a function; if that fails and it has loops, once more without conditional nodes."""
        try:
            return self._record(fn, audit, split_at)
        except (CaptureError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            # Only conditional nodes can be left out; any other failure would repeat itself.
            if not self._while_nodes.recorded:
                raise
            self._while_nodes.give_up(str(error).splitlines()[0])
            return self._record(fn, audit, split_at)

    def _record(
        self,
        fn: Callable[[], Any],
        audit: Audit,
        split_at: frozenset[str],
        *,
        watched: bool = True,
    ) -> CudaRecording:
        # A generator must be registered before the capture begins in which it is used.
        audit.random.add_known(self._generators.values())
        if watched:
            audit.restart()
        free = torch.cuda.mem_get_info(self.device)[0]
        reserved = torch.cuda.memory_reserved(self.device)
        session = _Session(self.device, self.pool, split_at, audit, watched)
        loops = self._while_nodes.recorder(audit)
        try:
            with looping(loops):
                outputs = session.run(fn)
        except BaseException:
            # The allocator may consider the pool of a failed capture as still in use by a capture.
            self.pool = torch.cuda.graph_pool_handle()
            raise
        # The pool may have shrunk, when the allocator gave back memory of a dropped graph.
        tensors = max(torch.cuda.memory_reserved(self.device) - reserved, 0)
        # What is missing on the device and is not the allocator's: the graph's own nodes and
        # kernels.
        driver = max(free - torch.cuda.mem_get_info(self.device)[0] - tensors, 0)
        pieces = tuple(session.pieces)
        external = tuple(audit.external.values())
        return CudaRecording(
            pieces,
            outputs,
            external,
            _replay_of(pieces),
            tensors,
            driver,
            tuple(loops.pools),
            tuple(run.run for run in audit.compiled.runs),
        )

    def release_output_memory(self, recording: CudaRecording, allocated: Set[int]) -> CudaRecording:
        """Replace the outputs by tensors that do not own their memory; the graph keeps its pool
        alive."""
        outputs: Outputs = recording.outputs
        leaves = (
            unowned(x) if _has_memory_on(self.device, x) and storage_id(x) in allocated else x
            for x in outputs.leaves
        )
        return attrs.evolve(recording, outputs=attrs.evolve(outputs, leaves=tuple(leaves)))


def _has_memory_on(device: torch.device, x: Any) -> bool:
    """Whether `x` is a tensor with one address on the device, and of a kind that an alias can fully
    describe: not sparse, not quantized, not a zero tensor."""
    if not isinstance(x, Tensor) or x.device != device:
        return False
    return not (is_sparse(x) or x.is_quantized or x._is_zerotensor())


@contextlib.contextmanager
def _restored(tensors: Sequence[Tensor], generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Context that restores tensors and generators. The copies are on the host: a training step
    donates all its parameters and moments, and there may be no room for a second set."""
    copies = [x.cpu() for x in tensors]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Context without garbage collection, which could destroy another graph; CUDA forbids that in a
    capturing thread."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Session(OperatorWatch):
    """One capture. It ends a graph before each split operator and begins the next graph after
    it."""

    def __init__(
        self,
        device: torch.device,
        pool: Any,
        split_at: frozenset[str],
        audit: Audit,
        watched: bool,
    ) -> None:
        self.watched = watched
        self.device = device
        self.pool = pool
        self.split_at = split_at
        self.audit = audit
        self.pieces: list[Piece] = []
        self._graph = torch.cuda.CUDAGraph()
        self._before: SplitCall | None = None
        self._results: tuple[Tensor, ...] = ()

    def run(self, fn: Callable[[], Any]) -> Any:
        with _without_garbage_collection(), self._ended_on_error():
            self._begin()
            watch = self if self.split_at else contextlib.nullcontext()
            if self.watched:
                with self.audit.random.private_draws(), watch, self.audit:
                    outputs = fn()
            else:
                with torch.no_grad(), watch:
                    outputs = fn()
            self._end()
        return outputs

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func._schema.name not in self.split_at:
            return self.pass_on(func, args, kwargs)
        if self.audit.steps.repeats:
            raise self.audit.refuse(*split_in_loop(func))
        self._end()
        # A capture only records, so the piece must run before the operator can read its values.
        self._run_last_piece()
        result = self.pass_on(func, args, kwargs)
        with torch.inference_mode(
            False
        ):  # replays may run outside inference mode, where inference tensors cannot be written
            call = tree_map(lambda x: unowned(x) if isinstance(x, Tensor) else x, (args, kwargs))
        self._begin()
        # Allocated in the pool, so that a later piece may reuse the memory once the function has
        # dropped the result.
        targets = tree_map(lambda x: torch.empty_like(x) if isinstance(x, Tensor) else x, result)
        self._results = tuple(tensors_in(result))
        with torch.inference_mode(False):
            self._before = SplitCall(
                func, call[0], call[1], tuple(unowned(t) for t in tensors_in(targets))
            )
        return targets

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        for generator in self.audit.random.generators:
            if generator.device.type == "cuda":
                self._graph.register_generator_state(generator)
        # Other threads may go on using CUDA; only this thread's calls are checked.
        self._graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")

    def _end_graph(self) -> None:
        with warnings.catch_warnings():
            # The graph is empty if two split operators follow each other, and torch warns of empty
            # graphs: https://github.com/pytorch/pytorch/pull/88754
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            self._graph.capture_end()

    def _end(self) -> None:
        self._end_graph()
        self.pieces.append(Piece(self._before, self._graph))

    def _run_last_piece(self) -> None:
        if self._before is not None:
            for target, result in zip(self._before.targets, self._results, strict=True):
                target.copy_(result)
        self._graph.replay()

    @contextlib.contextmanager
    def _ended_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # Ending the failed capture may raise once more; the stream is usable after that. Only a
            # capture that ends without an error tells the allocator to stop using the pool.
            try:
                self._graph.capture_end()
            except RuntimeError:
                stop_allocating_to_pool(self.device, self.pool)
                self._release_generators()
            raise

    def _release_generators(self) -> None:
        """End the capture of the generators' states by an empty capture that succeeds. The failed
        capture left the generators in a state in which no operator outside a capture can draw from
        them."""
        self.pool = torch.cuda.graph_pool_handle()
        with contextlib.suppress(RuntimeError):  # if the device is unusable after the error
            self._begin()
            self._end_graph()
