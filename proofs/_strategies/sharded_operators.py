"""Operators of torch's database on the ranks of a mesh, under each transform, with brute-force
references.

A reference slices each rank's parts and calls the operator on them without `shard`."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor, func

from weft.meshes.mesh import Mesh
from weft.meshes.placements import PerRank, Placement, Replicate, Shard
from weft.proofs._strategies.operator_samples import NoSamplesError, copies, jvp_by, samples_of
from weft.torchapi.operator_database import operator_database
from weft.torchapi.private import pytree
from weft.transforms.graphs.graphify import graphify
from weft.transforms.shards.shard import shard

_MOST_ELEMENTS = 5000
TWO = Mesh(x=2)
# `(*tensors) -> (result of rank 0, result of rank 1)`.
Ranks = Callable[..., tuple[Any, Any]]


def _sum(result: Any) -> Tensor:
    leaves = [
        x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()
    ]
    return sum((x.sum() for x in leaves), torch.zeros(()))


def _grad(f: Ranks, tensors: Sequence[Tensor], marked: tuple[int, ...]) -> Any:
    return func.grad(lambda *xs: _sum(f(*xs)), argnums=marked)(*tensors)


def _vmap(f: Ranks, tensors: Sequence[Tensor], marked: tuple[int, ...]) -> Any:
    return torch.vmap(f)(*(torch.stack([x, x]) for x in tensors))


TRANSFORMS: dict[str, Callable[[Ranks, Sequence[Tensor], tuple[int, ...]], Any]] = {
    "call": lambda f, tensors, marked: f(*tensors),
    # One call, which captures: the laws of graphs are those that compare replays.
    "graphify": lambda f, tensors, marked: graphify(f)(*tensors),
    "vmap": _vmap,
    "grad": _grad,
    "jvp": jvp_by,
}
"""Transforms of a function of several tensors, some of which are differentiated, by name."""


@attrs.frozen(eq=False)
class ShardedOperator:
    """An operator under a transform, on the ranks of a mesh.

    Args:
        name: the operator's name in torch's database.
        transform: a key of `TRANSFORMS`.
        fn: the operator as a function of tensors only.
        tensors: its arguments.
        marked: the indices of the arguments that are differentiated.
        placements: the placement of each argument.
        alike: whether all arguments and the result are placed as `Replicate()`; otherwise the
            result is `PerRank()`.
    """

    name: str
    transform: str
    fn: Callable[..., Any] = attrs.field(repr=False)
    tensors: tuple[Tensor, ...] = attrs.field(repr=lambda xs: str([tuple(x.shape) for x in xs]))
    marked: tuple[int, ...]
    placements: tuple[Placement, ...]
    alike: bool

    def sharded(self) -> Any:
        """The result that `shard` gives."""
        whole = shard(self.fn, TWO, self.placements, Replicate() if self.alike else PerRank())

        def on_ranks(*tensors: Tensor) -> tuple[Any, Any]:
            result = whole(*tensors)
            return (result, result) if self.alike else result

        return TRANSFORMS[self.transform](on_ranks, copies(self.tensors), self.marked)

    def expected(self) -> Any:
        """The result by brute force."""

        def on_ranks(*tensors: Tensor) -> tuple[Any, Any]:
            parts = [
                [self._part(x, p, rank) for x, p in zip(tensors, self.placements, strict=True)]
                for rank in (0, 1)
            ]
            return self.fn(*parts[0]), self.fn(*parts[1])

        # A graph gives the results of its function, so its reference is a plain call.
        if self.transform == "graphify":
            transform = "call"
        else:
            transform = self.transform
        return TRANSFORMS[transform](on_ranks, copies(self.tensors), self.marked)

    @staticmethod
    def _part(tensor: Tensor, placement: Placement, rank: int) -> Tensor:
        if isinstance(placement, Shard):
            return tensor.chunk(2, placement.dim)[rank]
        return tensor


@st.composite
def sharded_operators(
    draw: st.DrawFn, names: Sequence[str] | None = None
) -> ShardedOperator | None:
    """An operator of torch's database under a transform, or None if the drawn one has no fitting
    float32 sample on a CPU.

    Args:
        names: the operators to draw from. None: the whole database.
    """
    entry = draw(
        st.sampled_from([x for x in operator_database() if names is None or x.name in names])
    )
    transform = draw(st.sampled_from(sorted(TRANSFORMS)))
    if torch.float32 not in entry.supported_dtypes("cpu"):
        return None
    try:
        samples = samples_of(
            entry, "cpu", torch.float32, entry.supports_autograd, zlib.crc32(entry.name.encode())
        )
    except NoSamplesError:
        return None
    fitting = [x for x in samples if x.tensors and all(map(_fits, x.tensors))]
    if not fitting:
        return None
    sample = draw(st.sampled_from(fitting))
    marked = sample.differentiable
    if transform in ("grad", "jvp") and not marked:
        return None
    alike = draw(st.booleans())
    # The result may be declared `Replicate()` only where all ranks compute with the same arguments.
    placements = tuple(Replicate() if alike else draw(_placements(x)) for x in sample.tensors)
    return ShardedOperator(
        name=entry.name,
        transform=transform,
        fn=sample.bind(entry.op),
        tensors=sample.tensors,
        marked=marked,
        placements=placements,
        alike=alike,
    )


def _fits(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested and x.numel() < _MOST_ELEMENTS


def _placements(x: Tensor) -> st.SearchStrategy[Placement]:
    # `shard` splits dimensions into equal parts, one for each of the two ranks.
    cuts = [Shard(dim) for dim in range(x.ndim) if x.shape[dim] and x.shape[dim] % 2 == 0]
    return st.sampled_from([Replicate(), *cuts])
