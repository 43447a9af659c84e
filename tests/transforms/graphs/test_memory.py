"""Memory: the bytes of graphs are counted, and estimated before the captures."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.batches.descriptor import BatchDescriptor
from weft.errors import CaptureError
from weft.proofs import assert_equal
from weft.proofs.strategies import Rows
from weft.transforms.graphs.backends.cuda import CudaBackend
from weft.transforms.graphs.backends.tape import TapeBackend
from weft.transforms.graphs.graphify import graphify, piecewise
from weft.transforms.graphs.ladder import Ladder
from weft.transforms.graphs.memory import (
    MemoryAnalysis,
    MemoryEstimate,
    interpolate,
    sample_indices,
)
from weft.values.donation import clone
from weft.values.trees import tree_leaves


def test_a_tape_takes_what_its_tensors_take() -> None:
    def f(x: Tensor) -> Tensor:
        y = torch.sin(x)  # 400 bytes
        return y.double()[:50]  # 800, 400 of them returned

    g = graphify(f)
    g(torch.ones(100))
    assert g.memory_analysis() == MemoryAnalysis(
        1, buffer_bytes=400, graph_bytes=1200, output_bytes=400
    )
    assert g.memory_analysis().total_bytes == 1600
    text = "1 graphs, 1.56 KiB: buffers 400 bytes, tensors 1.17 KiB, of which outputs 400 bytes"
    assert str(g.memory_analysis()) == text
    assert g.lower(torch.ones(100)).compile().memory_analysis() == g.memory_analysis()


def test_what_is_by_reference_is_not_counted() -> None:
    g = graphify(lambda params, s, x: (s.add_(1), params + x), donate_argnames="s")
    g(torch.ones(10), torch.ones(1000), torch.ones(10))
    assert g.memory_analysis() == MemoryAnalysis(
        1, buffer_bytes=40, graph_bytes=40, output_bytes=40
    )


def rows(n: int) -> Rows:
    return Rows(BatchDescriptor(n, n), torch.ones(n, 8))


def test_graphs_read_their_inputs_from_the_same_memory() -> None:
    def f(batch: Rows) -> Rows:
        # A row left over from another graph would change them
        return Rows(batch.descriptor, batch.x + batch.x.sum(0))

    g = graphify(f, ladder=[BatchDescriptor(n, n) for n in (8, 4, 2)])
    batches = [
        Rows(BatchDescriptor(n, n), torch.randint(9, (n, 8)).float()) for n in (7, 2, 3, 8, 1, 5)
    ]
    for batch in (*batches, *reversed(batches)):
        assert torch.equal(g(batch).x, f(batch).x)
    assert g.cache_info().currsize == 3
    assert g.memory_analysis().buffer_bytes == 2 * (8 * 8 * 4), (
        "of the largest, and as much padding"
    )


def test_a_buffer_that_must_grow_leaves_those_before_it_alone() -> None:
    g = graphify(lambda x: x * 2)
    inputs = [torch.randn(n) for n in (2, 7, 3, 9)]
    for x in (*inputs, *reversed(inputs)):
        assert torch.equal(g(x), x * 2)
    assert g.memory_analysis().buffer_bytes == 4 * (2 + 7 + 9)


def test_a_buffer_is_counted_as_long_as_a_graph_has_part_of_it() -> None:
    g = graphify(lambda x: x * 2, max_captures=1)
    for n in (100, 1):
        g(torch.ones(n))
        assert g.memory_analysis().buffer_bytes == 400, "of which the second needs 4"


def test_as_strided_sees_its_own_argument_and_not_what_lies_behind() -> None:
    g = graphify(lambda x: x.as_strided((2,), (1,)))
    assert g(torch.arange(9.0)).tolist() == g(torch.arange(2.0)).tolist() == [0, 1]
    with pytest.raises(CaptureError, match="as_strided of x"):
        graphify(lambda x: x.as_strided((2,), (3,)))(torch.arange(4.0)[:3])


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.as_strided_copy(x, (4,), (1,)),
        lambda x: torch.empty(0).set_(x.untyped_storage()) * 2,
        lambda x: torch.empty(0).set_(x.untyped_storage(), 1, (3,), (1,)) * 2,
        lambda x: torch.empty(0).set_(x.untyped_storage(), 0, (3,)) * 2,
    ],
)
def test_nothing_sees_what_a_larger_argument_left_behind_a_smaller_one(
    fn: Callable[[Tensor], Tensor],
) -> None:
    g = graphify(fn)
    x = torch.arange(9.0)
    assert torch.equal(g(x), fn(x))
    with pytest.raises(
        CaptureError, match="of x beyond its elements, which a replay does not have"
    ):
        g(torch.arange(2.0))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.as_strided((2,), (1,), 0),
        lambda x: x[1:].as_strided((2,), (1,), 1),
        lambda x: torch.as_strided_scatter(x, torch.ones(1), (1,), (1,), 3),
    ],
)
def test_an_offset_in_the_storage_of_an_argument_is_refused(fn: Callable[[Tensor], Tensor]) -> None:
    """The next argument may be a view that begins elsewhere."""
    with pytest.raises(
        CaptureError, match="of x by an offset in its storage, which a replay does not have"
    ):
        graphify(fn)(torch.arange(9.0))
    graph = graphify(lambda x: (x * 2).as_strided((2,), (1,), 1))
    assert graph(torch.arange(3.0)).tolist() == graph(torch.arange(9.0)[6:] - 6).tolist() == [2, 4]


TURNED = torch.tensor([1 + 2j, 3 - 4j])


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x * 2).conj(),
        lambda x: (x * 2).conj().imag,
        lambda x: torch.quantize_per_tensor(x.real * 2, 0.5, 0, torch.quint8).int_repr(),
        lambda x: torch.quantize_per_tensor(x.real * 2, 0.5, 0, torch.quint8),
        lambda x: [y := x * 2, y[1:], y[:0], y.expand(3, 2), x, x[1:]],
    ],
    ids=["conjugate", "negative", "integers", "quantized", "views"],
)
@pytest.mark.filterwarnings("ignore:.*quantize")
def test_outputs_whose_memory_is_lent_are_the_same(
    fn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A tape keeps its memory anyway
    monkeypatch.setattr(TapeBackend, "release_output_memory", CudaBackend.release_output_memory)
    g = graphify(fn)
    for x in (TURNED, TURNED + 1):
        assert all(
            torch.equal(a, b) for a, b in zip(tree_leaves(g(x)), tree_leaves(fn(x)), strict=True)
        )


@pytest.mark.one_of(3)
@pytest.mark.parametrize("sizes", [(1,), (4, 2, 1), tuple(range(64, 0, -2))])
@pytest.mark.parametrize("power", [1, 2])
def test_an_estimate_is_near_what_a_ladder_takes(sizes: tuple[int, ...], power: int) -> None:
    def step(
        params: Tensor, state: dict[str, Tensor], batch: Rows
    ) -> tuple[dict[str, Tensor], Rows]:
        square = batch.x @ batch.x.t() if power == 2 else batch.x
        return {"n": state["n"] + 1}, Rows(
            batch.descriptor, square.sum(1, keepdim=True) + batch.x @ params
        )

    classes = tuple(BatchDescriptor(n, n) for n in sizes)
    g = graphify(
        step,
        ladder=Ladder(full=classes, piecewise=classes),
        split_at="aten::mm",
        donate_argnames="state",
    )
    params, state, batch = torch.ones(8, 8), {"n": torch.zeros(3)}, rows(1)
    before = clone((params, state, batch))
    estimate = g.memory_estimate(params, state, batch)
    assert_equal("an estimate leaves no trace", (params, state, batch), before)
    assert g.cache_info().captures == 0
    assert estimate.num_measured <= min(10, 2 * len(sizes))
    g.capture(params, state, batch)
    used = g.memory_analysis()
    assert estimate.num_graphs == used.num_graphs == 2 * len(sizes)
    assert estimate.buffer_bytes == used.buffer_bytes
    assert used.total_bytes <= estimate.total_bytes <= 1.1 * used.total_bytes


def test_an_estimate_without_a_ladder_is_of_one_graph() -> None:
    g = piecewise(lambda x: torch.sort(x * 2).values, split_at="aten::sort")
    estimate = g.memory_estimate(torch.ones(100))
    assert (estimate.num_graphs, estimate.buffer_bytes, estimate.graph_bytes) == (
        1,
        400,
        400 + 400 + 800,
    )
    assert str(estimate) == "1 graphs, 1.95 KiB: estimated from 1 of them"


def test_an_estimate_of_no_classes_is_nothing() -> None:
    g = graphify(lambda r: Rows(r.descriptor, r.x + 1), ladder=Ladder())
    assert g.memory_estimate(rows(2)) == MemoryEstimate(0, 0, 0, 0, 0)
    assert g.capture(rows(2)).captures == 0


def test_which_classes_are_captured_for_an_estimate() -> None:
    for count in range(1, 80):
        places = sample_indices(count)
        assert list(places) == sorted(set(places))
        assert {0, min(1, count - 1), count - 1} <= set(places)
        assert len(places) == min(count, 5)


def test_between_is_on_the_line() -> None:
    points = [(10, 100), (20, 100), (40, 300)]
    assert [interpolate(points, x) for x in (5, 10, 15, 20, 25, 39, 40, 41)] == [
        100,
        100,
        100,
        100,
        150,
        290,
        300,
        300,
    ]
    assert interpolate([(0, 0), (3, 1)], 1) == 1  # rounded up
