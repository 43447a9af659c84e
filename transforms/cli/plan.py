"""`weft plan`: predict the speed of decoding over several GPUs, from a config.json and a memory
bandwidth alone."""

from collections.abc import Iterator
from typing import Any

import attrs
from rich.console import Console
from rich.text import Text

from weft.arguments.json_text import write_json
from weft.display.durations import duration
from weft.display.quantities import counted
from weft.effects import listing
from weft.errors import ProgramError
from weft.meshes.mesh import Mesh
from weft.transforms.cli.options import Plan
from weft.transforms.cli.printing import check_file, heading, show, write_file
from weft.transforms.cli.ranks import read_config
from weft.transforms.pipelines.lanes import spread
from weft.transforms.pipelines.timing.drawing import LEAST_WIDTH
from weft.transforms.pipelines.timing.hardware import Machine
from weft.transforms.pipelines.timing.prediction import NOTE, Prediction, predict_decode
from weft.transforms.pipelines.timing.splits import SplitPlan, plan_splits
from weft.transforms.pipelines.timing.timeline import busy_shares


def run(options: Plan) -> int:
    """Print the prediction; the exit code is 1 if the model does not fit into memory."""
    check_file(options, "--svg", options.svg)
    config = read_config(options)
    machine = Machine(
        bandwidth=options.bandwidth * 1e9,
        memory=options.memory * 1e9,
        link=options.link * 1e9,
        latency=options.latency * 1e-6,
        capacity=options.capacity,
        kernel=options.kernel * 1e-6,
        gpus_per_node=options.gpus_per_node,
        node_link=None if options.node_link is None else options.node_link * 1e9,
        node_latency=None if options.node_latency is None else options.node_latency * 1e-6,
    )
    workload: dict[str, Any] = {
        name: getattr(options, name) for name in ("requests", "context", "cohorts", "steps")
    }
    splits = None
    if options.gpus is not None:
        with options.about(f"--gpus {options.gpus}", ProgramError):
            splits = plan_splits(config, options.gpus, machine=machine, **workload)
    if splits is None:
        plan = predict_decode(
            config, options.pp or 1, shards=options.tp, machine=machine, **workload
        )
    else:
        plan = splits.best
    if options.svg is not None:
        write_file(options, "--svg", options.svg, plan.timeline.as_svg())
    if options.json:
        print(write_json(as_report(options, plan, splits), indent=2))
    else:
        show(sections(options, plan, splits))
    if plan.fits:
        return 0
    return 1


def as_report(options: Plan, plan: Prediction, splits: SplitPlan | None) -> dict[str, Any]:
    """The JSON report, in seconds and bytes."""
    config = plan.load.config
    timeline = plan.timeline
    names = (
        "model",
        "preset",
        "cohorts",
        "steps",
        "requests",
        "bandwidth",
        "memory",
        "link",
        "latency",
        "capacity",
    )
    nodes = "kernel", "gpus_per_node", "node_link", "node_latency"
    return {
        "costs": "bytes over bandwidth, not measured",
        "wanted": (
            {name: getattr(options, name) for name in (*names, *nodes)}
            | {
                "stages": plan.load.num_stages,
                "shards": plan.load.num_shards,
                "context": plan.load.context,
            }
        ),
        "model": {
            "architecture": config.architecture,
            "num_layers": config.num_layers,
            "dtype": str(config.dtype).removeprefix("torch."),
            "bytes": plan.load.bytes(),
        },
        "gpus": [
            {
                "shards": one.load.num_shards,
                "stages": one.load.num_stages,
                "fits": one.fits,
                **attrs.asdict(one.chosen),
            }
            for one in (() if splits is None else splits.predictions)
        ],
        "left_out": () if splits is None else splits.left_out,
        "fits": plan.fits,
        "memory": [
            attrs.asdict(need) | {"total": need.total}
            for need in plan.load.memory(options.requests, plan.chosen.size)
        ],
        "splits": plan.splits,
        "programs": [str(program) for program in plan.programs],
        "timeline": {
            "step_time": timeline.step_time,
            "busy": busy_shares(timeline),
            "bubble": timeline.bubble,
            "peak_bytes": timeline.peak_bytes,
            "events": [
                attrs.asdict(e, recurse=False) | {"effect": str(e.effect)} for e in timeline.events
            ],
        },
        "cohorts": [attrs.asdict(row) | {"bubble": row.bubble} for row in plan.cohorts.rows],
        "best": plan.cohorts.best.cohorts,
        "predicted": attrs.asdict(plan.chosen),
    }


def sections(options: Plan, plan: Prediction, splits: SplitPlan | None) -> Iterator[Any]:
    """The prediction, then the assumptions and steps that lead to it."""
    shards = plan.load.num_shards
    stages = plan.load.num_stages
    alike = (
        ()
        if shards == 1
        else (f"Rank N stands for the {shards} ranks of stage N, which run alike.",)
    )
    # In the order of `DecodeLoad.splits`: balanced, then even.
    slowest, even = (max(stage["seconds"] for stage in split) for split in plan.splits.values())
    steps = f"{counted(options.steps, 'step')} of each of {counted(plan.chosen.cohorts, 'cohort')}"
    tried = (
        {}
        if splits is None
        else {f"splits over {plan.num_gpus} GPUs (simulated)": (splits, *splits.left_out)}
    )
    parts_of: dict[str, tuple[Any, ...]] = tried | {
        "prediction": (*plan.answer(), "", Text(NOTE)),
        "assumptions": (*plan.assumptions(),),
        f"split of the layers, for a cohort of {plan.chosen.size}": (
            plan.stages(),
            (
                f"slowest stage: {duration(slowest)} balanced, {duration(even)} even"
                f" ({even / slowest - 1:.1%} slower)"
            ),
        ),
        "numbers of cohorts, once the pipeline is full (each in its own best split)": (
            plan.cohorts,
        ),
        f"timeline of {steps}, from an empty pipeline": (
            *alike,
            plan.timeline.as_text(max(Console().width, LEAST_WIDTH)),
        ),
    }
    if options.programs:
        lanes = spread(plan.programs, Mesh(pipeline=stages, tensor=shards))
        parts_of["programs of this timeline, of the first rank of each stage"] = (
            # The ranks of a stage have consecutive numbers, and their programs differ in the
            # numbers of ranks alone.
            listing(lanes[::shards]),
        )
    for title, parts in parts_of.items():
        yield from (heading(title), *parts, "")
