"""The device's time for products with any tile: kernels that several processes compile, timed in short graphs."""

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.ops import fp8
from weft.ops.tiles import Tile, cdiv

PROCESSES = 15
_LEAST_BYTES = 2**28
"""Bytes of weights that a graph reads, so that none is found in a cache of 50 MB."""
_MOST_LAUNCHES = 256
_MOST_SECONDS = 0.01
"""The time after which a graph is not replayed again."""
_REPLAYS = 5
_ARENA = 2**31
"""Elements from which all weights of a dtype are cut."""

LIBRARIES = {"linear": ("torch", "cublaslt"), "fp8_linear": ("scaled_mm",)}
"""torch's own products, by kind."""


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


Choice = Tile | str
"""A tile, or the name of one of torch's own products."""


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
    """A kernel that was compiled: its registers and spills a thread, its shared memory in bytes, and its greatest error
    relative to the largest value of the result."""

    registers: int
    spills: int
    shared: int
    error: float


def kind_of(product: Product, tile: Tile) -> Kind:
    """The kind of the kernel of a product with this tile."""
    grouped = cdiv(product.tokens, tile.tokens) > 2
    return Kind(attrs.evolve(tile, parts=1), product.kind == "fp8_linear", tile.parts > 1, grouped)


def compile_kinds(kinds: Iterable[Kind], limit: float) -> dict[Kind, Compiled | str]:
    """Compile kernels in several processes, for at most `limit` seconds, into Triton's cache on disk.

    Returns:
        What was compiled, or the error: a kernel may not fit.
    """
    until, found = time.time() + limit, dict[Kind, Compiled | str]()
    slow_first = sorted(kinds, key=lambda kind: -kind.tile.rows * kind.tile.tokens * kind.tile.stages)
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        made = pool.imap_unordered(compile_kind, slow_first)
        for _ in slow_first:
            try:
                kind, compiled = made.next(max(until - time.time(), 0.1))
            except multiprocessing.TimeoutError:
                break
            found[kind] = compiled
    return found


def compile_kind(kind: Kind) -> tuple[Kind, Compiled | str]:
    """Run a kernel of this kind on a small product."""
    from weft.ops.linear_triton import _linear_kernel, run_tile

    tokens, rows, columns = kind.tile.tokens * (3 if kind.grouped else 1), 256, 1024
    torch.manual_seed(0)
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    values, scales, w, scale = (x, None, weight, None)
    if kind.fp8:
        values, scales = fp8.reference_quantize(x)
        w, scale = weight.to(torch.float8_e4m3fn), torch.rand(rows // 128, columns // 128, device="cuda")
        x, weight = fp8.dequantize(fp8.Quantized(values, scales)), fp8.dequantize_weight(w, scale)
    tile = attrs.evolve(kind.tile, parts=2 if kind.split else 1)
    try:
        out = run_tile(values, scales, w, scale, None, torch.bfloat16, tile)
    except Exception as error:  # whatever a compiler raises; the kernel is then not timed
        return kind, f"{type(error).__name__}: {error}"
    expected = x.double() @ weight.double().t()
    difference = (out.double().view(-1, tokens, rows).sum(0) - expected).abs().max()
    compiled: Any = list(_linear_kernel._known.values())[-1][0]
    facts = compiled.n_regs, compiled.n_spills, compiled.metadata.shared
    return kind, Compiled(*facts, float(difference / expected.abs().max()))


class GpuTimer:
    """Times products on the GPU. Weights take turns, cut from one large tensor of each dtype."""

    def __init__(self, compiled: dict[Kind, Compiled | str]) -> None:
        torch.cuda.set_stream(torch.cuda.Stream())
        self._compiled = compiled
        self._pool = torch.cuda.graph_pool_handle()
        self._arenas = {"linear": _drawn(torch.bfloat16), "fp8_linear": _drawn(torch.float8_e4m3fn)}
        self._scales = torch.rand(2**22, device="cuda") / 1000
        self._given: tuple[Product, list[Any]] | None = None
        self.errors: dict[str, str] = {}
        self.scaled_mm_error = 0.0
        """The greatest error of torch's product in FP8, relative to the largest value of the result."""
        self._kept = self._capture([lambda: torch.empty(2**20, device="cuda")])
        """A graph that keeps the memory pool of all others."""

    def start(self, product: Product, choice: Choice) -> Callable[[], float] | None:
        """A function that returns the seconds a call takes, the median over some replays; the first time with fewer.
        None: the choice does not run here."""
        if isinstance(choice, Tile) and not isinstance(self._compiled.get(kind_of(product, choice)), Compiled):
            return None
        if self._given is None or self._given[0] != product:
            self._given = product, self._make(product)
        key = f"{choice} of {product.tokens} tokens"
        if key in self.errors:
            return None
        try:
            calls = [_call(choice, *given) for given in self._given[1]]
            with _library(choice):
                out = calls[0]()
                graph = self._capture(calls)
        except Exception as error:
            if isinstance(choice, Tile):
                raise
            self.errors[key] = f"{product}: {error}"
            return None
        if choice == "scaled_mm" and not self.scaled_mm_error:
            values, scales, weight, scale = self._given[1][0]
            wide = fp8.dequantize_weight(weight, scale).t()
            expected = fp8.dequantize(fp8.Quantized(values, scales)) @ wide
            self.scaled_mm_error = float((out.float() - expected).abs().max() / expected.abs().max())
        return _Replays(graph, len(calls))

    def consumers(self) -> Iterator[tuple[str, int, int, int, float]]:
        """The kernels that add up a product's parts: the operator, tokens, rows, parts and seconds of a call, whose
        input is in the cache. With no parts it reads the sum in bfloat16."""
        from weft.ops.kernel_triton import compiling

        given = list(_consumer_calls())
        with compiling():
            for *_, call in given:
                call()
        for name, tokens, rows, parts, call in given:
            call()
            replay = _Replays(self._capture([call] * 64), 64)
            replay()
            yield name, tokens, rows, parts, replay()

    def _make(self, product: Product) -> list[Any]:
        size, arena = product.rows * product.columns, self._arenas[product.kind]
        count = max(2, min(cdiv(_LEAST_BYTES, size * arena.itemsize), _MOST_LAUNCHES))
        x = torch.randn(product.tokens, product.columns, device="cuda", dtype=torch.bfloat16)
        there = len(arena) // size
        weights = [arena[i % there * size :][:size].view(product.rows, product.columns) for i in range(count)]
        if product.kind == "linear":
            return [(x, None, weight, None) for weight in weights]
        values, scales = fp8.reference_quantize(x)
        blocks = fp8.ceil_blocks(product.rows), fp8.ceil_blocks(product.columns)
        each = cdiv(blocks[0] * blocks[1], 4) * 4
        rest = len(self._scales) // each
        cut = [self._scales[i % rest * each :][: blocks[0] * blocks[1]].view(blocks) for i in range(count)]
        return [(values, scales, *pair) for pair in zip(weights, cut, strict=True)]

    def _capture(self, calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
        return graph


class _Replays:
    """A graph, and its seconds per call: at first the least of two replays, then the median of five."""

    def __init__(self, graph: torch.cuda.CUDAGraph, calls: int) -> None:
        self._graph, self._calls, self._is_first = graph, calls, True

    def __call__(self) -> float:
        seen, is_first = list[float](), self._is_first
        replays, most = (2, _MOST_SECONDS / 5) if is_first else (_REPLAYS, _MOST_SECONDS)
        self._is_first = False
        while len(seen) < replays and sum(seen) < most:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self._graph.replay()
            end.record()
            end.synchronize()
            seen.append(begin.elapsed_time(end) / 1e3)
        return (min(seen) if is_first else sorted(seen)[len(seen) // 2]) / self._calls


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
    from weft.ops.linear_triton import run_tile

    if isinstance(choice, Tile):
        return partial(run_tile, x, x_scales, weight, scale, None, torch.bfloat16, choice)
    if x_scales is None or scale is None:
        return partial(F.linear, x, weight)
    # The scales as torch takes them: column-major, and blocks padded to four. Making them is not timed.
    by_token, by_block = x_scales.t().contiguous().t(), F.pad(scale, (0, -scale.shape[1] % 4)).t()
    recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    given = weight.t(), by_token, recipes[0], by_block, recipes[1]
    return partial(F.scaled_mm, x, *given, output_dtype=torch.bfloat16)


def _consumer_calls() -> Iterator[tuple[str, int, int, int, Callable[[], Any]]]:
    from weft.ops.gate_triton import silu_mul
    from weft.ops.norm_triton import add_norm

    for tokens in (1, 16, 64, 128, 512):
        for parts in (0, 2, 4, 8):
            for rows in (2048, 4096, 8192, 28672):
                shape = (parts, tokens, rows) if parts else (tokens, rows)
                x = torch.randn(shape, device="cuda", dtype=torch.float32 if parts else torch.bfloat16)
                if rows >= 8192:
                    yield "silu_mul", tokens, rows, parts, partial(silu_mul, x, torch.bfloat16)
                if rows <= 8192:
                    other = torch.randn(tokens, rows, device="cuda", dtype=torch.bfloat16)
                    yield "add_rms_norm", tokens, rows, parts, partial(add_norm, x, other, other[0], 1e-6)


def _drawn(dtype: torch.dtype) -> Tensor:
    """Random elements, from which weights are cut."""
    arena = torch.empty(_ARENA, dtype=dtype, device="cuda")
    for some in arena.split(2**27):
        some.copy_(torch.randn(len(some), device="cuda") * (16 if arena.itemsize == 1 else 1))
    return arena


def device_facts() -> Iterator[tuple[str, Any]]:
    """What a model of the device's time may depend on: its multiprocessors, caches, bandwidth and peak."""
    properties = torch.cuda.get_device_properties(0)
    yield "processors", properties.multi_processor_count
    yield "cache_bytes", properties.L2_cache_size
    yield "memory_bytes", properties.total_memory
    large = torch.zeros(2**30, device="cuda", dtype=torch.bfloat16)
    yield "read_bytes_per_second", large.nbytes / _seconds(lambda: large.sum())
    other = torch.empty_like(large)
    yield "copy_bytes_per_second", 2 * large.nbytes / _seconds(lambda: other.copy_(large))
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    yield "bf16_flops_per_second", 2 * 8192**3 / _seconds(lambda: a @ a)


def _seconds(call: Callable[[], Any], repeats: int = 10) -> float:
    call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats
