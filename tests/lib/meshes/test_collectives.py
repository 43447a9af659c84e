"""Collectives as data: they print and parse back; and their results by definition, against loops
and against gloo."""

import itertools
import os
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import find, given, strategies as st
from refusal import refused
from torch import Tensor

from weft.effects import parse_effect
from weft.errors import ProgramError
from weft.meshes.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    PPermute,
    ReduceScatter,
    combine,
    impossible,
    reduced,
    with_schema,
)
from weft.transforms.pipelines.transports.launch import launch
from weft.values.schema import Schema, TensorSchema

RANKS = st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True).map(tuple)
SCHEMAS = st.none() | st.builds(
    lambda shape, dtype: Schema((TensorSchema("x", tuple(shape), dtype),)),
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from((torch.float32, torch.bfloat16, torch.int64)),
)
MICROBATCHES, DIMS = st.integers(0, 9), st.integers(-3, 3)
REDUCE = st.sampled_from(("sum", "max", "min"))


@st.composite
def permutations(draw: st.DrawFn) -> PPermute:
    """Some of the ranks send to some of them."""
    ranks = draw(RANKS)
    places = range(len(ranks))
    pairs = zip(draw(st.permutations(places)), draw(st.permutations(places)), strict=True)
    count = draw(st.integers(0, len(ranks)))
    return PPermute(ranks, draw(MICROBATCHES), draw(SCHEMAS), tuple(pairs)[:count])


COLLECTIVES: st.SearchStrategy[Collective] = st.one_of(
    permutations(),
    st.builds(AllReduce, RANKS, MICROBATCHES, SCHEMAS, REDUCE),
    st.builds(AllGather, RANKS, MICROBATCHES, SCHEMAS, DIMS),
    st.builds(ReduceScatter, RANKS, MICROBATCHES, SCHEMAS, REDUCE, DIMS),
    st.builds(AllToAll, RANKS, MICROBATCHES, SCHEMAS, DIMS, DIMS),
)


@given(COLLECTIVES)
def test_a_collective_prints_and_parses_back(effect: Collective) -> None:
    assert parse_effect(str(effect)) == effect


@pytest.mark.parametrize(
    "line",
    [
        "all_reduce among 0, 1 [mb 0]",
        "all_reduce sum dim 0 among 0, 1 [mb 0]",
        "all_gather sum dim 0 among 0, 1 [mb 0]",
        "reduce_scatter dim 0 among 0, 1 [mb 0]",
        "all_to_all dim 0 among 0, 1 [mb 0]",
        "ppermute among 0, 1 [mb 0]",
        "ppermute dim 0 0 to 1 among 0, 1 [mb 0]",
        "all_reduce sum 0 to 1 among 0, 1 [mb 0]",
    ],
)
def test_options_that_a_collective_does_not_have_are_refused(line: str) -> None:
    instead = (
        "all_reduce sum, all_gather dim 0, reduce_scatter sum dim 0, <any>, or ppermute 0 to 1, 1"
        " to 0"
    )
    with refused(
        ProgramError, f"parse_effect({line!r})", "a collective with other options", instead
    ):
        parse_effect(line)


@pytest.mark.slow
def test_every_kind_of_collective_is_drawn() -> None:
    for kind in get_args(Collective):
        assert isinstance(
            find(COLLECTIVES, lambda effect, kind=kind: isinstance(effect, kind)), kind
        )


@pytest.mark.parametrize(
    ("pairs", "mistake"),
    [
        (((0, 2),), "place 2 among 2 ranks"),
        (((-1, 0),), "place -1 among 2 ranks"),
        (((0, 1), (0, 0)), "place 0, which sends twice"),
        (((0, 1), (1, 1)), "place 1, which receives twice"),
    ],
)
def test_a_permutation_that_is_none_is_impossible(
    pairs: tuple[tuple[int, int], ...], mistake: str
) -> None:
    effect = PPermute((4, 5), pairs=pairs)
    instead = "each place at most once as a sender and once as a receiver"
    assert impossible(effect) == (f"'{effect}', with {mistake}", instead)


def brute_force(effect: Collective, inputs: list[Tensor]) -> list[list[list[float]]]:
    """The results, element by element, of matrices on all ranks."""
    count, (rows, columns) = len(inputs), inputs[0].shape
    values = [x.tolist() for x in inputs]

    def reduce(op: str) -> list[list[float]]:
        f = {"sum": sum, "max": max, "min": min}[op]
        return [
            [f(rank_values[i][j] for rank_values in values) for j in range(columns)]
            for i in range(rows)
        ]

    def cut(matrix: list[list[float]], dim: int, part: int) -> list[list[float]]:
        if dim % 2 == 0:
            return matrix[part * (rows // count) : (part + 1) * (rows // count)]
        return [row[part * (columns // count) : (part + 1) * (columns // count)] for row in matrix]

    def join(parts: list[list[list[float]]], dim: int) -> list[list[float]]:
        if dim % 2 == 0:
            return list(itertools.chain(*parts))
        return [list(itertools.chain(*row)) for row in zip(*parts, strict=True)]

    match effect:
        case AllReduce(reduce_op=op):
            return [reduce(op)] * count
        case AllGather(dim=dim):
            return [join(values, dim)] * count
        case ReduceScatter(reduce_op=op, dim=dim):
            return [cut(reduce(op), dim, rank) for rank in range(count)]
        case AllToAll(split_dim=split, concat_dim=concat):
            return [
                join([cut(rank_values, split, rank) for rank_values in values], concat)
                for rank in range(count)
            ]
        case PPermute(pairs=pairs):
            zeros = [[0.0] * columns for _ in range(rows)]
            by_receiver = {to: values[source] for source, to in pairs}
            return [by_receiver.get(rank, zeros) for rank in range(count)]


@given(
    COLLECTIVES.filter(
        lambda e: all(-2 <= getattr(e, n, 0) < 2 for n in ("dim", "split_dim", "concat_dim"))
    )
)
def test_the_results_are_those_of_loops(effect: Collective) -> None:
    count = len(effect.ranks)
    inputs = [
        torch.randint(-9, 9, (2 * count, 3 * count), generator=torch.Generator().manual_seed(i))
        for i in range(count)
    ]
    assert [result.tolist() for result in combine(effect, inputs)] == brute_force(effect, inputs)


@pytest.mark.parametrize("count", range(1, 9))
def test_a_sum_is_a_balanced_tree(count: int) -> None:
    """Equal halves are summed alone, and then their sums: so a rank may sum what other ranks would
    bring."""
    xs = list(torch.randn(count, 1000, generator=torch.Generator().manual_seed(count)))
    halves = 1 << (count - 1).bit_length() >> 1
    expected = reduced(xs[:halves], "sum") + reduced(xs[halves:], "sum") if count > 1 else xs[0]
    assert torch.equal(reduced(xs, "sum"), expected)


def test_sums_of_halves_are_rounded_once() -> None:
    parts = [
        torch.tensor([1.0], dtype=torch.bfloat16),
        *[torch.tensor([2.0**-9], dtype=torch.bfloat16)] * 4,
    ]
    assert reduced(parts, "sum") == torch.tensor([1.0 + 2.0**-7], dtype=torch.bfloat16)
    assert reduced(parts, "sum").dtype == torch.bfloat16


def test_a_schema_is_that_of_the_tensor() -> None:
    effect = with_schema(AllReduce((0, 1)), torch.ones(2, 3))
    assert str(effect) == "all_reduce sum among 0, 1 [mb 0]: x[2, 3] float32"


def on_gloo(path: str, count: int) -> list[bool]:
    """Whether `combine` says what each collective of torch.distributed over gloo gives this rank."""
    rank = int(os.environ["RANK"])
    inputs = [
        torch.randn(2 * count, 3 * count, generator=torch.Generator().manual_seed(i))
        for i in range(count)
    ]
    tensor = inputs[rank]
    ranks = tuple(range(count))
    dist.init_process_group("gloo", rank=rank, world_size=count, store=dist.FileStore(path, count))
    results = []
    for op in ("sum", "max", "min"):
        theirs = tensor.clone()
        dist.all_reduce(theirs, getattr(dist.ReduceOp, op.upper()))
        results.append((AllReduce(ranks, reduce_op=op), theirs))
    gathered = tensor.new_empty(count * len(tensor), tensor.shape[1])
    dist.all_gather_into_tensor(gathered, tensor)
    results.append((AllGather(ranks), gathered))
    scattered = tensor.new_empty(2, tensor.shape[1])
    dist.reduce_scatter_tensor(scattered, tensor)
    results.append((ReduceScatter(ranks), scattered))
    exchanged = torch.empty_like(tensor)
    dist.all_to_all_single(exchanged, tensor)
    results.append((AllToAll(ranks), exchanged))
    dist.destroy_process_group()
    return [
        torch.allclose(combine(effect, inputs)[rank], theirs, atol=1e-5)
        for effect, theirs in results
    ]


@pytest.mark.parametrize("count", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_the_results_are_those_of_torch_distributed(count: int, tmp_path: Path) -> None:
    assert launch(on_gloo, count, str(tmp_path / "store"), count) == [[True] * 6] * count
