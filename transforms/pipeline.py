"""`pipeline`: stages as one step. Each rank's part is a program of effects, checked before the first tensor moves."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from weft.donation import donated_argnames, refuse_donated
from weft.effects import Program, Schema, listing
from weft.errors import ProgramError
from weft.transforms.microbatch import join, split
from weft.transforms.schedule import check, streaming
from weft.transforms.transports.local import call_stage, run_local
from weft.trees import tree_leaves

Stage = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
Advance = Callable[[Any, Any, Any], Any]


def compose(stages: Sequence[Stage], *, advance: Advance | None = None) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """The step that runs the stages one after the other on the whole batch: what every pipeline must equal.

    Args:
        stages: each `(params, state, batch, x) -> (state, y)`; x is None on the first, then the y of the one before.
        advance: `(state, batch, out) -> state`, run for every stage with the last one's output.

    Returns:
        A step `(params, state, batch) -> (state, out)`, where params and state are tuples, one entry a stage.
    """
    stages = _checked_stages("compose", stages)

    def step(params: Sequence[Any], state: Sequence[Any], batch: Any) -> tuple[Any, Any]:
        _check_entries("compose", len(stages), params, state)
        x: Any = None
        states: list[Any] = []
        for stage, p, s in zip(stages, params, state, strict=True):
            new, x = call_stage(len(states), stage, p, s, batch, x)
            states.append(new)
        if advance is not None:
            states = [advance(s, batch, x) for s in states]
        return tuple(states), x

    step.__weft_donates__ = _donations(stages, advance)  # type: ignore[attr-defined]
    return step


def _checked_stages(transform: str, stages: Any) -> tuple[Stage, ...]:
    call = f"{transform}({stages!r:.80})"
    if callable(stages):
        raise ProgramError(call, "one function", f"a list of stages: {transform}([stage])")
    checked: tuple[Stage, ...] = tuple(stages)
    if not checked:
        raise ProgramError(call, "no stage", "at least one function (params, state, batch, x) -> (state, y)")
    for index, stage in enumerate(checked):
        if hasattr(stage, "named_parameters"):
            raise ProgramError(call, f"stage {index} is an nn.Module", "weft.stages.from_module(module).stage")
        if not callable(stage):
            raise ProgramError(
                call, f"stage {index} is a {type(stage).__name__}, no function", "its .stage, if it has one"
            )
    return checked


def _check_entries(transform: str, count: int, params: Sequence[Any], state: Sequence[Any]) -> None:
    for name, given in (("params", params), ("state", state)):
        if not isinstance(given, tuple | list) or len(given) != count:
            raise ProgramError(
                f"{transform}(<{count} stages>)(params, state, batch)",
                f"{name} has {len(given)} entries"
                if isinstance(given, tuple | list)
                else f"{name} is a {type(given).__name__}",
                "pass a tuple or list with one entry a stage",
            )
    for leaf in tree_leaves(list(state)):  # before the first stage takes the first state
        refuse_donated(leaf, call=f"{transform}(<{count} stages>)(params, state, batch)")


def _donations(stages: Sequence[Stage], advance: Advance | None) -> tuple[str, ...]:
    functions: list[Callable[..., Any]] = [*stages, *([advance] if advance is not None else [])]
    return ("state",) if any("state" in donated_argnames(f) for f in functions) else ()


@functools.cache
def _programs(num_stages: int, microbatches: int, schema: Schema | None, feedback: bool) -> tuple[Program, ...]:
    made = streaming(num_stages, microbatches, schema=schema, feedback=feedback)
    check(made)
    return made


class Pipelined:
    """What `pipeline` returns: a step, and the programs that it runs. `print` it to read them."""

    def __init__(
        self, stages: Sequence[Stage], microbatches: int, advance: Advance | None, schema: Schema | None
    ) -> None:
        self.stages = tuple(stages)
        self.microbatches = microbatches
        self._advance = advance
        self._schema = schema
        self.__weft_donates__ = _donations(self.stages, advance)
        self.__name__ = f"pipeline of {len(self.stages)} stages"
        self.programs(microbatches)

    def programs(self, microbatches: int) -> tuple[Program, ...]:
        """Each rank's program for so many micro-batches, checked."""
        return _programs(len(self.stages), microbatches, self._schema, self._advance is not None)

    def __call__(self, params: Sequence[Any], state: Sequence[Any], batch: Any) -> tuple[Any, Any]:
        _check_entries("pipeline", len(self.stages), params, state)
        batches = split(batch, self.microbatches)
        programs = self.programs(len(batches))
        states, outputs = run_local(programs, self.stages, self._advance, params, state, batches)
        return states, join(outputs, batches)

    def __str__(self) -> str:
        return listing(self.programs(self.microbatches))

    def __repr__(self) -> str:
        return f"<{self.__name__}, {self.microbatches} micro-batches>"


def pipeline(
    stages: Sequence[Stage], *, microbatches: int = 1, advance: Advance | None = None, schema: Schema | None = None
) -> Pipelined:
    """Span a step over stages: one program of Send, Recv and Run a rank, executed in this process (transport `local`).

    Args:
        stages: each `(params, state, batch, x) -> (state, y)`; x is None on the first, then the y of the one before. A
            graphified stage is a stage.
        microbatches: parts that the batch is cut into, at most (a batch of fewer requests is cut into one a request).
        advance: `(state, batch, out) -> state`; where given, the last stage's output goes back to every rank, and each
            advances its state with it.
        schema: what travels between two stages; where given, every value is held against it.

    Returns:
        A step `(params, state, batch) -> (state, out)` over tuples with one entry a stage. Its `programs(m)` are data.

    Raises:
        ProgramError: no stage, fewer than one micro-batch, or a program that the check refuses.

    >>> print(pipeline([lambda p, s, batch, x: (s, batch + p), lambda p, s, batch, x: (s, x * p)], microbatches=1))
    rank 0 of 2
      run stage 0 [mb 0]
      send to 1 [mb 0]
    rank 1 of 2
      recv from 0 [mb 0]
      run stage 1 [mb 0]
    """
    stages = _checked_stages("pipeline", stages)
    if not isinstance(microbatches, int) or microbatches < 1:
        raise ProgramError(
            f"pipeline(<{len(stages)} stages>, microbatches={microbatches!r})", "no number of parts", "an int >= 1"
        )
    return Pipelined(stages, microbatches, advance, schema)
