"""`weft.clone` copies values into new memory, and keeps which leaves are one tensor and which share
a storage."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import weft
from weft.proofs import assert_equal
from weft.proofs._strategies.captures.tensor_programs import ALIASES
from weft.values import donation
from weft.values.donation import clone

# Views whose memory is not what it seems, beside the ways in which arguments alias.
LAZY = ("{base}.conj()", "torch.imag({base}.conj())", "{base}.view(torch.uint8)", "{base}[:0]")
DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool, torch.bfloat16)


def fits(text: str, dtype: torch.dtype) -> bool:
    """Whether a base of this dtype has the view, or may require grad."""
    if "imag" in text:
        return dtype.is_complex
    requires_grad = "requires_grad_" in text or text == "torch.nn.Parameter({base}.clone())"
    return dtype.is_floating_point or dtype.is_complex or not requires_grad


@st.composite
def aliased(draw: st.DrawFn) -> list[Tensor]:
    """Tensors of which some are one, and some views of one storage, of which they need not begin at
    the first byte."""
    tensors: list[Tensor] = []
    for dtype in draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=2)):
        first = draw(st.integers(0, 9))
        base = torch.arange(9 + first).to(dtype)[first:].reshape(3, 3)
        texts = [text for text in ALIASES + LAZY if fits(text, dtype)]
        for text in draw(st.lists(st.sampled_from(texts), min_size=1, max_size=4)):
            tensors.append(eval(text.format(base="base"), {"base": base, "torch": torch}))
    return draw(st.permutations(tensors))


def storages(tensors: Sequence[Tensor]) -> list[list[int]]:
    """For each tensor, the places of those that share its storage."""
    ids = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [[place for place, other in enumerate(ids) if other == one] for one in ids]


def objects(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor, the first place where it stands."""
    return [next(place for place, other in enumerate(tensors) if other is one) for one in tensors]


def offsets(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor that has elements, its distance in bytes from the first of its storage."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    first: dict[int, int] = {}
    for tensor in filled:
        first.setdefault(tensor.untyped_storage().data_ptr(), tensor.data_ptr())
    return [tensor.data_ptr() - first[tensor.untyped_storage().data_ptr()] for tensor in filled]


def lazily(tensor: Tensor, like: Tensor) -> Tensor:
    """The view with the conjugation and the negation of another tensor. Twice, it is the tensor
    itself."""
    if like.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if like.is_neg() else tensor


def deep_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Deep copies. A Parameter's and a lazy view's share with nothing, so the plain tensors over
    their memory are copied."""
    different = {id(tensor): tensor for tensor in tensors}
    copied = copy.deepcopy([lazily(tensor.detach(), tensor) for tensor in different.values()])
    pairs = zip(different.items(), copied, strict=True)
    by_id = {key: lazily(copied, tensor) for (key, tensor), copied in pairs}
    return [by_id[id(tensor)] for tensor in tensors]


def check_clone(tensors: Sequence[Tensor]) -> None:
    """A clone has the values, and the sharing, of a deep copy. A conjugate view may become plain
    numbers, as in torch's own `clone`."""
    tree = {"first": tensors[0], "all": list(tensors)}
    cloned = weft.clone(tree)
    expected = deep_copies(tensors)
    assert cloned["first"] is cloned["all"][0]
    assert objects(cloned["all"]) == objects(expected)
    filled = [place for place, tensor in enumerate(tensors) if tensor.numel()]
    for read in (storages, offsets):
        assert read([cloned["all"][place] for place in filled]) == read(
            [expected[place] for place in filled]
        )
    for one, other, source in zip(cloned["all"], expected, tensors, strict=True):
        assert torch.equal(one.detach(), other.detach())
        assert one.dtype == other.dtype
        assert (
            one.numel() == 0
            or one.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
        )


@given(aliased())
@settings(max_examples=150, deadline=None)
def test_a_clone_shares_as_a_deep_copy_does(tensors: list[Tensor]) -> None:
    check_clone(tensors)


def each_alone(tensors: Any) -> list[list[Tensor]]:
    return [[tensor] for tensor in tensors]


def without_a_memo(tree: Any) -> Any:
    return weft.values.trees.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tree)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "name", "planted"),
    [
        (donation, "_by_storage", each_alone),
        (weft, "clone", without_a_memo),
    ],
)
def test_planted_bugs_are_found(
    where: Any, name: str, planted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, planted)

    @given(aliased())
    @settings(max_examples=200, deadline=None, database=None)
    def check(tensors: list[Tensor]) -> None:
        check_clone(tensors)

    with pytest.raises(AssertionError):
        check()


def test_a_clone_of_tied_weights_writes_through_both_names() -> None:
    weight = torch.ones(2, 3)
    copied = weft.clone(
        {"embedding": weight, "head": weight, "row": weight[1], "turned": weight.t()}
    )
    copied["embedding"][1] = 5.0
    assert copied["head"] is copied["embedding"]
    assert copied["row"].tolist() == copied["turned"][:, 1].tolist() == [5.0] * 3
    assert weight.tolist() == [[1.0] * 3] * 2


def test_a_clone_has_derivatives_and_a_tensor_that_stands_twice_has_their_sum() -> None:
    def f(x: Tensor) -> Tensor:
        copied = weft.clone({"a": x, "b": x})
        return (copied["a"] * 2 + copied["b"] * 3).sum()

    x = torch.ones(2, requires_grad=True)
    f(x).backward()
    assert x.grad is not None
    for slope in (x.grad, torch.func.grad(f)(torch.ones(2))):
        assert slope.tolist() == [5.0, 5.0]
    _, slope = torch.func.jvp(f, (torch.ones(2),), (torch.ones(2),))
    assert slope.tolist() == 10.0


@pytest.mark.parametrize("text", [text for text in ALIASES if fits(text, torch.int64)])
def test_a_clone_of_views_has_the_derivative_of_each(text: str) -> None:
    def f(x: Tensor, copied: Callable[[Any], Any]) -> Tensor:
        base = x * 2
        view = eval(text.format(base="base"), {"base": base, "torch": torch})
        whole, row, part = copied((base, base[1], view))
        return (whole * 3).sum() + (row * 5).sum() + (part * 7).sum()

    slopes = []
    for copied in (clone, lambda tree: tree):
        x = torch.ones(3, 3, requires_grad=True)
        f(x, copied).backward()
        slopes.append(x.grad)
    assert_equal("the gradient of a clone", *slopes)


def test_a_clone_inside_a_graph_shares_as_outside() -> None:
    def f(x: Tensor) -> Tensor:
        doubled = x * 2
        whole, row = weft.clone((doubled, doubled[0]))
        row.add_(1)
        return whole

    graph = weft.graphify(f)
    for start in (1.0, 2.0):
        assert_equal("a clone", graph(torch.full((2, 2), start)), f(torch.full((2, 2), start)))
    assert torch.equal(
        torch.compile(f, backend="eager")(torch.ones(2, 2))[1], torch.full((2,), 2.0)
    )
