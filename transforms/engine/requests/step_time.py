"""Estimates the seconds that a step takes, from measured steps, and the prompt tokens that fit into
a time limit."""

import bisect
import itertools
from collections.abc import Sequence

import attrs

# The lengths of a step's prompts, and the seconds that the step took.
Measured = tuple[Sequence[int], float]
# Without its pairs, no step is estimated to take less than this share of the fastest measured step.
_LEAST = 0.9


@attrs.frozen
class StepTime:
    """A time limit on steps with prompts, and an estimate of a step's time: seconds by its number
    of tokens, interpolated between measurements, plus a cost for each pair of a prompt token and a
    token that it attends to (itself included), and for each token that a decode attends to.

    Args:
        limit: the most seconds of a step with prompts.
        measured: (tokens, seconds), with rising tokens and non-decreasing seconds. A step of fewer
            tokens than the first takes as long as the first; beyond the last, the last line is
            extrapolated.
        per_pair: seconds for each pair.
        per_read: seconds for each token that a decode attends to.
    """

    limit: float
    measured: tuple[tuple[int, float], ...]
    per_pair: float = 0.0
    per_read: float = 0.0

    def seconds(self, tokens: int, pairs: float = 0.0, reads: int = 0) -> float:
        """The estimated seconds of a step with `tokens` tokens, of prompts and decodes; `pairs` are
        those of its prompts, `reads` the tokens that its decodes attend to.

        >>> StepTime(1.0, ((100, 0.01), (300, 0.03)), per_pair=1e-6).seconds(150, pairs=1000)
        0.016
        """
        last = len(self.measured) - 1
        place = min(bisect.bisect_left(self.measured, tokens, key=lambda one: one[0]), last)
        more, later = self.measured[place]
        fewer, sooner = self.measured[place - 1] if place else (0, later)
        share = (tokens - fewer) / (more - fewer)
        return sooner + share * (later - sooner) + self.per_pair * pairs + self.per_read * reads

    def most_tokens(
        self, num_requested: int, context: int, tokens: int, pairs: float, reads: int
    ) -> int:
        """The most tokens of a prompt, at most `num_requested`, that can join a step with these
        tokens, pairs and reads within the limit; `context` tokens of the prompt were computed
        before.

        >>> StepTime(0.02, ((100, 0.01), (300, 0.03))).most_tokens(500, context=0, tokens=50, pairs=0, reads=0)
        150
        """

        def exceeds(count: int) -> bool:
            return (
                self.seconds(tokens + count, pairs + pairs_of(count, context), reads) > self.limit
            )

        return bisect.bisect_left(range(1, num_requested + 1), True, key=exceeds)


def pairs_of(tokens: int, context: int) -> float:
    """The pairs of `tokens` more tokens of a prompt, each with itself and all tokens before it."""
    return tokens * (context + (tokens + 1) / 2)


def step_time(
    limit: float, steps: Sequence[Measured], long: Sequence[Measured], decodes: tuple[float, float]
) -> StepTime:
    """Estimate how long steps take from measured steps.

    Args:
        limit: of the result.
        steps: of rising numbers of tokens.
        long: a step of many prompts, and one of as many tokens in fewer, longer prompts.
        decodes: the seconds of a step of decodes after prompts of one token, and of as many decodes
            after the long prompts.

    >>> steps = ([1] * 32, 0.01), ([1] * 64, 0.0102)
    >>> estimate = step_time(0.1, steps, (steps[1], ([64], 0.01222)), (0.004, 0.0103))
    >>> f"{estimate.seconds(48):.4f} {estimate.seconds(64, pairs_of(64, 0)):.4f} {estimate.per_read:.0e}"
    '0.0101 0.0122 1e-04'
    """
    tokens, pairs, seconds = zip(
        *((sum(lengths), _pairs(lengths), took) for lengths, took in steps), strict=True
    )
    (many, sooner), (few, later) = long
    more = _pairs(few) - _pairs(many)
    reads = sum(few) - len(few)
    if more > 0:
        per_pair = max(0.0, (later - sooner) / more)
    else:
        per_pair = 0.0
    # If the long step was measured too slow, the cost per pair would leave nothing for the other
    # steps: cap it, so that each keeps most of the fastest step's time.
    per_pair = min(
        [
            per_pair,
            *(
                (took - _LEAST * min(seconds)) / num_pairs
                for took, num_pairs in zip(seconds, pairs, strict=True)
            ),
        ]
    )
    without = [
        max(0.0, took - per_pair * num_pairs)
        for took, num_pairs in zip(seconds, pairs, strict=True)
    ]
    # Noise only makes steps slower, so a faster step of more tokens bounds those of fewer.
    rising = [*itertools.accumulate(reversed(without), min)][::-1]
    if reads > 0:
        per_read = max(0.0, (decodes[1] - decodes[0]) / reads)
    else:
        per_read = 0.0
    return StepTime(limit, tuple(zip(tokens, rising, strict=True)), per_pair, per_read)


def _pairs(lengths: Sequence[int]) -> float:
    return sum(pairs_of(length, 0) for length in lengths)
