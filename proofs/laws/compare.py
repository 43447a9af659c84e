"""Helpers of the laws: the visible part of a state, the whole step, and the classes that cover a batch."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from weft.descriptor import Descriptor
from weft.proofs.strategies.models import Scenario
from weft.state import State, advance
from weft.transforms.pipelines.pipeline import compose
from weft.trees import tree_map

D = TypeVar("D", bound=Descriptor)


def visible(state: Sequence[State]) -> Any:
    """The part of a state that belongs to requests: all but the scratch row."""
    names = ("block_table", "positions", "last_tokens", "mrope_position_deltas")
    return [
        {"kv_pages": s.kv_pages, "sampling": tree_map(_of_requests, s.sampling)}
        | {name: _of_requests(getattr(s, name)) for name in names}
        for s in state
    ]


def _of_requests(table: Tensor) -> Tensor:
    return table[:-1]


def whole(scenario: Scenario) -> Callable[..., Any]:
    """The scenario's model as one step function."""
    return compose(scenario.stages(1), advance=advance)


def larger(descriptor: D, ladder: Sequence[D]) -> list[D]:
    """The classes of the ladder that cover a batch of this class."""
    return [d for d in ladder if d.covers(descriptor)]
