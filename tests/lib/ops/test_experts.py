"""The products of a rank that holds some of the experts: a pair whose expert is elsewhere adds
exactly 0."""

from pathlib import Path
from typing import Any

import pytest
import torch
from interpreting import interpret
from refusal import refused
from torch import Tensor

from weft.errors import DescriptorError
from weft.ops.experts.products import _run_experts, run_experts
from weft.ops.experts.routing import route
from weft.ops.products.fp8 import Quantized, ceil_blocks, reference_quantize
from weft.ops.tiles.tile import Tile

TOKENS = 9
TOP_K = 3
EXPERTS = 6
HIDDEN = 10
INNER = 7


def drawn(tokens: int = TOKENS, seed: int = 0) -> tuple[Tensor, ...]:
    """Tokens, the weights of all experts, and what a router chose; nothing chose expert 5."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    logits = torch.randn(tokens, EXPERTS, generator=generator)
    logits[:, 5] = -9
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator)
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator)
    return x, gate_up, down, *route(logits, TOP_K, True, torch.float32)


def by_pair(args: tuple[Tensor, ...], local_experts: range) -> Tensor:
    """By definition: one product for each pair whose expert is one of a rank's own."""
    (x, gate_up, down, weights, experts), rows = args, list[Tensor]()
    for slot in range(experts.shape[1]):
        for token in range(len(x)):
            expert = int(experts[token, slot])
            if expert in local_experts:
                gate, up = (gate_up[expert] @ x[token]).chunk(2)
                rows.append(
                    weights[token, slot] * (down[expert] @ (gate * torch.sigmoid(gate) * up))
                )
            else:
                rows.append(x.new_zeros(x.shape[1]))
    return torch.stack(rows).view(experts.shape[1], *x.shape)


def of_rank(args: tuple[Tensor, ...], local_experts: range) -> Tensor:
    x, gate_up, down, weights, experts = args
    span = slice(local_experts.start, local_experts.stop)
    place: Any = {"first": local_experts.start, "num_experts": EXPERTS}
    return run_experts(x, gate_up[span], down[span], weights, experts, dtype=x.dtype, **place)


OWN = [range(2), range(2, 4), range(4, 6), range(5, 6), range(6), range(1, 4)]


@pytest.mark.parametrize("local_experts", OWN, ids=str)
@pytest.mark.parametrize("derived", [False, True])
def test_a_rank_computes_the_pairs_of_its_own_experts(local_experts: range, derived: bool) -> None:
    """Also where nothing chose one of them; and the form of torch.func."""
    args = drawn()
    result = (
        of_rank(args, local_experts)
        if not derived
        else torch.func.vmap(lambda x: of_rank((x, *args[1:]), local_experts))(args[0][None])[0]
    )
    torch.testing.assert_close(result, by_pair(args, local_experts))
    elsewhere = torch.tensor(
        [[int(expert) not in local_experts for expert in row] for row in args[4]]
    ).T
    assert bool((result[elsewhere] == 0).all())


def test_the_ranks_add_up_to_the_whole() -> None:
    """Bit for bit: a pair is computed by one rank, with the weight that it has among all that the
    token chose."""
    args = drawn()
    every = [of_rank(args, range(first, first + 2)) for first in (0, 2, 4)]
    assert torch.equal(sum(every[1:], every[0]), of_rank(args, range(EXPERTS)))
    assert torch.allclose(args[3].sum(-1), torch.ones(TOKENS))


def test_no_tokens_are_no_rows() -> None:
    assert of_rank(drawn(0), range(2, 4)).shape == (TOP_K, 0, HIDDEN)


def test_derivatives_are_those_of_the_definition() -> None:
    *smooth, experts = drawn()
    grads = []
    for function in (of_rank, by_pair):
        args = [one.double().requires_grad_() for one in smooth]
        (function((*args, experts), range(2, 4)) ** 2).sum().backward()
        grads.append([one.grad for one in args])
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("first", [-1, 5])
def test_experts_that_there_are_not_are_refused(first: int) -> None:
    x, gate_up, down, weights, experts = drawn()
    problem = f"the weights of 2 experts from number {first} on, of 6"
    instead = "first from 0 to 4"
    with refused(DescriptorError, "run_experts(x, gate_up, down, …)", problem, instead):
        run_experts(
            x, gate_up[:2], down[:2], weights, experts, dtype=x.dtype, first=first, num_experts=6
        )


# The kernels, interpreted. New memory is NaN there, so that what no program writes is seen.

_INTERPRETED = """
import sys, torch
from weft.ops.experts.products_triton import run_tiles
torch.set_deterministic_debug_mode("error")
torch.save([run_tiles(*args) for args in torch.load(sys.argv[1], weights_only=False)], sys.argv[2])
"""
SMALL, MANY = Tile(32, 16, 128, 4, 2), Tile(64, 64, 128, 4, 2, sort=True)
SORTED, WHOLE = Tile(32, 16, 128, 4, 2, sort=True), Tile(256, 16, 128, 4, 2)
KERNELS = {  # tokens, top_k, experts, ranks, FP8, tiles
    "a token": (1, 2, 12, 3, False, (SMALL, SMALL)),
    "fewer pairs than experts": (2, 2, 18, 3, False, (SMALL, SORTED)),
    "scanned": (20, 2, 6, 3, False, (SMALL, SMALL)),
    "sorted": (20, 3, 6, 3, False, (SORTED, SMALL)),
    "many": (70, 2, 4, 2, False, (MANY, SORTED)),
    "many, down": (70, 2, 4, 4, False, (SORTED, MANY)),
    "FP8, a token": (1, 4, 6, 3, True, (WHOLE, SMALL)),
    "FP8, scanned": (9, 2, 4, 2, True, (WHOLE, SMALL)),
    "FP8, many": (70, 2, 4, 2, True, (MANY, MANY)),
}


def kernel_args(name: str) -> list[tuple[Any, ...]]:
    """The arguments of `run_tiles` for the whole layer, then for each rank. No token chooses an
    expert of rank 1."""
    tokens, top_k, count, ranks, fp8, tiles = KERNELS[name]
    generator = torch.Generator().manual_seed(3)
    hidden, inner = (128, 128) if fp8 else (40, 24)
    x = torch.randn(tokens, hidden, generator=generator)
    scales = None
    shapes = (count, 2 * inner, hidden), (count, hidden, inner)
    products = [torch.randn(shape, generator=generator) for shape in shapes]
    blocks: list[Any] = [None, None]
    if fp8:
        x, scales = reference_quantize(x)
        products = [(16 * one).to(torch.float8_e4m3fn) for one in products]
        sizes = [(count, ceil_blocks(rows), ceil_blocks(columns)) for _, rows, columns in shapes]
        blocks = [torch.rand(size, generator=generator) / 64 for size in sizes]
    logits = torch.randn(tokens, count, generator=generator)
    num_local = count // ranks
    logits[:, num_local : 2 * num_local] -= 99
    weights, experts = route(logits, min(top_k, count - num_local), True, torch.float32)
    every = []
    for mine in (
        slice(0, count),
        *(slice(rank * num_local, (rank + 1) * num_local) for rank in range(ranks)),
    ):
        up, down, up_scale, down_scale = (
            None if one is None else one[mine] for one in (*products, *blocks)
        )
        rest = weights, experts, torch.float32, mine.start, count
        every.append((x, scales, up, up_scale, down, down_scale, *rest, *tiles))
    return every


@pytest.mark.parametrize("name", KERNELS)
def test_interpreted_kernels_of_ranks_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    """Bit for bit where a rank has the expert, and exactly 0 elsewhere; near the reference."""
    every = kernel_args(name)
    results = interpret(_INTERPRETED, every, tmp_path)
    assert_shares(every, results)
    for args, result in zip(every, results, strict=True):
        near = 5e-2 if args[1] is not None else 1e-4
        torch.testing.assert_close(result, _run_experts.reference(*args[:-2]), rtol=1e-2, atol=near)


def test_programs_of_one_token_search_for_no_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from weft.ops.experts import products_triton

    pairs: list[int] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: pairs.append(options["PAIRS"])

    monkeypatch.setattr(products_triton, "_expert_kernel", Recorder())
    for name in ("a token", "FP8, a token", "fewer pairs than experts"):
        *args, _ = kernel_args(name)[0]
        products_triton.run_tiles(*args, SMALL)
    assert pairs[:4] == [1] * 4
    assert 1 not in pairs[4:]


def assert_shares(every: list[tuple[Any, ...]], results: list[Tensor]) -> None:
    """The rows of each rank are the whole's where it has the expert, and 0 elsewhere. Rank 1 has no
    pair."""
    (whole, *shares), experts, num_local = results, every[0][7].T, len(every[1][2])
    assert not whole.isnan().any()
    for rank, share in enumerate(shares):
        is_local = (experts >= rank * num_local) & (experts < (rank + 1) * num_local)
        assert torch.equal(share, torch.where(is_local[:, :, None], whole, 0)), f"rank {rank}"
        assert rank != 1 or not is_local.any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_ranks_are_those_of_the_whole(name: str) -> None:
    """On a GPU, and in graphs, whose replays find other experts than their capture."""
    from weft.ops.experts.products_triton import run_tiles

    experts = kernel_args(name)[0][7].cuda()
    every = list[tuple[Any, ...]]()
    for args in kernel_args(name):
        every.append(
            (*(x.cuda() if isinstance(x, Tensor) else x for x in args[:7]), experts, *args[8:])
        )
    chosen = experts.clone()
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    try:
        eager = [run_tiles(*args) for args in every]
        graphs = []
        captured = []
        experts.copy_(chosen.flip(0).fill_(int(chosen[0, 0])))
        for args in every:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                captured.append(run_tiles(*args))
        experts.copy_(chosen)
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
    finally:
        torch.use_deterministic_algorithms(False)
    assert_shares(every, eager)
    assert_shares(every, captured)


def test_a_rank_in_fp8_has_the_rows_of_the_whole() -> None:
    (x, scales, up, up_scale, down, down_scale, weights, experts, *_), *_ = kernel_args("FP8, many")
    quantized = Quantized(x, scales)

    def of(mine: slice) -> Tensor:
        rank_args: Any = {
            "gate_up_scale": up_scale[mine],
            "down_scale": down_scale[mine],
            "first": mine.start,
        }
        rest: Any = {"dtype": torch.bfloat16, "num_experts": 4}
        return run_experts(quantized, up[mine], down[mine], weights, experts, **rank_args, **rest)

    assert torch.equal(of(slice(0, 2)) + of(slice(2, 4)), of(slice(0, 4)))
