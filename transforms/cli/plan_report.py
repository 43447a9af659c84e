"""`weft plan`, shown: as text, or as one JSON object."""

import math
from collections.abc import Iterator
from typing import Any

import attrs
from rich.console import Console
from rich.text import Text

from weft.effects import listing
from weft.json_text import write_json
from weft.transforms.cli.files import write_file
from weft.transforms.cli.plan import Prediction
from weft.transforms.pipelines.draw_text import LEAST_WIDTH
from weft.units import duration

NOTE = (
    "Predicted, not measured: the costs are bytes over bandwidth. A stage takes as long as its device needs to read "
    "the weights and the KV cache once; arithmetic, activations, kernels' launches and the host take no time here, so "
    "a real step is slower, and much slower where it is bound by any of these."
)


def show(plan: Prediction, console: Console | None = None) -> None:
    """Print the plan."""
    console = console or Console(highlight=False)
    width = max(console.width, LEAST_WIDTH)
    sections = (_model(plan), _split(plan), _programs(plan), _timeline(plan, width), _cohorts(plan))
    for section in sections:
        title, *lines = section
        console.print(Text(title, style="bold"))
        console.print(Text("\n".join(lines)), end="\n\n", soft_wrap=True)
    console.print(Text("\n".join(_prediction(plan)), style="bold"), soft_wrap=True)
    console.print(Text(NOTE))


def write_svg(plan: Prediction, file: str) -> None:
    """Write the timeline's picture.

    Raises:
        ProgramError: the file cannot be written.
    """
    write_file(file, plan.timeline.as_svg(), f"weft plan --svg {file}")


def _model(plan: Prediction) -> Iterator[str]:
    config, wanted, sizes = plan.config, plan.wanted, plan.bytes
    dtype = str(config.dtype).removeprefix("torch.")
    yield f"{config.architecture}, {config.num_layers} layers, {dtype}"
    yield f"a layer's weights {_bytes(sizes.layer)}; the head {_bytes(sizes.head)}, on the last stage"
    kv = sizes.kv * plan.context
    yield f"KV cache of a request, {plan.context} tokens of context: {_bytes(kv)} a layer"
    yield f"{wanted.requests} requests; memory read at {wanted.bandwidth:g} GB/s"
    link = "" if math.isinf(wanted.link) else f" and its bytes at {wanted.link:g} GB/s"
    free = "no time" if not (wanted.latency or link) else f"{wanted.latency:g} us{link}"
    yield f"a transfer takes {free}; an edge holds {wanted.capacity} message{'s' * (wanted.capacity != 1)}"


def _split(plan: Prediction) -> Iterator[str]:
    yield f"the split, for a cohort of {plan.chosen.size}"
    yield "stage  balanced                  even"
    ways = (plan.balanced, plan.even)
    for index in range(len(plan.balanced.sizes)):
        cells = (f"{way.sizes[index]:>3} layers  {duration(way.seconds[index]):>9}" for way in ways)
        yield f"{index:>5}  {'    '.join(cells)}"
    slowest = [max(way.seconds) for way in ways]
    gain = slowest[1] / slowest[0] - 1
    yield f"slowest stage: {duration(slowest[0])} balanced, {duration(slowest[1])} even ({gain:.1%} slower)"


def _programs(plan: Prediction) -> Iterator[str]:
    cohorts, steps = plan.chosen.cohorts, plan.wanted.steps
    yield f"the programs: {_count(steps, 'step')} of each of {_count(cohorts, 'cohort')}, micro-batches in turn"
    yield listing(plan.programs)


def _timeline(plan: Prediction, width: int) -> Iterator[str]:
    yield f"the timeline of these, from an empty pipeline, {plan.chosen.size} requests a cohort"
    yield plan.timeline.as_text(width)


def _cohorts(plan: Prediction) -> Iterator[str]:
    yield "how many cohorts, once the pipeline is full (each row in its own best split)"
    yield str(plan.cohorts)


def _prediction(plan: Prediction) -> Iterator[str]:
    chosen = plan.chosen
    bubbles = ", ".join(f"rank {rank} {bubble:.0%}" for rank, bubble in enumerate(chosen.bubbles))
    yield (
        f"predicted with {_count(chosen.cohorts, 'cohort')} of {chosen.size}: a step in {duration(chosen.step_time)}, "
        f"{chosen.tokens_per_second:,.0f} tokens/s"
    )
    yield f"bubbles: {bubbles}"


def _bytes(count: float) -> str:
    """A number of bytes to three digits.

    >>> _bytes(31_457_280)
    '31.5 MB'
    """
    size, name = next(((s, n) for s, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if count >= s), (1.0, "B"))
    return f"{float(f'{count / size:.3g}'):g} {name}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def as_json(plan: Prediction) -> str:
    """The plan as one JSON object; seconds and bytes."""
    wanted = {field: None if value == math.inf else value for field, value in attrs.asdict(plan.wanted).items()}
    splits = {
        name: [
            {"start": layout.start, "stop": layout.stop, "seconds": seconds}
            for layout, seconds in zip(split.layouts, split.seconds, strict=True)
        ]
        for name, split in (("balanced", plan.balanced), ("even", plan.even))
    }
    report = {
        "costs": "bytes over bandwidth, not measured",
        "wanted": wanted | {"context": plan.context},
        "model": {
            "architecture": plan.config.architecture,
            "num_layers": plan.config.num_layers,
            "dtype": str(plan.config.dtype).removeprefix("torch."),
            "bytes": attrs.asdict(plan.bytes),
        },
        "splits": splits,
        "programs": [str(program) for program in plan.programs],
        "timeline": _timeline_dict(plan),
        "cohorts": [attrs.asdict(row) | {"bubble": row.bubble} for row in plan.cohorts.rows],
        "best": plan.cohorts.best.cohorts,
        "predicted": attrs.asdict(plan.chosen),
    }
    return write_json(report, indent=2)


def _timeline_dict(plan: Prediction) -> dict[str, Any]:
    timeline = plan.timeline
    return {
        "step_time": timeline.step_time,
        "busy": timeline.busy,
        "bubble": timeline.bubble,
        "peak_bytes": timeline.peak_bytes,
        "events": [attrs.asdict(event, recurse=False) | {"effect": str(event.effect)} for event in timeline.events],
    }
