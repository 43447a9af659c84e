"""Drafters, and a first stage that drafts.

A drafter is `(params, state, batch) -> batch`; it replaces the batch's sentinels by drafts. It runs
on the device, inside the step, as a part of its graph. The drafts do not change the generated
tokens (`weft.stages.head`), only the number of steps.
"""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.batches.batch import SCRATCH_ROW, Batch, ResolvedBatch, continues, owners_of
from weft.batches.descriptor import BatchDescriptor
from weft.batches.outputs import IntermediateTensors, Output
from weft.batches.state import State, resolve
from weft.errors import DerivativeError
from weft.ops.requests import DRAFT, LAST_TOKEN
from weft.ops.sampling.logits import FEATURES, PENALTIES, SEED, TEMPERATURE
from weft.ops.sampling.ngram import find_drafts
from weft.ops.sampling.sample import sample
from weft.stages.config import ModelConfig
from weft.stages.custom.functions import OWN, StageFunctions
from weft.stages.drafters.beside import reader
from weft.stages.head import Extras, changed_logits, extras_of, head
from weft.stages.params import DecoderParams
from weft.values.donation import donates

Drafter = Callable[[Any, State, Batch], Batch]
DraftingStage = Callable[
    [tuple[DecoderParams, Any], State, Batch, IntermediateTensors | None],
    tuple[State, IntermediateTensors | Output],
]


def drafted(stage: Callable[..., Any], drafter: Drafter) -> DraftingStage:
    """A first stage that begins by calling a drafter on its batch.

    Args:
        stage: from `decoder_stage(..., num_drafts=...)`.
        drafter: from `ngram_drafter` or `model_drafter`, or a custom one.

    Returns:
        A stage whose params are the pair (params of the stage, params of the drafter).
    """

    @donates("state")
    def run(
        params: tuple[DecoderParams, Any], state: State, batch: Batch, x: IntermediateTensors | None
    ) -> tuple[State, IntermediateTensors | Output]:
        model_params, other = params
        result: tuple[State, IntermediateTensors | Output] = stage(
            model_params, state, drafter(other, state, batch), x
        )
        return result

    run.__name__ = run.__qualname__ = f"{getattr(stage, '__name__', 'stage')}, drafting"
    return run


def fill_in(state: State, batch: Batch, drafts: Tensor) -> Batch:
    """The batch with drafts in place of its sentinels. A sentinel stays where no draft is allowed:
    at the very last token of a request, and in a request with penalties, where each token changes
    the distribution of the next.

    Args:
        drafts: [num_reqs, k] int64, in order; negative: no draft.
    """
    assert state.drafting is not None, "a stage that verifies has a state with drafting"
    owner, place = owners_of(batch)
    row = batch.rows[owner]
    draft = drafts[owner, (place.to(torch.int64) - 1).clamp(0, drafts.shape[1] - 1)]
    useful = (batch.input_ids == DRAFT) & (draft >= 0)
    useful &= state.positions[row] + place < state.drafting.limits[row] - 1
    useful &= (state.sampling.ints[row, FEATURES] & PENALTIES) == 0
    return attrs.evolve(batch, input_ids=torch.where(useful, draft, batch.input_ids))


def ngram_drafter(num_drafts: int, shortest: int, longest: int) -> Drafter:
    """Prompt lookup: drafts are the tokens that followed an earlier occurrence of a request's last
    tokens (`weft.ops.sampling.ngram.find_drafts`).

    Args:
        num_drafts: the most drafts of a request in a batch.
        shortest, longest: the least and the most last tokens to look up.
    """

    def look_up(params: None, state: State, batch: Batch) -> Batch:
        assert state.drafting is not None, "a stage that verifies has a state with drafting"
        count = (batch.descriptor.query_len or num_drafts + 1) - 1
        if not count:
            return batch
        tokens = state.drafting.tokens[batch.rows]
        # `positions` counts the tokens in the cache, and the last sampled token is not there yet.
        lengths = state.positions[batch.rows] + 1
        return fill_in(state, batch, find_drafts(tokens, lengths, count, shortest, longest))

    return look_up


def model_drafter(
    num_drafts: int,
    config: ModelConfig,
    functions: StageFunctions = OWN,
    *,
    device: torch.device | str = "cpu",
) -> Drafter:
    """A draft model of the same vocabulary, which runs whole before the stage's own layers.

    It drafts one token after another, each with the request's temperature and noise: such drafts
    are right more often than independent samples (Daliri et al., as in `weft.stages.head`). After
    NaN logits, it drafts no more in this step. Then it reads the tokens that the stage reads, so
    that its cache, at the same places, holds the same tokens.

    Args:
        num_drafts: the most drafts of a request in a batch.
        config: the draft model's configuration; the drafter's params are the draft model's.
        functions: the draft model's custom functions.
        device: the device of the draft model's parameters.
    """
    read_with = reader(config, functions, torch.device(device))

    def read(params: DecoderParams, state: State, batch: Batch) -> tuple[Tensor, ResolvedBatch]:
        """The last layer's hidden states, and the batch resolved; writes the tokens' keys and
        values."""
        assert state.drafting is not None, "a stage that verifies has a state with drafting"
        assert state.drafting.kv_pages is not None, "it drafts with a model"
        # Without adapters, which belong to the main model.
        resolved = resolve(
            state,
            attrs.evolve(batch, descriptor=attrs.evolve(batch.descriptor, num_active_loras=0)),
        )
        hidden, pages = read_with(params, state.drafting.kv_pages, resolved)
        if pages is not state.drafting.kv_pages:
            problem = "a stage that drafts with a model"
            instead = "the same without speculation, which samples the same"
            raise DerivativeError("a derivative, or a transform of torch.func", problem, instead)
        return hidden, resolved

    def draft(params: DecoderParams, state: State, batch: Batch) -> Batch:
        count = (batch.descriptor.query_len or num_drafts + 1) - 1
        rows = batch.rows
        temperature = state.sampling.floats[rows, TEMPERATURE]
        seeds = state.sampling.ints[rows, SEED]
        single = _last_tokens(batch)
        drafts = list[Tensor]()
        logprobs = list[Tensor]()
        for ahead in range(count):
            at = attrs.evolve(state, positions=state.positions + ahead)
            hidden, resolved = read(params, at, single)
            logits = head(config, params, hidden)
            if functions.logits is not None:
                logits = changed_logits(
                    functions.logits, logits, resolved.rows, Extras(extras_of(resolved))
                )
            drawn, logprob = sample(logits, temperature, seeds, resolved.positions)
            drafts.append(drawn)
            logprobs.append(logprob)
            single = attrs.evolve(single, input_ids=drawn)
        if drafts:
            filled = fill_in(state, batch, _numbers(drafts, logprobs))
        else:
            filled = batch
        # The loop reads neither the last draft nor the tokens of requests that read their prompts.
        read(params, state, filled)
        return filled

    return draft


def _numbers(drafts: list[Tensor], logprobs: list[Tensor]) -> Tensor:
    """The drafts [num_reqs, k]; none from the first one that was sampled from NaN logits. A NaN
    that a wrong draft leaves in the model's cache would reach the tokens before it, too."""
    return torch.stack(drafts, 1).masked_fill(torch.stack(logprobs, 1).cumsum(1).isnan(), DRAFT)


def _last_tokens(batch: Batch) -> Batch:
    """A batch of the last token of each request that goes on; the other requests are padding."""
    count = len(batch.rows)
    return Batch(
        BatchDescriptor.uniform(count),
        torch.where(continues(batch), batch.rows, SCRATCH_ROW),
        torch.full_like(batch.rows, LAST_TOKEN),
        torch.arange(count + 1, dtype=torch.int32, device=batch.rows.device),
        batch.samples,
    )
