"""Random copies between tensors of many dtypes and layouts, and torch's results for them."""

import ctypes
import random
from collections.abc import Iterator

import attrs
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from weft.ops.copying.byte_copies import Copies

pytest.importorskip("triton")
from weft.ops.copying.copies_triton import ARITIES, table_rows

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.bfloat16,
    torch.int32,
    torch.float32,
    torch.int64,
    torch.complex128,
)
MARGIN = 24


@attrs.frozen
class Pair:
    """A tensor on one side and its counterpart on the other, each at an offset in its storage."""

    dtype: torch.dtype
    size: int
    fixed_offset: int
    other_offset: int


pairs = st.builds(
    Pair,
    st.sampled_from(DTYPES),
    st.sampled_from([0, 1, 2, 3, 7, 17, 1023, 1024, 1025, 20_000]),
    st.integers(0, 9),
    st.integers(0, 9),
)


@attrs.frozen(eq=False)
class Case:
    """Copies, and a call's tensors. All are views of larger storages with random bytes."""

    copies: Copies
    call_tensors: list[Tensor]

    def storages(self) -> list[Tensor]:
        """All bytes of every written storage, margins included."""
        copies = self.copies
        written = copies.fixed if copies.into_fixed else self.call_tensors
        targets = (*written, *(t for t, _ in copies.constants), *(t for t, *_ in copies.repeats))
        return [_bytes(x).cpu().clone() for x in targets]


def _bytes(x: Tensor) -> Tensor:
    """All bytes of the storage."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def draw(pair: Pair, offset: int, random: torch.Generator, device: str) -> Tensor:
    nbytes = (pair.size + MARGIN) * torch.empty(0, dtype=pair.dtype).element_size()
    drawn = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=random).to(device)
    if pair.dtype is torch.bool:
        drawn &= 1
    return drawn.view(pair.dtype)[offset : offset + pair.size]


def make(pairs: list[Pair], into_fixed: bool, seed: int, device: str = "cpu") -> Case:
    """Copies of these pairs; into fixed tensors, some with a constant and a repeating tail."""
    random = torch.Generator().manual_seed(seed)
    fixed = tuple(draw(pair, pair.fixed_offset, random, device) for pair in pairs)
    call_tensors = [draw(pair, pair.other_offset, random, device) for pair in pairs]
    constants = []
    repeats = []
    if into_fixed:
        for i, pair in enumerate(pairs):
            if i % 3 == 0:
                drawn = [
                    draw(pair, o, random, device) for o in (pair.fixed_offset, pair.other_offset)
                ]
                constants.append((drawn[0], drawn[1]))
            if i % 3 == 1 and pair.size:
                tail = draw(attrs.evolve(pair, size=5), pair.fixed_offset, random, device)
                repeats.append((tail, i, tail.element_size()))
    return Case(Copies(fixed, into_fixed, tuple(constants), tuple(repeats)), call_tensors)


def copied(case: Case) -> list[Tensor]:
    """The storages after torch's own copies."""
    for fixed, other in zip(case.copies.fixed, case.call_tensors, strict=True):
        (fixed if case.copies.into_fixed else other).copy_(
            other if case.copies.into_fixed else fixed
        )
    for target, source in case.copies.constants:
        target.copy_(source)
    for tail, index, _ in case.copies.repeats:
        tail.copy_(case.call_tensors[index][-1:])
    return case.storages()


def moved(case: Case) -> list[Tensor]:
    """The storages after the rows of the table, each executed by the C library's memmove."""
    for index, fixed, other, size, into, period in table_rows(case.copies):
        other += case.call_tensors[index].data_ptr() if index >= 0 else 0
        for start in range(0, size, period or size):
            target, source = (fixed, other) if into else (other, fixed)
            ctypes.memmove(target + start, source, period or size)
    return case.storages()


FIXED: list[tuple[list[Pair], bool]] = [
    ([Pair(torch.float32, 8, 0, 0)], True),
    ([Pair(torch.float32, 8, 0, 0), Pair(torch.int64, 0, 0, 0), Pair(torch.bool, 13, 1, 2)], False),
    ([Pair(torch.int64, 4100, 1, 0), Pair(torch.bfloat16, 40_001, 1, 3)], True),
]


def some_cases(device: str = "cpu") -> Iterator[tuple[list[Pair], bool]]:
    """Fixed cases, and random ones with few tensors and with more than the smaller kernels take."""
    yield from FIXED
    random.seed(0)
    for count in (2, 5, ARITIES[0] + 1, ARITIES[1] + 1):
        for into_fixed in (True, False):
            sizes = [0, 1, 3, 17, 700, 9000] if count < 10 else [0, 1, 5]
            yield (
                [
                    Pair(
                        random.choice(DTYPES),
                        random.choice(sizes),
                        random.randrange(9),
                        random.randrange(9),
                    )
                    for _ in range(count)
                ],
                into_fixed,
            )
