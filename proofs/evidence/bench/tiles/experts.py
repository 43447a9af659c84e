"""The products with experts for which tiles are timed, and the device's time for them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.ops.experts.routing import route
from weft.ops.products import fp8
from weft.ops.tiles.experts import SCAN_PAIRS
from weft.ops.tiles.tile import Tile, power_of_two
from weft.proofs.evidence.bench.graphs import LEAST_BYTES, Graphs
from weft.proofs.evidence.bench.tiles.weights import drawn

# Each call has the experts of another draw, since those of one token would stay in the cache.
_ROUTES = 16
# The shared memory of sm_90 that the tiles in flight of one program may take.
_SHARED_BYTES = 227 * 2**10


@attrs.frozen
class Experts:
    """The sizes of a published mixture of experts, or of a rank's share of it.

    Args:
        is_held: whether a model is judged by it, and not fitted to it.
    """

    name: str
    num_experts: int
    inner: int
    hidden: int
    top_k: int
    is_held: bool = False


SETS = (
    Experts("Qwen3-30B-A3B", 128, 768, 2048, 8),
    Experts("Mixtral-8x7B, 2 ranks", 8, 7168, 4096, 2),
    Experts("GLM-4.5-Air", 128, 1408, 4096, 8),
    Experts("Granite-3.1-1B-A400M", 32, 512, 1024, 8),
    Experts("Phi-3.5-MoE, 2 ranks", 16, 3200, 4096, 2),
    Experts("DBRX, 4 ranks", 16, 2688, 6144, 4),
    Experts("Hunyuan-A13B, 2 ranks", 64, 1536, 4096, 8),
    Experts("OLMoE-1B-7B", 64, 1024, 2048, 8, is_held=True),
    Experts("Qwen3-235B-A22B, 4 ranks", 128, 384, 4096, 8, is_held=True),
    Experts("Mixtral-8x7B, 4 ranks", 8, 3584, 4096, 2, is_held=True),
)


@attrs.frozen
class ExpertProduct:
    """One of the two products with experts on some tokens.

    Args:
        kind: `gate_up`; `down`, in FP8 on values that are quantised; or `down_plain`, on values
            that are not.
        rows, columns: of an expert's weights.
    """

    kind: str
    tokens: int
    rows: int
    columns: int
    num_experts: int
    top_k: int
    fp8: bool

    @property
    def is_down(self) -> bool:
        """Whether it is the second product."""
        return self.kind != "gate_up"


@attrs.frozen
class ExpertKind:
    """Everything that the compilation of a tile's kernel depends on, and values that stand for the
    others."""

    product: ExpertProduct
    tile: Tile


_EXPERT_ROWS = {16: ((64, 4), (128, 4), (128, 8), (256, 8)), 64: ((128, 4), (128, 8), (256, 8))}
_EXPERT_ROWS |= {32: _EXPERT_ROWS[16], 128: ((128, 4), (128, 8))}
"""Rows and warps, by a tile's pairs."""


def expert_candidates(tokens: int, top_k: int, num_experts: int, fp8: bool) -> Iterator[Tile]:
    """The tiles of a product with experts that are worth timing.

    A tile has at most four times the pairs that an expert has on average, and at least a quarter of
    them: with more it is mostly empty, and with fewer it reads the weights more than four times.
    """
    pairs = tokens * top_k
    each = max(1, pairs // num_experts)
    # One token has an expert of its own for each pair, so that there is nothing to sort. Without
    # sorting, each program looks through all pairs, which is slow for many.
    for sort in (False,) if tokens == 1 else (False, True) if pairs <= 2 * SCAN_PAIRS else (True,):
        for height in _EXPERT_ROWS if sort else (16,):
            if (height == 16 and each <= 128) or each // 4 <= height <= 4 * each:
                for rows, warps in _EXPERT_ROWS[height]:
                    for across, stages in (
                        ((128, 3), (128, 4), (128, 6)) if fp8 else ((64, 4), (128, 3), (128, 4))
                    ):
                        # Tiles beyond it would not launch.
                        if (rows + height) * across * (1 if fp8 else 2) * stages <= _SHARED_BYTES:
                            yield Tile(rows, height, across, warps, stages, sort=sort)


def products(counts: tuple[int, ...]) -> list[ExpertProduct]:
    """All products, in the order in which they are timed."""
    all_products = []
    for count in counts:
        for one in SETS:
            rest = one.num_experts, one.top_k
            for in_fp8 in (True, False):
                all_products.append(
                    ExpertProduct("gate_up", count, 2 * one.inner, one.hidden, *rest, in_fp8)
                )
                for kind in ("down", "down_plain") if in_fp8 else ("down_plain",):
                    all_products.append(
                        ExpertProduct(kind, count, one.hidden, one.inner, *rest, in_fp8)
                    )
    return all_products


def choices(product: ExpertProduct) -> list[Tile]:
    """The candidate tiles."""
    return list(expert_candidates(product.tokens, product.top_k, product.num_experts, product.fp8))


def kind_of(product: ExpertProduct, tile: Tile) -> ExpertKind:
    """The kind of the kernel of a product with this tile, as a small product."""
    pairs = product.tokens * product.top_k
    # The kernel is compiled for powers of two, so that one stands for all numbers below.
    scanned = max(SCAN_PAIRS, power_of_two(pairs))
    if product.num_experts % 16:
        experts = product.num_experts
    else:
        experts = 16
    if tile.sort:
        tokens = 32
    elif product.tokens == 1:
        tokens = 1
    else:
        tokens = scanned // product.top_k
    small = attrs.evolve(product, tokens=tokens, rows=512, columns=512, num_experts=experts)
    return ExpertKind(small, tile)


def compile_kind(kind: ExpertKind) -> tuple[ExpertKind, str]:
    """Run a kernel of this kind on a small product; the text of its error, or an empty one."""
    product = kind.product
    shape = product.num_experts, product.rows, product.columns
    weight = torch.randn(shape, device="cuda").to(
        torch.float8_e4m3fn if product.fp8 else torch.bfloat16
    )
    scale = torch.rand(
        product.num_experts, product.rows // 128, product.columns // 128, device="cuda"
    )
    try:
        _call(product, kind.tile, _draw_inputs(product), weight, scale if product.fp8 else None)()
        torch.cuda.synchronize()
    except Exception as error:  # whatever a compiler raises; the kernel is then not timed
        return kind, f"{type(error).__name__}: {error}"
    return kind, ""


class ExpertTimer:
    """Times products with experts on the GPU. Weights and the tokens' experts take turns."""

    def __init__(self, compiled: dict[ExpertKind, str]) -> None:
        self._compiled = compiled
        self._graphs = Graphs()
        self._arenas = {False: drawn(torch.bfloat16), True: drawn(torch.float8_e4m3fn)}
        self._scales = torch.rand(2**22, device="cuda") / 1000
        self._inputs: tuple[ExpertProduct, list[Any]] | None = None

    def start(self, product: ExpertProduct, choice: Tile) -> Callable[[], float] | None:
        """As of `LinearTimer`."""
        if self._compiled.get(kind_of(product, choice), "not reached"):
            return None
        # All tiles of a product have the same inputs: they are drawn once.
        if self._inputs is None or self._inputs[0] != product:
            self._inputs = product, self._make(product)
        calls = [_call(product, choice, *args) for args in self._inputs[1]]
        calls[0]()
        return self._graphs.capture(calls)

    def aligning(self, counts: tuple[int, ...]) -> Iterator[tuple[int, int, int, int, float]]:
        """The seconds that it takes to sort pairs: tokens, top_k, experts, pairs of a block, and
        seconds."""
        from weft.ops.experts.routing_triton import align

        for count in counts:
            for num_experts, top_k in dict.fromkeys((one.num_experts, one.top_k) for one in SETS):
                _, experts = _routed(count, num_experts, top_k)
                for block in (16, 64):
                    call = partial(align, experts, num_experts, block)
                    call()
                    replay = self._graphs.capture([call] * 32)
                    replay()
                    yield count, top_k, num_experts, block, replay()

    def _make(self, product: ExpertProduct) -> list[Any]:
        shape = (product.num_experts, product.rows, product.columns)
        arena = self._arenas[product.fp8]
        size = product.rows * product.columns * product.num_experts
        blocks = (product.rows // 128, product.columns // 128)
        touched = (
            size * min(1.0, product.tokens * product.top_k / product.num_experts) * arena.itemsize
        )
        there = len(arena) // size
        scales = self._scales[: product.num_experts * blocks[0] * blocks[1]].view(
            product.num_experts, *blocks
        )
        inputs = [_draw_inputs(product) for _ in range(_ROUTES)]
        return [
            (
                inputs[i % _ROUTES],
                arena[i % there * size :][:size].view(shape),
                scales if product.fp8 else None,
            )
            # By the bytes that are touched and not by those that there are: experts without a token
            # are not read.
            for i in range(max(2, min(int(LEAST_BYTES / touched) + 1, 128)))
        ]


def _routed(tokens: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """The weights and experts of tokens, with all experts equally likely."""
    by, experts = route.reference(
        torch.randn(tokens, num_experts, device="cuda"), top_k, True, torch.float32
    )
    return by, experts


@attrs.frozen(eq=False)
class _Inputs:
    """Activations, plain and quantised, and the weights and experts of the tokens."""

    x: Tensor
    values: Tensor
    scales: Tensor | None
    by: Tensor
    experts: Tensor


def _draw_inputs(product: ExpertProduct) -> _Inputs:
    count = product.tokens * (product.top_k if product.is_down else 1)
    x = torch.randn(count, product.columns, device="cuda", dtype=torch.bfloat16)
    values, scales = fp8.reference_quantize(x) if product.fp8 else (x, None)
    return _Inputs(x, values, scales, *_routed(product.tokens, product.num_experts, product.top_k))


def _call(
    product: ExpertProduct, tile: Tile, inputs: _Inputs, weight: Tensor, scale: Tensor | None
) -> Callable[[], Any]:
    from weft.ops.experts.products_triton import launch_down, launch_gate_up
    from weft.ops.experts.routing_triton import align
    from weft.ops.norm_triton import quantize

    if tile.sort:
        aligned = align(inputs.experts, product.num_experts, tile.tokens)
    else:
        aligned = None
    if not product.is_down:
        rest = weight, scale, inputs.experts, aligned, torch.bfloat16, tile
        return partial(launch_gate_up, inputs.values, inputs.scales, *rest)
    out = inputs.x.new_empty(product.top_k, product.tokens, product.rows)

    def down(values: Tensor, scales: Tensor | None) -> None:
        launch_down(values, scales, weight, scale, inputs.by, inputs.experts, aligned, out, tile)

    if product.kind == "down" or not product.fp8:
        return partial(down, inputs.values, inputs.scales)
    # As the package does: with few tokens the product quantises its input itself, with many a
    # kernel does.
    if tile.tokens < 64:
        return partial(down, inputs.x, None)
    return lambda: down(*quantize(inputs.x))
