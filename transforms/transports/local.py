"""The local transport: all ranks in one process, their effects interleaved, values handed over as they are."""

from collections.abc import Callable, Sequence
from typing import Any

from weft.effects import Broadcast, Program, Recv, Run, Schema, Send
from weft.errors import ProgramError
from weft.transforms.schedule import interleave


def run_local(
    programs: Sequence[Program],
    stages: Sequence[Callable[..., Any]],
    advance: Callable[..., Any] | None,
    params: Sequence[Any],
    state: Sequence[Any],
    batches: Sequence[Any],
) -> tuple[tuple[Any, ...], list[Any]]:
    """Execute checked programs.

    Args:
        programs: one a rank.
        stages, params, state: one a rank.
        advance: what `run advance` calls.
        batches: the micro-batches.

    Returns:
        The new states, and the last stage's output for each micro-batch.
    """
    states, last = list(state), len(programs) - 1
    inputs: dict[tuple[int, int], Any] = {}  # (rank, micro-batch) -> what the stage there gets
    results: dict[tuple[int, int], Any] = {}  # (rank, micro-batch) -> what it made
    for step in interleave(programs):
        rank, effect = step.rank, step.effect
        mb = effect.microbatch
        match effect:
            case Run("advance"):
                assert advance is not None, "the schedule has feedback only where there is an advance"
                states[rank] = advance(states[rank], batches[mb], results[rank, mb])
            case Run():
                x = inputs.pop((rank, mb), None)
                made = call_stage(rank, stages[rank], params[rank], states[rank], batches[mb], x)
                states[rank], results[rank, mb] = made
            case Send(to, _, schema):
                _match(rank, effect, schema, results[rank, mb])
                inputs[to, mb] = results.pop((rank, mb))
            case Recv(_, _, schema):
                _match(rank, effect, schema, inputs[rank, mb])
            case Broadcast(root):
                results[rank, mb] = results[root, mb]
    return tuple(states), [results[last, mb] for mb in range(len(batches))]


def call_stage(index: int, stage: Callable[..., Any], params: Any, state: Any, batch: Any, x: Any) -> tuple[Any, Any]:
    """The stage's `(state, y)`; an error from inside it gets a note that says which stage it was."""
    try:
        made = stage(params, state, batch, x)
    except Exception as error:
        error.add_note(f"in stage {index} ({getattr(stage, '__name__', stage)})")
        raise
    if not isinstance(made, tuple) or len(made) != 2:
        name = getattr(stage, "__name__", stage)
        raise ProgramError(f"stage {index} ({name})", f"it returned a {type(made).__name__}", "return (state, y)")
    return made


def _match(rank: int, effect: Send | Recv, schema: Schema | None, value: Any) -> None:
    """Raise unless the value that travels is of the schema declared for its edge."""
    if schema is not None and (seen := Schema.of(value)) != schema:
        raise ProgramError(f"rank {rank}: '{effect}'", f"a value of schema {seen}", f"return {schema} from the stage")
