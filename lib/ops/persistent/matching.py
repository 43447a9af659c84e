"""From calls of operators to instructions: which calls a persistent kernel can take, and which of them become one."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.ops.persistent.instructions import MOST_PARTS, ROWS, Attend, Instruction, Linear, Norm
from weft.ops.products.parts import num_parts
from weft.ops.register import FLOATS
from weft.torchapi.private import storage_id
from weft.torchapi.storages import storage_uses

_ALIGNED = 16
"""Bytes of an address; and columns of a product."""
_EIGHTS = 8
_WIDEST_HEAD, _WIDEST_GROUP = 256, 2048
"""Numbers of a head, and of the heads that share a key head."""
_LEAST_SHARE = 256
"""Columns of a part of a product."""


@attrs.frozen(eq=False)
class Call:
    """A call of an operator that has not run yet.

    Args:
        func: the overload.
        args: with aliases of the tensors.
        outs: aliases of its results, whose memory nothing has written.
    """

    func: Any
    args: tuple[Any, ...]
    outs: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        """The operator's name."""
        return str(self.func.name())

    def tensors(self) -> Iterator[Tensor]:
        """The aliases that it holds, one by one."""
        yield from (x for x in (*self.args, *self.outs) if isinstance(x, Tensor))


@attrs.frozen(eq=False)
class Matched:
    """An instruction, and the calls that it stands for."""

    instruction: Instruction
    calls: tuple[Call, ...]


Empty = Callable[[tuple[int, ...], Tensor, torch.dtype], Tensor]
"""Makes an empty tensor of a shape and a dtype on the device of another one."""


def results_of(func: Any, args: tuple[Any, ...], programs: int, empty: Empty) -> tuple[Tensor, ...] | None:
    """Empty results for a call that an instruction could take, alone or with its neighbours; None if none can.

    Args:
        programs: of the launch, among which products are cut into parts; 1: they are whole.
    """
    make = _MAKERS.get(func.name())
    return None if make is None else make(programs, empty, *args)


def _linear(
    programs: int, empty: Empty, x: Tensor, weight: Tensor, bias: Tensor | None, leaves: int
) -> tuple[Tensor, ...] | None:
    multiply = x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1] and _has_shape(bias, len(weight))
    if leaves or not multiply or x.shape[1] % _ALIGNED or not _fit(x, weight, bias) or not _is_one(x):
        return None
    columns, rows = x.shape[1], weight.shape[0]
    fewer = MOST_PARTS * -(-rows // ROWS) <= programs  # or as many items as programs
    if fewer and columns % (MOST_PARTS * _ALIGNED) == 0 and columns // MOST_PARTS >= _LEAST_SHARE:
        return (empty((MOST_PARTS, 1, rows), x, torch.float32),)
    return (empty((1, rows), x, x.dtype),)


def _rms_norm(programs: int, empty: Empty, x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, ...] | None:
    if x.dim() != 2 or not _has_shape(gain, x.shape[1]) or not _fit(x, gain) or not _is_one(x) or not _aligned_rows(x):
        return None
    return (empty(tuple(x.shape), x, x.dtype),)


def _add_rms_norm(
    programs: int, empty: Empty, x: Tensor, residual: Tensor, gain: Tensor, eps: float
) -> tuple[Tensor, ...] | None:
    if not _sum_fits(x, residual) or not _fit(residual, gain) or not _has_shape(gain, x.shape[-1]):
        return None
    shape = tuple(residual.shape)
    return empty(shape, residual, residual.dtype), empty(shape, residual, residual.dtype)


def _add_parts(programs: int, empty: Empty, x: Tensor, residual: Tensor) -> tuple[Tensor, ...] | None:
    return (empty(tuple(residual.shape), residual, residual.dtype),) if _sum_fits(x, residual) else None


def _silu_mul(programs: int, empty: Empty, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...] | None:
    if x.dim() not in (2, 3) or x.shape[-1] % 2 or not _is_one(x) or not x.is_contiguous():
        return None
    return (empty((x.shape[-2], x.shape[-1] // 2), x, dtype),)


def _rotate(programs: int, empty: Empty, qkv: Tensor, *given: Any) -> tuple[Tensor, ...] | None:
    q_norm, k_norm, _, cos, sin, slot_mapping, kv_pages, num_heads, _ = given
    if qkv.dim() not in (2, 3):
        return None
    tokens, dim = qkv.shape[-2], kv_pages.shape[-1]
    is_power = 16 <= dim <= _WIDEST_HEAD and dim & (dim - 1) == 0
    of_dtype = [x for x in (q_norm, k_norm, sin) if x is not None]
    fits = _fit(cos, *of_dtype) and slot_mapping.dtype == torch.int64 and slot_mapping.is_contiguous()
    fits = fits and _has_shape(slot_mapping, tokens) and all(_has_shape(x, tokens, dim // 2) for x in (cos, sin))
    fits = fits and all(_has_shape(x, dim) for x in (q_norm, k_norm)) and _is_aligned(qkv) and _is_aligned(kv_pages)
    if (
        not fits
        or not is_power
        or qkv.dtype != (torch.float32 if qkv.dim() == 3 else cos.dtype)
        or num_parts(qkv) > MOST_PARTS
        or (q_norm is None) != (k_norm is None)
        or not _is_one(qkv)
        or not qkv.is_contiguous()
    ):
        return None
    kv_heads = kv_pages.shape[3]
    if 1 < programs < kv_heads or num_heads // kv_heads * dim > _WIDEST_GROUP:  # a key head has a program or more
        return None
    if kv_pages.dtype not in (cos.dtype, torch.float8_e4m3fn) or not kv_pages.is_contiguous():
        return None
    return (empty((tokens, num_heads, dim), cos, cos.dtype),)


def _attention(programs: int, empty: Empty, q: Tensor, *given: Any) -> tuple[Tensor, ...] | None:
    k, v, _, _, block_table, query_start_loc, seq_lens, max_query_len, _, window = given
    where = block_table, query_start_loc, seq_lens
    one_each = max_query_len == 1 and len(seq_lens) == len(q)
    if k is not None or v is not None or window or not one_each or not _fit(q) or not _is_one(q.flatten(1)):
        return None
    if not all(x.is_contiguous() and x.dtype == torch.int32 for x in where):
        return None
    return (empty(tuple(q.shape), q, q.dtype),)


_MAKERS: dict[str, Callable[..., tuple[Tensor, ...] | None]] = {
    "weft::linear": _linear,
    "weft::rms_norm": _rms_norm,
    "weft::add_rms_norm": _add_rms_norm,
    "weft::add_parts": _add_parts,
    "weft::silu_mul": _silu_mul,
    "weft::rotate_and_keep": _rotate,
    "weft::paged_attention": _attention,
}


def _is_one(x: Tensor) -> bool:
    return x.shape[-2] == 1


def _aligned_rows(x: Tensor) -> bool:
    return x.shape[-1] % _EIGHTS == 0  # of columns, which the kernel counts so


def _fit(first: Tensor, *others: Tensor | None) -> bool:
    """Whether tensors are contiguous, aligned, on one device, and of one dtype that operators compute with."""
    given = [first, *(x for x in others if x is not None)]
    same = all(x.dtype == first.dtype and x.device == first.device for x in given)
    return same and first.dtype in FLOATS and all(x.is_contiguous() and _is_aligned(x) for x in given)


def _is_aligned(x: Tensor) -> bool:
    return x.data_ptr() % _ALIGNED == 0


def _has_shape(x: Tensor | None, *shape: int) -> bool:
    """Whether a tensor has this shape, if there is one. An operator that broadcasts, or that raises, runs as it is."""
    return x is None or x.shape == shape


def _sum_fits(x: Tensor, residual: Tensor) -> bool:
    parts = x.is_contiguous() and x.dtype == (torch.float32 if x.dim() == 3 else residual.dtype)
    return (
        parts
        and _is_aligned(x)
        and x.dim() in (2, 3)
        and x.shape[-2:] == residual.shape
        and num_parts(x) <= MOST_PARTS
        and residual.dim() == 2
        and _fit(residual)
        and _is_one(residual)
        and _aligned_rows(residual)
    )


def match(calls: Sequence[Call]) -> list[Matched | Call]:
    """The instructions for calls that follow one another, in order; a call that none can take stays as it is.

    A result that goes from one call to the next inside of an instruction is not written. So it is asked whether
    anything else holds it: another call, or by the count of its storage's users the function that is being captured.
    """
    held = Counter(storage_id(x) for call in calls for x in call.tensors())
    readers = Counter(storage_id(x) for call in calls for x in call.args if isinstance(x, Tensor))

    def passes(out: Tensor, taker: Call, place: int = 0) -> bool:
        """Whether a result goes to this argument of the taker, whole, and nowhere else."""
        given = taker.args[place]
        is_it = _same_memory(given, out)
        key = storage_id(out)
        return is_it and readers[key] == 1 and storage_uses(out) == held[key]

    found, rest = list[Matched | Call](), list(calls)
    while rest:
        taken = _instruction(rest, passes)
        found.append(rest[0] if taken is None else Matched(taken[0], tuple(rest[: taken[1]])))
        del rest[: 1 if taken is None else taken[1]]
    return found


def _instruction(calls: Sequence[Call], passes: Callable[..., bool]) -> tuple[Instruction, int] | None:
    """The instruction that the first of these calls begins, and the number of calls that it takes."""
    first, *others = calls
    following = others[0] if others else None
    match first.name:
        case "weft::rms_norm" | "weft::add_rms_norm" | "weft::add_parts":
            norm = _norm_of(first)
            if (
                norm.gain is not None
                and following is not None
                and following.name == "weft::linear"
                and passes(first.outs[0], following)
            ):
                return _gated(norm, following, others[1:], passes)
            return norm, 1
        case "weft::linear":
            return _gated(None, first, others, passes)
        case "weft::rotate_and_keep":
            if following is not None and following.name == "weft::paged_attention" and _attends(first, following):
                return (_attend_of(first, following), 2) if passes(first.outs[0], following) else None
    return None


def _norm_of(call: Call) -> Norm:
    if call.name == "weft::rms_norm":
        x, gain, eps = call.args
        return Norm(x=x, gain=gain, out=call.outs[0], eps=eps)
    if call.name == "weft::add_rms_norm":
        x, residual, gain, eps = call.args
        return Norm(x=x, residual=residual, gain=gain, out=call.outs[0], total=call.outs[1], eps=eps)
    x, residual = call.args
    return Norm(x=x, residual=residual, total=call.outs[0])


def _gated(norm: Norm | None, call: Call, others: Sequence[Call], passes: Callable[..., bool]) -> tuple[Linear, int]:
    """A product, after the norm and before the gate if these belong to it."""
    x, weight, bias, _ = call.args
    linear = Linear(x=x, weight=weight, bias=bias, out=call.outs[0])
    if norm is not None:
        linear = attrs.evolve(linear, x=norm.x, residual=norm.residual, gain=norm.gain, total=norm.total, eps=norm.eps)
    count = 1 + (norm is not None)
    if not others or others[0].name != "weft::silu_mul" or weight.shape[0] % ROWS or others[0].args[1] != x.dtype:
        return linear, count
    if not passes(call.outs[0], others[0]):
        return linear, count
    return attrs.evolve(linear, out=others[0].outs[0], gate=True), count + 1


def _attends(rotate: Call, attention: Call) -> bool:
    """Whether attention reads what the rotation keeps, in the same step."""
    slots, pages = rotate.args[6:8]
    return _same_memory(attention.args[3], pages) and _same_memory(attention.args[4], slots)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same numbers, and not a view of another shape or dtype."""
    looks = ((x.data_ptr(), x.dtype, x.shape, x.stride()) for x in (one, other))
    return next(looks) == next(looks)


def _attend_of(rotate: Call, attention: Call) -> Attend:
    qkv, q_norm, k_norm, eps, cos, sin, slots, pages, _, (keys, values) = rotate.args
    block_table, query_start_loc, seq_lens, _, scale, _ = attention.args[5:]
    return Attend(
        qkv=qkv, q_norm=q_norm, k_norm=k_norm, cos=cos, sin=sin, slot_mapping=slots, kv_pages=pages,
        block_table=block_table, query_start_loc=query_start_loc, seq_lens=seq_lens, out=attention.outs[0],
        keys=keys, values=values, eps=eps, scale=scale,
    )  # fmt: skip
