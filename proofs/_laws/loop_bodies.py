"""L1 for loops with generated bodies: every way to run a loop gives what Python's loop gives, or
refuses the loop with a named reason."""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.errors import WeftError
from weft.meshes.mesh import Mesh
from weft.meshes.placements import Replicate
from weft.proofs._strategies.loops import Carry, LoopBody
from weft.proofs.checks.difference import LawViolation
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.while_loop import while_loop
from weft.transforms.shards.shard import shard

_LAW = "L1 loops are Python's, on drawn bodies"
_STEEPEST = 1e4
_Slots = tuple[Tensor, ...]
# (slots, bound) -> the slots at the end of the loop.
_Call = Callable[[_Slots, Tensor], _Slots]


def loop_bodies_are_pythons(loop: LoopBody, device: str = "cpu") -> None:
    """L1: a loop gives what Python's loop gives: eagerly, in one graph for all bounds, under
    `vmap`, `grad` and `shard`, and in graphs of these.

    A body may be refused if it reads its counter on the host, draws random numbers, or writes its
    carry. The result is never the initial carry itself, which is left as Python's loop leaves
    it."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        if _python(loop, device, 1) is None:
            # A capture runs the body once whatever the bound, so a body that raises in its first
            # step cannot be compared.
            return
        eager = functools.partial(_run, loop)
        _check_calls(loop, {"eagerly": eager, "in a graph": graphify(eager)}, device)
        match loop.way:
            case "on ranks":
                ranks = shard(eager, Mesh(d=2), Replicate(), Replicate())
                # The graph first, so that the ranks' trace is made inside of a capture.
                _check_calls(
                    loop, {"on ranks in a graph": graphify(ranks), "on ranks": ranks}, device
                )
            case "in rows":
                _check_rows(loop, device)
            case _:
                _check_derivatives(loop, device)


def _check_calls(loop: LoopBody, ways: Mapping[str, _Call], device: str) -> None:
    for bound in loop.bounds:
        expected = _python(loop, device, bound)
        if expected is None:
            continue
        for way, call in ways.items():
            may_refuse = not loop.must_run or "ranks" in way
            result = _called(loop, way, call, bound, device, may_refuse=may_refuse)
            if result is not None:
                _compare(f"{way}, to {bound}", result, expected, loop)


def _check_rows(loop: LoopBody, device: str) -> None:
    """Check `vmap` over the bounds, with one bound per row."""
    bounds = torch.tensor(loop.bounds, device=device)
    rows = torch.func.vmap(functools.partial(_run, loop), in_dims=(None, 0))
    expected = [_python(loop, device, bound) for bound in loop.bounds]
    slots = loop.start(device)
    has_rows = loop.has_rows and loop.max_steps is not None
    if (
        not has_rows
        or any(one is None for one in expected)
        or not _runs(lambda: _step_in_rows(loop, slots, bounds))
    ):
        return  # torch's vmap lacks an operator
    whole = [torch.stack(column) for column in zip(*filter(None, expected), strict=True)]
    calls: dict[str, _Call] = {"in rows": rows, "in rows in a graph": graphify(rows)}
    for way, call in calls.items():
        try:
            result = call(slots, bounds)
        except (RuntimeError, IndexError) as error:
            raise LawViolation(f"{_LAW}: {way}: {type(error).__name__}: {error}; {loop}") from error
        _compare(way, result, whole, loop)


def _step_in_rows(loop: LoopBody, slots: _Slots, bounds: Tensor) -> Carry:
    """The first step under `vmap`, where each row has slots and a counter."""

    def step(bound: Tensor) -> Carry:
        zero = bound * 0
        return loop.body((tuple(x + zero for x in slots), zero))

    result: Carry = torch.func.vmap(step)(bounds)
    return result


def _check_derivatives(loop: LoopBody, device: str) -> None:
    """Check the derivatives with respect to the initial slots and to a closed-over scale, with one
    bound per row of `vmap`."""
    # Rows of `vmap` need `max_steps`, since their conditions differ, and `grad` needs a real total.
    if not loop.has_rows or loop.max_steps is None or loop.dtype.is_complex:
        return
    bounds = torch.tensor(loop.bounds, device=device)
    slots = loop.start(device)

    def total(run: Callable[..., _Slots], scale: Tensor, bound: Tensor) -> Tensor:
        last = run(loop, tuple(x * scale for x in slots), bound, scale)[: loop.num_slots]
        return torch.stack(last).sum()

    scale = torch.ones((), dtype=loop.dtype, device=device)
    by_python = torch.func.grad(functools.partial(total, _python_loop))
    by_scale = torch.func.grad(functools.partial(total, _run))
    in_rows = torch.func.vmap(by_scale, in_dims=(None, 0))
    if not _runs(lambda: [by_python(scale, bound) for bound in bounds]) or not _runs(
        lambda: in_rows(scale, bounds)
    ):
        return
    derivatives = torch.stack([by_python(scale, bound) for bound in bounds])
    # A loop with steeper derivatives is chaotic: the last bit of a batched kernel decides.
    is_comparable = derivatives.abs() < _STEEPEST
    ways: dict[str, Callable[..., Tensor]] = {
        "derivatives in rows": in_rows,
        "derivatives in rows in a graph": graphify(in_rows),
    }
    for way, derive in ways.items():
        _compare(way, [derive(scale, bounds)[is_comparable]], [derivatives[is_comparable]], loop)


def _run(loop: LoopBody, slots: _Slots, bound: Tensor, scale: Tensor | None = None) -> _Slots:
    """The slots at the end of the loop, followed by copies of the initial slots, which are written
    after the loop to show whether its result shares memory with them."""
    start = tuple(x * 1 for x in slots), torch.zeros((), dtype=torch.int64, device=bound.device)
    body = functools.partial(_scaled_body, loop, scale)
    last, _ = while_loop(lambda carry: carry[1] < bound, body, start, max_steps=loop.max_steps)
    # If a slot of the result is the initial tensor, or a view of it, this write shows in it.
    for x in start[0]:
        x.mul_(3)
    return *last, *start[0]


def _scaled_body(loop: LoopBody, scale: Tensor | None, carry: Carry) -> Carry:
    """One step, on slots multiplied by the closed-over scale."""
    slots, counter = carry
    return loop.body((slots if scale is None else tuple(x * scale for x in slots), counter))


def _python_loop(
    loop: LoopBody, slots: _Slots, bound: Tensor, scale: Tensor | None = None
) -> _Slots:
    start = tuple(x * 1 for x in slots)
    carry = start, torch.zeros((), dtype=torch.int64, device=bound.device)
    for _ in range(int(bound) if loop.max_steps is None else min(int(bound), loop.max_steps)):
        carry = _scaled_body(loop, scale, carry)
    return *carry[0], *(x * 3 for x in start)


def _python(loop: LoopBody, device: str, bound: int) -> _Slots | None:
    """The result of Python's loop, or None if torch raises."""
    torch.manual_seed(0)
    try:
        return tuple(
            x.clone()
            for x in _python_loop(loop, loop.start(device), torch.tensor(bound, device=device))
        )
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
        return None


def _called(
    loop: LoopBody, way: str, call: _Call, bound: int, device: str, *, may_refuse: bool
) -> _Slots | None:
    slots = loop.start(device)
    torch.manual_seed(0)
    try:
        result = call(slots, torch.tensor(bound, device=device))
    except WeftError as error:
        if may_refuse or device != "cpu":  # a CUDA graph cannot hold all that a tape can
            return None
        raise LawViolation(f"{_LAW}: {way}, to {bound}, it is refused: {error}") from error
    except (RuntimeError, IndexError, TypeError) as error:
        if may_refuse and "ranks" in way:
            return None  # torch itself refuses to read a fake tensor's value
        raise LawViolation(f"{_LAW}: {way}, to {bound}: {type(error).__name__}: {error}") from error
    if not all(map(torch.equal, slots, loop.start(device))):
        raise LawViolation(f"{_LAW}: {way}, to {bound}, it writes what it starts from")
    return result


def _runs(call: Callable[[], Any]) -> bool:
    try:
        call()
    except (RuntimeError, IndexError, TypeError, NotImplementedError):
        return False
    return True


def _compare(
    way: str, result: Sequence[Tensor], expected: Sequence[Tensor], loop: LoopBody
) -> None:
    for slot, (x, y) in enumerate(zip(result, expected, strict=True)):
        if x.shape != y.shape or not torch.allclose(
            x.cpu(), y.cpu(), rtol=1e-6, atol=1e-9, equal_nan=True
        ):
            problem = f"slot {slot} is {x.tolist()}, in Python {y.tolist()}"
            raise LawViolation(f"{_LAW}: {way}: {problem}; {loop}")
