"""Drafters, and a first stage that drafts: what is guessed is put in the batch, in the place of its sentinels.

A drafter is `(params, state, batch) -> drafts`: [num_reqs, query_len - 1] int64 of a batch with drafts, negative where
it has none; None of any other. It runs on the device, inside the step, and as part of its graph. Whatever it says, the
tokens that are generated are the same (`weft.stages.verification`); only how many steps they take is not.
"""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.batch import DRAFT, LAST_TOKEN, Batch
from weft.descriptor import BatchDescriptor
from weft.donation import donates
from weft.ops.logits import FEATURES, PENALTIES, SEED, TEMPERATURE
from weft.ops.ngram import find_drafts
from weft.ops.sample import sample
from weft.outputs import IntermediateTensors, Output
from weft.stages.config import ModelConfig
from weft.stages.decoder import embed, head, layers
from weft.stages.params import DecoderParams
from weft.stages.rope import inverse_frequencies, rope_tables
from weft.state import State, resolve

Drafter = Callable[[Any, State, Batch], Tensor | None]
DraftingStage = Callable[
    [tuple[DecoderParams, Any], State, Batch, IntermediateTensors | None], tuple[State, IntermediateTensors | Output]
]


def drafted(stage: Callable[..., Any], drafter: Drafter) -> DraftingStage:
    """A first stage whose batches' drafts are found by a drafter.

    Args:
        stage: of `decoder_stage(..., verifies=True)`.
        drafter: what it calls first.

    Returns:
        A stage whose params are those of both.
    """

    @donates("state")
    def run(
        params: tuple[DecoderParams, Any], state: State, batch: Batch, x: IntermediateTensors | None
    ) -> tuple[State, IntermediateTensors | Output]:
        own, other = params
        drafts = drafter(other, state, batch)
        made: tuple[State, IntermediateTensors | Output]
        made = stage(own, state, batch if drafts is None else fill_in(state, batch, drafts), x)
        return made

    run.__name__ = run.__qualname__ = f"{getattr(stage, '__name__', 'stage')}, drafting"
    return run


def fill_in(state: State, batch: Batch, drafts: Tensor) -> Batch:
    """The batch with drafts in the place of its sentinels, but where a request may have none: behind its last token,
    and where it has penalties, for then each token changes what the next is drawn from.

    Args:
        drafts: [num_reqs, query_len - 1] int64; negative: none.
    """
    assert state.drafting is not None, "a stage that verifies has a state with drafting"
    rows, count = batch.rows, drafts.shape[1]
    place = state.positions[rows][:, None] + torch.arange(1, count + 1, device=rows.device)
    useful = (drafts >= 0) & (place < state.drafting.limits[rows][:, None] - 1)
    useful &= (state.sampling.ints[rows, FEATURES] & PENALTIES)[:, None] == 0
    ids = batch.input_ids.view(-1, count + 1)
    filled = torch.cat((ids[:, :1], torch.where(useful, drafts, DRAFT)), 1)
    return attrs.evolve(batch, input_ids=filled.flatten())


def num_drafts(batch: Batch) -> int:
    """Drafts of each request of a batch."""
    return (batch.descriptor.query_len or 1) - 1


def ngram_drafter(shortest: int, longest: int) -> Drafter:
    """Prompt lookup: what followed a request's last tokens where they stood before (`weft.ops.ngram.find_drafts`).

    Args:
        shortest, longest: tokens to be found again.
    """

    def find(params: None, state: State, batch: Batch) -> Tensor | None:
        assert state.drafting is not None, "a stage that verifies has a state with drafting"
        if not num_drafts(batch):
            return None
        tokens, lengths = state.drafting.tokens[batch.rows], state.positions[batch.rows] + 1
        return find_drafts(tokens, lengths, num_drafts(batch), shortest, longest)

    return find


def model_drafter(config: ModelConfig) -> Drafter:
    """A model of the same vocabulary, all of whose layers run here, before the stage's own.

    Its cache holds what the stage's does, in the same pages: it reads each batch. Of a batch with drafts it makes them
    one by one, each with the temperature and the noise with which the request draws: a draft is right oftener than one
    drawn by itself. (Daliri et al., as in `weft.stages.verification`.)

    Args:
        config: of the draft model; its params are the drafter's.
    """
    _, factor = inverse_frequencies(config.rope, config.head_dim, config.max_position_embeddings)

    def read(params: DecoderParams, state: State, batch: Batch) -> tuple[Tensor, Tensor]:
        """The last layer's states and the positions of the batch's tokens, whose keys and values are written."""
        assert state.drafting is not None, "a stage that verifies has a state with drafting"
        assert state.drafting.kv_pages is not None, "it drafts with a model"
        resolved = resolve(state, attrs.evolve(batch, descriptor=attrs.evolve(batch.descriptor, num_active_loras=0)))
        known = attrs.evolve(resolved, input_ids=resolved.input_ids.clamp(min=0))  # an embedded token has no id
        hidden = embed(params, known, None)
        tables = rope_tables(params.inv_freq, resolved.positions, factor, hidden.dtype)
        return layers(config, params, state.drafting.kv_pages, resolved, tables, hidden), resolved.positions

    def draft(params: DecoderParams, state: State, batch: Batch) -> Tensor | None:
        count, rows = num_drafts(batch), batch.rows
        if not count:
            read(params, state, batch)
            return None
        temperature, seeds = state.sampling.floats[rows, TEMPERATURE], state.sampling.ints[rows, SEED]
        single, drafts = _single(batch), list[Tensor]()
        for ahead in range(count + 1):  # the last draft is only read, for the cache to hold it if it is right
            at = attrs.evolve(state, positions=state.positions + ahead)
            hidden, positions = read(params, at, single)
            if ahead < count:
                drafts.append(sample(head(config, params, hidden), temperature, seeds, positions)[0])
                single = attrs.evolve(single, input_ids=drafts[-1])
        return torch.stack(drafts, 1)

    return draft


def _single(batch: Batch) -> Batch:
    """The last token of each request of a batch with drafts, as a batch."""
    count = len(batch.rows)
    return Batch(
        BatchDescriptor.uniform(count),
        batch.rows,
        torch.full_like(batch.rows, LAST_TOKEN),
        torch.arange(count + 1, dtype=torch.int32, device=batch.rows.device),
        batch.samples,
    )
