"""Verifying drafts: how many of the tokens that were sampled, one behind each token that was read, are a request's own.

A step over `[last token, d_1 … d_k]` samples `t_0 … t_k`, each with the noise that a decode step draws at its position:
the sampler's noise is a function of the request's seed and of that position alone. So `t_0` is what the request says
next, and while `d_i` is the token that was sampled in its place, `t_{i-1}`, so is `t_i`. Tokens are those of decoding
one by one, drawn or greedy, whatever was drafted; a rejection sampler (Leviathan et al., 2023, arXiv 2211.17192) keeps
no more than their distribution. (Daliri et al., 2024, "Coupling without communication and drafter-invariant
speculative decoding", arXiv 2408.07978.)
"""

import attrs
import torch
from torch import Tensor

from weft.batch import DRAFT, Batch
from weft.errors import RequestError
from weft.outputs import Output
from weft.state import State


def read_at(batch: Batch, num_drafts: int) -> Tensor:
    """The tokens of a batch behind which tokens are sampled: [num_reqs, n] int64, of a request that goes on all, and of
    one that reads its prompt the last; and then the last again. In a uniform class n is its query length. With a
    `token_mask` n is 1, and drafts hold for nothing: what a grammar allows behind one depends on it, and the device
    alone knows it.

    Args:
        num_drafts: of a request at most.
    """
    count = batch.descriptor.query_len or num_drafts + 1
    if batch.token_mask is not None:
        count = 1
    starts = batch.query_start_loc.to(torch.int64)
    last = starts[1:, None] - 1
    first = torch.where(batch.goes_on[:, None], starts[:-1, None], last)
    ahead = torch.arange(count, device=starts.device)
    return torch.minimum(first + ahead, last).clamp(min=0)


def verify(state: State, batch: Batch, where: Tensor, out: Output) -> Output:
    """The output, and how many of its tokens hold.

    Args:
        state: before the step.
        batch: of the step, with the drafts filled in; what was not drafted is negative.
        where: of `read_at`.
        out: of each of these tokens one that was sampled.

    Raises:
        RequestError: the state has no `drafting`.
    """
    if state.drafting is None:
        seen, instead = "a state without `drafting`", "attrs.evolve(state, drafting=weft.drafting.Drafting.zeros(...))"
        raise RequestError("a stage that verifies drafts", seen, instead)
    again = where[:, 1:] == where[:, :-1]
    drafts = torch.where(again, DRAFT, batch.input_ids[where[:, 1:]])
    has_all = state.positions[batch.rows] >= state.drafting.limits[batch.rows] - 1
    num_tokens = torch.where(has_all, 0, count_right(out.token_ids, drafts) + 1)
    return attrs.evolve(out, num_tokens=num_tokens, num_drafts=(drafts >= 0).cumprod(1).sum(1))


def count_right(token_ids: Tensor, drafts: Tensor) -> Tensor:
    """How many drafts are what was sampled in their places, up to the first that is not: [num_reqs] int64.

    Args:
        token_ids: [num_reqs, k + 1], one behind each token that was read.
        drafts: [num_reqs, k].
    """
    return (drafts == token_ids[:, :-1]).cumprod(1).sum(1)
