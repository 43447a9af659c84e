"""Each field of `SamplingParams` is drawn, and reaches the draw of a token, by the reference and by
the CUDA kernel."""

import functools
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import Phase, given, seed, settings, strategies as st
from interpreting import interpret
from sample_cases import Case, make_case, random_logits
from test_sample_rows_triton import assert_same_draws

from weft.batches.sampling import SamplingParams
from weft.proofs import assert_equal
from weft.proofs._strategies.engine import odd
from weft.proofs._strategies.sampling import ALWAYS, ON_HOST, choices, fields_not_drawn
from weft.values.trees import tree_leaves

VOCAB = 48
REQUESTS = 12
DRAWS = 0
_INTERPRETED = """
import sys, torch
from weft.ops.sampling.sample_rows_triton import draw_rows
(draws,) = torch.load(sys.argv[1])
torch.save([draw_rows(logits, rows, at, *table, mask) for logits, table, rows, at, mask in draws], sys.argv[2])
"""
DRAWN = sorted({*choices(VOCAB), *ALWAYS})
FIELDS = [field.name for field in attrs.fields(SamplingParams)]
# A value of each field of the host that is not its default.
OF_HOST: dict[str, Any] = {
    "bad_words": ["word"],
    "stop": ["end"],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "logprobs": 3,
    "prompt_logprobs": 2,
    "skip_special_tokens": False,
    "detokenize": False,
    "n": 2,
}


def values_of(name: str) -> st.SearchStrategy[Any]:
    """Values of a field that are not its default."""
    strategies: dict[str, st.SearchStrategy[Any]] = {
        "temperature": st.sampled_from((0.3, 2.0)),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "stop_token_ids": st.lists(
            st.integers(0, VOCAB - 1), min_size=1, max_size=VOCAB // 6, unique=True
        ),
    }
    return strategies[name] if name in strategies else choices(VOCAB)[name]


@functools.cache
def requests(name: str) -> tuple[list[SamplingParams], list[SamplingParams]]:
    """Requests that give a drawn value to the field, and the same requests without it."""
    changed: list[SamplingParams] = []
    plain: list[SamplingParams] = []

    @seed(DRAWS)
    @given(values_of(name), st.integers(0, 2**20))  # a seed, since a value is drawn once
    @settings(
        max_examples=REQUESTS,
        database=None,
        phases=[Phase.generate],
        deadline=None,
    )
    def collect(value: Any, noise: int) -> None:
        # So many draws are greedy that a change of the likeliest token shows, and so many are not
        # that a filter does.
        fields: dict[str, Any] = {"temperature": 1.5 if len(changed) % 3 else 0.0, "seed": noise}
        if name in ("temperature", "seed", "top_k", "top_p", "min_p"):
            fields["temperature"] = 1.5
        if name == "min_tokens":
            fields["stop_token_ids"] = [*range(0, VOCAB, 2)]
        if name == "stop_token_ids":
            fields["min_tokens"] = 9
        changed.append(SamplingParams(**fields | {name: value}))
        plain.append(SamplingParams(**fields))

    collect()
    return changed, plain


@functools.cache
def cases(name: str) -> tuple[Case, Case]:
    """The requests with the field and without it, over the first random logits by which two of
    their draws differ."""
    changed, plain = requests(name)
    for trial in range(200):
        logits = random_logits(len(changed), VOCAB, trial, width=0.7)
        both = make_case(changed, logits, 3), make_case(plain, logits, 3)
        if int((both[0].drawn()[0] != both[1].drawn()[0]).sum()) >= 2:
            return both
    raise AssertionError(
        f"{name} changes no draw, so that a kernel which ignores it would not be found"
    )


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the interpreted kernel draws for the cases of each field."""
    field_cases = [cases(name)[0] for name in DRAWN]
    draws = [
        (c.logits, tree_leaves(c.table), c.rows, c.positions, c.token_mask) for c in field_cases
    ]
    drawn = interpret(_INTERPRETED, (draws,), tmp_path_factory.mktemp("fields"))
    return dict(zip(DRAWN, drawn, strict=True))


def test_every_field_is_drawn_or_is_the_host_s() -> None:
    assert fields_not_drawn() == set()
    assert {*ON_HOST} == {*OF_HOST}
    assert {*DRAWN, *ON_HOST} == {*FIELDS}


def test_odd_requests_have_every_field_but_four() -> None:
    not_drawn = {"bad_words", "detokenize", "include_stop_str_in_output", "skip_special_tokens"}
    assert {*FIELDS} - {*odd._FIELDS} == not_drawn


@pytest.mark.parametrize("name", DRAWN)
def test_the_kernel_follows_every_field(name: str, interpreted: dict[str, Any]) -> None:
    """As the reference does. The draws without the field, which a kernel that ignores it would
    make, are others."""
    case, without = cases(name)
    assert_same_draws(case, interpreted[name])
    with pytest.raises(AssertionError):
        assert_same_draws(case, without.drawn())


@pytest.mark.parametrize("name", ON_HOST)
def test_a_field_of_the_host_changes_nothing_of_the_table(name: str) -> None:
    plain = SamplingParams(temperature=1.0, seed=5)
    tables = []
    for params in (plain, attrs.evolve(plain, **{name: OF_HOST[name]})):
        logits = random_logits(1, VOCAB)
        tables.append(make_case([params], logits).table)
    assert_equal("the table", *tables)


@attrs.frozen(kw_only=True, repr=False)
class _WithAnother(SamplingParams):
    """The planted bug of a new parameter that nobody draws."""

    typical_p: float = 1.0


def test_a_new_field_is_found() -> None:
    assert fields_not_drawn(_WithAnother) == {"typical_p"}


IGNORES = """
from weft.ops.sampling import logits
logits.{name} = logits.{other}
"""


@pytest.mark.parametrize(
    ("field", "name", "other"),
    [
        ("presence_penalty", "PRESENCE", "FREQUENCY"),
        ("min_p", "MARGIN", "REPETITION"),
        ("top_k", "TOP_K", "FEATURES"),
    ],
)
def test_a_kernel_that_reads_another_column_is_found(
    field: str, name: str, other: str, tmp_path: Path
) -> None:
    case, _ = cases(field)
    draws = [(case.logits, tree_leaves(case.table), case.rows, case.positions, case.token_mask)]
    planted = IGNORES.format(name=name, other=other) + _INTERPRETED
    drawn = interpret(planted, (draws,), tmp_path)
    with pytest.raises(AssertionError):
        assert_same_draws(case, drawn[0])


def test_rows_have_exactly_the_columns() -> None:
    from weft.batches.sampling_rows import _in_order

    assert _in_order(("a", "b"), {"b": 2, "a": 1}) == [1, 2]
    for values in ({"a": 1}, {"a": 1, "b": 2, "c": 3}):
        with pytest.raises(AssertionError, match="and columns"):
            _in_order(("a", "b"), values)
    assert torch.equal(torch.tensor(_in_order(("a",), {"a": 1.0})), torch.ones(1))
