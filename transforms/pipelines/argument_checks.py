"""Checks of the arguments of `pipeline`, `compose` and their steps, before anything runs."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from weft.arguments.checks import is_int, kind_of
from weft.donation import refuse_donated
from weft.effects import Schema
from weft.errors import ProgramError
from weft.torchapi.private import in_functorch_transform
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.local import Local
from weft.trees import tree_leaves

_SIGNATURE = "(params, state, batch, x) -> (state, y)"


def check_stages(transform: str, stages: Any) -> tuple[Callable[..., Any], ...]:
    """The stages as a tuple of functions. Raises ProgramError for anything else."""
    call = f"{transform}({getattr(stages, '__name__', stages)!s:.80})"
    if callable(stages):
        raise ProgramError(call, "one function", f"a list of stages: {transform}([stage])")
    if not isinstance(stages, Iterable) or isinstance(stages, str | dict):
        raise ProgramError(call, kind_of(stages), f"a list of stages, each {_SIGNATURE}")
    checked = tuple(stages)
    if not checked:
        raise ProgramError(call, "no stage", f"at least one function {_SIGNATURE}")
    call = f"{transform}(<{len(checked)} stage{'s' * (len(checked) > 1)}>)"
    for index, stage in enumerate(checked):
        if hasattr(stage, "named_parameters"):
            raise ProgramError(call, f"stage {index} is an nn.Module", "weft.stages.from_module(module).stage")
        if not callable(stage):
            instead = "its .stage" if hasattr(stage, "stage") else f"a stage {_SIGNATURE}"
            raise ProgramError(call, f"stage {index} is {kind_of(stage)}, no function", instead)
        if hasattr(stage, "programs") and isinstance(inner := getattr(stage, "stages", None), tuple):
            seen = f"stage {index} is itself a {getattr(stage, '__name__', 'pipeline')}, a step (params, state, batch)"
            raise ProgramError(call, seen, f"its {len(inner)} stages in its place: [*step.stages, ...]")
        if not _takes(stage, 4):
            seen = f"stage {index}, {getattr(stage, '__name__', stage)!s:.60}{inspect.signature(stage)}"
            raise ProgramError(call, seen, f"a stage {_SIGNATURE}")
    return checked


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function takes so many arguments by position, as far as its signature is known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def check_step(call: str, step: Callable[..., Any]) -> None:
    """Raise ProgramError for a function that does not take the three arguments of a step."""
    if not _takes(step, 3):
        seen = f"{getattr(step, '__name__', step)!s:.60}{inspect.signature(step)}"
        raise ProgramError(call, seen, "a step (params, state, batch) -> (state, out)")


def check_options(num_stages: int, microbatches: Any, advance: Any, schema: Any, transport: Any) -> None:
    """Raise ProgramError for an argument that `pipeline` cannot take, other than its stages."""
    call = f"pipeline(<{num_stages} stages>, "
    if not is_int(microbatches, least=1):
        raise ProgramError(f"{call}microbatches={microbatches!r})", "no number of parts", "an int >= 1")
    if advance is not None and not callable(advance):
        instead = "a function (state, batch, out) -> state; for a weft.Batch, weft.advance"
        raise ProgramError(f"{call}advance={advance!r})", f"{kind_of(advance)}, no function", instead)
    if advance is not None and not _takes(advance, 3):
        seen = f"{getattr(advance, '__name__', advance)!s:.60}{inspect.signature(advance)}"
        raise ProgramError(f"{call}advance=...)", seen, "a function (state, batch, out) -> state")
    if schema is not None and not isinstance(schema, Schema):
        instead = "weft.Schema.parse(text), or weft.Schema.of(value)"
        raise ProgramError(f"{call}schema={schema!r:.60})", kind_of(schema), instead)
    if (wrong := wrong_transport(transport)) is not None:
        raise ProgramError(f"{call}transport=...)", *wrong)


def wrong_transport(transport: Any) -> tuple[str, str] | None:
    """The `seen` and `instead` of an error about a value that is not a transport; None for a transport or None."""
    if isinstance(transport, type):
        return f"transport={transport.__name__}, the class", f"one of it: {transport.__name__}()"
    if transport is not None and not hasattr(transport, "ranks"):
        return f"transport={transport!r:.60}", "Local(), Threads() or Distributed(), of weft.transforms"
    return None


def check_entries(
    transform: str, num_stages: int, ranks: Sequence[int], params: Sequence[Any], state: Sequence[Any]
) -> None:
    """Raise ProgramError unless `params` and `state` have an entry for each stage that runs here, and no state was
    donated already."""
    call = f"{transform}(<{num_stages} stages>)(params, state, batch)"
    instead = "pass a tuple or list with one entry a stage"
    if len(ranks) < num_stages:
        instead += f" that runs in this process: stage {', '.join(map(str, ranks))}"
    for name, given in (("params", params), ("state", state)):
        if given is None:
            raise ProgramError(call, f"{name} is None", f"{instead}: {(None,) * len(ranks)} where they have no {name}")
        if not isinstance(given, tuple | list):
            raise ProgramError(call, f"{name} is {kind_of(given)}", instead)
        if len(given) != len(ranks):
            raise ProgramError(call, f"{name} has {len(given)} entries", instead)
    for leaf in tree_leaves(list(state)):
        refuse_donated(leaf, call=call)


def refuse_transform(transport: Transport) -> None:
    """Raise ProgramError inside a torch.func transform that the transport's ranks would not see: derivatives would be
    zero without a word."""
    if not isinstance(transport, Local) and in_functorch_transform():
        raise ProgramError(
            f"pipeline(..., transport={transport!r}) inside a torch.func transform",
            "ranks outside the thread in which vmap, grad, jvp or vjp is active",
            "transport=Local() inside it; or transform the stages: pipeline([vmap(stage), ...])",
        )
