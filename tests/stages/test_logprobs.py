"""Logprobs of likely tokens and of prompts' tokens, against a softmax over everything; and through
a decoder's step."""

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import weft
from weft.batches.batch import Batch
from weft.batches.descriptor import BatchDescriptor
from weft.batches.outputs import Output
from weft.batches.padding import pad, unpad
from weft.batches.sampling import SamplingParams
from weft.batches.state import advance
from weft.ops.requests import LAST_TOKEN
from weft.ops.sampling.logits import pack_bits
from weft.ops.sampling.sample import sample, token_logprobs
from weft.proofs import assert_equal
from weft.stages import head as module
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.head import prompt_logprobs, ranks_of, top_logprobs
from weft.stages.model import Model
from weft.transforms.engine.setup import Runner, make_runner, make_state
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.ladder import Limits
from weft.transforms.pipelines.microbatch import microbatch
from weft.transforms.pipelines.parts import split
from weft.transforms.pipelines.pipeline import compose

FAST = settings(deadline=None, max_examples=30)
COUNT = 3


@FAST
@given(st.integers(0, 5), st.integers(0, 999), st.integers(1, 9))
def test_the_top_is_the_softmaxs(rows: int, seed: int, count: int) -> None:
    logits = torch.randn(rows, 50, generator=torch.Generator().manual_seed(seed)) * 5
    ids, logprobs = sample(logits, torch.ones(rows), torch.arange(rows), torch.arange(rows))
    top_ids, top, ranks = top_logprobs(logits, ids, logprobs, count)
    expected = logits.log_softmax(-1).topk(count)
    assert torch.equal(top_ids, expected.indices)
    torch.testing.assert_close(top, expected.values, atol=1e-5, rtol=1e-5)
    places = logits.argsort(-1, descending=True)  # no two logits are equal
    assert ranks.tolist() == [
        order.tolist().index(token) + 1 for order, token in zip(places, ids.tolist(), strict=True)
    ]


def test_tokens_that_tie_share_a_rank() -> None:
    logits = torch.tensor([[2.0, 3.0, 2.0, -torch.inf, 3.0]]).expand(5, 5)
    assert ranks_of(logits.gather(1, torch.arange(5)[:, None]), logits).tolist() == [3, 1, 3, 5, 1]


def test_batch_invariant_the_likeliest_depend_on_no_count() -> None:
    """Nor on the chosen token: decoded, they are those of a prompt's token."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-9, 9, (7, 4001), generator=generator).to(torch.bfloat16)  # many tie
    chosen = torch.randint(4001, (7,), generator=generator)
    with weft.batch_invariant():
        results = [
            top_logprobs(logits, chosen, token_logprobs(logits, chosen[:, None])[:, 0], n)
            for n in (3, 20, 800)
        ]
        for ids, logprobs, _ in results:
            assert torch.equal(ids[:, :3], results[0][0])
            assert torch.equal(logprobs[:, :3], results[0][1])
            assert torch.equal(logprobs, token_logprobs(logits, ids))
    ids = results[2][0]
    best = logits.gather(1, ids)
    assert (best[:, 1:] <= best[:, :-1]).all()
    assert (ids[:, 1:] > ids[:, :-1])[best[:, 1:] == best[:, :-1]].all()


@FAST
@given(st.integers(0, 20), st.integers(0, 4), st.integers(0, 99))
def test_prompts_are_cut_and_put_together(tokens: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    normed = torch.randn(tokens, 6, generator=generator)
    head = torch.randn(30, 6, generator=generator)
    targets = torch.randint(0, 30, (tokens,), generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TOKENS_AT_ONCE", 7)
        logprobs, ids, best, ranks = prompt_logprobs(normed, head, targets, count)
    expected = (normed @ head.t()).log_softmax(-1)
    torch.testing.assert_close(logprobs, expected.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(best, expected.topk(count).values)
    assert ids.shape == (tokens, count)
    torch.testing.assert_close(expected.gather(1, ids), best)
    assert torch.equal(ranks, (expected > expected.gather(1, targets[:, None])).sum(-1) + 1)


@pytest.fixture(scope="module")
def model() -> Model:
    return weft.load(DEMO, "cpu")


PROMPTS = ([65, 32, 108, 105, 115, 116], [73, 110, 32, 80])


def wanting(batch: Batch, targets: list[int]) -> Batch:
    return attrs.evolve(batch, targets=torch.tensor(targets))


def chunks() -> list[Batch]:
    """Two prompts in three batches, each token with the one after it; the last batch decodes."""
    first, second = PROMPTS
    return [
        wanting(Batch.ragged([0], [first[:4]], samples=[False]), first[1:5]),
        wanting(Batch.ragged([1, 0], [second, first[4:]]), [*second[1:], 0, first[5], 0]),
        wanting(Batch.ragged([0, 1], [[LAST_TOKEN], [LAST_TOKEN]]), [0, 0]),
    ]


def ready(model: Model, num_stages: int = 1) -> tuple[Runner, tuple[weft.State, ...]]:
    runner = make_runner(
        model, Limits(2, 16), num_stages=num_stages, mode="none", num_logprobs=COUNT
    )
    return runner, make_state(model, runner.layouts, [16, 16])


def logits_by_hand(model: Model) -> list[Tensor]:
    """For each prompt, the logits after every token, from one run per token."""
    runner = make_runner(model, Limits(1, 16), mode="none", keep_logits=True)
    rows = []
    for prompt in PROMPTS:
        prompt_logits = []
        for end in range(1, len(prompt) + 1):
            batch = Batch.ragged([0], [prompt[:end]])
            _, out = runner.step(runner.params, make_state(model, runner.layouts, [16]), batch)
            prompt_logits.append(out.logits)
        rows.append(torch.cat(prompt_logits))
    return rows


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_prompts_tokens_in_chunks(model: Model, num_stages: int) -> None:
    runner, state = ready(model, num_stages)
    outs: list[Output] = []
    for batch in chunks():
        state, out = runner.step(runner.params, state, batch)
        outs.append(out)
    logprobs = torch.cat([out.prompt_logprobs for out in outs if out.prompt_logprobs is not None])
    top = torch.cat(
        [out.prompt_top_logprobs for out in outs if out.prompt_top_logprobs is not None]
    )
    ranks = torch.cat([out.prompt_ranks for out in outs if out.prompt_ranks is not None])
    first, second = (x.log_softmax(-1) for x in logits_by_hand(model))
    # Each token's place in the three batches, without the last token
    places = {
        0: [0, 1, 2, 3, 8],
        1: [4, 5, 6],
    }
    for row, expected in ((0, first), (1, second)):
        targets = torch.tensor(PROMPTS[row][1:])
        expected_logprobs = expected[:-1].gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(logprobs[places[row]], expected_logprobs, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            top[places[row]], expected[:-1].topk(COUNT).values, atol=1e-4, rtol=1e-4
        )
        assert torch.equal(
            ranks[places[row]], ranks_of(expected[:-1].gather(1, targets[:, None]), expected[:-1])
        )


def test_batches_with_targets_and_masks_are_padded_cut_and_captured(model: Model) -> None:
    runner, state = ready(model)
    whole = compose(runner.stages, advance=advance)
    parts = microbatch(whole, 2)
    graph = graphify(whole, ladder=[BatchDescriptor(16, 4)])
    _, cut = ready(model)
    _, captured = ready(model)
    for batch in chunks():
        allowed = pack_bits(range(32, 90), model.config.vocab_size)
        batch = attrs.evolve(
            batch, token_mask=allowed.expand(batch.descriptor.num_reqs, -1).contiguous()
        )
        state, out = whole(runner.params, state, batch)
        cut, cut_out = parts(runner.params, cut, batch)
        captured, replayed = graph(runner.params, captured, batch)
        assert_equal("micro-batches", (cut_out, cut), (out, state), exact=False)
        assert_equal("replay", replayed, out, exact=False)
        assert bool(((out.token_ids >= 32) & (out.token_ids < 90)).all())
        assert out.top_ids is not None
        assert out.top_ids.shape == (batch.descriptor.num_reqs, COUNT)
    assert graph.cache_info().captures == 1


def test_batches_with_a_mask_and_without_have_different_graphs(model: Model) -> None:
    runner, state = ready(model)
    _, other = ready(model)
    whole = compose(runner.stages, advance=advance)
    graph = graphify(whole, ladder=[BatchDescriptor(16, 4)])
    allowed = pack_bits([90, 91], model.config.vocab_size)
    plain = Batch.ragged([0, 1], [[65], [66]])
    for batch in (plain, attrs.evolve(plain, token_mask=allowed.expand(2, -1).contiguous()), plain):
        state, out = whole(runner.params, state, batch)
        other, replayed = graph(runner.params, other, batch)
        assert_equal("replay", replayed, out, exact=False)
        masked = batch.token_mask is not None
        assert (
            set(out.token_ids.tolist()) <= {90, 91}
            if masked
            else not set(out.token_ids.tolist()) & {90, 91}
        )
    assert graph.cache_info().captures == 2


def test_padding_of_a_mask_allows_all_and_that_of_targets_is_a_token(model: Model) -> None:
    batch = attrs.evolve(chunks()[0], token_mask=torch.zeros(1, 4, dtype=torch.int32))
    wide = pad(batch, BatchDescriptor(6, 2))
    assert wide.token_mask is not None
    assert wide.token_mask.tolist() == [[0] * 4, [-1] * 4]
    assert wide.targets is not None
    assert wide.targets.tolist() == [*PROMPTS[0][1:5], 0, 0]
    assert_equal("there and back", unpad(wide, batch.descriptor), batch)
    halves = split(chunks()[1], 2)
    assert [part.targets.tolist() for part in halves if part.targets is not None] == [
        [110, 32, 80, 0],
        [116, 0],
    ]


def test_plain_batches_return_none_of_it(model: Model) -> None:
    runner = make_runner(model, Limits(1, 16), mode="none")
    state = make_state(model, runner.layouts, [16], [SamplingParams(temperature=1.0, seed=1)])
    _, out = runner.step(runner.params, state, Batch.ragged([0], [PROMPTS[0]]))
    fields = [f.name for f in attrs.fields(Output) if f.name != "captured"]
    assert [getattr(out, name) is None for name in fields] == [False, False, *[True] * 10]
    assert out.captured == {}
