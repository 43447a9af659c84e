"""Functions that `torch.compile` has compiled, inside a capture."""

import pytest
import torch
from torch import Tensor

LAW = "graphify(compiled) is compiled"
X = torch.rand(3, 4)
BACKENDS = ("eager", "aot_eager", "inductor")


@pytest.fixture(autouse=True)
def reset() -> None:
    torch.compiler.reset()


def scaled(x: Tensor) -> Tensor:
    return torch.relu(x * 2 - 1)


def assert_bits(result: Tensor, expected: Tensor) -> None:
    assert torch.equal(result, expected), LAW
