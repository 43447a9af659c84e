"""Arguments: those that share a graph, those that are refused, and the references that a graph
keeps."""

import copy
import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from weft.errors import CaptureError, DescriptorError
from weft.proofs import assert_equal
from weft.transforms.graphs.calls.buffers import buffer_like
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.ladder import Limits, make_ladder
from weft.values.trees import axes, descriptor_field, pytree

LAW = "graphify changes nothing"
X = torch.arange(1.0, 4.0)


class Negated(Tensor):
    """A tensor whose products are negated."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return -result if func is torch.mul else result


def test_a_subclass_of_tensor_is_refused_before_and_after_a_plain_one() -> None:
    for first in (True, False):
        g = graphify(lambda x: torch.mul(x, 2.0))
        if first:
            g(X)
        with pytest.raises(CaptureError) as caught:
            g(X.as_subclass(Negated))
        assert str(caught.value) == (
            "<lambda>(...)\n"
            "  saw: x is a Negated, a subclass of Tensor, which may redefine any operator\n"
            "  instead: pass plain tensors: those that it wraps, or x.as_subclass(torch.Tensor)"
        )


def test_a_parameter_is_an_argument() -> None:
    g = graphify(lambda x: x * 2)
    p = nn.Parameter(X)
    with torch.no_grad():
        for x in (p, X, p):
            assert_equal(LAW, g(x), X * 2)


@pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor"
)  # deprecated in newer versions of torch
def test_quantized_tensors_are_refused() -> None:
    x = torch.quantize_per_tensor(X, 0.5, 0, torch.qint8)
    with pytest.raises(
        CaptureError, match=r"saw: x is quantized, and its scales are not part of the key"
    ):
        graphify(lambda x: x.dequantize())(x)


@dataclasses.dataclass(frozen=True)
class Data:
    n: Any


@attrs.frozen
class Attrs:
    n: Any


ALIKE: dict[str, tuple[Callable[..., Any], Any, Any, bool]] = {
    "complex zeros": (
        lambda x, c: torch.tensor([c]).angle() + x,
        complex(-1, 0.0),
        complex(-1, -0.0),
        False,
    ),
    "zeros": (lambda x, c: x / c, 0.0, -0.0, False),
    "ranges": (lambda x, c: x * c.stop, range(0, 3, 2), range(0, 4, 2), False),
    "frozensets": (lambda x, c: x.long() * next(iter(c)), frozenset({1}), frozenset({1.0}), True),
    "dataclasses": (lambda x, c: x.long() * c.n, Data(1), Data(1.0), True),
    "attrs classes": (lambda x, c: x / c.n, Attrs(0.0), Attrs(-0.0), True),
    "keys of dicts": (lambda x, c: next(iter(c)) + x.long(), {1: X}, {True: X}, False),
}


@pytest.mark.parametrize("case", ALIKE)
def test_equal_values_that_are_not_alike_have_graphs_of_their_own(case: str) -> None:
    fn, one, other, static = ALIKE[case]
    assert static or isinstance(one, dict) or one == other
    g = graphify(fn, static_argnames="c" if static else ())
    for value in (one, other, one, other):
        result = g(X, value)
        expected = fn(X, value)
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)
    assert g.cache_info().captures == 2


def test_keys_of_dicts_come_back_as_they_were() -> None:
    g = graphify(lambda d: d)
    for key in (1, True, 1.0, 1, True):
        [returned_key] = g({key: X})
        assert type(returned_key) is type(key)


class Sealed:
    """An object that is equal to any other, and whose content cannot be inspected."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sealed)

    def __hash__(self) -> int:
        return 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError


def test_a_static_value_that_cannot_be_told_apart_is_refused() -> None:
    with pytest.raises(
        CaptureError,
        match="a Sealed is compared by its own ==, which may take unlike ones for equal",
    ):
        graphify(lambda x, s: x, static_argnames="s")(X, Sealed())


WIDE = torch.randn(64, 2000, generator=torch.Generator().manual_seed(0))
STRIDED: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "every other column": (lambda x: x.sum(-1), WIDE[:, ::2]),
    "down the rows": (lambda x: x.sum(0), WIDE[:, ::2]),
    "an offset": (lambda x: x.sum(-1), WIDE[:, 1:]),
    "a product": (lambda x: x @ x.T, WIDE[:, ::2]),
    "expanded": (lambda x: x @ x.T, WIDE[:1].expand(64, 2000)),
    "turned": (lambda x: x.T @ x, WIDE.T),
    "a conjugate": (lambda x: x.real * 2, torch.view_as_complex(WIDE.view(64, 1000, 2)).conj()),
    "a negative": (lambda x: x * 2, torch.view_as_complex(WIDE.view(64, 1000, 2)).conj().imag),
    "its strides": (lambda x: x * (2 if x.is_contiguous() else 3) + x.stride(0), WIDE[:, ::2]),
}


@pytest.mark.parametrize("case", STRIDED)
def test_a_strided_argument_is_computed_with_as_it_is(case: str) -> None:
    fn, x = STRIDED[case]
    g = graphify(lambda x: fn(x))
    for _ in range(2):
        assert torch.equal(g(x), fn(x))


@pytest.mark.parametrize(
    "shape", [((5, 4), (0, 1)), ((3, 3), (1, 1)), ((2, 3, 2), (0, 2, 1)), ((4,), (0,))], ids=str
)
def test_an_overlapping_argument_keeps_its_strides(shape: Any) -> None:
    g = graphify(lambda x: (x * 2, torch.tensor(x.stride())))
    for start in range(3):
        x = torch.arange(9.0).add(start).as_strided(*shape)
        assert_equal(LAW, g(x), (x * 2, torch.tensor(x.stride())))
    assert g.cache_info().captures == 1


def test_a_few_elements_far_apart_are_made_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.transforms.graphs.calls.buffers.SPARSE_BYTES", 16)
    x = torch.arange(100.0)[::50]
    assert buffer_like(x).is_contiguous()
    assert_equal(LAW, graphify(lambda x: x * 3)(x), x * 3)


def test_a_dimension_of_one_keeps_its_stride() -> None:
    x = torch.ones(3, 100)[:1, :4]
    assert graphify(lambda x: x.stride())(x) == x.stride() == (100, 1)


def test_memory_between_the_elements_is_no_argument() -> None:
    with pytest.raises(
        CaptureError, match="saw: as_strided of x beyond its elements, which a replay does not have"
    ):
        graphify(lambda x: x.as_strided((2,), (1,)))(torch.arange(6.0)[::2])
    g = graphify(lambda x: x.as_strided((2,), (1,)))
    for x in (X, X + 1):
        assert_equal(LAW, g(x), x[:2])


@pytest.mark.parametrize("calls", [1, 2])
def test_dropped_params_are_not_held(calls: int) -> None:
    """Not even by a cycle of references, which would hold them until the garbage collector runs."""
    g = graphify(lambda params, x: (params["w"].t() @ x).sum() + params["w"][0])
    params = {"w": torch.ones(3, 3)}
    gc.disable()
    for _ in range(calls):
        g(params, X)
    storage_ref = StorageWeakRef(params["w"].untyped_storage())
    del params
    gc.enable()
    assert storage_ref.expired()


def test_a_detached_parameter_is_not_the_parameter() -> None:
    p = nn.Parameter(X.clone())
    with torch.no_grad():
        detached = graphify(lambda params: params.detach())
        itself = graphify(lambda params: params)
        for _ in range(2):
            assert not detached(p).requires_grad
            assert itself(p) is p
    assert p.requires_grad
    assert_equal(LAW, detached(p.detach()), X)


def test_a_copy_of_a_module_that_holds_a_graph_has_its_own() -> None:
    linear = nn.Linear(3, 3)
    g = graphify(linear)
    with torch.no_grad():
        g(X)
        other = copy.deepcopy(g)
        linear.weight.zero_()
        assert not torch.equal(other(X), g(X))
    assert (g.cache_info().captures, other.cache_info().captures) == (1, 1)


@attrs.frozen
class Size:
    n: int

    def covers(self, other: "Size") -> bool:
        return self.n >= other.n


@pytree
@attrs.frozen
class Rows:
    size: Any = attrs.field(metadata=descriptor_field())
    x: Any = attrs.field(metadata=axes("n"))


def test_a_ladder_of_another_class_of_descriptors_is_refused() -> None:
    g = graphify(lambda rows: rows, ladder=make_ladder("full", Limits(4, 4)))
    with pytest.raises(DescriptorError) as caught:
        g(Rows(Size(3), X))
    assert "a batch with a descriptor of class Size, and a ladder of BatchDescriptor" in str(
        caught.value
    )
    assert "instead: a ladder of Size, or batches of BatchDescriptor" in str(caught.value)


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a builtin": (torch.sin, {}, "saw: a builtin, whose argument names are unknown"),
    "a number": (3, {}, "saw: 3, which is not a function"),
    "static and donated": (
        lambda s: s,
        {"static_argnames": "s", "donate_argnames": "s"},
        "saw: 's' in static_argnames, and in donate_argnames or reference_argnames",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_graphified(case: str) -> None:
    fn, options, problem = WRONG[case]
    with pytest.raises(CaptureError) as caught:
        graphify(fn, **options)
    assert problem in str(caught.value)


def test_a_donated_result_that_was_made_without_gradients_is_captured_again() -> None:
    """Autograd refuses to say whether such a view is a leaf once a run has written to its base."""
    outside = torch.ones(3)
    step = graphify(lambda x: (x.mul_(2), outside + 1), donate_argnames="x")
    x: Tensor = torch.nn.Parameter(torch.ones(2, 3)).clone()
    with torch.no_grad():
        for call in range(4):
            if call > 1:
                outside = outside * 2
            x, other = step(x)
            assert_equal("call", (x, other), (torch.full((2, 3), 2.0 ** (call + 1)), outside + 1))


@pytest.mark.parametrize("empty", [[], {}, [[]], {"a": []}], ids=repr)
def test_an_empty_container_is_not_filled(empty: Any) -> None:
    """A replay would not fill the caller's."""

    def fill(x: Tensor, kept: Any) -> Tensor:
        while kept:
            kept = kept["a"] if isinstance(kept, dict) else kept[0]
        kept.update(b=x) if isinstance(kept, dict) else kept.append(x)
        return x + 1

    with pytest.raises(CaptureError, match="changes its argument kept"):
        graphify(fill)(torch.ones(2), empty)


def test_a_graph_of_a_bound_method_in_a_class_is_bound_to_what_it_was() -> None:
    class Eight:
        def value(self) -> Tensor:
            return torch.tensor(8)

        def __call__(self) -> Tensor:
            return torch.tensor(9)

    class Other:
        value = graphify(Eight().value)
        called = graphify(Eight())

    assert (Other().value().item(), Other.value().item(), Other().called().item()) == (8, 8, 9)
