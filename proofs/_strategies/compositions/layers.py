"""The transforms of a composition, each as a user writes it and by its definition in plain
torch."""

import copy
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch
from torch import Tensor, func
from torch.utils.checkpoint import checkpoint

from weft.meshes.mesh import Mesh
from weft.meshes.placements import Replicate, Shard
from weft.ops.transfers.collective import (
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    ppermute,
    reduce_scatter,
)
from weft.proofs._strategies.compositions.bodies import Function, Kind
from weft.settings import batch_invariant
from weft.transforms.graphs.graphify import graphify, piecewise
from weft.transforms.graphs.while_loop import while_loop
from weft.transforms.pipelines.microbatch import microbatch, scan
from weft.transforms.pipelines.pipeline import compose, pipeline
from weft.transforms.pipelines.transports.threads import Threads
from weft.transforms.shards.shard import shard
from weft.transforms.transform import Transform, lift
from weft.values.donation import clone

Wrap = Callable[[Function], Function]

_AXIS = "ranks"
_RANKS = 2
_STEPS = 3


def _same(function: Function) -> Function:
    return function


@attrs.frozen(eq=False)
class Layer:
    """One transform of a composition, `function -> function`.

    Args:
        apply: the transform as a user writes it.
        meaning: its definition in plain torch, by brute force.
        torch_alone: its definition by torch's own transforms. None: `meaning`. Where this raises,
            torch itself does not support it.
        uses: the public names of weft that it uses.
        divides: whether the function inside sees only half of the rows.
        keeps_draws: whether random numbers are drawn in the order of the plain function.
        tolerance: the tolerance of its result, larger where it computes in another precision.
        slow: whether it takes so long that it is drawn seldom.
        lends: whether its result is valid only until its next call, from any thread.
        kind: what it is to the code inside it. None: it calls that code as it is.
        refused_in: sets of kinds. Weft may refuse it inside layers that have all kinds of one set.
    """

    apply: Wrap
    meaning: Wrap = _same
    torch_alone: Wrap | None = None
    uses: tuple[str, ...] = ()
    divides: bool = False
    keeps_draws: bool = False
    tolerance: float = 2e-4
    slow: bool = False
    lends: bool = False
    kind: Kind | None = None
    refused_in: tuple[frozenset[Kind], ...] = ()


def _by_halves(function: Function) -> Function:
    """Call the function on each half of the rows, and join the results."""

    def halves(x: Tensor) -> Tensor:
        middle = x.shape[0] // 2
        return torch.cat([function(x[:middle]), function(x[middle:])])

    return halves


def _repeated(times: int) -> Wrap:
    def wrap(function: Function) -> Function:
        def repeat(x: Tensor) -> Tensor:
            for _ in range(times):
                x = function(x)
            return x

        return repeat

    return wrap


def _graphified(**options: Any) -> Wrap:
    return lambda function: graphify(function, **options)


def _borrowing(function: Function) -> Function:
    # The next call overwrites a borrowed result, hence the copy below.
    lent = graphify(function, outputs="borrow")
    return lambda x: clone(lent(x))


def _donating(function: Function) -> Function:
    def taking(x: Tensor) -> Tensor:
        return function(x)

    graph = graphify(taking, donate_argnames=["x"])
    # A copy is donated, for the caller may use its argument again.
    return lambda x: graph(x.clone())


def _split_at_custom_operators(function: Function) -> Function:
    return piecewise(_halved_by_an_operator(function), split_at="weft_proofs::halve")


def _halved_by_an_operator(function: Function) -> Function:
    # Halving is exact, so that doubling undoes it bit for bit.
    return lambda x: function(torch.ops.weft_proofs.halve(x) * 2)


def _twice_halved(function: Function) -> Function:
    return lambda x: function(x / 2 * 2)


# Shards: what each rank computes, and the same function without ranks.


def _sharded(local: Callable[[Function, Tensor], Tensor], part: Any, whole: Any) -> Wrap:
    def wrap(function: Function) -> Function:
        return shard(lambda x: local(function, x), Mesh(**{_AXIS: _RANKS}), part, whole)

    return wrap


def _own_half(x: Tensor) -> Tensor:
    half = x.shape[0] // _RANKS
    return x.narrow(0, axis_index(_AXIS) * half, half)


def _halves_of(function: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    middle = x.shape[0] // 2
    return function(x[:middle]), function(x[middle:])


def _sum_added(function: Function) -> Function:
    def whole(x: Tensor) -> Tensor:
        first, second = _halves_of(function, x)
        return torch.cat([first + (first + second), second + (first + second)])

    return whole


def _first_added_to_second(function: Function) -> Function:
    def whole(x: Tensor) -> Tensor:
        first, second = _halves_of(function, x)
        return torch.cat([first, second + first])

    return whole


def _quarters_exchanged(function: Function) -> Function:
    """`all_to_all` on two ranks, without ranks: rank 0 gets the first half of each result, rank 1
    the second."""

    def whole(x: Tensor) -> Tensor:
        first, second = _halves_of(function, x)
        middle = first.shape[0] // 2
        to_first = torch.cat([first[:middle], second[:middle]])
        to_second = torch.cat([first[middle:], second[middle:]])
        return torch.cat([to_first, to_second])

    return whole


# Pipelines and steps.


def _stage(function: Function) -> Callable[..., Any]:
    def stage(params: Any, state: Any, batch: Tensor, x: Tensor | None) -> tuple[Any, Tensor]:
        value = batch if x is None else x
        return state, function(value)

    return stage


def _piped(
    microbatches: int, *, threads: bool = False, lent: bool = False, advances: bool = False
) -> Wrap:
    def wrap(function: Function) -> Function:
        stages = [_stage(function), _stage(function)]
        if lent:
            stages = [graphify(stage, outputs="borrow") for stage in stages]
        if advances:
            advance = lift(lambda state, batch, out: state)
        else:
            advance = None
        step = pipeline(
            stages,
            microbatches=microbatches,
            advance=advance,
            transport=Threads(timeout=60) if threads else None,
        )

        def piped(x: Tensor) -> Tensor:
            y: Tensor = step((None, None), (None, None), x)[1]
            if lent:
                return clone(y)
            return y

        piped.programs = lambda x: step.programs()  # type: ignore[attr-defined]
        return piped

    return wrap


def _plain_step(function: Function) -> Callable[[Any, Any, Tensor], tuple[Any, Tensor]]:
    def step(params: Any, state: Any, batch: Tensor) -> tuple[Any, Tensor]:
        return state, function(batch)

    return step


def _composed(function: Function) -> Function:
    step = compose([_stage(function), _stage(function)])
    return lambda x: step((None, None), (None, None), x)[1]


def _micro_batched(function: Function) -> Function:
    step: Any = microbatch(_plain_step(function), 2)
    return lambda x: step(None, None, x)[1]


def _scanned(function: Function) -> Function:
    step = scan(lambda params, state, batch: (function(state), state), _STEPS)
    return lambda x: step(None, x, x)[0]


def _counted(function: Function) -> Function:
    transform = Transform(
        init=lambda params, state: torch.zeros((), dtype=torch.int64),
        apply=lambda step, count, params, state, batch: (count + 1, *step(params, state, batch)),
    )
    step: Any = transform(_plain_step(function))
    return lambda x: step(None, transform.carry(None, None), x)[1]


# Loops.


def _counting_loop(max_steps: int | None) -> Wrap:
    def wrap(function: Function) -> Function:
        def loop(x: Tensor) -> Tensor:
            start = torch.zeros((), dtype=torch.int64, device=x.device)
            return while_loop(
                lambda carry: carry[1] < _STEPS,
                lambda carry: (function(carry[0]), carry[1] + 1),
                (x, start),
                max_steps=max_steps,
            )[0]

        return loop

    return wrap


def _indexing_loop(function: Function) -> Function:
    """A loop whose body indexes a table by the loop's counter."""

    def loop(x: Tensor) -> Tensor:
        table = torch.tensor([1.0, 2.0, 4.0], device=x.device)
        start = torch.zeros((), dtype=torch.int64, device=x.device)

        def body(carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            value, index = carry
            return function(value) + table[index], index + 1

        return while_loop(lambda carry: carry[1] < _STEPS, body, (x, start), max_steps=_STEPS)[0]

    return loop


def _indexed(function: Function) -> Function:
    def repeat(x: Tensor) -> Tensor:
        for addend in (1.0, 2.0, 4.0):
            x = function(x) + addend
        return x

    return repeat


def _loop_by_data(function: Function) -> Function:
    """A loop of no step or three, depending on the argument."""

    def loop(x: Tensor) -> Tensor:
        length = torch.where(x.detach().sum() > 0, 3, 0)
        start = torch.zeros((), dtype=torch.int64, device=x.device)
        return while_loop(
            lambda carry: carry[1] < length,
            lambda carry: (function(carry[0]), carry[1] + 1),
            (x, start),
            max_steps=5,
        )[0]

    return loop


def _repeated_by_data(function: Function) -> Function:
    def repeat(x: Tensor) -> Tensor:
        if not bool(x.detach().sum() > 0):
            return x.clone()
        for _ in range(3):
            x = function(x)
        return x

    return repeat


def _tried_and_repeated_by_data(function: Function) -> Function:
    """`_repeated_by_data`, after one call of the function to see whether torch can run it.

    Recording a loop runs its body even if the loop has no step, so an error there is an error of
    torch's."""

    def repeat(x: Tensor) -> Tensor:
        function(x.clone())
        return _repeated_by_data(function)(x)

    return repeat


def _swapping_loop(function: Function) -> Function:
    """A loop whose two tensors swap slots at each step."""

    def loop(x: Tensor) -> Tensor:
        start = torch.zeros((), dtype=torch.int64, device=x.device)
        first, second, _ = while_loop(
            lambda carry: carry[2] < _STEPS,
            lambda carry: (carry[1], function(carry[0]), carry[2] + 1),
            (x, x.flip(0), start),
            max_steps=_STEPS,
        )
        return first - second

    return loop


def _swapped(function: Function) -> Function:
    def repeat(x: Tensor) -> Tensor:
        first = x
        second = x.flip(0)
        for _ in range(_STEPS):
            first, second = second, function(first)
        return first - second

    return repeat


# torch.func and autograd.


def _mapped(function: Function) -> Function:
    def mapped(x: Tensor) -> Tensor:
        lanes = x.unflatten(0, (2, x.shape[0] // 2))
        return func.vmap(function, randomness="different")(lanes).flatten(0, 1)

    return mapped


def _gradient(function: Function) -> Function:
    return func.grad(lambda x: function(x).square().sum())


def _tangent(function: Function) -> Function:
    def tangent(x: Tensor) -> Tensor:
        result: Tensor = func.jvp(function, (x,), (torch.ones_like(x),))[1]
        return result

    return tangent


def _cotangent(function: Function) -> Function:
    def cotangent(x: Tensor) -> Tensor:
        result: Tensor = func.vjp(function, x)[1](torch.ones_like(x))[0]
        return result

    return cotangent


def _jacobian(function: Function) -> Function:
    return lambda x: func.jacrev(function)(x).sum((0, 1))


def _autograd(function: Function) -> Function:
    def backward(x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().clone().requires_grad_()
            y = function(leaf)
            # As inside a layer of `no_grad`.
            if not y.requires_grad:
                return torch.zeros_like(x)
            return torch.autograd.grad(
                y.square().sum(), leaf, allow_unused=True, materialize_grads=True
            )[0]

    return backward


# Surroundings, copies and threads.


def _inside(context: Callable[[Tensor], AbstractContextManager[Any]]) -> Wrap:
    def wrap(function: Function) -> Function:
        def inside(x: Tensor) -> Tensor:
            with context(x):
                return function(x)

        return inside

    return wrap


def _checkpointed(function: Function) -> Function:
    return lambda x: checkpoint(function, x, use_reentrant=False)


def _in_a_thread(function: Function) -> Function:
    def threaded(x: Tensor) -> Tensor:
        outcome: list[Any] = []
        # Grad mode is local to a thread.
        grad = torch.is_grad_enabled()

        def run() -> None:
            try:
                with torch.set_grad_enabled(grad):
                    outcome.append(function(x))
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        [result] = outcome
        if isinstance(result, BaseException):
            raise result
        assert isinstance(result, Tensor), "a function of tensors gives one"
        return result

    return threaded


def _compiled(function: Function) -> Function:
    @functools.cache
    def compiled() -> Function:
        torch.compiler.reset()
        return torch.compile(function, backend="eager")

    return lambda x: compiled()(x)


# Autocast around a loop may be refused: it changes dtypes, which a loop's steps may not.
_CHANGES_DTYPE: frozenset[Kind] = frozenset({"autocast"})
_HOOKS = torch.autograd.graph.saved_tensors_hooks

# The transforms that compositions draw, by name.
LAYERS: dict[str, Layer] = {
    "graphify": Layer(_graphified(), uses=("graphify",), kind="graph", keeps_draws=True),
    "graphify, verified": Layer(
        _graphified(verify=1), uses=("graphify",), kind="graph", keeps_draws=True
    ),
    "graphify, borrowing": Layer(
        _borrowing, uses=("graphify",), lends=True, kind="graph", keeps_draws=True
    ),
    "graphify, donating": Layer(
        _donating,
        lambda f: lambda x: f(x.clone()),
        uses=("graphify",),
        kind="graph",
        keeps_draws=True,
    ),
    "piecewise": Layer(
        _split_at_custom_operators,
        _twice_halved,
        _halved_by_an_operator,
        uses=("piecewise",),
        kind="graph",
        keeps_draws=True,
        # A graph cannot be split inside a loop, and custom operators have no derivative in a trace.
        refused_in=(frozenset({"loop", "graph"}), frozenset({"shard"})),
    ),
    "shard by rows": Layer(
        _sharded(lambda f, x: f(x), Shard(0), Shard(0)),
        _by_halves,
        uses=("shard",),
        kind="shard",
        divides=True,
    ),
    "shard of copies": Layer(
        _sharded(lambda f, x: f(x), Replicate(), Replicate()), uses=("shard",), kind="shard"
    ),
    "shard, all_reduce": Layer(
        _sharded(lambda f, x: (lambda y: y + all_reduce(y, _AXIS))(f(x)), Shard(0), Shard(0)),
        _sum_added,
        uses=("shard", "all_reduce"),
        kind="shard",
        divides=True,
    ),
    "shard, all_gather": Layer(
        _sharded(lambda f, x: _own_half(f(all_gather(x, _AXIS))), Shard(0), Shard(0)),
        lambda f: lambda x: f(x.clone()),
        uses=("shard", "all_gather"),
        kind="shard",
    ),
    "shard, reduce_scatter": Layer(
        _sharded(lambda f, x: reduce_scatter(f(x), _AXIS), Replicate(), Shard(0)),
        # Both ranks compute the whole, and the sum over ranks is twice that.
        lambda f: lambda x: 2 * f(x),
        uses=("shard", "reduce_scatter"),
        kind="shard",
    ),
    "shard, all_to_all": Layer(
        _sharded(
            lambda f, x: all_to_all(f(x), _AXIS, split_dim=0, concat_dim=0), Shard(0), Shard(0)
        ),
        _quarters_exchanged,
        uses=("shard", "all_to_all"),
        kind="shard",
        divides=True,
    ),
    "shard, ppermute": Layer(
        _sharded(
            lambda f, x: (lambda y: y + ppermute(y, _AXIS, [(0, 1)]))(f(x)), Shard(0), Shard(0)
        ),
        _first_added_to_second,
        uses=("shard", "ppermute"),
        kind="shard",
        divides=True,
    ),
    "microbatch": Layer(
        _micro_batched, _by_halves, uses=("microbatch",), divides=True, keeps_draws=True
    ),
    "scan": Layer(_scanned, _repeated(_STEPS), uses=("scan",), keeps_draws=True),
    "compose": Layer(_composed, _repeated(2), uses=("compose",), keeps_draws=True),
    "pipeline": Layer(_piped(1), _repeated(2), uses=("pipeline",)),
    "pipeline, two micro-batches": Layer(
        _piped(2), lambda f: _by_halves(_repeated(2)(f)), uses=("pipeline",), divides=True
    ),
    "pipeline, advancing": Layer(_piped(1, advances=True), _repeated(2), uses=("pipeline", "lift")),
    "pipeline of borrowing graphs": Layer(
        _piped(2, lent=True),
        # A stage's borrowed result is copied for the next stage.
        lambda f: _by_halves(_repeated(2)(lambda x: f(x).clone())),
        uses=("pipeline", "graphify"),
        lends=True,
        kind="graph",
        divides=True,
    ),
    "pipeline in threads": Layer(
        _piped(1, threads=True),
        _repeated(2),
        uses=("pipeline",),
        slow=True,
        # Captures, and steps of a loop that are watched for writes, do not see another thread's
        # operators.
        refused_in=(
            frozenset({"graph"}),
            frozenset({"func"}),
            frozenset({"shard"}),
            frozenset({"loop"}),
        ),
    ),
    "Transform": Layer(_counted, uses=("Transform",), keeps_draws=True),
    "while_loop": Layer(
        _counting_loop(None),
        _repeated(_STEPS),
        uses=("while_loop",),
        kind="loop",
        # The first three cannot repeat a loop that has no bound.
        refused_in=(
            frozenset({"graph", "func"}),
            frozenset({"graph", "autograd"}),
            frozenset({"shard"}),
            _CHANGES_DTYPE,
        ),
    ),
    "while_loop, max_steps": Layer(
        _counting_loop(_STEPS + 2),
        _repeated(_STEPS),
        uses=("while_loop",),
        kind="loop",
        refused_in=(_CHANGES_DTYPE,),
    ),
    "while_loop, reading by its counter": Layer(
        _indexing_loop,
        _indexed,
        uses=("while_loop",),
        kind="loop",
        refused_in=(frozenset({"shard"}), _CHANGES_DTYPE),  # a shard reads the index on the host
    ),
    "while_loop, as long as data say": Layer(
        _loop_by_data,
        _repeated_by_data,
        _tried_and_repeated_by_data,
        uses=("while_loop",),
        kind="loop",
        refused_in=(_CHANGES_DTYPE,),
    ),
    "while_loop, swapping": Layer(
        _swapping_loop, _swapped, uses=("while_loop",), kind="loop", refused_in=(_CHANGES_DTYPE,)
    ),
    "vmap": Layer(_mapped, _by_halves, _mapped, divides=True, kind="func"),
    "grad": Layer(_gradient, _gradient, kind="func"),
    "jvp": Layer(_tangent, _tangent, kind="func"),
    "vjp": Layer(_cotangent, _cotangent, kind="func"),
    "jacrev": Layer(_jacobian, _jacobian, kind="func"),
    "autograd": Layer(
        _autograd, _autograd, keeps_draws=True, kind="autograd", refused_in=(frozenset({"shard"}),)
    ),
    "checkpoint": Layer(_checkpointed, _checkpointed, keeps_draws=True),
    "saved-tensor hooks": Layer(
        _inside(lambda x: _HOOKS(lambda t: t.clone(), lambda t: t)),
        _inside(lambda x: _HOOKS(lambda t: t.clone(), lambda t: t)),
        keeps_draws=True,
        refused_in=(frozenset({"shard"}),),  # torch runs hooks under no_grad
    ),
    "batch_invariant": Layer(
        _inside(lambda x: batch_invariant()), uses=("batch_invariant",), keeps_draws=True
    ),
    "autocast": Layer(
        _inside(lambda x: torch.autocast(x.device.type, torch.bfloat16)),
        _inside(lambda x: torch.autocast(x.device.type, torch.bfloat16)),
        keeps_draws=True,
        # bfloat16 has 8 bits, and each layer inside may round again.
        tolerance=0.1,
        kind="autocast",
        refused_in=(frozenset({"loop"}),),
    ),
    "inference_mode": Layer(
        _inside(lambda x: torch.inference_mode()),
        _inside(lambda x: torch.inference_mode()),
        keeps_draws=True,
        refused_in=(frozenset({"shard"}),),  # as for no_grad: a trace would follow the gradient
    ),
    "no_grad": Layer(
        _inside(lambda x: torch.no_grad()),
        _inside(lambda x: torch.no_grad()),
        keeps_draws=True,
        refused_in=(frozenset({"shard"}),),
    ),
    "default device": Layer(
        _inside(lambda x: torch.device(x.device)),
        _inside(lambda x: torch.device(x.device)),
        keeps_draws=True,
    ),
    "copy": Layer(lambda f: copy.copy(f), keeps_draws=True),
    "deepcopy": Layer(lambda f: copy.deepcopy(f), keeps_draws=True),
    "a thread": Layer(
        _in_a_thread,
        _in_a_thread,  # even in a capture, another thread draws from torch's default generator
        # Traces and captures do not record another thread's operators.
        refused_in=(
            frozenset({"shard"}),
            frozenset({"graph"}),
        ),
    ),
    "torch.compile": Layer(
        _compiled,
        _same,
        _compiled,
        slow=True,
        kind="compile",
        refused_in=(frozenset({"graph"}), frozenset({"shard"})),
    ),
}
