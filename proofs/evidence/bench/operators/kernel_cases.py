"""The kernels of a decoder layer at given sizes: the bytes that each must move, its calls, and the
expected result."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.ops import norm, rotary
from weft.ops.experts import products
from weft.ops.experts.routing import route
from weft.ops.products import fp8, linear
from weft.ops.products.parts import sum_parts
from weft.proofs.evidence.bench.graphs import LEAST_BYTES
from weft.proofs.evidence.bench.operators.sizes import Sizes


@attrs.frozen(eq=False)
class Case:
    """A kernel to time.

    Args:
        kernel, shape: its name and shape.
        bytes: the least that it must move.
        calls: the same call, each time with other weights.
        expected: the right result of the first call; None: torch's own kernel, which is not
            checked.
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
        """A standard normal tensor."""
        return torch.randn(*shape, device=self.device).to(dtype or self.dtype)

    def copies(self, *shape: int, itemsize: int = 2) -> int:
        """The number of tensors of this shape that do not fit in the cache together."""
        size = itemsize
        for one in shape:
            size *= one
        if self.device == "cuda":
            # At most 64, which keeps graphs of small weights short.
            return max(1, min(64, -(-LEAST_BYTES // size)))
        return 1

    def fp8(self, *shape: int) -> tuple[Tensor, Tensor]:
        """FP8 weights and their scales."""
        *outer, rows, columns = shape
        weight = torch.empty(shape, dtype=torch.float8_e4m3fn, device=self.device)
        # In pieces, since random numbers in float32 take four times the memory of the weights.
        for some in weight.view(-1, columns).split(2**16):
            some.copy_(torch.randn(some.shape, device=self.device) * 16)
        blocks = (*outer, fp8.ceil_blocks(rows), fp8.ceil_blocks(columns))
        # The values have deviation 16 and the scales undo it, so that results have deviation 1 or
        # so.
        return weight, (0.5 + torch.rand(blocks, device=self.device)) / 16 / columns**0.5

    def route(self, sizes: Sizes, tokens: int) -> tuple[Tensor, Tensor]:
        """The routing weights and experts of tokens, with all experts equally likely."""
        # All experts equally likely: the most different ones, and so the most bytes.
        logits = torch.randn(tokens, sizes.num_experts, device=self.device)
        return route.reference(logits, sizes.top_k, True, torch.float32)


def nbytes(*values: Any) -> int:
    """The total bytes of the tensors among the values."""
    return sum(x.nbytes for x in values if isinstance(x, Tensor))


def layer_cases(make: Maker, sizes: Sizes, tokens: int) -> Iterator[Case]:
    """All kernels of a layer except attention, in the order of the computation. With experts, its
    linear layers are in FP8."""
    parts = sizes.top_k or 0
    yield norm_case(make, sizes, tokens, parts)
    yield linear_case(
        make, "qkv", tokens, sizes.qkv, sizes.hidden, "quantized" if parts else "plain"
    )
    yield rotary_case(make, sizes, tokens)
    yield linear_case(
        make, "o", tokens, sizes.hidden, sizes.heads * sizes.dim, "fp8" if parts else "plain"
    )
    yield norm_case(make, sizes, tokens, parts)
    if parts:
        yield linear_case(make, "router", tokens, sizes.num_experts, sizes.hidden, "plain")
        yield route_case(make, sizes, tokens)
        yield experts_case(make, sizes, tokens)
    else:
        yield linear_case(make, "gate_up", tokens, 2 * sizes.inner, sizes.hidden, "gated")
        yield linear_case(make, "down", tokens, sizes.hidden, sizes.inner, "plain")


def norm_case(make: Maker, sizes: Sizes, tokens: int, parts: int) -> Case:
    """The residual addition and the norm after a block, quantised if the next layer is in FP8."""
    if parts:
        x = make.randn(parts, tokens, sizes.hidden, dtype=torch.float32)
    else:
        x = make.randn(tokens, sizes.hidden)
    args = x, make.randn(tokens, sizes.hidden), make.randn(sizes.hidden), 1e-6
    if parts:
        name = "add_rms_norm_quantized"
    else:
        name = "add_rms_norm"
    op = getattr(torch.ops.weft, name)
    reference = (norm._add_rms_norm_quantized if parts else norm.add_rms_norm).reference
    moved = nbytes(*args) + tokens * sizes.hidden * (5 if parts else 4)
    shape = f"{f'{parts} parts ' if parts else ''}{sizes.hidden}"
    return Case(name, shape, tokens, moved, [lambda: op(*args)], lambda: reference(*args))


def linear_case(make: Maker, name: str, tokens: int, rows: int, columns: int, kind: str) -> Case:
    """A linear layer.

    Args:
        kind: `plain`; `gated`, the same with a gate in its first half; `quantized`, in FP8 with a
            quantised input; or `fp8`, which quantises its input itself.
    """
    has_scales = kind in ("quantized", "fp8")
    copies = make.copies(rows, columns, itemsize=1 if has_scales else 2)
    x = make.randn(tokens, columns)
    shape = f"{name} {rows}x{columns}"
    out_bytes = tokens * rows * 2
    if not has_scales:
        plain = [make.randn(rows, columns) for _ in range(copies)]
        op, moved = linear.swiglu if kind == "gated" else linear.linear, nbytes(x, plain[0])
        calls: list[Callable[[], Any]] = [partial(op, x, w) for w in plain]
        if kind == "gated":
            return Case(
                "swiglu",
                shape,
                tokens,
                moved + out_bytes // 2,
                calls,
                lambda: op.reference(x, plain[0]),
            )
        return Case(
            "linear",
            shape,
            tokens,
            moved + out_bytes,
            calls,
            # In float64, so that what is compared with has no rounding of its own.
            lambda: F.linear(x.double(), plain[0].double()),
        )
    weights = [make.fp8(rows, columns) for _ in range(copies)]
    quantized = fp8.Quantized(*fp8.reference_quantize(x))
    activations = quantized if kind == "quantized" else x
    calls = [partial(linear.fp8_linear, activations, *w, dtype=make.dtype) for w in weights]
    args = quantized.values, quantized.scales, *weights[0], None, torch.float32
    moved = nbytes(quantized.values, quantized.scales, *weights[0]) + out_bytes
    if kind == "quantized":
        name = "fp8_linear"
    else:
        name = "fp8_linear, quantising"
    return Case(name, shape, tokens, moved, calls, lambda: linear._fp8_linear.reference(*args))


def rotary_case(make: Maker, sizes: Sizes, tokens: int) -> Case:
    """QK norm, rotation and the writes to the KV cache, from a product in as many parts as
    `fp8_linear` makes."""
    x = make.randn(tokens, sizes.hidden)
    if sizes.num_experts:
        qkv = linear.fp8_linear(x, *make.fp8(sizes.qkv, sizes.hidden), dtype=make.dtype)
    else:
        qkv = linear.linear(x, make.randn(sizes.qkv, sizes.hidden))
    pages = make.randn(2, -(-tokens // 16) + 1, 16, sizes.kv_heads, sizes.dim)
    tables = make.randn(tokens, sizes.dim // 2), make.randn(tokens, sizes.dim // 2)
    slots = torch.randperm(tokens + 16, device=make.device)[:tokens]
    keys = sizes.heads * sizes.dim
    rest = sizes.heads, (keys, keys + sizes.kv_heads * sizes.dim)
    args = (qkv, make.randn(sizes.dim), make.randn(sizes.dim), 1e-6, *tables, slots)
    moved = nbytes(qkv, *tables) + tokens * sizes.qkv * 2
    shape = (
        f"{qkv.shape[0] if qkv.dim() == 3 else 1} parts {sizes.heads}/{sizes.kv_heads} heads of"
        f" {sizes.dim}"
    )
    # The reference writes to a cache of its own, and both are compared.
    other = pages.clone()
    return Case(
        "rotate_and_keep",
        shape,
        tokens,
        moved,
        [lambda: rotary.rotate_and_keep(*args, pages, *rest)],
        lambda: (rotary._rotate_and_keep.reference(*args, other, *rest), other),
    )


def route_case(make: Maker, sizes: Sizes, tokens: int) -> Case:
    """The router: softmax, top-k and division."""
    logits = linear.linear(
        make.randn(tokens, sizes.hidden), make.randn(sizes.num_experts, sizes.hidden)
    )
    args = logits, sizes.top_k, True, make.dtype
    shape = (
        f"{logits.shape[0] if logits.dim() == 3 else 1} parts, {sizes.top_k} of {sizes.num_experts}"
    )
    moved = nbytes(logits) + tokens * sizes.top_k * 8
    call = [lambda: route(*args)]
    return Case("route", shape, tokens, moved, call, lambda: route.reference(*args))


def experts_case(make: Maker, sizes: Sizes, tokens: int) -> Case:
    """Both products with the experts, in FP8."""
    x = fp8.Quantized(*fp8.reference_quantize(make.randn(tokens, sizes.hidden)))
    copies = 2 if make.device == "cuda" else 1
    first = [make.fp8(sizes.num_experts, 2 * sizes.inner, sizes.hidden) for _ in range(copies)]
    second = [make.fp8(sizes.num_experts, sizes.hidden, sizes.inner) for _ in range(copies)]
    # Each call has other experts, since those of one token would stay in the cache.
    routes = [make.route(sizes, tokens) for _ in range(16 if make.device == "cuda" else 1)]
    # Only experts that some token has are read.
    touched = sum(len(experts.unique()) for _, experts in routes) / len(routes) / sizes.num_experts
    moved = int(nbytes(*first[0], *second[0]) * touched) + nbytes(x.values, x.scales)
    moved += tokens * sizes.top_k * (4 * sizes.inner + 4 * sizes.hidden)

    def call(i: int) -> Tensor:
        (up, up_scale), (down, down_scale) = first[i % copies], second[i % copies]
        scales: dict[str, Any] = {"gate_up_scale": up_scale, "down_scale": down_scale}
        return products.run_experts(x, up, down, *routes[i], **scales, dtype=make.dtype)

    def expected() -> Tensor:
        args = x.values, x.scales, *first[0], *second[0], *routes[0], make.dtype
        return products._run_experts.reference(*args, 0, sizes.num_experts)

    shape = f"{sizes.top_k} of {sizes.num_experts}, {sizes.hidden}x{sizes.inner}"
    return Case(
        "run_experts",
        shape,
        tokens,
        moved,
        [partial(call, i) for i in range(len(routes))],
        expected,
    )


def relative_error(result: Any, expected: Any) -> float:
    """The greatest ||found - expected|| / ||expected|| over the tensors of two results, after
    adding up parts."""
    pairs = zip(*((x,) if isinstance(x, Tensor) else x for x in (result, expected)), strict=True)
    errors = []
    for one, other in pairs:
        one, other = (
            # Kernels may leave a result in parts, which the next kernel adds up. Their number is
            # not the reference's.
            sum_parts(x, torch.float64) if x.dim() == 3 and one.shape != other.shape else x
            for x in (one, other)
        )
        one = one.double()
        other = other.double()
        # By norms: single elements near 0 have large relative errors that mean nothing.
        errors.append(float((one - other).norm() / other.norm().clamp(min=1e-30)))
    return max(errors)
