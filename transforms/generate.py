"""`generate`: prompts in, completions out. The host schedules; every token comes from the step."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from tqdm.auto import tqdm

from weft.batch import Batch
from weft.effects import Schema, TensorSchema
from weft.errors import RequestError
from weft.outputs import Output
from weft.sampling import SamplingParams
from weft.sampling_table import MAX_BIASED
from weft.stages.decoder import DecoderStage, decoder_stage
from weft.stages.layout import StageLayout, split_layers
from weft.stages.model import Model, stage_params
from weft.state import State, admit, advance
from weft.transforms.engine.requests import request_seeds
from weft.transforms.graphify import graphify
from weft.transforms.ladder import MODES, Limits, make_ladder
from weft.transforms.pipeline import compose, pipeline
from weft.transforms.requests import Requests
from weft.transforms.transports import Transport
from weft.transforms.transports.local import Local

_MAX_TEMPERATURE = 1e38  # of float32
PAGE_SIZE = 16
SPLIT_AT = ("weft::paged_attention",)
"""Where a decoder is cut into pieces."""
MAX_NUM_TOKENS = 2048
"""Tokens of a prefill batch at most; longer prompts go in chunks."""


@attrs.frozen
class Completion:
    """What was generated for one prompt.

    Args:
        text: the tokens as text, without special tokens; None where the checkpoint has no tokenizer.
        token_ids: the tokens, the end-of-sequence token included.
        logprobs: for each, the natural logarithm of the model's probability of it, before temperature and all else.
        finish_reason: `stop` (a token or a text that ends it) or `length` (`max_tokens`, or the model's own limit).
        top_logprobs: for each, those of the likeliest tokens; None unless `SamplingParams.logprobs` asks for them.
    """

    text: str | None
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    top_logprobs: list[dict[int, float]] | None = None


@attrs.frozen(eq=False)
class Runner:
    """A model made ready to step: the step, its parameters a stage, and how to make its state.

    Args:
        step: `(params, state, batch) -> (state, Output)` over tuples with one entry for each stage that runs here.
        params: one entry for each of these.
        stages: the plain stages that the step is composed of, all of them.
        layouts: which layers each stage owns that runs here.
        graphs: the graphified functions inside the step, for their `cache_info()`.
    """

    step: Callable[[Any, Any, Batch], tuple[Any, Output]]
    params: tuple[Any, ...]
    stages: tuple[DecoderStage, ...]
    layouts: tuple[StageLayout, ...]
    graphs: tuple[Any, ...]


def make_runner(
    model: Model,
    limits: Limits,
    *,
    num_stages: int = 1,
    mode: str = "full",
    backend: str | None = None,
    keep_logits: bool = False,
    num_logprobs: int = 0,
    transport: Transport | None = None,
) -> Runner:
    """Compose the model's stages into a step: `graphify(compose(...))` on one stage, `pipeline(map(graphify, stages))`
    on more.

    Args:
        model: the checkpoint.
        limits: what a batch can be; bounds the ladder.
        num_stages: pipeline stages; a batch is cut into as many micro-batches.
        mode: a graph mode (`weft.transforms.ladder.MODES`).
        backend: of graphify.
        keep_logits: whether outputs hold logits.
        num_logprobs: of how many of the likeliest tokens outputs hold the logprobs.
        transport: of the pipeline; None: `Local()`.

    Raises:
        ProgramError: more stages than layers, or a model that is another part than runs here.
        DescriptorError: an unknown mode.
    """
    ladder = make_ladder(mode, limits)
    transport = transport or Local()
    every = split_layers(model.config.num_layers, num_stages)
    layouts = tuple(every[rank] for rank in transport.ranks(num_stages))
    extras: dict[str, Any] = {"keep_logits": keep_logits, "num_logprobs": num_logprobs}
    stages = tuple(decoder_stage(model.config, layout, **extras) for layout in every)
    params = stage_params(model, layouts)
    if num_stages == 1:
        whole = compose(stages, advance=advance)
        if mode == "none":
            return Runner(whole, params, stages, layouts, ())
        graph = graphify(whole, ladder=ladder, split_at=SPLIT_AT, backend=backend)
        return Runner(graph, params, stages, layouts, (graph,))
    graphs = (
        []
        if mode == "none"
        else [graphify(stage, ladder=ladder, split_at=SPLIT_AT, backend=backend) for stage in stages]
    )
    schema = Schema((TensorSchema("hidden_states", ("num_tokens", model.config.hidden_size), model.dtype),))
    step = pipeline(graphs or stages, microbatches=num_stages, advance=advance, schema=schema, transport=transport)
    return Runner(step, params, stages, layouts, tuple(graphs))


def make_state(
    model: Model,
    layouts: Sequence[StageLayout],
    lengths: Sequence[int],
    sampling: Sequence[SamplingParams] | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
) -> tuple[State, ...]:
    """Each stage's state with one request a length admitted, in rows 0, 1, ...; pages enough for each to grow to its
    length.

    Args:
        lengths: the most tokens that each request will hold.
        sampling, prompts: one a request, as `weft.state.admit` takes them. None: greedy; prompts that no penalty
            counts.
    """
    counts = [-(-length // PAGE_SIZE) for length in lengths]
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    pages = [range(end - count, end) for count, end in zip(counts, ends, strict=True)]
    config = model.config
    asked = [SamplingParams(temperature=0.0)] * len(lengths) if sampling is None else sampling

    def one(layout: StageLayout) -> State:
        empty = State.zeros(
            num_layers=len(layout.layers),
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_num_reqs=len(lengths),
            num_pages=ends[-1],
            max_pages=max(counts),
            page_size=PAGE_SIZE,
            vocab_size=config.vocab_size if layout.last else 0,
            dtype=model.dtype,
            device=model.device,
        )
        return admit(empty, range(len(lengths)), pages, asked, prompts or [()] * len(lengths))

    return tuple(one(layout) for layout in layouts)


def prefill_batches(prompts: Sequence[Sequence[int]], max_num_tokens: int, device: torch.device) -> Iterator[Batch]:
    """Cut prompts (row i holds prompt i) into ragged batches of at most `max_num_tokens` tokens, in order.

    A prompt that does not fit goes on in the next batch; only its last chunk samples.
    """
    rows: list[int] = []
    chunks: list[Sequence[int]] = []
    room = max_num_tokens
    for row, prompt in enumerate(prompts):
        done = 0
        while done < len(prompt):
            chunk = prompt[done : done + room]
            rows.append(row)
            chunks.append(chunk)
            done, room = done + len(chunk), room - len(chunk)
            if room == 0 or (row == len(prompts) - 1 and done == len(prompt)):
                samples = [True] * (len(rows) - 1) + [done == len(prompt)]
                yield Batch.ragged(rows, chunks, samples=samples, device=device)
                rows, chunks, room = [], [], max_num_tokens


def batches(prompts: Sequence[Sequence[int]], requests: Requests, device: torch.device) -> Iterator[Batch]:
    """The prefill of all prompts, then decode batches of the `requests` that still run when each is asked for."""
    yield from prefill_batches(prompts, MAX_NUM_TOKENS, device)
    while rows := requests.running:
        yield Batch.decode(rows, device=device)


def encode_prompts(model: Model, prompts: Any, call: str) -> list[list[int]]:
    """Token ids of each prompt.

    Raises:
        RequestError: no prompt, an empty one, one that leaves no room to generate, or an id that is no token.
    """
    if not isinstance(prompts, list | tuple) or not prompts or all(isinstance(p, int) for p in prompts):
        raise RequestError(call, f"prompts={prompts!r}", "pass a list of prompts, each a string or a list of token ids")
    encoded = []
    limit, vocab = model.config.max_position_embeddings, model.config.vocab_size
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str | list | tuple):
            instead = "its .tolist()" if hasattr(prompt, "tolist") else "a string or a list of token ids"
            raise RequestError(call, f"prompt {index} is {prompt!r}, a {type(prompt).__name__}", instead)
        ids = model.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise RequestError(call, f"prompt {index} is empty ({prompt!r})", "give at least one token to go on from")
        if len(ids) >= limit:
            raise RequestError(
                call,
                f"prompt {index} has {len(ids)} tokens; the model's limit is {limit}, one of them to be generated",
                f"shorten it to {limit - 1} tokens",
            )
        if wrong := [t for t in ids if not isinstance(t, int) or isinstance(t, bool) or not 0 <= t < vocab]:
            raise RequestError(call, f"prompt {index} holds {wrong[0]!r}", f"token ids are ints from 0 to {vocab - 1}")
        encoded.append(ids)
    return encoded


def generate(
    model: Model,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    pipeline: int = 1,
    graph: str = "full",
    transport: Transport | None = None,
    progress: bool = False,
) -> list[Completion]:
    """Complete prompts, all in one batch.

    Args:
        model: from `weft.load`.
        prompts: strings or lists of token ids, of any lengths.
        max_tokens: tokens to generate for each at most; the model's own limit on positions may end one sooner.
        temperature: 0 is greedy; short for `sampling=SamplingParams(temperature=...)`.
        seed: of all random choices: with it and its place in the list, a prompt's completion is the same in any
            company, split and graph mode, up to rounding of the logits. None: a fresh one.
        sampling: how tokens are chosen and what ends a completion, of all prompts or one a prompt. A seed in it is that
            prompt's, whatever its place.
        pipeline: stages that the layers are split into.
        graph: one of `weft.transforms.MODES`.
        transport: where the stages run; None: in this process. Every rank makes the same call, and returns the same.
        progress: show a progress bar.

    Returns:
        One completion a prompt, in order.

    Raises:
        RequestError: a prompt or an argument that cannot be served, more stages than layers among them.

    >>> from weft.stages.model import DEMO, load
    >>> [completion] = generate(load(DEMO, "cpu"), ["The function returns"], max_tokens=4)
    >>> len(completion.token_ids), completion.finish_reason
    (4, 'length')
    """
    call = (
        f"weft.generate(model, prompts, max_tokens={max_tokens!r}, temperature={temperature!r}, pipeline={pipeline!r})"
    )
    _check_arguments(call, model, max_tokens, temperature, seed, graph, pipeline)
    encoded = encode_prompts(model, prompts, call)
    transport = transport or Local()
    seeds = request_seeds(transport.share(secrets.randbits(62)) if seed is None else seed, len(encoded))
    params = _sampling_of_each(call, model, temperature, sampling, seeds)
    limits = Limits(len(encoded), MAX_NUM_TOKENS)
    num_logprobs = max(each.logprobs or 0 for each in params)
    runner = make_runner(model, limits, num_stages=pipeline, mode=graph, num_logprobs=num_logprobs, transport=transport)
    most = [min(max_tokens, model.config.max_position_embeddings - len(ids)) for ids in encoded]
    lengths = [len(ids) + new for ids, new in zip(encoded, most, strict=True)]
    state = make_state(model, runner.layouts, lengths, params, encoded)
    requests = Requests(most, params, None if model.tokenizer is None else model.decode)
    bar = tqdm(total=sum(most), desc="generate", unit="token", disable=not progress)
    for batch in batches(encoded, requests, model.device):
        state, out = runner.step(runner.params, state, batch)
        requests.take(batch, out)
        bar.update(sum(map(len, requests.token_ids)) - bar.n)
    bar.close()
    return [_completion(requests, row) for row in range(len(encoded))]


def _completion(requests: Requests, row: int) -> Completion:
    tops = None if requests.sampling[row].logprobs is None else requests.top_logprobs[row]
    ids, logprobs = requests.token_ids[row], requests.logprobs[row]
    return Completion(requests.text(row), ids, logprobs, str(requests.reasons[row]), tops)


def _sampling_of_each(
    call: str,
    model: Model,
    temperature: float,
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    seeds: Sequence[int],
) -> list[SamplingParams]:
    if sampling is not None and temperature != 0:
        raise RequestError(call, f"temperature={temperature!r} beside sampling", "SamplingParams(temperature=...)")
    given = SamplingParams(temperature=temperature) if sampling is None else sampling
    each = [given] * len(seeds) if isinstance(given, SamplingParams) else given
    is_list = isinstance(each, list | tuple) and all(isinstance(params, SamplingParams) for params in each)
    if not is_list or len(each) != len(seeds):
        raise RequestError(call, f"sampling={sampling!r:.200}", f"one SamplingParams, or a list of {len(seeds)}")
    for params in each:
        params.check_tokens(model.config.vocab_size, MAX_BIASED)
        if params.n != 1:
            raise RequestError(call, f"n={params.n}", "give the prompt so many times: a completion a prompt")
        if params.prompt_logprobs is not None:
            seen = f"prompt_logprobs={params.prompt_logprobs}"
            raise RequestError(call, seen, "a step on a Batch with targets, which returns them")
        if params.stop and model.tokenizer is None:
            raise RequestError(call, f"stop={params.stop!r}; the checkpoint has no tokenizer", "stop_token_ids=[...]")
        if (params.logprobs or 0) > model.config.vocab_size:
            raise RequestError(call, f"logprobs={params.logprobs}", f"at most {model.config.vocab_size}")
    return [params.for_request(model.config.eos_token_ids, seed) for params, seed in zip(each, seeds, strict=True)]


def _check_arguments(
    call: str, model: Any, max_tokens: int, temperature: float, seed: int | None, graph: str, stages: int
) -> None:
    if not isinstance(model, Model):
        raise RequestError(call, f"model is a {type(model).__name__}", "model = weft.load(folder)")
    if not _is_count(max_tokens):
        raise RequestError(call, f"max_tokens={max_tokens!r}", "a whole number >= 1")
    if not isinstance(temperature, int | float) or not 0 <= temperature <= _MAX_TEMPERATURE:
        raise RequestError(call, f"temperature={temperature!r}", "a finite number >= 0; 0 is greedy")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise RequestError(call, f"seed={seed!r}", "a whole number, or None")
    if graph not in MODES:
        raise RequestError(call, f"graph={graph!r}", f"one of {', '.join(MODES)}")
    if not _is_count(stages) or stages > model.config.num_layers:
        raise RequestError(
            call, f"pipeline={stages!r}; the model has {model.config.num_layers} layers", "from 1 stage to one a layer"
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
