"""Dispatch: which captured class a batch runs under, why, and what that pads. One pure function."""

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import attrs

from weft.arguments import is_int
from weft.descriptor import Descriptor
from weft.errors import DescriptorError
from weft.transforms.graphs.ladder import Ladder, as_ladder

D = TypeVar("D", bound=Descriptor)

EXACT, LEAST, NONE = "exactly", "the least of the ladder that covers it", "no captured class covers it"


@attrs.frozen
class Decision(Generic[D]):
    """Where a batch goes: to a whole graph (`full`) or pieces (`piecewise`) of class `descriptor`, or, as it is, to the
    function itself (`none`).

    Args:
        mode: `full`, `piecewise` or `none`.
        descriptor: the class that it runs under.
        reason: in words.
        padding: what that costs: (name, number) for each size that is padded, as in `(("num_tokens", 3),)`; empty where
            the class is the batch's own.

    >>> from weft.descriptor import BatchDescriptor as B
    >>> print(dispatch(B(2, 2), [B(4, 4)]))  # doctest: +ELLIPSIS
    'ragged 2 tokens, 2 reqs' runs under 'ragged 4 tokens, 4 reqs', the least ...; padded by 2 tokens, 2 reqs
    """

    mode: str
    descriptor: D
    reason: str
    padding: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        padded = in_words(self.padding)
        return f"{self.reason}; padded by {padded}" if padded else self.reason


def dispatch(descriptor: D, ladder: Ladder[D] | Sequence[D]) -> Decision[D]:
    """The least class of the ladder that covers `descriptor`, by mode and then by padding. Total and deterministic.

    A whole graph before pieces. Then the least in the partial order `covers`; of several that are incomparable, the one
    that pads least: the first size (of a `BatchDescriptor`, tokens) decides, then the next. Of those that pad the same,
    the one that stands later in the ladder. `weft.proofs.solver.dispatch_proof` proves this of this code.

    Raises:
        DescriptorError: two classes cover each other and are not equal, so that `covers` is no partial order; or what
            is no descriptor, or no ladder.

    >>> from weft.descriptor import BatchDescriptor as B
    >>> dispatch(B.uniform(3), [B.uniform(8), B.uniform(4), B.uniform(2)]).descriptor
    BatchDescriptor(num_tokens=4, num_reqs=4, query_len=1, num_active_loras=0)
    """
    if not hasattr(descriptor, "covers") or not isinstance(ladder, Iterable):
        raise _no_call(descriptor, ladder)
    ladder = as_ladder(ladder)
    for mode, classes in (("full", ladder.full), ("piecewise", ladder.piecewise)):
        covering = [d for d in classes if d.covers(descriptor)]
        least = [d for d in covering if not any(d != other and d.covers(other) for other in covering)]
        if covering and not least:
            raise _no_order(descriptor, covering)
        if least:
            chosen = min(reversed(least), key=lambda d: tuple(excess(d, descriptor).values()))
            way = "" if mode == "full" else ", in pieces"
            why = EXACT if chosen == descriptor else LEAST
            padding = tuple((name, more) for name, more in excess(chosen, descriptor).items() if more)
            return Decision(mode, chosen, f"'{descriptor}' runs under '{chosen}'{way}, {why}", padding)
    return Decision("none", descriptor, f"no captured class covers '{descriptor}'")


def _no_call(descriptor: Any, ladder: Any) -> DescriptorError:
    """Of arguments that are no descriptor and no ladder."""
    if hasattr(ladder, "covers"):
        return DescriptorError(
            f"dispatch(..., '{ladder}')", "a descriptor in the ladder's place", "dispatch(descriptor, ladder)"
        )
    call = f"dispatch({type(descriptor).__name__}, {type(ladder).__name__})"
    if hasattr(descriptor, "descriptor"):
        return DescriptorError(call, "a batch where its class should be", "dispatch(batch.descriptor, ladder)")
    return DescriptorError(call, "no descriptor, or no ladder", "dispatch(batch.descriptor, make_ladder(mode, limits))")


def excess(larger: Any, own: Any) -> dict[str, int]:
    """By how much each size of class `larger` exceeds that of class `own`, which it covers.

    The sizes are the whole numbers among the arguments of `own`, in their order (attrs, dataclasses and named tuples
    list them; else the attributes count); one that the larger class leaves open, as None, is not padded. A class that
    counts otherwise has a method `excess(self, own)` that returns such a dict: an image's resolution, say,
    `{"pixels": ...}`.

    >>> from weft.descriptor import BatchDescriptor as B
    >>> excess(B(8, 4), B.uniform(3))
    {'num_tokens': 5, 'num_reqs': 1, 'query_len': 0, 'num_active_loras': 0}
    """
    if (method := getattr(larger, "excess", None)) is not None:
        return dict(method(own))
    names = getattr(type(own), "__match_args__", ()) or [n for n in vars(own) if not n.startswith("_")]
    pairs = [(name, getattr(larger, name), getattr(own, name)) for name in names]
    return {name: a - b if is_int(a) else 0 for name, a, b in pairs if is_int(b)}


def in_words(padding: Sequence[tuple[str, int]]) -> str:
    """What is padded, as `3 tokens, 1 req`; empty for nothing."""
    names = [(name.removeprefix("num_").replace("_", " "), more) for name, more in padding]
    return ", ".join(f"{more} {name.removesuffix('s') if more == 1 else name}" for name, more in names)


def _no_order(descriptor: Any, covering: Sequence[Any]) -> DescriptorError:
    a, b = next((a, b) for a in covering for b in covering if a != b and a.covers(b) and b.covers(a))
    return DescriptorError(
        f"dispatch('{descriptor}', <ladder>)",
        f"'{a}' and '{b}' cover each other and are not equal",
        "make covers a partial order: two classes that cover each other are one",
    )
