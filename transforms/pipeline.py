"""`pipeline`: stages as one step. Each rank's part is a program of effects, checked before the first tensor moves."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from weft.donation import donated_argnames
from weft.effects import Program, Schema, listing
from weft.errors import ProgramError
from weft.transforms.microbatch import join, split
from weft.transforms.schedule import check, streaming
from weft.transforms.transports.local import run_local

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
    stages = tuple(stages)

    def step(params: Sequence[Any], state: Sequence[Any], batch: Any) -> tuple[Any, Any]:
        x, states = None, []
        for stage, p, s in zip(stages, params, state, strict=True):
            new, x = stage(p, s, batch, x)
            states.append(new)
        if advance is not None:
            states = [advance(s, batch, x) for s in states]
        return tuple(states), x

    step.__weft_donates__ = _donations(stages, advance)  # type: ignore[attr-defined]
    return step


def _donations(stages: Sequence[Stage], advance: Advance | None) -> tuple[str, ...]:
    functions: list[Callable[..., Any]] = [*stages, *([advance] if advance is not None else [])]
    return ("state",) if any("state" in donated_argnames(f) for f in functions) else ()


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
        self.programs = functools.cache(self._build)
        self.programs(microbatches)

    def _build(self, microbatches: int) -> tuple[Program, ...]:
        """Each rank's program for so many micro-batches, checked."""
        made = streaming(len(self.stages), microbatches, schema=self._schema, feedback=self._advance is not None)
        check(made)
        return made

    def __call__(self, params: Sequence[Any], state: Sequence[Any], batch: Any) -> tuple[Any, Any]:
        for name, given in (("params", params), ("state", state)):
            if len(given) != len(self.stages):
                raise ProgramError(
                    f"pipeline(<{len(self.stages)} stages>)(params, state, batch)",
                    f"{name} has {len(given)} entries",
                    "pass a sequence with one entry a stage",
                )
        batches = split(batch, self.microbatches)
        programs = self.programs(len(batches))
        states, outputs = run_local(programs, self.stages, self._advance, params, state, batches)
        return states, join(outputs)

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
    stages = tuple(stages)
    if not stages or microbatches < 1:
        raise ProgramError(
            f"pipeline(<{len(stages)} stages>, microbatches={microbatches})", "nothing to run", "at least one of each"
        )
    return Pipelined(stages, microbatches, advance, schema)
