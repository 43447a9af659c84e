"""`graphify(..., verify=n)` compares replays with the function itself, and names the first operator
that differs."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft import Batch, BatchDescriptor, graphify, piecewise
from weft.errors import CaptureError, VerificationError

everywhere = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


class Scaled(nn.Module):
    """A module with a plain attribute, which no graph can see."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0
        self.shift = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) * self.factor + self.shift.to(x.device)


@everywhere
def test_a_number_that_changed_outside_is_found_with_its_operator(device: str) -> None:
    module = Scaled()
    x = torch.ones(3, device=device)
    module.shift = module.shift.to(device)
    g = graphify(module, verify=1)
    for _ in range(3):
        assert torch.equal(g(x), module(x))
    module.factor = 3.0
    with pytest.raises(VerificationError) as error:
        g(x)
    assert "Scaled(...), call 4" in str(error.value)
    assert (
        "`%2 = aten::mul.Tensor(%1, 3.0)  : float32[3]`, captured `%2 = aten::mul.Tensor(%1, 2.0)"
        in str(error.value)
    )


def test_a_tensor_that_changed_outside_is_found_with_its_operator() -> None:
    of_thread = threading.local()  # which is not looked into
    of_thread.w = torch.ones(3)
    g = graphify(lambda x: x * 2 + of_thread.w, verify=1)
    g(torch.ones(3))
    of_thread.w = torch.zeros(3)
    with pytest.raises(
        VerificationError,
        match=r"operator 1: .*add.Tensor.* reads a tensor from outside that is not",
    ):
        g(torch.ones(3))


def test_a_branch_on_python_is_found() -> None:
    flags = [True]
    g = graphify(lambda x: x + 1 if flags[0] else x.sum(), verify=1)
    g(torch.ones(3))
    flags[0] = False
    with pytest.raises(
        VerificationError, match=r"result is a tensor of shape \(3,\), and should be .* shape \(\)"
    ):
        g(torch.ones(3))


def test_only_every_nth_call_is_compared() -> None:
    factor = [2.0]
    runs = []

    def f(x: Tensor) -> Tensor:
        runs.append(None)
        return x * factor[0]

    g = graphify(f, verify=3)
    g(torch.ones(2))
    captured = len(runs)
    g(torch.ones(2))
    assert len(runs) == captured
    g(torch.ones(2))
    assert len(runs) == captured + 1
    factor[0] = 3.0
    for _ in range(2):
        assert g(torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(VerificationError, match="call 6"):
        g(torch.ones(2))


@everywhere
def test_donated_states_and_random_numbers_are_the_same(device: str) -> None:
    def step(
        state: Tensor, x: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        noise = torch.rand(3, device=x.device) + torch.rand(3, generator=generator, device=x.device)
        return state.add_(x * noise), noise

    g, state, x = (
        graphify(step, donate_argnames="state", verify=1),
        torch.zeros(3, device=device),
        torch.ones(3),
    )
    torch.manual_seed(3)
    for _ in range(4):
        state, _ = g(state, x.to(device))
    torch.manual_seed(3)
    expected = torch.zeros(3, device=device)
    for _ in range(4):
        expected, _ = step(expected, x.to(device))
    assert torch.equal(state, expected)
    assert g.cache_info().replays == 4


def test_a_padded_batch_is_compared_at_its_class() -> None:
    flag = [1]

    def f(batch: Batch) -> Batch:
        return batch if flag[0] else flag  # type: ignore[return-value]

    g = graphify(f, ladder=[BatchDescriptor.uniform(4)], verify=1)
    for _ in range(2):
        assert g(Batch.decode([1, 2, 3])).descriptor.num_reqs == 3
    flag[0] = 0
    with pytest.raises(VerificationError, match="the results have other structures"):
        g(Batch.decode([1, 2, 3]))


def test_it_is_an_option_of_pieces_and_of_copies() -> None:
    factor = [1.0]
    g = copy.copy(
        piecewise(lambda x: torch.sort(x * factor[0]).values + 1, split_at="aten::sort", verify=1)
    )
    assert g(torch.tensor([2.0, 1.0])).tolist() == [2.0, 3.0]
    factor[0] = -1.0
    with pytest.raises(VerificationError, match="operator 0"):
        g(torch.tensor([2.0, 1.0]))


def test_an_error_of_the_function_itself_is_named() -> None:
    failures: list[Any] = []

    def f(x: Tensor) -> Tensor:
        if failures:
            raise KeyError("gone")
        return x + 1

    g = graphify(f, verify=1)
    g(torch.ones(1))
    failures.append(None)
    with pytest.raises(VerificationError, match="the function raises KeyError"):
        g(torch.ones(1))


def test_equal_bits_are_needed_and_nan_equals_nan() -> None:
    scalar = [0.0]
    g = graphify(lambda x: torch.log(x) * 0 + scalar[0], verify=1)
    x = torch.tensor([-1.0, 1.0])
    for _ in range(2):
        g(x)
    scalar[0] = -0.0
    g(x)  # 0 * log(1) + -0.0 is 0.0
    h = graphify(lambda x: x * scalar[0], verify=1)
    h(x)
    scalar[0] = 0.0
    with pytest.raises(VerificationError):
        h(x)


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "1"])
def test_the_number_is_an_int(number: Any) -> None:
    with pytest.raises(CaptureError, match="verify="):
        graphify(lambda x: x, verify=number)
