"""Random functions of one rank's part, with placements and collectives, and the same functions
without ranks: cases of the laws of `shard` (L22).

- `meshes` draws the ranks.
- `rank_functions` draws a function of one rank's part, which `_Writer` builds step by step, and the
  function on whole tensors that it must equal.
- `disagreements` draws such a function with other collectives on one rank, which must be refused.
- `rank_results` draws results of all ranks, some of which contradict their declared placement.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

from weft.errors import MeshError
from weft.meshes.mesh import Mesh, stride_of
from weft.meshes.placements import Partial, PerRank, Placement, Placements, Replicate, Shard
from weft.ops.transfers.collective import (
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    ppermute,
    reduce_scatter,
)
from weft.transforms.shards.shard import Sharded, shard
from weft.values.donation import donates
from weft.values.trees import tree_map

# `(params, state, x) -> x`.
Step = Callable[[dict[str, Tensor], dict[str, Tensor], Tensor], Tensor]


@attrs.frozen(eq=False)
class RankFunction:
    """A random function `(params, state, x) -> (state, y)` written for one rank, and the same
    function on whole tensors, which uses torch's operators only.

    Args:
        code: the steps, in order; `repr` shows them.
        mesh: the ranks.
        fn, whole: the function of one rank's part, and of whole tensors. `state` is donated.
        placements: the placements of `params`, `state`, `x` and `y`.
        params, state: tensors by name; each parameter is [width, width].
        inputs: the `x` of each call, [rows, width].
    """

    code: tuple[str, ...]
    mesh: Mesh = attrs.field(repr=str)
    fn: Callable[..., Any] = attrs.field(repr=False)
    whole: Callable[..., Any] = attrs.field(repr=False)
    placements: tuple[dict[str, Placements], dict[str, Placements], Placements, Placements] = (
        attrs.field(repr=lambda placed: f"{placed[2]} to {placed[3]}")
    )
    params: dict[str, Tensor] = attrs.field(repr=False)
    state: dict[str, Tensor] = attrs.field(repr=False)
    inputs: tuple[Tensor, ...] = attrs.field(repr=lambda xs: str([tuple(x.shape) for x in xs]))

    def sharded(self, fn: Callable[..., Any] | None = None, mesh: Mesh | None = None) -> Sharded:
        """The function on all ranks of the mesh.

        Args:
            fn: another function with the same arguments and results. None: this one.
            mesh: another mesh. None: this one.
        """
        params, state, x, y = self.placements
        return shard(fn or self.fn, mesh or self.mesh, (params, state, x), (state, y))

    def to(self, device: str) -> "RankFunction":
        """The function with its tensors on a device."""
        params, state, inputs = tree_map(
            lambda x: x.to(device), (self.params, self.state, self.inputs)
        )
        return attrs.evolve(self, params=params, state=state, inputs=inputs)


def as_stage(step: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a step `(params, state, x) -> (state, y)` into a stage `(params, state, batch, x) ->
    (state, y)`."""

    @donates("state")
    def stage(params: Any, state: Any, batch: Any, x: Any) -> Any:
        return step(params, state, batch if x is None else x)

    return stage


# The sizes of the axes of a mesh, by the number of axes.
# Sizes that differ show an axis that is taken for another. 3 is no power of two, and a collective
# along an axis of one rank changes nothing.
_SIZES: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((2,), (3,), (4,)),
    2: ((2, 2), (2, 3), (3, 2)),
    3: ((2, 2, 2), (1, 2, 3), (2, 1, 2)),
}


@st.composite
def meshes(draw: st.DrawFn, axes: Sequence[str] | None = None) -> Mesh:
    """A mesh with these axes and at most 8 ranks.

    Args:
        axes: the names of one to three axes, in order. None: `tensor`, or `data` and `tensor`.

    Raises:
        MeshError: `axes` is empty, has more than three names, or repeats a name.
    """
    if axes is not None and (len(axes) not in _SIZES or len({*axes}) < len(axes)):
        raise MeshError(
            f"meshes(axes={axes!r})",
            f"{len(axes)} axes, {len({*axes})} of them different",
            "1 to 3 names",
        )
    names = draw(st.sampled_from((("tensor",), ("data", "tensor")))) if axes is None else axes
    return Mesh(**dict(zip(names, draw(st.sampled_from(_SIZES[len(names)])), strict=True)))


@attrs.define(eq=False)
class _Writer:
    """Builds a function step by step, and tracks the placement of its value."""

    mesh: Mesh
    placed: dict[str, Placement]
    code: list[str] = attrs.field(factory=list)
    steps: list[tuple[Step, Step]] = attrs.field(factory=list)
    params: dict[str, Placements] = attrs.field(factory=dict)

    def add(self, name: str, local: Step, whole: Step | None = None) -> None:
        """Add a step, as a rank computes it and as it is on whole tensors (None: it changes nothing
        there)."""
        self.code.append(name)
        self.steps.append((local, whole or (lambda params, state, x: x)))

    def axes(self, *kinds: Placement) -> list[str]:
        """The axes along which the value has one of these placements."""
        return [axis for axis, placement in self.placed.items() if placement in kinds]

    def is_innermost(self, axis: str, dim: int) -> bool:
        """Whether no later axis splits the dimension.

        Only then are the pieces that this axis splits or joins contiguous parts of the whole."""
        names = list(self.placed)
        return all(self.placed[later] != Shard(dim) for later in names[names.index(axis) + 1 :])

    @property
    def is_partial(self) -> bool:
        return Partial() in self.placed.values()

    def product(self, **by_axis: Placement) -> tuple[Step, Step]:
        """A matrix product with a new parameter of these placements, on a rank and on the whole."""
        name = f"w{len(self.params)}"
        self.params[name] = Placements(**by_axis)

        def both(params: Any, state: Any, x: Any) -> Any:
            return x @ params[name]

        return both, both

    def moves(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """The steps that are valid for the value's current placement, by name."""
        # Linear, so that it is right for any placement, even for the addends of a partial sum.
        yield "halve", lambda: self.add("halve", _halve, _halve)
        for axis in self.axes(Partial()):
            yield f"all_reduce {axis}", functools.partial(self._reduce, axis)
            for dim in DIMENSIONS:
                if self.is_innermost(axis, dim % 2):
                    yield (
                        f"reduce_scatter {axis} {dim}",
                        functools.partial(self._scatter, axis, dim),
                    )
        for axis in self.axes(Replicate()):
            yield f"first alone {axis}", functools.partial(self._first_alone, axis)
            for dim in (0, 1):
                if self.is_innermost(axis, dim):
                    yield f"own part {axis} {dim}", functools.partial(self._own_part, axis, dim)
        for dim in DIMENSIONS:
            for axis in self.axes(Shard(dim % 2)):
                if self.is_innermost(axis, dim % 2):
                    yield f"all_gather {axis} {dim}", functools.partial(self._gather, axis, dim)
                    if self.is_innermost(axis, 1 - dim % 2):
                        yield (
                            f"all_to_all {axis} {dim}",
                            functools.partial(self._exchange, axis, dim),
                        )
                # If two axes split the dimension, the parts along one of them are not chunks of the
                # whole.
                if len(self.axes(Shard(dim % 2))) == 1:
                    for pairs in _permutations(self.mesh.sizes[axis]):
                        name = f"ppermute {axis} {dim} {pairs}"
                        yield name, functools.partial(self._permute, name, axis, dim, pairs)
        if rows := self.axes(Shard(1)):
            yield "product by rows", functools.partial(self._by_rows, rows)
        else:
            yield "product", lambda: self.add("product", *self.product())
            for axis in self.axes(Replicate()):
                yield f"product by columns {axis}", functools.partial(self._by_columns, axis)
        # These steps are not linear, so they cannot run on addends of a partial sum.
        if not self.is_partial:
            yield "tanh", lambda: self.add("tanh", _tanh, _tanh)
            yield "softmax", self._softmax
            yield "less the mean of rows", self._less_mean
            yield "less the least", self._less_least
            yield "read state", self._read_state

    def _reduce(self, axis: str) -> None:
        self.placed[axis] = Replicate()
        self.add(f"all_reduce {axis}", lambda params, state, x: all_reduce(x, axis))

    def _scatter(self, axis: str, dim: int) -> None:
        self.placed[axis] = Shard(dim % 2)
        self.add(
            f"reduce_scatter {axis} {dim}",
            lambda params, state, x: reduce_scatter(x, axis, dim=dim),
        )

    def _gather(self, axis: str, dim: int) -> None:
        self.placed[axis] = Replicate()
        self.add(f"all_gather {axis} {dim}", lambda params, state, x: all_gather(x, axis, dim=dim))

    def _exchange(self, axis: str, dim: int) -> None:
        self.placed[axis] = Shard(1 - dim % 2)

        def local(params: Any, state: Any, x: Tensor) -> Tensor:
            return all_to_all(x, axis, split_dim=-1 - dim, concat_dim=dim)

        self.add(f"all_to_all {axis} {-1 - dim} to {dim}", local)

    def _permute(self, name: str, axis: str, dim: int, pairs: tuple[tuple[int, int], ...]) -> None:
        size = self.mesh.sizes[axis]

        def whole(params: Any, state: Any, x: Tensor) -> Tensor:
            parts = x.chunk(size, dim)
            sources = {to: source for source, to in pairs}
            moved = [
                parts[sources[to]] if to in sources else torch.zeros_like(parts[0])
                for to in range(size)
            ]
            return torch.cat(moved, dim)

        self.add(name, lambda params, state, x: ppermute(x, axis, pairs), whole)

    def _first_alone(self, axis: str) -> None:
        self.placed[axis] = Partial()

        def local(params: Any, state: Any, x: Tensor) -> Tensor:
            if axis_index(axis) == 0:
                return x
            return torch.zeros_like(x)

        self.add(f"first alone {axis}", local)

    def _own_part(self, axis: str, dim: int) -> None:
        self.placed[axis] = Shard(dim)
        self.add(f"own part {axis} {dim}", lambda params, state, x: _part(x, axis, dim))

    def _by_rows(self, axes: list[str]) -> None:
        steps = self.product(**dict.fromkeys(axes, Shard(0)))
        self.placed |= dict.fromkeys(axes, Partial())
        self.add(f"product by rows {', '.join(axes)}", *steps)

    def _by_columns(self, axis: str) -> None:
        self.placed[axis] = Shard(1)
        self.add(f"product by columns {axis}", *self.product(**{axis: Shard(1)}))

    def _softmax(self) -> None:
        axes = self.axes(Shard(1))

        def local(params: Any, state: Any, x: Tensor) -> Tensor:
            raised = torch.exp(x - _over(x.amax(1, keepdim=True), axes, "max"))
            return raised / _over(raised.sum(1, keepdim=True), axes, "sum")

        self.add("softmax", local, lambda params, state, x: torch.softmax(x, 1))

    def _less_mean(self) -> None:
        axes = self.axes(Shard(0))

        def local(params: Any, state: Any, x: Tensor) -> Tensor:
            return x - _over(x.sum(0), axes, "sum") / (len(x) * math.prod(map(axis_size, axes)))

        self.add("less the mean of rows", local, lambda params, state, x: x - x.mean(0))

    def _less_least(self) -> None:
        axes = self.axes(Shard(1))

        def local(params: Any, state: Any, x: Tensor) -> Tensor:
            return x - _over(x.amin(1, keepdim=True), axes, "min")

        self.add("less the least", local, lambda params, state, x: x - x.amin(1, keepdim=True))

    def _read_state(self) -> None:
        axes = self.axes(Shard(1))

        def local(params: Any, state: dict[str, Tensor], x: Tensor) -> Tensor:
            return x + functools.reduce(lambda value, axis: _part(value, axis, 0), axes, state["h"])

        self.add("read state", local, lambda params, state, x: x + state["h"])


# The dimensions of a matrix, as a collective may name them. `-1 - dim` is the other one.
DIMENSIONS = (0, 1, -2, -1)


def _permutations(size: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Patterns in which ranks send to each other: a ring, a reversal, and a shift that leaves out
    the last rank."""
    yield tuple((place, (place + 1) % size) for place in range(size))
    yield tuple((place, size - 1 - place) for place in range(size))
    yield tuple(itertools.pairwise(range(size)))


def _halve(params: Any, state: Any, x: Tensor) -> Tensor:
    return x / 2


def _tanh(params: Any, state: Any, x: Tensor) -> Tensor:
    return torch.tanh(x)


def _part(x: Tensor, axis: str, dim: int) -> Tensor:
    """This rank's part of a tensor that is replicated along the axis."""
    size = x.shape[dim] // axis_size(axis)
    return x.narrow(dim, axis_index(axis) * size, size)


def _over(x: Tensor, axes: list[str], reduce_op: str) -> Tensor:
    return functools.reduce(
        lambda value, axis: all_reduce(value, axis, reduce_op=reduce_op), axes, x
    )


UPDATES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "state: functional": lambda s: {"h": s["h"] + 1, "g": s["g"] * 2, "n": s["n"] + 1},
    "state: in place": lambda s: {"h": s["h"].add_(1), "g": s["g"].mul_(2), "n": s["n"].add_(1)},
    "state: unchanged": lambda s: s,
}


@st.composite
def rank_functions(
    draw: st.DrawFn,
    mesh: Mesh | None = None,
    max_steps: int = 7,
    updates: tuple[str, ...] = tuple(UPDATES),
    multiple: int = 1,
    columns: int | None = None,
) -> RankFunction:
    """A random chain of steps, each valid for the placement that the value has there, and 1 to 3
    calls.

    Args:
        mesh: the ranks. None: any mesh.
        max_steps: the greatest number of steps.
        updates: the ways to make the next state, among "state: functional", "state: in place" and
            "state: unchanged".
        multiple: each number of rows is a multiple of the number of ranks times this.
        columns: the number of columns per rank, 1 or 2. None: either.
    """
    mesh = mesh or draw(meshes())
    kinds: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial())
    # Where two axes split one dimension, the placement says which cuts first, and not the mesh: a
    # planted bug takes the mesh's order.
    order = draw(st.permutations(list(mesh.sizes)))
    placed = {axis: draw(st.sampled_from(kinds)) for axis in order}
    x_placements = Placements(**placed)
    writer = _Writer(mesh, dict(placed))
    for _ in range(draw(st.integers(1, max_steps))):
        moves = dict(writer.moves())
        moves[draw(st.sampled_from(sorted(moves)))]()
    update = draw(st.sampled_from(updates))
    # Rows and columns are multiples of the number of ranks, so that any axes can split them.
    width = mesh.num_ranks * (columns or draw(st.sampled_from((1, 2))))
    rows = draw(st.lists(st.sampled_from((1, 2)), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))

    def make_function(of_rank: bool) -> Callable[..., Any]:
        steps = [local if of_rank else whole for local, whole in writer.steps]

        @donates("state")
        def fn(
            params: Any, state: dict[str, Tensor], x: Tensor
        ) -> tuple[dict[str, Tensor], Tensor]:
            for step in steps:
                x = step(params, state, x)
            return UPDATES[update](state), x

        return fn

    state = {
        "h": torch.randn(width, generator=generator),
        "g": torch.ones(width),
        "n": torch.zeros(()),
    }
    state_placements = {
        "h": Placements(),
        # One state is split, so that each rank updates a part of it.
        "g": Placements(**{list(mesh.sizes)[-1]: Shard(0)}),
        "n": Placements(),
    }
    # Divided, so that values keep their size through several products, and a tolerance its sense.
    params = {
        name: torch.randn(width, width, generator=generator) / width**0.5 for name in writer.params
    }
    inputs = tuple(
        torch.randn(mesh.num_ranks * multiple * n, width, generator=generator) for n in rows
    )
    return RankFunction(
        code=(*writer.code, update),
        mesh=mesh,
        fn=make_function(True),
        whole=make_function(False),
        placements=(writer.params, state_placements, x_placements, Placements(**writer.placed)),
        params=params,
        state=state,
        inputs=inputs,
    )


@attrs.frozen(eq=False)
class Disagreement:
    """A function with different collectives on one rank.

    Args:
        function: a function on which all ranks agree.
        rank: the rank that disagrees.
        how: one of `DISAGREEMENTS`.
        is_first: whether the ranks disagree before the function or after it.
        axis: the axis of the collectives on which they disagree.
    """

    function: RankFunction
    rank: int
    how: str
    is_first: bool
    axis: str

    def fn(self, params: Any, state: Any, x: Tensor) -> Any:
        """The function of one rank's part, with the collectives on which the ranks disagree."""
        mesh = self.function.mesh
        rank = sum(axis_index(axis) * stride_of(mesh, axis) for axis in mesh.sizes)
        # The results of these collectives are dropped: nothing but the collectives differs.
        meets = DISAGREEMENTS[self.how][rank == self.rank]
        if self.is_first:
            meets(x, self.axis)
        state, y = self.function.fn(params, state, x)
        if not self.is_first:
            meets(y, self.axis)
        return state, y


def _sum_then_most(x: Tensor, axis: str) -> None:
    all_reduce(x, axis)
    all_reduce(x, axis, reduce_op="max")


def _most_then_sum(x: Tensor, axis: str) -> None:
    all_reduce(x, axis, reduce_op="max")
    all_reduce(x, axis)


Meets = Callable[[Tensor, str], Any]
# By name, the collectives of all ranks but one, and those of that one rank.
DISAGREEMENTS: dict[str, tuple[Meets, Meets]] = {
    "missing": (all_reduce, lambda x, axis: None),
    "one too many": (lambda x, axis: None, all_reduce),
    "another order": (_sum_then_most, _most_then_sum),
    "another reduction": (all_reduce, lambda x, axis: all_reduce(x, axis, reduce_op="max")),
    "another kind": (all_gather, all_reduce),
    "another dimension": (all_gather, lambda x, axis: all_gather(x, axis, dim=1)),
    "another shape": (all_reduce, lambda x, axis: all_reduce(x[None], axis)),
    "another dtype": (all_reduce, lambda x, axis: all_reduce(x.double(), axis)),
}


@st.composite
def disagreements(draw: st.DrawFn) -> Disagreement:
    """A function with different collectives on one rank."""
    function = draw(rank_functions(max_steps=3))
    rank = draw(st.integers(0, function.mesh.num_ranks - 1))
    how = draw(st.sampled_from(tuple(DISAGREEMENTS)))
    return Disagreement(
        function, rank, how, draw(st.booleans()), draw(st.sampled_from(list(function.mesh.sizes)))
    )


@attrs.frozen(eq=False)
class RankResults:
    """A result of a sharded function: the tensor of each rank, and the placement declared for it.

    Args:
        parts: the tensor of each rank, of any shape and dtype.
        placement: the result's entry in `out_placements`.
    """

    parts: tuple[Tensor, ...] = attrs.field(
        repr=lambda parts: str([(tuple(x.shape), x.dtype, x.unique().tolist()) for x in parts])
    )
    placement: Placement | PerRank

    def sharded(self) -> Any:
        """The result that `shard` gives for a function that computes the parts."""

        # The values depend on the argument, so that they are computed rather than constants.
        def part(x: Tensor) -> Tensor:
            part = self.parts[axis_index("ranks")]
            value = x * part.sum() / part.numel()
            return torch.ones(part.shape, dtype=part.dtype) * value.to(part.dtype)

        step = shard(part, Mesh(ranks=len(self.parts)), Replicate(), self.placement)
        return step(torch.ones((), dtype=torch.float64))

    def expected(self) -> Any:
        """The result by definition, or None where the parts have none."""
        first = self.parts[0]
        alike = all((x.shape, x.dtype) == (first.shape, first.dtype) for x in self.parts)
        match self.placement:
            case PerRank():
                return self.parts
            case Shard(dim):
                if alike and -first.ndim <= dim < first.ndim:
                    return torch.cat(self.parts, dim)
                return None
            case Replicate():
                if alike and all(torch.equal(x, first) for x in self.parts):
                    return first
                return None
            case Partial():
                if alike:
                    return functools.reduce(torch.add, self.parts)
                return None


@st.composite
def rank_results(draw: st.DrawFn) -> RankResults:
    """Results of two or three ranks, all alike, or with another shape, dtype or value on one rank.

    >>> from hypothesis import find
    >>> case = find(rank_results(), lambda case: case.placement == Shard(0) and case.expected() is None)
    >>> [part.ndim for part in case.parts]
    [0, 0]
    """
    shapes = st.lists(st.integers(1, 2), max_size=2).map(tuple)
    dtypes = st.sampled_from((torch.float32, torch.float64))
    parts = [torch.full(draw(shapes), float(draw(st.integers(1, 2))), dtype=draw(dtypes))] * draw(
        st.integers(2, 3)
    )
    if draw(st.booleans()):
        other = torch.full(draw(shapes), float(draw(st.integers(1, 2))), dtype=draw(dtypes))
        parts[draw(st.integers(0, len(parts) - 1))] = other
    kinds: list[Placement | PerRank] = [Replicate(), Partial(), PerRank()]
    if draw(st.booleans()):
        kinds = [Shard(dim) for dim in DIMENSIONS]
    return RankResults(tuple(parts), draw(st.sampled_from(kinds)))
