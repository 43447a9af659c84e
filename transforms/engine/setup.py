"""Setup: puts a model's weights, states and stages together as one step: `make_executor` for an
engine, `make_runner` without one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import Rule, check_values
from weft.batches.batch import Batch
from weft.batches.carried import Carried
from weft.batches.outputs import IntermediateTensors, Output, PerToken
from weft.batches.sampling import SamplingParams
from weft.batches.state import State, admit, advance
from weft.display.tables import Table
from weft.errors import DescriptorError, ProgramError
from weft.stages.adapters.adapter import Adapter
from weft.stages.adapters.slots import stage_params
from weft.stages.custom.functions import DecoderStage, caching_policy, default_page_size
from weft.stages.inputs import NO_DRAFTS
from weft.stages.layout import StageLayout, empty_states, split_model
from weft.stages.model import Model, cache_dtype, model_facts, rank_config
from weft.stages.params import num_bytes
from weft.torchapi.inductor import Compiler
from weft.transforms.engine.memory import empty_pages
from weft.transforms.engine.options import (
    RULES,
    ResolvedLimits,
    check_compiled,
    spare_pages,
    stage_rule,
    with_drafter,
    with_drafting,
)
from weft.transforms.engine.split import Split
from weft.transforms.engine.steps.classes import Classes, eager_ladder, engine_ladder, model_ladder
from weft.transforms.engine.steps.executor import Executor, PipelineExecutor, StepExecutor
from weft.transforms.engine.steps.step import (
    advance_work,
    graph_step,
    is_advanced,
    with_advance,
    with_edits,
)
from weft.transforms.engine.weights import Weights
from weft.transforms.graphs.ladder import Limits
from weft.transforms.pipelines.pipeline import compose, pipeline
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.local import Local
from weft.values.schema import Schema
from weft.values.trees import tree_map

_LENGTHS: Rule = (
    lambda length_list: (
        isinstance(length_list, Sequence)
        and length_list
        and all(isinstance(n, int) and n >= 1 for n in length_list)
    ),
    "a list of whole numbers >= 1, one a request",
)


def assert_same_engines(
    assert_equal: Callable[[str, str], None],
    model: Model,
    limits: ResolvedLimits,
    options: Mapping[str, Any],
    adapters: Mapping[str, Adapter],
) -> None:
    """Compare the model, limits, options and adapters of the engines on all ranks."""
    facts = {**model_facts(model), **limits.options, **options}
    facts |= {f"adapter {name!r}": adapter.weights for name, adapter in adapters.items()}
    for subject, value in facts.items():
        assert_equal(subject, str(value))


def assert_same_left_out(call: str, transport: Transport, arguments: Mapping[str, Any]) -> None:
    """Check that all ranks leave out the same arguments. Ranks exchange the values that replace a
    None; if only some of them did, they would wait for the others forever.

    Raises:
        ProgramError: another rank leaves out other arguments.
    """
    left_out = [name for name, value in arguments.items() if value is None]
    # Every rank collects, also one that left out nothing: a rank that skipped the call would leave
    # the others waiting in it.
    for rank, other in enumerate(transport.collect(left_out)):
        for name in arguments:
            if (name in left_out) != (name in other):
                here, there = (
                    ("None", "a number") if name in left_out else (f"{arguments[name]}", "None")
                )
                problem = f"{name}={here}, where rank {rank} has {there}"
                raise ProgramError(call, problem, "the same arguments on every rank")


def make_states(
    model: Model, layouts: Sequence[StageLayout], limits: ResolvedLimits
) -> tuple[State, ...]:
    """An empty state for each stage that runs here."""
    speculation = limits.speculation
    functions = model.functions
    if speculation is None:
        spare = 0
    else:
        spare = spare_pages(speculation, limits.page_size)
    is_recomputed = caching_policy(functions) == "recompute"
    states = empty_states(
        rank_config(model),
        layouts,
        max_num_reqs=limits.budget.max_num_reqs,
        # With the policy `recompute` one more page is scratch, to which recomputed tokens are
        # written.
        num_pages=limits.num_pages + is_recomputed,
        max_pages=limits.budget.max_pages + spare,
        page_size=limits.page_size,
        extras=model.functions.extras,
        dtype=cache_dtype(model),
        device=model.device,
    )
    if is_recomputed:
        states = tuple(
            attrs.evolve(state, num_recomputed_tokens=torch.zeros_like(state.positions))
            for state in states
        )
    if speculation is None:
        drafts = 0
    else:
        drafts = speculation.num_tokens
    pages = None
    if caching_policy(functions) == "snapshot":
        pages = limits.num_pages
    states = tuple(_carrying(state, functions.carries, drafts, pages) for state in states)
    states = tuple(
        _with_pages_beside(state, layout, model)
        for state, layout in zip(states, layouts, strict=True)
    )
    if speculation is None:
        return states
    return with_drafting(speculation, states, layouts)


def _carrying(
    state: State, defaults: Mapping[str, Tensor], num_drafts: int = 0, num_pages: int | None = None
) -> State:
    """The same empty state, with room for what its requests carry."""
    if not defaults:
        return state
    device_defaults = {name: x.to(state.positions.device) for name, x in defaults.items()}
    num_rows = len(state.positions)
    return attrs.evolve(
        state,
        carried=Carried.of(device_defaults, num_rows, num_drafts=num_drafts, num_pages=num_pages),
    )


def _with_pages_beside(state: State, layout: StageLayout, model: Model) -> State:
    """The same empty state, with pages for the models that run beside the last stage."""
    if not layout.last or not model.functions.beside:
        return state
    _, _, num_pages, page_size, _, _ = state.kv_pages.shape
    pages = {
        name: empty_pages(side_model, num_pages, page_size)
        for name, side_model in model.functions.beside.items()
    }
    return attrs.evolve(state, beside=pages)


def make_executor(
    weights: Weights,
    limits: ResolvedLimits,
    split: Split,
    graph: str,
    *,
    num_logprobs: int = 0,
    keep_logits: bool = False,
    backend: str | None = None,
    compiler: Compiler | None = None,
    strict: bool = False,
) -> Executor:
    """Make an executor for an engine's work: one graphified step for a single stage, a pipeline of
    graphified stages for several.

    Args:
        graph: one of `weft.transforms.MODES`.
        keep_logits: whether outputs hold logits.
        backend, compiler, strict: options of `graphify`.
    """
    graph_options = (backend, compiler, strict)
    model = weights.model
    speculation = limits.speculation
    budget = limits.budget
    num_adapters = len(weights.slots)
    ladder = engine_ladder(graph, budget, num_adapters, model)
    eager = eager_ladder(budget, num_adapters, model, torch.device(model.device))
    classes = Classes(ladder, eager, budget.max_num_tokens)
    layouts = [layout for layout, _ in weights.stages]
    if speculation is None:
        drafts = 0
    else:
        drafts = speculation.num_tokens
    extras: dict[str, Any] = {
        "num_logprobs": num_logprobs,
        "keep_logits": keep_logits,
        "num_drafts": drafts,
    }
    stages: list[Any] = [
        model.stage(layout, **extras) for layout in split_model(model.config, split.num_stages)
    ]
    params: tuple[Any, ...] = tuple(decoder_params for _, decoder_params in weights.stages)
    state = make_states(model, layouts, limits)
    if speculation is not None:
        stages = with_drafter(speculation, stages)
        if layouts[0].first:
            params = ((params[0], weights.drafts), *params[1:])
    params = tree_map(_detached, params)
    # One rank sends nothing, so that the stages, the sampling and the advance fit into one graph.
    if split.num_stages == split.num_shards == 1:
        whole = graph_step(compose(stages, advance=advance), ladder, *graph_options)
        return StepExecutor(whole, params, state, model.device, classes)
    x = _example(model, drafts)
    # Ranks that share a single stage run it as a pipeline of one stage.
    alone = split.num_stages == 1
    spanned = [
        graph_step(with_advance(stage) if alone else stage, ladder, *graph_options)
        for stage in stages
    ]
    pipeline_options: dict[str, Any] = {
        "transport": split.transport,
        "mesh": split.mesh,
        "schema": Schema.of(x),
    }
    step = pipeline(
        # Around the graphs, not in them: edits are static fields, so each new list of pages would
        # be another graph.
        [with_edits(s) for s in spanned],
        advance=is_advanced if alone else advance_work,
        **pipeline_options,
    )
    # With an empty ladder (mode none) `graph_step` returns the plain stage: there is nothing to
    # capture.
    if len(ladder):
        graphs = [(spanned[stage], x if stage else None) for stage in split.here]
    else:
        graphs = []
    return PipelineExecutor(step, params, state, model.device, classes, graphs)


def _detached(leaf: Any) -> Any:
    """A parameter detached from autograd, so that steps keep nothing for backward()."""
    if isinstance(leaf, Tensor) and leaf.requires_grad:
        return leaf.detach()
    return leaf


def _example(model: Model, drafts: int) -> IntermediateTensors:
    """An example of what one stage sends to the next, for one token."""
    ids = torch.zeros(1, dtype=torch.int64, device=model.device)
    hidden = torch.zeros(1, model.config.hidden_size, dtype=model.dtype, device=model.device)
    has_mrope = model.config.rope.mrope_section is not None
    if has_mrope:
        positions = ids.new_zeros(1, 3)
    else:
        positions = None
    captures = model.functions.captures
    captured = {
        name: PerToken(x.new_zeros(1, *x.shape, device=model.device))
        for name, x in captures.items()
    }
    # The schema of all messages is made from this example, so it has an optional field if and only
    # if every message has it.
    return IntermediateTensors(hidden, ids if drafts else None, positions, captured)


@attrs.frozen(eq=False, repr=False)
class Runner:
    """A model that is ready to step; `make_state` makes its state.

    Args:
        step: `(params, state, batch) -> (state, Output)` over tuples with one entry for each stage
            that runs here.
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
        return (
            f"<Runner of {len(self.stages)} stages: layers {of} here, {len(self.graphs)}"
            " graphified>"
        )

    def _repr_html_(self) -> str:
        rows = (
            (
                f"{layout.index}",
                f"{layout.start} to {layout.stop - 1}",
                f"{num_bytes(params) / 2**20:,.1f} MiB",
            )
            for layout, params in zip(self.layouts, self.params, strict=True)
        )
        return Table(("stage", "layers", "parameters"), tuple(rows), repr(self))._repr_html_()


def make_runner(
    model: Model,
    limits: Limits,
    *,
    num_stages: int = 1,
    mode: str = "full",
    backend: str | None = None,
    compiler: Compiler | None = None,
    strict: bool = False,
    keep_logits: bool = False,
    num_logprobs: int = 0,
    transport: Transport | None = None,
) -> Runner:
    """Compose the model's stages into a step: `graphify(compose(...))` for one stage,
    `pipeline(map(graphify, stages))` for several.

    Args:
        model: the checkpoint.
        limits: the bounds of a batch, which determine the ladder.
        num_stages: the number of pipeline stages; a batch is cut into as many micro-batches.
        mode: a graph mode (`weft.transforms.graphs.ladder.MODES`).
        backend, compiler, strict: options of `graphify`.
        keep_logits: whether outputs hold logits.
        num_logprobs: the number of likeliest tokens whose logprobs outputs hold.
        transport: the pipeline's transport; None: `Local()`.

    Raises:
        ProgramError: more stages than layers, a model that is not the part that runs here, or a
            share of a model.
        CompilerError: torch has no such compiler, or it would have nothing to compile.
        DescriptorError: an unknown mode, or limits with room for drafts (`query_lens`), which a
            runner does not make.
    """
    call = f"make_runner(model, limits, num_stages={num_stages!r})"
    check_compiled(call, model, compiler, mode=mode)
    graph_options = (backend, compiler, strict)
    rules = {"num_stages": stage_rule(model)}
    if max(limits.query_lens) > 1:
        raise DescriptorError(
            call, f"limits.query_lens={limits.query_lens}, where nothing drafts", NO_DRAFTS
        )
    ladder = model_ladder(mode, limits, model.functions)
    check_values(
        call, RULES | rules, {"transport": transport, "num_stages": num_stages}, ProgramError
    )
    # A runner has no mesh: a share would compute its part of each sum, and nobody would add the
    # others'.
    if model.shard[1] > 1:
        instead = "weft.Engine, whose ranks share layers; or weft.load(path) without shard="
        raise ProgramError(call, f"{model!r}", instead)
    transport = transport or Local()
    every = split_model(model.config, num_stages)
    layouts = tuple(every[rank] for rank in transport.ranks(num_stages))
    extras: dict[str, Any] = {"keep_logits": keep_logits, "num_logprobs": num_logprobs}
    stages = tuple(model.stage(layout, **extras) for layout in every)
    params = stage_params(model, layouts)
    if len(layouts) < num_stages:
        # Other processes run the other stages, and must have the same model and options.
        for subject, value in {
            **model_facts(model),
            "limits": f"{limits}",
            "mode": mode,
            **extras,
        }.items():
            transport.assert_equal(subject, f"{value}")
    if num_stages == 1:
        whole = graph_step(compose(stages, advance=advance), ladder, *graph_options)
        return Runner(whole, params, stages, layouts, (whole,) if len(ladder) else ())
    spanned = [graph_step(stage, ladder, *graph_options) for stage in stages]
    step = pipeline(
        spanned,
        # The fewest parts with which all stages can be busy at once.
        microbatches=num_stages,
        advance=advance,
        schema=Schema.of(_example(model, 0)),
        transport=transport,
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
    adapters: Sequence[int] | None = None,
) -> tuple[State, ...]:
    """Make each stage's state, with one admitted request per length, in rows 0, 1, ..., and pages
    for each request to grow to its length.

    Args:
        model: the checkpoint.
        layouts: the stages' layers, as in `Runner.layouts`.
        lengths: the most tokens that each request will hold.
        sampling, prompts, mrope_position_deltas, extras, adapters: one per request, as
            `weft.batches.state.admit` takes them. The defaults are greedy sampling; empty prompts,
            so that penalties count no prompt tokens; 0; the model's extras; and no adapters.

    Raises:
        RequestError: lengths that are not a list of integers >= 1.
    """
    check_values("make_state(model, layouts, lengths)", {"lengths": _LENGTHS}, {"lengths": lengths})
    page_size = default_page_size(model.functions)
    counts = [-(-length // page_size) for length in lengths]
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
        page_size=page_size,
        extras=model.functions.extras,
        dtype=cache_dtype(model),
        device=model.device,
    )
    rows = range(len(lengths))
    options: dict[str, Any] = {
        "mrope_position_deltas": mrope_position_deltas,
        "extras": extras,
        "adapters": adapters,
    }
    beside = (
        _with_pages_beside(state, layout, model)
        for state, layout in zip(states, layouts, strict=True)
    )
    carrying = (_carrying(state, model.functions.carries) for state in beside)
    return tuple(admit(empty, rows, pages, params, prompts, **options) for empty in carrying)
