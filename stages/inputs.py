"""The inputs of a decoder's stage: the checks of a call, the resolved batch, and the embeddings of
its tokens."""

from collections.abc import Mapping

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.batches.batch import Batch, ResolvedBatch
from weft.batches.descriptor import BatchDescriptor
from weft.batches.outputs import IntermediateTensors
from weft.batches.state import State, resolve
from weft.errors import DescriptorError, ProgramError, WeftError
from weft.ops.requests import EMBEDDED
from weft.stages.attention.rope import position_fault
from weft.stages.layout import StageLayout
from weft.stages.params import DecoderParams, head_fault
from weft.stages.shares import TensorRanks

# The remedy in errors about places for drafts.
NO_DRAFTS = "query_len=1, as in weft.Batch.decode(rows); weft.Engine(model, speculation=...) drafts"


def check_call(
    name: str,
    layout: StageLayout,
    params: DecoderParams,
    batch: Batch,
    x: IntermediateTensors | None,
    has_mrope: bool,
    is_tied: bool,
) -> None:
    """Raise ProgramError for the parameters of another stage, or for a later stage without `x`;
    DescriptorError for a batch of another stage, or for positions in a model without mRoPE."""
    kind: type[WeftError] = ProgramError
    owned = params.embed_tokens is not None, params.norm is not None, len(params.layers)
    if owned != (layout.first, layout.last, len(layout.layers)):
        parts = [*["the embedding"] * owned[0], f"{owned[2]} layers", *["the head"] * owned[1]]
        problem = f"params of {', '.join(parts)}"
        instead = (
            f"this stage's own, of layers {layout.start} to {layout.stop - 1}:"
            f" Runner.params[{layout.index}]"
        )
    elif fault := head_fault(params, is_tied):
        problem, instead = fault
    elif x is None and not layout.first:
        problem = "x is None"
        instead = "what the stage before returned"
    elif fault := position_fault(batch, x, has_mrope):
        kind, (problem, instead) = DescriptorError, fault
    else:
        return
    raise kind(f"{name}(params, state, batch, x)", problem, instead)


def check_drafts(name: str, descriptor: BatchDescriptor) -> None:
    """Raise DescriptorError for a batch with places for drafts, in a stage without a drafter."""
    # The embedding would look up the negative id of a draft: an IndexError on the CPU, and a failed
    # assertion on the device with CUDA.
    if (descriptor.query_len or 1) > 1:
        problem = (
            f"a batch of query_len={descriptor.query_len}, with places for drafts, where nothing"
            " drafts"
        )
        raise DescriptorError(f"{name}(params, state, batch, x)", problem, NO_DRAFTS)


def resolve_inputs(
    name: str, defaults: Mapping[str, Tensor], state: State, batch: Batch
) -> ResolvedBatch:
    """Like `resolve`, with the per-token inputs. Indices are not checked on the host, so an
    IndexError gets a note that says what to look for."""
    try:
        resolved = resolve(state, batch)
    except IndexError as error:
        (rows, pages), size = state.block_table.shape, state.kv_pages.shape[3]
        error.add_note(
            f"a row or a token of the batch beyond the state, which has rows 0 to {rows - 2} of at"
            f" most {pages * size} tokens: name rows that were admitted, or make room"
            " (make_state(..., lengths=[...]), State.zeros(...))"
        )
        raise
    if defaults:
        return attrs.evolve(resolved, token_extras=_token_extras(name, defaults, batch))
    return resolved


def _token_extras(name: str, defaults: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """The per-token inputs [num_tokens, ...] of the batch, by name."""
    if unknown := batch.token_extras.keys() - defaults.keys():
        instead = f"the names that the stages declare: {', '.join(map(repr, defaults))}"
        raise DescriptorError(
            f"{name}(params, state, batch, x)", f"token_extras of {sorted(unknown)}", instead
        )
    extras = batch.token_extras
    count = len(batch.input_ids)
    return {
        key: extras[key].values if key in extras else x.expand(count, *x.shape)
        for key, x in defaults.items()
    }


def embed(
    params: DecoderParams,
    batch: ResolvedBatch,
    inputs_embeds: Tensor | None,
    ranks: TensorRanks | None = None,
) -> Tensor:
    """The embeddings [num_tokens, hidden_size] of the batch's tokens; where a token has no id,
    taken from `inputs_embeds`. First stage only."""
    assert params.embed_tokens is not None, "only the first stage's parameters hold the embedding"
    look_up = F.embedding if ranks is None else ranks.embed
    if inputs_embeds is None:
        return look_up(batch.input_ids, params.embed_tokens)
    # EMBEDDED is negative: clamped to a valid row, whose embedding `where` discards.
    token_embeds = look_up(batch.input_ids.clamp(min=0), params.embed_tokens)
    return torch.where((batch.input_ids == EMBEDDED)[:, None], inputs_embeds, token_embeds)
