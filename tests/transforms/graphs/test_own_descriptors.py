"""Users' own descriptors: the requirements, and the errors for those that do not meet them."""

from collections import namedtuple
from typing import Any

import attrs
import pytest
import torch
from own_batches import Length
from refusal import refused
from torch import Size, Tensor
from torch.utils import _pytree

import weft
from weft.errors import CaptureError, DescriptorError
from weft.transforms.graphs.graphify import graphify


@attrs.frozen
class Width:
    columns: int

    def covers(self, other: "Width") -> bool:
        return self.columns >= other.columns


@attrs.frozen
class Vague:
    steps: int

    def covers(self, other: "Vague") -> None:
        pass


@weft.pytree
@attrs.frozen(eq=False)
class Signal:
    length: Any = attrs.field(metadata=weft.descriptor_field())
    x: Any = attrs.field(metadata=weft.axes("steps"))


def whole(signal: Signal) -> Signal:
    return Signal(signal.length, signal.x.cumsum(0))


def test_a_descriptor_without_the_attribute_of_an_axis() -> None:
    problem = "a descriptor Width(columns=2), with no attribute 'steps'"
    instead = "an int attribute 'steps' of Width, or in axes(...) the name of one that it has"
    with refused(DescriptorError, "weft.axes('steps')", problem, instead):
        graphify(whole, ladder=[Width(4)])(Signal(Width(2), torch.ones(2)))


def test_a_descriptor_that_is_none() -> None:
    instead = (
        "a hashable value with a method covers(other): a weft.BatchDescriptor, or an @attrs.frozen"
        " class"
    )
    with refused(DescriptorError, "whole(...)", "3 where a descriptor should be", instead):
        graphify(whole, ladder=[Length(4)])(Signal(3, torch.ones(3)))
    with refused(
        DescriptorError,
        "weft.pad(Signal, Length(steps=4))",
        "3 where a descriptor should be",
        instead,
    ):
        weft.pad(Signal(3, torch.ones(3)), Length(4))


def test_a_leaf_that_is_no_tensor() -> None:
    problem = "a list in a field with axes('steps')"
    instead = "a tensor (torch.tensor), or a field without axes"
    for use in (graphify(whole, ladder=[Length(4)]), lambda s: weft.pad(s, Length(4))):
        with refused(DescriptorError, "Signal(x=[1.0, 2.0])", problem, instead):
            use(Signal(Length(2), [1.0, 2.0]))


def test_tensors_of_another_size_than_their_descriptor_says() -> None:
    problem = "signal.x of shape (5,) in a batch of class 'Length(steps=3)', which needs (3,)"
    with refused(
        DescriptorError, "whole(...)", problem, "give the batch the descriptor of its tensors"
    ):
        graphify(whole, ladder=[Length(8)])(Signal(Length(3), torch.ones(5)))


def test_covers_that_says_nothing() -> None:
    problem = "Vague(steps=4).covers(itself) is None"
    instead = "a covers(other) that returns True or False"
    with refused(CaptureError, "graphify(whole, ...)", problem, instead):
        graphify(whole, ladder=[Vague(4)])


def test_advice_names_the_users_own_axes() -> None:
    with pytest.raises(CaptureError, match=r"weft\.axes\('steps'\)"):
        graphify(lambda signal: signal.x * 2, ladder=[Length(4)])(Signal(Length(2), torch.ones(2)))
    with pytest.raises(DescriptorError, match=r"weft\.axes\('steps'\)"):
        weft.pad(torch.ones(2), Length(4))
    with pytest.raises(CaptureError, match=r"with a weft\.descriptor_field\(\)"):
        graphify(whole, ladder=[Length(4)])(torch.ones(2))


def test_a_named_tuple_that_others_registered_is_a_named_tuple() -> None:
    """As in torch's pytree, which knows named tuples by their bases."""
    pair = namedtuple("pair", "first second")
    _pytree.register_pytree_node(
        pair, lambda p: ([p.first], p.second), lambda children, second: pair(*children, second)
    )
    tree = pair(1, Signal(Length(2), torch.ones(2)))
    assert weft.pad(tree, Length(4)).second.x.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert weft.unpad(weft.pad(tree, Length(4)), Length(2)).second.x.tolist() == [1.0, 1.0]
    assert graphify(lambda p: whole(p.second), ladder=[Length(4)])(tree).x.tolist() == [1.0, 2.0]


def test_a_class_that_is_decorated_after_its_first_use() -> None:
    class Both(Signal):
        y: Any = attrs.field(metadata=weft.axes("steps"))

    weft.pad([Signal(Length(2), torch.ones(2)), Both(Length(2), torch.ones(2))], Length(4))
    decorated: Any = weft.pytree(attrs.frozen(eq=False)(Both))
    wide = weft.pad(decorated(Length(2), torch.ones(2), torch.ones(2)), Length(4))
    assert (len(wide.x), len(wide.y)) == (4, 4)


@weft.pytree
@attrs.frozen(eq=False)
class Hidden:
    length: Any = attrs.field(metadata=weft.descriptor_field())
    _x: Any = attrs.field(metadata=weft.axes("steps"))
    rest: Any = None

    @property
    def x(self) -> Tensor:
        tensor: Tensor = self._x
        return tensor


def test_a_private_field_that_is_padded() -> None:
    g = graphify(lambda h: Hidden(h.length, h.x.cumsum(0)), ladder=[Length(4)])
    for size in (3, 2, 4):
        assert g(Hidden(Length(size), torch.ones(size))).x.tolist() == [1.0, 2.0, 3.0, 4.0][:size]


def test_a_size_beside_what_is_padded_stays_one() -> None:
    hidden = Hidden(Length(2), torch.ones(2), [Size((1, 2))])
    assert type(weft.pad(hidden, Length(4)).rest[0]) is Size
    g = graphify(lambda h: Signal(h.length, h.x + h.rest[0].numel()), ladder=[Length(4)])
    assert g(hidden).x.tolist() == [3.0, 3.0]


@weft.pytree
@attrs.frozen(eq=False)
class Made:
    """A result whose class makes a new tensor of what it is given, and looks at its length."""

    length: Any = attrs.field(metadata=weft.descriptor_field())
    x: Any = attrs.field(
        metadata=weft.axes("steps"), converter=lambda x: x + 0 if isinstance(x, Tensor) else x
    )
    inner: Any = attrs.field(default=None, metadata=weft.axes("steps"))

    def __attrs_post_init__(self) -> None:
        assert not isinstance(self.x, Tensor) or len(self.x) == self.length.steps


def test_results_have_the_class_of_their_call() -> None:
    g = graphify(
        lambda s: (Made(s.length, s.x * 2), [Signal(s.length, s.x)]), ladder=[Length(8), Length(4)]
    )
    for size in (3, 2, 3, 4, 7, 2):
        result, [signal] = g(Signal(Length(size), torch.full((size,), float(size))))
        assert result.length == signal.length == Length(size)
        assert result.x.tolist() == [2.0 * size] * size
        assert signal.x.tolist() == [float(size)] * size
    assert g.cache_info().captures == 2


def test_what_is_not_cut_keeps_its_class() -> None:
    def beside(signal: Signal, weights: Tensor) -> Made:
        return Made(signal.length, signal.x, Signal(Length(4), weights))

    g = graphify(beside, ladder=[Length(4)], reference_argnames="weights")
    result = g(Signal(Length(3), torch.ones(3)), torch.ones(4))
    assert (result.length, result.inner.length, len(result.inner.x)) == (Length(3), Length(4), 4)


class Pair:
    """A class that others registered with torch's pytree."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first = first
        self.second = second


_pytree.register_pytree_node(
    Pair, lambda pair: ([pair.first, pair.second], None), lambda parts, _: Pair(*parts)
)


def test_results_in_a_class_of_others_have_the_class_of_their_call() -> None:
    g = graphify(lambda s: Pair(whole(s), Signal(s.length, s.x)), ladder=[Length(8), Length(4)])
    for size in (3, 2, 3, 4, 7, 2):
        pair = g(Signal(Length(size), torch.ones(size)))
        assert (pair.first.length, pair.second.length) == (Length(size), Length(size))
        assert pair.first.x.tolist() == [float(n + 1) for n in range(size)]
    assert g.cache_info().captures == 2
