"""split and join: splitting a batch and joining its outputs loses nothing."""

from itertools import pairwise
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st
from own_batches import (
    OWN_BATCHES,
    WHOLE_BATCHES,
    Corpus,
    Documents,
    Graph,
    Graphs,
    Length,
    Signal,
    X,
    Y,
)
from refusal import refused
from torch import Tensor

import weft
from weft.batches.batch import Batch
from weft.batches.descriptor import BatchDescriptor
from weft.batches.padding import pad
from weft.batches.sampling import SamplingParams
from weft.batches.state import State, admit, resolve
from weft.errors import CaptureError, DescriptorError
from weft.ops.requests import LAST_TOKEN
from weft.proofs import assert_equal
from weft.proofs.strategies import Rows
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.microbatch import microbatch
from weft.transforms.pipelines.parts import join, split
from weft.values.trees import axes

METHODS = (
    "a method split(parts) that returns a tuple of batches, and join(outputs) if they need one"
)
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
        ids = draw(
            st.lists(st.integers(LAST_TOKEN, 9), min_size=sum(lengths), max_size=sum(lengths))
        )
        samples = draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
        batch = Batch.ragged(
            rows, [[ids.pop() for _ in range(n)] for n in lengths], samples=samples
        )
        larger = BatchDescriptor(
            sum(lengths) + draw(st.integers(0, 3)), len(rows) + draw(st.integers(0, 3))
        )
    return pad(batch, larger) if draw(st.booleans()) else batch


def requests(batch: Batch) -> list[tuple[int, list[int], bool]]:
    """The requests of a batch, without padding."""
    starts = batch.query_start_loc.tolist()
    spans = [batch.input_ids[a:b].tolist() for a, b in pairwise(starts)]
    entries = zip(batch.rows.tolist(), spans, batch.samples.tolist(), strict=True)
    return [(row, ids, sampled) for row, ids, sampled in entries if row >= 0]


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
        assert (d.query_len, d.num_active_loras) == (
            batch.descriptor.query_len,
            batch.descriptor.num_active_loras,
        )
        shapes = (
            part.rows.shape,
            part.input_ids.shape,
            part.query_start_loc.shape,
            part.samples.shape,
        )
        assert shapes == ((d.num_reqs,), (d.num_tokens,), (d.num_reqs + 1,), (d.num_reqs,))
        assert part.query_start_loc.dtype == torch.int32
        assert part.query_start_loc[0] == 0


@FAST
@given(batches(), st.integers(1, 8))
def test_parts_resolve_to_what_the_whole_resolves_to(batch: Batch, parts: int) -> None:
    state = State.zeros(
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        max_num_reqs=8,
        num_pages=9,
        max_pages=4,
        page_size=2,
    )
    state = admit(
        state,
        range(8),
        [[r, r + 1] for r in range(8)],
        [SamplingParams(temperature=0.0)] * 8,
        [[1]] * 8,
    )
    state.positions.copy_(torch.arange(9) % 3)
    whole = resolve(state, batch)
    cut = [resolve(state, part) for part in split(batch, parts)]
    for field in ("input_ids", "positions", "slot_mapping", "seq_lens", "rows"):
        assert_equal(
            f"{LAW}: {field}",
            torch.cat([getattr(part, field) for part in cut]),
            getattr(whole, field),
        )


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
    ("tree", "problem"),
    [
        (
            {"a": torch.ones(2), "b": torch.ones(3)},
            "tensors whose first dimensions do not agree: {\"['a']\": (2,), \"['b']\": (3,)}",
        ),
        (
            (torch.ones(2), torch.tensor(1.0)),
            "tensors whose first dimensions do not agree: {'[0]': (2,), '[1]': ()}",
        ),
        ({"n": 2}, "no tensor in {'n': 2}, a dict"),
    ],
)
def test_trees_without_a_common_length_are_refused(tree: Any, problem: str) -> None:
    with pytest.raises(DescriptorError) as error:
        split(tree, 2)
    assert (
        str(error.value)
        == f"split(<{type(tree).__name__}>, 2)\n  saw: {problem}\n  instead: tensors with a row for"
        f" each entry, and the rest in params; or in a custom class {METHODS}"
    )


@pytest.mark.parametrize("parts", [0, -3])
def test_fewer_than_one_part_is_refused(parts: int) -> None:
    for batch in (Batch.decode([0]), torch.ones(3)):
        with pytest.raises(DescriptorError) as error:
            split(batch, parts)
        assert error.value.call == f"split(batch, {parts})"
        assert error.value.instead == "a whole number >= 1"


HALVES = (torch.ones(1), torch.ones(1))


@pytest.mark.parametrize("leaf", [torch.tensor(1.0), torch.ones(3), "same", 2, 2.0])
def test_join_refuses_what_is_not_one_entry_a_request(leaf: Any) -> None:
    with pytest.raises(DescriptorError) as error:
        join([{"loss": leaf}] * 2, HALVES)
    assert error.value.call == "join of 2 micro-batches"
    assert error.value.problem.startswith("output ['loss'] is ")
    assert error.value.problem.endswith(", not one entry a request or a token of its part")
    assert join([{"loss": leaf}], HALVES[:1])["loss"] is leaf


def test_join_refuses_outputs_of_different_structures() -> None:
    with pytest.raises(DescriptorError, match="different structures"):
        join([{"a": torch.ones(1)}, {"b": torch.ones(1)}], HALVES)


def test_join_keeps_none() -> None:
    assert_equal(LAW, join([(torch.ones(1), None)] * 2, HALVES), (torch.ones(2), None))


@pytest.mark.parametrize("parts", [1, 2, 3, 9])
@pytest.mark.parametrize("name", OWN_BATCHES)
def test_own_batches_are_split_and_joined(name: str, parts: int) -> None:
    batch, step = OWN_BATCHES[name]
    cut = split(batch, parts)
    assert 1 <= len(cut) <= parts
    assert {type(part) for part in cut} == {type(batch)}
    assert_equal(LAW, join([step(part) for part in cut], cut, batch), step(batch))


@pytest.mark.parametrize("name", WHOLE_BATCHES)
def test_one_part_is_any_batch(name: str) -> None:
    batch, step = WHOLE_BATCHES[name]
    assert split(batch, 1) == (batch,)
    assert_equal(
        LAW, microbatch(lambda p, s, batch: (s, step(batch)), 1)(None, None, batch)[1], step(batch)
    )
    with pytest.raises(DescriptorError) as error:
        split(batch, 2)
    assert error.value.call == f"split(<{type(batch).__name__}>, 2)"


@FAST
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.integers(1, 7),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_two_axes_are_cut_as_by_hand(
    lengths: list[int], parts: int, more_docs: int, more_words: int
) -> None:
    whole = Corpus.of(*lengths)
    batch = pad(whole, Documents(len(lengths) + more_docs, sum(lengths) + more_words))
    cut = split(batch, parts)
    texts = [part.words[a:b].tolist() for part in cut for a, b in pairwise(part.starts.tolist())]
    expected = [whole.words[a:b].tolist() for a, b in pairwise(whole.starts.tolist())]
    assert texts == expected + [[]] * more_docs or parts == 1
    assert [t for part in cut for t in part.titles.tolist()] == batch.titles.tolist()
    assert all(part.documents == Documents(len(part.titles), len(part.words)) for part in cut)
    assert sum(part.documents.num_words for part in cut) == batch.documents.num_words


@FAST
@given(batches(), st.integers(1, 7))
def test_parts_joined_are_the_batch(batch: Batch, parts: int) -> None:
    cut = split(batch, parts)
    assert_equal(LAW, join(cut, cut, batch), batch)


@FAST
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(1, 7))
def test_parts_of_two_axes_joined_are_the_batch(lengths: list[int], parts: int) -> None:
    batch = attrs.evolve(Corpus.of(*lengths), weights=None)
    cut = split(batch, parts)
    joined = join(cut, cut, batch)
    assert_equal(LAW, joined, batch)
    assert joined.documents == batch.documents


@weft.pytree
@attrs.frozen(eq=False)
class Path:
    """The states of a path, one more than its steps."""

    states: Tensor = attrs.field(metadata=axes("steps+1"))
    actions: Tensor = attrs.field(metadata=axes("steps"))


def test_an_axis_of_one_more_is_split_and_not_joined() -> None:
    batch = Path(torch.arange(5.0), torch.arange(4.0))
    cut = split(batch, 2)
    assert [part.states.tolist() for part in cut] == [[0, 1, 2], [2, 3, 4]]
    assert_equal(LAW, join([part.states[1:] - part.actions for part in cut], cut), torch.ones(4))
    problem = "output .states has size steps+1 in each part, so the joined output would be too long"
    with refused(
        DescriptorError, "join of 2 micro-batches", problem, "return it without that field"
    ):
        join(cut, cut)


@pytest.mark.parametrize(
    ("batch", "problem", "instead"),
    [
        (
            Graph.ring(3),
            "axes num_nodes, num_edges, and no field that says how they go together",
            (
                f"in class Graph {METHODS}; or, where an entry of one has some of the other to"
                ' itself, an integer field of starts, axes("num_nodes+1") or axes("num_edges+1")'
            ),
        ),
        (
            Graphs.of(Graph.ring(2), Graph.ring(3)),
            (
                "axes num_nodes, num_edges, num_graphs, and no single field of starts that connects"
                " two axes"
            ),
            f"in class Graphs {METHODS}",
        ),
        (
            attrs.evolve(Corpus.of(1, 2), starts=torch.tensor([0, 2, 1])),
            "starts = [0, 2, 1], which are not starts in num_words=3",
            f"starts from 0 on; or in class Corpus {METHODS}",
        ),
        (
            Signal(Length(3), torch.ones(4)),
            "a tensor of shape (4,) where steps is 3",
            "give the batch the descriptor of its tensors",
        ),
        (
            Rows(BatchDescriptor(4, 4), torch.ones(4, 2)),
            (
                "the descriptor 'ragged 4 tokens, 4 reqs' has num_reqs and num_active_loras, but no"
                " field names an axis num_reqs or num_active_loras, so the descriptor of a part is"
                " unknown"
            ),
            f"in class Rows {METHODS}",
        ),
        (
            {"signal": Signal(Length(2), torch.ones(2)), "mask": torch.ones(2)},
            "a dict around a batch that has a descriptor",
            "that batch, with the rest in its fields (weft.axes)",
        ),
        (
            {"x": X, "names": list("abcdef")},
            "['names'] is a list of 6 Python values, as many as there are rows",
            "a tensor; or a tuple, if every part takes all of it",
        ),
        (
            {"x": X, "y": Y.numpy()},
            "['y'] is a ndarray, not a tensor",
            "torch.as_tensor(...) of it",
        ),
    ],
)
def test_own_batches_that_nobody_says_how_to_split(batch: Any, problem: str, instead: str) -> None:
    with refused(DescriptorError, f"split(<{type(batch).__name__}>, 2)", problem, instead):
        split(batch, 2)


@attrs.frozen
class Even:
    """A batch class that refuses the values of some parts."""

    steps: int = attrs.field(
        validator=lambda self, field, value: attrs.validators.in_(range(0, 99, 2))(
            self, field, value
        )
    )

    def covers(self, other: "Even") -> bool:
        return self.steps >= other.steps


def test_a_class_that_refuses_a_part() -> None:
    batch = Signal(Even(6), Y)  # type: ignore[arg-type]
    assert [part.length.steps for part in split(batch, 3)] == [2, 2, 2]
    with refused(
        DescriptorError, "split(<Signal>, 2)", "ValueError: <any>", f"in class Signal {METHODS}"
    ):
        split(batch, 2)


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ((), "it returned 0 parts"),
        ((1, 2, 3), "it returned 3 parts"),
        (None, "it returned None"),
        (iter([1]), "it returned a list_iterator"),
    ],
)
def test_a_split_of_ones_own_that_returns_no_parts(returned: Any, problem: str) -> None:
    class Own:
        def split(self, _: int) -> Any:
            return returned

    with refused(DescriptorError, "Own.split(2)", problem, "return a tuple of 1 to 2 batches"):
        split(Own(), 2)


@weft.pytree
@attrs.frozen(eq=False)
class Overlapping(Signal):
    """A batch whose parts overlap, and that has no `join`."""

    def split(self, parts: int) -> tuple["Overlapping", ...]:
        return tuple(Overlapping(Length(4), self.x[a : a + 4]) for a in range(0, 2 * parts, 2))


def test_parts_that_overlap_need_a_join() -> None:
    batch = Overlapping(Length(6), Y)
    cut = split(batch, 2)
    problem = (
        "parts that together are 'Length(steps=8)', where the Overlapping is 'Length(steps=6)'"
    )
    instead = "in class Overlapping a method join(outputs) beside its split"
    with refused(DescriptorError, "join of 2 micro-batches", problem, instead):
        join([part.x for part in cut], cut, batch)


def test_a_join_of_ones_own_needs_the_whole_batch() -> None:
    batch, _ = OWN_BATCHES["split and join"]
    cut = split(batch, 2)
    problem = "SplitGraph has a method join(outputs), which needs the batch"
    instead = "join(outputs, parts, batch)"
    with refused(DescriptorError, "join of 2 micro-batches", problem, instead):
        join([part.x for part in cut], cut)


def test_the_encoding_of_a_tokenizer_is_split() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": X.long(), "attention_mask": torch.ones(6, 2)})
    cut = split(batch, 4)
    assert [type(part) for part in cut] == [transformers.BatchEncoding] * 4
    assert_equal(LAW, torch.cat([part["input_ids"] for part in cut]), X.long())


def test_a_list_beside_tensors() -> None:
    """A list of tensors is a tree, whatever its length. A list of Python values goes to every part
    if it cannot be rows."""
    two = torch.arange(2)
    cut = split({"x": two, "both": [two, two + 1], "names": ["a", "b", "c"]}, 2)
    assert [part["names"] for part in cut] == [["a", "b", "c"]] * 2
    assert [[x.tolist() for x in part["both"]] for part in cut] == [[[0], [1]], [[1], [2]]]
    problem = "['both'][1] is a list of 2 Python values, as many as there are rows"
    with refused(
        DescriptorError,
        "split(<dict>, 2)",
        problem,
        "a tensor; or a tuple, if every part takes all of it",
    ):
        split({"x": two, "both": [two, ["a", "b"]]}, 2)
