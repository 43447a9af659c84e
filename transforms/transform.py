"""`Transform`: a user-defined transform, written as two pure functions; it composes with weft's and
`torch.func`'s.

A transform without state needs no protocol: any `f -> f` written with `functools.wraps` will do,
because `wraps` passes on what weft's transforms look up on a function (its signature, its donated
arguments, whether it lends its results). A transform with state cannot keep it in an attribute or a
hook, because a replay runs no Python. It passes its state in and out, as a step does.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import attrs

from weft.arguments.checks import Rule, check_values, kind_of
from weft.errors import ProgramError
from weft.values.donation import refuse_donated_in
from weft.values.trees import pytree

F = TypeVar("F", bound=Callable[..., Any])


_RULES: dict[str, Rule] = {
    "init": (callable, "a function"),
    "apply": (callable, "a function"),
    "step": (callable, "a step"),
    "advance": (callable, "an advance (state, batch, out) -> state"),
}


@pytree
@attrs.frozen(eq=False)
class Carried:
    """The state of a transformed step: the inner step's state, and the transform's own state.

    Args:
        state: the inner step's state, itself a `Carried` if that step is transformed too.
        transform_state: the transform's state, a tree of tensors.
    """

    state: Any
    transform_state: Any


def _carried(state: Any, transform_state: Any) -> Carried:
    """A `Carried`, made without its `__init__`, which `torch.compile` of torch 2.14 cannot trace."""
    carried = object.__new__(Carried)
    object.__setattr__(carried, "state", state)
    object.__setattr__(carried, "transform_state", transform_state)
    return carried


@attrs.frozen
class Transform:
    """A transform of steps and stages that carries its own state, written as two pure functions.
    Called with a step `(params, state, batch) -> (state, out)`, or with a stage, which takes a
    fourth argument, it returns a step or stage over `Carried`.

    It works inside and outside `graphify`, `piecewise`, `pipeline`, `scan`, `microbatch` and other
    transforms, and under `vmap` and `grad`, because it is a pure function. Under a ladder it sees
    padding, as every step does.

    Args:
        init: `(params, state) -> transform_state`: makes the transform's initial state, as new
            tensors on the state's device.
        apply: `(step, transform_state, params, state, *rest) -> (transform_state, state, out)`:
            calls the step any number of times, each time with the state that the previous call
            returned, and returns the next `transform_state` and `state`, and `out`. If the step
            donates its state, `transform_state` is donated with it and may be written in place;
            otherwise return a new one.

    Raises:
        ProgramError: `init` or `apply` is not a function; or, at a call, the state is not a
            `Carried`, or `apply` returns something else.
        DonatedError: at a call, an argument was donated before.

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
    (Carried(state=tensor(3.), transform_state=tensor(12)), tensor([2., 2., 2., 2.]))
    """

    init: Callable[[Any, Any], Any]
    apply: Callable[..., tuple[Any, Any, Any]]

    def __attrs_post_init__(self) -> None:
        for name, part in (("init", self.init), ("apply", self.apply)):
            check_values(f"Transform({name}={part!r:.60})", _RULES, {name: part}, ProgramError)

    def carry(self, params: Any, state: Any) -> Carried:
        """Make the initial state of a transformed step from the initial state of the inner step."""
        refuse_donated_in("Transform(...).carry(...)", params=params, state=state)
        return _carried(state, self.init(params, state))

    def __call__(self, step: F) -> F:
        """The transformed step, with the same signature."""
        name = getattr(step, "__name__", step)
        check_values(f"Transform(...)({step!r:.60})", _RULES, {"step": step}, ProgramError)

        @functools.wraps(step)
        def run(params: Any, state: Any, *rest: Any) -> Any:
            refuse_donated_in(f"Transform(...)({name})(...)", params=params, state=state, rest=rest)
            if isinstance(state, Carried):
                applied: Any = self.apply(step, state.transform_state, params, state.state, *rest)
                # A tensor of three rows would unpack as well, and give a state of one row.
                if isinstance(applied, tuple) and len(applied) == 3:
                    transform_state, next_state, out = applied
                    return _carried(next_state, transform_state), out
                if isinstance(applied, tuple):
                    length = f" of {len(applied)}"
                else:
                    length = ""
                problem = f"apply returned {kind_of(applied)}{length}"
                instead = "return (transform_state, state, out)"
            else:
                problem = f"a state that is {kind_of(state)}"
                instead = "transform.carry(params, state) at first"
            raise ProgramError(f"Transform(...)({name})(...)", problem, instead)

        return cast(F, run)


def lift(advance: F) -> F:
    """Make `advance`, whose first argument is a state, work on `Carried` states too, and leave what
    transforms carry unchanged.

    Use it as `pipeline(stages, advance=lift(weft.advance))` when some stages are transformed and
    others are not.

    Raises:
        ProgramError: `advance` is not a function.

    >>> lift(lambda state, batch, out: state + out)(Carried(Carried(1, "a"), "b"), None, 2)
    Carried(state=Carried(state=3, transform_state='a'), transform_state='b')
    """
    check_values(f"lift({advance!r:.60})", _RULES, {"advance": advance}, ProgramError)

    @functools.wraps(advance)
    def lifted(state: Any, *rest: Any) -> Any:
        if isinstance(state, Carried):
            # Again for what is inside, since a transformed step may be transformed once more.
            return _carried(lifted(state.state, *rest), state.transform_state)
        return advance(state, *rest)

    return cast(F, lifted)
