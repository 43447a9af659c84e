"""Random functions that compute with the sizes of their batch, for ladders whose classes share a
compilation."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from weft.batches.descriptor import Descriptor
from weft.ops.requests import move_on
from weft.proofs._strategies.captures.functions import OPERATIONS
from weft.proofs._strategies.compilers import QUICK
from weft.values.trees import axes, descriptor_field, pytree

# Of a batch, and of each dimension of the parameters and the state.
MAX_COLUMNS = 8
_ROWS = (2, 3, 4, 5, 6, 8, 12, 16, 1)
_COLUMNS = (4, 2, 3, 8, 1)


@attrs.frozen
class Extent(Descriptor):
    """The shape class of a sheet; it covers sheets that have no more rows and no more columns."""

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"


@pytree
@attrs.frozen(eq=False)
class Sheet:
    """A batch that is padded in two dimensions.

    Args:
        extent: its shape class.
        x: [rows, columns].
    """

    extent: Extent = attrs.field(metadata=descriptor_field())
    x: Tensor = attrs.field(metadata=axes("rows", "columns"))


Step = Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor]


def _in_blocks(x: Tensor, params: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Rows in blocks of 4, the last of which is padded, as kernels take them."""
    rows, columns = x.shape
    blocks = -(-rows // 4)
    padded = x.new_zeros(4 * blocks, columns)
    padded[:rows] = x
    return padded.view(blocks, 4, columns).cumsum(1).reshape(-1, columns)[:rows]


def _written_in_place(x: Tensor, params: Tensor, state: dict[str, Tensor]) -> Tensor:
    y = x.clone()
    y[: x.shape[0] // 2].mul_(2)
    y[:, -1] = 0.5
    return y


def _counted_by_weft(x: Tensor, params: Tensor, state: dict[str, Tensor]) -> Tensor:
    """An operator of weft's own writes to the state."""
    rows = torch.arange(MAX_COLUMNS, device=x.device)
    starts = torch.arange(MAX_COLUMNS + 1, device=x.device) * x.shape[0]
    move_on(state["positions"], state["last_tokens"], rows, starts, rows >= 0, rows)
    return x + state["positions"][: x.shape[1]] % 5


def _mean_slope(x: Tensor, params: Tensor, state: dict[str, Tensor]) -> Tensor:
    slope: Tensor = torch.func.grad(lambda q: (q.sin() * q).mean())(x)
    return slope


def _drawn_in_vain(x: Tensor, params: Tensor, state: dict[str, Tensor]) -> Tensor:
    torch.rand(2, device=x.device)
    return x * 2


def _added_in_place(state: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    state["h"][: x.shape[1]].add_(x.sum(0))
    return state


# Each uses the sizes of `x` in another way.
SIZED: dict[str, Step] = {
    "rows by rows": lambda x, params, state: (x @ x.t()).softmax(-1) @ x,
    "as one row": lambda x, params, state: x.reshape(x.numel()).cumsum(0).reshape(x.shape),
    "halves swapped": lambda x, params, state: torch.cat(
        [x[x.shape[0] // 2 :], x[: x.shape[0] // 2]]
    ),
    "numbered rows": lambda x, params, state: (
        x + torch.arange(x.shape[0], device=x.device)[:, None] / 7
    ),
    "divided by the number of rows": lambda x, params, state: x / x.shape[0],
    "times a number from the size": lambda x, params, state: x * (0.1 * x.shape[0]),
    "plus a constant from the size": lambda x, params, state: (
        x + torch.tensor([0.5, float(x.shape[0])], device=x.device).sum()
    ),
    "in blocks": _in_blocks,
    "the first rows": lambda x, params, state: x + x[: min(x.shape[0], 6)].sum(0),
    "another way if large": lambda x, params, state: x.sin() if x.shape[0] > 8 else x.cos(),
    "another way if odd": lambda x, params, state: x.exp() if x.shape[0] % 2 else x.tanh(),
    "the rest of thirds": lambda x, params, state: x + x[: x.shape[0] % 3 + 1].sum(0),
    "whole thirds": lambda x, params, state: x + x[: x.shape[0] // 3 * 3].sum(0),
    "filled up to fours": lambda x, params, state: (
        x + functional.pad(x, (0, 0, 0, -x.shape[0] % 4), value=1.0).sum(0)
    ),
    "a triangle": lambda x, params, state: x * torch.ones(x.shape, device=x.device).tril(),
    "an expanded row": lambda x, params, state: x[:1].expand(x.shape) + x,
    "every second row": lambda x, params, state: torch.repeat_interleave(x[::2], 2, 0)[: len(x)],
    "padded": lambda x, params, state: functional.pad(x, (0, 0, 1, 1))[: x.shape[0]],
    "as strided": lambda x, params, state: (
        x.contiguous().as_strided((x.shape[0] // 2 * 2, x.shape[1]), (x.shape[1], 1)).sum(0) + x
    ),
    "written in place": _written_in_place,
    "random": lambda x, params, state: x + torch.rand_like(x),
    "random rows": lambda x, params, state: x + torch.rand(x.shape[0], 1, device=x.device),
    "an unused draw": _drawn_in_vain,
    "counted by weft": _counted_by_weft,
    "a mean's slope": _mean_slope,
    "mapped": lambda x, params, state: torch.func.vmap(lambda q: q - q.sum())(x),
    "in half precision": lambda x, params, state: x.to(torch.bfloat16).mul(3).float(),
    "in integers": lambda x, params, state: x + (x * 8).long().cumsum(0) % x.shape[0],
}


def _on_part(operation: Step) -> Step:
    """An operation on the part of the parameters and the state that has the columns of `x`."""

    def on_part(x: Tensor, params: Tensor, state: dict[str, Tensor]) -> Tensor:
        columns = x.shape[1]
        return operation(x, params[:columns, :columns], {"h": state["h"][:columns]})

    return on_part


UPDATES: dict[str, Callable[[dict[str, Tensor], Tensor], dict[str, Tensor]]] = {
    "state: unchanged": lambda state, x: state,
    "state: in place": _added_in_place,
    "state: functional": lambda state, x: {**state, "h": state["h"] * 0.5 + x.sum()},
    "state: swapped": lambda state, x: {**state, "h": state["g"] + 1, "g": state["h"]},
}


@attrs.frozen(eq=False)
class SizedFunction:
    """A random step `(params, state, sheet) -> (state, sheet)`, a ladder, and the sheets of calls.

    Args:
        names: the names of the operations, in order.
        update: the name of the change of the state.
        classes: the ladder.
        extents: the extent of each call's sheet.
        compiler: of the graphs.
        seed: of the values.
    """

    names: tuple[str, ...]
    update: str
    classes: tuple[Extent, ...]
    extents: tuple[Extent, ...]
    compiler: str
    seed: int = 0

    def __repr__(self) -> str:
        return (
            f"SizedFunction({'; '.join(self.names)}; {self.update}; classes"
            f" {', '.join(map(str, self.classes))}; sheets {', '.join(map(str, self.extents))};"
            f" compiler={self.compiler!r}, seed={self.seed})"
        )

    def step(self, params: Tensor, state: dict[str, Tensor], sheet: Sheet) -> tuple[Any, Sheet]:
        """The step."""
        state, x = self.on_tensors()(params, state, sheet.x)
        return state, attrs.evolve(sheet, x=x)

    def on_tensors(self) -> Callable[..., tuple[dict[str, Tensor], Tensor]]:
        """The step `(params, state, x) -> (state, x)` on the tensors of a sheet."""
        steps = [
            SIZED[name] if name in SIZED else _on_part(OPERATIONS[name]) for name in self.names
        ]
        update = UPDATES[self.update]

        def step(params: Tensor, state: dict[str, Tensor], x: Tensor) -> Any:
            for each in steps:
                x = each(x, params, state)
            return update(state, x), x

        return step

    def params(self, device: str) -> Tensor:
        """[MAX_COLUMNS, MAX_COLUMNS]."""
        return self._numbers(0, MAX_COLUMNS, MAX_COLUMNS).to(device)

    def state(self, device: str) -> dict[str, Tensor]:
        """A new state."""
        numbers = torch.arange(MAX_COLUMNS, device=device)
        return {
            "h": self._numbers(1, MAX_COLUMNS).to(device),
            "g": torch.ones(MAX_COLUMNS, device=device),
            "positions": numbers.clone(),
            "last_tokens": numbers.clone(),
        }

    def sheets(self, device: str) -> list[Sheet]:
        """The sheet of each call."""
        return [
            Sheet(extent, self._numbers(2 + i, extent.rows, extent.columns).to(device))
            for i, extent in enumerate(self.extents)
        ]

    def _numbers(self, index: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        return torch.randn(*shape, generator=generator)


@st.composite
def sized_functions(
    draw: st.DrawFn,
    compilers: tuple[str, ...] = QUICK,
    max_operations: int = 3,
    max_classes: int = 6,
    max_calls: int = 6,
) -> SizedFunction:
    """One to `max_operations` operations, a ladder, and calls, most of which its classes cover.

    >>> from hypothesis import find
    >>> find(sized_functions(), lambda f: "as one row" in f.names and len(f.classes) > 1).names
    ('as one row',)
    """
    # Operations on sizes twice as often: the others are those of functions without a ladder.
    operation = st.one_of(
        st.sampled_from([*SIZED]), st.sampled_from([*SIZED]), st.sampled_from([*OPERATIONS])
    )
    names = draw(st.lists(operation, min_size=1, max_size=max_operations))
    extent = st.builds(Extent, st.sampled_from(_ROWS), st.sampled_from(_COLUMNS))
    if draw(st.booleans()):
        # One size for all columns, as in a model, where the number of tokens alone varies.
        columns = draw(st.sampled_from(_COLUMNS))
        extent = st.builds(Extent, st.sampled_from(_ROWS), st.just(columns))
    # A class can only be given another's compilation by mistake if there are some that share one.
    min_classes = draw(st.sampled_from((1, min(4, max_classes))))
    classes = draw(st.lists(extent, min_size=min_classes, max_size=max_classes, unique=True))
    classes.sort(key=lambda x: (x.rows, x.columns), reverse=True)
    any_extents = st.lists(
        st.one_of(st.sampled_from(classes), extent), min_size=1, max_size=max_calls
    )
    extents = draw(st.one_of(any_extents, st.permutations(classes)))
    return SizedFunction(
        tuple(names),
        draw(st.sampled_from([*UPDATES])),
        tuple(classes),
        tuple(extents),
        draw(st.sampled_from(compilers)),
        draw(st.integers(0, 99)),
    )
