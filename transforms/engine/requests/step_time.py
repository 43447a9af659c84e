"""The seconds that a step takes, interpolated between measured steps, and the prompt tokens that
fit into a limit."""

import bisect
import itertools
from collections.abc import Sequence

import attrs

# The lengths of a step's prompts, and the seconds that it took.
Measured = tuple[Sequence[int], float]
# No step is estimated to take less than this share of the fastest that was measured, whatever its
# pairs take.
_LEAST = 0.9


@attrs.frozen
class StepTime:
    """A limit on steps with prompts, and what a step takes: seconds by its number of tokens,
    interpolated between measurements, and more for each pair of a prompt's token and one that it
    attends to, itself included.

    Args:
        limit: the most seconds of a step with prompts.
        measured: (tokens, seconds), tokens rising and seconds never falling. Fewer tokens take as
            long as the fewest; beyond the most the last line goes on.
        per_pair: seconds for each pair.
        per_read: seconds for each token that a decode attends to.
    """

    limit: float
    measured: tuple[tuple[int, float], ...]
    per_pair: float = 0.0
    per_read: float = 0.0

    def seconds(self, tokens: int, pairs: float = 0.0, reads: int = 0) -> float:
        """The seconds of a step with so many tokens of prompts and decodes, pairs of its prompts,
        and reads of its decodes.

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
        """The most tokens of a prompt, at most `num_requested`, that a step with these takes in
        within the limit; `context` of the prompt were computed before.

        >>> StepTime(0.02, ((100, 0.01), (300, 0.03))).most_tokens(500, context=0, tokens=50, pairs=0, reads=0)
        150
        """

        def exceeds(count: int) -> bool:
            return (
                self.seconds(tokens + count, pairs + pairs_of(count, context), reads) > self.limit
            )

        return bisect.bisect_left(range(1, num_requested + 1), True, key=exceeds)


def pairs_of(tokens: int, context: int) -> float:
    """The pairs of so many more tokens of a prompt, each with those before it and itself."""
    return tokens * (context + (tokens + 1) / 2)


def step_time(
    limit: float, steps: Sequence[Measured], long: Sequence[Measured], decodes: tuple[float, float]
) -> StepTime:
    """Estimate how long steps take from steps that were measured.

    Args:
        limit: of the result.
        steps: of rising numbers of tokens.
        long: a step of many prompts, and one of as many tokens in fewer, longer prompts.
        decodes: the seconds of a step of decodes after prompts of one token, and of as many after
            the long prompts.

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
    # One long step that was measured too slow must not make all others free: none takes far less
    # than the fastest did.
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
    # Noise makes steps slower, not faster
    rising = [*itertools.accumulate(reversed(without), min)][::-1]
    if reads > 0:
        per_read = max(0.0, (decodes[1] - decodes[0]) / reads)
    else:
        per_read = 0.0
    return StepTime(limit, tuple(zip(tokens, rising, strict=True)), per_pair, per_read)


def _pairs(lengths: Sequence[int]) -> float:
    return sum(pairs_of(length, 0) for length in lengths)
