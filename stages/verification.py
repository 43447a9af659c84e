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

from weft.batch import Batch
from weft.errors import RequestError
from weft.outputs import Output
from weft.state import State


def verify(state: State, batch: Batch, input_ids: Tensor, out: Output) -> Output:
    """The output, and how many of its tokens hold.

    Args:
        state: before the step.
        batch: of the step.
        input_ids: [num_tokens] int64, the batch's with the drafts filled in; what was not drafted is negative.
        out: of each token that was read one that was sampled.

    Raises:
        RequestError: the state has no `drafting`.
    """
    if state.drafting is None:
        seen = "a state without `drafting`"
        raise RequestError("a stage that verifies drafts", seen, "attrs.evolve(state, drafting=Drafting.zeros(...))")
    each, drafts = batch.descriptor.query_len or 1, input_ids[:0].view(len(batch.rows), 0)
    if each > 1:
        drafts = input_ids.view(-1, each)[:, 1:]
    right = count_right(out.token_ids.view(len(batch.rows), -1), drafts)
    has_all = state.positions[batch.rows] >= state.drafting.limits[batch.rows] - 1
    return attrs.evolve(
        out, num_tokens=torch.where(has_all, 0, right + 1), num_drafts=(drafts >= 0).cumprod(1).sum(1)
    )


def count_right(token_ids: Tensor, drafts: Tensor) -> Tensor:
    """How many drafts are what was sampled in their places, up to the first that is not: [num_reqs] int64.

    Args:
        token_ids: [num_reqs, k + 1], one behind each token that was read.
        drafts: [num_reqs, k].
    """
    return (drafts == token_ids[:, : drafts.shape[1]]).cumprod(1).sum(1)
