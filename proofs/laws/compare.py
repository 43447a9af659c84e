"""What a law raises, and how two runs are compared."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.descriptor import Descriptor
from weft.proofs.strategies.models import Scenario
from weft.state import State, advance
from weft.transforms.pipeline import compose
from weft.trees import leaves_with_names, tree_map

D = TypeVar("D", bound=Descriptor)

ATOL, RTOL = 2e-4, 2e-4
"""Bounds where two runs have different shapes, so that a matrix product may sum in another order (float32)."""


class LawViolation(AssertionError):
    """A law that did not hold: which, where the first difference is, and both values there."""


def assert_equal(law: str, seen: Any, expected: Any, *, exact: bool = True) -> None:
    """Raise LawViolation at the first leaf of `seen` that differs from `expected`.

    Args:
        exact: bitwise (NaN equals NaN); else within ATOL and RTOL, and integers exactly.
    """
    pairs, wanted = leaves_with_names(seen), leaves_with_names(expected)
    if [name for name, _ in pairs] != [name for name, _ in wanted]:
        raise LawViolation(f"{law}: trees differ: {[n for n, _ in pairs]} against {[n for n, _ in wanted]}")
    for (name, a), (_, b) in zip(pairs, wanted, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if a != b:
                raise LawViolation(f"{law}: {name}: {a!r} against {b!r}")
            continue
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            kinds = [f"{x.dtype} {tuple(x.shape)} on {x.device}" for x in (a, b)]
            raise LawViolation(f"{law}: {name}: {kinds[0]} against {kinds[1]}")
        if a.is_meta:
            continue
        tolerance = (0.0, 0.0) if exact or not a.is_floating_point() else (ATOL, RTOL)
        same = torch.isclose(a, b, atol=tolerance[0], rtol=tolerance[1], equal_nan=True)
        if not same.all():
            index = tuple(int(i) for i in (~same).nonzero()[0])
            raise LawViolation(f"{law}: {name}{list(index)}: {a[index].item()!r} against {b[index].item()!r}")


def visible(state: Sequence[State]) -> Any:
    """What a state says of its requests: all but the scratch row, which belongs to nobody."""
    names = ("block_table", "positions", "last_tokens", "mrope_position_deltas")
    return [
        {"kv_pages": s.kv_pages, "sampling": tree_map(_of_requests, s.sampling)}
        | {name: _of_requests(getattr(s, name)) for name in names}
        for s in state
    ]


def _of_requests(table: Tensor) -> Tensor:
    return table[:-1]


def whole(scenario: Scenario) -> Callable[..., Any]:
    """The scenario's model as one step."""
    return compose(scenario.stages(1), advance=advance)


def larger(descriptor: D, ladder: Sequence[D]) -> list[D]:
    """The classes of the ladder that cover a batch of this one."""
    return [d for d in ladder if d.covers(descriptor)]
