"""Draws of `sample` have the documented distribution, and neighbouring streams are independent.

A chi-square test rejects a right implementation in 1 of 10,000 cases, and the seeds are fixed.
"""

import pytest
import torch
from chi_square import p_value
from torch import Tensor

from weft.ops.sampling.sample import sample

LOGITS = torch.tensor([1.5, -2.0, 0.0, 0.5, 3.0, -0.5, 1.0])
DRAWS = 20_000


def draw_tokens(temperature: float, seeds: Tensor, positions: Tensor) -> Tensor:
    count = len(seeds)
    return sample(LOGITS.expand(count, -1), torch.full((count,), temperature), seeds, positions)[0]


STREAMS = {
    "positions of one seed": (torch.full((DRAWS,), 77), torch.arange(DRAWS)),
    "seeds at one position": (torch.arange(DRAWS), torch.full((DRAWS,), 5)),
    "far seeds": (torch.arange(DRAWS) * 0x1234567 - 2**62, torch.full((DRAWS,), 0)),
    "seeds and positions together": (torch.arange(DRAWS), torch.arange(DRAWS)),
}


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("stream", STREAMS)
def test_samples_are_distributed_as_softmax(stream: str, temperature: float) -> None:
    drawn = draw_tokens(temperature, *STREAMS[stream])
    counts = torch.bincount(drawn, minlength=len(LOGITS))
    assert p_value(counts, (LOGITS / temperature).softmax(-1)) > 1e-4


@pytest.mark.parametrize(
    "step",
    [(0, 1), (1, 0), (1, -1), (1, 1), (0, 16)],
    ids=lambda s: f"seed{s[0]:+}position{s[1]:+}",
)
def test_neighbours_draw_independently(step: tuple[int, int]) -> None:
    """All pairs of tokens of two neighbouring streams, against the product of their probabilities."""
    seeds = torch.arange(DRAWS) // 100 * 2
    positions = torch.arange(DRAWS) % 100 * 32 + 1
    first = draw_tokens(2.0, seeds, positions)
    second = draw_tokens(2.0, seeds + step[0], positions + step[1])
    probabilities = (LOGITS / 2.0).softmax(-1)
    counts = torch.bincount(first * len(LOGITS) + second, minlength=len(LOGITS) ** 2)
    assert p_value(counts, torch.outer(probabilities, probabilities).flatten()) > 1e-4


def test_rows_of_a_batch_are_sampled_each_at_its_own_temperature() -> None:
    """Greedy and random rows in one batch draw what they draw alone; logprobs are those of
    temperature 1."""
    temperature = torch.tensor([0.0, 1.0, 0.0, 2.0, 1e-6])
    logits = LOGITS.expand(5, -1)
    seeds = torch.arange(5)
    positions = torch.arange(5)
    tokens, logprobs = sample(logits, temperature, seeds, positions)
    alone = [
        sample(logits[i : i + 1], temperature[i : i + 1], seeds[i : i + 1], positions[i : i + 1])[0]
        for i in range(5)
    ]
    assert torch.equal(tokens, torch.cat(alone))
    assert tokens[[0, 2, 4]].tolist() == [4, 4, 4]
    assert torch.equal(logprobs, LOGITS.log_softmax(-1)[tokens])


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-39, 1e-44])
def test_the_limit_of_small_temperatures_is_greedy(temperature: float) -> None:
    """Sampling is greedy at tiny temperatures, down to the smallest float32."""
    drawn = draw_tokens(temperature, torch.arange(20), torch.arange(20))
    assert drawn.tolist() == [4] * 20
