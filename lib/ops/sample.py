"""Sampling as a pure function: a request's seed and position fix its random numbers, in any batch, order or split."""

import torch
from torch import Tensor

from weft.ops.paged_attention import no_triton, triton_version

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, taken as unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The output function of SplitMix64 on int64, taken as unsigned: a bijection that passes BigCrush as a generator.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    x = (x ^ _shift(x, 30)) * MIX_1
    x = (x ^ _shift(x, 27)) * MIX_2
    return x ^ _shift(x, 31)


def random_bits(seeds: Tensor, positions: Tensor, count: int) -> Tensor:
    """Independent 64-bit random numbers for each request: a pure function of its seed and position.

    Args:
        seeds, positions: [num_reqs] int64.
        count: numbers a request.

    Returns:
        [num_reqs, count] int64, uniform over all 2**64 values.
    """
    stream = _mix(_mix(seeds + GOLDEN) + positions * GOLDEN)
    counter = torch.arange(1, count + 1, dtype=torch.int64, device=seeds.device)
    return _mix(stream[:, None] + counter * GOLDEN)


def exponential(bits: Tensor) -> Tensor:
    """Standard exponential variates, float32, from uniform 64-bit numbers, by inversion.

    The uniform is taken near 0 with 53 bits, so that small variates (which win) are resolved to one part in 2**24.
    """
    uniform = (_shift(bits, 11).to(torch.float32) + 0.5) * 2.0**-53
    return -torch.log1p(-uniform.clamp(max=1 - 2.0**-24))


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
        Token ids [num_reqs] int64, and [num_reqs] float32 logprobs of them under softmax(logits), temperature 1.
    """
    drawn: tuple[Tensor, Tensor] = torch.ops.weft.sample(logits, temperature, seeds, positions)
    return drawn


def _on_cpu(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The reference."""
    logits = logits.float()
    noise = -torch.log(exponential(random_bits(seeds, positions, logits.shape[-1])))
    greedy = (temperature <= 0)[:, None]
    # Differences to the largest, so that the smallest temperature overflows to -inf and never to a tie.
    scaled = (logits - logits.amax(-1, keepdim=True)) / torch.where(greedy, 1.0, temperature[:, None])
    token_ids = torch.where(greedy, logits, scaled + noise).argmax(-1)
    logprobs = logits.log_softmax(-1).gather(-1, token_ids[:, None]).squeeze(-1)
    return token_ids, logprobs


def _on_cuda(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    if triton_version() is None:
        raise no_triton(f"sample(logits on {logits.device}, …)")
    # Not at the top: a machine without triton can still import weft and run on its CPU.
    from weft.ops.sample_triton import draw

    return draw(logits, temperature, seeds, positions)


def _fake(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(seeds), torch.empty_like(temperature)


torch.library.define(
    "weft::sample", "(Tensor logits, Tensor temperature, Tensor seeds, Tensor positions) -> (Tensor, Tensor)"
)
torch.library.impl("weft::sample", "CPU", _on_cpu)
torch.library.impl("weft::sample", "CUDA", _on_cuda)
torch.library.register_fake("weft::sample", _fake)
