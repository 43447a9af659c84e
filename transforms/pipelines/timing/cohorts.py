"""`plan_cohorts`: finds the best number of cohorts for the requests of a decode loop."""

import math
from collections.abc import Callable, Iterable, Sequence

import attrs

from weft.arguments.checks import COUNT, Rule, check_values
from weft.display.durations import duration
from weft.display.tables import Table, Tabled
from weft.effects import Run
from weft.errors import CostError, ProgramError
from weft.transforms.pipelines.timing.costs import Costs, effect_seconds
from weft.transforms.pipelines.timing.steady import seconds_per_job

_RULES: dict[str, Rule] = {
    **dict.fromkeys(("num_requests", "num_stages", "capacity"), COUNT),
    "stage_seconds": (callable, "a function from a cohort's size to the seconds of each stage"),
    "cohorts": (Iterable | None, "a list of numbers, as in cohorts=[1, 2], or None"),
}


@attrs.frozen
class CohortRow:
    """The steady state of a decode loop with one number of cohorts.

    Args:
        cohorts: the number of cohorts, which take turns.
        size: the number of requests of each cohort; the last ones may be padding.
        step_time: the seconds in which every cohort makes one step, and every request one token.
        tokens_per_second: the tokens of all requests per second; padding makes no tokens.
        bubbles: for each rank, the share of the time in which it neither runs a stage nor advances.
    """

    cohorts: int
    size: int
    step_time: float
    tokens_per_second: float
    bubbles: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The mean of the ranks' bubbles."""
        return sum(self.bubbles) / len(self.bubbles)


@attrs.frozen
class CohortPlan(Tabled):
    """The numbers of cohorts that were tried. It prints as a table, with the best one marked.

    Args:
        rows: one row for each number of cohorts.
    """

    rows: tuple[CohortRow, ...]

    @property
    def best(self) -> CohortRow:
        """The row with the most tokens per second; of rows that agree in nine digits, the one with
        the fewest cohorts."""
        # Beyond nine digits, equal plans differ by the order of their sums, and the larger number
        # of cohorts could win by rounding.
        return max(self.rows, key=lambda row: (float(f"{row.tokens_per_second:.9g}"), -row.cohorts))

    def _table(self) -> Table:
        """A table with one row per number of cohorts."""
        header = ("cohorts", "of requests", "step", "tokens/s", "bubble", "")
        return Table(header, tuple(self._cells(row) for row in self.rows))

    def _cells(self, row: CohortRow) -> tuple[str, ...]:
        numbers = (
            str(row.cohorts),
            str(row.size),
            duration(row.step_time),
            f"{row.tokens_per_second:,.0f}",
        )
        return *numbers, f"{row.bubble:.0%}", "best" if row is self.best else ""


def plan_cohorts(
    stage_seconds: Callable[[int], Sequence[float] | Costs],
    num_requests: int,
    num_stages: int,
    *,
    cohorts: Iterable[int] | None = None,
    capacity: int = 2,
) -> CohortPlan:
    """The decode loop (`decode_jobs`) in its steady state for each number of cohorts, each of
    `ceil(num_requests / cohorts)` requests. Few large cohorts leave stages idle; with many small
    cohorts, each step reads all the weights for few tokens.

    Args:
        stage_seconds: a function from the size of a cohort to the seconds of each stage, or to all
            costs of a step.
        num_requests: the number of requests that decode at the same time.
        num_stages: the number of stages and of ranks.
        cohorts: the numbers of cohorts to try. None: 1 to twice the number of stages, but at most
            the number of requests.
        capacity: as for `simulate`.

    Raises:
        ProgramError: a number less than 1, or more cohorts than requests.
        CostError: costs for another number of stages, or costs that depend on the micro-batch.

    >>> print(plan_cohorts(lambda size: [0.008 + 0.001 * size] * 2, 8, 2))
    cohorts  of requests   step  tokens/s  bubble
          1            8  32 ms       250     50%
          2            4  24 ms       333      0%  best
          3            3  33 ms       242      0%
          4            2  40 ms       200      0%
    """
    call = f"plan_cohorts(stage_seconds, {num_requests}, {num_stages}, cohorts={cohorts})"
    numbers = {"num_requests": num_requests, "num_stages": num_stages, "capacity": capacity}
    check_values(
        call, _RULES, {"stage_seconds": stage_seconds, **numbers, "cohorts": cohorts}, ProgramError
    )
    tried = (
        range(1, min(2 * num_stages, num_requests) + 1) if cohorts is None else sorted(set(cohorts))
    )
    rules: dict[str, Rule] = {
        "cohorts": (
            lambda value: value and value[0] >= 1 and value[-1] <= num_requests,
            "1 or more, and at most one a request",
        )
    }
    check_values(call, rules, {"cohorts": tried}, ProgramError)
    rows = []
    for number in tried:
        size = math.ceil(num_requests / number)
        costs = _costs(stage_seconds(size), num_stages, call)
        step_time = number * seconds_per_job(num_stages, number, costs, capacity)
        busy = (
            number * (effect_seconds(costs, Run(f"stage {stage}", 0)) + costs.advance)
            for stage in range(num_stages)
        )
        # By rounding, a rank may be busy for longer than the step.
        bubbles = tuple(
            max(0.0, 1.0 - seconds / step_time) if step_time else 0.0 for seconds in busy
        )
        rows.append(
            CohortRow(
                number,
                size,
                step_time,
                # Not `number * size`: the last cohort's padding makes no tokens.
                num_requests / step_time if step_time else math.inf,
                bubbles,
            )
        )
    return CohortPlan(tuple(rows))


def _costs(seconds_or_costs: Sequence[float] | Costs, num_stages: int, call: str) -> Costs:
    if isinstance(seconds_or_costs, Costs):
        costs = seconds_or_costs
    else:
        costs = Costs(seconds_or_costs)
    # There is a steady state only if all jobs take the same time.
    names = ("stages", "message_bytes", "output_bytes")
    same = "a cost that is the same for all micro-batches"
    values = {name: getattr(costs, name) for name in names}
    check_values(
        call, dict.fromkeys(names, (lambda each: not callable(each), same)), values, CostError
    )
    rules: dict[str, Rule] = {
        "stages": (lambda each: len(each) == num_stages, f"a cost for each of {num_stages} stages")
    }
    check_values(call, rules, {"stages": costs.stages}, CostError)
    return costs
