"""`make_runner`: a model as one step for experiments without an engine, its stages composed, graphified or spanned."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from weft.arguments.checks import is_int
from weft.batch import Batch
from weft.descriptor import BatchDescriptor
from weft.display.tables import Table
from weft.effects import Schema, TensorSchema
from weft.errors import ProgramError
from weft.outputs import Output
from weft.sampling import SamplingParams
from weft.stages.adapters import stage_params
from weft.stages.decoder import DecoderStage, decoder_stage, empty_states
from weft.stages.layout import StageLayout, split_model
from weft.stages.model import Model
from weft.stages.params import num_bytes
from weft.state import State, admit, advance
from weft.transforms.engine.faults import Rule, check_values
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.ladder import Ladder, Limits, make_ladder
from weft.transforms.pipelines.argument_checks import wrong_transport
from weft.transforms.pipelines.pipeline import compose, pipeline
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.local import Local

PAGE_SIZE = 16
"""Tokens per page."""
SPLIT_AT = ("weft::paged_attention",)
"""The operators at which piecewise graphs cut a decoder."""
_LENGTHS: Rule = (
    lambda given: isinstance(given, Sequence) and given and all(isinstance(n, int) and n >= 1 for n in given),
    "a list of whole numbers >= 1, one a request",
)


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
    if (wrong := wrong_transport(transport)) is not None:
        raise ProgramError(f"make_runner(model, limits, num_stages={num_stages}, transport=...)", *wrong)
    call, rules = f"make_runner(model, limits, num_stages={num_stages!r})", {"num_stages": stage_rule(model)}
    check_values(call, rules, {"num_stages": num_stages}, ProgramError)
    transport = transport or Local()
    every = split_model(model.config, num_stages)
    layouts = tuple(every[rank] for rank in transport.ranks(num_stages))
    extras: dict[str, Any] = {"keep_logits": keep_logits, "num_logprobs": num_logprobs}
    stages = tuple(decoder_stage(model.config, layout, **extras) for layout in every)
    params = stage_params(model, layouts)
    if len(layouts) < num_stages:
        for subject, value in {**model.facts, "limits": f"{limits}", "mode": mode, **extras}.items():
            transport.assert_equal(subject, f"{value}")
    if num_stages == 1:
        whole = graph_step(compose(stages, advance=advance), ladder, backend)
        return Runner(whole, params, stages, layouts, (whole,) if len(ladder) else ())
    spanned = [graph_step(stage, ladder, backend) for stage in stages]
    step = pipeline(spanned, microbatches=num_stages, advance=advance, schema=_edge_schema(model), transport=transport)
    return Runner(step, params, stages, layouts, tuple(spanned) if len(ladder) else ())


def stage_rule(model: Model) -> Rule:
    """The rule of a number of stages that the model's layers are split into."""
    most = model.config.num_layers
    return (lambda value: is_int(value, 1, most)), f"a whole number from 1 to {most}, the model's layers"


def graph_step(step: Any, ladder: Ladder[BatchDescriptor], backend: str | None) -> Any:
    """Graphify a decoder's step or stage, in pieces around its attention where the ladder asks for them. With an empty
    ladder, return it as it is."""
    return graphify(step, ladder=ladder, split_at=SPLIT_AT, backend=backend) if len(ladder) else step


def _edge_schema(model: Model) -> Schema:
    """The schema of what one stage sends to the next."""
    hidden = TensorSchema("hidden_states", ("num_tokens", model.config.hidden_size), model.dtype)
    has_mrope = model.config.rope.mrope_section is not None
    return Schema((hidden, *((TensorSchema("positions", ("num_tokens", 3), torch.int64),) if has_mrope else ())))


def make_state(
    model: Model,
    layouts: Sequence[StageLayout],
    lengths: Sequence[int],
    sampling: Sequence[SamplingParams] | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    mrope_position_deltas: Sequence[int] | None = None,
) -> tuple[State, ...]:
    """Make each stage's state, with one admitted request per length, in rows 0, 1, ..., and enough pages for each
    request to grow to its length.

    Args:
        model: the checkpoint.
        layouts: the stages' layers, as in `Runner.layouts`.
        lengths: the most tokens that each request will hold.
        sampling, prompts, mrope_position_deltas: one per request, as `weft.state.admit` takes them. None: greedy;
            empty prompts, so that penalties count none of their tokens; 0.

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
        dtype=model.dtype,
        device=model.device,
    )
    rows = range(len(lengths))
    return tuple(
        admit(empty, rows, pages, params, prompts, mrope_position_deltas=mrope_position_deltas) for empty in states
    )
