"""Random pure functions, and inputs for them."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

from weft.batches.descriptor import BatchDescriptor
from weft.values.donation import clone, donates
from weft.values.trees import axes, descriptor_field, pytree


@pytree
@attrs.frozen(eq=False)
class Rows:
    """A batch as in research code.

    Args:
        descriptor: its shape class.
        x: a tensor whose first dimension is the number of tokens, and is padded.
    """

    descriptor: BatchDescriptor = attrs.field(metadata=descriptor_field())
    x: Tensor = attrs.field(metadata=axes("num_tokens", None))


@attrs.frozen(eq=False)
class Function:
    """A random pure function `(params, state, batch) -> (state, out)` on tensors [rows, width],
    with inputs for it.

    Args:
        code: the names of the operations, in order; `repr` shows them.
        fn: the function.
        params: [width, width].
        state: a tree of tensors that each call replaces.
        inputs: the batch of each call; their numbers of rows may differ.
    """

    code: tuple[str, ...]
    fn: Callable[..., Any] = attrs.field(repr=False)
    params: Tensor = attrs.field(repr=False)
    state: dict[str, Tensor] = attrs.field(repr=False)
    inputs: tuple[Tensor, ...] = attrs.field(repr=lambda xs: str([tuple(x.shape) for x in xs]))


def counting_step(function: Function) -> Callable[..., Any]:
    """The function as a step on batches that may be padded, whose state counts the calls."""

    def step(
        params: Tensor, state: dict[str, Tensor], batch: Rows
    ) -> tuple[dict[str, Tensor], Rows]:
        # A copy: the function may write its state, of which this step changes only the count.
        _, y = function.fn(params, clone(state), batch.x)
        return {**state, "n": state["n"] + 1}, attrs.evolve(batch, x=y)

    return step


OPERATIONS: dict[str, Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor]] = {
    "matmul": lambda x, params, state: x @ params,
    "tanh": lambda x, params, state: torch.tanh(x),
    "softmax": lambda x, params, state: torch.softmax(x, -1),
    "in place": lambda x, params, state: x.clone().mul_(2.0).add_(0.5),
    "view": lambda x, params, state: x[:, ::2].repeat(1, 2)[:, : x.shape[1]],
    "transpose": lambda x, params, state: (x.t() + 1.0).t().contiguous(),
    "where": lambda x, params, state: torch.where(x > 0, x, -x),
    "sort": lambda x, params, state: x.sort(dim=-1).values,
    "read state": lambda x, params, state: x + state["h"],
    "reduce": lambda x, params, state: x - x.mean(-1, keepdim=True),
    "gather": lambda x, params, state: x.gather(-1, x.argsort(-1)),
    "index": lambda x, params, state: x[:, torch.arange(x.shape[1] - 1, -1, -1, device=x.device)],
}


UPDATES: dict[str, Callable[[dict[str, Tensor], Tensor], dict[str, Tensor]]] = {
    "state: functional": lambda s, x: {"h": s["h"] * 0.5 + x.sum(0), "n": s["n"] + 1},
    "state: in place": lambda s, x: {"h": s["h"].add_(x.sum(0)), "n": s["n"].add_(1)},
    # Two states trade places: a next state that is written before the old one is read shows.
    "state: swapped": lambda s, x: {"h": s["g"] + x.sum(0), "n": s["n"], "g": s["h"]},
    "state: unchanged": lambda s, x: s,
}


@st.composite
def pure_functions(draw: st.DrawFn) -> Function:
    """A random chain of operations, a random way to make the next state, and 1 to 5 inputs of 1 to
    6 rows.

    >>> from hypothesis import find
    >>> function = find(pure_functions(), lambda f: "state: in place" in f.code)
    >>> function
    Function(code=('gather', 'state: in place'), inputs=[(1, 2)])
    >>> state, out = function.fn(function.params, function.state, function.inputs[0])
    """
    width = draw(st.sampled_from((2, 4)))
    names = draw(st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=5))
    update = draw(st.sampled_from(sorted(UPDATES)))
    # Sizes may come again, so that a graph is replayed after graphs of other sizes.
    rows = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))

    @donates("state")
    def fn(
        params: Tensor, state: dict[str, Tensor], batch: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        x = batch
        for name in names:
            x = OPERATIONS[name](x, params, state)
        return {**state, **UPDATES[update](state, x)}, x

    state = {
        "h": torch.randn(width, generator=generator),
        "g": torch.ones(width),
        "n": torch.zeros((), dtype=torch.int64),
    }
    inputs = tuple(torch.randn(n, width, generator=generator) for n in rows)
    return Function(
        (*names, update), fn, torch.randn(width, width, generator=generator), state, inputs
    )


@attrs.frozen(eq=False)
class Mapping:
    """A random pure function `(params, x) -> y` that can be differentiated and mapped, with inputs
    of one shape for it.

    Args:
        code: the names of the operations, in order.
        fn: the function.
        params: [width, width].
        inputs: each [rows, width].
    """

    code: tuple[str, ...]
    fn: Callable[[Tensor, Tensor], Tensor] = attrs.field(repr=False)
    params: Tensor = attrs.field(repr=False)
    inputs: tuple[Tensor, ...] = attrs.field(repr=lambda xs: str([tuple(x.shape) for x in xs]))


@st.composite
def mappings(draw: st.DrawFn, device: str = "cpu") -> Mapping:
    """A random chain of operations, which may read a tensor from their closure, and 1 to 3
    inputs.

    Args:
        device: the device of all tensors.
    """
    names = draw(st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=4))
    rows = draw(st.integers(1, 3))
    width = draw(st.sampled_from((2, 4)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    closure = {"h": torch.randn(width, generator=generator).to(device)}

    def fn(params: Tensor, x: Tensor) -> Tensor:
        for name in names:
            x = OPERATIONS[name](x, params, closure)
        return x

    inputs = [
        torch.randn(rows, width, generator=generator).to(device)
        for _ in range(draw(st.integers(1, 3)))
    ]
    return Mapping(
        tuple(names), fn, torch.randn(width, width, generator=generator).to(device), tuple(inputs)
    )


@st.composite
def stage_lists(draw: st.DrawFn, max_stages: int = 4) -> list[Function]:
    """Random stages of one width that fit together; the `fn` of each is a stage `(params, state,
    batch, x) -> (state, y)`.

    Args:
        max_stages: the most stages.
    """
    width_seed = draw(st.integers(0, 999))
    count = draw(st.integers(1, max_stages))
    generator = torch.Generator().manual_seed(width_seed)
    functions = []
    for _ in range(count):
        names = draw(st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=3))
        state = {"h": torch.randn(4, generator=generator), "n": torch.zeros((), dtype=torch.int64)}
        functions.append(
            Function(
                tuple(names),
                _chain(tuple(names)),
                torch.randn(4, 4, generator=generator),
                state,
                (),
            )
        )
    return functions


def _chain(names: tuple[str, ...]) -> Callable[..., Any]:
    """A stage that applies the operations to each row, and counts rows in its state."""

    def stage(
        params: Tensor, state: dict[str, Tensor], batch: Tensor, x: Tensor | None
    ) -> tuple[Any, Tensor]:
        y = batch if x is None else x
        for name in names:
            y = OPERATIONS[name](y, params, state)
        return {"h": state["h"], "n": state["n"] + y.shape[0]}, y

    return stage
