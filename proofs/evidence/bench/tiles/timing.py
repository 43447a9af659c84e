"""The device's time for linear layers with any tile, and for the kernels that add up their parts."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.ops.products import fp8
from weft.ops.tiles.tile import Tile, cdiv
from weft.proofs.evidence.bench.graphs import LEAST_BYTES, Graphs
from weft.proofs.evidence.bench.tiles.weights import drawn
from weft.torchapi.scaled_mm import scaled_mm

_MOST_LAUNCHES = 256

# torch's own products, by kind.
LIBRARIES = {"linear": ("torch", "cublaslt"), "fp8_linear": ("scaled_mm",)}


@attrs.frozen
class Product:
    """A linear layer on some tokens.

    Args:
        kind: `linear` in bfloat16, or `fp8_linear`.
        rows, columns: of the weights.
    """

    kind: str
    tokens: int
    rows: int
    columns: int


# A tile, or the name of one of torch's own products.
Choice = Tile | str


@attrs.frozen
class Kind:
    """Everything that the compilation of a tile's kernel depends on.

    Args:
        tile: in one part.
        split: whether the product has parts, and so a result in float32.
        grouped: whether there are more than two tiles of tokens.
    """

    tile: Tile
    fp8: bool
    split: bool
    grouped: bool


@attrs.frozen
class Compiled:
    """A kernel that was compiled: its registers and spills a thread, its shared memory in bytes,
    and its greatest error relative to the largest value of the result."""

    registers: int
    spills: int
    shared: int
    error: float


def kind_of(product: Product, tile: Tile) -> Kind:
    """The kind of the kernel of a product with this tile."""
    grouped = cdiv(product.tokens, tile.tokens) > 2
    # The number of parts is an argument of the kernel: only whether there are any is compiled in.
    return Kind(attrs.evolve(tile, parts=1), product.kind == "fp8_linear", tile.parts > 1, grouped)


def compile_kind(kind: Kind) -> tuple[Kind, Compiled | str]:
    """Run a kernel of this kind on a small product."""
    from weft.ops.products.linear_triton import _linear_kernel, run_tile

    # Three tiles are the least that are grouped.
    tokens = kind.tile.tokens * (3 if kind.grouped else 1)
    rows = 256
    columns = 1024
    torch.manual_seed(0)
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    values = x
    scales = None
    w = weight
    scale = None
    if kind.fp8:
        values, scales = fp8.reference_quantize(x)
        w = weight.to(torch.float8_e4m3fn)
        scale = torch.rand(rows // 128, columns // 128, device="cuda")
        # Compared with what the quantised values mean, so that the error is the kernel's and not
        # FP8's.
        x = fp8.dequantize(fp8.Quantized(values, scales))
        weight = fp8.dequantize_weight(w, scale)
    tile = attrs.evolve(kind.tile, parts=2 if kind.split else 1)
    try:
        out = run_tile(values, scales, w, scale, None, torch.bfloat16, tile)
    except Exception as error:  # whatever a compiler raises; the kernel is then not timed
        return kind, f"{type(error).__name__}: {error}"
    expected = x.double() @ weight.double().t()
    difference = (out.double().view(-1, tokens, rows).sum(0) - expected).abs().max()
    compiled: Any = list(_linear_kernel._cache.values())[-1][0]
    facts = compiled.n_regs, compiled.n_spills, compiled.metadata.shared
    return kind, Compiled(*facts, float(difference / expected.abs().max()))


class LinearTimer:
    """Times linear layers on the GPU. Weights take turns, cut from one large tensor of each dtype."""

    def __init__(self, compiled: dict[Kind, Compiled | str]) -> None:
        self._compiled = compiled
        self._graphs = Graphs()
        self._arenas = {"linear": drawn(torch.bfloat16), "fp8_linear": drawn(torch.float8_e4m3fn)}
        self._scales = torch.rand(2**22, device="cuda") / 1000
        self._inputs: tuple[Product, list[Any]] | None = None
        self.errors: dict[str, str] = {}
        self.scaled_mm_error = 0.0
        """The greatest error of torch's product in FP8, relative to the largest value of the
        result."""

    def start(self, product: Product, choice: Choice) -> Callable[[], float] | None:
        """A function that returns the seconds a call takes, the median over some replays; the first
        time with fewer. None: the choice does not run here."""
        if isinstance(choice, Tile) and not isinstance(
            self._compiled.get(kind_of(product, choice)), Compiled
        ):
            return None
        if self._inputs is None or self._inputs[0] != product:
            self._inputs = product, self._make(product)
        key = f"{choice} of {product.tokens} tokens"
        if key in self.errors:
            return None
        try:
            calls = [_call(choice, *args) for args in self._inputs[1]]
            with _library(choice):
                out = calls[0]()
                replay = self._graphs.capture(calls)
        except Exception as error:
            if isinstance(choice, Tile):
                raise
            # A library may refuse a shape. A tile of ours that was compiled must run.
            self.errors[key] = f"{product}: {error}"
            return None
        # Once, to know that its scales are laid out as it takes them.
        if choice == "scaled_mm" and not self.scaled_mm_error:
            values, scales, weight, scale = self._inputs[1][0]
            wide = fp8.dequantize_weight(weight, scale).t()
            expected = fp8.dequantize(fp8.Quantized(values, scales)) @ wide
            self.scaled_mm_error = float(
                (out.float() - expected).abs().max() / expected.abs().max()
            )
        return replay

    def consumers(self) -> Iterator[tuple[str, int, int, int, float]]:
        """The kernels that add up a product's parts: the operator, tokens, rows, parts and seconds
        of a call, whose input is in the cache. With no parts it reads the sum in bfloat16."""
        from weft.ops.kernel_triton import compiling

        consumer_calls = list(_consumer_calls())
        with compiling():
            for *_, call in consumer_calls:
                call()
        for name, tokens, rows, parts, call in consumer_calls:
            call()
            replay = self._graphs.capture([call] * 64)
            replay()
            yield name, tokens, rows, parts, replay()

    def _make(self, product: Product) -> list[Any]:
        size = product.rows * product.columns
        arena = self._arenas[product.kind]
        count = max(2, min(cdiv(LEAST_BYTES, size * arena.itemsize), _MOST_LAUNCHES))
        x = torch.randn(product.tokens, product.columns, device="cuda", dtype=torch.bfloat16)
        there = len(arena) // size
        weights = [
            arena[i % there * size :][:size].view(product.rows, product.columns)
            for i in range(count)
        ]
        if product.kind == "linear":
            return [(x, None, weight, None) for weight in weights]
        values, scales = fp8.reference_quantize(x)
        blocks = fp8.ceil_blocks(product.rows), fp8.ceil_blocks(product.columns)
        # A multiple of four floats, so that each cut is aligned to 16 bytes.
        each = cdiv(blocks[0] * blocks[1], 4) * 4
        rest = len(self._scales) // each
        cut = [
            self._scales[i % rest * each :][: blocks[0] * blocks[1]].view(blocks)
            for i in range(count)
        ]
        return [(values, scales, *pair) for pair in zip(weights, cut, strict=True)]


@contextlib.contextmanager
def _library(choice: Choice) -> Iterator[None]:
    """While it is open torch multiplies with the library of this name."""
    if choice != "cublaslt":
        yield
        return
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library("default")


def _call(
    choice: Choice, x: Tensor, x_scales: Tensor | None, weight: Tensor, scale: Tensor | None
) -> Callable[[], Tensor]:
    from weft.ops.products.linear_triton import run_tile

    if isinstance(choice, Tile):
        return partial(run_tile, x, x_scales, weight, scale, None, torch.bfloat16, choice)
    if x_scales is None or scale is None:
        return partial(F.linear, x, weight)
    # The scales as torch takes them: column-major, and blocks padded to four. Making them is not
    # timed.
    by_token = x_scales.t().contiguous()
    by_block = F.pad(scale, (0, -scale.shape[1] % 4))
    return partial(scaled_mm, x, weight, by_token, by_block)


def _consumer_calls() -> Iterator[tuple[str, int, int, int, Callable[[], Any]]]:
    from weft.ops.norm_triton import add_norm
    from weft.ops.products.gate_triton import silu_mul

    for tokens in (1, 16, 64, 128, 512):
        for parts in (0, 2, 4, 8):
            for rows in (2048, 4096, 8192, 28672):
                shape = (parts, tokens, rows) if parts else (tokens, rows)
                x = torch.randn(
                    shape, device="cuda", dtype=torch.float32 if parts else torch.bfloat16
                )
                # Widths of gates; those of hidden states are smaller.
                if rows >= 8192:
                    yield "silu_mul", tokens, rows, parts, partial(silu_mul, x, torch.bfloat16)
                if rows <= 8192:
                    other = torch.randn(tokens, rows, device="cuda", dtype=torch.bfloat16)
                    yield (
                        "add_rms_norm",
                        tokens,
                        rows,
                        parts,
                        partial(add_norm, x, other, other[0], 1e-6),
                    )
