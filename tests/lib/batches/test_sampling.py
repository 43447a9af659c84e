"""`SamplingParams`: its refusals and their errors, a request's parameters, and their row in a
table."""

import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st

from weft.batches.sampling import SamplingParams, check_tokens, for_request
from weft.batches.sampling_rows import features, write_rows
from weft.errors import RequestError
from weft.ops.sampling.logits import (
    ALLOWED,
    BIAS,
    FEATURES,
    FILTERS,
    MARGIN,
    MIN_LEN,
    PENALTIES,
    SEED,
    STOPS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    unpack_bits,
)
from weft.ops.sampling.table import SamplingTable
from weft.proofs import assert_equal
from weft.proofs.strategies import sampling_params
from weft.values.donation import clone

FAST = settings(deadline=None, max_examples=60)
VOCAB = 40


def test_the_defaults_are_vllms_but_for_temperature_and_use_nothing() -> None:
    params = SamplingParams()
    assert attrs.asdict(params) == {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "allowed_token_ids": None,
        "bad_token_ids": (),
        "bad_words": (),
        "min_tokens": 0,
        "stop_token_ids": (),
        "stop": (),
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "seed": None,
        "logprobs": None,
        "prompt_logprobs": None,
        "skip_special_tokens": True,
        "detokenize": True,
        "n": 1,
    }
    assert features(params) == 0
    assert repr(params) == "SamplingParams()"
    assert params == SamplingParams(temperature=0)
    assert repr(SamplingParams(temperature=1.0)) == "SamplingParams(temperature=1.0)"


@pytest.mark.parametrize(
    "options", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"n": 2}, {"seed": 42}]
)
def test_what_only_matters_to_a_draw_needs_a_temperature(options: dict[str, Any]) -> None:
    """To pass `top_p` alone neither makes a greedy request draw, nor does it nothing."""
    [(name, value)] = options.items()
    with pytest.raises(RequestError) as error:
        SamplingParams(**options)
    assert (
        error.value.problem
        == f"{name}={value}, which changes nothing of a greedy request, and no temperature"
    )
    assert error.value.instead.startswith(
        "temperature=1.0, or another at which to draw; temperature=0 to be greedy"
    )
    for temperature in (0, 0.5):
        params = SamplingParams(**options, temperature=temperature)
        assert attrs.evolve(params, min_tokens=1) == SamplingParams(
            **options, temperature=temperature, min_tokens=1
        )
        assert "seed" in options or eval(repr(params)) == params


def test_all_tokens_by_minus_1() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams()
    assert SamplingParams(logprobs=-1, prompt_logprobs=-1).logprobs == -1


def test_stop_texts_need_text() -> None:
    with pytest.raises(
        RequestError, match="saw: stop texts, and detokenize=False\n  instead: stop_token_ids="
    ):
        SamplingParams(stop="a", detokenize=False)


REFUSED: dict[str, Any] = {
    "temperature": (-0.1, math.inf, math.nan, "1", True, 1e39),
    "top_k": (-2, -1.0, 1.5, True, None),
    "top_p": (0, 0.0, 1.5, -1, math.nan, "x"),
    "min_p": (-0.1, 1.1, math.nan, None),
    "repetition_penalty": (0, -1.0, math.inf, 1e-46, math.nan),
    "presence_penalty": (2.5, -3, math.nan, "a"),
    "frequency_penalty": (2.5, -3, math.nan, None),
    "logit_bias": ({-1: 1.0}, {1: 2e30}, {1: math.inf}, {"a": 1.0}, {1: None}, [1, 2], 5),
    "allowed_token_ids": ((), (-1,), ("a",), 5, (1.0,), "ab"),
    "bad_token_ids": ((-1,), 5, (None,), (True,)),
    "min_tokens": (-1, 1.0, None),
    "stop_token_ids": ((-2,), 7, "ab"),
    **dict.fromkeys(("stop", "bad_words"), ("", ("a", ""), 5, (1,), "\ud800")),
    **dict.fromkeys(
        ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"),
        (1, None, "yes"),
    ),
    "seed": (1.0, "1", 2**63, -(2**63) - 1, True),
    "logprobs": (-2, 1.0, True),
    "prompt_logprobs": (-2, 1.0),
    "n": (0, -1, 1.0, None, True, 10_001),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values]
)
def test_what_no_request_could_have_is_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    assert error.value.call.startswith(f"SamplingParams({name}=")
    assert error.value.problem.startswith(f"{name}=")
    assert error.value.instead


@pytest.mark.parametrize("penalty", [1e30, 1e-30])
def test_a_bias_that_its_penalty_makes_infinite_is_refused(penalty: float) -> None:
    with pytest.raises(
        RequestError, match="whose product float32 does not hold\n  instead: a smaller bias"
    ):
        SamplingParams(logit_bias={1: -1e30}, repetition_penalty=penalty)
    SamplingParams(logit_bias={1: -1e30}, repetition_penalty=1.5)


def test_every_field_is_checked() -> None:
    assert REFUSED.keys() == {field.name for field in attrs.fields(SamplingParams)}


def test_the_text_of_a_refusal() -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(temperature=0.5, top_p=1.5)
    assert (
        str(error.value)
        == "SamplingParams(temperature=0.5, top_p=1.5)\n  saw: top_p=1.5\n  instead: a number > 0"
        " and <= 1; 1 keeps all"
    )


def test_allowed_and_bad_must_leave_a_token() -> None:
    with pytest.raises(
        RequestError,
        match="saw: all allowed tokens barred\n  instead: allow one that is not in bad_",
    ):
        SamplingParams(allowed_token_ids=[1, 2], bad_token_ids=[2, 1, 5])
    SamplingParams(allowed_token_ids=[1, 2], bad_token_ids=[2, 5])
    with pytest.raises(RequestError, match="saw: all 3 tokens barred"):
        check_tokens(SamplingParams(bad_token_ids=[0, 1], stop_token_ids=[2], min_tokens=1), 3, 9)
    with pytest.raises(
        RequestError, match=r"saw: all allowed tokens barred(.|\n)*min_tokens bars those that end"
    ):
        for_request(SamplingParams(allowed_token_ids=[7], min_tokens=2), [7], 0)
    for_request(SamplingParams(allowed_token_ids=[7]), [7], 0)


@pytest.mark.parametrize(
    "name", ["logit_bias", "allowed_token_ids", "bad_token_ids", "stop_token_ids"]
)
def test_tokens_that_a_model_does_not_have_are_refused(name: str) -> None:
    params = SamplingParams(**{name: {5: 1.0} if name == "logit_bias" else [5]})
    check_tokens(params, 6, 1)
    with pytest.raises(
        RequestError,
        match=rf"saw: {name} holds 5\n  instead: token ids of this model go from 0 to 4",
    ):
        check_tokens(params, 5, 1)


def test_more_biases_than_a_table_holds_are_refused() -> None:
    with pytest.raises(
        RequestError,
        match=r"2 tokens in logit_bias; .*\n  instead: State.zeros\(..., max_biased=2\)",
    ):
        check_tokens(SamplingParams(logit_bias={0: 1, 1: 1}), 9, 1)


def test_for_request_fills_in_what_ends_it_and_the_seed() -> None:
    params = for_request(SamplingParams(stop_token_ids=[3, 4]), [4, 9], 17)
    assert (params.stop_token_ids, params.seed) == ((3, 4, 9), 17)
    seeded = SamplingParams(temperature=1.0, seed=5, ignore_eos=True)
    assert for_request(seeded, [4], 17) == seeded


def test_collections_are_taken_as_they_come() -> None:
    params = SamplingParams(
        stop="end", stop_token_ids={3}, allowed_token_ids=range(2), logit_bias=None
    )
    assert (params.stop, params.stop_token_ids, params.allowed_token_ids) == (
        ("end",),
        (3,),
        (0, 1),
    )
    assert params.logit_bias == {}


FEATURES_OF = {
    PENALTIES: (
        {"repetition_penalty": 1.1},
        {"frequency_penalty": -0.1},
        {"presence_penalty": 0.1},
    ),
    BIAS: ({"logit_bias": {1: 0.0}},),
    ALLOWED: ({"allowed_token_ids": [1]}, {"bad_token_ids": [1]}),
    STOPS: ({"min_tokens": 1, "stop_token_ids": [1]},),
    FILTERS: ({"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.1}),
    0: (
        {"min_tokens": 1},
        {"top_k": 3, "top_p": 0.1, "min_p": 0.5, "temperature": 0.0},
        {"stop_token_ids": [1]},
    ),
}


@pytest.mark.parametrize(
    ("bit", "changes"), [(bit, c) for bit, group in FEATURES_OF.items() for c in group]
)
def test_features_are_what_a_request_uses(bit: int, changes: dict[str, Any]) -> None:
    assert features(SamplingParams(**{"temperature": 1.0} | changes)) == bit


@FAST
@given(st.lists(sampling_params(VOCAB), min_size=1, max_size=4), st.integers(1, 9))
def test_rows_hold_what_was_written_and_others_are_left(
    params: list[SamplingParams], length: int
) -> None:
    table = SamplingTable.zeros(len(params) + 2, VOCAB, 4, "cpu")
    before = clone(table)
    rows = list(range(len(params), 0, -1))
    write_rows(table, rows, params, [[1] * length] * len(params), [[]] * len(params))
    for row, each in zip(rows, params, strict=True):
        floats = table.floats[row].double()
        ints = table.ints[row].tolist()
        assert floats[TEMPERATURE].item() == pytest.approx(each.temperature)
        assert floats[TOP_P].item() == pytest.approx(each.top_p)
        assert math.exp(-floats[MARGIN]) == pytest.approx(each.min_p)
        assert (ints[SEED], ints[TOP_K], ints[MIN_LEN]) == (
            each.seed,
            each.top_k,
            length + each.min_tokens,
        )
        if ints[FEATURES] & ALLOWED:
            allowed = unpack_bits(table.allowed[row : row + 1], VOCAB)[0].nonzero()[:, 0].tolist()
            every = range(VOCAB) if each.allowed_token_ids is None else each.allowed_token_ids
            assert allowed == sorted(set(every) - set(each.bad_token_ids))
    for row in (0, len(params) + 1):
        for field in attrs.fields(SamplingTable):
            assert torch.equal(getattr(table, field.name)[row], getattr(before, field.name)[row])


def test_a_stage_that_does_not_sample_holds_numbers_alone() -> None:
    table = SamplingTable.zeros(2, 0, 4, "cpu")
    params = SamplingParams(
        temperature=1.0, seed=1, logit_bias={3: 1.0}, bad_token_ids=[1], presence_penalty=1.0
    )
    write_rows(table, [0], [params], [[1000]], [[]])
    assert table.ints[0, SEED] == 1
    assert table.floats[0, TEMPERATURE] == 1


def test_the_margin_of_min_p_1_is_positive_zero() -> None:
    """Kernels order the bits of distances, and those of -0.0 are not those of 0.0."""
    table = SamplingTable.zeros(2, 0, 4, "cpu")
    write_rows(table, [0], [SamplingParams(temperature=1.0, seed=1, min_p=1.0)], [[1]], [[]])
    assert table.floats[0, MARGIN].view(torch.int32).item() == 0


@pytest.mark.parametrize(("prompt", "said"), [([VOCAB], []), ([1], [VOCAB]), ([-1], [])])
def test_tokens_of_a_prompt_that_a_model_does_not_have_are_refused(
    prompt: list[int], said: list[int]
) -> None:
    table = SamplingTable.zeros(2, VOCAB, 4, "cpu")
    before = clone(table)
    with pytest.raises(RequestError, match="in a prompt\n  instead: token ids from 0 to 39"):
        write_rows(table, [0], [SamplingParams(temperature=1.0, seed=1)], [prompt], [said])
    assert_equal("nothing is written", table, before)


def test_a_request_that_draws_needs_a_seed() -> None:
    with pytest.raises(
        RequestError, match=r"without a seed\n  instead: SamplingParams\(temperature=..., seed=17\)"
    ):
        write_rows(
            SamplingTable.zeros(2, VOCAB, 4, "cpu"),
            [0],
            [SamplingParams(temperature=1.0)],
            [[1]],
            [[]],
        )
