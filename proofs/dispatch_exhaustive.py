"""Dispatch and ladders for every small limit, one by one: all modes, all capabilities, all batches up to the limits."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import attrs

from weft.descriptor import BatchDescriptor
from weft.errors import DescriptorError
from weft.transforms.graphs.dispatch import Decision, dispatch
from weft.transforms.graphs.ladder import CAPABILITIES, MODES, Ladder, Limits, make_ladder, rungs, token_rungs

QUERY_LENS = ((1,), (2,), (1, 3))
LORAS = ((0,), (0, 2))


@attrs.frozen
class Count:
    """What was checked: so many ladders, batches and sizes; as text, a line of the report."""

    what: str
    number: int

    def __str__(self) -> str:
        return f"{self.what:<72}{self.number:>8} cases           held"


class CaseError(AssertionError):
    """A case that breaks a claim, in words."""


def _require(holds: bool, claim: str, *case: Any) -> None:
    if not holds:
        raise CaseError(f"{claim}: {', '.join(map(str, case))}")


def all_limits(max_reqs: int, max_tokens: int) -> Iterator[Limits]:
    """Every limit of up to so many requests and tokens, with each of `QUERY_LENS` and `LORAS`."""
    numbers = product(range(1, max_reqs + 1), range(1, max_tokens + 1), QUERY_LENS, LORAS)
    return (Limits(*each) for each in numbers)


def all_batches(limits: Limits) -> Iterator[BatchDescriptor]:
    """Every class of batches that the limits allow."""
    for loras in range(max(limits.active_loras) + 1):
        for reqs in range(1, limits.max_num_reqs + 1):
            for tokens in range(reqs, limits.max_num_tokens + 1):
                yield BatchDescriptor(tokens, reqs, None, loras)
            for query_len in limits.query_lens:
                if reqs * query_len <= limits.max_num_tokens:
                    yield BatchDescriptor.uniform(reqs, query_len, loras)


def oracle(own: BatchDescriptor, ladder: Ladder[BatchDescriptor]) -> tuple[str, set[BatchDescriptor]]:
    """The mode, and the classes of which any would be right, by the definition of `covers` written out again."""

    def room(d: BatchDescriptor, needed: BatchDescriptor) -> bool:
        sizes = ((d.num_tokens, needed.num_tokens), (d.num_reqs, needed.num_reqs))
        loras = (d.num_active_loras, needed.num_active_loras)
        return all(a >= b for a, b in (*sizes, loras)) and (d.query_len is None or d.query_len == needed.query_len)

    for mode, classes in (("full", ladder.full), ("piecewise", ladder.piecewise)):
        fitting = {d for d in classes if room(d, own)}
        if fitting:
            return mode, {d for d in fitting if not any(d != other and room(d, other) for other in fitting)}
    return "none", {own}


def check_decision(own: BatchDescriptor, ladder: Ladder[BatchDescriptor]) -> None:
    """One batch under one ladder: the right mode, a least class, of least padding, and the padding as it is."""
    decision: Decision[BatchDescriptor] = dispatch(own, ladder)
    mode, right = oracle(own, ladder)
    chosen = decision.descriptor
    _require(decision.mode == mode and chosen in right, "a least covering class, by mode", own, decision, right)
    costs = [(d.num_tokens, d.num_reqs, d.num_active_loras) for d in (chosen, *right)]
    _require(costs[0] == min(costs), "and of those, the one that pads least", own, decision, right)
    sizes = ("num_tokens", "num_reqs", "num_active_loras")
    padding = {name: getattr(chosen, name) - getattr(own, name) for name in sizes}
    _require(dict(decision.padding) == {k: v for k, v in padding.items() if v}, "the padding told", own, decision)


def check_dispatch(max_reqs: int = 3, max_tokens: int = 9) -> Count:
    """Every batch under every ladder; each rung by its own class."""
    count = 0
    for limits, mode in product(all_limits(max_reqs, max_tokens), MODES):
        ladder = make_ladder(mode, limits)
        for own in all_batches(limits):
            check_decision(own, ladder)
            count += 1
        for way, classes in (("full", ladder.full), ("piecewise", ladder.piecewise)):
            for rung in classes:
                reached = dispatch(rung, ladder)
                _require((reached.mode, reached.descriptor) == (way, rung), "reachable", rung, reached)
    return Count(f"dispatch, every batch of up to {max_reqs} reqs, {max_tokens} tokens, every ladder", count)


def check_capabilities(max_reqs: int = 3, max_tokens: int = 9) -> Count:
    """A back end gets only classes that it can be in a whole graph with; a mode refused to it is refused to weaker
    ones."""
    count = 0
    for limits, mode in product(all_limits(max_reqs, max_tokens), MODES):
        allowed = []
        for capability in CAPABILITIES:
            try:
                ladder = make_ladder(mode, limits, capability=capability)
            except DescriptorError:
                ladder = None
            allowed.append(ladder is not None)
            for d in () if ladder is None else ladder.full:
                needed = "always" if d.query_len is None else "uniform" if d.query_len > 1 else "uniform_single_token"
                able = CAPABILITIES.index(capability) >= CAPABILITIES.index(needed)
                _require(able, "within its capability", mode, limits, capability, d)
            _require(ladder in (None, make_ladder(mode, limits)), "the ladder, or none", mode, limits, capability)
            count += 1
        _require(allowed == sorted(allowed) and allowed[-1], "more capable, more allowed", mode, limits, allowed)
    return Count(f"capabilities, every limit of up to {max_reqs} reqs, {max_tokens} tokens", count)


def check_rungs(limit: int = 1500) -> Count:
    """Sizes rise to the limit. Of requests, no step is over 8 and an eighth of where it starts; of tokens, none is over
    a quarter beyond 128; none of either is over the half of where it leads."""
    for most in range(limit + 1):
        for sizes, widest in ((rungs(most), _step_of_requests), (token_rungs(most), _step_of_tokens)):
            _require(list(sizes) == sorted(set(sizes)) and sizes[-1:] == ((most,) if most else ()), "sizes rise", most)
            close = all(b - a <= max(1, min(widest(a), b // 2)) for a, b in zip((0, *sizes), sizes, strict=False))
            _require(close, "no step is wide", most, sizes)
    wide = "8 or an eighth (of tokens a quarter), and half the size"
    return Count(f"rungs: they rise in steps of at most {wide}", limit + 1)


def _step_of_requests(start: int) -> int:
    return max(8, start // 8)


def _step_of_tokens(start: int) -> int:
    return start if start < 128 else start // 4


def check_all() -> Iterator[Count]:
    """Every check, one after the other.

    Raises:
        CaseError: with the case that breaks a claim.
    """
    yield check_dispatch()
    yield check_capabilities()
    yield check_rungs()
