"""Setup: a model's weights, states and stages as one step: `make_executor` for an engine, `make_runner` without one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import Rule, check_values
from weft.batch import Batch
from weft.descriptor import BatchDescriptor
from weft.display.tables import Table
from weft.effects import Schema
from weft.errors import ProgramError, RequestError
from weft.outputs import IntermediateTensors, Output, PerToken
from weft.sampling import SamplingParams
from weft.stages.adapters import Adapter, check_slot, stage_params, write_slot
from weft.stages.checkpoint import digest_params, list_some, places, tensor_shapes
from weft.stages.functions import DecoderStage
from weft.stages.layout import StageLayout, empty_states, split_layers, split_model
from weft.stages.model import Model
from weft.stages.params import DecoderParams, num_bytes
from weft.state import State, admit, advance
from weft.torchapi.private import changes_of
from weft.transforms.engine.executor import Executor, PipelineExecutor, StepExecutor
from weft.transforms.engine.options import RULES, ResolvedLimits, Speculation, stage_rule
from weft.transforms.engine.requests import Budget
from weft.transforms.engine.step import advance_work, with_edits
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.ladder import Ladder, Limits, lora_rungs, make_ladder
from weft.transforms.pipelines.pipeline import compose, pipeline
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.local import Local
from weft.trees import leaves_with_names, tree_leaves, tree_map

PAGE_SIZE = 16
"""Tokens per page."""
SPLIT_AT = ("weft::paged_attention",)
"""The operators at which piecewise graphs cut a decoder."""
_LENGTHS: Rule = (
    lambda given: isinstance(given, Sequence) and given and all(isinstance(n, int) and n >= 1 for n in given),
    "a list of whole numbers >= 1, one a request",
)
_PARAMS: Rule = (
    lambda given: (
        isinstance(given, DecoderParams)
        or (isinstance(given, Mapping) and all(isinstance(x, Tensor) for x in given.values()))
    ),
    "params of a weft.load(...), a state_dict() by transformers' names, or None: changed in place",
)
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
        check_values(call, {"params": _PARAMS}, {"params": given})
        if isinstance(given, DecoderParams):
            here, given = _tensors(self.model.params), _tensors(given)
            wrong, instead = here.keys() ^ given.keys(), f"parameters of the structure of {self.model!r}"
            where = "which either the model or the given parameters lack"
        else:
            here = places(self.model.params, self.model.config, self.model.layout)
            (whole,) = split_layers(self.model.config.num_layers, 1)
            wrong = given.keys() - here.keys() - tensor_shapes(self.model.config, whole).keys()
            instead = f"names as {next(iter(here))!r}, of the model's own architecture"
            where = "which the model does not have"
        if wrong:
            raise RequestError(call, f"{list_some(sorted(map(str, wrong)))}, {where}", instead)
        new = {name: x for name, x in given.items() if name in here}
        check_values(call, {name: _like(here[name]) for name in new}, new)
        return [(here[name], x.detach()) for name, x in new.items()]

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
        check_values(call, RULES, {"adapters": adapters})
        adapters = adapters or {}
        known = f"names that the engine was made with: {', '.join(map(repr, self.slots)) or 'none'}"
        rules: dict[str, Rule] = {"adapters": (lambda given: given.keys() <= self.slots.keys(), known)}
        check_values(call, rules, {"adapters": adapters})
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


def _tensors(params: DecoderParams) -> dict[str, Tensor]:
    return {name: leaf for name, leaf in leaves_with_names(params) if isinstance(leaf, Tensor)}


def _like(own: Tensor) -> Rule:
    """The rule of a tensor that replaces `own`: its shape, and, if one of them is in FP8, whose scales are other
    tensors, its dtype."""

    def fits(given: Tensor) -> bool:
        scaled = torch.float8_e4m3fn in (own.dtype, given.dtype) or not given.is_floating_point()
        return own.shape == given.shape and (not scaled or own.dtype == given.dtype)

    return fits, f"{list(own.shape)}, {own.dtype}"


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
        extras=model.functions.extras,
        dtype=model.dtype,
        device=model.device,
    )
    return states if speculation is None else speculation.states(states, layouts)


def make_executor(
    weights: Weights,
    limits: ResolvedLimits,
    num_stages: int,
    graph: str,
    transport: Transport,
    *,
    num_logprobs: int = 0,
    keep_logits: bool = False,
    backend: str | None = None,
) -> Executor:
    """An executor for an engine's work: one graphified step for one stage, a pipeline of graphified stages for more.

    Args:
        graph: one of `weft.transforms.MODES`.
        keep_logits: whether outputs hold logits.
    """
    model, speculation = weights.model, limits.speculation
    ladder = engine_ladder(graph, limits.budget, len(weights.slots))
    layouts = [layout for layout, _ in weights.stages]
    drafts = 0 if speculation is None else speculation.num_tokens
    extras: dict[str, Any] = {"num_logprobs": num_logprobs, "keep_logits": keep_logits, "num_drafts": drafts}
    every = split_model(model.config, num_stages)
    stages: list[Any] = [model.stage(layout, **extras) for layout in every]
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


def graph_step(step: Any, ladder: Ladder[BatchDescriptor], backend: str | None) -> Any:
    """Graphify a decoder's step or stage, in pieces around its attention where the ladder asks for them. With an empty
    ladder, return it as it is."""
    return graphify(step, ladder=ladder, split_at=SPLIT_AT, backend=backend) if len(ladder) else step


def _example(model: Model, drafts: int) -> IntermediateTensors:
    """What one stage sends to the next, for one token."""
    ids = torch.zeros(1, dtype=torch.int64, device=model.device)
    hidden = torch.zeros(1, model.config.hidden_size, dtype=model.dtype, device=model.device)
    has_mrope = model.config.rope.mrope_section is not None
    positions, captures = ids.new_zeros(1, 3) if has_mrope else None, model.functions.captures
    captured = {name: PerToken(x.new_zeros(1, *x.shape, device=model.device)) for name, x in captures.items()}
    return IntermediateTensors(hidden, ids if drafts else None, positions, captured)


@attrs.frozen(eq=False, repr=False)
class Runner:
    """A model ready to step; `make_state` makes its state.

    Args:
        step: `(params, state, batch) -> (state, Output)` over tuples with one entry for each stage that runs here.
        params: that tuple of parameters.
        stages: all plain stages that the step is composed of.
        layouts: the layers of each stage that runs here.
        graphs: the graphified functions inside the step, for their `cache_info()`.
    """

    step: Callable[[Any, Any, Batch], tuple[Any, Output]]
    params: tuple[Any, ...]
    stages: tuple[DecoderStage, ...]
    layouts: tuple[StageLayout, ...]
    graphs: tuple[Any, ...]

    def __repr__(self) -> str:
        of = ", ".join(f"{layout.start} to {layout.stop - 1}" for layout in self.layouts)
        return f"<Runner of {len(self.stages)} stages: layers {of} here, {len(self.graphs)} graphified>"

    def _repr_html_(self) -> str:
        rows = (
            (f"{layout.index}", f"{layout.start} to {layout.stop - 1}", f"{num_bytes(own) / 2**20:,.1f} MiB")
            for layout, own in zip(self.layouts, self.params, strict=True)
        )
        return Table(("stage", "layers", "parameters"), tuple(rows), repr(self))._repr_html_()


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
    """Compose the model's stages into a step: `graphify(compose(...))` for one stage, `pipeline(map(graphify, stages))`
    for more.

    Args:
        model: the checkpoint.
        limits: the bounds of a batch, and so of the ladder.
        num_stages: the number of pipeline stages; a batch is cut into as many micro-batches.
        mode: a graph mode (`weft.transforms.graphs.ladder.MODES`).
        backend: of graphify.
        keep_logits: whether outputs hold logits.
        num_logprobs: the number of likeliest tokens whose logprobs outputs hold.
        transport: of the pipeline; None: `Local()`.

    Raises:
        ProgramError: more stages than layers, or a model that is not the part that runs here.
        DescriptorError: an unknown mode.
    """
    ladder = make_ladder(mode, limits)
    call, rules = f"make_runner(model, limits, num_stages={num_stages!r})", {"num_stages": stage_rule(model)}
    check_values(call, RULES | rules, {"transport": transport, "num_stages": num_stages}, ProgramError)
    transport = transport or Local()
    every = split_model(model.config, num_stages)
    layouts = tuple(every[rank] for rank in transport.ranks(num_stages))
    extras: dict[str, Any] = {"keep_logits": keep_logits, "num_logprobs": num_logprobs}
    stages = tuple(model.stage(layout, **extras) for layout in every)
    params = stage_params(model, layouts)
    if len(layouts) < num_stages:
        for subject, value in {**model.facts, "limits": f"{limits}", "mode": mode, **extras}.items():
            transport.assert_equal(subject, f"{value}")
    if num_stages == 1:
        whole = graph_step(compose(stages, advance=advance), ladder, backend)
        return Runner(whole, params, stages, layouts, (whole,) if len(ladder) else ())
    spanned = [graph_step(stage, ladder, backend) for stage in stages]
    step = pipeline(
        spanned, microbatches=num_stages, advance=advance, schema=Schema.of(_example(model, 0)), transport=transport
    )
    return Runner(step, params, stages, layouts, tuple(spanned) if len(ladder) else ())


def make_state(
    model: Model,
    layouts: Sequence[StageLayout],
    lengths: Sequence[int],
    sampling: Sequence[SamplingParams] | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    mrope_position_deltas: Sequence[int] | None = None,
    extras: Sequence[Mapping[str, Tensor]] | None = None,
) -> tuple[State, ...]:
    """Make each stage's state, with one admitted request per length, in rows 0, 1, ..., and enough pages for each
    request to grow to its length.

    Args:
        model: the checkpoint.
        layouts: the stages' layers, as in `Runner.layouts`.
        lengths: the most tokens that each request will hold.
        sampling, prompts, mrope_position_deltas, extras: one per request, as `weft.state.admit` takes them. None:
            greedy; empty prompts, so that penalties count none of their tokens; 0; the model's defaults.

    Raises:
        RequestError: lengths that are not a list of integers >= 1.
    """
    check_values("make_state(model, layouts, lengths)", {"lengths": _LENGTHS}, {"lengths": lengths})
    counts = [-(-length // PAGE_SIZE) for length in lengths]
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    pages = [range(end - count, end) for count, end in zip(counts, ends, strict=True)]
    params = [SamplingParams(temperature=0.0)] * len(lengths) if sampling is None else sampling
    prompts = prompts or [()] * len(lengths)
    states = empty_states(
        model.config,
        layouts,
        max_num_reqs=len(lengths),
        num_pages=ends[-1],
        max_pages=max(counts),
        page_size=PAGE_SIZE,
        extras=model.functions.extras,
        dtype=model.dtype,
        device=model.device,
    )
    rows = range(len(lengths))
    own: dict[str, Any] = {"mrope_position_deltas": mrope_position_deltas, "extras": extras}
    return tuple(admit(empty, rows, pages, params, prompts, **own) for empty in states)
