"""`verify`: the number of sampled tokens that a request keeps, when a step samples one after each token that it reads.

A step over `[last token, d_1 … d_k]` samples `t_0 … t_k`, each with the noise that a decode step draws at its position:
the sampler's noise is a function of the request's seed and of that position alone. So `t_0` is the request's next
token; and as long as `d_i` equals the token that was sampled in its place, `t_{i-1}`, the token `t_i` follows. The
tokens are those of decoding one by one, drawn or greedy, whatever the drafts (Daliri et al., 2024, "Coupling without
communication and drafter-invariant speculative decoding", arXiv 2408.07978). A rejection sampler (Leviathan et al.,
2023, arXiv 2211.17192) keeps only their distribution.
"""

import attrs
import torch
from torch import Tensor

from weft.batch import DRAFT, Batch
from weft.errors import RequestError
from weft.outputs import Output
from weft.state import State


def read_at(batch: Batch, num_drafts: int) -> Tensor:
    """The tokens of a batch after which the step samples, [num_reqs, n] int64: all of a request that goes on, and the
    last of a request that reads its prompt; the last token fills the row.

    In a uniform class n is its query length. With a `token_mask` n is 1 and drafts are ignored: the tokens that a
    grammar allows after a draft depend on the draft, which only the device knows.

    Args:
        num_drafts: the most drafts of a request.
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
    """The output with the number of its tokens that each request keeps.

    Args:
        state: the state before the step.
        batch: the step's batch, with the drafts filled in; negative where there is no draft.
        where: the result of `read_at`.
        out: the output, with one sampled token for each of these tokens.

    Raises:
        RequestError: the state has no `drafting`.
    """
    if state.drafting is None:
        seen, instead = "a state without `drafting`", "attrs.evolve(state, drafting=weft.state.Drafting.zeros(...))"
        raise RequestError("a stage that verifies drafts", seen, instead)
    again = where[:, 1:] == where[:, :-1]
    drafts = torch.where(again, DRAFT, batch.input_ids[where[:, 1:]])
    has_all = state.positions[batch.rows] >= state.drafting.limits[batch.rows] - 1
    num_tokens = torch.where(has_all, 0, count_right(out.token_ids, drafts) + 1)
    return attrs.evolve(out, num_tokens=num_tokens, num_drafts=(drafts >= 0).cumprod(1).sum(1))


def count_right(token_ids: Tensor, drafts: Tensor) -> Tensor:
    """The number of drafts before the first that differs from the token sampled in its place: [num_reqs] int64.

    Args:
        token_ids: [num_reqs, k + 1], the tokens sampled after each token that was read.
        drafts: [num_reqs, k].
    """
    return (drafts == token_ids[:, :-1]).cumprod(1).sum(1)
