"""The kernels of a decoder layer at given sizes: what each reads and writes, how to call it, and what is right."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.ops import experts as experts_op
from weft.ops import fp8, gate, linear, norm, rotary
from weft.ops.parts import sum_parts

_LEAST_BYTES = 2**28
"""Weights in turn, so that no call finds them in a cache of 50 MB."""


@attrs.frozen
class Sizes:
    """A decoder layer: with experts, its linear layers are in FP8; without, `inner` is the feed-forward block's."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int = 128
    num_experts: int = 0
    top_k: int = 0

    @property
    def qkv(self) -> int:
        """The rows of the query-key-value product."""
        return (self.heads + 2 * self.kv_heads) * self.dim


QWEN3_30B_A3B = Sizes("Qwen3-30B-A3B", 2048, 768, 32, 4, num_experts=128, top_k=8)
QWEN3_0_6B = Sizes("Qwen3-0.6B", 1024, 3072, 16, 8)
TINY_EXPERTS = Sizes("tiny, experts", 128, 128, 4, 2, 8, num_experts=4, top_k=2)
TINY = Sizes("tiny", 64, 96, 4, 2, 8)


@attrs.frozen(eq=False)
class Case:
    """A kernel to time.

    Args:
        kernel, shape: what it is.
        bytes: that must move at least.
        calls: the same call with other weights each.
        expected: what the first of them should return; None: torch's own, not checked.
    """

    kernel: str
    shape: str
    tokens: int
    bytes: int
    calls: Sequence[Callable[[], Any]]
    expected: Callable[[], Any] | None


@attrs.frozen
class Maker:
    """Draws tensors on a device."""

    device: str
    dtype: torch.dtype

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal."""
        return torch.randn(*shape, device=self.device).to(dtype or self.dtype)

    def copies(self, *shape: int, itemsize: int = 2) -> int:
        """How many tensors of this shape are enough to be in no cache."""
        size = itemsize
        for one in shape:
            size *= one
        return max(1, min(64, -(-_LEAST_BYTES // size))) if self.device == "cuda" else 1

    def fp8(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Weights and scales."""
        *outer, rows, columns = shape
        weight = torch.empty(shape, dtype=torch.float8_e4m3fn, device=self.device)
        for some in weight.view(-1, columns).split(2**16):
            some.copy_(torch.randn(some.shape, device=self.device) * 16)
        blocks = (*outer, fp8.ceil_blocks(rows), fp8.ceil_blocks(columns))
        return weight, (0.5 + torch.rand(blocks, device=self.device)) / 16 / columns**0.5

    def route(self, sizes: Sizes, tokens: int) -> tuple[Tensor, Tensor]:
        """Weights and experts of tokens to which all experts are as likely."""
        logits = torch.randn(tokens, sizes.num_experts, device=self.device)
        return experts_op.reference_route(logits, sizes.top_k, True)


def nbytes(*values: Any) -> int:
    """The bytes of all tensors among these."""
    return sum(x.nbytes for x in values if isinstance(x, Tensor))


def layer_cases(make: Maker, sizes: Sizes, tokens: int) -> Iterator[Case]:
    """All kernels of a layer, attention excepted, in the order of the computation."""
    parts = sizes.top_k or 0
    yield norm_case(make, sizes, tokens, parts)
    yield from linear_cases(make, "qkv", tokens, sizes.qkv, sizes.hidden, bool(parts))
    yield rotary_case(make, sizes, tokens)
    if parts:
        yield quantize_case(make, tokens, sizes.heads * sizes.dim)
    yield from linear_cases(make, "o", tokens, sizes.hidden, sizes.heads * sizes.dim, bool(parts))
    if parts:
        yield from linear_cases(make, "router", tokens, sizes.num_experts, sizes.hidden, False)
        yield route_case(make, sizes, tokens)
        yield experts_case(make, sizes, tokens)
    else:
        yield from linear_cases(make, "gate_up", tokens, 2 * sizes.inner, sizes.hidden, False)
        yield gate_case(make, sizes, tokens)
        yield from linear_cases(make, "down", tokens, sizes.hidden, sizes.inner, False)


def norm_case(make: Maker, sizes: Sizes, tokens: int, parts: int) -> Case:
    """The residual addition and the norm behind a block, quantised where the next layer is in FP8."""
    x = make.randn(parts, tokens, sizes.hidden, dtype=torch.float32) if parts else make.randn(tokens, sizes.hidden)
    args = x, make.randn(tokens, sizes.hidden), make.randn(sizes.hidden), 1e-6
    name = "add_rms_norm_quantized" if parts else "add_rms_norm"
    op, reference = getattr(torch.ops.weft, name), getattr(norm, f"reference_{name}")
    moved = nbytes(*args) + tokens * sizes.hidden * (5 if parts else 4)
    shape = f"{f'{parts} parts ' if parts else ''}{sizes.hidden}"
    return Case(name, shape, tokens, moved, [lambda: op(*args)], lambda: reference(*args))


def linear_cases(make: Maker, name: str, tokens: int, rows: int, columns: int, in_fp8: bool) -> Iterator[Case]:
    """A linear layer: weft's in FP8, torch's otherwise."""
    copies, x = make.copies(rows, columns, itemsize=1 if in_fp8 else 2), make.randn(tokens, columns)
    shape, out_bytes = f"{name} {rows}x{columns}", tokens * rows * 2
    if not in_fp8:
        plain = [make.randn(rows, columns) for _ in range(copies)]
        moved = nbytes(x, plain[0]) + out_bytes
        yield Case("linear (torch)", shape, tokens, moved, [lambda w=w: F.linear(x, w) for w in plain], None)
        return
    weights = [make.fp8(rows, columns) for _ in range(copies)]
    made = fp8.Quantized(*fp8.reference_quantize(x))
    moved = nbytes(made.values, made.scales, *weights[0]) + out_bytes
    calls = [lambda w=w: linear.fp8_linear(made, *w, dtype=make.dtype) for w in weights]
    args = made.values, made.scales, *weights[0], None, make.dtype
    yield Case("fp8_linear", shape, tokens, moved, calls, lambda: linear.reference_fp8_linear(*args))


def rotary_case(make: Maker, sizes: Sizes, tokens: int) -> Case:
    """QK norm, rotation and the KV cache, of a product in as many parts as `fp8_linear` makes."""
    made = make.randn(tokens, sizes.qkv)
    if sizes.num_experts and make.device == "cuda":
        first = fp8.Quantized(*fp8.reference_quantize(make.randn(tokens, sizes.hidden)))
        made = linear.fp8_linear(first, *make.fp8(sizes.qkv, sizes.hidden), dtype=make.dtype)
    pages = make.randn(2, -(-tokens // 16) + 1, 16, sizes.kv_heads, sizes.dim)
    tables = make.randn(tokens, sizes.dim // 2), make.randn(tokens, sizes.dim // 2)
    slots = torch.randperm(tokens + 16, device=make.device)[:tokens]
    keys = sizes.heads * sizes.dim
    rest = sizes.heads, (keys, keys + sizes.kv_heads * sizes.dim)
    args = (made, make.randn(sizes.dim), make.randn(sizes.dim), 1e-6, *tables, slots)
    moved = nbytes(made, *tables) + tokens * sizes.qkv * 2
    shape = f"{made.shape[0] if made.dim() == 3 else 1} parts {sizes.heads}/{sizes.kv_heads} heads of {sizes.dim}"
    other = pages.clone()
    return Case(
        "rotate_and_keep", shape, tokens, moved, [lambda: (rotary.rotate_and_keep(*args, pages, *rest), pages)],
        lambda: (rotary.reference_rotate_and_keep(*args, other, *rest), other),
    )  # fmt: skip


def quantize_case(make: Maker, tokens: int, columns: int) -> Case:
    """The quantiser alone, in front of the output projection."""
    x = make.randn(tokens, columns)
    call = [lambda: torch.ops.weft.quantize(x)]
    return Case("quantize", f"{columns}", tokens, tokens * columns * 3, call, lambda: fp8.reference_quantize(x))


def gate_case(make: Maker, sizes: Sizes, tokens: int) -> Case:
    """`silu(gate) * up`."""
    x = make.randn(tokens, 2 * sizes.inner)
    call, moved = [lambda: gate.silu_mul(x, make.dtype)], nbytes(x) * 3 // 2
    return Case("silu_mul", f"{sizes.inner}", tokens, moved, call, lambda: gate.reference_silu_mul(x, make.dtype))


def route_case(make: Maker, sizes: Sizes, tokens: int) -> Case:
    """Softmax, top-k and division."""
    logits = make.randn(tokens, sizes.num_experts)
    call = [lambda: experts_op.route(logits, sizes.top_k, True)]
    shape, moved = f"{sizes.top_k} of {sizes.num_experts}", nbytes(logits) + tokens * sizes.top_k * 8
    return Case("route", shape, tokens, moved, call, lambda: experts_op.reference_route(logits, sizes.top_k, True))


def experts_case(make: Maker, sizes: Sizes, tokens: int) -> Case:
    """Both products with the experts, in FP8."""
    x = fp8.Quantized(*fp8.reference_quantize(make.randn(tokens, sizes.hidden)))
    copies = 2 if make.device == "cuda" else 1
    first = [make.fp8(sizes.num_experts, 2 * sizes.inner, sizes.hidden) for _ in range(copies)]
    second = [make.fp8(sizes.num_experts, sizes.hidden, sizes.inner) for _ in range(copies)]
    weights, experts = make.route(sizes, tokens)
    touched = len(experts.unique()) / sizes.num_experts
    moved = int(nbytes(*first[0], *second[0]) * touched) + nbytes(x.values, x.scales)
    moved += tokens * sizes.top_k * (4 * sizes.inner + 4 * sizes.hidden)

    def call(i: int) -> Tensor:
        (up, up_scale), (down, down_scale) = first[i], second[i]
        scales = {"gate_up_scale": up_scale, "down_scale": down_scale}
        return experts_op.run_experts(x, up, down, weights, experts, **scales, dtype=make.dtype)

    def expected() -> Tensor:
        args = x.values, x.scales, *first[0], *second[0], weights, experts, make.dtype
        return experts_op.reference_run_experts(*args)

    shape = f"{sizes.top_k} of {sizes.num_experts}, {sizes.hidden}x{sizes.inner}"
    return Case("run_experts", shape, tokens, moved, [lambda i=i: call(i) for i in range(copies)], expected)


def relative_error(found: Any, expected: Any) -> float:
    """The greatest ||found - expected|| / ||expected|| over the tensors of two results, parts added up."""
    pairs = zip(*((x,) if isinstance(x, Tensor) else x for x in (found, expected)), strict=True)
    errors = []
    for one, other in pairs:
        one, other = (
            sum_parts(x, torch.float64) if x.dim() == 3 and one.shape != other.shape else x for x in (one, other)
        )
        one, other = one.double(), other.double()
        errors.append(float((one - other).norm() / other.norm().clamp(min=1e-30)))
    return max(errors)
