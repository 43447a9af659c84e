"""Cases of the law that the surroundings of a call of `shard` change nothing (L22): random functions
that close over a tensor, and the context in which they are called.

A case (`SurroundedShard`) is drawn by `surrounded_shards` from the tables of this file: the steps of
the function (`STEPS`, `COLLECTIVE_STEPS`), where its tensor is held (`HOLDERS`), and how it is called
first (`FIRST_CALLS`: in threads, in hooks, in autocast, ...) and later (`LATER_CALLS`).
`weft.proofs._laws.shards` checks it.
"""

import contextlib
import copy
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor, func, nn
from torch.utils.checkpoint import checkpoint

from weft.meshes.mesh import Mesh
from weft.meshes.placements import Shard
from weft.ops.transfers.collective import all_gather, all_reduce, axis_size, ppermute
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.while_loop import while_loop
from weft.transforms.shards.shard import Sharded, shard

AXIS = "rows"
Read = Callable[[], Tensor]
# `(x, read) -> x`, where `read` returns the closed-over tensor.
Step = Callable[[Tensor, Read], Tensor]
# Seconds that a thread waits for the others in the middle of a trace.
_LONGEST_WAIT = 0.5


def _loop(x: Tensor, read: Read) -> Tensor:
    start = x, torch.zeros((), dtype=torch.int64)
    return while_loop(lambda c: c[1] < 3, lambda c: (c[0] / 2 + 1, c[1] + 1), start, max_steps=4)[0]


def _exact(x: Tensor, read: Read) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return (x.float()[:, None] @ torch.ones(1, 1, device=x.device))[:, 0]


def _made_inside(x: Tensor, read: Read) -> Tensor:
    """Add ones made on the default device."""
    ones = torch.ones(len(x))
    # A tensor on `meta` has no values, so there a number is added instead.
    return x + (2 if ones.is_meta else ones)


def _mean_of_ranks(x: Tensor, read: Read) -> Tensor:
    count = all_reduce(torch.tensor(float(len(x)), device=x.device), AXIS)
    return x - all_reduce(x.sum(), AXIS) / count


def _least_of_all(x: Tensor, read: Read) -> Tensor:
    return x - all_gather(x, AXIS, dim=-1).amin()


def _around(x: Tensor, read: Read) -> Tensor:
    """Move the parts one rank around the ring and back."""
    moved = ppermute(x, AXIS, _ring(1)) * 2
    return ppermute(moved, AXIS, _ring(-1))


class _Caller(threading.Thread):
    """One of several threads that call at the same time.

    Args:
        target: the call.
        meeting: the barrier of all these threads.
    """

    def __init__(self, target: Callable[[], None], meeting: threading.Barrier) -> None:
        super().__init__(target=target)
        self._meeting = meeting

    def meet(self) -> None:
        """Wait until all threads are here, at most `_LONGEST_WAIT` seconds."""
        # A thread that failed or has nothing to trace never comes.
        with contextlib.suppress(threading.BrokenBarrierError):
            self._meeting.wait(_LONGEST_WAIT)


def _meeting(x: Tensor, read: Read) -> Tensor:
    """Hold each concurrent caller until all of them are in the middle of their traces."""
    caller = threading.current_thread()
    if isinstance(caller, _Caller):
        caller.meet()
    return x


def _ring(step: int) -> list[tuple[int, int]]:
    count = axis_size(AXIS)
    return [(place, (place + step) % count) for place in range(count)]


# Steps that are the same on a rank's part and on the whole.
STEPS: dict[str, Step] = {
    "tanh": lambda x, read: torch.tanh(x) * x,
    "detach": lambda x, read: x * x.detach(),
    "detach in place": lambda x, read: x * (x * 3).detach_(),
    "data": lambda x, read: x * x.data,
    "write in place": lambda x, read: (x * 2).mul_(3),
    "closed over": lambda x, read: x * read(),
    "closed over, detached": lambda x, read: x * read().detach(),
    "closed over, in a transform": lambda x, read: func.vmap(lambda row: row * read())(x),
    "derivative inside": lambda x, read: func.grad(lambda y: (torch.tanh(y) * y.detach()).sum())(x),
    "checkpoint inside": lambda x, read: checkpoint(torch.tanh, x, use_reentrant=False),
    "a constant": lambda x, read: x * torch.tensor(2.0),
    "made inside": _made_inside,
    "without autocast": _exact,
    "a loop": _loop,
}
# Each step on a rank's part, and on the whole.
COLLECTIVE_STEPS: dict[str, tuple[Step, Step]] = {
    "less the mean": (_mean_of_ranks, lambda x, read: x - x.mean()),
    "less the least": (_least_of_all, lambda x, read: x - x.amin()),
    "around and back": (_around, lambda x, read: x * 2),
    "a meeting of threads": (_meeting, lambda x, read: x),
}


class _Object:
    """Holds a tensor as an attribute."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


class _Module(nn.Module):
    """Holds a tensor as a parameter, or as an attribute after a write."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(weight)


# A function that reads the tensor, and a function that replaces it.
Holder = tuple[Read, Callable[[Tensor], None]]


def _in_a_nonlocal() -> Holder:
    weight = torch.ones(())

    def write(value: Tensor) -> None:
        nonlocal weight
        weight = value

    return lambda: weight, write


def _in_a_dict() -> Holder:
    mapping = {"weight": torch.ones(())}
    return lambda: mapping["weight"], functools.partial(mapping.__setitem__, "weight")


def _in_an_object() -> Holder:
    mapping = {"inner": _Object(torch.ones(()))}

    def write(value: Tensor) -> None:
        mapping["inner"] = _Object(value)

    return lambda: mapping["inner"].weight, write


def _in_a_module() -> Holder:
    module = _Module(torch.ones(()))

    def write(value: Tensor) -> None:
        # `nn.Module` refuses to assign a plain tensor over a registered parameter.
        del module.weight
        module.weight = value

    return lambda: module.weight, write


# The places where the closed-over tensor may be held.
HOLDERS: dict[str, Callable[[], Holder]] = {
    "a nonlocal": _in_a_nonlocal,
    "an entry of a dict": _in_a_dict,
    "an attribute of an object": _in_an_object,
    "a parameter of a module": _in_a_module,
}


def _inside(context: Callable[[], AbstractContextManager[Any]]) -> Callable[[Any, Tensor], Any]:
    def call(step: Any, x: Tensor) -> Any:
        with context():
            return step(x)

    return call


def _read(x: Tensor) -> Tensor:
    """A saved-tensor hook that reads the value on the host."""
    x.sum().item()
    return x


def _gradient(step: Any, x: Tensor) -> Tensor | None:
    leaf = x.clone().requires_grad_()
    step(leaf).sum().backward()
    return leaf.grad


def _in_hooks(step: Any, x: Tensor) -> Tensor | None:
    with torch.autograd.graph.saved_tensors_hooks(_read, lambda saved: saved):
        return _gradient(step, x)


def _in_threads(step: Any, x: Tensor) -> list[Tensor]:
    """The results of calls that begin at the same time."""
    results, errors = list[Tensor](), list[BaseException]()
    meeting = threading.Barrier(3)

    def run() -> None:
        meeting.wait()
        try:
            results.append(step(x))
        except BaseException as error:
            errors.append(error)

    threads = [_Caller(run, meeting) for _ in range(meeting.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _after_an_error(step: Any, x: Tensor) -> Any:
    with contextlib.suppress(Exception):
        # The first trace fails here. Nothing of it may be left when the second one begins.
        step("no tensor")
    return step(x)


def _lowered(step: Any, x: Tensor) -> Any:
    with contextlib.suppress(Exception):
        graphify(step).lower(x)
    return step(x)


# Ways to make the first call, `step(x)`, by the call's surroundings.
FIRST_CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a plain call": lambda step, x: step(x),
    "in a graph": lambda step, x: graphify(step)(x),
    "after lower": _lowered,
    "in hooks on saved tensors": _in_hooks,
    "in checkpoint": lambda step, x: _gradient(
        functools.partial(checkpoint, step, use_reentrant=False), x
    ),
    "without grad": _inside(torch.no_grad),
    "in inference mode": _inside(torch.inference_mode),
    "in autocast": _inside(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "on a default device": _inside(lambda: torch.device("cpu")),
    "in threads": _in_threads,
    "of a copy": lambda step, x: copy.deepcopy(step)(x),
    "after an error": _after_an_error,
    "under vmap": lambda step, x: func.vmap(step)(torch.stack([x, x + 1])),
    "under grad": lambda step, x: func.grad(lambda y: step(y).sum())(x),
    "on another default device": _inside(lambda: torch.device("meta")),
    "of a copy of a called one": lambda step, x: (step(x), copy.deepcopy(step)(x)),
}


def _backward(f: Callable[[Tensor, Tensor], Tensor], w: Tensor, x: Tensor) -> Any:
    leaves = w.clone().requires_grad_(), x.clone().requires_grad_()
    f(*leaves).sum().backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


# Later calls: the function `(weight, x)` itself, or its derivatives.
LATER_CALLS: dict[str, Callable[[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor], Any]] = {
    "a plain call": lambda f, w, x: f(w, x),
    "backward": _backward,
    "grad": lambda f, w, x: func.grad(lambda *both: f(*both).sum(), argnums=(0, 1))(w, x),
    "grad of what is closed over": lambda f, w, x: func.grad(
        lambda param: f(param, x).square().sum()
    )(w),
    "jvp of what is closed over": lambda f, w, x: func.jvp(
        lambda param: f(param, x), (w,), (w + 1,)
    ),
    "vmap of what is closed over": lambda f, w, x: func.vmap(lambda param: f(param, x))(
        torch.stack([w, w + 1])
    ),
    "second derivative": lambda f, w, x: func.grad(
        func.grad(lambda param: f(param, x).square().sum())
    )(w),
    "graph of grad": lambda f, w, x: graphify(func.grad(lambda param: f(param, x).sum()))(w),
}


@attrs.frozen(eq=False)
class SurroundedShard:
    """A function that closes over a tensor, with the surroundings of its calls.

    Args:
        code: the steps, in order.
        num_ranks: the number of ranks that share the rows.
        holder: where the tensor is, a key of `HOLDERS`.
        first: the first call, a key of `FIRST_CALLS`.
        later: the later calls, keys of `LATER_CALLS`.
        rows: the number of rows per rank.
    """

    code: tuple[str, ...]
    num_ranks: int
    holder: str
    first: str
    later: tuple[str, ...]
    rows: int

    def function(self, read: Read, *, on_a_rank: bool) -> Callable[[Tensor], Tensor]:
        """The function of one rank's rows, or of all rows."""
        steps = [STEPS.get(name) or COLLECTIVE_STEPS[name][not on_a_rank] for name in self.code]

        def fn(x: Tensor) -> Tensor:
            for step in steps:
                x = step(x, read)
            return x

        return fn

    def sharded(self, read: Read) -> Sharded:
        """The function on all ranks."""
        return shard(
            self.function(read, on_a_rank=True), Mesh(**{AXIS: self.num_ranks}), Shard(0), Shard(0)
        )

    @property
    def x(self) -> Tensor:
        """The argument: the rows of all ranks."""
        return torch.linspace(-1, 2, self.rows * self.num_ranks)


@st.composite
def surrounded_shards(draw: st.DrawFn) -> SurroundedShard:
    """A function that closes over a tensor, with the surroundings of its calls."""
    return SurroundedShard(
        code=tuple(
            draw(st.lists(st.sampled_from([*STEPS, *COLLECTIVE_STEPS]), min_size=1, max_size=3))
        ),
        num_ranks=draw(st.integers(1, 3)),
        holder=draw(st.sampled_from(list(HOLDERS))),
        first=draw(st.sampled_from(list(FIRST_CALLS))),
        later=tuple(draw(st.lists(st.sampled_from(list(LATER_CALLS)), min_size=1, max_size=2))),
        rows=draw(st.integers(1, 2)),
    )
