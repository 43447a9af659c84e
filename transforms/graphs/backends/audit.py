"""`Audit` refuses operations that a replay cannot repeat: host reads, shapes that depend on data,
writes to tensors that the function does not own. It watches the runs of one capture, and its errors
name the user's line."""

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Self

import attrs
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from weft.errors import CaptureError
from weft.torchapi.compiled import GRAPH, hearing_compiled, running_uncompiled
from weft.torchapi.faking import keeping_dispatch_keys
from weft.torchapi.frames import clear_frames
from weft.torchapi.patches import hearing_scripts, signal_capture
from weft.torchapi.private import (
    WithoutFunctionModes,
    innermost_storage_id,
    still_alive,
    storage_id,
    uncompiled,
)
from weft.torchapi.watching import OperatorWatch, watches_by_mode
from weft.transforms.graphs.backends.compiled import CompiledCalls, InGraph
from weft.transforms.graphs.backends.constants import Constants
from weft.transforms.graphs.backends.host_reads import (
    REMEDY,
    REMEDY_OF_COPIES,
    HostReads,
    Refusals,
)
from weft.transforms.graphs.backends.indexing import Gathers
from weft.transforms.graphs.backends.loops import Rehearsal, Steps, looping
from weft.transforms.graphs.backends.operators import (
    COPY,
    ONLY_MEMORY,
    PINS,
    consults_switches,
    data_dependence,
    flat_tensors,
    is_collective,
    is_harmless,
    is_sparse,
    storage_reach,
    storages_among,
    tensors_in,
    written,
)
from weft.transforms.graphs.backends.randomness import Randomness, may_draw
from weft.transforms.graphs.calls.results import Outputs
from weft.values.trees import tree_leaves

# The most runs before a recording in which a compiled function may compile.
_MOST_REHEARSALS = 8


@attrs.frozen(eq=False)
class Inputs:
    """The leaves that a function starts from.

    Args:
        leaves: the caller's own tensors, captured by reference, donated ones first; then the input
            buffers. Values that are not tensors are included.
        labels: makes the names of the leaves, for errors.
        num_donated: the number of donated leaves, whose storage the function may write.
        num_references: the number of leaves by reference, which a recording need not keep alive.
        arguments: weak references to the tensor objects that the runs receive.
        returned: weak references to the tensors that the last run returned.
    """

    leaves: Sequence[Any] = ()
    labels: Callable[[], Sequence[str]] = list
    num_donated: int = 0
    num_references: int = 0
    arguments: Sequence[weakref.ref[Tensor]] = ()
    returned: Sequence[weakref.ref[Tensor]] = ()


class External:
    """The storages from outside that captures have read, as long as they live."""

    def __init__(self) -> None:
        self._are_alive: dict[int, Callable[[], bool]] = {}

    def add(self, tensors: Mapping[int, Tensor]) -> None:
        """Add the storages of tensors, which are the keys."""
        kept = {storage: lives for storage, lives in self._are_alive.items() if lives()}
        self._are_alive = kept | {storage: _liveness(x) for storage, x in tensors.items()}

    def __contains__(self, storage: int) -> bool:
        return storage in self._are_alive and self._are_alive[storage]()


def _liveness(tensor: Tensor) -> Callable[[], bool]:
    """A function that returns whether the storage of a tensor is still alive; of a sparse tensor,
    the tensor."""
    if tensor.layout is torch.strided:
        # A weak reference to the tensor would make `torch.utils.swap_tensors` refuse it.
        storage = StorageWeakRef(tensor.untyped_storage())
        return lambda: not storage.expired()
    reference = weakref.ref(tensor)
    return lambda: reference() is not None


def _is_in(storages: Set[int], tensor: Tensor) -> bool:
    return innermost_storage_id(tensor) in storages


def _add_constant(owned_storages: set[int], constants: Constants, tensor: Tensor) -> None:
    """Note a new tensor that no operator made, whose value is a number in Python."""
    owned_storages.add(storage_id(tensor))
    constants.add(storage_id(tensor))


class Audit(OperatorWatch):
    """A watch that allows operations that a replay can repeat, and refuses all others. It also
    collects the tensors from outside, which a recording must keep alive (`external`), and the names
    of operators (`called`), and it watches random generators.

    A run is a rehearsal unless `restart()` was called before it; then it is the recorded run.

    Args:
        call: the call in error messages, as the user writes it.
        inputs: the tensors that the function starts from.
        rewind: restores the donated tensors, which the function may have written.
        collectives: whether operations of torch.distributed are allowed.
        on_device: the GPU that replays the function, or None on the CPU. On a GPU no tensor on the
            CPU may be read.

    Attributes:
        read_earlier: the storages from outside that earlier captures read; the recorded run adds its
            own.
        real: the tensor from outside that a tensor of the run stands for: itself, unless the run is
            on fake tensors.
        has_unknown: whether a recorded run without a rehearsal read tensors that may be older than
            the run, or may be another thread's results. A recorded run after a rehearsal can tell
            them apart.
    """

    def __init__(
        self,
        call: str,
        inputs: Inputs,
        *,
        rewind: Callable[[], None] = lambda: None,
        collectives: bool = False,
        on_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.call = call
        self._rewind = rewind
        self.on_device = on_device
        self.collectives = collectives
        self._inputs = inputs
        count = inputs.num_references
        storages = [storage_id(x) if isinstance(x, Tensor) else 0 for x in inputs.leaves]
        self.by_reference = {*storages[:count]} - {0}
        self._buffers = {*storages[count:]} - {0}
        self.writable = {*storages[: inputs.num_donated]} - {0}
        self._named = {
            storage: i for i, storage in enumerate(storages) if storage and i >= inputs.num_donated
        }
        self._dense = {
            storages[i]: _dense_bytes(x)
            for i, x in enumerate(inputs.leaves)
            if i >= count and storages[i]
        }
        # Donated memory counts as the function's own.
        self.owned_storages = {*self.writable}
        self._constants = Constants()
        self._dependent = self._buffers | self.writable
        self._arguments = arguments = inputs.arguments
        self._results: list[weakref.ref[Tensor]] = []
        self.external: dict[int, Tensor] = {}
        self.read_earlier: External = External()
        self.real: Callable[[Tensor], Tensor] = lambda tensor: tensor
        self._rehearsed: dict[int, Tensor] | None = None
        self._is_recorded = False
        self.has_unknown = False
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self.called: set[str] = set()
        self.launches = 0
        self.asked_for: set[int] = set()
        self._refusals = refusals = Refusals(call)
        self._failed = ""
        self._callers_own = {id(x): i for i, x in enumerate(inputs.leaves[: inputs.num_donated])}
        generators = [x for x in inputs.leaves if isinstance(x, torch.Generator)]
        # None of these refers to the audit, which holds the caller's tensors: without a reference
        # cycle it is freed as soon as the capture is done.
        self.random = Randomness(refusals.refuse, on_device, generators)
        self._gathers = Gathers(refusals.refuse, self._constants)
        self.steps = Steps(self.random, self._constants, self._gathers, refusals.refuse, on_device)
        self._host_reads = HostReads(
            refusals.refuse,
            lambda tensor: any(reference() is tensor for reference in arguments),
            functools.partial(_is_in, self.owned_storages),
            self._constants,
            self._gathers,
            self.asked_for,
        )
        self.compiled = CompiledCalls(
            refusals,
            self._host_reads,
            functools.partial(_add_constant, self.owned_storages, self._constants),
        )

    def __enter__(self) -> Self:
        self.random.begin()
        with contextlib.ExitStack() as stack:
            stack.enter_context(keeping_dispatch_keys())
            self.compiled.caches_casts = torch.is_autocast_cache_enabled()
            stack.enter_context(_without_cached_casts())
            if watches_by_mode():
                # The compiler that the trace is for compiles the functions inside too.
                stack.enter_context(running_uncompiled())
            else:
                stack.enter_context(hearing_compiled(self.compiled))
            stack.enter_context(hearing_scripts(self._refuse_script))
            stack.enter_context(self._host_reads)
            stack.enter_context(looping(Rehearsal(self.steps), inside=False))
            super().__enter__()
            # Pushed last, so that the audit ends before the contexts that it relies on.
            stack.push(super().__exit__)
            self._entered = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._entered.__exit__(kind, error, trace)
        if error is None:
            self.random.end()
            # Checks of indices that wait for an operator must not be lost when the function ends.
            self._gathers.before_operator(frozenset())
            self._note_returned()
            if self._failed and not self._refusals.errors:
                fault = (
                    "it goes on after an error of an operator, which depends on data:"
                    f" {self._failed}"
                )
                self.refuse(
                    fault,
                    "choose by values (torch.where), or handle the error outside the function",
                )
        self._refusals.raise_swallowed(error)
        if error is None and self._is_recorded and not self.has_unknown:
            self.read_earlier.add(self.external)

    def refuse(self, fault: str, instead: str, error: BaseException | None = None) -> CaptureError:
        """The error for something that a replay cannot repeat. It ends the run even if the function
        catches it."""
        return self._refusals.refuse(fault, instead, error)

    @uncompiled
    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The base names too: `split_at` and the switches are by operator, not by overload.
        self.called.add(func._schema.name)
        self.random.before_operator(func, kwargs.get("generator"))
        # Storages, because a view of an argument is written like the argument itself.
        inputs = {storage_id(t): t for t in flat_tensors(args, kwargs)}
        self._gathers.before_operator(inputs.keys())
        self._check(func, args, kwargs, inputs)
        is_source = func is torch.ops.aten.lift_fresh.default
        if is_source:
            # A constant in the function's source: each replay must start from its value, even if it
            # is changed later.
            func = torch.ops.aten.clone.default
        result = self._call(func, args, kwargs)
        allocates = False
        self.random.after_operator(func)
        in_place = {storage_id(x) for x in written(func, args, kwargs)}
        if func.overloadpacket is torch.ops.aten.set_:
            sources = storages_among(args)
        else:
            sources = frozenset[int]()
        self._note_constants(func, args, inputs.keys() | sources, result, in_place)
        self._gathers.after_operator(
            {*map(storage_id, tensors_in(result))} - inputs.keys(), in_place
        )
        for storage, tensor in inputs.items():
            # A tensor that came from nowhere: neither an argument nor made in this run.
            if storage not in self.owned_storages and storage not in self._named:
                if not is_source:
                    self._refuse_unseen(storage, tensor)
                self._note_external(storage, tensor)
            elif storage in self.writable:
                self._refuse_unaliased(tensor)
        for tensor in (result,) if isinstance(result, Tensor) else tensors_in(result):
            # Weakly: what is alive at the end was kept by somebody else.
            self._results.append(weakref.ref(tensor))
            if (storage := storage_id(tensor)) not in inputs and not self._is_from_outside(
                storage, sources
            ):
                self.owned_storages.add(storage)
                allocates = True
        if not self._dependent.isdisjoint(inputs):
            self._dependent.update(
                map(storage_id, (*tensors_in(result), *written(func, args, kwargs)))
            )
        self.launches += (
            allocates or func._schema.is_mutable
        ) and func.overloadpacket not in ONLY_MEMORY
        return result

    def _note_constants(
        self, func: Any, args: tuple[Any, ...], inputs: Set[int], result: Any, in_place: set[int]
    ) -> None:
        """Note which tensors on the CPU are the same at each call, because they are made from
        Python numbers alone."""
        if func._schema.name == "aten::_pack_padded_sequence" and self._constants.contains_all(
            [storage_id(args[1])]
        ):
            # The batch sizes depend on nothing but the lengths.
            self._constants.add(storage_id(result[1]))
            return
        are_constant = self._constants.contains_all(inputs) and not may_draw(func)
        are_constant = are_constant and func.overloadpacket not in ONLY_MEMORY
        result_storages = {storage_id(x) for x in tensors_in(result) if x.is_cpu}
        self._constants.note(
            result_storages.difference(inputs), in_place, are_constant=are_constant
        )

    def _is_from_outside(self, storage: int, sources: Set[int]) -> bool:
        """Whether a result lies in a storage of `sources` that belongs to an argument or to a
        tensor from outside. `sources` are storages passed to an operator as such: to `set_`, by
        which the methods of storages read and write."""
        return storage in sources and any(
            storage in x for x in (self._buffers, self.by_reference, self.external)
        )

    def _note_external(self, storage: int, tensor: Tensor) -> None:
        if (
            self.external.setdefault(storage, tensor) is tensor
            and tensor.requires_grad
            and tensor.is_leaf
        ):
            # Under the function mode, reading `grad` would itself be refused.
            with WithoutFunctionModes():
                self._gradients.append((tensor, tensor.grad))

    def _refuse_unseen(self, storage: int, tensor: Tensor) -> None:
        """Raise CaptureError for a tensor that is new in each run but was made by no operator of
        the
        run: another thread made it, and no replay repeats that thread's operators. Without a
        rehearsal this cannot be told yet (`has_unknown`)."""
        # A rehearsal sees each tensor for the first time, and so cannot tell.
        if not self._is_recorded or storage in self.external:
            return
        if self._host_reads.fills or not _may_be_a_result(self.real(tensor)):
            return
        if self._rehearsed is not None:
            if storage in self._rehearsed:
                return
            fault = (
                f"a tensor ({_shown(tensor)}) that is new in this call, and that no operator of"
                " this thread made: "
            )
            fault += "another thread did, whose work the capture of this one does not see"
            instead = "compute it in this thread; or graphify the function that the thread runs"
            raise self.refuse(fault, instead)
        if storage_id(self.real(tensor)) not in self.read_earlier:
            self.has_unknown = True

    def _note_returned(self) -> None:
        """Note tensors from outside that the function returned, perhaps without calling an operator
        on them."""
        inside = self.owned_storages | self._buffers | self.by_reference
        references = self._inputs.returned
        tensors = {
            storage_id(tensor): tensor
            for reference in references
            if (tensor := reference()) is not None
        }
        self._gathers.before_operator(tensors.keys())
        for storage, tensor in tensors.items():
            if storage not in inside:
                self._refuse_unseen(storage, tensor)
                self.external.setdefault(storage, tensor)

    def restore_gradients(self) -> None:
        """Undo the changes of a refused `backward()` to the gradients of tensors from outside."""
        for tensor, gradient in self._gradients:
            if tensor.grad is not gradient:
                tensor.grad = gradient
        self._gradients = []

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if func is GRAPH:
                return self.compiled.run(InGraph(self._check_in_graph), self.pass_on, args)
            return self.pass_on(func, args, kwargs)
        # A refusal of the audit itself is no error of the operator.
        except CaptureError:
            raise
        except Exception as error:
            self._failed = f"{type(error).__name__} of {func}"
            raise

    def _check(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: dict[int, Tensor]
    ) -> None:
        """Raise CaptureError if a replay cannot repeat this operation."""
        if kwargs.get("pin_memory"):
            raise self._pinned(func)
        # Most operators are known to read and write nothing else; the check costs more than they
        # do.
        if not is_harmless(func):
            self._check_suspect(func, args, kwargs)
        if (
            self.on_device is not None and func is not torch.ops.aten.lift_fresh.default
        ):  # its input is a constant
            self._refuse_host_arguments(inputs)

    def _check_in_graph(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise CaptureError if a replay cannot repeat an operator that compiled code calls. The
        memory that it reads and writes is the code's own."""
        self.called.add(func._schema.name)
        if not is_harmless(func):
            self._check_repeatable(func, args, kwargs)

    def _check_suspect(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._check_repeatable(func, args, kwargs)
        self._check_memory(func, args, kwargs)

    def _check_repeatable(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Reading a number that the source code fixes is no dependence on data.
        if (fault := data_dependence(func, args, kwargs)) and not self._are_constants(
            flat_tensors(args, kwargs)
        ):
            raise self.refuse(fault, REMEDY_OF_COPIES if fault.startswith(COPY) else REMEDY)
        if func._schema.name in PINS:
            raise self._pinned(func)
        if is_collective(func) and not self.collectives:
            instead = (
                "graphify(..., collectives=True) on every rank, with captures and replays in the"
                " same order"
            )
            raise self.refuse(
                f"{func} is a collective operation, which waits for other ranks", instead
            )

    def _check_memory(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise CaptureError if an operator reaches memory that is not the function's."""
        if (reach := storage_reach(func, args, kwargs)) and reach[1] > self._dense.get(
            reach[0], math.inf
        ):
            # `as_strided` may reach elements beside the view, which the graph's buffer does not
            # have.
            where = "beyond its elements"
            instead = "x.contiguous() first, or pass the whole tensor that it is a view of"
            if math.isinf(reach[1]):
                where = "by an offset in its storage"
                instead = "x[offset:].as_strided(size, stride), with no other offset"
            operator = func._schema.name.removeprefix("aten::")
            fault = f"{operator} of {self._name(reach[0])} {where}, which a replay does not have"
            raise self.refuse(fault, instead)
        for tensor in written(func, args, kwargs):
            if is_sparse(tensor):
                fault = (
                    f"{func} writes to a sparse tensor, which may move its elements to another"
                    " address"
                )
                raise self.refuse(
                    fault, "the operator that returns a new tensor, or a dense tensor"
                )
            # The rule of ownership: a step writes only what it was given for good, or made itself.
            if (storage := storage_id(tensor)) not in self.owned_storages:
                name = self._name(storage)
                fault = (
                    f"{func} writes to {name} of shape {tuple(tensor.shape)}, which it does not own"
                )
                if storage in self._named:
                    pass_in = ""
                else:
                    pass_in = "pass it in (a module's: weft.stages.from_module) and "
                instead = (
                    f"return a new tensor, or {pass_in}donate the argument (donate_argnames=...)"
                )
                raise self.refuse(fault, instead)

    def _are_constants(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the function made these tensors on the CPU from nothing that a later call may
        change, such as sequence lengths written as a list."""
        return bool(tensors) and all(self._constants.read(storage_id(t)) for t in tensors)

    def _refuse_unaliased(self, tensor: Tensor) -> None:
        """Raise CaptureError for a donated tensor, or a view of one, that the function got from a
        closure and not as the argument."""
        if tensor._base is None:
            owner = tensor
        else:
            owner = tensor._base
        if (index := self._callers_own.get(id(owner))) is not None:
            name = self._inputs.labels()[index]
            if owner is tensor:
                view = ""
            else:
                view = "a view of "
            fault = f"it reads {view}{name}, which is donated, from outside its arguments"
            raise self.refuse(fault, f"use the argument {name}, or do not donate it")

    def _name(self, storage: int) -> str:
        """The name of the argument that lies in a storage."""
        index = self._named.get(storage)
        if index is None:
            return "a tensor from outside it"
        return self._inputs.labels()[index]

    def _refuse_script(self, read: str) -> None:
        raise self.refuse(f"a TorchScript function reads a tensor on the host ({read})", REMEDY)

    def _pinned(self, func: Any) -> CaptureError:
        return self.refuse(
            f"{func} allocates pinned host memory", "allocate it once, before the call"
        )

    def rehearse(self, fn: Callable[[], Any]) -> None:
        """Run the function before its capture, so that kernels compile and libraries create their
        workspaces.

        Some libraries refuse to do so while `torch.cuda.is_current_stream_capturing()` is True;
        other code reads tensors on the host while it is False. So the first run is a plain one. If
        the audit refuses it, a second run signals a capture.
        """
        if self._is_recorded:  # the last run was recorded, and another rehearsal is needed
            self._undo()
            self._is_recorded = False
        self.random.rehearse()
        for _ in range(_MOST_REHEARSALS):
            self.compiled.begin_rehearsal()
            outputs = self._rehearse_once(fn)
            if not self.compiled.has_compiled:
                break
            outputs = []
            self._undo()
        else:
            fault = (
                f"a result of torch.compile still compiles in call {_MOST_REHEARSALS} of the same"
                f" arguments{self.compiled.last_reason}"
            )
            instead = "a function that needs no new compilation for a call like the one before"
            raise CaptureError(self.call, fault, instead)
        returned = [x for x in outputs if isinstance(x, Tensor)]
        del outputs  # other objects among the outputs may hold tensors, which would count as kept
        results = self._results
        # The recorded run does not show a tensor that only the first run keeps. A tensor that
        # depends on no argument may be kept in a cache.
        self.refuse_leaks(returned, self._dependent | self._buffers)
        del returned
        cached = [tensor for reference in results if (tensor := reference()) is not None]
        # Held until the recorded run ends, so that no new tensor has the storage of an old one.
        self._rehearsed = {**self.external, **{storage_id(x): x for x in cached}}

    def _rehearse_once(self, fn: Callable[[], Any]) -> list[Any]:
        outputs = None
        try:
            outputs = self._run(fn)
        except CaptureError as error:
            # The frames of the refused run hold its tensors, which would count as kept.
            clear_frames(error)
        if outputs is None:
            self._undo()
            with signal_capture():
                outputs = self._run(fn)
        return outputs

    def _run(self, fn: Callable[[], Any]) -> list[Any]:
        with self.random.private_draws(), self:
            outputs = fn()
        if isinstance(outputs, Outputs):
            return [*outputs.leaves]
        return tree_leaves(outputs)

    def restart(self) -> None:
        """Undo the previous run, and make the next one the recorded run. Random generators are not
        restored here."""
        self._undo()
        self._is_recorded = True
        self.compiled.begin_recording()
        self.random.record()

    def _undo(self) -> None:
        self._rewind()
        # In place: `HostReads` holds the same set.
        self.owned_storages.clear()
        self.owned_storages |= self.writable
        self._constants.clear()
        self._gathers.clear()
        self._dependent = self._buffers | self.writable
        self.external = {}
        self._results = []
        self.launches = 0
        self._refusals.errors, self._failed = [], ""
        self._host_reads.without_gradient = []
        self.has_unknown = False

    @property
    def without_gradient(self) -> list[Tensor]:
        """The tensors from outside whose `grad` the function read and found None."""
        return [*{id(x): x for x in self._host_reads.without_gradient}.values()]

    def becomes_data(self, storage: int) -> None:
        """Note that a constant is about to be overwritten by something that depends on data."""
        self._constants.note(set(), {storage}, are_constant=False)

    def consults_switches(self) -> bool:
        """Whether the function called operators that consult
        `weft.torchapi.private.backend_switches`."""
        return self._host_reads.calls_attention or any(map(consults_switches, self.called))

    def refuse_leaks(self, outputs: Any, forbidden: Set[int] | None = None) -> None:
        """Raise CaptureError if a tensor that the function made is alive outside its outputs: a
        replay would overwrite it, or not make it. The same holds for tensors in input buffers.

        Args:
            outputs: the leaves that the function returned.
            forbidden: the storages that may not be kept; None: the input buffers and all storages
                that the function made.
        """
        returned = [t for t in outputs if isinstance(t, Tensor)]
        overwritten = self.owned_storages | self._buffers if forbidden is None else forbidden
        if leaked := still_alive(lambda: self._leaked(returned, overwritten)):
            shapes = ", ".join(_shown(t) for t in leaked[:3])
            subject = "a tensor that it made is"
            instead = "make it before the call and pass it in, or return it"
            if all(storage_id(t) in self._buffers for t in leaked):
                subject = "an argument, or a view of one, is"
                instead = "keep a clone of it outside the function"
            problem = (
                f"{subject} kept and not returned ({shapes}): in a cache, a global or an attribute"
            )
            raise CaptureError(self.call, problem, instead)

    def refuse_kept_results(self) -> None:
        """Raise CaptureError if a tensor that the function made is still alive. The tensors that it
        returned have been replaced by new objects, so the function keeps one of them, or a view of
        one; a replay would not renew what it keeps."""
        if kept := still_alive(self._alive_results):
            shapes = ", ".join(_shown(t) for t in kept[:3])
            problem = (
                f"a tensor that it returns ({shapes}) is kept too: in a cache, a global or an"
                " attribute"
            )
            instead = (
                "return it alone, and keep it outside the function, as a state that the next call"
                " receives"
            )
            raise CaptureError(self.call, problem, instead)
        self._results = []

    def _alive_results(self) -> list[Tensor]:
        """The tensors that operators of the run made and that are alive, except those in donated
        memory."""
        results = [tensor for reference in self._results if (tensor := reference()) is not None]
        storages = self.owned_storages - self.writable
        return [
            tensor
            for tensor in results
            if not tensor.requires_grad and storage_id(tensor) in storages
        ]

    def _leaked(self, returned: Sequence[Tensor], overwritten: Set[int]) -> list[Tensor]:
        allowed = {storage_id(t) for t in returned} | self.writable
        results = [tensor for reference in self._results if (tensor := reference()) is not None]
        leaked = [
            t
            for t in results
            if (storage := storage_id(t)) in overwritten and storage not in allowed
        ]
        if leaked:
            return leaked
        # A returned view keeps its base alive, which is no leak.
        returned_ids = {id(x) for t in returned for x in (t, t._base)}
        arguments = [tensor for reference in self._arguments if (tensor := reference()) is not None]
        return [
            t for t in arguments if storage_id(t) in self._buffers and id(t) not in returned_ids
        ]

    def _refuse_host_arguments(self, inputs: dict[int, Tensor]) -> None:
        """Raise CaptureError for an input on the CPU: no CPU operation runs again in a GPU's
        replay, so its value would be frozen."""
        for storage, tensor in inputs.items():
            if tensor.is_cpu and (storage in self.writable or storage not in self.owned_storages):
                name = self._name(storage)
                fault = (
                    f"{name} is on the CPU, in a call with tensors on a GPU, so that its value"
                    " would be frozen"
                )
                raise self.refuse(fault, f"move {name} to the device before the call")


def _may_be_a_result(tensor: Tensor) -> bool:
    """Whether an operator may have made a tensor, because its memory does not belong to something
    else (numpy, a file, a buffer), which would make its storage not resizable."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return True
    return tensor.untyped_storage().resizable()


def _shown(tensor: Tensor) -> str:
    """The dtype and the shape of a tensor, as text."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _dense_bytes(buffer: Tensor) -> int:
    """The number of leading bytes of the storage that hold only elements of the buffer."""
    fills = buffer.nbytes == buffer.untyped_storage().nbytes()
    # Elsewhere in a shared storage, the bytes after the buffer belong to another tensor.
    if fills or (buffer.is_contiguous() and buffer.storage_offset() == 0):
        return buffer.nbytes
    return 0


@contextlib.contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Context without autocast's cache: a cast of a weight that was cached earlier would be a
    constant in the graph, and would miss later updates of the weight."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(before)
