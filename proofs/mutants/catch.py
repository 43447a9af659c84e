"""A law run until it breaks, and what broke it."""

from typing import Any

import attrs
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from hypothesis.errors import Flaky, FlakyStrategyDefinition

from weft.proofs.difference import LawViolation
from weft.proofs.suite import Law


@attrs.frozen
class Caught:
    """A law that broke.

    Args:
        examples: cases checked until the first that broke it.
        case: the smallest case found, as it was drawn.
        violation: what was different there.
    """

    examples: int
    case: tuple[str, ...]
    violation: str

    def __str__(self) -> str:
        return f"{self.violation}\n  at example {self.examples}; the smallest case: {'; '.join(self.case)}"


@attrs.define
class _Drawing:
    """Draws, and keeps in words what was drawn."""

    data: st.DataObject
    drawn: list[str] = attrs.field(factory=list)

    def draw(self, strategy: st.SearchStrategy[Any], label: Any = None) -> Any:
        value = self.data.draw(strategy, label)
        self.drawn.append(repr(value))
        return value


def catch(law: Law, device: str = "cpu", *, max_examples: int = 200, shrinks: int = 0) -> Caught | None:
    """Check a law on up to so many cases, the same each time; None if it holds on all.

    Args:
        law: a row of `weft.proofs.suite.LAWS`.
        device: where.
        max_examples: cases.
        shrinks: once a case broke the law, how many smaller ones to try.
    """
    found: list[Caught] = []
    count = tried = 0

    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        derandomize=True,
        phases=(Phase.generate, Phase.shrink) if shrinks else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        nonlocal count, tried
        count, tried = count + (not found), tried + bool(found)
        if tried > shrinks > 0:
            return  # which Hypothesis takes for a flaky law, and gives up
        drawing: Any = _Drawing(data)
        try:
            law.check(drawing, device)
        except LawViolation as error:
            found.append(Caught(count, tuple(drawing.drawn), str(error)))
            raise

    try:
        run()
    except LawViolation:
        return attrs.evolve(found[-1], examples=found[0].examples)  # Hypothesis ends with the smallest
    except (Flaky, FlakyStrategyDefinition):
        if not found:
            raise
    return min(found, key=lambda caught: len(str(caught.case)), default=None)
