"""`StageLayout`, the layers that a stage owns; the ways to split a model: `split_layers`,
`balance`, `split_model`; and the empty states of its stages."""

import functools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import Rule, check_values
from weft.batches.sampling_rows import MAX_BIASED
from weft.batches.state import State
from weft.errors import CostError, ProgramError
from weft.stages.config import ModelConfig
from weft.stages.layer_fields import layer_fields

_RULES: dict[str, Rule] = {
    "layer_costs": (Sequence, "a list of the cost of each layer: [1.0] * 30")
}
_COST: Rule = (lambda cost: 0 <= cost < math.inf, "a finite number >= 0")


@attrs.frozen
class StageLayout:
    """The half-open range of layers `start .. stop` that stage `index` of `num_stages` owns.

    The first stage owns the embedding too, the last one the final norm and the head.

    Raises:
        ProgramError: a stage that does not exist, or one without layers.
    """

    index: int
    num_stages: int
    start: int
    stop: int

    def __attrs_post_init__(self) -> None:
        numbered = 0 <= self.index < self.num_stages
        if not numbered or not 0 <= self.start < self.stop or (self.first and self.start != 0):
            problem = (
                f"stage {self.index} of {self.num_stages}, of the layers from {self.start} to"
                f" {self.stop - 1}"
            )
            instead = (
                "number the stages from 0, and give each at least one layer, stage 0 also layer 0"
            )
            raise ProgramError(repr(self), problem, instead)

    @property
    def first(self) -> bool:
        """Whether this stage embeds the tokens."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether this stage computes the logits."""
        return self.index == self.num_stages - 1

    @property
    def layers(self) -> range:
        """The indices of its layers in the whole model."""
        return range(self.start, self.stop)


def check_layout(layout: StageLayout, num_layers: int, call: str) -> None:
    """Raise ProgramError unless a layout fits a model with this many layers."""
    if layout.stop > num_layers or (layout.last and layout.stop != num_layers):
        problem = (
            f"a layout that ends with layer {layout.stop - 1}, and a model of {num_layers} layers"
        )
        raise ProgramError(
            call, problem, f"split_layers({num_layers}, {layout.num_stages})[{layout.index}]"
        )


def _check_count(call: str, num_layers: int, num_stages: int) -> None:
    if not 1 <= num_stages <= num_layers:
        if num_layers > 0:
            instead = f"use 1 to {num_layers} stages, so that each owns a layer"
        else:
            instead = "use a model with layers"
        raise ProgramError(call, f"{num_layers} layers for {num_stages} stages", instead)


def is_whole(layout: StageLayout, shard: tuple[int, int]) -> bool:
    """Whether a part of a model has all layers, and all of each; `shard` is its share of a layer,
    and the number of shares."""
    return layout.num_stages == shard[1] == 1


def split_layers(num_layers: int, num_stages: int) -> tuple[StageLayout, ...]:
    """Contiguous stages whose sizes differ by at most one.

    A pipeline is as fast as its slowest stage. The last stage also computes the head, a matrix as
    large as several layers; the first one also embeds, which is a look-up. So the remaining layers
    go to the stages nearest the middle, the earlier of two first, and the last stage never gets
    one.

    Args:
        num_layers: the model's number of layers.
        num_stages: at least 1, at most the number of layers.

    Raises:
        ProgramError: fewer than one stage, or more stages than layers.

    >>> [stage.stop - stage.start for stage in split_layers(30, 4)]
    [7, 8, 8, 7]
    """
    _check_count(f"split_layers({num_layers}, {num_stages})", num_layers, num_stages)
    least, left_over = divmod(num_layers, num_stages)
    by_nearness = sorted(range(num_stages), key=lambda i: (abs(2 * i - (num_stages - 1)), i))
    sizes = [least + (i in by_nearness[:left_over]) for i in range(num_stages)]
    starts = [sum(sizes[:i]) for i in range(num_stages)]
    return tuple(
        StageLayout(i, num_stages, starts[i], starts[i] + sizes[i]) for i in range(num_stages)
    )


def balance(
    layer_costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0
) -> tuple[StageLayout, ...]:
    """The contiguous split that minimises the cost of the slowest stage.

    It uses dynamic programming over the ends of the stages, in exact arithmetic, so that rounding
    cannot break a tie. Ties are broken in this order: the split nearest to `split_layers` (the
    least sum of differences in the stages' sizes), the least sum of squares of the stages' costs,
    the split whose first differing stage is smaller. So the result is `split_layers` itself unless
    another split is better.

    Args:
        layer_costs: the cost of each layer, in any unit.
        num_stages: the number of stages; each owns a layer.
        first: the cost of the first stage besides its layers: the embedding.
        last: the cost of the last stage besides its layers: the final norm, the head, the sampler.

    Raises:
        ProgramError: fewer than one stage, or more stages than layers.
        CostError: a cost that is negative or not finite.

    >>> [stage.stop - stage.start for stage in balance([1.0] * 30, 4, last=3.0)]
    [8, 8, 8, 6]
    """
    check_values(
        f"balance({layer_costs!r:.60}, {num_stages!r})",
        _RULES,
        {"layer_costs": layer_costs},
        CostError,
    )
    _check_count(
        f"balance(<{len(layer_costs)} layers>, {num_stages!r})", len(layer_costs), num_stages
    )
    even = split_layers(len(layer_costs), num_stages)
    call = f"balance(<{len(layer_costs)} layers>, {num_stages}, first={first!r}, last={last!r})"
    costs = {f"layer_costs[{index}]": cost for index, cost in enumerate(layer_costs)} | {
        "first": first,
        "last": last,
    }
    check_values(call, dict.fromkeys(costs, _COST), costs, CostError)
    split = _Split(
        *_prefix_sums(layer_costs, first, last), tuple(len(stage.layers) for stage in even)
    )
    stops = split.nearest(split.least_slowest())
    return tuple(
        StageLayout(i, num_stages, a, b)
        for i, (a, b) in enumerate(zip((0, *stops), stops, strict=False))
    )


def _prefix_sums(
    layer_costs: Sequence[float], first: float, last: float
) -> tuple[tuple[int, ...], int, int]:
    """The costs of the first 0, 1, ... layers, and `first` and `last`, as exact multiples of one
    unit."""
    costs = [Fraction(cost) for cost in (*layer_costs, first, last)]
    unit = math.lcm(*(cost.denominator for cost in costs))
    *layers, extra_first, extra_last = (int(cost * unit) for cost in costs)
    sums = [0]
    for cost in layers:
        sums.append(sums[-1] + cost)
    return tuple(sums), extra_first, extra_last


# The order among tied splits: the distance from the even sizes, the sum of the squared costs, and
# the ends of the stages.
_Rank = tuple[int, int, tuple[int, ...]]


@attrs.frozen
class _Split:
    """The problem that `balance` solves: `sums[i]` is the cost of the first i layers; `even` has
    the sizes of the even split."""

    sums: tuple[int, ...]
    first: int
    last: int
    even: tuple[int, ...]

    def cost(self, stage: int, start: int, stop: int) -> int:
        ends = self.first * (stage == 0) + self.last * (stage == len(self.even) - 1)
        return self.sums[stop] - self.sums[start] + ends

    def stops(self, stage: int) -> range:
        """The possible ends of a stage, such that every stage has a layer."""
        later = len(self.even) - 1 - stage
        layers = len(self.sums) - 1
        if later:
            return range(stage + 1, layers - later + 1)
        return range(layers, layers + 1)

    def least_slowest(self) -> int:
        """The cost of the slowest stage in the best split."""
        best = {0: 0}  # by the end of the stages so far: the cost of the slowest
        for stage in range(len(self.even)):
            best = {
                stop: min(
                    max(slowest, self.cost(stage, start, stop))
                    for start, slowest in best.items()
                    if start < stop
                )
                for stop in self.stops(stage)
            }
        # The last stage can only end with the last layer, so one entry is left.
        (slowest,) = best.values()
        return slowest

    def nearest(self, most: int) -> tuple[int, ...]:
        """The ends of the stages in the split nearest to the even one, among those with no stage
        above `most`."""
        best: dict[int, _Rank] = {0: (0, 0, ())}  # by the end of the stages so far
        for stage, size in enumerate(self.even):
            next_best: dict[int, _Rank] = {}
            for stop in self.stops(stage):
                ways = [
                    (
                        far + abs(stop - start - size),
                        squares + self.cost(stage, start, stop) ** 2,
                        (*stops, stop),
                    )
                    for start, (far, squares, stops) in best.items()
                    if start < stop and self.cost(stage, start, stop) <= most
                ]
                if ways:
                    next_best[stop] = min(ways)
            best = next_best
        ((_, _, stops),) = best.values()
        return stops


# The decode step that `split_model` estimates.
_REQUESTS = 64
_CONTEXT = 512
# The cost of sampling, as the bytes that could be read in the same time. Measured on an H200: 60 us
# for 64 requests and 151,936 tokens.
BYTES_PER_LOGIT = 26


@attrs.frozen
class Weights:
    """The bytes of a layer's weights.

    Args:
        fixed: the bytes that every step reads.
        experts: the bytes of all experts.
        share: the fraction of the experts that one token chooses.
    """

    fixed: int
    experts: int
    share: float = 0.0

    def read(self, size: int) -> float:
        """The bytes that a step of `size` requests reads, if all experts are equally likely: a
        given expert is then chosen by no token with probability `(1 - share) ** size`."""
        return self.fixed + self.experts * (1 - (1 - self.share) ** size)


@functools.lru_cache(maxsize=16)  # half a second where every layer has 128 experts
def layer_weights(config: ModelConfig) -> tuple[Weights, ...]:
    """The bytes of every layer's weights."""
    return tuple(weights_of_layer(config, index) for index in range(config.num_layers))


def weights_of_layer(config: ModelConfig, index: int) -> Weights:
    """The bytes of one layer's weights."""
    fields = layer_fields(config, index)
    fixed = experts = 0
    for name, field in fields.items():
        count = math.prod(field.shape) * (field.dtype or config.dtype).itemsize
        of_experts = "router" in fields and name.startswith(("gate_up", "down"))
        fixed = fixed + count * (not of_experts)
        experts = experts + count * of_experts
    return Weights(
        fixed, experts, 0.0 if config.moe is None else config.moe.top_k / config.moe.num_experts
    )


def split_model(config: ModelConfig, num_stages: int) -> tuple[StageLayout, ...]:
    """Split a model into contiguous stages, the slowest as fast as possible, as an engine, a runner
    and `weft.load(..., stage=...)` do.

    It calls `balance` with the bytes that each layer reads. The estimate is for a decode step of 64
    requests at a context of 512 tokens: weights (of the chosen experts only), keys and values; on
    the last stage also the head and the sampler.

    Args:
        config: the whole model's configuration.
        num_stages: at least 1, at most the number of layers.

    Returns:
        The layout of each stage, in order.

    Raises:
        ProgramError: fewer than one stage, or more stages than layers.
    """
    if num_stages == 1:
        return split_layers(config.num_layers, 1)
    kv = 2 * config.num_kv_heads * config.head_dim * config.dtype.itemsize * _REQUESTS * _CONTEXT
    layers = [weights.read(_REQUESTS) + kv for weights in layer_weights(config)]
    last = config.vocab_size * (
        config.hidden_size * config.dtype.itemsize + _REQUESTS * BYTES_PER_LOGIT
    )
    return balance(layers, num_stages, last=last)


def empty_states(
    config: ModelConfig,
    layouts: Sequence[StageLayout],
    *,
    max_num_reqs: int,
    num_pages: int,
    max_pages: int,
    page_size: int,
    max_biased: int = MAX_BIASED,
    extras: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[State, ...]:
    """An empty state for each stage, with pages for the layers that the stage owns.

    Only the last stage samples, so only its sampling table is as wide as the vocabulary.

    Args:
        max_num_reqs, num_pages, max_pages, page_size, max_biased, extras, dtype, device: as
            `State.zeros` takes them.
    """

    def one(layout: StageLayout) -> State:
        return State.zeros(
            num_layers=len(layout.layers),
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_num_reqs=max_num_reqs,
            num_pages=num_pages,
            max_pages=max_pages,
            page_size=page_size,
            vocab_size=config.vocab_size if layout.last else 0,
            max_biased=max_biased,
            extras=extras,
            dtype=dtype,
            device=device,
        )

    return tuple(map(one, layouts))
