"""Random numbers as a pure function of a seed, a position and a counter: SplitMix64 in int64
arithmetic, since torch supports few operations on uint64."""

import torch
from torch import Tensor

# The constants of SplitMix64, as signed numbers: int64 products wrap to the same bits.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, read as unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The output function of SplitMix64 on int64, read as unsigned: a bijection that passes
    BigCrush as a generator.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    x = (x ^ _shift(x, 30)) * MIX_1
    x = (x ^ _shift(x, 27)) * MIX_2
    return x ^ _shift(x, 31)


def random_bits(seeds: Tensor, positions: Tensor, count: int) -> Tensor:
    """Independent 64-bit random numbers for each request: a pure function of its seed and position.

    Args:
        seeds, positions: [num_reqs] int64.
        count: numbers for each request.

    Returns:
        [num_reqs, count] int64, uniform over all 2**64 values.
    """
    stream = _mix(_mix(seeds + GOLDEN) + positions * GOLDEN)
    counter = torch.arange(1, count + 1, dtype=torch.int64, device=seeds.device)
    return _mix(stream[:, None] + counter * GOLDEN)


def exponential(bits: Tensor) -> Tensor:
    """Standard exponential variates, float32, from uniform 64-bit numbers, by inversion.

    Near 0 the uniform number has 53 bits, so that small variates, which win the arg max, are
    resolved to one part in 2**24. It is converted as its upper 32 and its lower 21 bits, since a
    GPU is slow to convert 64 bits to a float.
    """
    high = _shift(bits, 32).to(torch.float32)
    low = (_shift(bits, 11) & (1 << 21) - 1).to(torch.float32)
    # Never 0, as a variate of 0 would win against any logit; the clamp below keeps it from 1, whose
    # variate is infinite.
    uniform = high * 2.0**-32 + (low + 0.5) * 2.0**-53
    return -torch.log1p(-uniform.clamp(max=1 - 2.0**-24))
