"""The search for tiles: a small set of them is compiled by several processes, then timed by one."""

import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from weft.ops import fp8, tiles
from weft.ops.tiles import MEASURED, SCAN_PAIRS, Tile, expert_key, linear_key
from weft.proofs.bench.kernel_cases import Maker, Sizes

_PROCESSES = 14


@attrs.frozen
class Product:
    """What a tile is searched for.

    Args:
        kind: `linear`, `gate_up` or `down`.
    """

    kind: str
    tokens: int
    rows: int
    columns: int
    sizes: Sizes

    @property
    def key(self) -> str:
        """Its name in `tiles.json`."""
        if self.kind == "linear":
            return linear_key(self.rows, self.columns)
        return expert_key(self.rows, self.columns, self.sizes.num_experts, True)


def products(sizes: Sizes, tokens: Sequence[int]) -> Iterator[Product]:
    """The products of a layer with experts."""
    for count in tokens:
        yield Product("linear", count, sizes.qkv, sizes.hidden, sizes)
        yield Product("linear", count, sizes.hidden, sizes.heads * sizes.dim, sizes)
        yield Product("gate_up", count, 2 * sizes.inner, sizes.hidden, sizes)
        yield Product("down", count, sizes.hidden, sizes.inner, sizes)


def candidates(product: Product) -> Iterator[Tile]:
    """The tiles to try."""
    count = product.tokens
    if product.kind == "linear":
        wide = sorted({min(64, max(16, count)), min(128, max(16, count))} | ({32} if count > 16 else set()))
        for most in wide:
            for rows in (64, 128):
                for stages in (3, 5):
                    for parts in (1, 2, 4, 8) if count <= 64 else (1, 2, 4):
                        yield Tile(rows, most, 128, 4, stages, parts)
        return
    scans = count * product.sizes.top_k <= SCAN_PAIRS
    for most in (16,) if scans else (16, 32, 64):
        for rows in (64, 128, 256):
            for stages in (3, 4, 6):
                for warps in (4, 8):
                    yield Tile(rows, most, 128, warps, stages)


def caller(product: Product, device: str) -> Any:
    """What runs the product with a tile, on weights that take turns."""
    from weft.ops.experts_triton import align, launch
    from weft.ops.linear_triton import run_tile

    make, count, sizes = Maker(device, torch.bfloat16), product.tokens, product.sizes
    if product.kind == "linear":
        x = fp8.reference_quantize(make.randn(count, product.columns))
        copies = make.copies(product.rows, product.columns, itemsize=1)
        weights = [make.fp8(product.rows, product.columns) for _ in range(copies)]
        return lambda tile: [lambda w=w: run_tile(*x, *w, None, torch.bfloat16, tile) for w in weights]
    gated = product.kind == "gate_up"
    weights = [make.fp8(sizes.num_experts, product.rows, product.columns) for _ in range(2)]
    by, experts = make.route(sizes, count)
    x = make.randn(count if gated else count * sizes.top_k, product.columns)
    values, scales = fp8.reference_quantize(x)
    out = make.randn(count * sizes.top_k, sizes.inner) if gated else make.randn(
        sizes.top_k, count, sizes.hidden, dtype=torch.float32
    )  # fmt: skip

    def calls(tile: Tile) -> list[Any]:
        quantized = gated or tile.tokens >= 64
        given = (values, scales) if quantized else (x, None)
        aligned = align(experts, sizes.num_experts, tile.tokens) if count * sizes.top_k > SCAN_PAIRS else None
        return [lambda w=w: launch(*given, *w, by, experts, aligned, out, tile, gated) for w in weights]

    return calls


def compile_all(work: tuple[Product, list[Tile]]) -> None:
    """Run each tile once, so that the compiled kernel stands in triton's cache on disk."""
    product, some = work
    make = caller(attrs.evolve(product), "cuda")
    for tile in some:
        try:
            make(tile)[0]()
        except Exception:  # a tile that does not fit: the one who times it says so
            continue
    torch.cuda.synchronize()


def search(sizes: Sizes, tokens: Sequence[int], device: str, out: Path | None) -> list[dict[str, Any]]:
    """Time all candidates, write `tiles.json`, and return what was seen; nothing without a GPU."""
    from weft.proofs.bench.kernels import graph_seconds

    if device != "cuda":
        return []
    start, work = time.time(), []
    for product in products(sizes, tokens):
        found = [attrs.evolve(tile, parts=1) for tile in candidates(product)]
        found = list(dict.fromkeys(found))
        work += [(product, found[i::3]) for i in range(3)]
    with multiprocessing.get_context("spawn").Pool(_PROCESSES) as pool:
        pool.map(compile_all, work, chunksize=1)
    print(f"compiled in {time.time() - start:.0f} s", flush=True)
    seen = []
    for product in products(sizes, tokens):
        make = caller(product, device)
        for tile in candidates(product):
            row = {"key": product.key, "kind": product.kind, "tokens": product.tokens, "tile": attrs.astuple(tile)}
            try:
                seen.append({**row, "us": graph_seconds(make(tile), device) * 1e6})
            except Exception as error:
                seen.append({**row, "error": f"{type(error).__name__}: {str(error)[:200]}"})
        torch.cuda.empty_cache()
    write(seen, out)
    print(f"searched in {time.time() - start:.0f} s", flush=True)
    return seen


def write(seen: Sequence[dict[str, Any]], out: Path | None) -> None:
    """The best tile for each product and number of tokens."""
    table: dict[str, list[dict[str, Any]]] = {}
    for key, tokens in dict.fromkeys((row["key"], row["tokens"]) for row in seen):
        rows = [row for row in seen if (row["key"], row["tokens"]) == (key, tokens) and "us" in row]
        best = min(rows, key=lambda row: row["us"])
        table.setdefault(key, []).append({"tokens": tokens, "tile": best["tile"]})
    text = json.dumps(table, indent=1)
    MEASURED.write_text(text + "\n", encoding="utf-8")
    for one in (tiles.measured, tiles.linear_tile, tiles.expert_tile):
        one.cache_clear()
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "tiles.json").write_text(text + "\n")
