"""The makers of batches."""

import itertools
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st

from weft.batches.batch import Batch, ResolvedBatch
from weft.batches.descriptor import BatchDescriptor
from weft.batches.outputs import PerRequest, PerToken
from weft.batches.padding import pad
from weft.batches.sampling import SamplingParams
from weft.batches.state import State, admit, resolve
from weft.errors import DescriptorError, ProgramError
from weft.ops.requests import LAST_TOKEN
from weft.values.trees import leaves_with_names, sized_fields

FAST = settings(deadline=None, max_examples=60)
IDS = st.lists(st.lists(st.integers(LAST_TOKEN, 99), min_size=1, max_size=4), max_size=5)


def assert_fits(batch: Batch) -> None:
    """Shapes and dtypes agree with the descriptor and the docstring."""
    n = batch.descriptor.num_reqs
    tokens = batch.descriptor.num_tokens
    leaf_specs = {
        name: (tuple(leaf.shape), leaf.dtype)
        for name, leaf in leaves_with_names(batch)
        if leaf is not None
    }
    assert leaf_specs == {
        ".rows": ((n,), torch.int64),
        ".input_ids": ((tokens,), torch.int64),
        ".query_start_loc": ((n + 1,), torch.int32),
        ".samples": ((n,), torch.bool),
    }


@FAST
@given(st.lists(st.integers(0, 99), max_size=6, unique=True))
def test_decode_is_one_token_of_each_row(rows: list[int]) -> None:
    batch = Batch.decode(rows)
    assert_fits(batch)
    assert batch.descriptor == BatchDescriptor.uniform(len(rows))
    assert batch.rows.tolist() == rows
    assert batch.input_ids.tolist() == [LAST_TOKEN] * len(rows)
    assert batch.query_start_loc.tolist() == list(range(len(rows) + 1))
    assert batch.samples.all()


@FAST
@given(IDS)
def test_ragged_keeps_each_requests_tokens_apart(ids: list[list[int]]) -> None:
    rows = list(range(len(ids)))[::-1]
    batch = Batch.ragged(rows, ids)
    assert_fits(batch)
    assert batch.descriptor == BatchDescriptor(sum(map(len, ids)), len(ids))
    starts = batch.query_start_loc.tolist()
    assert [batch.input_ids[a:b].tolist() for a, b in itertools.pairwise(starts)] == ids
    assert batch.samples.tolist() == [True] * len(ids)


def test_one_token_prefills_are_ragged_whatever_their_shape() -> None:
    assert Batch.ragged([0, 1], [[4], [5]]).descriptor.is_uniform is False
    assert Batch.ragged([0, 1], [[LAST_TOKEN]] * 2).descriptor != Batch.decode([0, 1]).descriptor


def test_samples_as_given() -> None:
    assert Batch.ragged([3, 1], [[4], [5, 6]], samples=[False, True]).samples.tolist() == [
        False,
        True,
    ]


def test_makers_take_any_sequences() -> None:
    batch = Batch.ragged(range(2), ((1, 2), range(3)), samples=(True, False))
    assert batch.input_ids.tolist() == [1, 2, 0, 1, 2]
    assert Batch.decode(range(3)).rows.tolist() == [0, 1, 2]


ERRORS = [
    (
        ([0, 1], [[1]], None),
        "rows=[0, 1], token_ids=<1 of lengths [1]>",
        "2 rows, 1 token lists, 2 samples",
        "one token list and one sample flag for each row",
    ),
    (
        ([0], [[1]], [True, False]),
        "rows=[0], token_ids=<1 of lengths [1]>",
        "1 rows, 1 token lists, 2 samples",
        "one token list and one sample flag for each row",
    ),
    (
        ([4, 7], [[1, 2], []], None),
        "rows=[4, 7], token_ids=<2 of lengths [2, 0]>",
        "request 1 has no token",
        "leave such a request out of the batch",
    ),
    (
        ([4, 4], [[1, 2], [3]], None),
        "rows=[4, 4], token_ids=<2 of lengths [2, 1]>",
        "row 4 is listed twice",
        "join the request's tokens in one list",
    ),
]


@pytest.mark.parametrize(("args", "call", "problem", "instead"), ERRORS)
def test_what_ragged_refuses(
    args: tuple[list[int], list[list[int]], list[bool] | None],
    call: str,
    problem: str,
    instead: str,
) -> None:
    with pytest.raises(DescriptorError) as error:
        Batch.ragged(args[0], args[1], samples=args[2])
    assert str(error.value) == f"Batch.ragged({call})\n  saw: {problem}\n  instead: {instead}"


def test_decode_refuses_a_row_that_stands_twice_as_ragged_does() -> None:
    with pytest.raises(DescriptorError, match="row 3 is listed twice"):
        Batch.decode([3, 3])


@pytest.mark.parametrize("rows", [[-1], [0, -2]])
def test_makers_refuse_rows_that_are_padding_or_nobodys(rows: list[int]) -> None:
    with pytest.raises(DescriptorError, match=str(min(rows))):
        Batch.decode(rows)
    with pytest.raises(DescriptorError, match=str(min(rows))):
        Batch.ragged(rows, [[1]] * len(rows))


def test_every_tensor_of_a_batch_says_how_it_is_padded() -> None:
    # Which are `PerToken`s
    fields = {f.name for f in attrs.fields(Batch)} - {
        "descriptor",
        "token_extras",
    }
    assert set(sized_fields(Batch.decode([0]))) == fields
    batch = attrs.evolve(
        Batch.ragged([0], [[5, 6]]), token_extras={"patch": PerToken(torch.ones(2, 3))}
    )
    padded = pad(batch, BatchDescriptor(4, 2))
    assert padded.token_extras["patch"].values.tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 2


def test_batches_are_compared_by_identity() -> None:
    batch = Batch.decode([0])
    assert batch == batch
    assert batch != Batch.decode([0])
    assert hash(batch)


def resolved() -> ResolvedBatch:
    """Two requests, of one token and of two."""
    state = State.zeros(
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        max_num_reqs=2,
        num_pages=4,
        max_pages=2,
        page_size=4,
        vocab_size=9,
    )
    state = admit(state, [0, 1], [[0], [1]], [SamplingParams(temperature=0.0)] * 2, [[1], [2, 3]])
    return resolve(state, Batch.ragged([0, 1], [[1], [2, 3]]))


ONES, SUMS = torch.ones(2), torch.tensor([1.0, 2.0, 3.0])
MISUSED: list[tuple[Callable[[ResolvedBatch], Any], str]] = [
    (
        lambda batch: batch.per_token(SUMS),
        r"values is \[3\], torch.float32[\s\S]*a tensor \[2, \.\.\.\]",
    ),
    (lambda batch: batch.per_token(PerRequest(SUMS)), r"values is \[3\], torch.float32"),
    (
        lambda batch: batch.scan_tokens(torch.add, torch.zeros(()), SUMS),
        r"init is \[\], torch.float32",
    ),
    (
        lambda batch: batch.scan_tokens(torch.add, ONES, SUMS, ONES),
        r"xs\[1\] is \[2\][\s\S]*a tensor \[3, \.\.\.\]",
    ),
    (
        lambda batch: batch.scan_tokens(lambda value, x: value[:, None], ONES, SUMS),
        r"f returned \[2, 1\]",
    ),
    (
        lambda batch: batch.scan_tokens(lambda value, x: value.double(), ONES, SUMS),
        r"f returned \[2\], torch.float64",
    ),
    (
        lambda batch: batch.scan_tokens(lambda value, x: (value, x), ONES, SUMS),
        "f returned a tuple",
    ),
]


@pytest.mark.parametrize(("use", "text"), MISUSED)
def test_values_of_another_shape_are_named(use: Callable[[ResolvedBatch], Any], text: str) -> None:
    with pytest.raises(ProgramError, match=text) as error:
        use(resolved())
    assert "instead" in str(error.value)


def test_values_of_requests_become_those_of_their_tokens() -> None:
    batch = resolved()
    values = torch.tensor([5.0, 7.0])
    assert (
        batch.per_token(PerRequest(values)).tolist()
        == batch.per_token(values).tolist()
        == [5, 7, 7]
    )
    assert batch.scan_tokens(torch.add, PerRequest(values), SUMS).tolist() == [6, 9, 12]


def test_values_of_requests_are_a_tree_for_transforms() -> None:
    batch, values = resolved(), torch.tensor([[5.0, 7.0], [1.0, 2.0]])
    result = torch.func.vmap(batch.per_token)(PerRequest(values))
    assert result.tolist() == [[5, 7, 7], [1, 2, 2]]
    gradient = torch.func.grad(lambda per_request: batch.per_token(per_request).sum())(
        PerRequest(values[0])
    )
    assert gradient.values.tolist() == [1, 2]


def test_ragged_takes_inputs_of_tokens() -> None:
    extras = {"patch": torch.ones(3, 2), "other": PerToken(torch.zeros(3))}
    batch = Batch.ragged([0, 4], [[1], [2, 3]], token_extras=extras)
    assert torch.equal(batch.token_extras["patch"].values, torch.ones(3, 2))
    assert torch.equal(batch.token_extras["other"].values, torch.zeros(3))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (torch.ones(2, 3), r"token_extras\['patch'\] is \[2, 3\], torch.float32"),
        (PerToken(torch.ones(4)), r"token_extras\['patch'\] is \[4\]"),
        (torch.ones(()), r"token_extras\['patch'\] is \[\]"),
        ([1.0, 2.0, 3.0], r"token_extras\['patch'\] is a list"),
    ],
)
def test_ragged_refuses_inputs_of_other_tokens(value: Any, problem: str) -> None:
    with pytest.raises(
        DescriptorError, match=rf"{problem}.*\n.*for each of the 3 tokens, \[num_tokens, ...\]"
    ):
        Batch.ragged([0, 4], [[1], [2, 3]], token_extras={"patch": value})


def test_inputs_of_tokens_are_given_as_tensors() -> None:
    batch = Batch.ragged(rows=[0], token_ids=[[1, 2, 3]])
    evolved = attrs.evolve(
        batch, token_extras={"patch": torch.ones(3, 2), "other": PerToken(torch.zeros(3))}
    )
    assert {name: type(value) for name, value in evolved.token_extras.items()} == {
        "patch": PerToken,
        "other": PerToken,
    }
    assert torch.equal(evolved.token_extras["patch"].values, torch.ones(3, 2))
