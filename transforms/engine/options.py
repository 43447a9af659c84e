"""Options of an engine: `EngineLimits` and `Speculation`, and the checks of all its arguments."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from weft.arguments.checks import COUNT, COUNT_OR_NONE, Rule, check_values, is_int, names_arguments
from weft.arguments.equivalents import LIMITS
from weft.batches.state import Drafting, State
from weft.errors import CompilerError
from weft.ops.attention.backends import AttentionBackend
from weft.stages.adapters.adapter import Adapter
from weft.stages.config import ModelConfig
from weft.stages.custom.functions import OWN, caching_policy, check_page_size
from weft.stages.drafters.drafting import Drafter, drafted, model_drafter, ngram_drafter
from weft.stages.layout import StageLayout, is_whole
from weft.stages.model import Model
from weft.torchapi.inductor import compiler_name
from weft.transforms.engine.memory import (
    check_room,
    empty_pages,
    fitting_pages,
    page_bytes,
    reserved_bytes,
)
from weft.transforms.engine.requests.host_state import Budget, tokens_rule
from weft.transforms.engine.split import Split
from weft.transforms.engine.steps.classes import captured_tokens, has_small_layers
from weft.transforms.engine.steps.executor import Executor
from weft.transforms.graphs.ladder import MODES
from weft.transforms.graphs.options import check_compiler
from weft.transforms.pipelines.argument_checks import TRANSPORT

_MAX_CONTEXT = 4096
_NUM_TOKENS = 2048
_NUM_TOKENS_OF_A_LARGE_GPU = 8192
# The threshold, in bytes of GPU memory, from which the default of `max_num_tokens` is the large one
# (except for models with small layers). Large steps process prompts faster, but a decode that
# shares such a step waits longer.
_LARGE_GPU = 64 * 2**30
_LIMIT_RULES: dict[str, Rule] = {
    **dict.fromkeys(("max_num_reqs", "page_size"), COUNT),
    **dict.fromkeys(("max_num_tokens", "max_model_len", "num_pages", "num_cohorts"), COUNT_OR_NONE),
    "mixed": (lambda value: isinstance(value, bool), "True or False"),
    "max_step_seconds": (
        lambda value: value is None or (not isinstance(value, bool) and 0 < value < math.inf),
        "a positive number of seconds, or None",
    ),
}
_NGRAM = (1, 3)
# Limit of `Speculation.num_tokens`: a step's classes and buffers reserve room for the drafts of all
# requests.
_MAX_NUM_TOKENS = 1024


def _num_tokens(model: Model) -> int:
    device = torch.device(model.device)
    if device.type != "cuda" or torch.cuda.get_device_properties(device).total_memory < _LARGE_GPU:
        return _NUM_TOKENS
    if has_small_layers(model.config):
        return captured_tokens(model.config)
    return _NUM_TOKENS_OF_A_LARGE_GPU


def _is_range(value: Any) -> bool:
    pair = isinstance(value, tuple | list) and len(value) == 2
    return pair and all(is_int(each, 1) for each in value) and value[0] <= value[1]


_DRAFT_RULES: dict[str, Rule] = {
    "num_tokens": (
        lambda value: is_int(value, 1, _MAX_NUM_TOKENS),
        f"a whole number from 1 to {_MAX_NUM_TOKENS}",
    ),
    "ngram": (
        lambda value: value is None or _is_range(value),
        "the fewest tokens and the most, as in ngram=(1, 3)",
    ),
    "model": (Model | ModelConfig | None, "model = weft.load(folder)"),
    "beside model, ngram": (
        lambda value: value is None,
        "ngram=..., or model=...: one way to draft",
    ),
    "model.transforms": (
        lambda value: not value,
        "a draft model without transformed stages; functions are its own",
    ),
}


@attrs.frozen
class Speculation:
    """Draft tokens, and verify them with the model in one step. The generated tokens stay the same,
    greedy or sampled; only the number of steps changes.

    Requests with penalties (repetition, presence, frequency) have no drafts, because each of their
    tokens changes the distribution of the next one. A step that also computes prompts has no drafts
    either.

    Args:
        num_tokens: the most drafts per request and step. Steps with half as many drafts, and steps
            with none, have separate graphs.
        ngram: draft by prompt lookup: propose what followed the last n tokens where they occurred
            before, for n from the second number down to the first. None: (1, 3), or, with a model,
            no lookup.
        model: draft with a smaller model from `weft.load`, with the same vocabulary, on the device
            of the first stage. A rank that does not run that stage can pass the draft model's
            configuration instead.

    Raises:
        RequestError: an invalid number of tokens, an invalid range of n, or two ways to draft.

    >>> Speculation(num_tokens=4, ngram=(2, 5)).ngram
    (2, 5)
    """

    num_tokens: int
    ngram: tuple[int, int] | None = None
    model: Model | ModelConfig | None = None

    def __attrs_post_init__(self) -> None:
        call = (
            f"weft.Speculation(num_tokens={self.num_tokens!r}, ngram={self.ngram!r},"
            f" model={self.model!r})"
        )
        values = attrs.asdict(self, recurse=False)
        if self.model is not None:
            values["beside model, ngram"] = self.ngram
            values["model.transforms"] = getattr(self.model, "transforms", ())
        check_values(call, _DRAFT_RULES, values)

    @property
    def drafter(self) -> Drafter:
        """The function that drafts."""
        config = draft_config(self)
        if config is not None:
            # Another rank holds the draft model and drafts.
            if not isinstance(self.model, Model):
                return model_drafter(self.num_tokens, config)
            return model_drafter(
                self.num_tokens, config, self.model.functions, device=self.model.device
            )
        return ngram_drafter(self.num_tokens, *(self.ngram or _NGRAM))

    @property
    def params(self) -> Any:
        """The drafter's parameters."""
        if isinstance(self.model, Model):
            return self.model.params
        return None


def draft_config(speculation: Speculation) -> ModelConfig | None:
    """The draft model's configuration."""
    if isinstance(speculation.model, Model):
        return speculation.model.config
    return speculation.model


def check_draft_model(speculation: Speculation, call: str, model: Model, first: bool) -> None:
    """Check the draft model against the engine's.

    Args:
        call: the user's call, for the error.
        model: the engine's.
        first: whether the first stage, and so the draft model, runs here.

    Raises:
        RequestError: the vocabularies differ; or, on the rank of the first stage, the draft
            model is on another device or is only a part of a model.
    """
    config = draft_config(speculation)
    if config is None:
        return
    vocab = model.config.vocab_size
    place = (model.device, True)
    if isinstance(speculation.model, Model):
        functions = speculation.model.functions
    else:
        functions = OWN
    extras = model.functions.extras
    rules: dict[str, Rule] = {
        "the draft model's vocab_size": (
            lambda value: value == vocab,
            f"a draft model of {vocab} tokens, as the model's",
        ),
        "the draft model's extras": (
            lambda value: all(
                name in extras and extras[name].shape == x.shape for name, x in value.items()
            ),
            ("a draft model whose extras the model has too: the requests' values are the model's"),
        ),
        "the draft model's captures": (
            lambda value: not value,
            "a draft model whose logits read no captures",
        ),
        "the draft model's beside": (
            lambda value: not value,
            "a draft model without models beside",
        ),
        "the draft model's attend": (
            lambda value: (
                not isinstance(value, AttentionBackend)
                or (value.capability == "full" and not value.page_sizes)
            ),
            "a draft model whose attention can be in any graph, with pages of any size",
        ),
        "the draft model's carries": (
            lambda value: not value,
            "a draft model whose functions carry nothing: it reads drafts that may be wrong",
        ),
        "the draft model's token_extras": (
            lambda value: not value,
            ("a draft model whose functions take no inputs of tokens: they go to the model alone"),
        ),
        "the draft model": (
            lambda value: (
                not first
                or (
                    isinstance(value, Model)
                    and (value.device, is_whole(value.layout, value.shard)) == place
                )
            ),
            f"weft.load(folder, {str(model.device)!r}), whole and beside {model!r}",
        ),
    }
    check_values(
        call,
        rules,
        {
            "the draft model's vocab_size": config.vocab_size,
            "the draft model's extras": functions.extras,
            "the draft model's captures": functions.captures.keys()
            if functions.logits is not None
            else (),
            "the draft model's beside": functions.beside.keys(),
            "the draft model's attend": functions.attend,
            "the draft model's carries": functions.carries.keys(),
            "the draft model's token_extras": functions.token_extras.keys(),
            "the draft model": speculation.model,
        },
    )


def with_drafter(speculation: Speculation, stages: Sequence[Any]) -> list[Any]:
    """The same stages, except that the first one also drafts."""
    return [drafted(stages[0], speculation.drafter), *stages[1:]]


def with_drafting(
    speculation: Speculation, states: Sequence[State], layouts: Sequence[StageLayout]
) -> tuple[State, ...]:
    """The same empty states with room for drafts; their block tables must have `spare_pages`."""
    return tuple(
        _state_with_drafting(speculation, state, layout.first)
        for state, layout in zip(states, layouts, strict=True)
    )


def _state_with_drafting(speculation: Speculation, state: State, first: bool) -> State:
    (num_rows, max_pages), device = state.block_table.shape, state.block_table.device
    num_pages, page_size = state.kv_pages.shape[2:4]
    pages = None
    tokens = 0
    if first and isinstance(speculation.model, Model):
        pages = empty_pages(speculation.model, num_pages, page_size)
    elif first:
        tokens = max_pages * page_size + 1
    drafting = Drafting.zeros(num_rows, max_tokens=tokens, kv_pages=pages, device=device)
    return attrs.evolve(state, drafting=drafting)


def spare_pages(speculation: Speculation, page_size: int) -> int:
    """Extra columns of the block table, for which no request has pages: drafts beyond a
    request's last token are addressed through them."""
    return -(-speculation.num_tokens // page_size)


def draft_page_bytes(speculation: Speculation, page_size: int) -> int:
    """Bytes of one page of the draft model's cache, over all its layers."""
    if not isinstance(speculation.model, Model):
        return 0
    return page_bytes(speculation.model, len(speculation.model.params.layers), page_size)


def query_lens(speculation: Speculation | None) -> tuple[int, ...]:
    """The numbers of tokens that a request may have in a uniform step: the last token, plus no
    drafts, half of them, or all.

    >>> query_lens(Speculation(num_tokens=4))
    (1, 3, 5)
    """
    if speculation is None:
        return (1,)
    most = speculation.num_tokens
    return tuple(sorted({1, 1 + most // 2, 1 + most}))


@names_arguments(**LIMITS)
@attrs.frozen(kw_only=True)
class EngineLimits:
    """The most that an engine holds.

    Args:
        max_num_reqs: requests that run at once.
        max_num_tokens: tokens per step. Ragged steps of more than 2,048 tokens run without a graph,
            since they gain nothing from one; the threshold is 4,096 if the model's layers are so
            small that a GPU waits for the host. None: 8,192 on a GPU with 64 GiB or more (4,096 for
            such a model), 2,048 elsewhere, and at least one for each request.
        max_model_len: tokens per request, including those to generate, rounded up to whole pages;
            at most the model's number of positions. None: that number, but at most 4,096.
        page_size: tokens per page.
        num_pages: pages of the KV cache. None: as many as fit into memory beside the graphs, but no
            more than all rows could fill. The graphs' memory is estimated only if the cache takes a
            large share of the free memory (`Graphified.memory_estimate`).
        num_cohorts: groups of requests that are stepped in turn; None: one per stage.
        mixed: whether decodes share steps with prompts. Prompts are bound by compute and decodes by
            memory, so that a shared step uses both. If False, they take turns and decodes stay
            uniform, which is best for decodes.
        max_step_seconds: the most seconds that a step with prompts may keep a decode waiting for
            its next token. Such a step has fewer tokens than `max_num_tokens` if need be, but at
            least a page of one prompt. With this limit the engine warms up when it is made, and
            measures steps of prompts and of decodes to learn the cost of tokens and of attention
            (`engine.limits.budget.step_time`). Decodes wait less, and prompts take longer. None: no
            limit.

    Raises:
        RequestError: a number that is not an integer >= 1; or `max_step_seconds` that is not a
            positive number.
    """

    max_num_reqs: int = 64
    max_num_tokens: int | None = None
    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    num_cohorts: int | None = None
    mixed: bool = True
    max_step_seconds: float | None = None

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self, recurse=False).items():
            check_values(f"weft.EngineLimits({name}={value!r})", _LIMIT_RULES, {name: value})


def resolve_limits(
    limits: EngineLimits,
    model: Model,
    split: Split,
    speculation: Speculation | None = None,
    executor: Callable[["ResolvedLimits"], Executor] | None = None,
) -> "ResolvedLimits":
    """These limits with every None filled in, for a model on its device; the result is the same
    on every rank.

    Args:
        executor: makes an executor under given limits, so that the number of pages leaves room
            for its graphs. None: there are no graphs.

    Raises:
        ProgramError: the model's attention has no kernels for this page size.
        RequestError: no room for a request, or for the pages.
    """
    check_page_size(model.functions, "weft.EngineLimits(...)", limits.page_size)
    length = min(model.config.max_position_embeddings, limits.max_model_len or _MAX_CONTEXT)
    max_pages = -(-length // limits.page_size)
    cohorts = limits.num_cohorts or split.num_stages
    transport = split.transport
    least = -(-limits.max_num_reqs // cohorts)
    # Every rank makes this call, even if `max_num_tokens` is given: a rank that skips it hangs
    # the others.
    usual = transport.share(max(least, _num_tokens(model)))
    tokens = limits.max_num_tokens or usual
    check_values(
        "weft.EngineLimits(...)",
        {"max_num_tokens": tokens_rule(least)},
        {"max_num_tokens": tokens},
    )
    budget = Budget(
        limits.max_num_reqs, tokens, max_pages, cohorts, limits.mixed, query_lens(speculation)
    )
    most = max_pages * limits.max_num_reqs
    # A single page for now: the number of pages is what the estimate of this executor's graphs
    # decides.
    small = ResolvedLimits(budget, 1, limits.page_size, speculation, limits.max_step_seconds)
    here = split.layouts(model)
    if speculation is None or not here[0].first:
        drafts = 0
    else:
        drafts = draft_page_bytes(speculation, limits.page_size)
    page = page_bytes(model, sum(len(layout.layers) for layout in here), limits.page_size) + drafts
    beside = model.functions.beside
    if caching_policy(model.functions) == "snapshot":
        page += len(here) * sum(x.nbytes for x in model.functions.carries.values())
    if here[-1].last:
        page += sum(
            page_bytes(side_model, side_model.config.num_layers, limits.page_size)
            for side_model in beside.values()
        )
    if limits.num_pages is not None:
        # Rank 0's number on all ranks, since works name pages by their numbers.
        num_pages = transport.share(limits.num_pages)
        check_room(model.device, num_pages, page, lambda here: min(transport.collect(here)))
        return attrs.evolve(small, num_pages=num_pages)
    fitting = fitting_pages(
        model.device, page, most, lambda: reserved_bytes(executor and executor(small))
    )
    # All ranks number their pages alike, so the rank with the least room decides.
    return attrs.evolve(small, num_pages=min(most, *transport.collect(fitting)))


@attrs.frozen
class ResolvedLimits:
    """`EngineLimits` in which every number is known."""

    budget: Budget
    num_pages: int
    page_size: int
    speculation: Speculation | None = None
    max_step_seconds: float | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options that must be equal on all ranks. A draft model counts as its configuration,
        since only the first rank has the model itself."""
        budget = attrs.asdict(self.budget, recurse=False)
        speculation = self.speculation
        if speculation is None:
            drafts = None
        else:
            drafts = (
                speculation.num_tokens,
                speculation.ngram,
                getattr(speculation.model, "config", speculation.model),
            )
        shared = {
            name: getattr(self, name) for name in ("num_pages", "page_size", "max_step_seconds")
        }
        return {**budget, **shared, "speculation": drafts}


def _are_adapters(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(each, Adapter) for name, each in value.items()
    )


RULES: dict[str, Rule] = {
    "transport": TRANSPORT,
    "model": (Model, "model = weft.load(folder)"),
    "seed": (lambda value: value is None or is_int(value), "a whole number, or None"),
    "prefix_caching": (lambda value: isinstance(value, bool), "True or False"),
    "graph": (lambda value: value in MODES, f"one of {', '.join(MODES)}"),
    "strict": (bool, "True or False"),
    "run_ahead": (lambda value: is_int(value, 0), "a whole number of steps, or 0"),
    "limits": (EngineLimits | None, "weft.EngineLimits(...), or None"),
    "speculation": (Speculation | None, "weft.Speculation(...), or None"),
    "adapters": (
        lambda value: value is None or _are_adapters(value),
        "{name: weft.load_adapter(model, folder)}, or None",
    ),
}


def stage_rule(model: Model) -> Rule:
    """The rule for the number of stages that the model's layers are split into."""
    most = model.config.num_layers
    return (
        lambda value: is_int(value, 1, most)
    ), f"a whole number from 1 to {most}, the model's layers"


def check_compiled(call: str, model: Model, compiler: Any, **mode: str) -> None:
    """Check the compiler of a model's graphs.

    Args:
        call: the call as the user wrote it.
        model: the model.
        compiler: the compiler, or None.
        mode: the graph mode, by the name of its option.

    Raises:
        CompilerError: torch has no such compiler, or it would have nothing to compile.
    """
    check_compiler(call, compiler)
    if compiler is None:
        return
    written = f"compiler={compiler_name(compiler)!r}"
    ((option, value),) = mode.items()
    if value == "none":
        problem = f"{written}, and {option}={value!r}, which has no graphs to compile"
        raise CompilerError(call, problem, f"{option}='full', or no compiler")
    if model.functions.batch_invariant:
        problem = f"{written}, and a batch-invariant model: a compiler sums in an order of its own"
        raise CompilerError(call, problem, "weft.load without batch_invariant=True, or no compiler")


def check_engine(
    call: str,
    model: Any,
    transport: Any = None,
    *,
    compiler: Any = None,
    **options: Any,
) -> None:
    """Check the arguments of `Engine`, or those that `generate` and others pass on to it.

    Raises:
        CompilerError: torch has no such compiler, or it would have nothing to compile.
        RequestError: not a model, not a transport, or an option of the wrong type or out of range.
    """
    check_values(call, RULES, {"transport": transport, "model": model})
    vocab = model.config.vocab_size
    model_rules: dict[str, Rule] = {
        "pipeline": stage_rule(model),
        "tensor": COUNT_OR_NONE,
        "num_logprobs": (
            lambda value: is_int(value, -1, vocab),
            f"a number from 0 to {vocab}; -1 is {vocab}",
        ),
    }
    check_values(call, RULES | model_rules, options)
    check_compiled(call, model, compiler, graph=options.get("graph", ""))
