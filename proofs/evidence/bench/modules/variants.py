"""The variants of a benchmark: how each makes a function fast."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn

from weft.stages.custom.module import from_module
from weft.transforms.graphs.graphify import graphify

EAGER = "eager"
COMPILE = "compile"
REDUCE_OVERHEAD = "reduce-overhead"
GRAPHIFY = "graphify"
GRAPHIFY_INDUCTOR = "graphify-inductor"
JAX = "jax"
VARIANTS = (EAGER, COMPILE, REDUCE_OVERHEAD, GRAPHIFY, GRAPHIFY_INDUCTOR, JAX)

Call = Callable[[], Any]
S = TypeVar("S")


@attrs.frozen
class Setting:
    """The variant and the sizes for which a case is built.

    Args:
        variant: one of `VARIANTS`.
        device: `cuda` or `cpu`.
        small: whether the sizes only show that it runs.
    """

    variant: str
    device: str
    small: bool = False

    @property
    def is_weft(self) -> bool:
        """Whether weft runs the function."""
        return self.variant in (GRAPHIFY, GRAPHIFY_INDUCTOR)

    @property
    def half(self) -> torch.dtype:
        """The dtype of inference."""
        return torch.bfloat16

    def size(self, full: S, small: S) -> S:
        """The full size, or the small one."""
        if self.small:
            return small
        return full

    def built(self, make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> Any:
        """A module on the device, with the same weights in each variant."""
        torch.manual_seed(0)
        with torch.device(self.device):
            return make().to(dtype).eval()

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random numbers, which are the same in each variant."""
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(shape, generator=generator).to(self.device, dtype)

    def tokens(self, *shape: int, vocab_size: int) -> Tensor:
        """Random tokens, which are the same in each variant."""
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randint(vocab_size, shape, generator=generator).to(self.device)

    def graphified(self, function: Callable[..., Any], **options: Any) -> Any:
        """The function by `weft.graphify`."""
        if self.variant == GRAPHIFY_INDUCTOR:
            options["compiler"] = "inductor"
        return graphify(function, **options)

    def compiled(self, function: Callable[..., Any], dynamic: bool | None = None) -> Any:
        """The function itself, or by `torch.compile`."""
        if self.variant == EAGER:
            return function
        if self.variant == COMPILE:
            return torch.compile(function, dynamic=dynamic)
        assert self.variant == REDUCE_OVERHEAD
        inner: Any = torch.compile(function, dynamic=dynamic, mode="reduce-overhead")

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            # Otherwise results of the last call may count as inputs of this one.
            torch.compiler.cudagraph_mark_step_begin()
            return inner(*args)

        return call

    def inference(self, module: nn.Module, *inputs: Any) -> Call:
        """A module's calls on the same inputs."""
        step = self.module_step(module)
        return lambda: step(*inputs)

    def module_step(self, module: nn.Module) -> Callable[..., Any]:
        """A module as a function, which records no gradients."""
        module.requires_grad_(False)
        if not self.is_weft:
            plain: Callable[..., Any] = torch.no_grad()(self.compiled(module))
            return plain
        stage = from_module(module)
        step = self.graphified(stage.stage)
        state = stage.state

        def call(*inputs: Any) -> Any:
            nonlocal state
            state, output = step(stage.params, state, inputs, None)
            return output

        return call


def in_turn(calls: list[Call]) -> Call:
    """All of these, one after the other, as one call."""
    return lambda: [call() for call in calls]


def float_leaves(tree: Any) -> list[Tensor]:
    """The tensors of floating point in lists, tuples and dicts."""
    if isinstance(tree, Tensor):
        return [tree] if tree.is_floating_point() else []
    if isinstance(tree, dict):
        tree = list(tree.values())
    if not isinstance(tree, list | tuple):
        return []
    return [*itertools.chain.from_iterable(map(float_leaves, tree))]
