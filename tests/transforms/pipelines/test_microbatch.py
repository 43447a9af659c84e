"""split, join and microbatch: splitting a batch and joining its outputs loses nothing."""

from itertools import pairwise
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from weft.arguments.checks import kind_of
from weft.batch import LAST_TOKEN, Batch
from weft.descriptor import BatchDescriptor
from weft.donation import clone, donated_argnames, donates
from weft.errors import CaptureError, DescriptorError, DonatedError, ProgramError
from weft.outputs import Output
from weft.padding import pad
from weft.proofs.laws import assert_equal
from weft.proofs.strategies import Rows
from weft.sampling import SamplingParams
from weft.state import State, admit, resolve
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.microbatch import join, microbatch, split
from weft.trees import axes, pytree

LAW = "micro-batches are one batch"
FAST = settings(deadline=None, max_examples=60)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Ragged and uniform batches of up to 6 requests, some of them padded."""
    rows = draw(st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True))
    lengths = draw(st.lists(st.integers(1, 3), min_size=len(rows), max_size=len(rows)))
    if draw(st.booleans()):
        batch = Batch.decode(rows)
        larger = BatchDescriptor.uniform(len(rows) + draw(st.integers(0, 3)))
    else:
        ids = draw(st.lists(st.integers(LAST_TOKEN, 9), min_size=sum(lengths), max_size=sum(lengths)))
        samples = draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
        batch = Batch.ragged(rows, [[ids.pop() for _ in range(n)] for n in lengths], samples=samples)
        larger = BatchDescriptor(sum(lengths) + draw(st.integers(0, 3)), len(rows) + draw(st.integers(0, 3)))
    return pad(batch, larger) if draw(st.booleans()) else batch


def requests(batch: Batch) -> list[tuple[int, list[int], bool]]:
    """The requests of a batch, without padding."""
    starts = batch.query_start_loc.tolist()
    spans = [batch.input_ids[a:b].tolist() for a, b in pairwise(starts)]
    asked = zip(batch.rows.tolist(), spans, batch.samples.tolist(), strict=True)
    return [(row, ids, sampled) for row, ids, sampled in asked if row >= 0]


@FAST
@given(batches(), st.integers(1, 8))
def test_parts_ask_for_what_the_whole_asks(batch: Batch, parts: int) -> None:
    cut = split(batch, parts)
    assert len(cut) == min(parts, batch.descriptor.num_reqs)
    assert [r for part in cut for r in requests(part)] == requests(batch)
    sizes = [part.descriptor.num_reqs for part in cut]
    assert max(sizes) - min(sizes) <= 1
    assert sum(part.descriptor.num_tokens for part in cut) == batch.descriptor.num_tokens


@FAST
@given(batches(), st.integers(1, 8))
def test_parts_are_batches_of_the_same_class(batch: Batch, parts: int) -> None:
    for part in split(batch, parts):
        d = part.descriptor
        assert (d.query_len, d.num_active_loras) == (batch.descriptor.query_len, batch.descriptor.num_active_loras)
        shapes = (part.rows.shape, part.input_ids.shape, part.query_start_loc.shape, part.samples.shape)
        assert shapes == ((d.num_reqs,), (d.num_tokens,), (d.num_reqs + 1,), (d.num_reqs,))
        assert part.query_start_loc.dtype == torch.int32
        assert part.query_start_loc[0] == 0


@FAST
@given(batches(), st.integers(1, 8))
def test_parts_resolve_to_what_the_whole_resolves_to(batch: Batch, parts: int) -> None:
    state = State.zeros(num_layers=1, num_kv_heads=1, head_dim=2, max_num_reqs=8, num_pages=9, max_pages=4, page_size=2)
    state = admit(state, range(8), [[r, r + 1] for r in range(8)], [SamplingParams(temperature=0.0)] * 8, [[1]] * 8)
    state.positions.copy_(torch.arange(9) % 3)
    whole, cut = resolve(state, batch), [resolve(state, part) for part in split(batch, parts)]
    for field in ("input_ids", "positions", "slot_mapping", "seq_lens", "rows"):
        assert_equal(f"{LAW}: {field}", torch.cat([getattr(part, field) for part in cut]), getattr(whole, field))


def test_a_uniform_batch_is_cut_without_a_host_read() -> None:
    cut = graphify(lambda batch: [part.rows * 2 for part in split(batch, 2)])
    assert [t.tolist() for t in cut(Batch.decode([1, 2, 3]))] == [[2], [4, 6]]


def test_a_ragged_batch_inside_a_capture_is_refused_with_a_way_out() -> None:
    ragged = Batch.ragged([0, 1], [[1, 2], [3]])
    with pytest.raises(CaptureError) as error:
        graphify(lambda batch: split(batch, 2))(ragged)
    assert error.value.call == "split(<'ragged 3 tokens, 2 reqs'>, 2) inside a captured function"
    assert "pipeline(map(graphify, stages))" in error.value.instead


@FAST
@given(st.integers(0, 7), st.integers(1, 9))
def test_trees_of_tensors(length: int, parts: int) -> None:
    tree = {"a": torch.arange(length), "b": [torch.arange(2 * length).view(length, 2)], "n": None}
    cut = split(tree, parts)
    assert len(cut) == max(1, min(parts, length))
    assert_equal(LAW, join(cut, cut), tree)


@pytest.mark.parametrize(
    ("tree", "seen"),
    [
        (
            {"a": torch.ones(2), "b": torch.ones(3)},
            "tensors whose first dimensions do not agree: {\"['a']\": (2,), \"['b']\": (3,)}",
        ),
        ((torch.ones(2), torch.tensor(1.0)), "tensors whose first dimensions do not agree: {'[0]': (2,), '[1]': ()}"),
        ({"n": 2}, "no tensor in {'n': 2}, a dict"),
    ],
)
def test_trees_without_a_common_length_are_refused(tree: Any, seen: str) -> None:
    with pytest.raises(DescriptorError) as error:
        split(tree, 2)
    assert str(error.value) == (
        f"split(batch, ...)\n  saw: {seen}\n"
        "  instead: pass a weft.Batch, or a tree of tensors with one common first dimension"
    )


@pytest.mark.parametrize("parts", [0, -3])
def test_fewer_than_one_part_is_refused(parts: int) -> None:
    for batch in (Batch.decode([0]), torch.ones(3)):
        with pytest.raises(DescriptorError) as error:
            split(batch, parts)
        assert error.value.call == f"split(batch, {parts})"
        assert error.value.instead == "a whole number >= 1"


def test_a_sized_value_of_ones_own_is_not_cut_behind_its_descriptors_back() -> None:
    rows = Rows(BatchDescriptor(4, 4), torch.ones(4, 2))
    with pytest.raises(DescriptorError, match="descriptor"):
        split(rows, 2)


HALVES = (torch.ones(1), torch.ones(1))


@pytest.mark.parametrize("leaf", [torch.tensor(1.0), torch.ones(3), "same", 2, 2.0])
def test_join_refuses_what_is_not_one_entry_a_request(leaf: Any) -> None:
    with pytest.raises(DescriptorError) as error:
        join([{"loss": leaf}] * 2, HALVES)
    assert error.value.call == "join of 2 micro-batches"
    assert error.value.seen.startswith("output ['loss'] is ")
    assert error.value.seen.endswith(", not one entry a request or a token of its part")
    assert join([{"loss": leaf}], HALVES[:1])["loss"] is leaf


def test_join_refuses_outputs_of_different_structures() -> None:
    with pytest.raises(DescriptorError, match="different structures"):
        join([{"a": torch.ones(1)}, {"b": torch.ones(1)}], HALVES)


def test_join_keeps_none() -> None:
    assert_equal(LAW, join([(torch.ones(1), None)] * 2, HALVES), (torch.ones(2), None))


@pytree
@attrs.frozen(eq=False)
class Columns:
    x: Tensor = attrs.field(metadata=axes(None, "num_reqs"))


def test_sized_outputs_are_joined_along_the_dimension_that_follows_the_batch() -> None:
    def step(params: Any, state: Any, batch: Batch) -> tuple[Any, Columns]:
        return state, Columns(torch.stack([batch.rows, 2 * batch.rows]))

    batch = Batch.decode([3, 1, 4, 5])
    assert_equal(LAW, microbatch(step, 2)(None, 0, batch), step(None, 0, batch))


def test_outputs_that_hold_a_descriptor_hold_the_whole_batchs() -> None:
    def step(params: Any, state: Any, batch: Batch) -> tuple[Any, Rows]:
        return state, Rows(batch.descriptor, batch.input_ids[:, None] * 1.0)

    _, out = microbatch(step, 2)(None, 0, Batch.decode([3, 1, 4, 5]))
    assert out.descriptor == BatchDescriptor.uniform(4)


def test_the_state_goes_through_the_parts_in_order() -> None:
    def step(params: int, state: list[Any], batch: Tensor) -> tuple[list[Any], Tensor]:
        return [*state, batch.tolist()], batch * params

    state, out = microbatch(step, 3)(2, [], torch.arange(5))
    assert (state, out.tolist()) == ([[0], [1, 2], [3, 4]], [0, 2, 4, 6, 8])


def counting() -> Any:
    @donates("state")
    def step(params: Tensor, state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        return state.add_(batch.sum()), batch * params

    return step


def test_donation_is_declared_and_done() -> None:
    cut = microbatch(counting(), 2)
    assert donated_argnames(cut) == ("state",)
    state = torch.zeros(())
    cut(torch.tensor(2.0), state, torch.ones(4))
    with pytest.raises(DonatedError, match=r"donated to step\(state\)"):
        cut(torch.tensor(2.0), state, torch.ones(4))


@pytest.mark.parametrize("parts", [1, 2, 3, 9])
def test_it_commutes_with_graphify(parts: int) -> None:
    params, state = torch.tensor(2.0), torch.zeros(())
    ways = [microbatch(graphify(counting()), parts), graphify(microbatch(counting(), parts)), counting()]
    states = [clone(state) for _ in ways]
    for batch in (torch.arange(5.0), torch.arange(5.0) + 1, torch.arange(3.0)):
        results = [way(params, s, batch) for way, s in zip(ways, states, strict=True)]
        states = [s for s, _ in results]
        for result in results:
            assert_equal(LAW, result, results[-1])


@pytest.mark.parametrize("parts", [0, -1, "2", None, 2.0, True])
def test_a_wrong_number_of_parts_is_refused_at_once(parts: Any) -> None:
    with pytest.raises(ProgramError) as error:
        microbatch(counting(), parts)
    assert str(error.value) == (f"microbatch(step, {parts!r})\n  saw: parts={parts!r}\n  instead: a whole number >= 1")


@pytest.mark.parametrize("made", [torch.ones(2, 2), [1, 2], (1, 2, 3), None])
def test_a_step_that_returns_no_pair_is_refused(made: Any) -> None:
    """A tensor of two rows would unpack into two values."""
    with pytest.raises(ProgramError) as error:
        microbatch(lambda params, state, batch: made, 2)(None, None, torch.ones(4, 2))
    assert error.value.seen == f"it returned {kind_of(made)}" + " of 3" * isinstance(made, tuple)
    assert error.value.instead == "return (state, out)"


def test_a_sum_of_as_many_columns_as_rows_is_the_readers_to_avoid() -> None:
    """`join` sees only sizes: it refuses an output of another size, and joins one of the same size, as documented."""

    def step(params: Any, state: Any, batch: Tensor) -> tuple[Any, Tensor]:
        return state, batch.sum(0)

    with pytest.raises(DescriptorError, match="not one entry a request"):
        microbatch(step, 2)(None, 0, torch.ones(6, 2))
    assert microbatch(step, 2)(None, 0, torch.ones(4, 2))[1].tolist() == [2, 2, 2, 2]


def test_more_parts_than_requests() -> None:
    def step(params: Any, state: Any, batch: Batch) -> tuple[Any, Output]:
        return state, Output(batch.rows, batch.rows * 1.0)

    _, out = microbatch(step, 100)(None, 0, Batch.decode([7, 8]))
    assert out.token_ids.tolist() == [7, 8]
