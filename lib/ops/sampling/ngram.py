"""Prompt lookup: draft tokens from a request's own tokens, as a pure function on the device."""

import torch
from torch import Tensor


def find_drafts(tokens: Tensor, lengths: Tensor, count: int, shortest: int, longest: int) -> Tensor:
    """The tokens after the latest earlier occurrence of a request's last n-gram, with n as large as
    possible, from `longest` down to `shortest`.

    If the known tokens end before `count` drafts are found, the drafts start again from the first
    token after the occurrence, so that text that repeats itself is drafted whole. (Prompt lookup
    decoding, Saxena, 2023, takes the earliest occurrence, and stops at the known tokens.)

    Args:
        tokens: [num_reqs, most] integers; those past a request's length are not read.
        lengths: [num_reqs] int64, at least 1.
        count: drafts for each request.
        shortest, longest: of the n-grams, at least 1.

    Returns:
        [num_reqs, count] int64; -1 for a request without an earlier occurrence.

    >>> find_drafts(torch.tensor([[1, 2, 3, 1, 2], [1, 2, 3, 4, 5]]), torch.tensor([5, 5]), 4, 1, 3).tolist()
    [[3, 1, 2, 3], [-1, -1, -1, -1]]
    """
    width = tokens.shape[1]
    place = torch.arange(width, device=tokens.device)
    last = (lengths - 1)[:, None]
    alive = place < last
    # The number of tokens up to each place that equal the last ones
    run = torch.zeros_like(tokens, dtype=torch.int64)
    for back in range(longest):
        suffix_token = tokens.gather(1, (last - back).clamp(min=0))
        alive = alive & (place >= back) & (tokens.roll(back, 1) == suffix_token)
        run = run + alive
    best, end = torch.where(run >= shortest, run * width + place, -1).max(1, keepdim=True)
    period = last - end
    ahead = torch.arange(count, device=tokens.device) % period.clamp(min=1)
    return torch.where(
        best >= 0, tokens.gather(1, (end + 1 + ahead).clamp(max=width - 1)).to(torch.int64), -1
    )
