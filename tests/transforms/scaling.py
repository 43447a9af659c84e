"""Stages that are easy to compute by hand: each multiplies by its parameter."""

import torch
from torch import Tensor

LAW = "a pipeline is its composition"


def scale(p: Tensor, s: Tensor, batch: Tensor, x: Tensor | None) -> tuple[Tensor, Tensor]:
    """Multiplies by its parameter, and sums its inputs in its state."""
    y = (batch if x is None else x) * p
    return s + y.sum(), y


def stepped(s: Tensor, batch: Tensor, out: Tensor) -> Tensor:
    return s + 100 * out.sum() + batch.sum()


PARAMS, STATES = tuple(torch.tensor([2.0, 3.0, 5.0])), tuple(torch.zeros(3))
