"""What stages return: the tensors between two stages, and what the last stage hands to the host."""

import attrs
from torch import Tensor

from weft.summary import Summarized
from weft.trees import axes, pytree


@pytree
@attrs.frozen(eq=False, repr=False)
class IntermediateTensors(Summarized):
    """What one stage sends to the next.

    Args:
        hidden_states: [num_tokens, hidden_size], the residual stream; the model's dtype.
        input_ids: [num_tokens] int64, the batch's with the drafts filled in; None unless the step verifies drafts.
        positions: [num_tokens, 3] int64, where the first stage found each token in time, height and width; None unless
            the model has mRoPE.
    """

    hidden_states: Tensor = attrs.field(metadata=axes("num_tokens"))
    input_ids: Tensor | None = attrs.field(default=None, metadata=axes("num_tokens"))
    positions: Tensor | None = attrs.field(default=None, metadata=axes("num_tokens"))


@pytree
@attrs.frozen(eq=False, repr=False)
class Output(Summarized):
    """What the last stage returns. Of a step that verifies drafts, which samples several tokens a request, the first
    five are [num_reqs, n, ...]: with n, in a uniform class, its query length, and else the most of all.

    Args:
        token_ids: [num_reqs] int64, the token sampled (meaningless where the batch does not sample).
        logprobs: [num_reqs] float32, the natural logarithm of the model's probability of that token, before
            temperature; -inf where no token could be drawn, and NaN where the logits were.
        logits: [num_reqs, vocab_size] float32 at each request's last token; None unless the step was built to keep
            them.
        top_ids, top_logprobs: [num_reqs, n] int64 and float32, the n likeliest tokens, by the model as above; None
            unless the step was built to find them.
        prompt_logprobs: [num_tokens] float32, those of the batch's `targets`; None unless it has them.
        prompt_top_ids, prompt_top_logprobs: [num_tokens, n], the likeliest in their place.
        num_tokens: [num_reqs] int64, how many of `token_ids` are the request's next ones, the first of them: 0 where it
            has all its tokens. None unless the step verifies drafts.
        num_drafts: [num_reqs] int64, how many drafts there were; all but one of `num_tokens` were right.
    """

    token_ids: Tensor = attrs.field(metadata=axes("num_reqs"))
    logprobs: Tensor = attrs.field(metadata=axes("num_reqs"))
    logits: Tensor | None = attrs.field(default=None, metadata=axes("num_reqs"))
    top_ids: Tensor | None = attrs.field(default=None, metadata=axes("num_reqs"))
    top_logprobs: Tensor | None = attrs.field(default=None, metadata=axes("num_reqs"))
    prompt_logprobs: Tensor | None = attrs.field(default=None, metadata=axes("num_tokens"))
    prompt_top_ids: Tensor | None = attrs.field(default=None, metadata=axes("num_tokens"))
    prompt_top_logprobs: Tensor | None = attrs.field(default=None, metadata=axes("num_tokens"))
    num_tokens: Tensor | None = attrs.field(default=None, metadata=axes("num_reqs"))
    num_drafts: Tensor | None = attrs.field(default=None, metadata=axes("num_reqs"))
