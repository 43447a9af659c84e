"""The classes that an engine's steps run under: those of its graphs, and those to which other steps
are padded."""

from typing import TypeVar

import attrs
import torch

from weft.batch import Batch
from weft.descriptor import BatchDescriptor
from weft.padding import grow, unpad
from weft.stages.config import ModelConfig
from weft.stages.custom.functions import StageFunctions
from weft.stages.layout import weights_of_layer
from weft.stages.model import Model
from weft.transforms.engine.requests.host_state import Budget
from weft.transforms.graphs.dispatch import Decision, dispatch, excess
from weft.transforms.graphs.ladder import Ladder, Limits, lora_rungs, make_ladder, with_whole
from weft.trees import map_sized

T = TypeVar("T")

_MAX_DECISIONS = 4096
_MOST_CAPTURED = 2048
_MOST_CAPTURED_IF_SMALL = 4096
# The bytes of weights that a token reads in a layer, below which a GPU is faster than the host that
# launches a step of 8,192 tokens: on an H200, 19 ms against 22 to 40 for the 28 layers of
# Qwen3-0.6B, of 31 MB.
_SMALL_LAYER = 48 * 10**6


@attrs.frozen
class Classes:
    """The classes that steps run under, to which their batches are padded.

    Args:
        captured: those of graphs.
        eager: those of other steps (`eager_ladder`). A step of more tokens than any of them has is
            padded in requests only, to the most that one has, so that the head and sampling take
            the same kernels.
        max_num_tokens: the most tokens of a step.
    """

    captured: Ladder[BatchDescriptor] = attrs.field(factory=Ladder)
    eager: Ladder[BatchDescriptor] = attrs.field(factory=Ladder)
    max_num_tokens: int = 0
    _decisions: dict[BatchDescriptor, Decision[BatchDescriptor]] = attrs.field(
        factory=dict, init=False
    )

    def of(self, descriptor: BatchDescriptor) -> Decision[BatchDescriptor]:
        """The mode that a step runs in, and the class that it is padded to."""
        if (decision := self._decisions.get(descriptor)) is None:
            decision = dispatch(descriptor, self.captured)
            if decision.mode == "none":
                eager = dispatch(descriptor, self.eager)
                if eager.mode == "none":
                    chosen = self._of_most_requests(descriptor)
                else:
                    chosen = eager.descriptor
                padding = tuple(
                    (name, more) for name, more in excess(chosen, descriptor).items() if more
                )
                decision = attrs.evolve(decision, descriptor=chosen, padding=padding)
            if len(self._decisions) >= _MAX_DECISIONS:
                self._decisions.clear()
            self._decisions[descriptor] = decision
        return decision

    @property
    def captured_tokens(self) -> int:
        """The most tokens of a step with prompts that has a graph."""
        return max((one.num_tokens for one in self.captured if not one.is_uniform), default=0)

    @property
    def without_graph(self) -> list[BatchDescriptor]:
        """The classes of padded steps without a graph; beyond the largest, those of `large`."""
        return [one for one in (*self.eager, *self.large) if self.of(one).mode == "none"]

    @property
    def large(self) -> list[BatchDescriptor]:
        """Classes of more tokens than any other: powers of two and `max_num_tokens`, one for each
        choice of tiles."""
        largest = {
            one.num_active_loras: one for one in reversed([*self.eager]) if not one.is_uniform
        }.values()
        powers = (2**power for power in range(self.max_num_tokens.bit_length() + 1))
        sizes = [
            min(size, self.max_num_tokens) for size in powers if size < 2 * self.max_num_tokens
        ]
        more = [
            attrs.evolve(one, num_tokens=size)
            for one in largest
            for size in sizes
            if size > one.num_tokens
        ]
        return [*map(self._of_most_requests, more)]

    def _of_most_requests(self, descriptor: BatchDescriptor) -> BatchDescriptor:
        """The class of as many tokens, and of the most requests of a step, with as many adapters as
        a class has."""
        if descriptor.is_uniform or not len(self.eager):
            return descriptor
        most = max(one.num_reqs for one in self.eager)
        adapters = [
            one.num_active_loras
            for one in self.eager
            if one.num_active_loras >= descriptor.num_active_loras
        ]
        return attrs.evolve(
            descriptor,
            num_reqs=max(descriptor.num_reqs, most),
            num_active_loras=min(adapters, default=descriptor.num_active_loras),
        )

    def pad(self, batch: Batch) -> Batch:
        """Pad a batch to its class."""
        decision = self.of(batch.descriptor)
        if not decision.padding:
            return batch
        return map_sized(
            lambda value, axes: grow(value, axes, decision.descriptor), batch, decision.descriptor
        )

    def unpad(self, out: T, descriptor: BatchDescriptor) -> T:
        """Cut what a step returned down to its own class."""
        decision = self.of(descriptor)
        if decision.padding and out is not None:
            return unpad(out, descriptor)
        return out


def has_small_layers(config: ModelConfig) -> bool:
    """Whether the host takes longer than a GPU for a large step without a graph, so that steps are
    best as large as a graph may be."""
    return weights_of_layer(config, config.num_layers // 2).read(1) < _SMALL_LAYER


def captured_tokens(config: ModelConfig) -> int:
    """The most tokens of a ragged class: a step of more keeps a GPU busy for longer than its
    launches take the host, or its graph would hold much memory."""
    if has_small_layers(config):
        return _MOST_CAPTURED_IF_SMALL
    return _MOST_CAPTURED


def engine_ladder(
    graph: str, budget: Budget, num_adapters: int, model: Model
) -> Ladder[BatchDescriptor]:
    """The classes of a cohort's steps that may be captured, with the attention that the stages
    have."""
    loras = lora_rungs(min(num_adapters, budget.cohort_size))
    size = budget.cohort_size
    most = min(
        budget.max_num_tokens, max(captured_tokens(model.config), size * max(budget.query_lens))
    )
    return model_ladder(graph, Limits(size, most, budget.query_lens, loras), model.functions)


def eager_ladder(
    budget: Budget, num_adapters: int, model: Model, device: torch.device
) -> Ladder[BatchDescriptor]:
    """The classes to which a cohort's steps without a graph are padded. On a GPU they are those of
    graphs in the default mode, so that each operator has the shapes that it has there: a kernel is
    chosen by them, and with it the order of its sums. A model that runs in no graph has none."""
    if device.type != "cuda" or model.functions.capability == "none":
        return Ladder()
    if model.functions.capability == "piecewise":
        mode = "piecewise"
    else:
        mode = "full_and_piecewise"
    return engine_ladder(mode, budget, num_adapters, model)


def model_ladder(mode: str, limits: Limits, functions: StageFunctions) -> Ladder[BatchDescriptor]:
    """The classes that a model with these functions may capture. Where its attention runs inside of
    a graph, there is no operator to cut at, and the graph is whole."""
    ladder = make_ladder(mode, limits, capability=functions.capability, strict=False)
    if functions.inside is None:
        return ladder
    return with_whole(ladder, functions.inside)
