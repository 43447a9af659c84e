"""Dispatch: which captured class a batch runs under. One pure function, with its reason in words."""

from collections.abc import Sequence
from typing import Generic, TypeVar

import attrs

from weft.descriptor import Descriptor

D = TypeVar("D", bound=Descriptor)


@attrs.frozen
class Decision(Generic[D]):
    """Where a batch goes: `mode` is `full` (a whole graph of class `descriptor`) or `none` (eager, as it is)."""

    mode: str
    descriptor: D
    reason: str


def dispatch(descriptor: D, ladder: Sequence[D]) -> Decision[D]:
    """The least descriptor of `ladder` that covers `descriptor`; eager if there is none. Total and deterministic.

    Least in the partial order; where two are incomparable, the one that stands later in the ladder (the smaller:
    ladders stand largest first).

    >>> from weft.descriptor import BatchDescriptor as B
    >>> dispatch(B.uniform(3), [B.uniform(8), B.uniform(4), B.uniform(2)]).descriptor
    BatchDescriptor(num_tokens=4, num_reqs=4, query_len=1, num_active_loras=0)
    """
    covering = [d for d in ladder if d.covers(descriptor)]
    if not covering:
        return Decision("none", descriptor, f"no captured class covers '{descriptor}'")
    least = [d for d in covering if not any(d != other and d.covers(other) for other in covering)]
    chosen = least[-1]
    exact = "exactly" if chosen == descriptor else "the least of the ladder that covers it"
    return Decision("full", chosen, f"'{descriptor}' runs under '{chosen}', {exact}")
