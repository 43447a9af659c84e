"""Ladders: which descriptors may be captured, as a pure function of the limits."""

from collections.abc import Sequence

import attrs

from weft.descriptor import BatchDescriptor
from weft.errors import DescriptorError

MODES = ("none", "full_decode_only", "full")


@attrs.frozen
class Limits:
    """What a batch can be at most.

    Args:
        max_num_reqs: requests in a batch.
        max_num_tokens: tokens in a batch, prefill included.
        query_lens: the query lengths of uniform decode batches, each with graphs of its own.
    """

    max_num_reqs: int
    max_num_tokens: int
    query_lens: tuple[int, ...] = (1,)


def rungs(limit: int) -> tuple[int, ...]:
    """The sizes 1, 2, 4, then steps of 8 up to 256, then of 16, up to and including `limit`.

    >>> rungs(20)
    (1, 2, 4, 8, 16, 20)
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, limit + 1, 16)]
    return (*(s for s in sizes if s < limit), limit) if limit > 0 else ()


def make_ladder(mode: str, limits: Limits, sizes: Sequence[int] | None = None) -> tuple[BatchDescriptor, ...]:
    """The descriptors that `mode` may capture under `limits`, largest first.

    Uniform classes `R x q` for every query length; in mode `full` also ragged classes of up to
    `max_num_reqs * max(query_lens)` tokens, for batches that mix decode with the end of a prefill. Longer prefills run
    eagerly in these modes.

    Args:
        mode: one of `MODES`.
        limits: what a batch can be.
        sizes: numbers of requests (uniform) and of tokens (ragged), instead of `rungs`.

    Raises:
        DescriptorError: an unknown mode.

    >>> [str(d) for d in make_ladder("full", Limits(max_num_reqs=2, max_num_tokens=64))]
    ['ragged 2 tokens, 2 reqs', 'uniform x1, 2 reqs', 'ragged 1 tokens, 1 reqs', 'uniform x1, 1 reqs']
    """
    if not isinstance(limits, Limits):
        raise DescriptorError(
            f"make_ladder({mode!r}, {limits!r})", "limits that are no weft.Limits", "weft.Limits(8, 2048)"
        )
    if not limits.query_lens or min(limits.query_lens) < 1 or (sizes is not None and min(sizes, default=1) < 1):
        raise DescriptorError(
            f"make_ladder({mode!r}, {limits}, sizes={sizes})",
            "no query length, or a size or query length that is not at least 1",
            "query_lens=(1,) for plain decode; sizes=None for the usual rungs",
        )
    if mode not in MODES:
        raise DescriptorError(f"make_ladder({mode!r}, ...)", "an unknown mode", f"one of {', '.join(MODES)}")
    if mode == "none":
        return ()
    reqs = limits.max_num_reqs
    found = [
        BatchDescriptor.uniform(n, q)
        for q in limits.query_lens
        for n in (rungs(reqs) if sizes is None else sizes)
        if n <= reqs and n * q <= limits.max_num_tokens
    ]
    if mode == "full":
        most = min(reqs * max(limits.query_lens), limits.max_num_tokens)
        found += [BatchDescriptor(t, min(t, reqs)) for t in (rungs(most) if sizes is None else sizes) if t <= most]
    return tuple(sorted(set(found), key=lambda d: (-d.num_tokens, -d.num_reqs, d.is_uniform)))
