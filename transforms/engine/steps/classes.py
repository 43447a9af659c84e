"""The shape classes that an engine's steps are padded to: those of its graphs, and those of steps
without a graph."""

from typing import TypeVar

import attrs
import torch

from weft.batches.batch import Batch
from weft.batches.descriptor import BatchDescriptor
from weft.batches.padding import grow, unpad
from weft.stages.config import ModelConfig
from weft.stages.custom.functions import StageFunctions, capability_of, runs_inside
from weft.stages.layout import weights_of_layer
from weft.stages.model import Model
from weft.transforms.engine.requests.host_state import Budget
from weft.transforms.graphs.dispatch import Decision, dispatch, excess
from weft.transforms.graphs.ladder import Ladder, Limits, lora_rungs, make_ladder, with_whole
from weft.values.bounded import BoundedDict
from weft.values.trees import map_sized

T = TypeVar("T")

# Ragged steps have many shapes, so the memo of decisions is bounded.
_MAX_DECISIONS = 4096
_MOST_CAPTURED = 2048
_MOST_CAPTURED_IF_SMALL = 4096
# If a token reads fewer bytes of weights than this in a layer, a GPU finishes a step of 8,192
# tokens before the host has launched it: on an H200, 19 ms against 22 to 40 ms for the 28 layers of
# Qwen3-0.6B, of 31 MB each.
_SMALL_LAYER = 48 * 10**6


@attrs.frozen
class Classes:
    """The classes that steps run under, to which their batches are padded.

    Args:
        captured: the classes of graphs.
        eager: the classes of other steps (`eager_ladder`). A step with more tokens than the largest
            of them is padded only in requests, to the most that any class has, so that the head and
            sampling run the same kernels.
        max_num_tokens: the most tokens of a step.
    """

    captured: Ladder[BatchDescriptor] = attrs.field(factory=Ladder)
    eager: Ladder[BatchDescriptor] = attrs.field(factory=Ladder)
    max_num_tokens: int = 0
    _decisions: BoundedDict[BatchDescriptor, Decision[BatchDescriptor]] = attrs.field(
        factory=lambda: BoundedDict(_MAX_DECISIONS), init=False
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
            self._decisions[descriptor] = decision
        return decision

    @property
    def captured_tokens(self) -> int:
        """The most tokens of a step with prompts that runs in a graph."""
        return max((one.num_tokens for one in self.captured if not one.is_uniform), default=0)

    @property
    def without_graph(self) -> list[BatchDescriptor]:
        """The classes of steps without a graph, including those of `large`."""
        return [one for one in (*self.eager, *self.large) if self.of(one).mode == "none"]

    @property
    def large(self) -> list[BatchDescriptor]:
        """Classes of more tokens than the largest eager one: powers of two and `max_num_tokens`, so
        that each choice of tiles occurs in one of them."""
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
        """The class with the same number of tokens, the most requests of any class, and the next
        number of adapters that a class has."""
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
        """Remove a batch's padding from what its step returned."""
        decision = self.of(descriptor)
        if decision.padding and out is not None:
            return unpad(out, descriptor)
        return out


def has_small_layers(config: ModelConfig) -> bool:
    """Whether the host takes longer to launch a large step without a graph than a GPU takes to run
    it, so that steps are best no larger than graphs."""
    return weights_of_layer(config, config.num_layers // 2).read(1) < _SMALL_LAYER


def captured_tokens(config: ModelConfig) -> int:
    """The most tokens of a captured ragged class. A larger step gains nothing from a graph, since
    it keeps the GPU busy for longer than the host takes to launch it; or its graph would hold too
    much memory."""
    if has_small_layers(config):
        return _MOST_CAPTURED_IF_SMALL
    return _MOST_CAPTURED


def engine_ladder(
    graph: str, budget: Budget, num_adapters: int, model: Model
) -> Ladder[BatchDescriptor]:
    """The classes of a cohort's steps that may be captured, as far as the stages' attention
    allows."""
    loras = lora_rungs(min(num_adapters, budget.cohort_size))
    size = budget.cohort_size
    most = min(
        budget.max_num_tokens, max(captured_tokens(model.config), size * max(budget.query_lens))
    )
    return model_ladder(graph, Limits(size, most, budget.query_lens, loras), model.functions)


def eager_ladder(
    budget: Budget, num_adapters: int, model: Model, device: torch.device
) -> Ladder[BatchDescriptor]:
    """The classes to which a cohort's steps without a graph are padded. On a GPU these are the
    classes of graphs in the default mode, so that each operator sees the same shapes with and
    without a graph: the shapes select the kernel, and with it the order of its sums. A model that
    cannot run in a graph has none."""
    if device.type != "cuda" or capability_of(model.functions) == "none":
        return Ladder()
    if capability_of(model.functions) == "piecewise":
        mode = "piecewise"
    else:
        mode = "full_and_piecewise"
    return engine_ladder(mode, budget, num_adapters, model)


def model_ladder(mode: str, limits: Limits, functions: StageFunctions) -> Ladder[BatchDescriptor]:
    """The classes that a model with these functions may capture. If its attention runs inside the
    graph, there is no operator to cut at, and the graph is whole."""
    ladder = make_ladder(mode, limits, capability=capability_of(functions), strict=False)
    inside = runs_inside(functions)
    if inside is None:
        return ladder
    return with_whole(ladder, inside)
