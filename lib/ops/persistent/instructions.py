"""The instructions of a persistent kernel: each is the work of one to three operators on one token, T = 1."""

import struct
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from weft.ops.attention.paged import paged_attention
from weft.ops.norm import add_parts, rms_norm
from weft.ops.products.gate import silu_mul
from weft.ops.products.linear import multiply
from weft.ops.products.parts import num_parts
from weft.ops.rotary import rotate_and_keep

# The class attributes of an instruction: `written` names what it writes, and `early` what it reads without waiting for
# the instruction before it.

FIELDS = 16
"""Numbers of 8 bytes in the row of an instruction."""
ROWS = 16
"""Rows of weights in an item of a product."""
COLUMNS = 1024
"""Columns that a product takes at a time."""
MOST_PARTS = 2
"""The most parts of what an instruction reads or makes."""


@attrs.frozen(eq=False, kw_only=True)
class Linear:
    """A linear layer, with the norm before it and the gate after it where there are some.

    Args:
        x: `[T, K]`, or float32 parts of it where a norm takes them; the norm's input if there is one.
        residual: `[T, K]`, added to x before the norm.
        gain: `[K]`, the weight of the norm; None: no norm.
        total: `[T, K]`, where the sum of x and the residual is written; None without a residual.
        weight: `[N, K]`.
        bias: `[N]`.
        out: `[T, N]`; or two float32 parts of it `[2, T, N]`, of K / 2 columns each; or with `gate` `[T, N / 2]`.
        gate: whether the result is `silu(left half) * right half`.
        eps: of the norm.
    """

    opcode: ClassVar[int] = 0
    written: ClassVar[tuple[str, ...]] = ("total", "out")
    early: ClassVar[tuple[str, ...]] = ("weight", "gain")

    x: Tensor
    residual: Tensor | None = None
    gain: Tensor | None = None
    total: Tensor | None = None
    weight: Tensor
    bias: Tensor | None = None
    out: Tensor
    gate: bool = False
    eps: float = 0.0

    def fields(self) -> Iterator[Any]:
        """The numbers of its row, after the opcode."""
        yield from (self.x, num_parts(self.x), self.residual, self.gain, self.total)
        assert num_parts(self.out) in (0, MOST_PARTS), f"{num_parts(self.out)} parts of a product"
        rows, columns = self.weight.shape
        words = columns // 2  # a word is two numbers
        cut = words // self.parts | self.parts << 32 | int(self.gate) << 62
        yield from (self.weight, self.bias, self.out, rows | words << 32, cut, self.eps)

    @property
    def parts(self) -> int:
        """The parts of its result: 1 or more."""
        return max(num_parts(self.out), 1)

    @property
    def like(self) -> Tensor:
        """A tensor of its dtype on its device."""
        return self.weight

    def run(self) -> None:
        """The same by the operators' references."""
        x = self.x
        if self.gain is not None:
            x = _normalize(x, self.residual, self.gain, self.total, self.eps)
        y = multiply(x, self.weight, self.bias, False)
        if self.gate:
            self.out.copy_(silu_mul.reference(y, self.out.dtype))
        elif self.out.dim() == 3:
            self.out.zero_()
            self.out[0] = y
        else:
            self.out.copy_(y)


@attrs.frozen(eq=False, kw_only=True)
class Norm:
    """The sum of x and a residual, normalised: `weft::rms_norm`, or with a residual `weft::add_rms_norm`; without
    `gain` the sum alone.

    Args:
        x: `[T, K]`, or float32 parts of it.
        residual: `[T, K]`.
        gain: `[K]`, the weight of the norm.
        total: `[T, K]`, where the sum is written.
        out: `[T, K]`, where the normalised sum is written.
    """

    opcode: ClassVar[int] = 1
    written: ClassVar[tuple[str, ...]] = ("total", "out")
    early: ClassVar[tuple[str, ...]] = ("gain",)

    x: Tensor
    residual: Tensor | None = None
    gain: Tensor | None = None
    total: Tensor | None = None
    out: Tensor | None = None
    eps: float = 0.0

    def fields(self) -> Iterator[Any]:
        """The numbers of its row, after the opcode."""
        yield from (self.x, num_parts(self.x), self.residual, self.gain, self.total, self.out, self.x.shape[-1])
        yield self.eps

    @property
    def like(self) -> Tensor:
        """A tensor of its dtype on its device."""
        like = self.out if self.total is None else self.total
        assert like is not None
        return like

    def run(self) -> None:
        """The same by the operators' references."""
        if self.gain is None:
            assert self.total is not None
            assert self.residual is not None
            self.total.copy_(add_parts.reference(self.x, self.residual))
            return
        assert self.out is not None
        self.out.copy_(_normalize(self.x, self.residual, self.gain, self.total, self.eps))


@attrs.frozen(eq=False, kw_only=True)
class Attend:
    """`weft::rotate_and_keep` and `weft::paged_attention` of the token of one request.

    In one point the kernel does less than these: a token with slot -1, or that no request has, is padding. Its result
    is zeros, and its key is not kept.

    Args:
        qkv: `[T, N]`, or float32 parts of it.
        q_norm, k_norm: `[D]`, the weights of the norms over a head.
        cos, sin: `[T, D / 2]`.
        slot_mapping: `[T]` int64.
        kv_pages: `[2, P, page_size, Hkv, D]`.
        block_table: `[T, max_pages]` int32.
        query_start_loc: `[T + 1]` int32.
        seq_lens: `[T]` int32.
        out: `[T, H, D]`.
        keys, values: the columns of qkv where they begin.
        eps: of the norms.
        scale: of the products of queries and keys.
    """

    opcode: ClassVar[int] = 2
    written: ClassVar[tuple[str, ...]] = ("kv_pages", "out")
    places: ClassVar[tuple[str, ...]] = ("cos", "sin", "slot_mapping", "block_table", "query_start_loc", "seq_lens")
    early: ClassVar[tuple[str, ...]] = ("q_norm", "k_norm", *places)

    qkv: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    cos: Tensor
    sin: Tensor
    slot_mapping: Tensor
    kv_pages: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    out: Tensor
    keys: int
    values: int
    eps: float
    scale: float

    def fields(self) -> Iterator[Any]:
        """The numbers of its row, after the opcode."""
        yield from (self.qkv, num_parts(self.qkv), self.q_norm, self.k_norm, self.kv_pages, self.out)
        yield from (self.qkv.shape[-1], self.kv_pages.stride(0), self.keys, self.values, self.eps)
        yield self.scale * 1.4426950408889634  # log2(e), since powers are of 2

    @property
    def like(self) -> Tensor:
        """A tensor of its dtype on its device."""
        return self.out

    @property
    def where(self) -> tuple[Tensor, ...]:
        """The tensors from which the kernel knows the token's position and slot."""
        return tuple(getattr(self, name) for name in self.places)

    @property
    def heads(self) -> "Heads":
        """The sizes of its attention, for which a program is compiled."""
        _, _, page_size, kv_heads, dim = self.kv_pages.shape
        return Heads(self.out.shape[1], kv_heads, dim, page_size, self.kv_pages.dtype, self.q_norm is not None)

    def run(self) -> None:
        """The same by the operators' references."""
        heads, starts = self.out.shape[1], [self.keys, self.values]
        where = self.slot_mapping, self.kv_pages, heads, starts
        q, _ = rotate_and_keep(self.qkv, self.q_norm, self.k_norm, self.eps, self.cos, self.sin, *where)
        lengths = self.block_table, self.query_start_loc, self.seq_lens
        self.out.copy_(paged_attention(q, None, None, self.kv_pages, self.slot_mapping, *lengths, 1, self.scale, 0))


Instruction = Linear | Norm | Attend


@attrs.frozen
class Heads:
    """The sizes of attention, which are the same in all instructions of a program, because it is compiled for them."""

    num_heads: int
    kv_heads: int
    dim: int
    page_size: int
    kv_dtype: torch.dtype
    normed: bool


def rows_of(instructions: Sequence[Instruction]) -> list[list[int]]:
    """The rows of instructions: the opcode; addresses, sizes, and float32 numbers by their bits; and last how many rows
    it is to the next product, 0 if there is none.

    >>> linear = Linear(x=torch.zeros(1, 128), weight=torch.zeros(32, 128), out=torch.zeros(1, 32))
    >>> [row[-1] for row in rows_of([linear, linear])]
    [1, 0]
    """
    found, following = list[list[int]](), 0
    for each in reversed(instructions):
        row = [each.opcode, *map(_number, each.fields())]
        assert len(row) < FIELDS
        found.append(row + [0] * (FIELDS - 1 - len(row)) + [following])
        following = 1 if isinstance(each, Linear) else following and following + 1
    return found[::-1]


def _number(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, float):
        (bits,) = struct.unpack("<i", struct.pack("<f", value))
        return int(bits)
    return 0 if value is None else int(value)


def _normalize(x: Tensor, residual: Tensor | None, gain: Tensor, total: Tensor | None, eps: float) -> Tensor:
    if residual is not None:
        x = add_parts.reference(x, residual)
        if total is not None:
            total.copy_(x)
    normed: Tensor = rms_norm.reference(x, gain, eps)
    return normed
