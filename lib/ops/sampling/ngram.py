"""Prompt lookup: draft tokens found in a request's own tokens, as a pure function on the device."""

import torch
from torch import Tensor


def find_drafts(tokens: Tensor, lengths: Tensor, count: int, shortest: int, longest: int) -> Tensor:
    """Draft the tokens that follow the latest earlier occurrence of a request's last n-gram, for
    the largest n from `longest` down to `shortest` that occurs.

    If fewer than `count` tokens follow, the drafts start again from the first token after the
    occurrence, so that repeating text is drafted in full. (Prompt lookup decoding, Saxena, 2023,
    takes the earliest occurrence, and stops at the last known token.)

    Args:
        tokens: [num_reqs, most] integers; those past a request's length are not read.
        lengths: [num_reqs] int64, at least 1.
        count: the number of drafts for each request.
        shortest, longest: the range of n, at least 1.

    Returns:
        [num_reqs, count] int64; -1 for a request without an earlier occurrence.

    >>> find_drafts(torch.tensor([[1, 2, 3, 1, 2], [1, 2, 3, 4, 5]]), torch.tensor([5, 5]), 4, 1, 3).tolist()
    [[3, 1, 2, 3], [-1, -1, -1, -1]]
    """
    width = tokens.shape[1]
    place = torch.arange(width, device=tokens.device)
    last = (lengths - 1)[:, None]
    alive = place < last
    # At each place, the length of the match, up to and including it, with the request's last tokens
    run = torch.zeros_like(tokens, dtype=torch.int64)
    for back in range(longest):
        suffix_token = tokens.gather(1, (last - back).clamp(min=0))
        # `roll` wraps around, so the first `back` places are left out.
        alive = alive & (place >= back) & (tokens.roll(back, 1) == suffix_token)
        run = run + alive
    # The key orders matches by length and then by place, so that the latest of the longest wins.
    best, end = torch.where(run >= shortest, run * width + place, -1).max(1, keepdim=True)
    period = last - end
    ahead = torch.arange(count, device=tokens.device) % period.clamp(min=1)
    return torch.where(
        best >= 0, tokens.gather(1, (end + 1 + ahead).clamp(max=width - 1)).to(torch.int64), -1
    )
