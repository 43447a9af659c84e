"""torch's compiler, Inductor: the names of it that weft uses."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx


def compile_graph(
    module: fx.GraphModule, example_inputs: Sequence[Tensor]
) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """Compile a graph of operators, without CUDA graphs of Inductor's own. Draws of random numbers
    stay the operators' own, so that they take the same stream."""
    patches = {
        "triton.cudagraphs": False,
        "fallback_random": True,
        "triton.autotune_at_compile_time": False,
    }
    with torch.no_grad():
        artifact = torch._inductor.standalone_compile(
            module,
            list(example_inputs),
            dynamic_shapes="from_graph",
            options={"config_patches": patches},
        )

    def run(tensors: list[Tensor]) -> Any:
        return artifact(*tensors)

    return run
