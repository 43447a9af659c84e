"""The functions inside a composition: chains of operations, each of which does something that a
transform could get wrong."""

from collections.abc import Callable
from typing import Any, Literal

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor, library
from torch.nn import functional

from weft.values.trees import tree_map

Function = Callable[[Tensor], Tensor]
"""A function from a tensor [rows, 2] to a tensor of the same shape and dtype."""

COLUMNS = 2


@attrs.define(eq=False)
class World:
    """What a body closes over.

    Args:
        weight: [2], which `change` writes to in place.
        matrix: [2, 2].
        scale: a Python number, which `change` rebinds.
        memory: the tensors that operations keep from one call to the next.
    """

    weight: Tensor
    matrix: Tensor
    scale: float
    # No default: torch 2.11 cannot compile a function that makes an object with a default factory.
    memory: dict[str, Tensor]


# Where a layer runs the code inside it: in a captured graph, on one rank, in a loop's body, in a
# transform of torch.func, before a backward pass, in compiled code, or under autocast.
Kind = Literal["graph", "shard", "loop", "func", "autograd", "compile", "autocast"]


@attrs.frozen(eq=False)
class Operation:
    """One operation of a body.

    Args:
        run: `(x, world) -> x`.
        refused_in: the kinds of layers that may refuse it.
    """

    run: Callable[[Tensor, World], Tensor]
    refused_in: frozenset[Kind] = frozenset()


class _Tagged(Tensor):
    """A subclass of Tensor that adds no behaviour; torch propagates it through every operator."""


# With every rule that torch asks for, so that a refusal is weft's.
class _Doubling(torch.autograd.Function):
    """`2 * x` with a custom derivative that torch.func can vectorize."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(_ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(_ctx: Any, slope: Tensor) -> Tensor:
        return 2 * slope

    @staticmethod
    def jvp(_ctx: Any, tangent: Tensor) -> Tensor:
        return 2 * tangent


@library.custom_op("weft_proofs::halve", mutates_args=())
def halve(x: Tensor) -> Tensor:
    """`x / 2` as a custom operator, with a fake implementation, a derivative and a rule for
    vmap."""
    return x / 2


halve.register_fake(torch.empty_like)
halve.register_autograd(lambda ctx, slope: slope / 2)
halve.register_vmap(lambda info, in_dims, x: (halve(x), in_dims[0]))


def _writes_to_a_view(x: Tensor, world: World) -> Tensor:
    copy = x.clone()
    copy[:, 0] = 1 - copy[:, 1]
    return copy


def _writes_to_its_argument(x: Tensor, world: World) -> Tensor:
    x.add_(world.scale)
    return x * 2


def _detaches_in_place(x: Tensor, world: World) -> Tensor:
    return x * (x * 3).detach_()


def _attends(x: Tensor, world: World) -> Tensor:
    query = x[None, None]
    return functional.scaled_dot_product_attention(query, query, query)[0, 0]


def _uses_a_subclass(x: Tensor, world: World) -> Tensor:
    return (x.as_subclass(_Tagged) * 2).as_subclass(Tensor)


def _reads_its_argument(x: Tensor, world: World) -> Tensor:
    return x * (3.0 if x.sum().item() > 0 else 2.0)


def _branches_on_its_argument(x: Tensor, world: World) -> Tensor:
    if (x > 0).any():
        return x + 1
    return x


def _remembers_its_first_argument(x: Tensor, world: World) -> Tensor:
    return x - world.memory.setdefault("first", x.detach().clone()).mean()


def _counts_without_gradients(x: Tensor, world: World) -> Tensor:
    with torch.no_grad():
        mean = x.mean()
    return x * mean


def _maps_a_tree(x: Tensor, world: World) -> Tensor:
    doubled = tree_map(lambda leaf: leaf * 2, {"a": x, "b": (x + 1, world.weight)})
    total: Tensor = doubled["a"] + doubled["b"][0] * doubled["b"][1]
    return total


OPERATIONS: dict[str, Operation] = {
    "x * weight": Operation(lambda x, world: x * world.weight),
    "x @ matrix": Operation(lambda x, world: x @ world.matrix),
    "tanh(x)": Operation(lambda x, world: torch.tanh(x)),
    "x * scale": Operation(lambda x, world: x * world.scale),
    "x - x.mean()": Operation(lambda x, world: x - x.mean()),
    "sqrt(abs(x) + 1)": Operation(lambda x, world: torch.sqrt(x.abs() + 1)),
    "sorts": Operation(lambda x, world: x.sort(dim=0).values),
    "detaches": Operation(lambda x, world: x * x.detach()),
    "detaches in place": Operation(_detaches_in_place),
    "no_grad inside": Operation(_counts_without_gradients, frozenset({"shard"})),
    "a view of columns": Operation(lambda x, world: x[:, :1] + x),
    "a transposed view": Operation(lambda x, world: (x.t() + 1).t()),
    "an expanded view": Operation(lambda x, world: x[:1].expand(x.shape) + x),
    "a flipped copy": Operation(lambda x, world: x.flip(0)),
    "writes to a copy": Operation(lambda x, world: x.clone().mul_(2).add_(0.5)),
    "writes to a view": Operation(_writes_to_a_view),
    # A graph may refuse a write to an argument that is not donated, and a loop one to its carry.
    "writes to its argument": Operation(_writes_to_its_argument, frozenset({"graph", "loop"})),
    "returns its argument": Operation(lambda x, world: x),
    "makes new tensors": Operation(
        lambda x, world: x + torch.arange(2.0, device=x.device) + torch.ones(2, device=x.device)
    ),
    "draws random numbers": Operation(
        lambda x, world: x + torch.rand_like(x), frozenset({"shard", "loop", "compile"})
    ),
    # Values that are read on the host differ from call to call, and a recorded operator does not.
    "reads its argument": Operation(_reads_its_argument, frozenset({"graph", "shard", "compile"})),
    "branches on its argument": Operation(
        _branches_on_its_argument, frozenset({"graph", "shard", "compile"})
    ),
    "reads what it closes over": Operation(
        lambda x, world: x + float(world.weight.sum()), frozenset({"graph", "shard", "compile"})
    ),
    "remembers its first argument": Operation(
        _remembers_its_first_argument, frozenset({"graph", "shard", "compile"})
    ),
    "a custom operator": Operation(lambda x, world: halve(x), frozenset({"shard"})),
    "a custom derivative": Operation(lambda x, world: _Doubling.apply(x), frozenset({"shard"})),
    "attention": Operation(_attends),
    "a subclass": Operation(_uses_a_subclass, frozenset({"shard"})),
    "a tree": Operation(_maps_a_tree),
}
"""What a body may do to its argument, by name."""


@attrs.frozen
class Body:
    """A random function: a chain of operations. `build` makes it over a given world.

    Args:
        operations: keys of `OPERATIONS`, in order.
        seed: the seed of the closed-over values.
        weight_requires_grad: whether autograd records operations on the weight.
    """

    operations: tuple[str, ...]
    seed: int = 0
    weight_requires_grad: bool = False

    def __str__(self) -> str:
        if self.weight_requires_grad:
            trained = ", whose weight requires grad"
        else:
            trained = ""
        return f"f: {'; '.join(self.operations)}{trained}"

    def world(self, device: str) -> World:
        """New values to close over."""
        generator = torch.Generator().manual_seed(self.seed)
        weight = torch.rand(COLUMNS, generator=generator).add(0.5).to(device)
        matrix = torch.rand(COLUMNS, COLUMNS, generator=generator).sub(0.5).to(device)
        return World(weight.requires_grad_(self.weight_requires_grad), matrix, 1.5, {})

    def build(self, world: World) -> "Built":
        """The function over a world, and the change to what it closes over."""
        weight = world.weight
        scale = world.scale
        operations = [OPERATIONS[name].run for name in self.operations]

        # The weight and the scale are closure variables, so that graphs must notice their changes.
        def function(x: Tensor) -> Tensor:
            local_world = World(weight, world.matrix, scale, world.memory)
            for operation in operations:
                x = operation(x, local_world)
            return x

        def change() -> None:
            nonlocal scale
            # A new value of a variable and a write in place: graphs must see both.
            scale += 1
            with torch.no_grad():
                weight.add_(1)

        return Built(function, change, world)


@attrs.frozen(eq=False)
class Built:
    """A body over its world.

    Args:
        function: the function.
        change: writes the weight in place and rebinds the scale.
        world: what it closes over.
    """

    function: Function
    change: Callable[[], None]
    world: World


@st.composite
def bodies(draw: st.DrawFn, max_operations: int = 3) -> Body:
    """A chain of one to `max_operations` operations.

    >>> from hypothesis import find
    >>> print(find(bodies(), lambda body: "detaches" in body.operations))
    f: detaches
    """
    names = draw(st.lists(st.sampled_from(list(OPERATIONS)), min_size=1, max_size=max_operations))
    return Body(tuple(names), draw(st.integers(0, 99)), draw(st.booleans()))
