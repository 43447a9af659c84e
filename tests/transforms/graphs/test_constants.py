"""Which tensors count as constant while a function runs. Products and norms that load them early
have the same bits as those that wait."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from weft import graphify
from weft.ops.constants import is_constant
from weft.ops.experts.products import run_experts
from weft.ops.experts.routing import route
from weft.ops.norm import add_rms_norm_quantized, rms_norm
from weft.ops.products.fp8 import ceil_blocks, quantize
from weft.ops.products.gate import silu_mul, silu_mul_quantized
from weft.ops.products.linear import fp8_linear, linear, swiglu
from weft.ops.products.parts import sum_parts

TOKENS = (1, 2, 5, 16, 17)
# Hidden and inner columns: all weights at once, in tiles of 128 that do not divide them, in a loop,
# and few.
WIDTHS = ((1024, 3072), (960, 2560), (4096, 14336), (384, 80))


@pytest.fixture
def constancy() -> dict[str, bool]:
    """Which tensors were constant while a function ran."""
    return {}


def test_only_arguments_by_reference_that_are_not_donated_are_constant(
    constancy: dict[str, bool],
) -> None:
    outside = torch.ones(3)

    @graphify(donate_argnames="state", reference_argnames=("params",))
    def step(params: dict[str, Tensor], state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        doubled = params["w"] * 2
        copied = params["w"].clone()
        tensors = {"w": params["w"], "view": params["w"][1:], "state": state, "x": x}
        tensors |= {"doubled": doubled, "copied": copied, "outside": outside}
        constancy.update((name, is_constant(tensor)) for name, tensor in tensors.items())
        return x + doubled + outside, state + 1

    w = torch.arange(3.0)
    result, _ = step({"w": w}, torch.zeros(3), torch.ones(3))
    assert torch.equal(result, 2 + 2 * w)
    assert {name for name, is_so in constancy.items() if is_so} == {"w", "view"}
    assert len(constancy) == 7
    assert not is_constant(w)


def test_what_shares_the_memory_of_a_donated_argument_is_not_constant(
    constancy: dict[str, bool],
) -> None:
    """Two storages over one array."""
    array = np.arange(8.0, dtype=np.float32)
    state, w = torch.from_numpy(array[:6]), torch.from_numpy(array[4:])

    @graphify(donate_argnames="state", reference_argnames=("params",))
    def step(params: Tensor, state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        constancy["params"] = is_constant(params)
        return x + 1, state + 1

    step(w, state, torch.ones(3))
    assert constancy == {"params": False}


def test_nothing_is_constant_where_collectives_may_write(constancy: dict[str, bool]) -> None:
    @graphify(reference_argnames=("params",), collectives=True)
    def step(params: Tensor, x: Tensor) -> Tensor:
        constancy["params"] = is_constant(params)
        return x + params

    step(torch.ones(3), torch.ones(3))
    assert constancy == {"params": False}


def test_nothing_is_constant_after_an_error() -> None:
    w = torch.ones(3)

    @graphify(reference_argnames=("params",))
    def step(params: Tensor, x: Tensor) -> Tensor:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        step(w, torch.ones(3))
    assert not is_constant(w)


def test_nothing_is_constant_in_a_function_that_is_not_captured(constancy: dict[str, bool]) -> None:
    def step(params: Tensor, x: Tensor) -> Tensor:
        constancy["params"] = is_constant(params)
        return params + x

    step(torch.ones(2), torch.ones(2))
    assert constancy == {"params": False}


def block(params: dict[str, Any], x: Tensor) -> Tensor:
    """Three gated blocks; the last one's gain and weights are made by the kernels just before they
    are read."""
    total = x
    for i in range(3):
        gain = params["gain"]
        up = params["up"]
        down = params["down"]
        if i == 2:
            gain = rms_norm(gain[None], gain, 1e-6)[0]
        normed = rms_norm(total, gain, 1e-6)
        if i == 2:
            up = rms_norm(up, torch.ones_like(gain), 1e-6)
        inner = silu_mul(linear(normed, up), x.dtype) if i == 1 else swiglu(normed, up)
        total = total + sum_parts(linear(inner, down), x.dtype)
    return total


def quantized_block(params: dict[str, Any], x: Tensor) -> Tensor:
    added = torch.zeros_like(x)
    for _ in range(3):
        _, normed, x = add_rms_norm_quantized(added, x, params["gain"], 1e-6)
        up = fp8_linear(normed, *params["up"], dtype=x.dtype)
        added = fp8_linear(silu_mul_quantized(up, x.dtype), *params["down"], dtype=x.dtype)
    return x + sum_parts(added, x.dtype)


def chosen_experts(params: dict[str, Any], x: Tensor) -> Tensor:
    """Three blocks of experts, of which the router's product and the norm ask for weights early."""
    for _ in range(3):
        weights, experts = route(linear(x, params["router"]), 4, True, x.dtype)
        (up, up_scale), (down, down_scale) = params["up"], params["down"]
        scales = {"gate_up_scale": up_scale, "down_scale": down_scale}
        activations = x if up_scale is None else quantize(x)
        added = run_experts(
            activations, up, down, weights, experts, **scales, dtype=x.dtype, num_experts=len(up)
        )
        x = rms_norm(x + sum_parts(added, x.dtype), params["gain"], 1e-6)
    return x


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in FP8, as if each block had been multiplied by 2."""
    blocks = [*weight.shape[:-2], *(ceil_blocks(size) for size in weight.shape[-2:])]
    return (weight * 2).to(torch.float8_e4m3fn), torch.full(blocks, 0.5, device=weight.device)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def assert_equal_when_replayed(function: Any, params: dict[str, Any], hidden: int) -> None:
    """20 replays for each number of tokens, after a parameter was just written."""
    replay = graphify(function, reference_argnames="params")
    for tokens in TOKENS:
        replay(params, randn(tokens, hidden))
        for _ in range(20):
            x = randn(tokens, hidden)
            params["gain"].mul_(-1.0)
            torch.testing.assert_close(replay(params, x), function(params, x), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("widths", WIDTHS, ids=lambda widths: "x".join(map(str, widths)))
def test_products_that_ask_for_weights_early_have_the_bits_of_those_that_wait(
    widths: tuple[int, int], fp8: bool
) -> None:
    hidden, inner = widths
    torch.manual_seed(0)
    plain = {
        "up": randn(2 * inner, hidden) / hidden**0.5,
        "down": randn(hidden, inner) / inner**0.5,
    }
    params = in_blocks_if(fp8, plain) | {"gain": 1 + randn(hidden) / 8}
    assert_equal_when_replayed(quantized_block if fp8 else block, params, hidden)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("widths", [(512, 768), (1024, 1536)], ids=["all columns", "in a loop"])
def test_experts_beside_early_products_have_the_bits_of_a_call(
    widths: tuple[int, int], fp8: bool
) -> None:
    hidden, inner = widths
    torch.manual_seed(0)
    plain = {
        "up": randn(32, 2 * inner, hidden) / hidden**0.5,
        "down": randn(32, hidden, inner) / inner**0.5,
    }
    params = in_blocks_if(fp8, plain) | {"gain": 1 + randn(hidden) / 8, "router": randn(32, hidden)}
    if not fp8:
        params |= {name: (weight, None) for name, weight in plain.items()}
    assert_equal_when_replayed(chosen_experts, params, hidden)


def in_blocks_if(fp8: bool, weights: dict[str, Tensor]) -> dict[str, Any]:
    return {name: in_blocks(weight) if fp8 else weight for name, weight in weights.items()}


RELAID: dict[str, Callable[[Tensor], Any]] = {
    "t_": lambda w: w.t_(),
    "transposed data": lambda w: setattr(w, "data", w.data.t()),
    "a part of data": lambda w: setattr(w, "data", w.data[:1]),
    "unsqueeze_": lambda w: w.unsqueeze_(0),
    "resize_": lambda w: w.resize_(2, 1),
    "another dtype": lambda w: setattr(w, "data", w.data.view(torch.int32)),
}


@pytest.mark.parametrize("name", RELAID)
def test_a_closed_over_tensor_that_has_another_shape_at_its_address_is_seen(name: str) -> None:
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    graph = graphify(lambda x: (x * weight).sum(-1))
    x = torch.tensor([1.0, 10.0])
    assert torch.equal(graph(x), (x * weight).sum(-1))
    RELAID[name](weight)
    assert torch.equal(graph(x), (x * weight).sum(-1))
    assert graph.cache_info().captures == 2
