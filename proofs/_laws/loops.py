"""L1 for loops: `while_loop`, run eagerly or as one launch of a graph, and `scan` with a done flag
give what the Python loop gives."""

from typing import Any

import torch

from weft.proofs._strategies.loops import STEPS, Loop
from weft.proofs.checks.difference import LawViolation
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.while_loop import while_loop
from weft.transforms.pipelines.microbatch import scan
from weft.values.donation import donates


def loops_are_python_loops(loop: Loop, device: str = "cpu") -> None:
    """L1: `while_loop` gives what Python's loop gives on Python's integers, eagerly and in one
    graph for any number of steps, and so does `scan` with a flag that ends the loop."""

    def eager(carry: Any) -> Any:
        return while_loop(loop.cond, loop.body, carry, max_steps=loop.max_steps)

    @donates("carry")
    def in_place(carry: Any) -> Any:
        values, steps = carry
        # Cloned before any write: where the body moves values, a new one is the old tensor of
        # another slot.
        for value, new in zip(values, [new.clone() for new in loop.body(carry)[0]], strict=True):
            value.copy_(new)
        return values, steps.add_(1)

    def taking(carry: Any) -> Any:
        return while_loop(loop.cond, in_place, carry, max_steps=loop.max_steps)

    if loop.in_place:
        whole = graphify(taking, donate_argnames="carry")
    else:
        whole = graphify(eager)
    state: Any = _first(loop, loop.starts[0], device)
    for start in loop.starts:
        if loop.in_place:  # donated memory is kept from call to call
            for value, first in zip((*state[0], state[1]), (*start, 0), strict=True):
                value.fill_(first)
        else:
            state = _first(loop, start, device)
        results = {
            "eagerly": eager(_first(loop, start, device)),
            "by scan": _scanned(loop, _first(loop, start, device)),
        }
        replayed = whole(state)
        state = replayed if loop.in_place else state
        for way, result in (results | {"in a graph": replayed}).items():
            numbers = [int(x) for x in (*result[0], result[1])]
            if numbers != loop.expected(start):
                raise LawViolation(
                    f"L1 loops are Python's: {way}, from {start}: {numbers} for"
                    f" {loop.expected(start)}"
                )
    if (captures := whole.cache_info().captures) != 1:
        raise LawViolation(
            f"L1 loops are Python's: {captures} captures for loops of different lengths"
        )


def _first(loop: Loop, start: Any, device: str) -> Any:
    return [torch.tensor(x, device=device) for x in start], torch.tensor(0, device=device)


def _scanned(loop: Loop, carry: Any) -> Any:
    """The last carry of `scan`, whose steps keep the carry unchanged once the loop has ended."""

    def step(_: Any, state: Any, batch: Any) -> Any:
        carry, live, left = state
        new = loop.body(carry)
        *values, steps = (
            torch.where(live, b, a)
            for a, b in zip((*carry[0], carry[1]), (*new[0], new[1]), strict=True)
        )
        carry = values, steps
        return (carry, live & loop.cond(carry) & (left > 1), left - 1), None

    most = torch.tensor(STEPS if loop.max_steps is None else loop.max_steps, device=carry[1].device)
    return scan(step, STEPS)(None, (carry, loop.cond(carry), most), None)[0][0]
