"""JSON from others, and numbers that JSON cannot express."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from weft.arguments.json_text import parse_json, write_json

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=12,
)


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@given(values)
def test_what_is_written_is_json_and_is_read_back(value: Any) -> None:
    def no_constant(name: str) -> None:
        pytest.fail(name)

    assert json.loads(write_json(value), parse_constant=no_constant) == finite(value)
    assert parse_json(write_json(value)) == finite(value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000 + "]" * 100_000, "it is nested too deeply"),
        ("[" * 200 + "]" * 200, "it is nested too deeply"),
        ('{"a":' * 100_000, "it is nested too deeply"),
        ('{"a": {"b": 1, "b": 2}}', "an object gives 'b' two values"),
        ("9" * 5000, "Exceeds the limit"),
        ("{", "Expecting property name"),
    ],
)
def test_what_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_json(text)


def test_a_number_that_is_none_is_said_once() -> None:
    assert math.isnan(parse_json('{"a": NaN}')["a"])


def test_a_field_may_be_said_twice_if_it_says_the_same() -> None:
    assert parse_json('{"a": [1], "a": [1]}') == {"a": [1]}
