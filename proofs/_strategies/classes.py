"""Shape classes: descriptors, limits and ladders, and batches of them."""

import itertools
from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from weft.batches.batch import Batch
from weft.batches.descriptor import BatchDescriptor
from weft.ops.requests import LAST_TOKEN
from weft.transforms.graphs.ladder import Limits, lora_rungs


@st.composite
def descriptors(draw: st.DrawFn, max_reqs: int = 12, max_query_len: int = 4) -> BatchDescriptor:
    """Any valid descriptor, uniform or ragged.

    Args:
        max_reqs: the most requests.
        max_query_len: the most tokens for each request.

    >>> from hypothesis import find
    >>> print(find(descriptors(), lambda d: d.num_tokens > 2))
    ragged 3 tokens, 1 reqs
    """
    reqs = draw(st.integers(1, max_reqs))
    # 0 and others, because a planted bug takes a graph of 0 adapters for one of 1.
    loras = draw(st.integers(0, 2))
    if draw(st.booleans()):
        return BatchDescriptor.uniform(reqs, draw(st.integers(1, max_query_len)), loras)
    return BatchDescriptor(draw(st.integers(reqs, reqs * max_query_len)), reqs, None, loras)


def limits() -> st.SearchStrategy[Limits]:
    """Limits of batches with few requests and tokens, one or two query lengths, and some numbers of
    LoRAs."""
    query_lens = st.lists(st.integers(1, 4), min_size=1, max_size=2, unique=True).map(tuple)
    loras = st.builds(lora_rungs, st.integers(0, 3), specialised=st.booleans())
    # `descriptors()` has up to 12 requests and 48 tokens: some of them exceed drawn limits, and no
    # class covers these.
    return st.builds(Limits, st.integers(1, 12), st.integers(1, 40), query_lens, loras)


@st.composite
def batches(
    draw: st.DrawFn, max_reqs: int = 4, max_query_len: int = 4, vocab_size: int = 32
) -> Batch:
    """A batch of requests in some of the first `max_reqs` rows of a state: a uniform decode, or any
    mixture of prompts, chunks of prompts and single decode tokens.

    A step can run it only on a state that has these rows, and a decode only if their prefill is
    done. For batches in an order that a state can serve, draw `scenarios()`.

    Args:
        max_reqs: the most requests.
        max_query_len: the most tokens of one request.
        vocab_size: token ids are less than this.

    >>> from hypothesis import find
    >>> find(batches(), lambda b: b.descriptor.query_len is not None).descriptor
    BatchDescriptor(num_tokens=1, num_reqs=1, query_len=1, num_active_loras=0)
    """
    rows = draw(st.lists(st.sampled_from(range(max_reqs)), min_size=1, unique=True))
    if draw(st.booleans()):
        return Batch.decode(rows, query_len=draw(st.integers(1, max_query_len)))
    prompt = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=max_query_len)
    # The host does not know the token of a decode; `LAST_TOKEN` stands for it.
    token_ids = [draw(st.one_of(prompt, st.just([LAST_TOKEN]))) for _ in rows]
    return Batch.ragged(rows, token_ids, samples=[draw(st.booleans()) for _ in rows])


def _largest_first(classes: Iterable[BatchDescriptor]) -> tuple[BatchDescriptor, ...]:
    # Sort by every field: before Python 3.12 the hash of None, and with it the order of a set,
    # differs from process to process.
    def key(d: BatchDescriptor) -> tuple[int, ...]:
        return -d.num_tokens, -d.num_reqs, -d.num_active_loras, d.query_len or 0

    return tuple(sorted(set(classes), key=key))


def ladders(
    batches: Sequence[Batch] | None = None, covered: bool = True
) -> st.SearchStrategy[tuple[BatchDescriptor, ...]]:
    """Ladders for these batches, with the class of each batch or a larger one.

    For a ragged batch of one token per request, the ladder often has the uniform class of the same
    shape too, so that dispatch could confuse the two. Unless `covered`, some batches may have no
    class. Without batches, a ladder has up to four classes.

    >>> from hypothesis import find
    >>> find(ladders([Batch.decode([0])]), lambda ladder: True)
    (BatchDescriptor(num_tokens=1, num_reqs=1, query_len=1, num_active_loras=0),)
    """
    if batches is None:
        return st.lists(descriptors(), max_size=4).map(_largest_first)

    def larger(descriptor: BatchDescriptor, reqs: int, tokens: int) -> BatchDescriptor:
        # Each class keeps its batch's number of LoRAs, so that the numbers in a ladder differ.
        loras = descriptor.num_active_loras
        if descriptor.query_len is not None:
            return BatchDescriptor.uniform(descriptor.num_reqs + reqs, descriptor.query_len, loras)
        return BatchDescriptor(
            descriptor.num_tokens + tokens, descriptor.num_reqs + reqs, None, loras
        )

    small = st.sampled_from((0, 0, 1, 2, 4))

    def each(d: BatchDescriptor) -> st.SearchStrategy[tuple[BatchDescriptor, ...]]:
        rungs = st.builds(lambda r, t: (larger(d, r, t),), small, small)
        if not covered:
            rungs = st.one_of(rungs, st.just(()))
        if d.query_len is None and d.num_tokens == d.num_reqs:
            twin = st.sampled_from(
                ((), (BatchDescriptor.uniform(d.num_reqs, 1, d.num_active_loras),))
            )
            return st.builds(lambda a, b: a + b, rungs, twin)
        return rungs

    rungs = st.tuples(*(each(b.descriptor) for b in batches))
    return rungs.map(lambda classes: _largest_first(itertools.chain.from_iterable(classes)))
