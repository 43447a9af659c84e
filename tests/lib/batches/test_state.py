"""resolve, advance and admit against loops over requests and tokens, written here."""

import itertools
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from weft.batches.batch import Batch
from weft.batches.carried import Carried
from weft.batches.descriptor import BatchDescriptor
from weft.batches.outputs import Output
from weft.batches.padding import pad
from weft.batches.sampling import SamplingParams
from weft.batches.state import Drafting, State, admit, advance, copy_pages, resolve
from weft.errors import DonatedError, RequestError, WeftError
from weft.ops.requests import LAST_TOKEN
from weft.ops.sampling.logits import IN_PROMPT, MIN_LEN, SEED, TEMPERATURE
from weft.proofs import assert_equal
from weft.transforms.graphs.graphify import graphify
from weft.values.donation import clone
from weft.values.trees import tree_leaves

FAST = settings(deadline=None, max_examples=80)
ROWS = 5
PAGE = 2
MAX_PAGES = 6


def empty(rows: int = ROWS) -> State:
    return State.zeros(
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        max_num_reqs=rows,
        num_pages=40,
        max_pages=MAX_PAGES,
        page_size=PAGE,
    )


@st.composite
def states(draw: st.DrawFn) -> State:
    """Any table of requests, with old data in the scratch row."""
    state = empty()
    numbers = st.integers(0, 7)
    for field, values in (("positions", numbers), ("last_tokens", st.integers(0, 99))):
        drawn = draw(st.lists(values, min_size=ROWS + 1, max_size=ROWS + 1))
        getattr(state, field).copy_(torch.tensor(drawn))
    table = draw(st.permutations(range((ROWS + 1) * MAX_PAGES)))
    state.block_table.copy_(torch.tensor(table).view(ROWS + 1, MAX_PAGES))
    num_cached = draw(st.none() | st.lists(numbers, min_size=ROWS + 1, max_size=ROWS + 1))
    return (
        state
        if num_cached is None
        else attrs.evolve(state, num_recomputed_tokens=torch.tensor(num_cached))
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    rows = draw(st.lists(st.integers(0, ROWS - 1), unique=True, max_size=ROWS))
    if draw(st.booleans()):
        batch = Batch.decode(rows)
        larger = BatchDescriptor.uniform(len(rows) + draw(st.integers(0, 3)))
    else:
        ids = [draw(st.lists(st.integers(LAST_TOKEN, 99), min_size=1, max_size=4)) for _ in rows]
        batch = Batch.ragged(rows, ids, samples=[draw(st.booleans()) for _ in rows])
        larger = BatchDescriptor(
            sum(map(len, ids)) + draw(st.integers(0, 3)), len(rows) + draw(st.integers(0, 3))
        )
    return pad(batch, larger) if rows and draw(st.booleans()) else batch


def resolved_by_hand(state: State, batch: Batch) -> dict[str, list[Any]]:
    """The documented result of resolve, computed one request and one token at a time."""
    tokens = batch.descriptor.num_tokens
    reqs = batch.descriptor.num_reqs
    expected: dict[str, list[Any]] = {
        "input_ids": [0] * tokens,
        "positions": [0] * tokens,
        "slot_mapping": [-1] * tokens,
        "seq_lens": [0] * reqs,
        "last_index": [0] * reqs,
        "block_table": [],
    }
    starts = batch.query_start_loc.tolist()
    token_ids = batch.input_ids.tolist()
    for i, row in enumerate(batch.rows.tolist()):
        expected["block_table"].append(state.block_table[row].tolist())
        expected["last_index"][i] = max(starts[i + 1] - 1, 0)
        if row < 0:
            continue
        first_position = int(state.positions[row])
        expected["seq_lens"][i] = first_position + starts[i + 1] - starts[i]
        for offset, t in enumerate(range(starts[i], starts[i + 1])):
            at = first_position + offset
            expected["positions"][t] = at
            expected["input_ids"][t] = (
                int(state.last_tokens[row]) if token_ids[t] == LAST_TOKEN else token_ids[t]
            )
            is_cached = state.num_recomputed_tokens is not None and at < int(
                state.num_recomputed_tokens[row]
            )
            page = (
                state.kv_pages.shape[2] - 1
                if is_cached
                else int(state.block_table[row, at // PAGE])
            )
            expected["slot_mapping"][t] = page * PAGE + at % PAGE
    return expected


@FAST
@given(states(), batches())
def test_resolve_is_the_loop(state: State, batch: Batch) -> None:
    before = clone(state)
    resolved = resolve(state, batch)
    for field, expected in resolved_by_hand(state, batch).items():
        assert getattr(resolved, field).tolist() == expected, field
    assert (resolved.descriptor, resolved.rows is batch.rows) == (batch.descriptor, True)
    assert_equal("resolve is pure", state, before)


def test_resolve_keeps_the_dtypes_that_it_says() -> None:
    resolved = resolve(
        empty(), pad(Batch.decode([1]), BatchDescriptor.uniform(2, num_active_loras=1))
    )
    tensors = [
        f.name
        for f in attrs.fields(type(resolved))
        if isinstance(getattr(resolved, f.name), Tensor)
    ]
    dtypes = {name: getattr(resolved, name).dtype for name in tensors}
    small = {name for name, dtype in dtypes.items() if dtype == torch.int32}
    assert small == {"query_start_loc", "seq_lens", "block_table", "adapters", "active_adapters"}
    assert all(dtypes[name] == torch.int64 for name in dtypes.keys() - small)


@FAST
@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 3)), min_size=1, max_size=5),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(0, 3),
)
def test_resolve_finds_the_adapters(
    requests: list[tuple[int, int]], more_loras: int, more_reqs: int, more_tokens: int
) -> None:
    """Each token's adapter slot, and each active slot once, whatever padding follows; None if the
    class has none."""
    slots = [slot for slot, _ in requests]
    state = empty()
    rows = range(len(requests))
    greedy = [SamplingParams(temperature=0.0)] * len(requests)
    state = admit(state, rows, [()] * len(requests), greedy, [()] * len(requests), adapters=slots)
    state.adapters[-1] = 2  # scratch
    there = sorted({*slots} - {-1})
    batch = Batch.ragged(rows, [[1] * count for _, count in requests], num_active_loras=len(there))
    descriptor = batch.descriptor
    wide = BatchDescriptor(
        descriptor.num_tokens + more_tokens,
        descriptor.num_reqs + more_reqs,
        num_active_loras=len(there) + more_loras,
    )
    resolved = resolve(state, pad(batch, wide))
    if not wide.num_active_loras:
        assert (resolved.adapters, resolved.active_adapters) == (None, None)
        return
    assert resolved.adapters is not None
    assert resolved.active_adapters is not None
    assert (
        resolved.adapters.tolist()
        == [slot for slot, count in requests for _ in range(count)] + [-1] * more_tokens
    )
    assert resolved.active_adapters.tolist() == there + [-1] * more_loras


def advanced_by_hand(state: State, batch: Batch, tokens: Sequence[int]) -> State:
    state = clone(state)
    starts = batch.query_start_loc.tolist()
    for i, row in enumerate(batch.rows.tolist()):
        if row < 0:
            continue
        state.positions[row] += starts[i + 1] - starts[i]
        if batch.samples[i]:
            state.last_tokens[row] = tokens[i]
    return state


@FAST
@given(states(), batches())
def test_advance_is_the_loop(state: State, batch: Batch) -> None:
    tokens = torch.arange(batch.descriptor.num_reqs) + 1000
    expected = advanced_by_hand(state, batch, tokens.tolist())
    assert_equal(
        "advance is the loop", advance(state, batch, Output(tokens, tokens.float())), expected
    )


def verified_by_hand(state: State, batch: Batch, ids: Tensor, num_tokens: Sequence[int]) -> State:
    """A request that samples keeps the first `num_tokens` of its ids; its table of tokens gets all
    of them."""
    state = clone(state)
    starts = batch.query_start_loc.tolist()
    assert state.drafting is not None
    for i, row in enumerate(batch.rows.tolist()):
        if row < 0:
            continue
        goes_on = int(batch.input_ids[starts[i]]) == LAST_TOKEN
        state.positions[row] += 1 if goes_on else starts[i + 1] - starts[i]
        if batch.samples[i] and num_tokens[i]:
            place = int(state.positions[row])
            state.drafting.tokens[row, place : place + ids.shape[1]] = ids[i]
            state.last_tokens[row] = ids[i, num_tokens[i] - 1]
        state.positions[row] += num_tokens[i] - 1 if batch.samples[i] else 0
    return state


@FAST
@given(states(), batches(), st.data())
def test_advance_by_verified_tokens_is_the_loop(
    state: State, batch: Batch, data: st.DataObject
) -> None:
    reqs = batch.descriptor.num_reqs
    most = 3
    ids = torch.arange(reqs * most).view(reqs, most) + 1000
    counts = data.draw(st.lists(st.integers(0, most), min_size=reqs, max_size=reqs))
    state = attrs.evolve(state, drafting=Drafting.zeros(ROWS + 1, max_tokens=20))
    expected = verified_by_hand(state, batch, ids, counts)
    out = Output(ids, ids.float(), num_tokens=torch.tensor(counts, dtype=torch.int64))
    assert_equal("advance is the loop", advance(state, batch, out), expected)


@FAST
@given(states(), st.integers(0, 5), st.integers(0, 5))
def test_a_batch_of_padding_changes_nothing(state: State, reqs: int, tokens: int) -> None:
    nobody = pad(Batch.ragged([], []), BatchDescriptor(tokens, reqs))
    before = clone(state)
    out = torch.arange(reqs) + 77
    assert_equal(
        "padding changes nothing", advance(state, nobody, Output(out, out.float())), before
    )


@FAST
@given(states(), batches(), st.integers(0, 4), st.integers(1, 4))
def test_padding_changes_nothing_of_what_its_requests_get(
    s: State, batch: Batch, tokens: int, reqs: int
) -> None:
    d = attrs.evolve(batch.descriptor, query_len=None)
    wide = pad(batch, BatchDescriptor(d.num_tokens + tokens, d.num_reqs + reqs))
    padded = resolve(s, wide)
    alone = resolve(s, batch)
    for field in ("input_ids", "positions", "slot_mapping", "seq_lens"):
        length = getattr(alone, field).shape[0]
        assert torch.equal(getattr(padded, field)[:length], getattr(alone, field))
        assert set(getattr(padded, field)[length:].tolist()) <= {
            -1 if field == "slot_mapping" else 0
        }


def test_steps_are_captured_without_a_host_read() -> None:
    def step(state: State, batch: Batch) -> tuple[State, Output]:
        resolved = resolve(state, batch)
        ids = resolved.input_ids[resolved.last_index] + 1
        out = Output(ids, ids.float())
        return advance(state, batch, out), out

    g = graphify(
        step, ladder=[BatchDescriptor.uniform(3), BatchDescriptor(6, 3)], donate_argnames=("state",)
    )
    state, other = empty(), empty()
    for batch in (
        Batch.ragged([3, 1], [[7, 8], [9]]),
        Batch.decode([1]),
        Batch.decode([1, 3, 0]),
        Batch.decode([3]),
    ):
        state, out = step(state, batch)
        other, captured_out = g(other, batch)
        assert_equal("captured steps", (other, captured_out), (state, out))
    assert state.last_tokens.tolist() == [1, 12, 0, 11, 0, 0]
    assert g.cache_info().captures == 2


GREEDY = SamplingParams(temperature=0.0)


def test_admit_fills_the_rows_and_no_other() -> None:
    state = empty()
    state.positions.fill_(3)
    state.last_tokens.fill_(4)
    hot = SamplingParams(temperature=0.5, seed=11)
    cold = SamplingParams(temperature=0.25, seed=-12)
    state = admit(state, [2, 0], [[7, 8], [9]], [hot, cold], [[1], [2, 3]])
    assert state.block_table[[2, 0]].tolist() == [[7, 8, 0, 0, 0, 0], [9, 0, 0, 0, 0, 0]]
    assert state.positions.tolist() == [0, 3, 0, 3, 3, 3]
    assert state.last_tokens.tolist() == [0, 4, 0, 4, 4, 4]
    assert state.sampling.floats[:, TEMPERATURE].tolist() == [0.25, 0, 0.5, 0, 0, 0]
    assert state.sampling.ints[:, SEED].tolist() == [-12, 0, 11, 0, 0, 0]
    assert not state.block_table[[1, 3, 4, 5]].any()


def test_admit_again_leaves_no_page_of_the_request_before() -> None:
    state = admit(empty(), [1], [[5, 6, 7]], [GREEDY], [[1]])
    assert admit(state, [1], [[8]], [GREEDY], [[1]]).block_table[1].tolist() == [8, 0, 0, 0, 0, 0]


@FAST
@given(st.permutations(range(ROWS)), st.permutations(range(39)), st.integers(0, 2), st.data())
def test_an_admitted_request_carries_what_the_page_before_it_holds(
    rows: list[int], pages: list[int], num_drafts: int, data: st.DataObject
) -> None:
    """Before its first token it carries the default, and so it does where there are no snapshots."""
    rows = rows[: data.draw(st.integers(0, ROWS))]
    default = torch.tensor([-1.0])
    num_pages = data.draw(st.sampled_from((None, 40)))
    carried = Carried.of({"h": default}, ROWS + 1, num_drafts=num_drafts, num_pages=num_pages)
    for values in carried.values.values():
        values[:ROWS] = -7.0  # of the requests before
    for snapshots in carried.snapshots.values():
        snapshots.copy_(torch.arange(41.0)[:, None])
    counts = [data.draw(st.integers(0, MAX_PAGES - 1)) for _ in rows]
    own_pages = [pages[MAX_PAGES * i : MAX_PAGES * (i + 1)] for i in range(len(rows))]
    greedy = [GREEDY] * len(rows)
    prompts = [[1]] * len(rows)
    positions = [PAGE * count for count in counts]
    state = admit(
        attrs.evolve(empty(), carried=carried),
        rows,
        own_pages,
        greedy,
        prompts,
        positions=positions,
    )
    expected = [
        request_pages[count - 1] if count and num_pages is not None else -1
        for request_pages, count in zip(own_pages, counts, strict=True)
    ]
    assert resolve(state, Batch.decode(rows)).carried["h"].values.flatten().tolist() == expected
    assert state.carried is not None
    rest = [row for row in range(ROWS) if row not in rows]
    assert bool((state.carried.values["h"][rest] == -7.0).all())


def test_admit_nobody() -> None:
    assert_equal("admit nobody", admit(empty(), [], [], [], []), empty())


def _admit_arguments(
    rows: Sequence[int], pages: Sequence[Sequence[int]], sampling: int, prompts: int
) -> tuple[Any, ...]:
    return rows, pages, [GREEDY] * sampling, [[1]] * prompts


FAULTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "less sampling than rows": (
        _admit_arguments([0, 1], [[0], [1]], 1, 2),
        "sampling has 1 entries, and rows has 2",
    ),
    "more sampling than rows": (
        _admit_arguments([0], [[0]], 2, 1),
        "sampling has 2 entries, and rows has 1",
    ),
    "fewer prompts than rows": (
        _admit_arguments([0, 1], [[0], [1]], 2, 1),
        "prompts has 1 entries, and rows has 2",
    ),
    "fewer pages than rows": (
        _admit_arguments([0, 1], [[0]], 2, 2),
        "pages has 1 entries, and rows has 2",
    ),
    "more pages than a row holds": (
        _admit_arguments([0], [list(range(MAX_PAGES + 1))], 1, 1),
        f"{MAX_PAGES + 1} pages after 0 pages in row 0, which holds {MAX_PAGES}",
    ),
    "a page that does not exist": (
        _admit_arguments([0], [[40]], 1, 1),
        "page 40 for row 0, of a state with pages 0 to 39",
    ),
    "a negative page": (
        _admit_arguments([0], [[-1]], 1, 1),
        "page -1 for row 0, of a state with pages 0 to 39",
    ),
    "the scratch row": (
        _admit_arguments([ROWS], [[0]], 1, 1),
        f"row {ROWS} of a state with rows 0 to {ROWS - 1}",
    ),
    "the scratch row by its other name": (
        _admit_arguments([-1], [[0]], 1, 1),
        f"row -1 of a state with rows 0 to {ROWS - 1}",
    ),
    "a row that does not exist": (
        _admit_arguments([ROWS + 1], [[0]], 1, 1),
        f"row {ROWS + 1} of a state with rows 0 to {ROWS - 1}",
    ),
    "a row twice": (_admit_arguments([0, 0], [[0], [1]], 2, 2), "row 0 is listed twice"),
    "no seed for a request that draws": (
        ([0], [[0]], [SamplingParams(temperature=1.0)], [[1]]),
        "a request that draws, without a seed",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_admit_refuses(name: str) -> None:
    """Otherwise each would reach another request's pages, random numbers or rows, or fail in torch
    with a misleading error."""
    arguments, problem = FAULTS[name]
    with pytest.raises(WeftError) as error:
        admit(empty(), *arguments)
    assert error.value.call.startswith("admit(")
    assert error.value.problem == problem


@pytest.mark.parametrize("name", ["generated", "positions"])
def test_admit_refuses_fewer_than_rows_of_what_may_be_left_out(name: str) -> None:
    with pytest.raises(
        WeftError, match=f"{name} has 0 entries, and rows has 1\n  instead: one entry of {name} for"
    ):
        admit(empty(), [0], [[0]], [GREEDY], [[1]], **{name: []})


def test_a_request_that_is_started_again_counts_what_it_had_generated() -> None:
    sizes: dict[str, int] = {
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 1,
        "num_pages": 1,
        "max_pages": 1,
    }
    params = SamplingParams(temperature=0.0, presence_penalty=1.0, min_tokens=2, stop_token_ids=[0])
    state = State.zeros(**sizes, max_num_reqs=1, vocab_size=4)
    state = admit(state, [0], [[0]], [params], [[1, 1, 2]], generated=[[2, 3, 3]], positions=[5])
    assert state.sampling.counts[0].tolist() == [0, IN_PROMPT, IN_PROMPT + 1, 2]
    assert state.sampling.ints[0, MIN_LEN] == 5
    assert state.positions[0] == 5


@FAST
@given(st.permutations(range(40)), st.integers(0, 20))
def test_copied_pages_are_those_of_their_sources(pages: list[int], count: int) -> None:
    state = attrs.evolve(
        empty(), beside={"other": torch.arange(2.0 * 40).reshape(1, 2, 40, 1, 1, 1)}
    )
    state.kv_pages.copy_(torch.arange(state.kv_pages.numel()).view_as(state.kv_pages))
    sources = pages[:count]
    targets = pages[count : 2 * count]
    before = clone(state)
    copied = copy_pages(state, sources, targets)
    source_of = dict(zip(targets, sources, strict=True))
    for page in range(40):
        source = source_of.get(page, page)
        assert torch.equal(copied.kv_pages[:, :, page], before.kv_pages[:, :, source])
        assert torch.equal(copied.beside["other"][:, :, page], before.beside["other"][:, :, source])


@pytest.mark.parametrize(
    ("sources", "targets", "problem"),
    [
        ([1, 2], [3, 2], "page 2 is both a source and a target"),
        ([0], [40], "page 40 of a state with pages 0 to 39"),
        ([-1], [0], "page -1 of a state with pages 0 to 39"),
    ],
)
def test_pages_that_cannot_be_copied_are_named(
    sources: list[int], targets: list[int], problem: str
) -> None:
    with pytest.raises(RequestError) as error:
        copy_pages(empty(), sources, targets)
    assert error.value.call == f"copy_pages(state, {sources}, {targets})"
    assert (error.value.problem, error.value.instead) == (problem, "different pages from 0 to 39")


def test_an_admitted_state_is_dead_and_names_its_taker() -> None:
    old = empty()
    admit(old, [0], [[1]], [GREEDY], [[1]])
    with pytest.raises(DonatedError) as error:
        resolve(old, Batch.decode([0]))
    assert error.value.problem == "this State was donated to admit(state)"


def test_nobody_but_a_taker_says_that_a_state_was_donated() -> None:
    with pytest.raises(TypeError, match="taken_by"):
        attrs.evolve(empty(), taken_by="step(state)")


def test_zeros() -> None:
    state = State.zeros(
        num_layers=3,
        num_kv_heads=2,
        head_dim=8,
        max_num_reqs=4,
        num_pages=5,
        max_pages=2,
        page_size=16,
        dtype=torch.bfloat16,
    )
    assert state.kv_pages.shape == (3, 2, 5, 16, 2, 8)
    assert state.kv_pages.dtype == torch.bfloat16
    assert (state.block_table.shape, state.block_table.dtype) == ((5, 2), torch.int32)
    assert {t.shape for t in (state.positions, state.last_tokens)} == {(5,)}
    widths = [tuple(leaf.shape) for leaf in tree_leaves(state.sampling)]
    assert widths == [(5, 6), (5, 4), (5, 0), (5, 0), (5, 0), (5, 0), (5, 0)]


def test_zeros_of_a_stage_that_samples() -> None:
    sizes: dict[str, int] = {
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 1,
        "num_pages": 1,
        "max_pages": 1,
    }
    table = State.zeros(**sizes, max_num_reqs=4, vocab_size=33, max_biased=7).sampling
    shapes = {
        name: tuple(getattr(table, name).shape)
        for name in ("allowed", "stops", "bias_ids", "bias", "counts")
    }
    assert shapes == {
        "allowed": (5, 2),
        "stops": (5, 2),
        "bias_ids": (5, 7),
        "bias": (5, 7),
        "counts": (5, 33),
    }
    assert table.counts.dtype == torch.int16
    assert table.vocab_size == 33


@FAST
@given(states(), batches(), st.booleans())
def test_a_scan_over_tokens_is_the_loop(state: State, batch: Batch, linear: bool) -> None:
    """Each request's recurrence goes on from its own value, and has one value for each of its
    tokens."""

    def f(value: Tensor, x: Tensor) -> Tensor:
        return 0.5 * value + x if linear else (value * x).cos()

    resolved = resolve(state, batch)
    init = torch.arange(len(batch.rows), dtype=torch.float64)[:, None] * torch.ones(
        2, dtype=torch.float64
    )
    xs = torch.arange(len(batch.input_ids), dtype=torch.float64)[:, None] + torch.tensor(
        [0.0, 0.25]
    )
    result = resolved.scan_tokens(f, init, xs)
    starts = batch.query_start_loc.tolist()
    for request, (start, stop) in enumerate(itertools.pairwise(starts)):
        value = init[request]
        for token in range(start, stop):
            value = f(value, xs[token])
            assert torch.equal(result[token], value)
