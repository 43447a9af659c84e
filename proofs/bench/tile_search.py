"""The search for tiles: several processes compile a small set of them, then one process times them."""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.ops import fp8
from weft.ops.tiles import MOST_SCANNED, Tile
from weft.proofs.bench.graph_seconds import graph_seconds
from weft.proofs.bench.kernel_cases import Maker, Sizes
from weft.proofs.bench.tile_table import Product, Timed, best, update

_PROCESSES = 14
_PART_BYTES_PER_SECOND = 8e12
"""The bytes per second at which the next kernel reads the parts of a product: they come from the cache."""


def products(sizes: Sizes, tokens: int) -> Iterator[Product]:
    """All products of a layer."""
    if sizes.num_experts:
        yield Product("fp8_linear", tokens, sizes.qkv, sizes.hidden, sizes)
        yield Product("fp8_linear", tokens, sizes.hidden, sizes.heads * sizes.dim, sizes)
        yield Product("linear", tokens, sizes.num_experts, sizes.hidden, sizes)
        yield Product("gate_up", tokens, 2 * sizes.inner, sizes.hidden, sizes)
        yield Product("down", tokens, sizes.hidden, sizes.inner, sizes)
        yield Product("down", tokens, sizes.hidden, sizes.inner, sizes, plain=True)
    else:
        yield Product("linear", tokens, sizes.qkv, sizes.hidden, sizes)
        yield Product("linear", tokens, sizes.hidden, sizes.heads * sizes.dim, sizes)
        yield Product("linear", tokens, 2 * sizes.inner, sizes.hidden, sizes)
        yield Product("linear", tokens, sizes.hidden, sizes.inner, sizes)


def candidates(product: Product) -> Iterator[Tile]:
    """The tiles to try for a product."""
    count, many = product.tokens, product.tokens > 512
    if not product.kind.endswith("linear"):
        yield from _expert_candidates(product, many)
        return
    own = max(16, 1 << (min(count, 128) - 1).bit_length())
    for most in {64, 128} if many else {own, max(own // 2, 16), max(own // 4, 16)}:
        for rows in (128, 256) if many else (64, 128):
            for columns in (128,) if product.kind == "fp8_linear" else (64, 128):
                for stages in (3, 4) if many else (3, 5):
                    for parts in (1,) if many else (1, 2, 4, 8):
                        for warps in (4,) if most * rows < 8192 else (4, 8):
                            yield Tile(rows, most, columns, warps, stages, parts)


def _expert_candidates(product: Product, many: bool) -> Iterator[Tile]:
    pairs, count = product.tokens * product.sizes.top_k, product.tokens
    for sort in (False, True) if pairs <= MOST_SCANNED else (True,):
        for most in (64, 128) if many else (16,) if count <= 64 else (16, 32, 64):
            for rows in (128,) if many else (64, 128, 256):
                for stages in (3, 4):
                    for warps in (4, 8):
                        yield Tile(rows, most, 128, warps, stages, sort=sort)


def maker(product: Product) -> Callable[[Tile | None], list[Callable[[], Any]]]:
    """A function that makes calls of the product for a tile. Weights, or tokens' experts, take turns between calls."""
    return _linear_maker(product) if product.kind.endswith("linear") else _expert_maker(product)


def _linear_maker(product: Product) -> Callable[[Tile | None], list[Callable[[], Any]]]:
    from weft.ops.linear_triton import run_tile

    make, dtype, in_fp8 = Maker("cuda", torch.bfloat16), torch.bfloat16, product.kind == "fp8_linear"
    shape, x = (product.rows, product.columns), make.randn(product.tokens, product.columns)
    count = make.copies(*shape, itemsize=1 if in_fp8 else 2)
    weights: list[Any] = [make.fp8(*shape) if in_fp8 else (make.randn(*shape), None) for _ in range(count)]
    values, scales = fp8.reference_quantize(x) if in_fp8 else (x, None)

    def run(tile: Tile | None, weight: Tensor, scale: Tensor | None) -> Tensor:
        return F.linear(x, weight) if tile is None else run_tile(values, scales, weight, scale, None, dtype, tile)

    return lambda tile: [partial(run, tile, *w) for w in weights]


def _expert_maker(product: Product) -> Callable[[Tile | None], list[Callable[[], Any]]]:
    from weft.ops.experts.products_triton import launch_down, launch_gate_up
    from weft.ops.experts.routing_triton import align

    make, count, sizes = Maker("cuda", torch.bfloat16), product.tokens, product.sizes
    weights = [make.fp8(sizes.num_experts, product.rows, product.columns) for _ in range(2)]
    routes = [make.route(sizes, count) for _ in range(16)]
    x = make.randn(count if product.kind == "gate_up" else count * sizes.top_k, product.columns)
    made = (x, None) if product.plain else fp8.reference_quantize(x)
    out = make.randn(sizes.top_k, count, sizes.hidden, dtype=torch.float32)

    def run(tile: Tile, i: int, aligned: Any) -> None:
        (by, experts), (weight, scale) = routes[i], weights[i % 2]
        if product.kind == "gate_up":
            launch_gate_up(made[0], made[1], weight, scale, experts, aligned, torch.bfloat16, tile)
            return
        values, scales = torch.ops.weft.quantize(x) if product.plain and tile.tokens >= 64 else made
        launch_down(values, scales, weight, scale, by, experts, aligned, out, tile)

    def calls(tile: Tile | None) -> list[Callable[[], Any]]:
        assert tile is not None
        block = tile.tokens if tile.sort else 0
        aligned = [align(experts, sizes.num_experts, block) if block else None for _, experts in routes]
        return [partial(run, tile, i, aligned[i]) for i in range(len(routes))]

    return calls


def compile_some(work: tuple[Product, list[Tile]]) -> None:
    """Run each tile once, so that triton's cache on disk has the compiled kernel."""
    product, some = work
    make = maker(product)
    for tile in some:
        try:
            make(tile)[0]()
        except Exception:  # a tile that does not fit; the timing process leaves it out
            continue
    torch.cuda.synchronize()


def compile_all(work: Sequence[Product]) -> None:
    """Compile the candidates of all products, each kind of kernel once."""
    found: dict[Any, tuple[Product, Tile]] = {}
    for product in work:
        for tile in candidates(product):
            pairs = 0 if tile.sort or product.kind.endswith("linear") else product.tokens
            kind = "linear" if product.kind.endswith("linear") else (product.rows, product.columns)
            key = kind, product.kind == "linear", product.plain, pairs, product.tokens == 1, attrs.evolve(tile, parts=1)
            found.setdefault(key, (product, tile))
    some: dict[tuple[Product, int], list[Tile]] = {}
    for i, (product, tile) in enumerate(found.values()):
        some.setdefault((product, i % 4), []).append(tile)
    with multiprocessing.get_context("spawn").Pool(_PROCESSES) as pool:
        pool.map(compile_some, [(product, part) for (product, _), part in some.items()], chunksize=1)


def time_product(product: Product, until: float) -> Iterator[Timed]:
    """Time every candidate that fits the GPU, until the time is over."""
    make = maker(product)
    if product.kind == "linear":
        yield Timed(product, None, graph_seconds(make(None), "cuda"))
    for tile in candidates(product):
        if time.time() > until:
            return
        try:
            seconds = graph_seconds(make(tile), "cuda")
        except Exception as error:
            if "OutOfResources" not in type(error).__name__:
                raise
            continue
        left = 4 * tile.parts * product.tokens * product.rows / _PART_BYTES_PER_SECOND if tile.parts > 1 else 0
        yield Timed(product, tile, seconds + left)


def search(sizes: Sequence[Sizes], tokens: Sequence[int], limit: float, out: Path | None) -> list[Timed]:
    """Time the candidates, and write `tiles.json` after each number of tokens. Sizes not reached within `limit` seconds
    keep their old tiles."""
    start, everything = time.time(), list[Timed]()
    compile_all([product for size in sizes for count in tokens for product in products(size, count)])
    print(f"compiled in {time.time() - start:.0f} s", flush=True)
    for count in tokens:
        for size in sizes:
            seen = [one for product in products(size, count) for one in time_product(product, start + limit)]
            if time.time() > start + limit:
                print(f"out of time at {count} tokens of {size.name}", flush=True)
                return everything
            update(count, best(seen, _align_seconds(size, count)), out)
            everything += seen
            torch.cuda.empty_cache()
        print(f"{count} tokens: {time.time() - start:.0f} s", flush=True)
    return everything


def _align_seconds(size: Sizes, tokens: int) -> float:
    """The seconds that it takes to sort the pairs of a number of tokens."""
    from weft.ops.experts.routing_triton import align

    if not size.num_experts:
        return 0.0
    _, experts = Maker("cuda", torch.bfloat16).route(size, tokens)
    return graph_seconds([partial(align, experts, size.num_experts, 16)], "cuda")
