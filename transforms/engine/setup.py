"""What an engine is made of: its limits, resolved against a model and a device; its steps; the checks of requests."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from weft.effects import Schema, TensorSchema
from weft.errors import RequestError
from weft.sampling import SamplingParams
from weft.sampling_table import MAX_BIASED
from weft.stages.adapters import Adapter
from weft.stages.decoder import decoder_stage
from weft.stages.layout import StageLayout, split_layers
from weft.stages.model import Model, stage_params
from weft.state import State, advance
from weft.transforms.engine.scheduler import Budget
from weft.transforms.engine.steppers import Stepped, Stepper, Streamed
from weft.transforms.engine.work import advance_work, edited
from weft.transforms.graphify import graphify
from weft.transforms.ladder import Limits, lora_rungs, make_ladder
from weft.transforms.pipeline import compose, pipeline
from weft.transforms.transports import Transport

SPLIT_AT = ("weft::paged_attention",)
"""Where a decoder is cut into pieces."""
_MEMORY_SHARE = 0.85
"""Of a GPU's free memory, for the KV cache; graphs and temporaries get the rest."""
_CPU_BYTES = 2**30
"""Of the KV cache on a CPU, at most."""
_MAX_CONTEXT = 4096


@attrs.frozen(kw_only=True)
class EngineLimits:
    """What an engine holds at most.

    Args:
        max_num_reqs: requests under way at once.
        max_num_tokens: tokens of a step.
        max_model_len: tokens of a request, those to generate included; None: what the model has positions for, at most
            4,096.
        page_size: tokens a page.
        num_pages: of the KV cache; None: what memory there is, and no more than all rows could fill.
        num_cohorts: groups of requests that are stepped in turn; None: one a stage.
        mixed: whether a step may hold decodes and prompts.
    """

    max_num_reqs: int = 64
    max_num_tokens: int = 2048
    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    num_cohorts: int | None = None
    mixed: bool = False

    def resolve(self, model: Model, num_stages: int) -> "Resolved":
        """These, for a model on its device.

        Raises:
            RequestError: no room for a request.
        """
        length = self.max_model_len or min(model.config.max_position_embeddings, _MAX_CONTEXT)
        max_pages = -(-length // self.page_size)
        budget = Budget(self.max_num_reqs, self.max_num_tokens, max_pages, self.num_cohorts or num_stages, self.mixed)
        most = max_pages * self.max_num_reqs
        num_pages = self.num_pages or min(most, _pages_in_memory(model, num_stages, self.page_size))
        return Resolved(budget, num_pages, self.page_size)


@attrs.frozen
class Resolved:
    """Limits in numbers."""

    budget: Budget
    num_pages: int
    page_size: int


def _pages_in_memory(model: Model, num_stages: int, page_size: int) -> int:
    config = model.config
    layers = max(len(layout.layers) for layout in split_layers(config.num_layers, num_stages))
    page = 2 * layers * page_size * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    if model.device.type == "cpu":
        return max(1, _CPU_BYTES // page)
    free, _ = torch.cuda.mem_get_info(model.device)
    return max(1, int(_MEMORY_SHARE * free) // page)


def make_states(model: Model, layouts: Sequence[StageLayout], limits: Resolved) -> tuple[State, ...]:
    """An empty state for each stage that runs here."""
    return tuple(
        State.zeros(
            num_layers=len(layout.layers),
            num_kv_heads=model.config.num_kv_heads,
            head_dim=model.config.head_dim,
            max_num_reqs=limits.budget.max_num_reqs,
            num_pages=limits.num_pages,
            max_pages=limits.budget.max_pages,
            page_size=limits.page_size,
            vocab_size=model.config.vocab_size if layout.last else 0,
            dtype=model.dtype,
            device=model.device,
        )
        for layout in layouts
    )


def make_stepper(
    model: Model,
    limits: Resolved,
    num_stages: int,
    mode: str,
    transport: Transport,
    num_logprobs: int = 0,
    backend: str | None = None,
    adapters: Sequence[Adapter] = (),
) -> Stepper:
    """What does an engine's work: of one stage, its step as one graph; of more, a pipeline of graphified stages. Slots
    hold the adapters in their order."""
    every = split_layers(model.config.num_layers, num_stages)
    layouts = [every[rank] for rank in transport.ranks(num_stages)]
    stages: list[Any] = [decoder_stage(model.config, layout, num_logprobs=num_logprobs) for layout in every]
    params, state = stage_params(model, layouts, adapters), make_states(model, layouts, limits)
    rungs = lora_rungs(min(len(adapters), limits.budget.cohort_size))
    ladder = make_ladder(mode, Limits(limits.budget.cohort_size, limits.budget.max_num_tokens, active_loras=rungs))

    def graph(step: Any) -> Any:
        return step if mode == "none" else graphify(step, ladder=ladder, split_at=SPLIT_AT, backend=backend)

    if num_stages == 1:
        return Stepped(graph(compose(stages, advance=advance)), params, state, model.device)
    schema = Schema((TensorSchema("hidden_states", ("num_tokens", model.config.hidden_size), model.dtype),))
    spanned = [edited(graph(stage)) for stage in stages]
    step = pipeline(spanned, advance=advance_work, schema=schema, transport=transport)
    return Streamed(step, params, state, model.device)


def encode_prompt(model: Model, prompt: Any, call: str) -> list[int]:
    """Token ids of a prompt.

    Raises:
        RequestError: an empty one, one that leaves no room to generate, or an id that is no token.
    """
    limit, vocab = model.config.max_position_embeddings, model.config.vocab_size
    if not isinstance(prompt, str | list | tuple):
        instead = "its .tolist()" if hasattr(prompt, "tolist") else "a string or a list of token ids"
        raise RequestError(call, f"the prompt is {prompt!r}, a {type(prompt).__name__}", instead)
    ids = model.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise RequestError(call, f"the prompt is empty ({prompt!r})", "give at least one token to go on from")
    if len(ids) >= limit:
        seen = f"{len(ids)} tokens; the model's limit is {limit}, one of them to be generated"
        raise RequestError(call, seen, f"shorten it to {limit - 1} tokens")
    if wrong := [t for t in ids if not isinstance(t, int) or isinstance(t, bool) or not 0 <= t < vocab]:
        raise RequestError(call, f"the prompt holds {wrong[0]!r}", f"token ids are ints from 0 to {vocab - 1}")
    return ids


def check_sampling(call: str, model: Model, params: SamplingParams, num_logprobs: int) -> None:
    """Refuse what the model or the engine's step cannot do.

    Raises:
        RequestError: it is so.
    """
    params.check_tokens(model.config.vocab_size, MAX_BIASED)
    if params.stop and model.tokenizer is None:
        raise RequestError(call, f"stop={params.stop!r}; the checkpoint has no tokenizer", "stop_token_ids=[...]")
    wanted = max(params.logprobs or 0, params.prompt_logprobs or 0)
    if wanted > num_logprobs:
        raise RequestError(call, f"logprobs of {wanted} tokens", f"Engine(..., num_logprobs={wanted})")
