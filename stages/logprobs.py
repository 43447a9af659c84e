"""Logprobs of likely tokens, and of a prompt's own tokens: by the model, before anything changed its logits."""

import torch
import torch.nn.functional as F
from torch import Tensor

_TOKENS_AT_ONCE = 256
"""Of a prompt: their logits, as wide as the vocabulary and in float32, are all that is held at a time."""


def top_logprobs(logits: Tensor, token_ids: Tensor, logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens [num_reqs, count] int64, first to last, and their logprobs, float32.

    From the chosen tokens' logprobs, which hold the logarithm of the sum, so that the logits are not summed again.

    Args:
        logits: [num_reqs, vocab_size].
        token_ids, logprobs: [num_reqs], as `sample` returned them; a chosen token has a probability that is not 0.
        count: at most vocab_size.
    """
    best, ids = logits.topk(count, -1)
    chosen = logits.gather(1, token_ids[:, None]).float()
    return ids, best.float() - (chosen - logprobs[:, None])


def prompt_logprobs(normed: Tensor, lm_head: Tensor, targets: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The logprobs [num_tokens] of `targets`, each behind its token, and of the `count` likeliest in its place.

    Args:
        normed: [num_tokens, hidden_size], the last layer's, normalised.
        lm_head: [vocab_size, hidden_size].
        targets: [num_tokens] int64.

    Returns:
        [num_tokens] float32; [num_tokens, count] int64 and float32, likeliest first.
    """
    parts = []
    for states, wanted in zip(normed.split(_TOKENS_AT_ONCE), targets.split(_TOKENS_AT_ONCE), strict=True):
        logprobs = F.linear(states, lm_head).float().log_softmax(-1)
        best, ids = logprobs.topk(count, -1)
        parts.append((logprobs.gather(1, wanted[:, None])[:, 0], ids, best))
    own, ids, best = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return own, ids, best
