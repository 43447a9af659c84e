"""Sampling as a pure function: a request's seed and position fix its random numbers, in any batch, order or split."""

import torch
from torch import Tensor

from weft.ops.logits import scale
from weft.ops.parts import widened
from weft.ops.register import register
from weft.ops.splitmix import exponential, random_bits


def sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a request: the arg max where the temperature is 0, else from softmax(logits / temperature).

    Of independent exponentials E_i, the index that maximises l_i / t - log(E_i) is distributed as softmax(l / t): the
    Gumbel-max trick (Gumbel 1954; Maddison, Tarlow and Minka, 2014, arXiv 1411.0030). One operator, `weft::sample`: on
    CUDA a kernel that reads the logits once and keeps nothing of their size.

    Args:
        logits: [num_reqs, vocab_size] floating point, computed with in float32.
        temperature: [num_reqs] float32.
        seeds, positions: [num_reqs] int64; equal pairs draw equal noise.

    Returns:
        Token ids [num_reqs] int64, and [num_reqs] float32 logprobs of them under softmax(logits), temperature 1. Where
        no token can be drawn the logprob is -inf, and the id is some token's.
    """
    drawn: tuple[Tensor, Tensor] = _sample(logits, temperature, seeds, positions)
    return drawn


def reference_sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """`weft::sample` in plain torch, on any device. What is drawn moves in steps, so that it has no derivative; its
    logprob has one."""
    return choose(logits, scale(logits.detach().float(), temperature), temperature, seeds, positions)


def choose(
    logits: Tensor, scaled: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """The reference: the arg max of `scaled`, with noise unless the temperature is 0, and its logprob by `logits`; -inf
    where all of `scaled` is."""
    noise = -torch.log(exponential(random_bits(seeds, positions, logits.shape[-1])))
    token_ids = torch.where((temperature <= 0)[:, None], scaled, scaled + noise).argmax(-1)
    logprobs = widened(logits).log_softmax(-1).gather(-1, token_ids[:, None]).squeeze(-1)
    # By a subtraction, so that NaN stays NaN.
    return token_ids, logprobs - torch.where(scaled.amax(-1) == -torch.inf, torch.inf, 0.0)


def _fake(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(seeds), torch.empty_like(temperature)


_sample = register(
    "sample", "(Tensor logits, Tensor temperature, Tensor seeds, Tensor positions) -> (Tensor, Tensor)",
    cpu=reference_sample, fake=_fake, kernel="weft.ops.sample_triton:draw",
)  # fmt: skip
