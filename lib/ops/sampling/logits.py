"""The rules that requests apply to their logits, as pure functions of [num_reqs, vocab_size], with
parameters for each row.

`process` applies them in the order of vLLM's sampler (docs.vllm.ai,
`vllm.v1.sample.sampler.Sampler`): allowed tokens, the stop tokens of a request that is still too
short, bias, penalties (repetition, frequency, presence), temperature, min_p, top_k, top_p.
The `generate` of transformers has the same order except that min_p comes last, so that its top_p
also counts tokens that min_p then drops.
"""

from collections.abc import Iterable

import attrs
import torch
from torch import Tensor

# The columns of a table's `floats`. The margin is -log(min_p): the largest distance from the best
# scaled logit at which a token is kept.
FLOATS = ("temperature", "top_p", "margin", "repetition", "frequency", "presence")
TEMPERATURE, TOP_P, MARGIN, REPETITION, FREQUENCY, PRESENCE = map(FLOATS.index, FLOATS)

# The columns of a table's `ints`.
INTS = ("seed", "features", "top_k", "min_len")
SEED, FEATURES, TOP_K, MIN_LEN = map(INTS.index, INTS)

PENALTIES = 1
BIAS = 2
ALLOWED = 4
STOPS = 8
FILTERS = 16
"""Bits of the features that a request uses. The parameters of other features are not read."""

# The sign bit in a table's int16 `counts`: the prompt contains the token. The other bits count how
# often it was generated.
IN_PROMPT = -(1 << 15)

# The largest count of a token; even a penalty of 0.01 then subtracts about 300.
MOST_COUNTED = (1 << 15) - 1


@attrs.frozen(eq=False)
class Rules:
    """The rows of a `weft.ops.sampling.table.SamplingTable` for some requests, in the requests'
    order.

    An int32 mask holds one bit per token, the lowest bit first.
    """

    floats: Tensor
    ints: Tensor
    allowed: Tensor
    stops: Tensor
    bias_ids: Tensor
    bias: Tensor
    counts: Tensor

    def uses(self, feature: int) -> Tensor:
        """[num_reqs, 1] bool: whether each request uses one of the features."""
        return (self.ints[:, FEATURES, None] & feature) != 0


def pack_bits(token_ids: Iterable[int], vocab_size: int) -> Tensor:
    """A mask with the bits of these tokens: [ceil(vocab_size / 32)] int32, on the CPU.

    >>> pack_bits([0, 1, 33], 40).tolist()
    [3, 2]
    """
    words: dict[int, int] = {}
    for token in token_ids:
        words[token // 32] = words.get(token // 32, 0) | 1 << token % 32
    # In int64, as a word with bit 31 set is too large for int32; the conversion keeps its bits.
    mask = torch.zeros(-(-vocab_size // 32), dtype=torch.int64)
    mask[torch.tensor(list(words), dtype=torch.int64)] = torch.tensor(
        list(words.values()), dtype=torch.int64
    )
    return mask.to(torch.int32)


def unpack_bits(mask: Tensor, vocab_size: int) -> Tensor:
    """Unpack a mask [num_reqs, ceil(vocab_size / 32)] int32 to [num_reqs, vocab_size] bool."""
    # The shift of a negative word copies its sign bit, and `& 1` drops the copies.
    bits = (mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)) & 1
    return bits.flatten(1)[:, :vocab_size] != 0


def bar(logits: Tensor, barred: Tensor) -> Tensor:
    """Set logits to -inf where `barred` [num_reqs, vocab_size] is true."""
    return logits.masked_fill(barred, -torch.inf)


def add_bias(logits: Tensor, token_ids: Tensor, bias: Tensor) -> Tensor:
    """Add `bias` to the logits of `token_ids`, [num_reqs, most] each; an id of -1 is skipped."""
    # A skipped id adds 0 to token 0: a mask would need the host to know how many there are.
    return logits.scatter_add(
        1, token_ids.clamp(min=0).to(torch.int64), torch.where(token_ids < 0, 0.0, bias)
    )


def penalise_repetition(logits: Tensor, occurred: Tensor, penalty: Tensor) -> Tensor:
    """Divide positive logits by the penalty and multiply negative ones by it, for tokens in the
    prompt or the completion.

    Source: Keskar et al., "CTRL", 2019, arXiv 1909.05858, in the form of transformers.
    """
    penalised = torch.where(logits < 0, logits * penalty[:, None], logits / penalty[:, None])
    return torch.where(occurred, penalised, logits)


def penalise_frequency(logits: Tensor, generated: Tensor, penalty: Tensor) -> Tensor:
    """Subtract the penalty times the number of times that a token was generated [num_reqs,
    vocab_size], as in OpenAI's API."""
    return logits - penalty[:, None] * generated


def penalise_presence(logits: Tensor, generated: Tensor, penalty: Tensor) -> Tensor:
    """Subtract the penalty once from every token that was generated, as in OpenAI's API."""
    return logits - torch.where(generated > 0, penalty[:, None], 0.0)


def scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """(logits - the largest logit) / temperature, or the unchanged logits if the temperature is 0
    (greedy).

    At the smallest temperatures the differences overflow to -inf, and so never tie with the
    largest, which stays 0.
    """
    greedy = (temperature <= 0)[:, None]
    top = logits.amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)  # all tokens are barred: avoid -inf - -inf
    return torch.where(
        greedy, logits, (logits - top) / torch.where(greedy, 1.0, temperature[:, None])
    )


def keep_min_p(scaled: Tensor, margin: Tensor) -> Tensor:
    """Bar tokens whose probability is less than min_p times the largest one; margin is -log(min_p)
    (Nguyen et al., 2024, arXiv 2407.01082)."""
    return bar(scaled, scaled.amax(-1, keepdim=True) - scaled > margin[:, None])


def keep_top_k(scaled: Tensor, top_k: Tensor) -> Tensor:
    """Bar all but the k largest logits and those that tie with the k-th; a k of 0 keeps all (Fan et
    al., 2018, arXiv 1805.04833)."""
    last = torch.where(top_k <= 0, scaled.shape[1], top_k).clamp(max=scaled.shape[1]) - 1
    # Not `topk`, which takes one k for all rows, as a number on the host.
    least = scaled.sort(-1, descending=True).values.gather(1, last[:, None])
    return bar(scaled, scaled < least)


def keep_top_p(scaled: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of the likeliest tokens whose total probability reaches top_p, and
    tokens that tie with its last (Holtzman et al., 2019, arXiv 1904.09751)."""
    ordered = scaled.sort(-1, descending=True).values
    # Summed in float64, since the rounding of a float32 sum over a vocabulary could move the cut.
    mass = (ordered - ordered[:, :1]).exp().double().cumsum(-1)
    last = (
        (mass < top_p.double()[:, None] * mass[:, -1:])
        .sum(-1, keepdim=True)
        .clamp(max=scaled.shape[1] - 1)
    )
    return torch.where((top_p < 1)[:, None], bar(scaled, scaled < ordered.gather(1, last)), scaled)


def adjust(
    logits: Tensor, rules: Rules, positions: Tensor, token_mask: Tensor | None = None
) -> Tensor:
    """Apply the rules of `process` that precede temperature, which can change the most likely
    token."""
    vocab = logits.shape[1]
    if token_mask is not None:
        logits = bar(logits, ~unpack_bits(token_mask, vocab))
    logits = bar(logits, rules.uses(ALLOWED) & ~unpack_bits(rules.allowed, vocab))
    too_short = (positions + 1 < rules.ints[:, MIN_LEN])[:, None]
    logits = bar(logits, rules.uses(STOPS) & too_short & unpack_bits(rules.stops, vocab))
    logits = torch.where(rules.uses(BIAS), add_bias(logits, rules.bias_ids, rules.bias), logits)
    generated = (rules.counts & ~IN_PROMPT).float()
    penalised = penalise_repetition(logits, rules.counts != 0, rules.floats[:, REPETITION])
    penalised = penalise_frequency(penalised, generated, rules.floats[:, FREQUENCY])
    penalised = penalise_presence(penalised, generated, rules.floats[:, PRESENCE])
    return torch.where(rules.uses(PENALTIES), penalised, logits)


def process(
    logits: Tensor, rules: Rules, positions: Tensor, token_mask: Tensor | None = None
) -> Tensor:
    """Apply all rules: the softmax of the result is the distribution of tokens, and its arg max is
    the greedy token.

    Args:
        logits: [num_reqs, vocab_size], converted to float32.
        rules: the rules of these requests.
        positions: [num_reqs] int64, the position of the last token that the model has read.
        token_mask: [num_reqs, ceil(vocab_size / 32)] int32, with a bit for each token that a
            grammar allows; None: all are allowed.

    Returns:
        [num_reqs, vocab_size] float32, -inf for tokens that cannot be drawn.
    """
    scaled = scale(
        adjust(logits.float(), rules, positions, token_mask), rules.floats[:, TEMPERATURE]
    )
    kept = keep_min_p(scaled, rules.floats[:, MARGIN])
    kept = keep_top_p(keep_top_k(kept, rules.ints[:, TOP_K]), rules.floats[:, TOP_P])
    return torch.where(rules.uses(FILTERS), kept, scaled)
