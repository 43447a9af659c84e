"""Plain values travel between processes unchanged, and all other values are refused."""

import collections
import enum
import pickle
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from hypothesis import given, strategies as st

from weft.batches.outputs import IntermediateTensors
from weft.errors import ProgramError
from weft.transforms.pipelines.transports.messaging.json_values import dumps, loads
from weft.values.keys import value_key


class Color(enum.Enum):
    """An enum."""

    RED = 1


class Point(NamedTuple):
    """A named tuple."""

    x: Any
    y: Any


@attrs.frozen
class Box:
    """An attrs class, with a private field."""

    size: Any
    _hidden: Any = 0


names = st.sampled_from(
    [torch.float16, torch.int64, torch.device("cpu"), torch.device("cuda", 1), torch.strided]
)
plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | names
    | st.just(Color.RED)
    | st.just(torch.Size([2, 3]))
)
values = st.recursive(
    plain,
    lambda inner: (
        st.tuples(inner, inner)
        | st.builds(Point, inner, inner)
        | st.builds(Box, inner, inner)
        | st.builds(frozenset, st.lists(st.integers()))
    ),
)


@given(values)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert value_key(loads(dumps(value, "f(x)"))) == value_key(value)


def test_containers_and_nodes_come_back_as_they_were() -> None:
    tree = {
        "a": [1, {2}],
        (1, 2): collections.OrderedDict(b=1.5),
        None: collections.defaultdict(list, c=[True]),
    }
    back = loads(dumps(tree, "f(x)"))
    assert back == tree
    assert [type(container) for container in back.values()] == [
        list,
        collections.OrderedDict,
        collections.defaultdict,
    ]
    assert back[None].default_factory is list
    assert loads(dumps(IntermediateTensors("h", 3), "f(x)")).hidden_states == "h"


@pytest.mark.parametrize(
    "value", [object(), torch.ones(2), lambda: 1, pickle, {"a": (1, object())}]
)
def test_what_is_not_plain_is_refused_where_it_is_sent(value: Any) -> None:
    with pytest.raises(ProgramError, match="which cannot travel to another process") as error:
        dumps(value, "transport.collect(value)")
    assert error.value.call == "transport.collect(value)"


def test_classes_of_a_function_are_refused() -> None:
    @attrs.frozen
    class Local:
        size: int

    with pytest.raises(ProgramError, match="cannot travel"):
        dumps(Local(1), "f(x)")


@pytest.mark.parametrize(
    "data",
    [
        b'["object","subprocess:Popen",["args","true"]]',
        b'["object","os:system",["command","true"]]',
        b'["node","subprocess:Popen",null]',
        b'["named","subprocess:Popen","true"]',
        b'["enum","builtins:eval","1"]',
        b'["class","antigravity:Popen"]',
        b'["dtype","load"]',
        b'["eval","1"]',
        b"[]",
        pickle.dumps(print),
    ],
)
def test_what_names_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whichever of json's, of Unicode's and of ours
        loads(data)
