"""`weft plan`: predict a decode loop over pipeline stages, from a config.json and a memory bandwidth alone."""

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from rich.text import Text

from weft.arguments.json_text import write_json
from weft.display.durations import duration
from weft.effects import Program, listing
from weft.errors import ProgramError
from weft.stages.config import ModelConfig
from weft.stages.layout import StageLayout, Weights, balance, layer_weights, split_layers
from weft.transforms.cli.shared import check_writable, console, counted, table, write_file
from weft.transforms.cli.sources import read_config
from weft.transforms.pipelines.cohorts import CohortPlan, CohortRow, plan_cohorts
from weft.transforms.pipelines.drawing import LEAST_WIDTH
from weft.transforms.pipelines.schedule import decode_jobs, make_programs
from weft.transforms.pipelines.simulate import Costs, simulate
from weft.transforms.pipelines.timeline import Timeline

_MOST_JOBS = 10_000
"""The most steps of all cohorts that are drawn."""
_OUTPUT_BYTES = 8 + 4
"""Bytes of a request's token and logprob (`weft.outputs.Output`)."""
_NOTE = (
    "Predicted from bytes over bandwidth, not measured: a stage takes the time in which its device reads the weights "
    "and the KV cache once. Arithmetic, activations, kernel launches and the host count for nothing, so a real step is "
    "slower, and much slower if one of these bounds it."
)


@attrs.frozen
class Bytes:
    """The bytes that a decode step reads.

    Args:
        layer: the weights of the largest layer, with all its experts.
        head: the final norm and the head's matrix.
        embedding: one row of the embedding, per token.
        kv: one token of context, in one layer.
        message: what one stage sends to the next, per token.
    """

    layer: int
    head: int
    embedding: int
    kv: int
    message: int

    @classmethod
    def of(cls, config: ModelConfig) -> "Bytes":
        """The bytes of a model in the dtype that it declares."""
        size, row = config.dtype.itemsize, config.hidden_size * config.dtype.itemsize
        layer = max(round(weights.fixed + weights.experts) for weights in layer_weights(config))
        kv = 2 * config.num_kv_heads * config.head_dim * size
        return cls(layer, row + config.vocab_size * row, row, kv, row)


@attrs.frozen
class Split:
    """The layers of each stage, and the seconds that each stage takes for one cohort."""

    layouts: tuple[StageLayout, ...]
    seconds: tuple[float, ...]

    def report(self) -> list[dict[str, Any]]:
        """One row per stage."""
        stages = zip(self.layouts, self.seconds, strict=True)
        return [{"start": own.start, "stop": own.stop, "seconds": seconds} for own, seconds in stages]


@attrs.frozen
class Loads:
    """The seconds that stages take, as bytes over bandwidth.

    Args:
        bytes: of the model.
        weights: of each layer.
        context: tokens before the one that is generated.
        options: the command's.
    """

    bytes: Bytes
    weights: tuple[Weights, ...]
    context: int
    options: argparse.Namespace

    def balanced(self, size: int) -> Split:
        """The best split for a cohort of `size` requests."""
        layers, first, last = self._seconds(size)
        return self._split(balance(layers, self.options.pp, first=first, last=last), size)

    def even(self, size: int) -> Split:
        """The split by the number of layers alone."""
        return self._split(split_layers(len(self.weights), self.options.pp), size)

    def costs(self, size: int) -> Costs:
        """The costs of a step of a cohort of `size` requests, in its best split."""
        return Costs(
            self.balanced(size).seconds,
            latency=self.options.latency * 1e-6,
            bytes_per_second=self.options.link * 1e9,
            message_bytes=size * self.bytes.message,
            output_bytes=size * _OUTPUT_BYTES,
        )

    def _seconds(self, size: int) -> tuple[list[float], float, float]:
        """The seconds of each layer, of the embedding, and of the head."""
        per_second = self.options.bandwidth * 1e9
        kv = size * self.context * self.bytes.kv
        layers = [(weights.read(size) + kv) / per_second for weights in self.weights]
        return layers, size * self.bytes.embedding / per_second, self.bytes.head / per_second

    def _split(self, layouts: Sequence[StageLayout], size: int) -> Split:
        layers, first, last = self._seconds(size)
        seconds = (sum(layers[i] for i in one.layers) + first * one.first + last * one.last for one in layouts)
        return Split(tuple(layouts), tuple(seconds))


@attrs.frozen
class Prediction:
    """The answer of `weft plan`.

    Args:
        options: the command's.
        config: the model's.
        loads: the seconds of stages.
        cohorts: the numbers of cohorts that were tried.
        chosen: the one of them that the rest is about.
        programs, timeline: the first steps, from an empty pipeline.
    """

    options: argparse.Namespace
    config: ModelConfig
    loads: Loads
    cohorts: CohortPlan
    chosen: CohortRow
    programs: tuple[Program, ...]
    timeline: Timeline

    @property
    def balanced(self) -> Split:
        """The best split, for a cohort of the chosen size."""
        return self.loads.balanced(self.chosen.size)

    @property
    def even(self) -> Split:
        """The split by the number of layers, for a cohort of the chosen size."""
        return self.loads.even(self.chosen.size)


def run(arguments: argparse.Namespace) -> int:
    """Predict, and print the prediction; the exit code is 0."""
    check_writable(arguments.svg, f"weft plan --svg {arguments.svg}")
    plan = predict(arguments)
    if arguments.svg is not None:
        write_file(arguments.svg, plan.timeline.as_svg(), f"weft plan --svg {arguments.svg}")
    if arguments.json:
        print(write_json(as_report(plan), indent=2))
    else:
        show(plan)
    return 0


def predict(options: argparse.Namespace) -> Prediction:
    """The prediction; reads config.json and nothing else.

    Raises:
        CheckpointNotFoundError, ConfigError: as `read_config`.
        ProgramError: more stages than layers, more cohorts than requests, or more context than the model has positions.
    """
    config, stages = read_config(options.model, options.preset), options.pp
    if stages > config.num_layers:
        seen = f"{stages} stages; the model has {config.num_layers} layers"
        raise ProgramError(f"weft plan --pp {stages}", seen, f"from --pp 1 to --pp {config.num_layers}")
    if options.cohorts is not None and options.cohorts > options.requests:
        seen = f"{options.cohorts} cohorts for {options.requests} requests"
        raise ProgramError(f"weft plan --cohorts {options.cohorts}", seen, f"from 1 to {options.requests}")
    loads = Loads(Bytes.of(config), layer_weights(config), _context(options, config), options)
    tried = {*range(1, min(2 * stages, options.requests) + 1), *([options.cohorts] if options.cohorts else [])}
    cohorts = plan_cohorts(loads.costs, options.requests, stages, cohorts=sorted(tried), capacity=options.capacity)
    chosen = next((row for row in cohorts.rows if row.cohorts == options.cohorts), cohorts.best)
    if options.steps > (most := _MOST_JOBS // chosen.cohorts):
        seen = f"{options.steps} steps of each of {counted(chosen.cohorts, 'cohort')}"
        raise ProgramError(f"weft plan --steps {options.steps}", seen, f"from 1 to {most} steps")
    programs = make_programs(stages, decode_jobs(chosen.cohorts, options.steps))
    timeline = simulate(programs, loads.costs(chosen.size), capacity=options.capacity)
    return Prediction(options, config, loads, cohorts, chosen, programs, timeline)


def _context(options: argparse.Namespace, config: ModelConfig) -> int:
    most = config.max_position_embeddings
    context: int = min(1024, most // 2) if options.context is None else options.context
    if context >= most:
        seen = f"{context} tokens before the one that is generated; the model has {most} positions"
        raise ProgramError(f"weft plan --context {context}", seen, f"from 0 to {most - 1}")
    return context


def as_report(plan: Prediction) -> dict[str, Any]:
    """The JSON report, in seconds and bytes."""
    options = vars(plan.options)
    names = ("model", "preset", "pp", "cohorts", "steps", "requests", "context", "bandwidth", "link", "latency")
    wanted = {("stages" if name == "pp" else name): options[name] for name in (*names, "capacity")}
    events = plan.timeline.events
    return {
        "costs": "bytes over bandwidth, not measured",
        "wanted": wanted | {"context": plan.loads.context},
        "model": {
            "architecture": plan.config.architecture,
            "num_layers": plan.config.num_layers,
            "dtype": str(plan.config.dtype).removeprefix("torch."),
            "bytes": attrs.asdict(plan.loads.bytes),
        },
        "splits": {"balanced": plan.balanced.report(), "even": plan.even.report()},
        "programs": [str(program) for program in plan.programs],
        "timeline": {
            **{name: getattr(plan.timeline, name) for name in ("step_time", "busy", "bubble", "peak_bytes")},
            "events": [attrs.asdict(event, recurse=False) | {"effect": str(event.effect)} for event in events],
        },
        "cohorts": [attrs.asdict(row) | {"bubble": row.bubble} for row in plan.cohorts.rows],
        "best": plan.cohorts.best.cohorts,
        "predicted": attrs.asdict(plan.chosen),
    }


def show(plan: Prediction) -> None:
    """Print the answer, then how it comes about."""
    out, options, size = console(), plan.options, plan.chosen.size
    splits = (("balanced", plan.balanced), ("even", plan.even))
    stages: list[dict[str, Any]] = [{"stage": index} for index in range(options.pp)]
    for name, split in splits:
        for row, own in zip(stages, split.report(), strict=True):
            row |= {f"{name}:\nlayers": own["stop"] - own["start"], f"{name}:\ntime": duration(own["seconds"])}
    cohorts = [
        {
            "cohorts": row.cohorts,
            "of requests": row.size,
            "step": duration(row.step_time),
            "tokens/s": f"{row.tokens_per_second:,.0f}",
            "bubble": f"{row.bubble:.0%}",
            "": "best" if row is plan.cohorts.best else "",
        }
        for row in plan.cohorts.rows
    ]
    slowest, even = (max(split.seconds) for _, split in splits)
    steps = f"{counted(options.steps, 'step')} of each of {counted(plan.chosen.cohorts, 'cohort')}"
    sections: dict[str, tuple[Any, ...]] = {
        "prediction": ("\n".join(_answer(plan)), "", _NOTE),
        "assumptions": ("\n".join(_assumptions(plan)),),
        f"split of the layers, for a cohort of {size}": (
            table(None, stages, left=0),
            f"slowest stage: {duration(slowest)} balanced, {duration(even)} even ({even / slowest - 1:.1%} slower)",
        ),
        "numbers of cohorts, once the pipeline is full (each in its own best split)": (table(None, cohorts, left=0),),
        f"timeline of {steps}, from an empty pipeline": (plan.timeline.as_text(max(out.width, LEAST_WIDTH)),),
        "programs of this timeline, by rank": (listing(plan.programs),),
    }
    for title, parts in sections.items():
        out.print(Text(title, style="bold"))
        for part in parts:
            out.print(Text(part) if isinstance(part, str) else part, soft_wrap=isinstance(part, str) and part != _NOTE)
        out.print()


def _answer(plan: Prediction) -> Iterator[str]:
    chosen = plan.chosen
    yield f"{chosen.tokens_per_second:,.0f} tokens/s from {counted(plan.options.requests, 'request')}"
    yield f"a step takes {duration(chosen.step_time)}, with {counted(chosen.cohorts, 'cohort')} of {chosen.size}"
    yield f"bound by {_bound(plan)}"
    yield f"bubbles: {', '.join(f'rank {rank} {bubble:.0%}' for rank, bubble in enumerate(chosen.bubbles))}"


def _bound(plan: Prediction) -> str:
    """What the step waits for most: a stage that is never idle, a transfer, or the way through the whole pipeline."""
    chosen, split, loads = plan.chosen, plan.balanced, plan.loads
    costs = loads.costs(chosen.size)
    transfer = costs.latency + chosen.size * loads.bytes.message / costs.bytes_per_second if plan.options.pp > 1 else 0
    slowest = max(range(plan.options.pp), key=split.seconds.__getitem__)
    if min(chosen.bubbles) < 0.01:
        kv = chosen.size * loads.context * loads.bytes.kv * len(split.layouts[slowest].layers)
        share = kv / (split.seconds[slowest] * plan.options.bandwidth * 1e9)
        return f"memory bandwidth: stage {slowest}, {1 - share:.0%} weights and {share:.0%} KV cache"
    if transfer > split.seconds[slowest]:
        return f"transfers: a message takes {duration(transfer)}, the slowest stage {duration(split.seconds[slowest])}"
    return "the way of a cohort through all stages: ranks wait for it, with too few other cohorts to work on"


def _assumptions(plan: Prediction) -> Iterator[str]:
    config, options, sizes = plan.config, plan.options, plan.loads.bytes
    dtype = str(config.dtype).removeprefix("torch.")
    yield f"{config.architecture}, {config.num_layers} layers, {dtype}, in {counted(options.pp, 'stage')}"
    yield f"weights: {_bytes(sizes.layer)} per layer; the head {_bytes(sizes.head)}, on the last stage"
    kv = _bytes(sizes.kv * plan.loads.context)
    yield f"KV cache: {kv} per request and layer, for {counted(plan.loads.context, 'token')} of context"
    yield f"memory bandwidth: {options.bandwidth:g} GB/s"
    link = "" if math.isinf(options.link) else f", and its bytes at {options.link:g} GB/s"
    cost = "no time" if not (options.latency or link) else f"{options.latency:g} us{link}"
    yield f"a transfer takes {cost}; an edge holds {counted(options.capacity, 'message')}"


def _bytes(count: float) -> str:
    """A number of bytes to three digits.

    >>> _bytes(31_457_280)
    '31.5 MB'
    """
    size, name = next(((s, n) for s, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if count >= s), (1.0, "B"))
    return f"{float(f'{count / size:.3g}'):g} {name}"
