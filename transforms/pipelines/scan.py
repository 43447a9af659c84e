"""`scan`: a step repeated, each time on the state that the one before left."""

import functools
from collections.abc import Callable
from typing import Any

from weft.arguments import is_int, kind_of
from weft.donation import clone, declare_donated, donated_argnames
from weft.errors import ProgramError
from weft.transforms.graphs.calls.borrowing import lends
from weft.transforms.pipelines.pipeline import Pipelined
from weft.transforms.pipelines.pipeline_checks import check_step
from weft.transforms.pipelines.transports.worker import of_length


def scan(step: Callable[[Any, Any, Any], tuple[Any, Any]], length: int) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """Run a step `length` times on the same batch, the state threaded through: a decode loop, since a decode batch
    names rows of the state alone, and the state holds their last tokens.

    Args:
        step: `(params, state, batch) -> (state, out)`. A pipeline overlaps its stages: its micro-batches are cohorts of
            requests, and each waits only for its own tokens.
        length: at least 1.

    Returns:
        A step `(params, state, batch) -> (state, outs)`: a list of what each step returned, in order. Not stacked, as
        `jax.lax.scan` does: the dimensions of each output keep their names, so that a ladder can pad and unpad them.

    Raises:
        ProgramError: no such length, a step that is no function, or one that returns anything but `(state, out)`.

    >>> double = scan(lambda params, state, batch: (2 * state, state + batch), 3)
    >>> double(None, 1, 10)
    (8, [11, 12, 14])
    """
    call = f"scan({getattr(step, '__name__', step)!s:.60}, {getattr(length, '__name__', repr(length))})"
    if not is_int(length, 1):
        raise ProgramError(call, f"length={getattr(length, '__name__', repr(length))}", "an int >= 1")
    if not callable(step):
        raise ProgramError(call, f"{kind_of(step)}, no function", "a step (params, state, batch) -> (state, out)")
    check_step(call, step)

    def run(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        if isinstance(step, Pipelined):
            return step.repeat(params, state, batch, length)
        outs = []
        for _ in range(length):
            made = step(params, state, batch)
            if not isinstance(made, tuple) or len(made) != 2:
                raise ProgramError(call, f"the step returned {kind_of(made)}{of_length(made)}", "return (state, out)")
            state, out = made
            outs.append(clone(out) if lends(step) else out)  # the next step overwrites what is lent
        return state, outs

    functools.update_wrapper(run, step, assigned=("__module__", "__name__", "__qualname__"), updated=())
    del vars(run)["__wrapped__"]
    return declare_donated(run, donated_argnames(step))
