"""attrs classes as pytrees: under torch.func, with statics in the structure, with readable paths."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import find, given, settings, strategies as st
from torch import Tensor
from torch.func import grad, jvp, vmap

import weft
from weft.arguments.checks import kind_of
from weft.batches.batch import Batch
from weft.batches.descriptor import BatchDescriptor, Descriptor
from weft.batches.outputs import Output
from weft.batches.padding import pad, unpad
from weft.batches.splitting import cut_sized
from weft.errors import DescriptorError, TreeError
from weft.proofs import assert_equal
from weft.proofs._strategies.tree_classes import (
    CLASS_OPTIONS,
    CLASS_OPTIONS_NOT_DRAWN,
    FIELD_OPTIONS,
    FIELD_OPTIONS_NOT_DRAWN,
    TreeValue,
    options_of,
    tree_values,
)
from weft.transforms.graphs.calls.builder import write_template
from weft.values.trees import (
    OF_THIS_VALUE,
    Axes,
    axes,
    descriptor_field,
    find_descriptors,
    leaf_axes,
    leaves_with_names,
    map_sized,
    node_fields,
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


@attrs.frozen
class Length(Descriptor):
    steps: int


@pytree
@attrs.frozen(eq=False)
class Layer:
    w: Any
    b: Any = None
    rate: float = attrs.field(default=1.0, metadata=static(), kw_only=True)
    version: int = attrs.field(default=7, init=False, metadata=static())


def layer(rate: float = 2.0) -> Layer:
    return Layer(torch.arange(3.0), {"x": torch.ones(3)}, rate=rate)


def loss(p: Layer) -> Tensor:
    return (p.rate * p.w**2 * p.b["x"]).sum()


def test_grad_gives_a_value_of_the_class() -> None:
    g = grad(loss)(layer())
    assert isinstance(g, Layer)
    assert_equal(
        LAW,
        (g.w, g.b["x"], g.rate),
        (2.0 * 2 * torch.arange(3.0), 2.0 * torch.arange(3.0) ** 2, 2.0),
    )


def test_jvp_and_vmap_take_and_give_values_of_the_class() -> None:
    _, tangent = jvp(lambda p: tree_map(lambda x: x * 2, p), (layer(),), (layer(),))
    assert_equal(LAW, tangent, tree_map(lambda x: x * 2, layer()))
    many = tree_map(lambda x: torch.stack([x, x + 1]), layer())
    result = vmap(lambda p: (loss(p), p))(many)
    assert_equal(
        LAW, result[0], torch.stack([loss(layer()), loss(tree_map(lambda x: x + 1, layer()))])
    )
    assert_equal(LAW, result[1], many)


def test_vmap_over_one_field_only() -> None:
    axes_of = Layer(0, {"x": None}, rate=2.0)
    result = vmap(loss, in_dims=(axes_of,))(Layer(torch.eye(3), {"x": torch.ones(3)}, rate=2.0))
    assert result.tolist() == [2, 2, 2]


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
        "['p'][0].w",
        "['p'][0].b[0]",
        "['p'][0].b[1]",
        "['b'].rows",
        "['b'].input_ids",
        "['b'].query_start_loc",
        "['b'].samples",
        "['b'].token_mask",
        "['b'].targets",
        "['b'].inputs_embeds",
        "['b'].positions",
    ]
    for name, leaf in leaves_with_names(tree):
        assert eval(f"tree{name}", {"tree": tree}) is leaf
    assert leaves_with_names(3) == [("", 3)]


def test_a_field_that_init_does_not_take_is_carried_along() -> None:
    assert tree_leaves(Layer(1, 2)) == [1, 2]
    changed = Layer(1, 2)
    object.__setattr__(changed, "version", 8)
    assert tree_map(lambda x: x, changed).version == 8


def test_a_field_of_this_value_is_made_anew() -> None:
    @pytree
    @attrs.frozen(eq=False)
    class Noted:
        x: Tensor
        notes: list[str] = attrs.field(factory=list, init=False, metadata=OF_THIS_VALUE)
        mark: str = attrs.field(default="", init=False, metadata=OF_THIS_VALUE)

    noted = Noted(torch.ones(1))
    noted.notes.append("one")
    object.__setattr__(noted, "mark", "one")
    again = tree_map(lambda x: x, noted)
    assert (again.notes, again.mark, len(tree_leaves(noted))) == ([], "", 1)


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
    assert error.value.problem == "a descriptor Shape(rows=2, columns=3), with no attribute 'depth'"
    with pytest.raises(DescriptorError, match="with rows='2'"):
        Axes(("rows",)).extent(0, Shape("2", 3))  # type: ignore[arg-type]


def test_sized_fields_and_axes_follow_the_leaves() -> None:
    assert list(sized_fields(grid())) == ["cells", "maybe"]
    assert sized_fields(layer()) == sized_fields(3) == {}
    for tree in ((grid(), layer()), [Output(torch.ones(1), torch.ones(1)), grid()]):
        assert len(leaf_axes(tree)) == len(tree_leaves(tree))
    assert [spec and spec.dims for spec in leaf_axes([torch.ones(1), grid()])] == [
        None,
        ("rows", "columns+1", None),
        None,
        None,
    ]


def test_map_sized_touches_sized_tensors_only_and_sets_the_descriptor() -> None:
    visited: list[tuple[int, ...]] = []

    def record(value: Tensor, spec: Axes) -> Tensor:
        visited.append((tuple(value.shape), spec.dims))
        return value * 2

    tree: dict[str, Any] = {"g": grid(), "l": layer(), "n": 3}
    result = map_sized(record, tree, Shape(9, 9))
    assert visited == [((2, 4, 5), ("rows", "columns+1", None))]
    assert (result["g"].shape, result["g"].free is tree["g"].free, result["g"].maybe) == (
        Shape(9, 9),
        True,
        None,
    )
    assert result["l"].w is tree["l"].w
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
        assert (
            str(error.value)
            == f"weft.pytree({name})\n  saw: {kind}\n  instead: @weft.pytree, then @attrs.frozen,"
            f" then class {name}: ..."
        )


def test_children_without_names_are_numbered() -> None:
    class Foreign:
        def __init__(self, *parts: Any) -> None:
            self.parts = parts

    torch_pytree.register_pytree_node(
        Foreign, lambda f: (list(f.parts), None), lambda parts, _: Foreign(*parts)
    )
    tree = {"a": [Foreign(1, {"b": Foreign(2)})], "c": 3}
    assert leaves_with_names(tree) == [("['a'][0][0]", 1), ("['a'][0][1]['b'][0]", 2), ("['c']", 3)]


@pytest.mark.parametrize("value", [[1.0, 2.0], 2, (torch.ones(1),)])
def test_a_sized_field_that_holds_no_tensor_is_named(value: Any) -> None:
    wrong = attrs.evolve(grid(), maybe=value)
    with pytest.raises(DescriptorError) as error:
        leaf_axes({"g": wrong})
    assert error.value.call.startswith("Grid(maybe=")
    assert error.value.problem == f"{kind_of(value)} in a field with axes('rows')"


# Ways to double every tensor of a value, each of which takes the value apart and makes others of
# its class.
APPLIED: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "tree_map": lambda double, value: tree_map(lambda x: x * 2, value),
    "vmap": lambda double, value: vmap(double)(value),
    "jvp": lambda double, value: jvp(double, (value,), (value,))[1],
    "grad": lambda double, value: grad(lambda v: sum((x * x).sum() for x in tree_leaves(v)))(value),
    "graphify": lambda double, value: weft.graphify(double)(value),
    "shard": lambda double, value: weft.shard(double, weft.Mesh(d=2), weft.Shard(0), weft.Shard(0))(
        value
    ),
    "while_loop": lambda double, value: weft.while_loop(
        lambda carry: carry[1] < 1,
        lambda carry: (double(carry[0]), carry[1] + 1),
        (value, torch.zeros(())),
    )[0],
}


def check_that_nothing_constructs(drawn: TreeValue, name: str) -> None:
    def double(value: Any) -> Any:
        return tree_map(lambda x: x * 2, value)

    changed = APPLIED[name](double, drawn.value)
    assert drawn.calls == []
    assert type(changed) is type(drawn.value)
    for field, tensor in drawn.children.items():
        assert getattr(changed, field).tolist() == (tensor * 2).tolist()
    assert {field: getattr(changed, field) for field in drawn.statics} == drawn.statics
    hash(changed)


@pytest.mark.parametrize("name", APPLIED)
@settings(deadline=None, max_examples=15)
@given(drawn=tree_values())
def test_transforms_make_values_without_a_call_of_their_class(name: str, drawn: TreeValue) -> None:
    check_that_nothing_constructs(drawn, name)


@pytest.mark.one_of(1, 7)
@pytest.mark.slow
@pytest.mark.parametrize("name", APPLIED)
def test_the_test_above_finds_an_unflattening_that_constructs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def constructed(cls: Any, values: Any) -> Any:
        aliases = {f.name: f.alias for f in attrs.fields(cls) if f.init}
        return cls(**{aliases[name]: value for name, value in values if name in aliases})

    for home in ("weft.values.trees", "weft.transforms.graphs.calls.builder"):
        monkeypatch.setattr(f"{home}.built", constructed)
    find(
        tree_values(),
        lambda drawn: _constructs(drawn, name),
        settings=settings(database=None, deadline=None),
    )


def _constructs(drawn: TreeValue, name: str) -> bool:
    try:
        check_that_nothing_constructs(drawn, name)
    except AssertionError:
        return True
    return False


def test_every_option_of_attrs_is_drawn_or_has_a_reason() -> None:
    drawn = CLASS_OPTIONS.keys() | CLASS_OPTIONS_NOT_DRAWN
    assert options_of(attrs.frozen) <= drawn
    assert options_of(attrs.field) <= {*FIELD_OPTIONS, *FIELD_OPTIONS_NOT_DRAWN}


@pytree
@attrs.frozen(eq=False)
class Doubled:
    """A batch whose class doubles what it is given."""

    length: Length = attrs.field(metadata=descriptor_field())
    x: Tensor = attrs.field(metadata=axes("steps"), converter=lambda x: x + 1)
    total: Tensor = attrs.field(init=False, metadata=axes(None))

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "x", self.x * 2)
        object.__setattr__(self, "total", self.x.sum()[None])


def test_padding_and_cutting_do_not_construct() -> None:
    batch = Doubled(Length(4), torch.arange(4.0))
    padded = pad(batch, Length(6))
    assert padded.x.tolist() == [2.0, 4.0, 6.0, 8.0, 0.0, 0.0]
    assert padded.total.item() == 20.0
    assert unpad(padded, Length(4)).x.tolist() == batch.x.tolist()
    assert weft.graphify(lambda b: b, ladder=[Length(6)])(batch).x.tolist() == batch.x.tolist()
    part = cut_sized(batch, {"steps": (1, 3)}, Length(2), "x")
    assert part.x.tolist() == [0.0, 2.0]


@pytree
@attrs.frozen(eq=False)
class Tagged:
    x: Tensor
    tag: Any = attrs.field(default=None, metadata=static())


@pytest.mark.parametrize("name", APPLIED)
@pytest.mark.parametrize(
    ("tag", "shown", "problem", "instead"),
    [
        (
            [1, 2],
            "[1, 2]",
            "a static field that cannot be hashed (unhashable type: 'list')",
            "a value that can be hashed, such as a tuple; or tag without weft.static()",
        ),
        (
            {"a": 1},
            "{'a': 1}",
            "a static field that cannot be hashed (unhashable type: 'dict')",
            "a value that can be hashed, such as a tuple; or tag without weft.static()",
        ),
        (
            torch.ones(2),
            "tensor([1., 1.])",
            "a tensor in tag, a static field",
            "tag without weft.static()",
        ),
        (
            (torch.ones(2),),
            "(tensor([1., 1.]),)",
            "a tensor in tag, a static field",
            "tag without weft.static()",
        ),
        (
            Layer(torch.ones(1)),
            None,
            "a tensor in tag, a static field",
            "tag without weft.static()",
        ),
    ],
)
def test_static_fields_that_a_structure_cannot_compare_are_refused(
    name: str, tag: Any, shown: str | None, problem: str, instead: str
) -> None:
    with pytest.raises(TreeError) as error:
        APPLIED[name](lambda value: value, Tagged(torch.ones(4), tag))
    assert shown is None or error.value.call == f"Tagged(tag={shown})"
    assert (error.value.problem, error.value.instead) == (problem, instead)


@pytest.mark.parametrize(
    "tag", [None, "a", 1.0, (1, ("b",)), slice(0, 1).indices(2), Length, len, BatchDescriptor(2, 1)]
)
def test_static_fields_that_can_be_hashed_are_carried_along(tag: Any) -> None:
    assert weft.graphify(lambda value: value)(Tagged(torch.ones(2), tag)).tag == tag


def test_a_class_may_be_registered_twice() -> None:
    before = node_fields(Layer)
    assert pytree(Layer) is Layer
    assert node_fields(Layer) is before


def test_a_class_that_torchs_pytree_knows_is_refused_by_name() -> None:
    @attrs.frozen
    class Known:
        x: Any

    torch_pytree.register_pytree_node(
        Known, lambda k: ([k.x], None), lambda values, _: Known(*values)
    )
    with pytest.raises(TreeError) as error:
        pytree(Known)
    assert (
        str(error.value)
        == "weft.pytree(Known)\n  saw: a class that is registered with torch's pytree\n"
        "  instead: one of the two: weft's transforms take it as torch knows it"
    )


ANY_TREE = st.recursive(
    st.just(None)
    | st.integers()
    | st.builds(torch.zeros, st.just(2))
    | st.just(torch.Size([2, 3])),
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


def test_the_code_that_makes_results_of_graphs_does_not_construct() -> None:
    result = weft.graphify(lambda batch: batch)(Doubled(Length(2), torch.ones(2)))
    assert result.x.tolist() == [4.0, 4.0]
    structure = tree_structure(Doubled(Length(2), torch.ones(2)))
    template = write_template(structure, [torch.ones(2)] * 2, [None] * 2, [False] * 2)
    assert template.structure is None, "generated code makes it"
    assert template.builder(Length(3))([torch.zeros(2), torch.ones(1)], []).x.tolist() == [0.0, 0.0]
    assert template.builder(Length(3))([torch.zeros(2), torch.ones(1)], []).length == Length(3)


def test_leaves_of_a_value_with_a_tensor_in_a_static_field_are_refused() -> None:
    """An optimizer would leave it out."""
    with pytest.raises(TreeError, match="a tensor in tag, a static field"):
        tree_leaves({"params": [Tagged(torch.ones(4), torch.ones(2))]})
