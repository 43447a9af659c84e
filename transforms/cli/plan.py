"""What `weft plan` predicts: a decode loop over pipeline stages, from a config.json and a memory bandwidth alone."""

import math
from collections.abc import Sequence

import attrs

from weft.effects import Program
from weft.errors import ProgramError
from weft.stages.config import ModelConfig
from weft.stages.layout import StageLayout, balance, split_layers
from weft.stages.split import Weights, layer_weights
from weft.transforms.cli.sources import read_config
from weft.transforms.pipelines.cohorts import CohortPlan, CohortRow, plan_cohorts
from weft.transforms.pipelines.schedule import decode_jobs, make_programs
from weft.transforms.pipelines.simulate import Costs, simulate
from weft.transforms.pipelines.timeline import Timeline

_GIGA = 1e9
_MOST, _MOST_COHORTS, _MOST_JOBS = 10**9, 1000, 10_000
"""Of a number; of cohorts that are tried; of the steps of all cohorts that are drawn."""
_OUTPUT_BYTES = 8 + 4  # of a request's token and logprob (`weft.outputs.Output`)


@attrs.frozen
class Wanted:
    """What is to be planned: the options of `weft plan`.

    Args:
        model: a folder with a config.json; None: the preset's.
        preset: a name in `weft.transforms.cli.presets.PRESETS`; None: the folder's.
        stages: pipeline stages.
        cohorts: that take turns in the timeline; None: as many as give the most tokens a second.
        steps: of each cohort in the timeline.
        requests: that decode at the same time.
        context: tokens that each has before it; None: 1024, or half of what the model has positions for.
        bandwidth: GB/s at which a device reads its memory.
        link: GB/s between two ranks; infinite: a transfer takes the latency alone.
        latency: microseconds of each transfer.
        capacity: messages that an edge holds.
    """

    model: str | None
    preset: str | None
    stages: int
    cohorts: int | None
    steps: int
    requests: int
    context: int | None
    bandwidth: float
    link: float
    latency: float
    capacity: int

    def __attrs_post_init__(self) -> None:
        for option, value in (("--steps", self.steps), ("--requests", self.requests), ("--capacity", self.capacity)):
            if not 1 <= value <= _MOST:
                raise ProgramError(f"weft plan {option} {value}", f"{value}", f"a whole number from 1 to {_MOST}")
        most = min(self.requests, _MOST_COHORTS)
        if self.cohorts is not None and not 1 <= self.cohorts <= most:
            seen = f"{self.cohorts} cohorts for {self.requests} requests"
            raise ProgramError(f"weft plan --cohorts {self.cohorts}", seen, f"from 1 to {most}")
        for option, speed in (("--bandwidth", self.bandwidth), ("--link", self.link)):
            if not speed > 0 or (option == "--bandwidth" and math.isinf(speed)):
                raise ProgramError(f"weft plan {option} {speed:g}", f"{speed:g} GB/s", "a number > 0, in GB/s")
        if not 0 <= self.latency < math.inf:
            seen = f"{self.latency:g} microseconds"
            raise ProgramError(f"weft plan --latency {self.latency:g}", seen, "a finite number >= 0, in microseconds")


@attrs.frozen
class Bytes:
    """What a decode step reads, in bytes.

    Args:
        layer: the weights of one layer, the largest, with all its experts.
        head: the final norm and the head's matrix.
        embedding: of a token, the row of the embedding.
        kv: of a token of context, in one layer.
        message: of a token, what one stage sends to the next.
    """

    layer: int
    head: int
    embedding: int
    kv: int
    message: int

    @classmethod
    def of(cls, config: ModelConfig) -> "Bytes":
        """Of a model in the dtype that it declares."""
        size, row = config.dtype.itemsize, config.hidden_size * config.dtype.itemsize
        layer = max(round(weights.fixed + weights.experts) for weights in layer_weights(config))
        kv = 2 * config.num_kv_heads * config.head_dim * size
        return cls(layer, row + config.vocab_size * row, row, kv, row)


@attrs.frozen
class Split:
    """The layers of each stage, and the seconds of each for one cohort."""

    layouts: tuple[StageLayout, ...]
    seconds: tuple[float, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        return tuple(len(layout.layers) for layout in self.layouts)


@attrs.frozen
class Prediction:
    """What `weft plan` found.

    Args:
        context: tokens that each request has before it.
        splits: `balance`'s, and the even one of `split_layers`, for a cohort of the chosen size.
        cohorts: the table; `chosen` is the row of it that the rest is of.
        programs, timeline: of the first steps, from an empty pipeline.
    """

    wanted: Wanted
    config: ModelConfig
    bytes: Bytes
    context: int
    balanced: Split
    even: Split
    cohorts: CohortPlan
    chosen: CohortRow
    programs: tuple[Program, ...]
    timeline: Timeline


def predict(wanted: Wanted) -> Prediction:
    """Predict; reads config.json and nothing else.

    Raises:
        CheckpointNotFoundError, ConfigError: what `load_config` refuses.
        ProgramError: more stages than layers, or more context than the model has positions for.
    """
    config = read_config(wanted.model, wanted.preset)
    if not 1 <= wanted.stages <= config.num_layers:
        seen = f"{wanted.stages} stages; the model has {config.num_layers} layers"
        raise ProgramError(f"weft plan --pp {wanted.stages}", seen, "from 1 stage to one a layer")
    model = _Model(Bytes.of(config), layer_weights(config), _context(wanted, config), wanted)
    table = plan_cohorts(
        model.costs, wanted.requests, wanted.stages, cohorts=_numbers(wanted), capacity=wanted.capacity
    )
    chosen = next((row for row in table.rows if row.cohorts == wanted.cohorts), table.best)
    if wanted.steps > (most := _MOST_JOBS // chosen.cohorts):
        seen = f"{wanted.steps} steps of each of {chosen.cohorts} cohorts"
        raise ProgramError(f"weft plan --steps {wanted.steps}", seen, f"from 1 to {most} steps")
    programs = make_programs(wanted.stages, decode_jobs(chosen.cohorts, wanted.steps))
    timeline = simulate(programs, model.costs(chosen.size), capacity=wanted.capacity)
    balanced, even = model.balanced(chosen.size), model.even(chosen.size)
    return Prediction(wanted, config, model.bytes, model.context, balanced, even, table, chosen, programs, timeline)


def _context(wanted: Wanted, config: ModelConfig) -> int:
    most = config.max_position_embeddings
    context = min(1024, most // 2) if wanted.context is None else wanted.context
    if not 0 <= context < most:
        seen = f"{context} tokens before the one that is made; the model has {most} positions"
        raise ProgramError(f"weft plan --context {context}", seen, f"from 0 to {most - 1}")
    return context


def _numbers(wanted: Wanted) -> list[int]:
    """The numbers of cohorts to try: 1 to twice the stages, and the one that was asked for."""
    most = min(2 * wanted.stages, wanted.requests)
    return sorted({*range(1, most + 1), *([] if wanted.cohorts is None else [wanted.cohorts])})


@attrs.frozen
class _Model:
    """Bytes over bandwidth."""

    bytes: Bytes
    weights: tuple[Weights, ...]
    context: int
    wanted: Wanted

    def balanced(self, size: int) -> Split:
        """The best split for a cohort of `size` requests."""
        layers, first, last = self._seconds(size)
        return self._split(balance(layers, self.wanted.stages, first=first, last=last), size)

    def even(self, size: int) -> Split:
        """The split that looks at the number of layers alone."""
        return self._split(split_layers(len(self.weights), self.wanted.stages), size)

    def costs(self, size: int) -> Costs:
        """What a step of a cohort of `size` requests costs, in its best split."""
        return Costs(
            self.balanced(size).seconds,
            latency=self.wanted.latency * 1e-6,
            bytes_per_second=self.wanted.link * _GIGA,
            message_bytes=size * self.bytes.message,
            output_bytes=size * _OUTPUT_BYTES,
        )

    def _seconds(self, size: int) -> tuple[list[float], float, float]:
        """Of each layer, of the embedding, and of the head."""
        per_second = self.wanted.bandwidth * _GIGA
        kv = size * self.context * self.bytes.kv
        layers = [(weights.read(size) + kv) / per_second for weights in self.weights]
        return layers, size * self.bytes.embedding / per_second, self.bytes.head / per_second

    def _split(self, layouts: Sequence[StageLayout], size: int) -> Split:
        layers, first, last = self._seconds(size)
        seconds = (sum(layers[i] for i in one.layers) + first * one.first + last * one.last for one in layouts)
        return Split(tuple(layouts), tuple(seconds))
