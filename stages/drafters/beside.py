"""Whole models that read the same tokens as another one, in its steps, with KV pages of their own:
models in `beside`, and draft models."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import kind_of
from weft.batches.batch import ResolvedBatch
from weft.batches.state import State
from weft.errors import ProgramError
from weft.stages.attention.rope import inverse_frequencies, rope_tables
from weft.stages.config import ModelConfig
from weft.stages.custom.functions import Beside, LogitsAt, StageFunctions
from weft.stages.decoder import BLOCKS
from weft.stages.head import head
from weft.stages.inputs import embed
from weft.stages.layers import run_layers
from weft.stages.layout import is_whole
from weft.stages.params import DecoderParams, head_fault
from weft.torchapi.private import to_device

# `(params, kv_pages, batch) -> (hidden, kv_pages)`: a second model reads the tokens that a stage
# reads.
Read = Callable[[DecoderParams, Tensor, ResolvedBatch], tuple[Tensor, Tensor]]


def reader(config: ModelConfig, functions: StageFunctions, device: torch.device) -> Read:
    """A second, whole model in a step, whose parameters are on `device`.

    It reads the same tokens, and keeps keys and values in pages of its own, at the same places as
    the first model. A token that is given as an embedding has no id, and is read as token 0;
    a prompt with images is read as text.
    """
    frequencies, factor = inverse_frequencies(
        config.rope, config.head_dim, config.max_position_embeddings
    )
    frequencies = to_device(frequencies, device)
    section = config.rope.mrope_section

    def read(
        params: DecoderParams, kv_pages: Tensor, batch: ResolvedBatch
    ) -> tuple[Tensor, Tensor]:
        # Sentinels and embedded tokens have negative ids; adapters are those of the main model.
        clamped_batch = attrs.evolve(
            batch, input_ids=batch.input_ids.clamp(min=0), adapters=None, active_adapters=None
        )
        if (fault := head_fault(params, config.tie_word_embeddings)) is not None:
            raise ProgramError("a model that reads beside another", *fault)
        hidden = embed(params, clamped_batch, None)
        if section is None:
            places = batch.positions
        else:
            # Text: time, height and width are one position.
            places = batch.positions[:, None].expand(-1, 3)
        tables = rope_tables(frequencies, places, factor, hidden.dtype, section)
        return run_layers(
            config, BLOCKS, params, kv_pages, clamped_batch, tables, hidden, functions
        )

    return read


def readers_beside(
    models: Mapping[str, tuple[ModelConfig, DecoderParams, StageFunctions]], device: torch.device
) -> Beside:
    """A function that runs the models beside a last stage, with their parameters on `device`."""
    reads = {
        name: reader(config, functions, device) for name, (config, _, functions) in models.items()
    }

    def read(state: State, batch: ResolvedBatch) -> tuple[State, dict[str, LogitsAt]]:
        pages = dict[str, Tensor]()
        logits = dict[str, LogitsAt]()
        for name, (config, params, _) in models.items():
            hidden, pages[name] = reads[name](params, state.beside[name], batch)
            logits[name] = functools.partial(_logits_at, config, params, hidden)
        if any(new_pages is not state.beside[name] for name, new_pages in pages.items()):
            state = attrs.evolve(state, beside=pages)
        return state, logits

    return read


def _logits_at(
    config: ModelConfig, params: DecoderParams, hidden: Tensor, tokens: Tensor | slice
) -> Tensor:
    return head(config, params, hidden[tokens])


def check_beside(call: str, model: Any, beside: Mapping[str, Any]) -> None:
    """Raise ProgramError unless each of these is a `Model` that can run beside this one."""
    size = model.config.vocab_size
    kind = type(model)
    vocabulary = f"of {size} tokens, whose functions read no extras"
    instead = f"weft.load(folder, {str(model.device)!r}): a whole model, here, {vocabulary}"
    for name, other in beside.items():
        problem = kind_of(other)
        if isinstance(other, kind):
            functions = other.functions
            more = (
                functions.extras,
                functions.token_extras,
                functions.captures,
                functions.carries,
                functions.beside,
                functions.logits,
                other.transforms,
            )
            place = other.device, is_whole(other.layout, other.shard), other.config.vocab_size
            if not any(more) and place == (model.device, True, size):
                continue
            if any(more):
                having = f" with {functions}, and {len(other.transforms)} transforms"
            else:
                having = ""
            problem = f"{other!r} of {other.config.vocab_size} tokens{having}"
        raise ProgramError(f"{call} with beside={{{name!r}: ...}}", problem, instead)
