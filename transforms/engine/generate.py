"""`generate`: prompts in, completions out, with an engine for the one call."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import exp
from typing import Any, Literal, overload

import attrs
from torch import Tensor
from tqdm.auto import tqdm

from weft.arguments.checks import COUNT, Rule, check_values, is_number, names_arguments
from weft.arguments.equivalents import for_generate
from weft.batches.sampling import SamplingParams
from weft.display.tables import bars_over_text, element, text, titled
from weft.errors import WeftError
from weft.stages.adapters.adapter import Adapter
from weft.stages.custom.functions import default_page_size
from weft.stages.model import Model
from weft.torchapi.inductor import Compiler
from weft.transforms.engine.completion import RequestTimes
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.evaluation.certificates import Certificate, Provenance, certify
from weft.transforms.engine.evaluation.facts import seen_of
from weft.transforms.engine.options import EngineLimits, Speculation, check_engine
from weft.transforms.engine.outputs import RequestOutput
from weft.transforms.engine.requests.host_state import Request
from weft.transforms.engine.requests.inputs import (
    check_sampling,
    each_rule,
    encode_prompt,
    most_logprobs,
    one_each,
)
from weft.transforms.engine.requests.prompts import EmbedsPrompt, ids_of
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.local import Local

_RULES: dict[str, Rule] = {
    "max_tokens": COUNT,
    "temperature": (lambda value: is_number(value, 0, 1e38), "a finite number >= 0; 0 is greedy"),
    "beside sampling, temperature": (lambda value: value == 0, "SamplingParams(temperature=...)"),
    "prompts": (
        lambda prompt_list: (
            isinstance(prompt_list, list | tuple)
            and not all(isinstance(prompt, int) for prompt in prompt_list)
        ),
        "pass a list of prompts, each a string or a list of token ids",
    ),
}
# A text, token ids, or embeddings; or the messages of a chat.
Prompt = str | Sequence[int] | EmbedsPrompt | Sequence[Mapping[str, Any]]
# The most completions that run at once; others wait.
MAX_NUM_REQS = 256


@attrs.frozen
class Completion:
    """What was generated for one prompt.

    Args:
        text: the tokens as text, without special tokens; None where the checkpoint has no
            tokenizer.
        token_ids: the tokens, the end-of-sequence token included.
        logprobs: for each token, the natural logarithm of the model's probability, before
            temperature and all other processing.
        finish_reason: `stop` (a stop token or a stop text), `length` (`max_tokens`, or the model's
            limit on positions), or `error`.
        stop_reason: the stop token or the stop text that ended it. None: the model's own
            end-of-sequence token ended it, or no token or text did.
        top_logprobs: for each token, the logprobs of the likeliest ones; None unless
            `SamplingParams.logprobs` is set.
        prompt_logprobs: for each token of the prompt except the first; None unless
            `SamplingParams.prompt_logprobs` is set.
        prompt_top_logprobs: for each of those, the logprobs of the likeliest tokens.
        ranks: for each token, 1 + the number of tokens with a higher probability; None unless
            `SamplingParams.logprobs` is 1 or more.
        prompt_ranks: the same for each token of `prompt_logprobs`.
        error: if `finish_reason` is `error`, what went wrong after these tokens, such as NaN
            logits.
        text_offsets: for each token, where its text begins in `text`; None if the checkpoint has no
            tokenizer. A token that ends inside a character has no text: its text is part of the
            next token's. Tokens of a stop text and after it begin at the end of `text`.
        captured: [n, ...] by name: what the model's stages captured (`weft.stages.sow`) for each
            token that they processed: the prompt's first, then all generated ones except the last.
        times: when it was added to the engine, was admitted, had its first token, and finished.
        provenance: what made it, for `certificate()`; None: it was not made by a model of this
            process.
    """

    text: str | None
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[float] | None = None
    prompt_top_logprobs: list[dict[int, float]] | None = None
    ranks: list[int] | None = None
    prompt_ranks: list[int] | None = None
    stop_reason: int | str | None = None
    error: WeftError | None = None
    text_offsets: list[int] | None = attrs.field(default=None, repr=False)
    captured: dict[str, Tensor] = attrs.field(factory=dict, repr=False)
    times: RequestTimes = attrs.field(factory=RequestTimes, repr=False)
    provenance: Provenance | None = attrs.field(default=None, repr=False, eq=False)

    def certificate(self) -> Certificate:
        """A record of all that fixes the bits of this completion, from which `weft.verify` can
        compute it again in any split and mode. The call reads all weights. With stages in other
        processes, every rank makes it.

        Raises:
            RequestError: the model was not loaded as batch invariant, or has been
                garbage-collected; its weights or functions were changed since (detected by torch's
                counts of in-place changes, or by four values of each tensor); or the request had
                inputs that a certificate cannot hold. Outputs of a stream and of an `Engine` have
                no certificates.
        """
        return certify(self.provenance, self)

    def _repr_html_(self) -> str:
        what = (
            f"{len(self.token_ids)} tokens, {self.finish_reason}; the bars: the model's probability"
            " of each"
        )
        if self.text is not None and self.text_offsets is None:
            written = element(
                "div", text(self.text), style="white-space: pre-wrap; font-family: monospace"
            )
            return titled(text(what), written)
        shares = [exp(p) if p <= 0 else 0.0 for p in self.logprobs]  # NaN counts as probability 0
        tokens = enumerate(zip(self.token_ids, shares, strict=False))
        said = [
            (share, f"token {index}: {token}, p = {share:.3f}") for index, (token, share) in tokens
        ]
        pieces = [(piece, *bar) for piece, bar in zip(token_texts(self), said, strict=False)]
        return titled(text(what), bars_over_text(pieces))


def token_texts(completion: Completion) -> list[str]:
    """The text of each token, which joined are `text`; the tokens' ids if there is no text."""
    if completion.text is None or completion.text_offsets is None:
        return [f"{token} " for token in completion.token_ids]
    return [
        completion.text[start:end]
        for start, end in pairwise((*completion.text_offsets, len(completion.text)))
    ]


@overload
def generate(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    temperature: float = ...,
    seed: int | None = ...,
    sampling: SamplingParams | Sequence[SamplingParams] | None = ...,
    pipeline: int = ...,
    graph: str = ...,
    compiler: Compiler | None = ...,
    adapter: Adapter | Sequence[Adapter | None] | None = ...,
    extras: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor] | None] | None = ...,
    speculation: Speculation | None = ...,
    transport: Transport | None = ...,
    progress: bool = ...,
    chat: bool = ...,
    stream: Literal[False] = ...,
) -> list[Completion]: ...
@overload
def generate(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    temperature: float = ...,
    seed: int | None = ...,
    sampling: SamplingParams | Sequence[SamplingParams] | None = ...,
    pipeline: int = ...,
    graph: str = ...,
    compiler: Compiler | None = ...,
    adapter: Adapter | Sequence[Adapter | None] | None = ...,
    extras: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor] | None] | None = ...,
    speculation: Speculation | None = ...,
    transport: Transport | None = ...,
    progress: bool = ...,
    chat: bool = ...,
    stream: Literal[True],
) -> Iterator[RequestOutput]: ...
@names_arguments(**for_generate(attrs.fields_dict(SamplingParams)))
def generate(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    pipeline: int = 1,
    graph: str = "full_and_piecewise",
    compiler: Compiler | None = None,
    adapter: Adapter | Sequence[Adapter | None] | None = None,
    extras: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor] | None] | None = None,
    speculation: Speculation | None = None,
    transport: Transport | None = None,
    progress: bool = False,
    chat: bool = False,
    stream: bool = False,
) -> list[Completion] | Iterator[RequestOutput]:
    """Complete prompts, all in one engine.

    Args:
        model: from `weft.load`.
        prompts: strings, lists of token ids, or `weft.EmbedsPrompt`s, of any lengths; with `chat`,
            lists of messages.
        max_tokens: the most tokens to generate for each prompt; the model's limit on positions may
            end a completion sooner.
        temperature: 0 is greedy; short for `sampling=SamplingParams(temperature=...)`.
        seed: the seed of all random choices. The seed and a prompt's index in the list determine
            its completion, up to rounding of the logits, whatever the other prompts, the split and
            the graph mode are. None: a fresh seed.
        sampling: how tokens are chosen and what ends a completion: one for all prompts, or one per
            prompt. A seed in it takes precedence, and then the prompt's index does not matter.
        pipeline: the number of stages that the layers are split into.
        graph: one of `weft.transforms.MODES`; on a CPU, `none` starts sooner (`weft.make_ladder`).
        compiler: compiles the graphs, such as `inductor` (`Engine`). None: nothing is compiled.
        adapter: a LoRA from `weft.load_adapter`: one for all prompts, or one per prompt; None: the
            model alone.
        extras: the requests' extra inputs for the model's stages (`model.with_stages(...,
            extras=...)`), by name: one dict for all prompts, or one per prompt; None: the model's
            defaults.
        speculation: how drafts are made, so that a step verifies several tokens; the generated
            tokens do not change. None: no drafts.
        transport: where the stages run; None: in this process. Every rank makes the same call and
            gets the same result.
        progress: show a progress bar.
        chat: each prompt is a list of messages, each with a `role` and a `content`, which the
            checkpoint's template turns into a prompt (`model.encode_chat`).
        stream: return an iterator of outputs as they come (`RequestOutput`, whose `id` is the
            prompt's index in the list, as a string) instead of the completions at the end.

    Returns:
        One completion per prompt, in order; `n` consecutive ones for a prompt with
        `SamplingParams(n=...)`.

    Raises:
        CompilerError: torch has no such compiler, or it would have nothing to compile (`Engine`).
        RequestError: a prompt or an argument that cannot be served, such as more stages than
            layers.

    >>> import weft
    >>> model = weft.load("demo", "cpu")
    >>> [completion] = generate(model, ["The function returns"], max_tokens=4)
    >>> len(completion.token_ids), completion.finish_reason
    (4, 'length')
    >>> text = completion.text
    >>> text == "".join(o.text for o in generate(model, ["The function returns"], max_tokens=4, stream=True))
    True
    """
    call = (
        f"weft.generate(model, prompts, max_tokens={max_tokens!r}, temperature={temperature!r},"
        f" pipeline={pipeline!r})"
    )
    check_engine(
        call,
        model,
        transport,
        graph=graph,
        compiler=compiler,
        pipeline=pipeline,
        seed=seed,
        speculation=speculation,
    )
    temperatures = {"temperature": temperature}
    if sampling is not None:
        temperatures["beside sampling, temperature"] = temperature
    check_values(call, _RULES, {"max_tokens": max_tokens, **temperatures, "prompts": prompts})
    encoded = _encode_prompts(model, prompts, call, chat)
    if transport is not None:
        lengths = [
            len(ids_of(prompt)) if isinstance(prompt, EmbedsPrompt) else len(prompt)
            for prompt in encoded
        ]
        # The engine's limits follow from these lengths. Compared only there, different prompts
        # would give an error about limits that nobody wrote.
        transport.assert_equal("the prompts", f"of {lengths} tokens, max_tokens={max_tokens}")
    sampling_params = SamplingParams(temperature=temperature) if sampling is None else sampling
    rules = {
        "sampling": each_rule(SamplingParams, len(encoded), "one SamplingParams, or a list of {}"),
        "adapter": each_rule(
            Adapter | None,
            len(encoded),
            "weft.load_adapter(model, folder), or a list of {} of them and None",
        ),
    }
    rules["extras"] = each_rule(
        Mapping | None, len(encoded), "a dict of tensors by name, or a list of {} of them"
    )
    check_values(call, rules, {"sampling": sampling_params, "adapter": adapter, "extras": extras})
    params: list[SamplingParams] = one_each(sampling_params, len(encoded))
    adapters: list[Adapter | None] = one_each(adapter, len(encoded))
    num_logprobs = max((most_logprobs(each, model.config.vocab_size) for each in params), default=0)
    for each in params:
        check_sampling(call, model, each, num_logprobs)
    # One slot per adapter object, however many prompts use it.
    once = {id(each): each for each in adapters if each is not None}
    # Named by place, not by `id`: the names must be equal on every rank.
    named = {f"adapter {place}": each for place, each in enumerate(once.values())}
    names = dict(zip(once, named, strict=True))
    limits = _limits(model, encoded, params, max_tokens)
    engine = Engine(
        model,
        limits,
        pipeline=pipeline,
        graph=graph,
        compiler=compiler,
        transport=transport,
        num_logprobs=num_logprobs,
        seed=seed,
        adapters=named,
        speculation=speculation,
    )
    inputs: list[Mapping[str, Tensor] | None] = one_each(extras, len(encoded))
    for index, (ids, each, request_adapter, more) in enumerate(
        zip(encoded, params, adapters, inputs, strict=True)
    ):
        engine.add(
            ids,
            each,
            max_tokens=max_tokens,
            id=str(index),
            adapter=names.get(id(request_adapter)),
            extras=more,
        )
    outputs = _shown(engine, max_tokens * sum(each.n for each in params), progress)
    if stream:
        return outputs
    last = {(int(output.id), output.index): output for output in outputs}
    # A weak reference: a kept completion must not keep the weights in memory.
    make_provenance = partial(Provenance, weakref.ref(model), transport or Local(), seen_of(model))
    return [
        _completion(last[key], partial(make_provenance, params[key[0]], adapters[key[0]]))
        for key in sorted(last)
    ]


def _shown(engine: Engine, total: int, progress: bool) -> Iterator[RequestOutput]:
    with tqdm(total=total, desc="generate", unit="token", disable=not progress) as bar:
        for output in engine:
            bar.update(len(output.token_ids))
            yield output


def _completion(
    output: RequestOutput, make_provenance: Callable[[Request], Provenance]
) -> Completion:
    state = output.track
    sampling = state.request.sampling
    with_prompt = sampling.prompt_logprobs is not None
    return Completion(
        state.text if state.tokenizer is not None else None,
        state.token_ids,
        state.logprobs,
        state.reason,
        top_logprobs=None if sampling.logprobs is None else state.top_logprobs,
        prompt_logprobs=state.prompt_logprobs if with_prompt else None,
        prompt_top_logprobs=state.prompt_top_logprobs if with_prompt else None,
        ranks=state.ranks if sampling.logprobs else None,
        prompt_ranks=state.prompt_ranks if with_prompt else None,
        stop_reason=state.stop_reason,
        error=output.error,
        text_offsets=state.text_offsets if state.tokenizer is not None else None,
        captured=state.captured,
        times=state.times,
        provenance=make_provenance(state.request),
    )


def _limits(
    model: Model,
    prompts: Sequence[Sequence[int] | EmbedsPrompt],
    params: Sequence[SamplingParams],
    max_tokens: int,
) -> EngineLimits:
    """Limits with rows for all completions, up to `MAX_NUM_REQS`."""
    rows = min(sum(each.n for each in params), MAX_NUM_REQS)
    longest = min(max(map(len, prompts)) + max_tokens, model.config.max_position_embeddings)
    size = default_page_size(model.functions)
    return EngineLimits(max_num_reqs=rows, max_model_len=longest, page_size=size)


def _encode_prompts(
    model: Model, prompts: Any, call: str, chat: bool
) -> list[list[int] | EmbedsPrompt]:
    if chat:
        prompts = [model.encode_chat(messages) for messages in prompts]
    encoded = [
        encode_prompt(model, prompt, call, f"prompt {index}")
        for index, prompt in enumerate(prompts)
    ]
    return [
        original if isinstance(original, EmbedsPrompt) else ids
        for original, ids in zip(prompts, encoded, strict=True)
    ]
