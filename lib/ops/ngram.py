"""Prompt lookup: drafts found in a request's own tokens, as a pure function on the device."""

import torch
from torch import Tensor


def find_drafts(tokens: Tensor, lengths: Tensor, count: int, shortest: int, longest: int) -> Tensor:
    """What follows the latest earlier occurrence of a request's last tokens: of as many as possible, from `longest`
    down to `shortest`.

    Where what is known ends behind that occurrence, it goes on from the first of what followed, again: text that
    repeats itself is drafted whole. (Prompt lookup decoding: Saxena, 2023; there the earliest occurrence, and no more
    than what is known.)

    Args:
        tokens: [num_reqs, most] integers; what lies behind a request's length is not read.
        lengths: [num_reqs] int64, at least 1.
        count: drafts a request.
        shortest, longest: of the n-grams, from 1 on.

    Returns:
        [num_reqs, count] int64; -1 for a request none of whose n-grams stood there before.

    >>> find_drafts(torch.tensor([[1, 2, 3, 1, 2], [1, 2, 3, 4, 5]]), torch.tensor([5, 5]), 4, 1, 3).tolist()
    [[3, 1, 2, 3], [-1, -1, -1, -1]]
    """
    width = tokens.shape[1]
    place = torch.arange(width, device=tokens.device)
    last = (lengths - 1)[:, None]
    alive = place < last
    run = torch.zeros_like(tokens, dtype=torch.int64)  # how many tokens up to each place are the last ones
    for back in range(longest):
        wanted = tokens.gather(1, (last - back).clamp(min=0))
        alive = alive & (place >= back) & (tokens.roll(back, 1) == wanted)
        run = run + alive
    best, end = torch.where(run >= shortest, run * width + place, -1).max(1, keepdim=True)
    period = last - end
    ahead = torch.arange(count, device=tokens.device) % period.clamp(min=1)
    return torch.where(best >= 0, tokens.gather(1, (end + 1 + ahead).clamp(max=width - 1)).to(torch.int64), -1)
