"""graphify with a ladder: its requirements, padding, cuts and captures."""

import attrs
import pytest
import torch
from graphified import LAW, X, counts
from torch import Tensor

from weft.batches.batch import Batch
from weft.batches.descriptor import BatchDescriptor
from weft.batches.outputs import Output
from weft.errors import CacheMissError, CaptureError
from weft.proofs import assert_equal
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.ladder import Limits, make_ladder
from weft.values.trees import axes, pytree

LADDER = make_ladder("full", Limits(max_num_reqs=4, max_num_tokens=8))


def test_explain_with_a_ladder() -> None:
    g = graphify(lambda b: b, ladder=[BatchDescriptor.uniform(4)])
    three = Batch.decode([0, 1, 2])
    under = (
        "'uniform x1, 3 reqs' runs under 'uniform x1, 4 reqs', the least of the ladder that"
        " covers it"
    )
    assert str(g.explain(three)) == f"captures: {under}; nothing is captured yet"
    g(three)
    assert str(g.explain(three)) == f"replays: {under}"
    assert (
        str(g.explain(Batch.decode(range(5))))
        == "runs eagerly: no captured class covers 'uniform x1, 5 reqs'"
    )
    other = attrs.evolve(three, samples=three.samples.int())
    assert str(g.freeze().explain(other)).endswith(
        "; b.samples: dtype torch.int32, captured torch.bool"
    )


def test_capture_captures_the_ladder_once() -> None:
    g = graphify(lambda b: Output(b.rows * 2, b.rows * 1.0), ladder=LADDER)
    assert g.capture(Batch.decode([0])).captures == len(LADDER)
    g.freeze()
    for batch in (Batch.decode([2, 1, 0]), Batch.ragged([3, 1], [[1, 2], [3]])):
        assert_equal(LAW, g(batch), Output(batch.rows * 2, batch.rows * 1.0))
    assert g.capture(Batch.decode([1])).captures == len(LADDER)


@pytest.mark.parametrize("method", ["__call__", "explain", "capture"])
def test_a_ladder_without_a_batch_is_refused(method: str) -> None:
    g = graphify(lambda x, params: Output(x, x), ladder=LADDER)
    with pytest.raises(CaptureError) as error:
        getattr(g, method)(X, X)
    assert error.value.call == "graphify(<lambda>, ladder=...)(x)"
    assert error.value.problem == "a ladder, but no argument that holds a descriptor"


def test_a_result_that_is_not_sized_is_refused_by_its_path() -> None:
    g = graphify(lambda b: {"ok": b, "bad": [b.rows * 2]}, ladder=LADDER)
    with pytest.raises(CaptureError) as error:
        g(Batch.decode([0, 1]))
    assert error.value.problem.startswith(
        "the result's leaf ['bad'][0] of shape (2,) does not declare which"
    )
    assert "weft.axes('num_reqs')" in error.value.instead
    assert g.cache_info().currsize == 0
    assert g(Batch.decode(range(9)))["bad"][0].shape == (9,)  # an eager call has nothing to unpad


def test_a_result_of_another_size_than_its_class_says_is_not_cut() -> None:
    """A field per request with one entry per token: its shape is [3] eagerly, so a graph must not
    return [1]."""
    g = graphify(
        lambda b: Output(b.input_ids * 2, b.input_ids * 1.0), ladder=[BatchDescriptor(8, 4)]
    )
    with pytest.raises(CaptureError, match="token_ids"):
        g(Batch.ragged([0], [[1, 2, 3]]))


@pytest.mark.parametrize("second", [Batch.ragged([0], [[1]]), Batch.decode([0, 1, 2])])
def test_two_batches_of_different_classes_are_refused(second: Batch) -> None:
    """Only one of them is surely padded to a rung that covers it; the other would run under the
    first one's class."""
    with pytest.raises((CaptureError, ValueError), match="descriptor"):
        graphify(lambda a, b: (a, b), ladder=LADDER)(Batch.decode([0, 1]), second)


def test_two_batches_of_one_class_are_padded_together() -> None:
    g = graphify(
        lambda a, b: Output(a.rows + b.rows, b.rows * 1.0), ladder=[BatchDescriptor.uniform(4)]
    )
    assert g(Batch.decode([0, 1]), Batch.decode([5, 6])).token_ids.tolist() == [5, 7]
    assert counts(g) == (1, 1, 0)


def test_no_token_of_an_earlier_batch_is_left_in_a_padded_one() -> None:
    @pytree
    @attrs.frozen(eq=False)
    class Seen:
        tail: Tensor = attrs.field(metadata=axes("num_reqs"))

    g = graphify(lambda b: Seen(b.input_ids.sum() + 0 * b.rows), ladder=[BatchDescriptor(8, 4)])
    assert g(Batch.ragged([0, 1, 2], [[5], [6, 7], [8]])).tail.tolist() == [26] * 3
    assert g(Batch.ragged([0], [[1, 1]])).tail.tolist() == [2]


def test_an_empty_batch_runs_under_a_rung() -> None:
    g = graphify(lambda b: Output(b.rows, b.rows * 1.0), ladder=[BatchDescriptor.uniform(4)])
    assert g(Batch.decode([])).token_ids.shape == (0,)


def test_frozen_a_class_outside_the_ladder_still_runs_eagerly() -> None:
    g = graphify(
        lambda b: Output(b.rows, b.rows * 1.0), ladder=[BatchDescriptor.uniform(2)]
    ).freeze()
    assert g(Batch.decode(range(5))).token_ids.shape == (5,)
    with pytest.raises(CacheMissError, match="nothing is captured yet"):
        g(Batch.decode([0]))


def test_an_error_of_the_functions_own_says_what_is_padded() -> None:
    g = graphify(lambda b, y: Output(b.rows, b.rows + y), ladder=[BatchDescriptor.uniform(4)])
    with pytest.raises(RuntimeError, match="must match the size") as error:
        g(Batch.decode([0, 1, 2]), torch.ones(3))
    assert error.value.__notes__ == [
        "in <lambda>, captured for 'uniform x1, 4 reqs': only fields with weft.axes(...) are padded"
        " to it"
    ]


# Padding
# -------------------------------------------------------------------------------------------------------------


@pytree
@attrs.frozen(eq=False)
class Sized:
    descriptor: BatchDescriptor = attrs.field(
        metadata={"weft.static": True, "weft.descriptor": True}
    )
    ids: Tensor = attrs.field(metadata=axes("num_tokens", pad=-1))
    starts: Tensor = attrs.field(metadata=axes("num_reqs+1", pad="last"))
    table: Tensor = attrs.field(metadata=axes("num_reqs", "num_tokens", pad=7))
    wide: Tensor = attrs.field(metadata=axes(None, "num_tokens", pad=2.5))


def sized(tokens: int, reqs: int, seed: int) -> Sized:
    torch.manual_seed(seed)
    shapes: list[tuple[int, ...]] = [(tokens,), (reqs + 1,), (reqs, tokens), (3, tokens)]
    kinds = (torch.int64, torch.int32, torch.int64, torch.float32)
    values = [
        torch.randint(10, 99, shape).to(kind) for shape, kind in zip(shapes, kinds, strict=True)
    ]
    return Sized(BatchDescriptor(tokens, reqs), *values)


@pytest.mark.parametrize("blank_bytes", [2**20, -1])
def test_nothing_of_an_earlier_batch_is_left_in_a_buffer(
    blank_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each whole padded buffer, as the graph reads it, equals the padded batch, in any order of
    sizes."""
    from weft.batches.padding import pad

    monkeypatch.setattr("weft.transforms.graphs.calls.buffers.PADDING_SOURCE_BYTES", blank_bytes)
    rung = BatchDescriptor(6, 4)
    g = graphify(lambda b: Output(b.starts[1:] * 1, b.starts[1:] * 1.0), ladder=[rung])
    sizes = [(6, 4), (2, 1), (5, 3), (1, 1), (2, 1), (6, 4), (3, 3), (0, 0), (5, 3)]
    for turn, (tokens, reqs) in enumerate(sizes * 2):
        batch = sized(tokens, reqs, turn)
        g(batch)
        (graph,) = g._cache.graphs()
        padded = pad(batch, rung)
        buffers = [x for x in graph.buffers if isinstance(x, Tensor)]
        assert_equal(
            "a buffer is padded", buffers, [padded.ids, padded.starts, padded.table, padded.wide]
        )
    assert g.cache_info().captures == 1
