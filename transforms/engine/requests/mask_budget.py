"""`MaskBudget`: the time that masks may take. It imports no torch, so that the process that compiles
grammars starts without it."""

import attrs


@attrs.frozen(kw_only=True)
class MaskBudget:
    """The CPU time that the masks of a step may take. Each masked request of the step has an equal
    share, for the masks of all its completions together.

    Args:
        step_seconds: in each step.
        burst_seconds: beyond that, in sum. A step that takes less than `step_seconds` pays back the
            rest.
    """

    step_seconds: float
    burst_seconds: float

    def share(self, num_requests: int) -> "MaskBudget":
        """The budget of one of `num_requests` requests. Its burst is at least a whole step's
        budget, so that a pause of the Python interpreter ends no request."""
        burst = max(self.burst_seconds / num_requests, self.step_seconds)
        return MaskBudget(step_seconds=self.step_seconds / num_requests, burst_seconds=burst)

    def owed(self, debt: float, seconds: float) -> float:
        """The debt after a step that took `seconds`, with a debt of `debt` before it."""
        return max(0.0, debt + seconds - self.step_seconds)

    def is_exceeded(self, debt: float, seconds: float) -> bool:
        """Whether such a step exceeds the budget."""
        return self.owed(debt, seconds) > self.burst_seconds
