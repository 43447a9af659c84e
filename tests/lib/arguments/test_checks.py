"""Rules of arguments: the first value that breaks its rule, in the error that the caller chose."""

from typing import Any

import pytest
import torch

from weft.arguments.checks import COUNT, COUNT_OR_NONE, Rule, check_values
from weft.errors import CostError, RequestError

RULES: dict[str, Rule] = {
    "count": COUNT,
    "most": COUNT_OR_NONE,
    "name": (str | None, "a name, or None"),
    "weight": (lambda x: list(x.shape) == [2], "[2]"),
    "least": (lambda x: x >= 0, "a number >= 0"),
    "of": (lambda x: not isinstance(x, type), "an instance"),
}


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("count", 0, "count=0"),
        ("count", True, "count=True"),
        ("count", None, "count=None"),
        ("most", -1, "most=-1"),
        ("name", 3, "name is an int"),
        ("weight", torch.zeros(3, 1), "weight of shape [3, 1], torch.float32"),
        ("weight", torch.tensor(0.5), "weight=tensor(0.5000)"),
        ("least", "a text", "least='a text'"),
        ("of", RequestError, "of=RequestError, the class"),
        ("count", "x" * 500, f"count={'x' * 500!r:.200}"),
    ],
)
def test_the_value_that_breaks_its_rule_is_named(name: str, value: Any, problem: str) -> None:
    with pytest.raises(RequestError) as error:
        check_values("f(...)", RULES, {"of": None, name: value})
    assert (error.value.call, error.value.problem, error.value.instead) == (
        "f(...)",
        problem,
        RULES[name][1],
    )


def test_the_first_mistake_is_said_and_what_keeps_its_rule_passes() -> None:
    check_values(
        "f(...)", RULES, {"count": 1, "most": None, "name": "a", "weight": torch.ones(2), "of": 3}
    )
    with pytest.raises(CostError, match=r"^\[1\]\n  saw: most=0"):
        check_values([1], RULES, {"count": 1, "most": 0, "name": 5}, CostError)
