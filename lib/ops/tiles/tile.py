"""A tile of a product, and arithmetic with sizes."""

import attrs

from weft.errors import DescriptorError

# Up to this many tokens, a kernel lets the next one be placed at once, and a product loads weights
# early.
FEW_TOKENS = 16


@attrs.frozen
class Tile:
    """The part of a product that one program computes.

    Args:
        rows: rows of the weights, a power of two.
        tokens: tokens of the activations, a power of two, at least 16. Below 64 the weights are the
            left operand, since the tensor cores of sm_90 take at least 64 rows of it.
        columns: columns per step, a power of two; 128 in FP8.
        warps: warps of a program.
        stages: tiles in flight.
        parts: the number of parts into which a linear layer's columns are split, each with separate
            programs.
        sort: whether an expert product's pairs are sorted by expert beforehand.
        segments: the number of segments into which a batch-invariant product splits the columns.
            Each is summed by itself, and the sums are added first to last: by one program, or by
            the next kernel if there are as many parts.
        ahead: the number of first tiles of columns, a power of two or 0, whose weights a program
            loads together, and, if nothing writes them, before the previous kernel has ended; for a
            linear layer of few tokens.
    """

    rows: int
    tokens: int
    columns: int
    warps: int
    stages: int
    parts: int = 1
    sort: bool = False
    segments: int = 1
    ahead: int = 0


# Up to this many tokens, a tile is chosen for a small range of numbers of tokens; beyond, one tile
# serves all numbers up to the next power of two.
MANY_TOKENS = 2048


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n.

    >>> [power_of_two(n) for n in (0, 1, 5, 8)]
    [1, 1, 8, 8]
    """
    return 1 << (max(n, 1) - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; `triton.cdiv` takes microseconds on the host.

    >>> cdiv(5, 2)
    3
    """
    return -(-a // b)


def segment_columns(columns: int, segments: int) -> int:
    """The columns of a segment, a multiple of the columns of every tile."""
    return cdiv(cdiv(columns, 128), segments) * 128


def leaf_columns(columns: int, leaves: int, multiple: int = 1) -> int:
    """The columns of each of the equal leaves of a product; for 0 leaves, all columns.

    Raises:
        DescriptorError: the columns cannot be cut into that many leaves of a multiple of `multiple`
            columns.
    """
    if columns % (leaves * multiple if leaves > 1 else 1):
        instead = (
            "a number of leaves whose columns are"
            f" {'whole' if multiple == 1 else f'a multiple of {multiple}'}"
        )
        raise DescriptorError(f"a product with leaves={leaves}", f"{columns} columns", instead)
    return columns // max(leaves, 1)
