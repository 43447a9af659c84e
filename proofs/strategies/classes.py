"""Shape classes: descriptors, limits and ladders."""

from collections.abc import Sequence

from hypothesis import strategies as st

from weft.batch import Batch
from weft.descriptor import BatchDescriptor
from weft.transforms.ladder import Limits, lora_rungs


@st.composite
def descriptors(draw: st.DrawFn, max_reqs: int = 12, max_query_len: int = 4) -> BatchDescriptor:
    """Any valid descriptor, uniform and ragged alike, equal shapes of both classes often."""
    reqs = draw(st.integers(1, max_reqs))
    loras = draw(st.integers(0, 2))
    if draw(st.booleans()):
        return BatchDescriptor.uniform(reqs, draw(st.integers(1, max_query_len)), loras)
    return BatchDescriptor(draw(st.integers(reqs, reqs * max_query_len)), reqs, None, loras)


def limits() -> st.SearchStrategy[Limits]:
    """What a batch can be: few requests and tokens, one or two query lengths, and numbers of LoRAs."""
    query_lens = st.lists(st.integers(1, 4), min_size=1, max_size=2, unique=True).map(tuple)
    loras = st.builds(lora_rungs, st.integers(0, 3), specialised=st.booleans())
    return st.builds(Limits, st.integers(1, 12), st.integers(1, 40), query_lens, loras)


def ladders(batches: Sequence[Batch], covered: bool = True) -> st.SearchStrategy[tuple[BatchDescriptor, ...]]:
    """Ladders for these batches: for each its own class or a larger one, and, to collide with a ragged batch of one
    token a request, often the uniform class of its shape. Not `covered`: some batches may find no class."""

    def larger(descriptor: BatchDescriptor, reqs: int, tokens: int) -> BatchDescriptor:
        loras = descriptor.num_active_loras  # as many, so that classes of other numbers stand beside it
        if descriptor.query_len is not None:
            return BatchDescriptor.uniform(descriptor.num_reqs + reqs, descriptor.query_len, loras)
        return BatchDescriptor(descriptor.num_tokens + tokens, descriptor.num_reqs + reqs, None, loras)

    small = st.sampled_from((0, 0, 1, 2, 4))

    def each(d: BatchDescriptor) -> st.SearchStrategy[tuple[BatchDescriptor, ...]]:
        found = st.builds(lambda r, t: (larger(d, r, t),), small, small)
        if not covered:
            found = st.one_of(found, st.just(()))
        if d.query_len is None and d.num_tokens == d.num_reqs:
            twin = st.sampled_from(((), (BatchDescriptor.uniform(d.num_reqs, 1, d.num_active_loras),)))
            return st.builds(lambda a, b: a + b, found, twin)
        return found

    def largest_first(found: tuple[tuple[BatchDescriptor, ...], ...]) -> tuple[BatchDescriptor, ...]:
        classes = {d for ds in found for d in ds}
        return tuple(sorted(classes, key=lambda d: (-d.num_tokens, -d.num_reqs, -d.num_active_loras)))

    return st.tuples(*(each(b.descriptor) for b in batches)).map(largest_first)
