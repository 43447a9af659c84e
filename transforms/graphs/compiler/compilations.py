"""`Compilations`: compiles traced runs, shares what fits several classes, and records what the
compiler made."""

import warnings
from collections import deque
from collections.abc import Callable, Sequence, Set
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.errors import CompilerError
from weft.torchapi.inductor import Compiler
from weft.torchapi.private import storage_id, switches, unowned
from weft.transforms.graphs.backends.audit import Audit
from weft.transforms.graphs.backends.cuda import CudaBackend
from weft.transforms.graphs.backends.operators import is_collective
from weft.transforms.graphs.calls.aliasing import overlaps_itself
from weft.transforms.graphs.calls.buffers import in_a_row
from weft.transforms.graphs.calls.results import Cloner, Outputs
from weft.transforms.graphs.compiler.parts import split
from weft.transforms.graphs.compiler.program import Program, compile_trace
from weft.transforms.graphs.compiler.sizes import (
    NotShared,
    Sizes,
    check_instance,
    generalize,
    independent,
    operators_in,
)
from weft.transforms.graphs.compiler.trace import Loop, Operation, Trace, Traced, Untraceable
from weft.transforms.graphs.options import Graphable


@attrs.frozen(eq=False)
class CompiledRecording:
    """A compiled function on the CPU, which a replay calls.

    Args:
        run: calls it on the tensors of the capture.
        outputs: the outputs, at addresses of their own.
        targets: the tensors among them.
        aliases: the indices of the targets that share memory with an input or with another one.
    """

    run: Callable[[], Sequence[Tensor]]
    outputs: Outputs
    targets: tuple[Tensor, ...]
    aliases: frozenset[int]
    num_pieces: int = 1
    driver_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the outputs. What the compiled function allocates while it runs is freed."""
        return sum(x.nbytes for x in self.targets)

    def replay(self) -> None:
        """Call the function, and copy its results to the outputs."""
        for target, result in zip(self.targets, self.run(), strict=True):
            if overlaps_itself(target):
                in_a_row(target).copy_(in_a_row(result))
            else:
                target.copy_(result)

    def new_results(self) -> tuple[Callable[[], None], list[Tensor], Cloner]:
        """A replay that leaves the outputs alone, the list in which it puts its results, and a
        function that takes them from there: nobody else holds them, so they need no copies."""
        results: list[Tensor] = []

        def replay() -> None:
            results[:] = self.run()

        def take(_: Any) -> list[Tensor]:
            taken = [x.clone() if i in self.aliases else x for i, x in enumerate(results)]
            results.clear()
            return taken

        return replay, results, take


@attrs.frozen(eq=False)
class Compilation:
    """A compiled trace, and the classes that it is for.

    Args:
        trace: the trace, with expressions in place of the numbers that follow sizes.
        program: what the compiler made.
        split_at: the operators that it calls as they are.
        switches: torch's switches by name, which a compiler may consult.
    """

    trace: Trace
    program: Program
    split_at: Set[str]
    switches: tuple[tuple[str, Any], ...] = attrs.field(factory=switches)

    def fits(self, traced: Traced, sizes: Sizes, split_at: Set[str]) -> bool:
        """Whether the program is one for this run, of a class of these sizes."""
        program = self.program
        if program.outputs != traced.numbers or self.switches != switches():
            return False
        if self.split_at != split_at:
            return False
        try:
            check_instance(traced.trace(), self.trace, sizes, program.crossing)
        except NotShared:
            return False
        return True


# The most compilations for one class each that are kept for later captures. A ladder has fewer
# classes that share with no other one.
_MOST_KEPT = 64


@attrs.define(eq=False)
class Compilations:
    """The compilations of one graphified function.

    Args:
        compiler: the compiler.
        shared: those that several classes may share.
        unshared: the latest of those that are for one class each, for captures of the same
            operators: after `compile_ahead` or an estimate of memory, or of other parameters.
    """

    compiler: Compiler
    shared: list[Compilation] = attrs.field(factory=list)
    unshared: deque[Compilation] = attrs.field(factory=lambda: deque(maxlen=_MOST_KEPT))
    count: int = 0
    """The number of compilations, shared or not."""
    warned: bool = False

    def note_failure(self, graphable: Graphable, title: str, error: Exception) -> None:
        """Warn, once for a function, that it is captured without the compiler.

        Raises:
            CompilerError: the function is strict.
        """
        problem = failure_text(error)
        if graphable.strict:
            instead = (
                "operators that the compiler takes; compiler='aot_eager' shows whether the fault is"
                " Inductor's; without strict=True, it is captured uncompiled"
            )
            raise CompilerError(
                f"graphify({graphable.name}, compiler={graphable.compiler!r})", problem, instead
            ) from error
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"{title}: runs without compiler={graphable.compiler!r}, which failed: {problem}."
                " strict=True makes this an error.",
                RuntimeWarning,
                stacklevel=2,
            )

    def program_for(
        self,
        traced: Traced,
        sizes: Sizes,
        siblings: Sequence[tuple[Callable[[], Traced], Sizes]],
        split_at: Set[str],
    ) -> Program:
        """The program for a traced run.

        Args:
            traced: the run.
            sizes: the sizes of its class; empty if there is no ladder.
            siblings: traces another class of the ladder, and its sizes; for a few of them.
            split_at: the operators that are called as they are.
        """
        trace = traced.trace()
        shared = (one for one in self.shared if one.program.is_for(sizes))
        for compilation in (*shared, *self.unshared):
            if compilation.fits(traced, sizes, split_at):
                return compilation.program
        self.count += 1
        if siblings and (program := self._shared(traced, trace, sizes, siblings, split_at)):
            return program
        program = self._compile(trace, traced.numbers, split_at)
        self.unshared.append(Compilation(trace.without_tensors(), program, split_at))
        return program

    def _compile(
        self,
        trace: Trace,
        outputs: tuple[int, ...],
        split_at: Set[str],
        sizes: Sizes | None = None,
    ) -> Program:
        for loop in (x for x in trace.operations if isinstance(x, Loop)):
            if any(x.func._schema.name in split_at for x in operators_in(loop.body)):
                raise Untraceable("a step of while_loop that the graph is to be split in")
        parts = split(trace, lambda operation: _is_whole(operation, split_at))
        return compile_trace(trace, parts, outputs, self.compiler, sizes)

    def _shared(
        self,
        traced: Traced,
        trace: Trace,
        sizes: Sizes,
        siblings: Sequence[tuple[Callable[[], Traced], Sizes]],
        split_at: Set[str],
    ) -> Program | None:
        """A program for this class and siblings; None if there can be none."""
        try:
            runs = [run() for run, _ in siblings]
            if any(run.numbers != traced.numbers for run in runs):
                return None
            all_sizes = [sizes, *(of_class for _, of_class in siblings)]
            general = generalize([trace, *(run.trace() for run in runs)], all_sizes)
            hints = {name: sizes[name] for name in independent(all_sizes)}
            program = self._compile(general, traced.numbers, split_at, hints)
        except NotShared:
            return None
        if not program.is_for(sizes):
            return None
        self.shared.append(Compilation(general.without_tensors(), program, split_at))
        return program


def _is_whole(operation: Operation, split_at: Set[str]) -> bool:
    """Whether an operator is called as it is, between compiled parts."""
    func = operation.func
    # No compiler of torch takes the operators of fused optimizers.
    is_optimizer = func._schema.name.startswith("aten::_fused_") and bool(operation.writes)
    return (
        not operation.is_plain
        or is_optimizer
        or is_collective(func)
        or func._schema.name in split_at
    )


def failure_text(error: Exception) -> str:
    """Why a function is captured uncompiled, in one line."""
    text = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, Untraceable):
        return f"{text:.200}"
    return f"{type(error).__name__}: {text:.200}"


def record_compiled(
    program: Program,
    sizes: Sizes,
    traced: Traced,
    audit: Audit,
    backend: Any,
    by_reference: Sequence[Any],
    donated: Sequence[Any],
    split_at: frozenset[str],
) -> Any:
    """Record a compiled run.

    Args:
        program: the compiled run.
        sizes: the sizes of its class.
        traced: the run, whose outputs are fake tensors.
        audit: the audit of the run.
        backend: the back end on whose device the arguments are.
        by_reference: the leaves by reference.
        donated: the tensors to save while the compiled function runs before a recording.
        split_at: the operators between the pieces of the recording.
    """
    fake_outputs = traced.outputs
    leaves = fake_outputs.leaves
    indices = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    inputs = [x.tensor.detach() for x in traced.trace().inputs]

    def outputs_of(results: Sequence[Tensor]) -> Outputs:
        by_index = dict(zip(indices, results, strict=True))
        new_leaves = tuple(by_index.get(i, x) for i, x in enumerate(leaves))
        outputs: Outputs = attrs.evolve(fake_outputs, leaves=new_leaves)
        return outputs

    if isinstance(backend, CudaBackend):
        run = program.bind(inputs, sizes)
        return backend.record(lambda: outputs_of(run()), audit, donated, split_at)
    storages = {storage_id(x) for x in by_reference if isinstance(x, Tensor)}
    # The caller owns these, and a graph does not keep them alive.
    inputs = [
        unowned(x) if storage_id(x) in storages and x.untyped_storage().nbytes() else x
        for x in inputs
    ]
    targets = tuple(_like(leaves[i]) for i in indices)
    num_pieces = 1 + sum(name in split_at for name in program.operators)
    return CompiledRecording(
        program.bind(inputs, sizes),
        outputs_of(targets),
        targets,
        _aliases(traced, indices),
        num_pieces,
    )


def _aliases(traced: Traced, indices: Sequence[int]) -> frozenset[int]:
    """The positions of the outputs that share memory with an input or with another output."""
    leaves = traced.outputs.leaves
    storages = [storage_id(traced.tracer.fake(leaves[i])) for i in indices]
    inputs = {storage_id(x.fake) for x in traced.trace().inputs}
    return frozenset(i for i, x in enumerate(storages) if x in inputs or storages.count(x) > 1)


def _like(fake: Tensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
