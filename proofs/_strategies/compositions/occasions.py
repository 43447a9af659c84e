"""The occasions on which a composition is called, and what is compared after each."""

import threading
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, func

from weft.proofs._strategies.compositions.bodies import Body, Built, Function, Kind, World
from weft.torchapi.frames import clear_frames
from weft.transforms.graphs.graphify import graphify

# All layers of a composition, as one function from the body's function to the whole.
Nest = Callable[[Function], Function]


@attrs.frozen(eq=False)
class Subject:
    """One of two copies of a composition: weft's, or its meaning.

    Args:
        body: the random function.
        nest: the layers around it.
        built: the body over its world.
        whole: the layers around the built body, made once for all calls.
        is_meaning: whether it is the definition in plain torch, which captures nothing.
    """

    body: Body
    nest: Nest
    built: Built
    whole: Function
    is_meaning: bool

    @classmethod
    def make(cls, body: Body, nest: Nest, device: str, *, is_meaning: bool) -> "Subject":
        """A new copy, over a new world."""
        built = body.build(body.world(device))
        return cls(body, nest, built, nest(built.function), is_meaning)


def _called(subject: Subject, x: Tensor) -> Any:
    return subject.whole(x)


def _in_a_capture(subject: Subject, x: Tensor) -> Any:
    if subject.is_meaning:
        return subject.whole(x)
    return graphify(lambda y: subject.whole(y))(x)


def _after_lower(subject: Subject, x: Tensor) -> Any:
    if not subject.is_meaning:
        # A copy, since some bodies write their argument, and this is not the call that is compared.
        graphify(lambda y: subject.whole(y)).lower(x.clone())
    return subject.whole(x)


def _after_an_estimate(subject: Subject, x: Tensor) -> Any:
    if not subject.is_meaning:
        graphify(lambda y: subject.whole(y)).memory_estimate(x.clone())
    return subject.whole(x)


def _backward(subject: Subject, x: Tensor) -> Any:
    leaf = x.clone().requires_grad_()
    result = subject.whole(leaf)
    weight = subject.built.world.weight
    inputs = [leaf, *([weight] if weight.requires_grad else [])]
    if not result.requires_grad:
        return result, tuple(map(torch.zeros_like, inputs))
    gradients = torch.autograd.grad(result.sum(), inputs, allow_unused=True, materialize_grads=True)
    return result.detach(), gradients


def _backward_under_hooks(subject: Subject, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        return _backward(subject, x)


def _derivative_by_what_it_closes_over(subject: Subject, x: Tensor) -> Any:
    world = subject.built.world

    def loss(weight: Tensor) -> Tensor:
        inner = World(weight, world.matrix, world.scale, {})
        return subject.nest(subject.body.build(inner).function)(x).sum()

    return func.grad(loss)(world.weight.detach())


def _in_threads_at_once(subject: Subject, x: Tensor) -> Any:
    results: list[Any] = [None] * 3
    # The first calls begin together, so that their captures overlap.
    start = threading.Barrier(len(results))

    def run(index: int) -> None:
        try:
            start.wait(60)
            results[index] = subject.whole(x.clone())
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _after_an_error(subject: Subject, x: Tensor) -> Any:
    before = subject.whole(x.clone())
    # Most bodies fail on an argument of this shape.
    try:
        subject.whole(torch.ones(3, 5, 7, device=x.device))
    except Exception as error:
        clear_frames(error)
    return before, subject.whole(x)


def _after_a_change(subject: Subject, x: Tensor) -> Any:
    before = subject.whole(x.clone())
    subject.built.change()
    return before, subject.whole(x)


def _with_a_kept_result(subject: Subject, x: Tensor) -> Any:
    # It is compared after the second call, which must not have overwritten it.
    kept = subject.whole(x.clone())
    return kept, subject.whole(x.clone() + 1)


def _without_gradients(subject: Subject, x: Tensor) -> Any:
    before = subject.whole(x.clone())
    with torch.no_grad():
        return before, subject.whole(x)


def _with_more_rows(subject: Subject, x: Tensor) -> Any:
    return subject.whole(x.clone()), subject.whole(torch.cat([x, 1 - x]))


def _with_another_layout(subject: Subject, x: Tensor) -> Any:
    # Equal values in column-major order: strides belong in a graph's key.
    return subject.whole(x.clone()), subject.whole(x.t().contiguous().t())


@attrs.frozen(eq=False)
class Occasion:
    """How a composition is called.

    Args:
        run: `(subject, x) -> result`, where the result is compared.
        kind: the kind of layer around the composition. None: none.
        keeps_draws: whether random numbers are drawn in the order of the plain function.
    """

    run: Callable[[Subject, Tensor], Any]
    kind: Kind | None = None
    keeps_draws: bool = True


# The ways to call a composition, by name.
OCCASIONS: dict[str, Occasion] = {
    "a call": Occasion(_called),
    "a call in a capture": Occasion(_in_a_capture, kind="graph"),
    "a call after lower": Occasion(_after_lower, kind="graph"),
    "a call after a memory estimate": Occasion(_after_an_estimate, kind="graph"),
    "backward": Occasion(_backward),
    "backward under hooks": Occasion(_backward_under_hooks),
    "the derivative by what it closes over": Occasion(
        _derivative_by_what_it_closes_over, kind="func"
    ),
    "calls in threads at once": Occasion(_in_threads_at_once, keeps_draws=False),
    "calls before and after an error": Occasion(_after_an_error, keeps_draws=False),
    "calls before and after a change outside": Occasion(_after_a_change),
    "two calls, whose first result is kept": Occasion(_with_a_kept_result),
    "a call, and one without gradients": Occasion(_without_gradients),
    "a call, and one with more rows": Occasion(_with_more_rows),
    "a call, and one with another layout": Occasion(_with_another_layout),
}
