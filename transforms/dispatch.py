"""Dispatch: which captured class a batch runs under. One pure function, with its reason in words."""

from collections.abc import Sequence
from typing import Generic, TypeVar

import attrs

from weft.descriptor import Descriptor
from weft.transforms.ladder import Ladder, as_ladder

D = TypeVar("D", bound=Descriptor)


@attrs.frozen
class Decision(Generic[D]):
    """Where a batch goes: to a whole graph (`full`) or pieces (`piecewise`) of class `descriptor`, or, as it is, to the
    function itself (`none`)."""

    mode: str
    descriptor: D
    reason: str


def dispatch(descriptor: D, ladder: Ladder[D] | Sequence[D]) -> Decision[D]:
    """The least class of the ladder that covers `descriptor`: a whole graph before pieces. Total and deterministic.

    Least in the partial order; where two are incomparable, the one that stands later in the ladder (the smaller:
    ladders stand largest first).

    >>> from weft.descriptor import BatchDescriptor as B
    >>> dispatch(B.uniform(3), [B.uniform(8), B.uniform(4), B.uniform(2)]).descriptor
    BatchDescriptor(num_tokens=4, num_reqs=4, query_len=1, num_active_loras=0)
    """
    ladder = as_ladder(ladder)
    for mode, classes in (("full", ladder.full), ("piecewise", ladder.piecewise)):
        covering = [d for d in classes if d.covers(descriptor)]
        if covering:
            chosen = [d for d in covering if not any(d != other and d.covers(other) for other in covering)][-1]
            exact = "exactly" if chosen == descriptor else "the least of the ladder that covers it"
            way = "" if mode == "full" else ", in pieces"
            return Decision(mode, chosen, f"'{descriptor}' runs under '{chosen}'{way}, {exact}")
    return Decision("none", descriptor, f"no captured class covers '{descriptor}'")
