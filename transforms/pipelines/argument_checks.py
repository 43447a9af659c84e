"""Checks of the arguments of `pipeline`, `compose`, `microbatch` and `scan`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from weft.arguments.checks import COUNT, Rule, check_values, kind_of, other_signature
from weft.effects import Program
from weft.errors import ProgramError
from weft.meshes.mesh import Mesh
from weft.torchapi.private import in_functorch_transform
from weft.transforms.graphs.calls.borrowing import lends
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.local import Local
from weft.values.donation import refuse_donated_in
from weft.values.schema import Schema

# A mistake in two texts: the thing that was seen, and the code to write instead.
Mistake = tuple[str, str]

_SIGNATURE = "(params, state, batch, x) -> (state, y)"
TRANSPORT: Rule = (
    # A class has the method, too: this refuses `transport=Local`, without the parentheses.
    lambda value: value is None or (hasattr(value, "ranks") and not isinstance(value, type)),
    "Local(), Threads() or Distributed(), of weft.transforms",
)
_SCHEDULE = "a function (num_stages, jobs, *, schema, advances, buffers) -> programs"
_OPTIONS: dict[str, Rule] = {
    "microbatches": COUNT,
    "advance": (
        lambda value: value is None or callable(value),
        "a function (state, batch, out) -> state; for a weft.Batch, weft.advance",
    ),
    "schema": (Schema | None, "weft.Schema.parse(text), or weft.Schema.of(value)"),
    "transport": TRANSPORT,
    "schedule": (
        lambda value: (
            value is None
            or callable(value)
            or (isinstance(value, list | tuple) and all(isinstance(p, Program) for p in value))
        ),
        f"{_SCHEDULE}: interleaved(2); or the programs; None: make_programs",
    ),
}


def refuse(call: str, mistake: Mistake | None) -> None:
    """Raise ProgramError if there is a mistake."""
    if mistake is not None:
        raise ProgramError(call, *mistake)


def check_stages(transform: str, stages: Any) -> tuple[Callable[..., Any], ...]:
    """The stages as a tuple of functions. Raises ProgramError for anything else."""
    is_list = (
        isinstance(stages, Iterable) and not callable(stages) and not isinstance(stages, str | dict)
    )
    checked = tuple(stages) if is_list else ()
    if not checked:
        if callable(stages):
            problem = "one function"
        elif is_list:
            problem = "no stage"
        else:
            problem = kind_of(stages)
        if callable(stages):
            instead = f"a list of stages: {transform}([stage])"
        else:
            instead = f"a list of stages {_SIGNATURE}"
        raise ProgramError(
            f"{transform}({getattr(stages, '__name__', stages)!s:.80})", problem, instead
        )
    call = f"{transform}(<{len(checked)} stage{'s' * (len(checked) > 1)}>)"
    for index, stage in enumerate(checked):
        refuse(call, _mistake_in_stage(f"stage {index}", stage))
    return checked


def check_lending(call: str, stages: Sequence[Any]) -> None:
    """Raise ProgramError if one function that lends its results is used for several stages: ranks
    run at the same time, so one stage would overwrite the results of another."""
    first: dict[int, int] = {}
    for index, stage in enumerate(stages):
        if lends(stage) and (other := first.setdefault(id(stage), index)) != index:
            problem = f"stages {other} and {index} are one function, which lends its results"
            raise ProgramError(
                call, problem, 'a graph for each stage, or one of graphify(stage, outputs="safe")'
            )


def _mistake_in_stage(name: str, stage: Any) -> Mistake | None:
    # Before `callable`, since a module is callable: it would fail only at the first call, with four
    # arguments that its `forward` does not take.
    if hasattr(stage, "named_parameters"):
        return f"{name} is an nn.Module", "weft.stages.from_module(module).stage"
    if not callable(stage):
        if hasattr(stage, "stage"):
            instead = "its .stage"
        else:
            instead = f"a stage {_SIGNATURE}"
        return f"{name} is {kind_of(stage)}, no function", instead
    # By attributes, since `pipeline` imports this module.
    if hasattr(stage, "programs") and isinstance(inner := getattr(stage, "stages", None), tuple):
        problem = (
            f"{name} is itself a {getattr(stage, '__name__', 'pipeline')}, a step (params, state,"
            " batch)"
        )
        return problem, f"its {len(inner)} stages in its place: [*step.stages, ...]"
    if (signature := other_signature(stage, 4)) is not None:
        return f"{name}, {signature}", f"a stage {_SIGNATURE}"
    return None


def check_count(call: str, name: str, count: Any) -> None:
    """Raise ProgramError unless `count`, the argument `name` of the call, is a positive int."""
    check_values(call, {name: COUNT}, {name: count}, ProgramError)


def check_step(transform: str, step: Any, name: str, count: Any) -> str:
    """The call `transform(step, count)` as text. Raises ProgramError unless `step` takes the three
    arguments of a step and `count` (the argument `name`) is a positive int."""
    call = (
        f"{transform}({getattr(step, '__name__', step)!s:.60},"
        f" {getattr(count, '__name__', repr(count))})"
    )
    check_count(call, name, count)
    if callable(step):
        problem = other_signature(step, 3)
    else:
        problem = f"{kind_of(step)}, no function"
    refuse(
        call,
        None if problem is None else (problem, "a step (params, state, batch) -> (state, out)"),
    )
    return call


def check_options(
    num_stages: int, microbatches: Any, advance: Any, schema: Any, transport: Any, schedule: Any
) -> None:
    """Raise ProgramError if `pipeline` cannot take one of these arguments."""
    options = {
        "microbatches": microbatches,
        "advance": advance,
        "schema": schema,
        "transport": transport,
    }
    options["schedule"] = schedule
    for name, value in options.items():
        check_values(
            f"pipeline(<{num_stages} stages>, {name}={value!r:.60})",
            _OPTIONS,
            {name: value},
            ProgramError,
        )
    if advance is not None and (signature := other_signature(advance, 3)) is not None:
        refuse(
            f"pipeline(<{num_stages} stages>, advance=...)",
            (signature, "a function (state, batch, out) -> state"),
        )
    takes = 2, "schema", "advances", "buffers"
    if callable(schedule) and (signature := other_signature(schedule, *takes)) is not None:
        refuse(f"pipeline(<{num_stages} stages>, schedule=...)", (signature, _SCHEDULE))


def check_entries(
    transform: str,
    num_stages: int,
    ranks: Sequence[int],
    params: Sequence[Any],
    state: Sequence[Any],
    batch: Any = None,
    mesh: Mesh | None = None,
) -> None:
    """Raise ProgramError unless `params` and `state` have an entry for each stage that runs here,
    and DonatedError if a tensor among the arguments was donated before.

    Args:
        transform: the caller's name.
        num_stages: the number of stages of the whole pipeline.
        ranks: the stages that run here. With a mesh, each stage occurs once for each rank that runs
            it here.
        params, state, batch: the arguments of the call; `batch` may be a list of batches.
        mesh: the mesh of the pipeline.
    """
    call = (
        f"{transform}(<{num_stages} stages>{'' if mesh is None else f', mesh={mesh}'})(params,"
        " state, batch)"
    )
    instead = "pass a tuple or list with one entry a stage"
    if mesh is not None:
        instead = f"pass a tuple or list of {len(ranks)} entries, each a rank's part: for stage"
        instead += f" {', '.join(map(str, ranks))}, in the order of the ranks"
    elif len(ranks) < num_stages:
        instead += f" that runs in this process: stage {', '.join(map(str, ranks))}"
    for name, entries in (("params", params), ("state", state)):
        is_list = isinstance(entries, tuple | list)
        if not is_list or len(entries) != len(ranks):
            problem = (
                f"{name} has {len(entries)} entries" if is_list else f"{name} is {kind_of(entries)}"
            )
            example = (
                f": {(None,) * len(ranks)} where they have no {name}" if entries is None else ""
            )
            raise ProgramError(call, problem, instead + example)
    refuse_donated_in(call, params=params, state=state, batch=batch)


def refuse_transform(transport: Transport) -> None:
    """Raise ProgramError inside a torch.func transform that the transport's ranks would not see:
    derivatives would silently be zero."""
    if not isinstance(transport, Local) and in_functorch_transform():
        problem = "ranks outside the thread in which vmap, grad, jvp or vjp is active"
        instead = (
            "transport=Local() inside it; or transform the stages: pipeline([vmap(stage), ...])"
        )
        raise ProgramError(
            f"pipeline(..., transport={transport!r}) inside a torch.func transform",
            problem,
            instead,
        )
