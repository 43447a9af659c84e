"""Users' own descriptors: the requirements, and the errors for those that do not meet them."""

from typing import Any

import attrs
import pytest
import torch
from own_batches import Length
from refusal import refused

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
    seen = "a descriptor Width(columns=2), with no attribute 'steps'"
    instead = "an int attribute 'steps' of Width, or in axes(...) the name of one that it has"
    with refused(DescriptorError, "weft.axes('steps')", seen, instead):
        graphify(whole, ladder=[Width(4)])(Signal(Width(2), torch.ones(2)))


def test_a_descriptor_that_is_none() -> None:
    instead = "a hashable value with a method covers(other): a weft.BatchDescriptor, or an @attrs.frozen class"
    with refused(DescriptorError, "whole(...)", "3 where a descriptor should be", instead):
        graphify(whole, ladder=[Length(4)])(Signal(3, torch.ones(3)))
    with refused(DescriptorError, "weft.pad(Signal, Length(steps=4))", "3 where a descriptor should be", instead):
        weft.pad(Signal(3, torch.ones(3)), Length(4))


def test_a_leaf_that_is_no_tensor() -> None:
    seen, instead = "a list in a field with axes('steps')", "a tensor (torch.tensor), or a field without axes"
    for use in (graphify(whole, ladder=[Length(4)]), lambda s: weft.pad(s, Length(4))):
        with refused(DescriptorError, "Signal(x=[1.0, 2.0])", seen, instead):
            use(Signal(Length(2), [1.0, 2.0]))


def test_tensors_of_another_size_than_their_descriptor_says() -> None:
    seen = "signal.x of shape (5,) in a batch of class 'Length(steps=3)', which needs (3,)"
    with refused(DescriptorError, "whole(...)", seen, "give the batch the descriptor of its tensors"):
        graphify(whole, ladder=[Length(8)])(Signal(Length(3), torch.ones(5)))


def test_covers_that_says_nothing() -> None:
    seen, instead = "Vague(steps=4).covers(itself) is None", "a covers(other) that returns True or False"
    with refused(CaptureError, "graphify(whole, ...)", seen, instead):
        graphify(whole, ladder=[Vague(4)])


def test_advice_names_the_users_own_axes() -> None:
    with pytest.raises(CaptureError, match=r"weft\.axes\('steps'\)"):
        graphify(lambda signal: signal.x * 2, ladder=[Length(4)])(Signal(Length(2), torch.ones(2)))
    with pytest.raises(DescriptorError, match=r"weft\.axes\('steps'\)"):
        weft.pad(torch.ones(2), Length(4))
    with pytest.raises(CaptureError, match=r"with a weft\.descriptor_field\(\)"):
        graphify(whole, ladder=[Length(4)])(torch.ones(2))
