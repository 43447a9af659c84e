"""`weft plan`: predict a decode loop over pipeline stages, from a config.json and a memory bandwidth alone."""

import math
from collections.abc import Iterator
from typing import Any

import attrs
from rich.text import Text

from weft.arguments.json_text import write_json
from weft.display.durations import duration
from weft.effects import Program, listing
from weft.stages.config import ModelConfig
from weft.stages.layout import balance, layer_weights, split_layers
from weft.transforms.cli.models import read_config
from weft.transforms.cli.options import Plan
from weft.transforms.cli.printing import check_file, console, counted, table, write_file
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
class Loads:
    """The bytes that a decode step reads, and the seconds that stages take: bytes over bandwidth.

    Args:
        context: tokens before the one that is generated.
    """

    options: Plan
    config: ModelConfig
    context: int

    def bytes(self) -> dict[str, int]:
        """The bytes of the largest layer's weights, with all its experts; of the final norm and the head's matrix; of a
        token's row of the embedding; of a token's keys and values in one layer; and of a token in the message that one
        stage sends to the next. All are in the dtype that the model declares."""
        config, row = self.config, self.config.hidden_size * self.config.dtype.itemsize
        return {
            "layer": max(weights.fixed + weights.experts for weights in layer_weights(config)),
            "head": row + config.vocab_size * row,
            "embedding": row,
            "kv": 2 * config.num_kv_heads * config.head_dim * config.dtype.itemsize,
            "message": row,
        }

    def splits(self, size: int) -> dict[str, list[dict[str, Any]]]:
        """The best split for a cohort of `size` requests, and that by the number of layers alone: for each stage, its
        layers and seconds.

        Raises:
            ProgramError: more stages than layers.
        """
        stages, per_second, own = self.options.pp, self.options.bandwidth * 1e9, self.bytes()
        even = split_layers(self.config.num_layers, stages)
        kv = size * self.context * own["kv"]
        layers = [(weights.read(size) + kv) / per_second for weights in layer_weights(self.config)]
        first, last = size * own["embedding"] / per_second, own["head"] / per_second

        def seconds(start: int, stop: int) -> float:
            return sum(layers[start:stop]) + first * (start == 0) + last * (stop == len(layers))

        layouts = {"balanced": balance(layers, stages, first=first, last=last), "even": even}
        return {
            name: [{"start": s.start, "stop": s.stop, "seconds": seconds(s.start, s.stop)} for s in split]
            for name, split in layouts.items()
        }

    def costs(self, size: int) -> Costs:
        """The costs of a step of a cohort of `size` requests, in its best split."""
        return Costs(
            [stage["seconds"] for stage in self.splits(size)["balanced"]],
            latency=self.options.latency * 1e-6,
            bytes_per_second=self.options.link * 1e9,
            message_bytes=size * self.bytes()["message"],
            output_bytes=size * _OUTPUT_BYTES,
        )


@attrs.frozen
class Prediction:
    """The answer of `weft plan`.

    Args:
        loads: the seconds of stages.
        cohorts: the numbers of cohorts that were tried.
        chosen: the one of them that the rest is about.
        splits: the layers of each stage, for a cohort of the chosen size.
        programs, timeline: the first steps, from an empty pipeline.
    """

    loads: Loads
    cohorts: CohortPlan
    chosen: CohortRow
    splits: dict[str, list[dict[str, Any]]]
    programs: tuple[Program, ...]
    timeline: Timeline


def run(options: Plan) -> int:
    """Predict, and print the prediction; the exit code is 0."""
    check_file(options, "--svg", options.svg)
    plan = predict(options)
    if options.svg is not None:
        write_file(options, "--svg", options.svg, plan.timeline.as_svg())
    if options.json:
        print(write_json(as_report(plan), indent=2))
    else:
        show(plan)
    return 0


def predict(options: Plan) -> Prediction:
    """The prediction; reads config.json and nothing else.

    Raises:
        CheckpointNotFoundError, ConfigError: as `read_config`.
        ProgramError: more stages than layers.
        RequestError: more cohorts than requests, more steps than can be drawn, or more context than the model has
            positions.
    """
    config, stages, requests = read_config(options.model, options.preset), options.pp, options.requests
    split_layers(config.num_layers, stages)  # refuses what would take long to try
    most = config.max_position_embeddings
    context = min(1024, most // 2) if options.context is None else options.context
    if context >= most:
        seen = f"{context} tokens before the one that is generated; the model has {most} positions"
        options.refuse(f"--context {context}", seen, f"from 0 to {most - 1}")
    asked = options.cohorts or 1
    if asked > requests:
        options.refuse(f"--cohorts {asked}", f"{asked} cohorts for {requests} requests", f"from 1 to {requests}")
    loads = Loads(options, config, context)
    tried = {*range(1, min(2 * stages, requests) + 1), asked}
    cohorts = plan_cohorts(loads.costs, requests, stages, cohorts=tried, capacity=options.capacity)
    chosen = next((row for row in cohorts.rows if row.cohorts == options.cohorts), cohorts.best)
    if options.steps > (most := _MOST_JOBS // chosen.cohorts):
        seen = f"{options.steps} steps of each of {counted(chosen.cohorts, 'cohort')}"
        options.refuse(f"--steps {options.steps}", seen, f"from 1 to {most} steps")
    programs = make_programs(stages, decode_jobs(chosen.cohorts, options.steps))
    timeline = simulate(programs, loads.costs(chosen.size), capacity=options.capacity)
    return Prediction(loads, cohorts, chosen, loads.splits(chosen.size), programs, timeline)


def as_report(plan: Prediction) -> dict[str, Any]:
    """The JSON report, in seconds and bytes."""
    options, config, timeline = plan.loads.options, plan.loads.config, plan.timeline
    names = "model", "preset", "cohorts", "steps", "requests", "bandwidth", "link", "latency", "capacity"
    return {
        "costs": "bytes over bandwidth, not measured",
        "wanted": {name: getattr(options, name) for name in names}
        | {"stages": options.pp, "context": plan.loads.context},
        "model": {
            "architecture": config.architecture,
            "num_layers": config.num_layers,
            "dtype": str(config.dtype).removeprefix("torch."),
            "bytes": plan.loads.bytes(),
        },
        "splits": plan.splits,
        "programs": [str(program) for program in plan.programs],
        "timeline": {
            **{name: getattr(timeline, name) for name in ("step_time", "busy", "bubble", "peak_bytes")},
            "events": [attrs.asdict(e, recurse=False) | {"effect": str(e.effect)} for e in timeline.events],
        },
        "cohorts": [attrs.asdict(row) | {"bubble": row.bubble} for row in plan.cohorts.rows],
        "best": plan.cohorts.best.cohorts,
        "predicted": attrs.asdict(plan.chosen),
    }


def show(plan: Prediction) -> None:
    """Print the answer, then how it comes about."""
    out, options, size = console(), plan.loads.options, plan.chosen.size
    stages: list[dict[str, Any]] = [{"stage": index} for index in range(options.pp)]
    for name, split in plan.splits.items():
        for row, own in zip(stages, split, strict=True):
            row |= {f"{name}:\nlayers": own["stop"] - own["start"], f"{name}:\ntime": duration(own["seconds"])}
    slowest, even = (max(stage["seconds"] for stage in split) for split in plan.splits.values())
    steps = f"{counted(options.steps, 'step')} of each of {counted(plan.chosen.cohorts, 'cohort')}"
    sections: dict[str, tuple[Any, ...]] = {
        "prediction": ("\n".join(_answer(plan)), "", _NOTE),
        "assumptions": ("\n".join(_assumptions(plan)),),
        f"split of the layers, for a cohort of {size}": (
            table("", stages),
            f"slowest stage: {duration(slowest)} balanced, {duration(even)} even ({even / slowest - 1:.1%} slower)",
        ),
        "numbers of cohorts, once the pipeline is full (each in its own best split)": (plan.cohorts,),
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
    yield f"{chosen.tokens_per_second:,.0f} tokens/s from {counted(plan.loads.options.requests, 'request')}"
    yield f"a step takes {duration(chosen.step_time)}, with {counted(chosen.cohorts, 'cohort')} of {chosen.size}"
    yield f"bound by {_bound(plan)}"
    yield f"bubbles: {', '.join(f'rank {rank} {bubble:.0%}' for rank, bubble in enumerate(chosen.bubbles))}"


def _bound(plan: Prediction) -> str:
    """What the step waits for most: a stage that is never idle, a transfer, or the way through the whole pipeline."""
    chosen, loads, stages, sizes = plan.chosen, plan.loads, plan.splits["balanced"], plan.loads.bytes()
    slowest = max(range(len(stages)), key=lambda index: stages[index]["seconds"])
    start, stop, seconds = stages[slowest].values()
    if min(chosen.bubbles) < 0.01:
        kv = chosen.size * loads.context * sizes["kv"] * (stop - start)
        share = kv / (seconds * loads.options.bandwidth * 1e9)
        return f"memory bandwidth: stage {slowest}, {1 - share:.0%} weights and {share:.0%} KV cache"
    transfer = loads.options.latency * 1e-6 + chosen.size * sizes["message"] / (loads.options.link * 1e9)
    if len(stages) > 1 and transfer > seconds:
        return f"transfers: a message takes {duration(transfer)}, the slowest stage {duration(seconds)}"
    return "the way of a cohort through all stages: ranks wait for it, with too few other cohorts to work on"


def _assumptions(plan: Prediction) -> Iterator[str]:
    config, options, sizes, context = plan.loads.config, plan.loads.options, plan.loads.bytes(), plan.loads.context
    dtype = str(config.dtype).removeprefix("torch.")
    yield f"{config.architecture}, {config.num_layers} layers, {dtype}, in {counted(options.pp, 'stage')}"
    yield f"weights: {_bytes(sizes['layer'])} per layer; the head {_bytes(sizes['head'])}, on the last stage"
    kv = _bytes(sizes["kv"] * context)
    yield f"KV cache: {kv} per request and layer, for {counted(context, 'token')} of context"
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
