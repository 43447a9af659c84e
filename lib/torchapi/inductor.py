"""torch's compiler, Inductor: the names of it that weft uses."""

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from weft.torchapi.faking import teach_higher_order_operators
from weft.torchapi.private import WithoutAutocast, WithoutFunctionModes


class Symbols:
    """Sizes that are symbols in a compiled graph.

    Args:
        mode: the mode of the graph's fake tensors.
        hints: a number for each size, for which the compiler chooses where it has to.
    """

    def __init__(self, mode: FakeTensorMode, hints: Mapping[str, int]) -> None:
        from torch._dynamo.source import ConstantSource  # importing torch._dynamo takes seconds

        assert mode.shape_env is not None
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


# A compiler as `torch.compile(backend=...)` takes it: by name, or a function (graph, example inputs)
# that returns a function.
Compiler = str | Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def compilers() -> list[str]:
    """The names of the compilers that torch has, debugging ones included."""
    from torch._dynamo.backends.registry import list_backends

    # It captures CUDA graphs of its own.
    return sorted({*list_backends(exclude_tags=())} - {"cudagraphs"})


def compiler_name(compiler: Compiler | None) -> str:
    """A compiler's name in messages; the same in every process."""
    if compiler is None or isinstance(compiler, str):
        return str(compiler)
    return getattr(compiler, "__qualname__", type(compiler).__qualname__)


def compile_graph(
    module: fx.GraphModule,
    examples: Sequence[Any],
    mode: FakeTensorMode,
    compiler: Compiler,
    *,
    combine: bool,
) -> Callable[..., Sequence[Tensor]]:
    """Compile a graph of operators, without CUDA graphs of the compiler's own.

    Inductor's draws of random numbers stay the operators' own, so that they take the same stream.

    Args:
        module: the graph.
        examples: a symbol or a fake tensor for each of its placeholders.
        mode: the mode of the fake tensors.
        compiler: the compiler.
        combine: whether Inductor makes one kernel of several independent ones.
    """
    teach_higher_order_operators()
    results: Any = module.graph.output_node().args[0]
    count = len(results)
    context = torch._guards.TracingContext(mode)
    # The trace has the casts of autocast and the devices of modes in it.
    with (
        torch.no_grad(),
        WithoutAutocast(),
        WithoutFunctionModes(),
        torch._guards.tracing(context),
    ):
        if compiler == "inductor":
            _return_swapped_values(module.graph)
            compiled: Callable[..., Any] = torch._inductor.standalone_compile(
                module,
                list(examples),
                dynamic_shapes="from_tracing_context",
                options={"config_patches": {**_PATCHES, "combo_kernels": combine}},
            )
        else:
            compile_function: Callable[..., Any]
            if isinstance(compiler, str):
                compile_function = torch._dynamo.lookup_backend(compiler)
            else:
                compile_function = compiler
            # As for Inductor: else the partitioner drops draws whose results are not used.
            with torch._inductor.config.patch(fallback_random=True):
                compiled = compile_function(module, list(examples))

    # They refer to the mode of the fake tensors, and it to the caller's tensors.
    for node in module.graph.nodes:
        node.meta.clear()

    def run(*arguments: Any) -> Any:
        return compiled(*arguments)[:count]

    return run


@contextlib.contextmanager
def noting_kernels(compiler: Compiler) -> Iterator[list[str]]:
    """A context that gives a list, to which a compilation by Inductor adds the calls of kernels in
    its code; other compilers add nothing."""
    calls: list[str] = []
    if compiler != "inductor":
        yield calls
        return
    lowering: Any = importlib.import_module("torch._inductor.graph").GraphLowering
    before = lowering.save_output_code

    def save(code: str) -> None:
        calls.extend(kernels_called(code))
        if before is not None:
            before(code)

    lowering.save_output_code = staticmethod(save)
    try:
        yield calls
    finally:
        lowering.save_output_code = before and staticmethod(before)


_ORIGINS = re.compile(r"# .*Original ATen: \[(.*)\]")
_CALL = re.compile(r"(?:\w+ = )?((?:extern_kernels|torch\.ops|aten)\.[\w.]+|(?:cpp|triton)_\w+)")


def kernels_called(code: str) -> list[str]:
    """The calls of kernels in code of Inductor's, each with the operators that it computes, where
    the code says so.

    >>> kernels_called('''
    ...     # Topologically Sorted Source Nodes: [], Original ATen: [aten.mm]
    ...     extern_kernels.mm(arg0_1, arg1_1, out=buf0)
    ...     cpp_fused_sin_0(buf0)''')
    ['extern_kernels.mm  of aten.mm', 'cpp_fused_sin_0']
    """
    calls = []
    origins = ""
    for line in code.splitlines():
        text = line.strip()
        if match := _ORIGINS.match(text):
            origins = f"  of {match[1]}"
        elif line.startswith(" ") and (match := _CALL.match(text)):
            calls.append(match[1].removesuffix(".run") + origins)
            origins = ""
    return calls


def _return_swapped_values(graph: fx.Graph) -> None:
    """Return clones that the graph writes to an input. Inductor takes a clone of an input for the
    input itself unless it is returned, and writes inputs in the order of its arguments: of two
    inputs that trade places, the second would get its own new value."""
    clones = [
        node.args[1]
        for node in graph.nodes
        if node.target is torch.ops.aten.copy_.default
        and isinstance(node.args[1], fx.Node)
        and node.args[1].target is torch.ops.aten.clone.default
    ]
    output = graph.output_node()
    results: Any = output.args[0]
    output.args = ([*results, *clones],)


def import_compiler() -> None:
    """Import what torch.compile imports at its first call."""
    importlib.import_module("torch._inductor.compile_fx")


def mark_static(tensor: Tensor) -> None:
    """Tell torch.compile that a tensor stays where it is, so that a function that writes to it
    may be a CUDA graph."""
    torch._dynamo.mark_static_address(tensor)


_PATCHES = {
    "triton.cudagraphs": False,
    "fallback_random": True,
    "triton.autotune_at_compile_time": False,
}
