"""The seconds that a step takes, by a line through measured ones, and the prompt tokens that fit into a limit."""

import itertools
import math
from collections.abc import Iterable, Sequence

import attrs
import torch

_NO_LIMIT = 2**31
_FORMS = [form for size in (3, 2, 1) for form in itertools.combinations(range(3), size)]
"""The coefficients that may be other than zero."""


@attrs.frozen
class StepTime:
    """A limit on steps with prompts, and what a step takes: `fixed + per_token * tokens + per_pair * pairs` seconds. A
    pair is a token and one that it attends to, itself included.

    Args:
        limit: the most seconds of a step with prompts.
    """

    limit: float
    fixed: float
    per_token: float
    per_pair: float

    @property
    def room(self) -> float:
        """The seconds that a step has for its tokens."""
        return self.limit - self.fixed

    def seconds(self, tokens: int, context: int) -> float:
        """The seconds that so many tokens of a request add to a step, after the `context` that were computed before."""
        return self.per_token * tokens + self.per_pair * pairs(tokens, context)

    def most_tokens(self, seconds: float, context: int) -> int:
        """The most tokens of such a request that take no longer than this.

        >>> StepTime(limit=0.05, fixed=0.01, per_token=1e-5, per_pair=0.0).most_tokens(0.02, context=100)
        2000
        """
        if seconds <= 0:
            return 0
        linear = self.per_token + self.per_pair * (context + 0.5)
        root = linear + math.sqrt(linear * linear + 2 * self.per_pair * seconds)
        if root * _NO_LIMIT <= 2 * seconds:
            return _NO_LIMIT
        count = round(2 * seconds / root)
        return count if self.seconds(count, context) <= seconds else count - 1


def pairs(tokens: int, context: int) -> float:
    """The pairs of so many more tokens of a request."""
    return tokens * (context + (tokens + 1) / 2)


def fit(steps: Iterable[tuple[int, float]], limit: float) -> StepTime:
    """The line with the least squares of relative errors, none of whose coefficients is negative.

    Args:
        steps: the tokens of a step with one prompt, from its start, and the seconds that it took.
        limit: of the result.

    >>> fit([(1, 0.0101), (100, 0.02), (400, 0.05)], limit=0.1).most_tokens(0.03005, context=0)
    300
    """
    found = [*steps]
    sizes = [(1.0, float(tokens), pairs(tokens, 0)) for tokens, _ in found]
    rows = [[x / seconds for x in row] for row, (_, seconds) in zip(sizes, found, strict=True)]
    matrix = torch.tensor(rows, dtype=torch.float64)
    return StepTime(limit, *min((_solution(matrix, form) for form in _FORMS), key=lambda own: _error(matrix, own)))


def _solution(matrix: torch.Tensor, form: Sequence[int]) -> list[float]:
    """The least squares for these coefficients alone; all zeros if one of them would be negative."""
    scale = matrix[:, form].norm(dim=0)
    ones = torch.ones(len(matrix), 1, dtype=torch.float64)
    own = torch.linalg.lstsq(matrix[:, form] / scale, ones, driver="gelsd").solution[:, 0] / scale
    found = [0.0] * 3
    if bool((own >= 0).all()):
        for place, value in zip(form, own.tolist(), strict=True):
            found[place] = value
    return found


def _error(matrix: torch.Tensor, own: Sequence[float]) -> float:
    return float((matrix @ torch.tensor(own, dtype=torch.float64) - 1).square().sum())
