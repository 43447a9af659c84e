"""Setup: what `Engine.__init__` assembles from a model: limits, parameters, states and an executor; and its checks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import is_int, kind_of, names_arguments
from weft.arguments.equivalents import LIMITS
from weft.descriptor import BatchDescriptor
from weft.effects import Schema
from weft.errors import RequestError
from weft.outputs import IntermediateTensors
from weft.stages.adapters import Adapter, check_slot, stage_params, write_slot
from weft.stages.checkpoint import digest_params, list_some, places, tensor_shapes
from weft.stages.decoder import decoder_stage, empty_states
from weft.stages.layout import StageLayout, split_layers, split_model
from weft.stages.model import Model
from weft.stages.params import DecoderParams
from weft.state import State, advance
from weft.torchapi.private import changes_of
from weft.transforms.engine.faults import COUNT, COUNT_OR_NONE, Rule, check_values
from weft.transforms.engine.requests import Budget
from weft.transforms.engine.runner import graph_step, stage_rule
from weft.transforms.engine.speculation import Speculation
from weft.transforms.engine.step import Executor, PipelineExecutor, StepExecutor, advance_work, with_edits
from weft.transforms.graphs.ladder import MODES, Ladder, Limits, lora_rungs, make_ladder
from weft.transforms.pipelines.argument_checks import wrong_transport
from weft.transforms.pipelines.pipeline import compose, pipeline
from weft.transforms.pipelines.transports import Transport
from weft.trees import leaves_with_names, tree_leaves, tree_map

_MEMORY_SHARE = 0.85
"""The share of a GPU's free memory for the KV cache and graphs; temporaries get the rest."""
_SMALL_CACHE_SHARE = 0.25
"""A KV cache that takes a smaller share of the free memory leaves room for any graphs: they are not estimated."""
_GRAPHS_MARGIN = 1.25
"""Factor on the estimate of the graphs' memory, which is interpolated: with a draft model, whose classes differ in more
than their size, graphs were found to take up to a fifth more."""
_CPU_BYTES = 2**30
"""The most that the KV cache takes on a CPU."""
_MAX_CONTEXT = 4096
_LIMIT_RULES: dict[str, Rule] = {
    **dict.fromkeys(("max_num_reqs", "max_num_tokens", "page_size"), COUNT),
    **dict.fromkeys(("max_model_len", "num_pages", "num_cohorts"), COUNT_OR_NONE),
    "mixed": (lambda value: isinstance(value, bool), "True or False"),
}


@names_arguments(**LIMITS)
@attrs.frozen(kw_only=True)
class EngineLimits:
    """The most that an engine holds.

    Args:
        max_num_reqs: requests that run at once.
        max_num_tokens: tokens per step.
        max_model_len: tokens per request, those to generate included, rounded up to whole pages; None: the model's
            number of positions, at most 4,096.
        page_size: tokens per page.
        num_pages: pages of the KV cache; None: as many as fit into memory beside the graphs, whose memory is estimated
            where it is short (`Graphified.memory_estimate`), and no more than all rows could fill.
        num_cohorts: groups of requests that are stepped in turn; None: one per stage.
        mixed: whether decodes share steps with prompts: a step that is bound by compute for one and by memory for the
            other does both at once. Without it they take turns, and decodes stay uniform, which is best for requests
            that decode.

    Raises:
        RequestError: not an integer, or less than 1.
    """

    max_num_reqs: int = 64
    max_num_tokens: int = 2048
    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    num_cohorts: int | None = None
    mixed: bool = True

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self, recurse=False).items():
            check_values(f"weft.EngineLimits({name}={value!r})", _LIMIT_RULES, {name: value})

    def resolve(
        self,
        model: Model,
        num_stages: int,
        transport: Transport,
        speculation: Speculation | None = None,
        executor: Callable[["ResolvedLimits"], Executor] | None = None,
    ) -> "ResolvedLimits":
        """These limits for a model on its device; the same on every rank.

        Args:
            executor: makes an executor under given limits; pages leave room for its graphs. None: there are no graphs.

        Raises:
            RequestError: no room for a request.
        """
        length = self.max_model_len or min(model.config.max_position_embeddings, _MAX_CONTEXT)
        max_pages = -(-length // self.page_size)
        lens = (1,) if speculation is None else speculation.query_lens
        cohorts = self.num_cohorts or num_stages
        if self.max_num_tokens < (least := -(-self.max_num_reqs // cohorts)):
            seen = f"max_num_tokens={self.max_num_tokens}, where a step may be of {least} requests"
            raise RequestError("weft.EngineLimits(...)", seen, f"max_num_tokens={least} or more, or fewer requests")
        budget = Budget(self.max_num_reqs, self.max_num_tokens, max_pages, cohorts, self.mixed, lens)
        most = max_pages * self.max_num_reqs
        small = ResolvedLimits(budget, 1, self.page_size, speculation)
        if self.num_pages is not None:
            return attrs.evolve(small, num_pages=transport.share(self.num_pages))
        every = split_model(model.config, num_stages)
        here = [every[rank] for rank in transport.ranks(num_stages)]
        drafts = 0 if speculation is None or not here[0].first else speculation.page_bytes(self.page_size)
        page = _page_bytes(model, here, self.page_size) + drafts
        fitting = _fitting_pages(model.device, page, most, lambda: _reserved_bytes(executor and executor(small)))
        return attrs.evolve(small, num_pages=min(most, *transport.collect(fitting)))


@attrs.frozen
class ResolvedLimits:
    """Limits with all numbers known."""

    budget: Budget
    num_pages: int
    page_size: int
    speculation: Speculation | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options that must be equal on all ranks. Only the first rank has the draft model; the others have its
        configuration."""
        budget, own = attrs.asdict(self.budget, recurse=False), self.speculation
        drafts = None if own is None else (own.num_tokens, own.ngram, getattr(own.model, "config", own.model))
        return {**budget, "num_pages": self.num_pages, "page_size": self.page_size, "speculation": drafts}


def _page_bytes(model: Model, here: Sequence[StageLayout], page_size: int) -> int:
    config = model.config
    layers = sum(len(layout.layers) for layout in here)
    return 2 * layers * page_size * config.num_kv_heads * config.head_dim * model.dtype.itemsize


def _fitting_pages(device: torch.device, page_bytes: int, most: int, reserved: Callable[[], int]) -> int:
    """The number of pages that fit into memory beside the `reserved` bytes, at least 1."""
    free = free_bytes(device)
    if free is None:
        return max(1, _CPU_BYTES // page_bytes)
    if page_bytes * most <= _SMALL_CACHE_SHARE * free:
        return most
    num_bytes = reserved()  # which allocates, so the free memory is asked for afterwards
    return max(1, int(_MEMORY_SHARE * (free_bytes(device) or 0) - num_bytes) // page_bytes)


def free_bytes(device: torch.device) -> int | None:
    """The free memory of a GPU; None for a CPU, of whose memory an engine takes a fixed amount."""
    if device.type == "cpu":
        return None
    torch.cuda.empty_cache()  # give back the memory of dropped tensors and graphs
    return torch.cuda.mem_get_info(device)[0]


def _reserved_bytes(executor: Executor | None) -> int:
    """The memory that an executor takes beside pages: its tables, and its graphs once they are captured."""
    if executor is None:
        return 0
    tables = sum(x.nbytes for x in tree_leaves(executor.state) if isinstance(x, Tensor))
    return tables + int(_GRAPHS_MARGIN * sum(estimate.total_bytes for estimate in executor.memory_estimates()))


Params = DecoderParams | Mapping[str, Tensor]
"""Parameters as `weft.load` returns them in a model; or tensors by transformers' names, as in a `state_dict()`."""


@attrs.define(eq=False)
class Weights:
    """The parameters of an engine, which its steps read and never change.

    Args:
        model: the model, whose tensors the stages share.
        stages: the layers and the parameters, with slots for adapters, of each stage that runs here.
        drafts: the parameters of a draft model, or None.
        slots: the adapters' slots, by name.
    """

    model: Model
    stages: Sequence[tuple[StageLayout, DecoderParams]]
    drafts: Any
    slots: Mapping[str, int]
    _tracked: tuple[Tensor, ...] = attrs.field(init=False, repr=False)
    _seen: int = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        leaves = tree_leaves(([params for _, params in self.stages], self.drafts))
        self._tracked = tuple(x for x in leaves if isinstance(x, Tensor) and not x.is_inference())
        self.mark_seen()

    def mark_seen(self) -> None:
        """Take the tensors' present values as known."""
        self._seen = changes_of(self._tracked)

    @property
    def are_changed(self) -> bool:
        """Whether a tensor was changed in place since `mark_seen`, as far as torch counts it (`changes_of`)."""
        return changes_of(self._tracked) != self._seen

    def pairs(self, call: str, given: Any) -> list[tuple[Tensor, Tensor]]:
        """Pairs of one of the engine's tensors and the given tensor that replaces it.

        Raises:
            RequestError: not parameters, or those of another model.
        """
        if isinstance(given, DecoderParams):
            own, other = ([pair for pair in leaves_with_names(p) if isinstance(pair[1], Tensor)]
                          for p in (self.model.params, given))  # fmt: skip
            if [name for name, _ in own] != [name for name, _ in other]:
                raise RequestError(call, "parameters of another structure", f"those of {self.model!r}")
            return [_fitting(call, name, x, y) for (name, x), (_, y) in zip(own, other, strict=True)]
        if not isinstance(given, Mapping) or not all(isinstance(x, Tensor) for x in given.values()):
            instead = "params of a weft.load(...), a state_dict() by transformers' names, or None: changed in place"
            raise RequestError(call, f"params is {kind_of(given)}", instead)
        here = places(self.model.params, self.model.config, self.model.layout)
        (whole,) = split_layers(self.model.config.num_layers, 1)
        known = {*here, *tensor_shapes(self.model.config, whole)}
        if extra := [str(name) for name in given if name not in known]:
            instead = f"names as {next(iter(here))!r}, of the model's own architecture"
            raise RequestError(call, f"{list_some(extra)}, which the model does not have", instead)
        return [_fitting(call, name, here[name], x) for name, x in given.items() if name in here]

    def digest(self, given: Any) -> str:
        """One line about given parameters, to be equal on all ranks: a digest, if they are the whole model's."""
        if given is None:
            return "what was changed in place"
        (whole,) = split_layers(self.model.config.num_layers, 1)
        if not isinstance(given, Mapping) or not given.keys() >= tensor_shapes(self.model.config, whole).keys():
            return "a part of the model"
        return digest_params([given[name] for name in sorted(given)])

    def check_adapters(self, call: str, adapters: Any) -> None:
        """Check new adapters against the engine's slots.

        Raises:
            RequestError: an adapter that the engine does not have, or that does not fit its slots.
        """
        check_values(call, _RULES, {"adapters": adapters})
        if unknown := [name for name in adapters if name not in self.slots]:
            known = ", ".join(map(repr, self.slots)) or "none"
            raise RequestError(call, f"an adapter {unknown[0]!r}", f"one that the engine was made with: {known}")
        for layout, params in self.stages:
            for name, adapter in adapters.items():
                check_slot(params, self.model.config, layout, self.slots[name], adapter)

    def write(self, pairs: Iterable[tuple[Tensor, Tensor]], adapters: Mapping[str, Adapter]) -> None:
        """Write each second tensor of checked pairs over the first, and checked adapters into their slots."""
        with torch.inference_mode():  # elsewhere, tensors that were made in it cannot be written
            for own, new in pairs:
                own.copy_(new)
            for layout, params in self.stages:
                for name, adapter in adapters.items():
                    write_slot(params, self.model.config, layout, self.slots[name], adapter)
        self.mark_seen()


def _fitting(call: str, name: str, own: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """Check that two tensors have one shape, and, if one is in FP8, whose scales are other tensors, one dtype."""
    scaled = torch.float8_e4m3fn in (own.dtype, given.dtype) or not given.is_floating_point()
    if own.shape != given.shape or (scaled and own.dtype != given.dtype):
        seen = f"{name} {list(given.shape)}, {given.dtype}"
        raise RequestError(call, seen, f"{list(own.shape)}, {own.dtype}")
    return own, given.detach()


def engine_ladder(graph: str, budget: Budget, num_adapters: int) -> Ladder[BatchDescriptor]:
    """The classes of a cohort's steps that may be captured."""
    loras = lora_rungs(min(num_adapters, budget.cohort_size))
    return make_ladder(graph, Limits(budget.cohort_size, budget.max_num_tokens, budget.query_lens, loras))


def make_states(model: Model, layouts: Sequence[StageLayout], limits: ResolvedLimits) -> tuple[State, ...]:
    """An empty state for each stage that runs here."""
    speculation = limits.speculation
    spare = 0 if speculation is None else speculation.spare_pages(limits.page_size)
    states = empty_states(
        model.config,
        layouts,
        max_num_reqs=limits.budget.max_num_reqs,
        num_pages=limits.num_pages,
        max_pages=limits.budget.max_pages + spare,
        page_size=limits.page_size,
        dtype=model.dtype,
        device=model.device,
    )
    return states if speculation is None else speculation.states(states, layouts)


def make_weights(
    model: Model,
    num_stages: int,
    transport: Transport,
    adapters: Mapping[str, Adapter],
    speculation: Speculation | None,
) -> Weights:
    """The parameters of the stages that run here, with the adapters in slots, in their order."""
    every = split_model(model.config, num_stages)
    layouts = [every[rank] for rank in transport.ranks(num_stages)]
    params = stage_params(model, layouts, [*adapters.values()])
    drafts = None if speculation is None or not layouts[0].first else speculation.params
    stages = tuple(zip(layouts, params, strict=True))
    return Weights(model, stages, drafts, {name: slot for slot, name in enumerate(adapters)})


def assert_same_engines(
    assert_equal: Callable[[str, str], None],
    model: Model,
    limits: ResolvedLimits,
    options: Mapping[str, Any],
    adapters: Mapping[str, Adapter],
) -> None:
    """Compare the engines of all ranks."""
    facts = {**model.facts, **limits.options, **options}
    facts |= {f"adapter {name!r}": own.weights for name, own in adapters.items()}
    for subject, value in facts.items():
        assert_equal(subject, str(value))


def make_executor(
    weights: Weights,
    limits: ResolvedLimits,
    num_stages: int,
    ladder: Ladder[BatchDescriptor],
    transport: Transport,
    *,
    num_logprobs: int = 0,
    keep_logits: bool = False,
    backend: str | None = None,
) -> Executor:
    """An executor for an engine's work: one graphified step for one stage, a pipeline of graphified stages for more.

    Args:
        ladder: the classes to capture; if it is empty, everything runs eagerly.
        keep_logits: whether outputs hold logits.
    """
    model, speculation = weights.model, limits.speculation
    layouts = [layout for layout, _ in weights.stages]
    drafts = 0 if speculation is None else speculation.num_tokens
    extras: dict[str, Any] = {"num_logprobs": num_logprobs, "keep_logits": keep_logits, "num_drafts": drafts}
    every = split_model(model.config, num_stages)
    stages: list[Any] = [decoder_stage(model.config, layout, **extras) for layout in every]
    params: tuple[Any, ...] = tuple(own for _, own in weights.stages)
    state = make_states(model, layouts, limits)
    if speculation is not None:
        stages = speculation.stages(stages)
        params = ((params[0], weights.drafts), *params[1:]) if layouts[0].first else params
    params = tree_map(_detached, params)
    if num_stages == 1:
        return StepExecutor(graph_step(compose(stages, advance=advance), ladder, backend), params, state, model.device)
    x = _example(model, drafts)
    spanned = [graph_step(stage, ladder, backend) for stage in stages]
    step = pipeline([with_edits(s) for s in spanned], advance=advance_work, schema=Schema.of(x), transport=transport)
    here = transport.ranks(num_stages)
    graphs = [(spanned[rank], x if rank else None) for rank in here] if len(ladder) else []
    return PipelineExecutor(step, params, state, model.device, graphs)


def _detached(leaf: Any) -> Any:
    """A parameter without a gradient, so that the steps keep nothing for backward()."""
    return leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def _example(model: Model, drafts: int) -> IntermediateTensors:
    """What one stage sends to the next, for one token."""
    ids = torch.zeros(1, dtype=torch.int64, device=model.device)
    hidden = torch.zeros(1, model.config.hidden_size, dtype=model.dtype, device=model.device)
    has_mrope = model.config.rope.mrope_section is not None
    return IntermediateTensors(hidden, ids if drafts else None, ids.new_zeros(1, 3) if has_mrope else None)


def _are_adapters(given: Any) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(name, str) and isinstance(each, Adapter) for name, each in given.items()
    )


_RULES: dict[str, Rule] = {
    "model": (Model, "model = weft.load(folder)"),
    "seed": (lambda value: value is None or is_int(value), "a whole number, or None"),
    "graph": (lambda value: value in MODES, f"one of {', '.join(MODES)}"),
    "run_ahead": (lambda value: is_int(value, 0), "a whole number of steps, or 0"),
    "limits": (EngineLimits | None, "weft.EngineLimits(...), or None"),
    "speculation": (Speculation | None, "weft.Speculation(...), or None"),
    "adapters": (
        lambda value: value is None or _are_adapters(value), "{name: weft.load_adapter(model, folder)}, or None"
    ),
}  # fmt: skip


def check_engine(call: str, model: Any, transport: Any = None, **options: Any) -> None:
    """Check arguments of `Engine`, or those of `generate` and others that they pass on to it.

    Raises:
        RequestError: not a model, not a transport, or an option of the wrong type or out of range.
    """
    if (wrong := wrong_transport(transport)) is not None:
        raise RequestError(call, *wrong)
    check_values(call, _RULES, {"model": model})
    vocab = model.config.vocab_size
    own: dict[str, Rule] = {
        "pipeline": stage_rule(model),
        "num_logprobs": (lambda value: is_int(value, 0, vocab), f"a whole number from 0 to {vocab}"),
    }
    check_values(call, _RULES | own, options)
