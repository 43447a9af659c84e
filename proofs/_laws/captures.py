"""L24: a graph of any tensor program gives the program's results, or weft refuses it."""

import concurrent.futures
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from weft.errors import WeftError
from weft.proofs._strategies.captures.hazards import Hazard
from weft.proofs._strategies.captures.tensor_programs import TensorProgram
from weft.proofs._strategies.compilers import EXACT
from weft.proofs.checks.difference import LawViolation, assert_equal
from weft.proofs.checks.rounding import assert_rounded
from weft.torchapi.private import storage_id
from weft.transforms.graphs.graphify import graphify
from weft.values.donation import donates
from weft.values.trees import tree_leaves, tree_map

_LAW = "L24 graph is eager"
_LAW_OF_COMPILED = "L26 a compiled graph is eager"
# Matches the warning that a function is captured without its compiler.
UNCOMPILED = ".* runs without compiler="
# The errors by which a call of a graph may refuse. `LinAlgError` is one of them because a replay
# cannot run the function's own handler: an operator's error ends the replay.
REFUSALS: tuple[type[Exception], ...] = (WeftError, vars(torch.linalg)["LinAlgError"])


@attrs.define
class Tally:
    """Counts of what a law compared.

    Args:
        programs: programs compared.
        calls: calls made of their graphs.
        replays, captures: calls that a graph replayed, and graphs captured for them.
        errors: programs that raise an error without weft too.
        refused: programs that weft refused, by reason.
        uncompiled: programs that were captured without their compiler, by reason.
        rounded: programs whose results a compiler rounds otherwise, and no more than it does
            without weft.
    """

    programs: int = 0
    calls: int = 0
    replays: int = 0
    captures: int = 0
    errors: int = 0
    refused: Counter[str] = attrs.field(factory=Counter)
    uncompiled: Counter[str] = attrs.field(factory=Counter)
    rounded: int = 0

    def add(self, other: "Tally") -> None:
        """Add another tally's counts to this one."""
        self.programs += other.programs
        self.calls += other.calls
        self.replays += other.replays
        self.captures += other.captures
        self.errors += other.errors
        self.refused += other.refused
        self.uncompiled += other.uncompiled
        self.rounded += other.rounded


@attrs.frozen
class _World:
    """One of two equal copies of a program: its names, and the function to call."""

    program: TensorProgram
    names: dict[str, Any]
    call: Callable[..., Any]

    @property
    def law(self) -> str:
        """The law that the program is a case of."""
        return _LAW if self.program.compiler is None else _LAW_OF_COMPILED

    def assert_alike(self, what: str, actual: Any, expected: Any) -> None:
        """Raise LawViolation if values of the graph are not those of the function."""
        if self.program.compiler in (None, *EXACT):
            assert_equal(what, actual, expected)
        else:
            assert_rounded(what, actual, expected)

    def arguments(self, call: int) -> list[Any]:
        return [*self.names["arguments"](call)]

    def closed_over(self) -> dict[str, Any]:
        captured = {name: self.names[name] for name in ("held", "layer") if name in self.names}
        return {
            name: [*x.parameters()] if isinstance(x, nn.Module) else x
            for name, x in captured.items()
        }


@attrs.frozen
class _Outcome:
    """What one call left behind.

    `result` is the returned value or the error. `arguments` are copies of the arguments after the
    call, without the donated ones; `before` and `after` are copies of all of them; `storages` are
    the storages of the arguments."""

    result: Any
    arguments: list[Any]
    before: list[Any]
    after: list[Any]
    storages: set[int]


def graph_is_eager_on_tensor_programs(
    program: TensorProgram, device: str = "cpu", tally: Tally | None = None
) -> None:
    """L24: a graph of any program gives the program's results bitwise, call by call, or weft
    refuses the program and changes nothing. L26: so does one with a compiler; where the compiler
    may round in another way, within the default tolerances of torch.testing.

    These are equal: the results' values, dtypes and shapes; their strides (or the strides of a
    clone); `requires_grad` of each result that is not an argument; the arguments and closed-over
    tensors after the call; and the states of the random generators. Two results share memory only
    if the function's results do. Where the function raises, the graph raises too. At the end,
    several threads make the calls at once if the program says so.

    Args:
        tally: counts the programs, calls and outcomes.
    """
    tally = Tally() if tally is None else tally
    tally.programs += 1
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=["cuda"] if device == "cuda" else []),
    ):
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", message=UNCOMPILED)
        # Two copies, since each world must see only its own writes.
        first = program.run()
        second = program.run()
        if "graph" in second:
            graph = second["graph"]
        else:
            graph = graphify(second["f"], **program.options())
        if program.donated:
            eager = donates(*program.donated)(first["f"])
        else:
            eager = first["f"]
        _compare_calls(_World(program, first, eager), _World(program, second, graph), device, tally)
        # A program's own `graph` may be any function over graphs, without counts of its own.
        if "graph" not in second:
            info = graph.cache_info()
            tally.replays = tally.replays + info.replays
            tally.captures = tally.captures + info.captures


def hazards_are_right_or_refused(hazard: Hazard, device: str = "cpu") -> None:
    """L24 for a known hazard: a graph gives the function's results, or weft refuses it where the
    hazard allows that."""
    tally = Tally()
    graph_is_eager_on_tensor_programs(hazard.program, device, tally)
    if tally.refused and not hazard.refused:
        raise LawViolation(f"L24 {hazard.kind} is refused: {', '.join(tally.refused)}")


def _compare_calls(eager: _World, graph: _World, device: str, tally: Tally) -> None:
    program = eager.program
    donated = len(eager.program.donated)
    kept: list[tuple[Tensor, Tensor]] = []
    states: tuple[Any, Any] = (None, None)
    for call in range(program.calls):
        tally.calls += 1
        results = _compare_call(eager, graph, call, states, device, tally)
        if results is None:
            return
        if not program.borrow:
            # Two kinds of result may change later: a closed-over tensor itself (where the function
            # itself ran), and one that shares memory with a state donated to the next call.
            owned = [
                *_tensors(graph.closed_over()),
                *(_tensors(results[1][0]) if program.chained else ()),
            ]
            storages = {storage_id(x) for x in owned}
            kept += [
                (x, x.detach().clone())
                for x in _tensors(results[1])[donated:]
                if storage_id(x) not in storages
            ]
        if program.chained:
            states = _in_layout(results[0][0], results[1][0]), results[1][0]
    # Only now: a replay may overwrite the results of any earlier call.
    for result, copy in kept:
        assert_equal(f"{eager.law}: a result after later calls", result, copy)
    if program.threads:
        _compare_threads(eager, graph)


def _compare_call(
    eager: _World, graph: _World, call: int, states: tuple[Any, Any], device: str, tally: Tally
) -> tuple[Any, Any] | None:
    """Make one call in both worlds, and compare; None if it raised."""
    where = f"{eager.law}, call {call}"
    program = eager.program
    # Both worlds start from the same generator states, so that their draws can be compared.
    torch.manual_seed(call)
    at_start = _random_states(device)
    expected = _outcome(eager, call, states[0])
    drawn = _random_states(device)
    _set_random_states(at_start, device)
    outcome = _outcome(graph, call, states[1])
    if isinstance(outcome.result, REFUSALS) and not isinstance(expected.result, Exception):
        tally.refused[reason_of(outcome.result)] += 1
        assert_equal(
            f"{where}: a random generator after a refusal", _random_states(device), at_start
        )
        assert_equal(f"{where}: an argument after a refusal", outcome.after, outcome.before)
        return None
    if isinstance(expected.result, Exception):
        # A compiler drops what nothing uses, and its errors.
        if not isinstance(outcome.result, Exception) and program.compiler is None:
            raise LawViolation(
                f"{where}: no error, where the function raises {_first_line(expected.result)}"
            )
        tally.errors += 1
        return None
    if isinstance(outcome.result, Exception):
        text = f"{where}: it raises {_first_line(outcome.result)}, where the function does not"
        raise LawViolation(text) from outcome.result
    eager.assert_alike(f"{where}: result", outcome.result, expected.result)
    with torch.no_grad():  # autograd refuses a clone of one of several views that were written to
        copy = tree_map(
            lambda x: x.detach().clone() if isinstance(x, Tensor) else x, expected.result
        )
    strides, expected_strides, copied = (
        _strides(x, program) for x in (outcome.result, expected.result, copy)
    )
    # A graph may return the strides of a clone, or those that the function itself returned.
    lent = zip(strides, expected_strides, copied, strict=True)
    assert_equal(f"{where}: strides", strides, [a if a == x else b for x, a, b in lent])
    assert_equal(
        f"{where}: requires grad", _requiring(outcome, expected), _requiring(expected, expected)
    )
    if program.draws:
        assert_equal(f"{where}: random generator", _random_states(device), drawn)
    eager.assert_alike(f"{where}: argument", outcome.arguments, expected.arguments)
    eager.assert_alike(f"{where}: closed-over tensor", graph.closed_over(), eager.closed_over())
    if more := _shared(outcome.result, program) - _shared(expected.result, program):
        raise LawViolation(
            f"{where}: {' shares memory with '.join(min(more))}, which the function's does not"
        )
    return expected.result, outcome.result


def _outcome(world: _World, call: int, state: Any) -> _Outcome:
    """Make one call. The next value of a donated argument is compared as a result, so `arguments`
    leaves it out."""
    arguments = world.arguments(call)
    donated = len(world.program.donated)
    world.names["before"](call)
    if (
        # The next state may have another shape or dtype; then this call begins with a new one.
        isinstance(state, Tensor)
        and state.shape == arguments[0].shape
        and state.dtype == arguments[0].dtype
    ):
        arguments[0] = state
    before = _readable(arguments)
    try:
        with world.names["around"](call):
            result: Any = world.call(*arguments)
    except Exception as error:
        result = error
    after = _readable(arguments)
    return _Outcome(
        result, after[donated:], before, after, {storage_id(x) for x in _tensors(arguments)}
    )


def _readable(arguments: Sequence[Any]) -> list[Any]:
    """The leaves of the arguments as they are now, with the states of generators."""
    return [[_copied(x) for x in tree_leaves(argument)] for argument in arguments]


def _copied(x: Any) -> Any:
    if isinstance(x, torch.Generator):
        return x.get_state()
    if isinstance(x, Tensor):
        return x.detach().clone()
    if isinstance(x, nn.Module):
        return None
    return x


def _in_layout(state: Any, like: Any) -> Any:
    """The next state with the strides of `like`: a graph keeps the next state in the storage of
    the old one."""
    if not isinstance(state, Tensor) or state.stride() == like.stride():
        return state
    return torch.empty_strided(
        like.shape, like.stride(), dtype=like.dtype, device=like.device
    ).copy_(state)


def _strides(result: Any, program: TensorProgram) -> list[Any]:
    """The strides of the results along axes of more than one element; none for a tensor without
    elements. Next states are left out: they have the strides of the old states, whose storage they
    take."""
    results = _tensors(result)[len(program.donated) :]
    return [
        [step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1 and x.numel()]
        for x in results
    ]


def _requiring(outcome: _Outcome, expected: _Outcome) -> list[bool]:
    """`requires_grad` of each result, except results that share memory with an argument: a graph
    copies these."""
    pairs = zip(_tensors(outcome.result), _tensors(expected.result), strict=True)
    return [
        x.requires_grad for x, reference in pairs if storage_id(reference) not in expected.storages
    ]


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _shared(result: Any, program: TensorProgram) -> set[tuple[str, str]]:
    """The pairs of results that share memory, by index. Next states are left out: they lie in the
    memory of the old ones."""
    results = [*enumerate(_tensors(result))][len(program.donated) :]
    # Tensors without elements have no memory to share.
    names = [(f"result {i}", storage_id(x)) for i, x in results if x.numel()]
    return {(a, b) for i, (a, one) in enumerate(names) for b, other in names[:i] if one == other}


def _random_states(device: str) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]


def _set_random_states(states: Sequence[Tensor], device: str) -> None:
    torch.set_rng_state(states[0])
    if device == "cuda":
        torch.cuda.set_rng_state(states[1])


def _compare_threads(eager: _World, graph: _World) -> None:
    """Make all calls again, from several threads at once."""
    calls = range(eager.program.calls)
    threads = eager.program.threads
    # The barrier makes the threads' first calls overlap.
    start = threading.Barrier(threads)

    def run(_: int) -> list[Any]:
        start.wait()
        return [_in_surroundings(graph, call) for call in calls]

    expected = [_in_surroundings(eager, call) for call in calls]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for results in pool.map(run, range(threads)):
            eager.assert_alike(f"{eager.law}, in threads: result", results, expected)


def _in_surroundings(world: _World, call: int) -> Any:
    arguments = world.arguments(call)
    with world.names["around"](call):
        return world.call(*arguments)


def reason_of(error: Exception) -> str:
    """The reason of a refusal, without the user's line, names and sizes, so that equal reasons are
    counted together."""
    if isinstance(error, WeftError):
        problem = error.problem
    else:
        problem = str(error)
    text = re.sub(r"\(.*?\)|\[.*?\]", "(...)", problem.splitlines()[0])
    return f"{type(error).__name__}: {re.sub(r'[xy][0-9]+', 'x', text)}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
