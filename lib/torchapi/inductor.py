"""torch's compiler, Inductor: the names of it that weft uses."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv


class Symbols:
    """Sizes that are symbols in a compiled graph.

    Args:
        mode: the mode of the graph's fake tensors.
        hints: a number for each size, for which the compiler chooses where it has to.
    """

    def __init__(self, mode: FakeTensorMode, hints: Mapping[str, int]) -> None:
        assert mode.shape_env is not None
        self._mode = mode
        self._env: ShapeEnv = mode.shape_env
        self.by_name: dict[str, Any] = {}
        self._symbols: dict[Any, str] = {}
        for name, hint in hints.items():
            source = ConstantSource(f"weft_{name}")
            symbol = self._env.create_symbol(
                hint,
                source=source,
                dynamic_dim=DimDynamic.DYNAMIC,
                do_not_specialize_zero_one=True,
            )
            self._symbols[symbol] = name
            self.by_name[name] = self._env.create_symintnode(symbol, hint=hint, source=source)

    def empty(self, shape: Sequence[Any], stride: Sequence[Any], like: Tensor) -> Tensor:
        """A fake tensor of a shape with symbols, with the dtype and the device of another."""
        with self._mode:
            return torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)

    def hold(self, sizes: Mapping[str, int]) -> bool:
        """Whether these sizes satisfy everything that the compiler assumed of the symbols."""
        values = {symbol: sizes[name] for symbol, name in self._symbols.items()}
        for symbol, value in values.items():
            limits = self._env.var_to_range[symbol]
            if not limits.lower <= value <= limits.upper:
                return False
            if symbol in self._env.replacements:
                replaced = self._env.replacements[symbol].xreplace(values)
                if replaced != value:
                    return False
        return all(bool(guard.expr.xreplace(values)) for guard in self._env.guards)


def compile_graph(
    module: fx.GraphModule, examples: Sequence[Any], mode: FakeTensorMode
) -> Callable[[list[Any]], Sequence[Tensor]]:
    """Compile a graph of operators, without CUDA graphs of Inductor's own. Draws of random numbers
    stay the operators' own, so that they take the same stream.

    Args:
        module: the graph.
        examples: a symbol or a fake tensor for each of its placeholders.
        mode: the mode of the fake tensors.
    """
    patches = {
        "triton.cudagraphs": False,
        "fallback_random": True,
        "triton.autotune_at_compile_time": False,
    }
    context = torch._guards.TracingContext(mode)
    with torch.no_grad(), torch._guards.tracing(context):
        artifact = torch._inductor.standalone_compile(
            module,
            list(examples),
            dynamic_shapes="from_tracing_context",
            options={"config_patches": patches},
        )

    def run(arguments: list[Any]) -> Any:
        return artifact(*arguments)

    return run
