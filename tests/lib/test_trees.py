"""attrs classes as pytrees: under torch.func, with statics in the structure, with readable paths."""

import dataclasses
from collections import OrderedDict
from typing import Any

import attrs
import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.func import grad, jvp, vmap

from weft.arguments.checks import kind_of
from weft.batch import Batch
from weft.descriptor import BatchDescriptor
from weft.errors import DescriptorError, TreeError
from weft.outputs import Output
from weft.proofs.laws import assert_equal
from weft.trees import (
    Axes,
    axes,
    descriptor_field,
    find_descriptors,
    leaf_axes,
    leaves_with_names,
    map_sized,
    pytree,
    sized_fields,
    static,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
)

LAW = "a class is a tree"


@pytree
@attrs.frozen(eq=False)
class Layer:
    w: Any
    b: Any = None
    rate: float = attrs.field(default=1.0, metadata=static(), kw_only=True)
    made: int = attrs.field(default=7, init=False)


def layer(rate: float = 2.0) -> Layer:
    return Layer(torch.arange(3.0), {"x": torch.ones(3)}, rate=rate)


def loss(p: Layer) -> Tensor:
    return (p.rate * p.w**2 * p.b["x"]).sum()


def test_grad_gives_a_value_of_the_class() -> None:
    g = grad(loss)(layer())
    assert isinstance(g, Layer)
    assert_equal(LAW, (g.w, g.b["x"], g.rate), (2.0 * 2 * torch.arange(3.0), 2.0 * torch.arange(3.0) ** 2, 2.0))


def test_jvp_and_vmap_take_and_give_values_of_the_class() -> None:
    _, tangent = jvp(lambda p: tree_map(lambda x: x * 2, p), (layer(),), (layer(),))
    assert_equal(LAW, tangent, tree_map(lambda x: x * 2, layer()))
    many = tree_map(lambda x: torch.stack([x, x + 1]), layer())
    seen = vmap(lambda p: (loss(p), p))(many)
    assert_equal(LAW, seen[0], torch.stack([loss(layer()), loss(tree_map(lambda x: x + 1, layer()))]))
    assert_equal(LAW, seen[1], many)


def test_vmap_over_one_field_only() -> None:
    axes_of = Layer(0, {"x": None}, rate=2.0)
    seen = vmap(loss, in_dims=(axes_of,))(Layer(torch.eye(3), {"x": torch.ones(3)}, rate=2.0))
    assert seen.tolist() == [2, 2, 2]


def test_statics_are_structure_and_children_are_not() -> None:
    assert tree_structure(layer(1.0)) == tree_structure(layer(1.0))
    assert tree_structure(layer(1.0)) != tree_structure(layer(3.0))
    assert hash(tree_structure(layer(1.0))) == hash(tree_structure(layer(1.0)))
    assert tree_structure(Layer(torch.ones(1))) == tree_structure(Layer(torch.zeros(9)))
    with pytest.raises(ValueError, match="mismatch"):
        tree_map(lambda a, b: a, layer(1.0), layer(3.0))


LEAVES = st.one_of(st.integers(), st.none(), st.text(max_size=3))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(Layer, inner, inner, rate=st.floats(0, 1)),
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(TREES)
def test_flatten_and_unflatten_are_inverse(tree: Any) -> None:
    leaves, structure = tree_flatten(tree)
    again = tree_unflatten(leaves, structure)
    assert tree_flatten(again) == (leaves, structure)
    assert repr(again) == repr(tree)
    assert [leaf for _, leaf in leaves_with_names(tree)] == leaves
    assert leaf_axes(tree) == [None] * len(leaves)


def test_paths_are_what_one_would_write() -> None:
    tree = {"p": [Layer(1, (2, None))], "b": Batch.decode([0])}
    names = [name for name, _ in leaves_with_names(tree)]
    assert names == [
        "['p'][0].w", "['p'][0].b[0]", "['p'][0].b[1]",
        "['b'].rows", "['b'].input_ids", "['b'].query_start_loc", "['b'].samples",
        "['b'].token_mask", "['b'].targets", "['b'].inputs_embeds", "['b'].positions",
    ]  # fmt: skip
    for name, leaf in leaves_with_names(tree):
        assert eval(f"tree{name}", {"tree": tree}) is leaf
    assert leaves_with_names(3) == [("", 3)]


def test_a_field_that_is_not_given_is_not_a_child() -> None:
    assert tree_leaves(Layer(1, 2)) == [1, 2]
    assert tree_map(lambda x: x, Layer(1, 2)).made == 7


@pytree
@attrs.frozen(eq=False)
class Grid:
    shape: Any = attrs.field(metadata=descriptor_field())
    cells: Tensor = attrs.field(metadata=axes("rows", "columns+1", None, pad=-1))
    free: Tensor = attrs.field()
    maybe: Tensor | None = attrs.field(default=None, metadata=axes("rows"))


@attrs.frozen
class Shape:
    rows: int
    columns: int


def grid() -> Grid:
    return Grid(Shape(2, 3), torch.ones(2, 4, 5), torch.ones(1))


def test_extents() -> None:
    spec = Axes(("rows", None, "columns+12"))
    assert [spec.extent(i, Shape(2, 3)) for i in range(5)] == [2, None, 15, None, None]
    with pytest.raises(DescriptorError) as error:
        Axes(("depth", None)).extent(0, Shape(2, 3))
    assert error.value.call == "weft.axes('depth', None)"
    assert error.value.seen == "a descriptor Shape(rows=2, columns=3), with no attribute 'depth'"
    with pytest.raises(DescriptorError, match="with rows='2'"):
        Axes(("rows",)).extent(0, Shape("2", 3))  # type: ignore[arg-type]


def test_sized_fields_and_axes_follow_the_leaves() -> None:
    assert list(sized_fields(grid())) == ["cells", "maybe"]
    assert sized_fields(layer()) == sized_fields(3) == {}
    for tree in ((grid(), layer()), [Output(torch.ones(1), torch.ones(1)), grid()]):
        assert len(leaf_axes(tree)) == len(tree_leaves(tree))
    assert [spec and spec.dims for spec in leaf_axes([torch.ones(1), grid()])] == [
        None, ("rows", "columns+1", None), None, None,
    ]  # fmt: skip


def test_map_sized_touches_sized_tensors_only_and_sets_the_descriptor() -> None:
    seen: list[tuple[int, ...]] = []

    def record(value: Tensor, spec: Axes) -> Tensor:
        seen.append((tuple(value.shape), spec.dims))
        return value * 2

    tree: dict[str, Any] = {"g": grid(), "l": layer(), "n": 3}
    made = map_sized(record, tree, Shape(9, 9))
    assert seen == [((2, 4, 5), ("rows", "columns+1", None))]
    assert (made["g"].shape, made["g"].free is tree["g"].free, made["g"].maybe) == (Shape(9, 9), True, None)
    assert made["l"].w is tree["l"].w
    assert tree["g"].cells.sum() == 40


def test_find_descriptor_finds_the_first_in_order() -> None:
    tree = [Output(torch.ones(1), torch.ones(1)), {"a": (Batch.decode([0]), grid())}]
    assert find_descriptors(tree)[0] == BatchDescriptor.uniform(1)
    assert find_descriptors(tree[0]) == find_descriptors(layer()) == []


def test_a_class_that_is_no_attrs_class_is_refused() -> None:
    data = dataclasses.make_dataclass("Data", ["x"], frozen=True)
    for cls, kind in ((type("Plain", (), {}), "no attrs class"), (data, "a dataclass")):
        with pytest.raises(TreeError) as error:
            pytree(cls)
        name = cls.__name__
        assert str(error.value) == (
            f"weft.pytree({name})\n  saw: {kind}\n  instead: @weft.pytree, then @attrs.frozen, then class {name}: ..."
        )


def test_children_without_names_are_numbered() -> None:
    class Foreign:
        def __init__(self, *parts: Any) -> None:
            self.parts = parts

    torch_pytree.register_pytree_node(Foreign, lambda f: (list(f.parts), None), lambda parts, _: Foreign(*parts))
    tree = {"a": [Foreign(1, {"b": Foreign(2)})], "c": 3}
    assert leaves_with_names(tree) == [("['a'][0][0]", 1), ("['a'][0][1]['b'][0]", 2), ("['c']", 3)]


@pytest.mark.parametrize("value", [[1.0, 2.0], 2, (torch.ones(1),)])
def test_a_sized_field_that_holds_no_tensor_is_named(value: Any) -> None:
    wrong = attrs.evolve(grid(), maybe=value)
    with pytest.raises(DescriptorError) as error:
        leaf_axes({"g": wrong})
    assert error.value.call.startswith("Grid(maybe=")
    assert error.value.seen == f"{kind_of(value)} in a field with axes('rows')"


ANY_TREE = st.recursive(
    st.just(None) | st.integers() | st.builds(torch.zeros, st.just(2)) | st.just(torch.Size([2, 3])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=1), inner, max_size=3)
        | st.builds(Layer, inner, inner)
        | st.dictionaries(st.text(max_size=1), inner, max_size=3).map(OrderedDict)
    ),
)


@given(ANY_TREE)
def test_leaves_are_those_of_torch_in_its_order(tree: Any) -> None:
    ours = tree_leaves(tree)
    assert [*map(id, ours)] == [*map(id, tree_flatten(tree)[0])]
