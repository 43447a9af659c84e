"""Pearson's chi-square test."""

import torch
from torch import Tensor


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Of Pearson's chi-square test of counts against fully known probabilities."""
    expected = probabilities.double() * counts.sum()
    assert expected.min() >= 5, "the test needs five expected draws a cell"
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(
        torch.special.gammaincc(
            torch.tensor((counts.numel() - 1) / 2, dtype=torch.double), statistic / 2
        )
    )
