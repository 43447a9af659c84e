"""`record_compiled`: compiles a traced run, and records what the compiler made of it."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.torchapi.private import storage_id, unowned
from weft.transforms.graphs.backends.audit import Audit
from weft.transforms.graphs.backends.cuda import CudaBackend
from weft.transforms.graphs.calls.results import Outputs
from weft.transforms.graphs.compiler.program import Program, compile_trace
from weft.transforms.graphs.compiler.trace import Traced


@attrs.frozen(eq=False)
class CompiledRecording:
    """A compiled function on the CPU: a replay calls it, and copies its results to the addresses of
    the outputs."""

    program: Program
    outputs: Outputs
    targets: tuple[Tensor, ...]
    num_pieces: int = 1
    driver_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the outputs. What the compiled function allocates while it runs is freed."""
        return sum(x.nbytes for x in self.targets)

    def replay(self) -> None:
        with torch.no_grad():
            for target, result in zip(self.targets, self.program(), strict=True):
                target.copy_(result)


def record_compiled(
    traced: Traced, audit: Audit, backend: Any, by_reference: Sequence[Any], donated: Sequence[Any]
) -> Any:
    """Compile a traced run, and record the compiled function.

    Args:
        traced: the run, whose outputs are fake tensors.
        audit: the audit of the run.
        backend: the back end on whose device the arguments are.
        by_reference: the leaves by reference.
        donated: the tensors to save while the compiled function runs before a recording.
    """
    leaves = traced.outputs.leaves
    numbers = {i: traced.number(x) for i, x in enumerate(leaves) if isinstance(x, Tensor)}
    program = compile_trace(traced.trace(), [*numbers.values()])

    def outputs_of(results: Sequence[Tensor]) -> Outputs:
        by_index = dict(zip(numbers, results, strict=True))
        return attrs.evolve(
            traced.outputs, leaves=tuple(by_index.get(i, x) for i, x in enumerate(leaves))
        )

    if isinstance(backend, CudaBackend):
        return backend.record(lambda: outputs_of(program()), audit, donated)
    storages = {storage_id(x) for x in by_reference if isinstance(x, Tensor)}
    # The caller owns these, and a graph does not keep them alive.
    inputs = [
        unowned(x) if storage_id(x) in storages and x.untyped_storage().nbytes() else x
        for x in program.inputs
    ]
    targets = tuple(_like(leaves[i]) for i in numbers)
    return CompiledRecording(attrs.evolve(program, inputs=inputs), outputs_of(targets), targets)


def _like(fake: Tensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
