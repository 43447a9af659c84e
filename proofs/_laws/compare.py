"""Helpers of the laws: a model as one step, and the classes that cover a batch."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from weft.batches.descriptor import Descriptor
from weft.batches.state import advance
from weft.proofs._strategies.models import Scenario
from weft.transforms.pipelines.pipeline import compose

D = TypeVar("D", bound=Descriptor)


def whole(scenario: Scenario, device: str = "cpu") -> Callable[..., Any]:
    """The scenario's model as one step function."""
    return compose(scenario.stages(1, device), advance=advance)


def larger(descriptor: D, ladder: Sequence[D]) -> list[D]:
    """The classes of the ladder that cover the descriptor."""
    return [d for d in ladder if d.covers(descriptor)]
