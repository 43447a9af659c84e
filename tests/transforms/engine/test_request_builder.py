"""Invalid arguments of an engine: an error names the argument, and nothing else changes."""

import math
from typing import Any, cast

import numpy as np
import pytest

import weft
from weft.batches.sampling import SamplingParams
from weft.errors import RequestError
from weft.proofs._strategies.engine.engines import small_adapters, small_model
from weft.transforms.engine.engine import Engine, num_unfinished
from weft.transforms.engine.options import EngineLimits

REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "a priority that cannot be compared": ({"priority": "high"}, "priority='high'"),
    "a priority that is no number": ({"priority": float("nan")}, "priority=nan"),
    "a list as id": ({"id": ["a"]}, "id=['a']"),
    "a number as id": ({"id": 5}, "id=5"),
    "no id": ({"id": ""}, "id=''"),
    "a dict of parameters": ({"sampling": {"temperature": 1}}, "sampling is a dict"),
    "an array of parameters": ({"sampling": np.zeros(2)}, "sampling is a ndarray"),
    "a list of adapters": ({"adapter": ["a"]}, "adapter=['a']"),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_a_request_that_is_none_is_refused_and_leaves_nothing(case: str) -> None:
    changes, problem = REQUESTS[case]
    engine = Engine(small_model(), graph="none")
    engine.add([1, 2], max_tokens=2, id="good")
    with pytest.raises(RequestError) as error:
        engine.add(**{"prompt": [1], "max_tokens": 2, "id": "other", **changes})
    assert error.value.problem == problem
    assert engine.add([3], max_tokens=1, id="other") == "other", "its name is still free"
    assert {output.id for output in engine} == {"good", "other"}


def test_parameters_like_the_last_ones_are_looked_at_as_if_they_were_the_first() -> None:
    """Equal parameters are checked once, and a dict, which may have changed, each time."""
    engine = Engine(small_model(), graph="none", num_logprobs=1)
    biased = SamplingParams(temperature=0.0, logit_bias={3: 1.0})
    for sampling in (
        biased,
        SamplingParams(temperature=0.0, logprobs=1),
        SamplingParams(temperature=0.0, logprobs=1),
    ):
        engine.add([1], sampling, max_tokens=2)
    for wrong in (
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.0, stop_token_ids=[99]),
    ):
        with pytest.raises(RequestError, match="SamplingParams"):
            engine.add([1], wrong, max_tokens=2)
    engine.add([1], biased, max_tokens=2)
    assert num_unfinished(engine) == 4
    for token, bias in ((99, 1.0), (5, math.nan), (-1, 1.0), (True, 1.0)):
        changed: Any = SamplingParams(temperature=0.0, logit_bias={3: 1.0})
        changed.logit_bias[token] = bias
        with pytest.raises(RequestError, match=rf"SamplingParams\(.*logit_bias=.*{token}: "):
            engine.add([1], changed, max_tokens=2)
    array: Any = np.zeros(2)
    with pytest.raises(RequestError, match="sampling is a ndarray"):
        engine.add([1], array, max_tokens=2)


def test_what_a_user_does_to_parameters_later_changes_no_request() -> None:
    said = []
    for later in ({}, {4: 1000.0}):
        engine = Engine(small_model(), graph="none")
        parameters = cast("Any", SamplingParams(temperature=0.0))
        for _ in range(2):
            engine.add([1], parameters, max_tokens=3)
        parameters.logit_bias.update(later)
        said.append([output.token_ids for output in engine])
    assert said[0] == said[1]


def test_an_id_that_is_made_is_one_that_nobody_has() -> None:
    engine = Engine(small_model(), graph="none")
    assert engine.add([1], max_tokens=2, id="request 1") == "request 1"
    assert [engine.add([1], max_tokens=2) for _ in range(2)] == ["request 2", "request 3"]


def test_an_abort_of_what_is_no_id_is_refused() -> None:
    with pytest.raises(RequestError, match="no request of that id"):
        Engine(small_model(), graph="none").abort(["a"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_size", 0),
        ("num_pages", 0),
        ("num_pages", -3),
        ("max_model_len", 0),
        ("max_num_reqs", 2.5),
        ("max_num_tokens", "9"),
        ("num_cohorts", True),
        ("mixed", 1),
        ("max_num_reqs", None),
    ],
)
def test_limits_that_are_none_are_refused(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as error:
        EngineLimits(**{field: value})
    assert error.value.problem == f"{field}={value!r}"
    assert str(error.value).startswith(f"weft.EngineLimits({field}={value!r})")


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("limits", 4, "limits is an int"),
        ("num_logprobs", 13, "num_logprobs=13"),
        ("num_logprobs", -2, "num_logprobs=-2"),
        ("num_logprobs", 1.5, "num_logprobs=1.5"),
        ("prefix_caching", None, "prefix_caching=None"),
        ("run_ahead", True, "run_ahead=True"),
        ("run_ahead", 0.0, "run_ahead=0.0"),
        ("speculation", 3, "speculation is an int"),
        ("adapters", {"a": 3}, "adapters={'a': 3}"),
        (
            "adapters",
            {1: small_adapters()["of all"]},
            "adapters={1: <Adapter 'random 1', 21 layers, rank 2>}",
        ),
    ],
)
def test_options_that_are_none_are_refused(option: str, value: Any, problem: str) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(RequestError) as error:
        weft.Engine(small_model(), graph="none", **options)
    assert error.value.problem == problem
