"""A description of byte copies, which an implementation executes in one launch."""

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class Copies:
    """Copies of bytes on one device, in which one side of each pair is fixed and each call passes
    the other.

    Args:
        fixed: the fixed sides; each is dense, as `same_bytes` requires, and keeps its address.
        into_fixed: whether the fixed sides are written (True) or read.
        constants: further (target, source) pairs, with both sides fixed.
        repeats: (tail, index, period): fill `tail`, which is fixed, with repetitions of the last
            `period` bytes of the tensor that is passed for `fixed[index]`.
    """

    fixed: tuple[Tensor, ...]
    into_fixed: bool
    constants: tuple[tuple[Tensor, Tensor], ...] = ()
    repeats: tuple[tuple[Tensor, int, int], ...] = ()

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        if self.fixed:
            return self.fixed[0].device
        return self.constants[0][0].device

    def __getitem__(self, part: slice) -> "Copies":
        """The copies of a slice of the fixed tensors; the slice that starts at 0 also has the
        constants."""
        start, stop, _ = part.indices(len(self.fixed))
        repeats = tuple(
            (tail, i - start, period) for tail, i, period in self.repeats if start <= i < stop
        )
        return Copies(self.fixed[part], self.into_fixed, () if start else self.constants, repeats)


# The most bytes of a tail (`Copies.repeats`), which a single program fills.
MOST_REPEATED = 2**14


def is_dense(x: Tensor) -> bool:
    """Whether the elements of `x` are contiguous in some order of its dimensions."""
    expected = 1
    # The stride of a dimension of one element means nothing, and torch may have any number there.
    for stride, size in sorted(
        (stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return x.numel() == 0
        expected *= size
    return True


def is_bytes(x: Tensor) -> bool:
    """Whether copying the bytes of `x` copies `x`: it is dense, without lazy conjugation or
    negation."""
    return (
        x.layout is torch.strided
        and not (x.is_conj() or x.is_neg() or x._is_zerotensor() or x.is_quantized)
        and is_dense(x)
    )


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether copying one tensor to the other is a plain copy of bytes."""
    return (
        (a.dtype, a.device, _steps(a)) == (b.dtype, b.device, _steps(b))
        and is_bytes(a)
        and is_bytes(b)
    )


def _steps(x: Tensor) -> list[tuple[int, int]]:
    return [(size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1]
