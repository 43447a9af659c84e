"""`Transform`: a transform of one's own, as two pure functions; it composes with weft's, and with `torch.func`.

A transform that keeps nothing from call to call needs no protocol: any `f -> f` that is written with `functools.wraps`,
which hands on what weft's transforms ask of a function (its signature, what it donates, whether it lends). One that
keeps something cannot keep it in an attribute or a hook: a replay runs no Python. What it keeps is state like any
other, passed in and out.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import attrs

from weft.arguments import kind_of
from weft.errors import ProgramError
from weft.trees import pytree

F = TypeVar("F", bound=Callable[..., Any])


@pytree
@attrs.frozen(eq=False)
class Carried:
    """The state of a transformed step: the step's own, and what the transform carries beside it.

    Args:
        state: of the step inside, which may be a `Carried` too.
        own: of the transform, a tree of tensors.
    """

    state: Any
    own: Any


@attrs.frozen
class Transform:
    """A transform of steps and stages that carries values of its own, as two pure functions. Called with a step
    `(params, state, batch) -> (state, out)`, or a stage, which has a fourth argument, it returns one, over `Carried`.

    It may stand inside and outside of `graphify`, `piecewise`, `pipeline`, `scan`, `microbatch` and other transforms,
    and under `vmap` and `grad`: it is a pure function. Under a ladder the step sees padding, as every step does.

    Args:
        init: `(params, state) -> own`: what it carries at first, new tensors on the state's device.
        apply: `(step, own, params, state, *rest) -> (own, state, out)`: calls the step as often as it likes, each time
            with the state that the call before returned, and returns the next values of all three. If the step donates
            its state, `own` is donated with it: it may be written in place. If not, return a new one.

    Raises:
        ProgramError: a part that is no function; at a call, a state that is not `Carried`, or an `apply` that returns
            something else.

    >>> import torch, weft
    >>> counted = Transform(
    ...     init=lambda params, state: torch.zeros((), dtype=torch.int64),
    ...     apply=lambda step, n, params, state, batch: (n + len(batch), *step(params, state, batch)),
    ... )
    >>> step = weft.graphify(counted(lambda params, state, batch: (state + 1, params * batch)))
    >>> state = counted.carry(torch.tensor(2.0), torch.tensor(0.0))
    >>> for _ in range(3):
    ...     state, out = step(torch.tensor(2.0), state, torch.ones(4))
    >>> state, out
    (Carried(state=tensor(3.), own=tensor(12)), tensor([2., 2., 2., 2.]))
    """

    init: Callable[[Any, Any], Any]
    apply: Callable[..., tuple[Any, Any, Any]]

    def __attrs_post_init__(self) -> None:
        for name, part in (("init", self.init), ("apply", self.apply)):
            if not callable(part):
                raise ProgramError(f"Transform({name}={part!r:.60})", kind_of(part), "a function")

    def carry(self, params: Any, state: Any) -> Carried:
        """The state that a transformed step takes first, of the state that the step inside takes first."""
        return Carried(state, self.init(params, state))

    def __call__(self, step: F) -> F:
        """The step, transformed: of the same signature."""
        name = getattr(step, "__name__", step)
        if not callable(step):
            raise ProgramError(f"Transform(...)({step!r:.60})", f"{kind_of(step)}, no function", "a step")

        @functools.wraps(step)
        def run(params: Any, state: Any, *rest: Any) -> Any:
            if not isinstance(state, Carried):
                seen = f"a state that is {kind_of(state)}"
                raise ProgramError(f"Transform(...)({name})(...)", seen, "transform.carry(params, state) at first")
            made: Any = self.apply(step, state.own, params, state.state, *rest)
            if not isinstance(made, tuple) or len(made) != 3:
                of = f" of {len(made)}" if isinstance(made, tuple) else ""
                seen = f"apply returned {kind_of(made)}{of}"
                raise ProgramError(f"Transform(...)({name})(...)", seen, "return (own, state, out)")
            own, new, out = made
            return Carried(new, own), out

        return cast(F, run)


def lift(advance: F) -> F:
    """`advance`, a function of a state first, for states that transforms carry something beside: that stays.

    `pipeline(stages, advance=lift(weft.advance))`, where some stages are transformed and others are not.

    Raises:
        ProgramError: what is no function.

    >>> lift(lambda state, batch, out: state + out)(Carried(Carried(1, "a"), "b"), None, 2)
    Carried(state=Carried(state=3, own='a'), own='b')
    """
    given: Any = advance
    if not callable(given):
        instead = "an advance (state, batch, out) -> state"
        raise ProgramError(f"lift({given!r:.60})", f"{kind_of(given)}, no function", instead)

    @functools.wraps(advance)
    def lifted(state: Any, *rest: Any) -> Any:
        if isinstance(state, Carried):
            return Carried(lifted(state.state, *rest), state.own)
        return advance(state, *rest)

    return cast(F, lifted)
