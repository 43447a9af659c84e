"""Rows of logits that ranks share: each samples its own from the whole vocabulary, and no logits
are gathered."""

from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch
from configs import QWEN3, SMALL, parse
from hypothesis import given, settings, strategies as st
from torch import Tensor, func

from weft.batches.batch import Batch
from weft.batches.outputs import Output
from weft.batches.sampling import SamplingParams
from weft.batches.state import Drafting, State, admit
from weft.meshes.collectives import AllGather, AllToAll, Collective
from weft.meshes.mesh import Mesh
from weft.meshes.placements import PerRank, Replicate, Shard
from weft.ops.requests import LAST_TOKEN
from weft.ops.sampling.logits import pack_bits, unpack_bits
from weft.ops.sampling.sample import sample_rows
from weft.settings import batch_invariant
from weft.stages import head as module
from weft.stages.custom.sown import sow
from weft.stages.decoder import decoder_stage
from weft.stages.layout import empty_states, split_layers
from weft.stages.random_weights import random_params
from weft.stages.shares import AXIS, SharedRows, TensorRanks, share_config
from weft.transforms.shards.shard import Sharded, shard
from weft.values.trees import tree_map

VOCAB = 37
PROMPT = 3
CONFIG = parse({**SMALL, **QWEN3, "head_dim": 8, "vocab_size": VOCAB, "num_hidden_layers": 1})
(LAYOUT,) = split_layers(CONFIG.num_layers, 1)
SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, seed=2, top_k=9, top_p=0.8),
    SamplingParams(
        temperature=1.3, seed=3, min_p=0.05, repetition_penalty=1.4, logit_bias={3: 2.0}
    ),
)


# By definition: rows and columns of a matrix


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 9), st.integers(1, 4), st.integers(1, 9), st.booleans())
def test_each_rank_gets_its_rows_and_all_get_all(
    count: int, num_ranks: int, vocab: int, wide: bool
) -> None:
    """Each rank's rows are rows of the whole matrix, without the columns that fill its last part;
    together they are all rows, once. Results of them come back in their order."""
    whole = torch.randn(count, vocab, generator=torch.Generator().manual_seed(count))
    padded = torch.nn.functional.pad(whole, (0, -vocab % num_ranks), value=9.0)
    ids = torch.arange(count * 2).reshape(count, 2) - 2**40

    def rank(columns: Tensor) -> tuple[Tensor, ...]:
        shared = SharedRows(count, TensorRanks(AXIS, vocab))
        rows = shared.exchange(columns)
        kept = [ids[:, :0], ids] if wide else []
        row_indices = shared.local_rows(torch.arange(count))
        return (
            rows,
            row_indices,
            *shared.gather_all(rows.amax(1), row_indices, *(shared.local_rows(x) for x in kept)),
            shared.gather(rows),
        )

    out = (Shard(0), Shard(0), *[Replicate()] * (5 if wide else 3))
    rows, row_indices, best, numbers, *more, again = shard(
        rank, Mesh(**{AXIS: num_ranks}), Shard(1), out
    )(padded)
    assert torch.equal(rows, whole[row_indices])
    assert set(row_indices.tolist()) == set(range(count))
    assert len(row_indices) == (-(-count // num_ranks)) * num_ranks
    assert torch.equal(best, whole.amax(1))
    assert torch.equal(numbers, torch.arange(count))
    assert torch.equal(again, whole)
    assert [x.tolist() for x in more] == ([ids[:, :0].tolist(), ids.tolist()] if wide else [])


def test_one_process_has_all_rows() -> None:
    x = torch.randn(3, 5)
    shared = SharedRows(3, None)
    assert (shared.size, shared.first) == (3, 0)
    assert (
        shared.local_rows(x)
        is shared.exchange(x)
        is shared.gather(x)
        is shared.gather_all(x)[0]
        is x
    )


# A model whose head ranks share


def scaled(logits: Tensor, rows: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
    """Another change for each request, by its extra, its token's capture and its row."""
    assert len(logits) == len(rows) == len(extras["scale"]) == len(extras["seen"])
    return logits * extras["scale"][:, None] + extras["seen"][:, None] * 0.1 + rows[:, None] * 0.01


def seeing(layer: Any) -> Any:
    def run(params: Any, kv_pages: Tensor, batch: Any, tables: Any, hidden: Tensor) -> Any:
        hidden, kv_pages = layer(params, kv_pages, batch, tables, hidden)
        sow("seen", hidden.mean(-1))
        return hidden, kv_pages

    return run


CHANGED: dict[str, Any] = {
    "logits": scaled,
    "layers": {0: seeing},
    "captures": {"seen": torch.tensor(0.0)},
}


def state_of(config: Any, count: int, drafts: int = 0) -> State:
    """A state with `count` prompts of PROMPT tokens."""
    more: dict[str, Any] = {"extras": {"scale": torch.tensor(1.0)}, "max_biased": 4}
    sizes = {"num_pages": 2 * count, "max_pages": 2, "page_size": 4}
    (state,) = empty_states(config, (LAYOUT,), max_num_reqs=count, **sizes, device="cpu", **more)
    if drafts:
        state = attrs.evolve(state, drafting=Drafting.zeros(len(state.positions)))
    return admit(
        state,
        range(count),
        [[2 * i, 2 * i + 1] for i in range(count)],
        [SAMPLING[i % len(SAMPLING)] for i in range(count)],
        [(1 + i, 2, 3) for i in range(count)],
        extras=[{"scale": torch.tensor(1.0 + i / 8)} for i in range(count)],
    )


def prompts_of(count: int, kind: str) -> Batch:
    """A batch of `count` prompts."""
    batch = Batch.ragged(list(range(count)), [[1 + i, 2, 3] for i in range(count)])
    if kind == "prompt logprobs":
        batch = attrs.evolve(batch, targets=(torch.arange(PROMPT * count) * 5) % VOCAB)
    if kind == "masked":
        masks = [pack_bits(range(i % 3, VOCAB, 3), VOCAB) for i in range(count)]
        batch = attrs.evolve(batch, token_mask=torch.stack(masks))
    return batch


def sharded(num_ranks: int, **options: Any) -> tuple[Sharded, tuple[Any, ...]]:
    """The only stage of a model, on ranks that share it; and their parameters."""
    ranks = TensorRanks(AXIS, VOCAB)
    where = (PerRank(), PerRank(), Replicate(), Replicate())
    stage = decoder_stage(share_config(CONFIG, num_ranks), LAYOUT, ranks=ranks, **options)
    kind: dict[str, Any] = {"seed": 0, "device": "cpu", "dtype": torch.float32, "std": 0.3}
    params = tuple(
        random_params(CONFIG, LAYOUT, shard=(rank, num_ranks), **kind) for rank in range(num_ranks)
    )
    return shard(stage, Mesh(**{AXIS: num_ranks}), where, (PerRank(), Replicate())), params


def states_of(num_ranks: int, count: int) -> tuple[State, ...]:
    return tuple(state_of(share_config(CONFIG, num_ranks), count) for _ in range(num_ranks))


def collectives(step: Sharded, *args: Any) -> list[Collective]:
    """Those of the first rank, as its listing has them, without those of the layers."""
    effects = step.programs(*args)[0].effects
    return [effect for effect in effects if isinstance(effect, AllGather | AllToAll)]


KINDS = ("plain", "changed", "masked", "prompt logprobs")


@pytest.mark.one_of(20, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_ranks", "count"), [(2, 3), (4, 2), (4, 5)])
@pytest.mark.parametrize("invariant", [False, True])
def test_the_tokens_are_those_of_the_whole_logits(
    num_ranks: int, count: int, kind: str, invariant: bool
) -> None:
    """To the bit: from the whole logits, which are gathered where they are kept, the sampler draws
    these tokens in one call, with these logprobs; and torch finds these likeliest tokens."""
    options = CHANGED if kind == "changed" else {}
    batch = prompts_of(count, kind)
    top = 3
    step, params = sharded(
        num_ranks, num_logprobs=top, keep_logits=True, batch_invariant=invariant, **options
    )
    _, out = step(params, states_of(num_ranks, count), batch, None)
    table = state_of(CONFIG, count).sampling
    rows = batch.rows
    positions = torch.full((count,), PROMPT - 1)
    with batch_invariant(invariant):
        ids, logprobs = sample_rows(out.logits, table, rows, positions, batch.token_mask)
    assert torch.equal(out.token_ids, ids)
    assert torch.equal(out.logprobs, logprobs)
    assert torch.equal(out.top_ids, out.logits.topk(top).indices)
    torch.testing.assert_close(out.top_logprobs, out.logits.log_softmax(-1).topk(top).values)
    assert torch.equal(out.ranks, 1 + (out.logits > out.logits.gather(1, ids[:, None])).sum(1))
    if kind == "masked":
        allowed = unpack_bits(batch.token_mask, VOCAB) if batch.token_mask is not None else None
        assert allowed is not None
        assert allowed.gather(1, ids[:, None]).all()


@pytest.mark.one_of(6, 2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_ranks", "count"), [(2, 1), (2, 8), (4, 1), (4, 7)])
def test_the_output_is_that_of_the_whole_model(
    num_ranks: int, count: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its fields, of the same shapes and dtypes; prompts are cut where no rank's rows are."""
    monkeypatch.setattr(module, "_TOKENS_AT_ONCE", 7)
    options = CHANGED if kind == "changed" else {}
    if kind == "prompt logprobs":
        options = {**CHANGED, "num_logprobs": 2}
    batch = prompts_of(count, kind)
    whole = random_params(CONFIG, LAYOUT, seed=0, device="cpu", dtype=torch.float32, std=0.3)
    step, params = sharded(num_ranks, **options)
    _, actual = step(params, states_of(num_ranks, count), batch, None)
    _, expected = decoder_stage(CONFIG, LAYOUT, **options)(
        whole, state_of(CONFIG, count), batch, None
    )
    assert isinstance(expected, Output)
    tree_map(lambda x, y: torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4), actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_no_logits_are_gathered_unless_they_are_kept(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the listing: an exchange of logits, and one gathering of tokens, logprobs, likeliest
    tokens and ranks."""
    monkeypatch.setattr(module, "_TOKENS_AT_ONCE", 8)
    columns = -(-VOCAB // num_ranks)
    top = 2
    words = 2 + 1 + 2 * top + top + 2  # an int64 has two
    for count in (1, 2, 5, 8):
        rows = -(-count // num_ranks)
        step, params = sharded(num_ranks, num_logprobs=top)
        arguments = params, states_of(num_ranks, count), prompts_of(count, "plain"), None
        exchange = f"all_to_all dim 0 to 1 among {', '.join(map(str, range(num_ranks)))} [mb 0]: "
        gather = exchange.replace("all_to_all dim 0 to 1", "all_gather dim 0")
        expected = [f"{exchange}x[{rows * num_ranks}, {columns}] float32"]
        expected += [f"{gather}x[{rows}, {words}] float32"] * (count > 1)
        assert list(map(str, collectives(step, *arguments))) == expected
        kept, _ = sharded(num_ranks, num_logprobs=top, keep_logits=True)
        expected += [f"{gather}x[{rows}, {VOCAB}] float32"] * (count > 1)
        assert list(map(str, collectives(kept, *arguments))) == expected
    step, params = sharded(num_ranks)
    arguments = params, states_of(num_ranks, 5), prompts_of(5, "prompt logprobs"), None
    effects = collectives(step, *arguments)  # the requests' five rows, and fifteen tokens by eight
    assert [type(effect) for effect in effects] == [AllToAll, AllGather] * 3
    assert not any(f"{VOCAB}]" in str(effect) for effect in effects)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_logprobs_have_the_derivatives_of_the_whole_model(count: int) -> None:
    """A gathered logprob, and a prompt's, by the head; rows that two ranks have count once."""
    batch = prompts_of(count, "prompt logprobs")
    step, params = sharded(2)
    whole = random_params(CONFIG, LAYOUT, seed=0, device="cpu", dtype=torch.float32, std=0.3)

    def total(out: Any) -> Tensor:
        return out.logprobs.sum() + out.prompt_logprobs.square().sum()

    def shared(*heads: Tensor) -> Tensor:
        params_by_rank = tuple(
            attrs.evolve(one, lm_head=head) for one, head in zip(params, heads, strict=True)
        )
        return total(step(params_by_rank, states_of(2, count), batch, None)[1])

    def alone(head: Tensor) -> Tensor:
        stage = decoder_stage(CONFIG, LAYOUT)
        return total(
            stage(attrs.evolve(whole, lm_head=head), state_of(CONFIG, count), batch, None)[1]
        )

    heads = [rank_params.lm_head for rank_params in params]
    assert whole.lm_head is not None
    leaf = whole.lm_head.clone().requires_grad_()
    alone(leaf).backward()
    actual = torch.cat(func.grad(shared, (0, 1))(*heads))[:VOCAB]
    torch.testing.assert_close(actual, leaf.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.one_of(3)
@pytest.mark.parametrize(("num_ranks", "count"), [(2, 1), (2, 3), (4, 1), (4, 4)])
def test_drafts_are_verified_on_all_rows(num_ranks: int, count: int) -> None:
    """A decode of each request's last token and two drafts: three rows a request."""
    batch = Batch.decode(list(range(count)), query_len=3)
    drafts = torch.tensor([[LAST_TOKEN, 5, 6]] * count).flatten()
    batch = attrs.evolve(batch, input_ids=drafts)
    options: dict[str, Any] = {"num_drafts": 2, "num_logprobs": 2, "logits": scaled_rows}
    step, params = sharded(num_ranks, **options)
    whole = random_params(CONFIG, LAYOUT, seed=0, device="cpu", dtype=torch.float32, std=0.3)
    states = tuple(started(share_config(CONFIG, num_ranks), count) for _ in range(num_ranks))
    _, actual = step(params, states, batch, None)
    _, expected = decoder_stage(CONFIG, LAYOUT, **options)(
        whole, started(CONFIG, count), batch, None
    )
    assert actual.token_ids.shape == (count, 3)
    tree_map(lambda x, y: torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4), actual, expected)


def scaled_rows(logits: Tensor, rows: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
    return logits * extras["scale"][:, None] + rows[:, None] * 0.01


def started(config: Any, count: int) -> State:
    """A state whose requests have a last token, and room for drafts."""
    state = state_of(config, count, drafts=2)
    assert state.drafting is not None
    limits = torch.full_like(state.drafting.limits, 8)
    positions = torch.full_like(state.positions, PROMPT)
    last = torch.full_like(state.last_tokens, 4)
    drafting = attrs.evolve(state.drafting, limits=limits)
    return attrs.evolve(state, positions=positions, last_tokens=last, drafting=drafting)
