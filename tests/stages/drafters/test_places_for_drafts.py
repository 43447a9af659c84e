"""Places for drafts in a batch: filled where a stage drafts, and refused on the host where nothing
does."""

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st
from refusal import refused

import weft
from weft import Limits
from weft.batches.batch import Batch
from weft.batches.state import Drafting, advance
from weft.errors import DescriptorError, RequestError
from weft.proofs._strategies.engine.engines import small_model
from weft.stages.inputs import NO_DRAFTS
from weft.transforms import MODES, make_runner, make_state
from weft.transforms.engine.options import Speculation, with_drafter
from weft.transforms.engine.steps.step import graph_step
from weft.transforms.graphs.ladder import make_ladder
from weft.transforms.pipelines.pipeline import compose

PROMPT = (1, 2, 3, 1, 2)
LENGTH = 20


@attrs.frozen
class Case:
    """A step after a prompt: with so many drafts in a stage, tokens of a request in a batch, and in
    a graph mode."""

    num_drafts: int
    query_len: int
    mode: str


def cases() -> st.SearchStrategy[Case]:
    return st.builds(Case, st.integers(0, 3), st.integers(1, 4), st.sampled_from(MODES))


def next_tokens(case: Case) -> list[int]:
    """The tokens that a request keeps of one step after its prompt."""
    model = small_model()
    stages: list[Any] = [model.stage(model.layout, num_drafts=case.num_drafts)]
    state = make_state(model, [model.layout], [LENGTH])
    params: Any = (model.params,)
    if case.num_drafts:
        stages = with_drafter(Speculation(case.num_drafts), stages)
        drafting = Drafting.zeros(2, max_tokens=32)
        drafting.admit(torch.tensor([0]), [PROMPT], [LENGTH])
        state = (attrs.evolve(state[0], drafting=drafting),)
        params = ((model.params, None),)
    limits = Limits(2, 16, query_lens=tuple(range(1, case.num_drafts + 2)))
    step = graph_step(
        compose(stages, advance=advance), make_ladder(case.mode, limits, strict=False), None
    )
    state, first = step(params, state, Batch.ragged([0], [PROMPT]))
    _, out = step(params, state, Batch.decode([0], query_len=case.query_len))
    count = 1 if out.num_tokens is None else int(out.num_tokens[0])
    return [*first.token_ids.flatten()[:1].tolist(), *out.token_ids.flatten()[:count].tolist()]


def plain_tokens() -> list[int]:
    [said] = weft.generate(small_model(), [list(PROMPT)], max_tokens=6)
    return said.token_ids


def check(case: Case) -> None:
    """The tokens are those without drafts, or the batch is refused, if nothing drafts."""
    if case.num_drafts == 0 and case.query_len > 1:
        with pytest.raises(DescriptorError, match="with places for drafts, where nothing drafts"):
            next_tokens(case)
        return
    tokens = next_tokens(case)
    assert tokens == plain_tokens()[: len(tokens)]


@given(cases())
@settings(max_examples=30, deadline=None)
def test_places_for_drafts_are_filled_or_refused(case: Case) -> None:
    check(case)


@pytest.mark.nightly
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check, an index of the embedding is that of no token."""
    monkeypatch.setattr("weft.stages.decoder.check_drafts", lambda name, descriptor: None)

    @given(cases())
    @settings(max_examples=60, deadline=None, database=None)
    def find(case: Case) -> None:
        check(case)

    with pytest.raises((AssertionError, IndexError, RuntimeError, BaseExceptionGroup)):
        find()


def test_the_refusals_say_what_to_write() -> None:
    model = small_model()
    runner = make_runner(model, Limits(2, 16), mode="none")
    state = make_state(model, runner.layouts, lengths=[LENGTH])
    problem = "a batch of query_len=2, with places for drafts, where nothing drafts"
    with refused(DescriptorError, "stage 0 of 1(params, state, batch, x)", problem, NO_DRAFTS):
        runner.step(runner.params, state, Batch.decode([0], query_len=2))
    problem = "limits.query_lens=(1, 3), where nothing drafts"
    with refused(DescriptorError, "make_runner(model, limits, num_stages=1)", problem, NO_DRAFTS):
        make_runner(model, Limits(2, 16, query_lens=(1, 3)))
    stage = model.stage(model.layout, num_drafts=1)
    with pytest.raises(RequestError, match="a state without `drafting`"):
        stage(
            model.params,
            make_state(model, [model.layout], [LENGTH])[0],
            Batch.decode([0], query_len=2),
            None,
        )
