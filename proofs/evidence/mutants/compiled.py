"""Planted bugs of compiled graphs (L26)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from weft.proofs.evidence.mutants.mutant import Mutant, replace
from weft.proofs.evidence.runs.suite import find
from weft.torchapi import inductor
from weft.transforms.graphs.compiler import compilations, program, sizes

_PROGRAMS = find("L26", "programs")
_CLASSES = find("L26", "classes")
_DERIVATIVES = find("L26", "derivatives")
_MODELS = find("L26", "models")
_INDUCTOR = find("L26", "Inductor")

_compile = inductor.compile_graph
Run = Callable[..., Any]


def _compiling(change: Callable[[Run], Run]) -> Callable[[], AbstractContextManager[Any]]:
    """A context in which what the compiler made is changed."""

    def compile_graph(*args: Any, combine: bool) -> Run:
        return change(_compile(*args, combine=combine))

    return replace(program.__name__, "compile_graph", compile_graph)


def _on_copies(run: Run) -> Run:
    """Donated tensors are copied, and the copies are written."""
    return lambda *arguments: run(*map(_copy, arguments))


def _copy(argument: Any) -> Any:
    return argument.clone() if isinstance(argument, Tensor) else argument


def _on_first_inputs(run: Run) -> Run:
    """Each call reads the inputs of the first."""
    first: list[Any] = []

    def run_again(*arguments: Any) -> Any:
        first[:] = first or map(_copy, arguments)
        return run(*first)

    return run_again


def _with_first_numbers(run: Run) -> Run:
    """Each call draws the random numbers of the first."""
    states: list[Tensor] = []

    def run_again(*arguments: Any) -> Any:
        states[:] = states or [torch.get_rng_state()]
        torch.set_rng_state(states[0])
        return run(*arguments)

    return run_again


def _without_unused_draws(graph: fx.GraphModule, *args: Any, combine: bool) -> Run:
    """Draws whose results nothing uses are not made."""
    for node in reversed(graph.graph.nodes):
        draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if draws and not node.users:
            graph.graph.erase_node(node)
    return _compile(graph, *args, combine=combine)


def _first_number(size: sizes.Size, graph: fx.Graph, nodes: Any) -> Any:
    """A number that follows a size stays that of the class that was compiled first."""
    return size.of({name: node.meta["val"].node.hint for name, node in nodes.items()})


def _for_any_class() -> AbstractContextManager[Any]:
    """A class is given a compilation, whatever that is for."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(compilations, "check_instance"))
    stack.enter_context(mock.patch.object(program.Program, "is_for", return_value=True))
    return stack


def _nothing(*args: Any) -> Any:
    return frozenset()


# The bugs of compiled graphs. None takes two inputs in one memory for two: weft refuses arguments that
# share memory with a donated one, and nothing writes to others.
COMPILED = (
    Mutant("donated tensors are copied", _PROGRAMS, _compiling(_on_copies)),
    Mutant("each call draws the same numbers", _PROGRAMS, _compiling(_with_first_numbers)),
    Mutant("results are lent", _PROGRAMS, replace(compilations.__name__, "_aliases", _nothing)),
    Mutant(
        "draws that nothing uses are dropped",
        _CLASSES,
        replace(program.__name__, "compile_graph", _without_unused_draws),
    ),
    Mutant(
        "a size is the first class's number",
        _CLASSES,
        lambda: mock.patch.object(sizes.Size, "node", _first_number),
    ),
    Mutant("a compilation is for any class", _CLASSES, _for_any_class),
    Mutant("a state of classes is copied", _CLASSES, _compiling(_on_copies)),
    Mutant("the first call's inputs are read again", _DERIVATIVES, _compiling(_on_first_inputs)),
    Mutant("a model's pages are copied", _MODELS, _compiling(_on_copies)),
    Mutant(
        "Inductor draws numbers of its own",
        _INDUCTOR,
        lambda: mock.patch.dict(inductor._PATCHES, fallback_random=False),
    ),
    Mutant(
        "Inductor is not told of states that trade places",
        _INDUCTOR,
        replace(inductor.__name__, "_return_swapped_values", _nothing),
    ),
)
