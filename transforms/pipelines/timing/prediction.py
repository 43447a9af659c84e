"""`predict_decode`: the time of a decode loop over pipeline stages, from a model's configuration
and a bandwidth."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import attrs

from weft.arguments.checks import COUNT, Rule, check_values
from weft.display.durations import duration
from weft.display.quantities import byte_size, counted
from weft.display.tables import Table, text, titled
from weft.effects import Program
from weft.errors import ProgramError, RequestError
from weft.stages.config import ModelConfig
from weft.stages.layout import split_layers
from weft.stages.shares import share_config
from weft.transforms.pipelines.schedule import decode_jobs, make_programs
from weft.transforms.pipelines.timing.cohorts import CohortPlan, CohortRow, plan_cohorts
from weft.transforms.pipelines.timing.decode_load import DecodeLoad, MemoryNeed
from weft.transforms.pipelines.timing.hardware import KERNELS_PER_LAYER, Machine
from weft.transforms.pipelines.timing.simulate import simulate
from weft.transforms.pipelines.timing.timeline import Timeline

# The most steps, of all cohorts together, in a timeline
_MOST_JOBS = 10_000
# At most about this many different numbers of cohorts are tried.
_MOST_TRIED = 24
_CONTEXT = 1024
NOTE = (
    "Predicted from bytes over bandwidth, not measured: a stage takes the time in which its device"
    " reads the weights and the KV cache once, its collectives, and the time of its kernels beside"
    " that, if it is given. Arithmetic, activations and the host count for nothing, so a real step"
    " is slower, and much slower if one of these bounds it."
)


@attrs.frozen(repr=False)
class Prediction:
    """A predicted decode loop. It prints its answer and its assumptions; `cohorts` and `timeline`
    are shown as pictures.

    Args:
        load: the bytes and seconds of its steps.
        num_requests: the number of requests that decode together.
        cohorts: the numbers of cohorts that were tried.
        chosen: the row of `cohorts` for which the rest is computed.
        splits: the layers of each stage, for a cohort of the chosen size.
        steps: the number of steps of each cohort in the timeline.
    """

    load: DecodeLoad
    num_requests: int
    cohorts: CohortPlan
    chosen: CohortRow
    splits: dict[str, list[dict[str, Any]]]
    steps: int

    @functools.cached_property
    def programs(self) -> tuple[Program, ...]:
        """The programs of the first steps, one for each stage."""
        return make_programs(self.load.num_stages, decode_jobs(self.chosen.cohorts, self.steps))

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The timeline of the first steps, from an empty pipeline."""
        return simulate(
            self.programs, self.load.costs(self.chosen.size), capacity=self.load.machine.capacity
        )

    def __str__(self) -> str:
        return "\n".join((*self.answer(), "", *self.assumptions()))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        pictures = (
            picture._repr_html_() for picture in (self.stages(), self.cohorts, self.timeline)
        )
        return titled(text(", ".join(self.answer())), *pictures)

    def stages(self) -> Table:
        """A table with one row per stage: its layers and its time, in the best split and in the
        split into equal numbers of layers."""
        rows: list[dict[str, Any]] = [{"stage": index} for index in range(self.load.num_stages)]
        for name, split in self.splits.items():
            for row, part in zip(rows, split, strict=True):
                row |= {
                    f"{name}: layers": part["stop"] - part["start"],
                    f"{name}: time": duration(part["seconds"]),
                }
        return Table.of(rows)

    @property
    def num_gpus(self) -> int:
        """The number of GPUs, one for each rank."""
        return self.load.num_stages * self.load.num_shards

    def answer(self) -> Iterator[str]:
        """The lines of the answer: the throughput, the time of a step, what bounds it, each stage's
        idle share, and whether the model fits into the devices' memory. If layers are shared
        between nodes without a given bandwidth, another line says so."""
        chosen = self.chosen
        yield (
            f"{chosen.tokens_per_second:,.0f} tokens/s from {counted(self.num_requests, 'request')}"
        )
        yield (
            f"a step takes {duration(chosen.step_time)}, with {counted(chosen.cohorts, 'cohort')}"
            f" of {chosen.size}"
        )
        yield f"bound by {self.bound()}"
        load = self.load
        free = math.isinf(self.load.machine.between_nodes[1])
        if free and not all(
            load.machine.is_near(load.ranks(stage)) for stage in range(load.num_stages)
        ):
            yield "too fast: nodes share layers at no cost; give the bandwidth between nodes"
        yield (
            "bubbles:"
            f" {', '.join(f'stage {stage} {bubble:.0%}' for stage, bubble in enumerate(chosen.bubbles))}"
        )
        yield self.memory()

    @functools.cached_property
    def fullest(self) -> tuple[int, MemoryNeed]:
        """The stage whose ranks need the most memory, and how much one of them needs."""
        needs = self.load.memory(self.num_requests, self.chosen.size)
        return max(enumerate(needs), key=lambda each: each[1].total)

    @property
    def fits(self) -> bool:
        """Whether the weights, the KV cache of all requests and the graphs fit into the memory of
        every device."""
        return self.fullest[1].total <= self.load.machine.memory

    def memory(self) -> str:
        """Whether it fits, as text: the memory that a rank of the fullest stage needs, and the
        memory of a device."""
        (stage, need), has = self.fullest, byte_size(self.load.machine.memory)
        return (
            f"{'fits' if self.fits else 'does not fit'}: stage {stage} needs"
            f" {byte_size(need.total)} of {has} a GPU"
        )

    def bound(self) -> str:
        """A step's bottleneck: a stage that is never idle, a transfer, or the latency of the whole
        pipeline."""
        chosen, load, stages, sizes = (
            self.chosen,
            self.load,
            self.splits["balanced"],
            self.load.bytes(),
        )
        slowest = max(range(len(stages)), key=lambda index: stages[index]["seconds"])
        # In the order in which `DecodeLoad.splits` writes them.
        start, stop, seconds = stages[slowest].values()
        parts = {
            "collectives": (stop - start) * 2 * load.all_reduce(chosen.size),
            "kernels": (stop - start) * load.kernels,
        }
        for name, part in parts.items():
            if part > seconds / 2:
                return f"{name}: {duration(part)} of the {duration(seconds)} of the slowest stage"
        if min(chosen.bubbles) < 0.01:
            kv = chosen.size * load.context * sizes["kv"] * (stop - start)
            share = kv / (seconds * load.machine.bandwidth)
            return (
                f"memory bandwidth: stage {slowest}, {1 - share:.0%} weights and {share:.0%} KV"
                " cache"
            )
        transfer = load.transfer(chosen.size)
        if transfer > seconds:
            return (
                f"transfers: a message takes {duration(transfer)}, the slowest stage"
                f" {duration(seconds)}"
            )
        return (
            "the way of a cohort through all stages: ranks wait for it, with too few other cohorts"
            " to work on"
        )

    def assumptions(self) -> Iterator[str]:
        """The assumptions about the model and the machine, as lines."""
        config = self.load.config
        machine = self.load.machine
        sizes = self.load.bytes()
        context = self.load.context
        dtype = str(config.dtype).removeprefix("torch.")
        stages = counted(self.load.num_stages, "stage")
        shards = self.load.num_shards
        dtype += " and FP8" * (config.fp8 is not None)
        sharing, on_each = (
            text * (shards > 1) for text in (f", each shared by {shards} ranks", " of each rank")
        )
        yield f"{config.architecture}, {config.num_layers} layers, {dtype}, in {stages}{sharing}"
        if (
            (shard_moe := self.load.shard_config.moe) is not None
            and config.moe is not None
            and shards > 1
        ):
            if shard_moe.num_local_experts is None:
                yield (
                    f"experts by columns: each rank has {shard_moe.inner} of the {config.moe.inner} of"
                    " every expert"
                )
            else:
                yield (
                    f"experts whole: each rank has {shard_moe.num_local_experts} of"
                    f" {shard_moe.num_experts}, and as much to do as any other"
                )
        layer, head, kv = (
            byte_size(count) for count in (sizes["layer"], sizes["head"], sizes["kv"] * context)
        )
        yield f"weights{on_each}: {layer} per layer; the head {head}, on the last stage"
        yield (
            f"KV cache{on_each}: {kv} per request and layer, for {counted(context, 'token')} of"
            " context"
        )
        stage, need = self.fullest
        yield f"GPU memory of stage {stage}: {need}"
        yield f"memory bandwidth: {machine.bandwidth / 1e9:g} GB/s"
        if machine.kernel:
            yield (
                f"each of {KERNELS_PER_LAYER} kernels of a layer takes {machine.kernel * 1e6:g} us"
                " besides"
            )
        yield (
            f"a transfer takes {_transfer(machine.latency, machine.link)}; an edge holds"
            f" {_messages(machine)}"
        )
        if machine.gpus_per_node is not None:
            far = _transfer(*machine.between_nodes)
            yield (
                f"nodes of {counted(machine.gpus_per_node, 'GPU')}; between two of them a transfer"
                f" takes {far}"
            )
        if shards > 1:
            if machine.collective:
                how = "as measured"
            else:
                how = self.load.all_reduce_way(self.chosen.size)
            yield f"a layer has two all-reduces of {counted(shards, 'rank')}, {how}"


def _transfer(latency: float, link: float) -> str:
    if math.isinf(link):
        speed = ""
    else:
        speed = f", and its bytes at {link / 1e9:g} GB/s"
    if not (latency or speed):
        return "no time"
    return f"{latency * 1e6:g} us{speed}"


def _messages(machine: Machine) -> str:
    return counted(machine.capacity, "message")


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("num_stages", "shards", "requests", "num_gpus"), COUNT),
    **dict.fromkeys(("context", "cohorts"), (int | None, "a whole number, or None")),
    "steps": (int, "a whole number"),
    "machine": (Machine | None, "Machine(bandwidth=4.8e12), or None"),
}


def predict_decode(
    config: ModelConfig,
    num_stages: int,
    *,
    shards: int = 1,
    requests: int = 128,
    context: int | None = None,
    cohorts: int | None = None,
    steps: int = 2,
    machine: Machine | None = None,
) -> Prediction:
    """Predict a decode loop over pipeline stages from a model's configuration alone: its tokens per
    second and what bounds them, the split of the layers, the number of cohorts, the timeline and
    the programs.

    The time of a stage is its bytes divided by the bandwidth, plus its collectives, plus the time
    of its kernels if the machine gives one. No weights are read, and nothing is measured.

    Args:
        config: the configuration of the whole model, from `weft.stages.load_config`.
        num_stages: the number of pipeline stages.
        shards: the number of ranks that share each stage, by heads, inner columns or whole experts,
            and the vocabulary.
        requests: the number of requests that decode together.
        context: the number of tokens before the generated one. None: 1,024, or half of the model's
            positions if that is less.
        cohorts: the number of groups of requests that take turns. None: the fastest number.
        steps: the number of steps of each cohort in the timeline.
        machine: the devices and links. None: `Machine()`.

    Raises:
        ProgramError: more stages than layers, more cohorts than requests, or more steps than a
            timeline can hold.
        RequestError: more context than the model has positions.
        ConfigError: layers that this number of ranks cannot share.

    >>> from weft.stages import DEMO, load_config
    >>> print(predict_decode(load_config(DEMO), 2, requests=12).cohorts)
    cohorts  of requests      step    tokens/s  bubble
          1           12   1.41 us   8,531,058     50%
          2            6  0.928 us  12,927,900      2%  best
          3            4   1.14 us  10,542,731      3%
          4            3   1.35 us   8,900,592      3%
    """
    numbers = {
        "num_stages": num_stages,
        "shards": shards,
        "requests": requests,
        "context": context,
        "cohorts": cohorts,
        "steps": steps,
    }
    check_values(
        "predict_decode(config, num_stages, ...)",
        _RULES,
        numbers | {"machine": machine},
        ProgramError,
    )
    # Only for its check: it refuses numbers of stages that would take long to try.
    split_layers(config.num_layers, num_stages)
    positions = config.max_position_embeddings
    tried = 1 if cohorts is None else cohorts
    if context is None:
        context = min(_CONTEXT, positions // 2)
    call = f"predict_decode(config, {num_stages}, "
    if not 0 <= context < positions:
        problem = (
            f"{context} tokens before the one that is generated; the model has {positions}"
            " positions"
        )
        raise RequestError(f"{call}context={context})", problem, f"from 0 to {positions - 1}")
    if not 1 <= tried <= requests:
        problem = f"{tried} cohorts for {requests} requests"
        raise ProgramError(f"{call}cohorts={tried})", problem, f"from 1 to {requests}")
    # Only for its check: it refuses layers that ranks cannot share.
    share_config(config, shards)
    load = DecodeLoad(config, num_stages, context, machine or Machine(), shards)
    most = min(2 * num_stages, requests)
    # A stride may skip the number of stages, which is often the best: one cohort in each stage.
    all_tried = {*range(1, most + 1, -(-most // _MOST_TRIED)), min(num_stages, most), most, tried}
    capacity = load.machine.capacity
    plan = plan_cohorts(load.costs, requests, num_stages, cohorts=all_tried, capacity=capacity)
    chosen = next((row for row in plan.rows if row.cohorts == cohorts), plan.best)
    most = _MOST_JOBS // chosen.cohorts
    if not 1 <= steps <= most:
        problem = f"{steps} steps of each of {counted(chosen.cohorts, 'cohort')}"
        raise ProgramError(f"{call}steps={steps})", problem, f"from 1 to {most} steps")
    return Prediction(load, requests, plan, chosen, load.splits(chosen.size), steps)
