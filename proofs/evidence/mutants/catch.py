"""The search for a case that breaks a law, and the replay of a case found before."""

from base64 import b64decode, b64encode
from collections.abc import Iterable
from typing import Any

import attrs
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from hypothesis.database import ExampleDatabase, choices_to_bytes
from hypothesis.errors import Flaky, FlakyStrategyDefinition, Unsatisfiable

from weft.proofs.checks.difference import LawViolation
from weft.proofs.evidence.runs.suite import Law


@attrs.frozen
class Caught:
    """A broken law, and the case that broke it.

    Args:
        examples: the number of cases checked, up to the first that broke it.
        case: the smallest case found, in words.
        violation: the difference in that case.
        choices: the same case as Hypothesis drew it, for `replay`.
    """

    examples: int
    case: tuple[str, ...]
    violation: str
    choices: str

    def __str__(self) -> str:
        return (
            f"{self.violation}\n  at example {self.examples}; the smallest case:"
            f" {'; '.join(self.case)}"
        )


@attrs.define
class _Drawing:
    """Draws values, and records them in words."""

    data: st.DataObject
    drawn: list[str] = attrs.field(factory=list)

    def draw(self, strategy: st.SearchStrategy[Any], label: Any = None) -> Any:
        value = self.data.draw(strategy, label)
        self.drawn.append(repr(value))
        return value


def catch(
    law: Law, device: str = "cpu", *, max_examples: int = 200, shrinks: int = 0
) -> Caught | None:
    """Check a law on some cases, the same ones each time; None if it holds on all of them.

    Args:
        law: a row of `weft.proofs.evidence.runs.suite.LAWS`.
        device: the device of the cases.
        max_examples: the most cases.
        shrinks: the most smaller cases to try once a case broke the law.
    """
    failures: list[Caught] = []
    count = tried = 0

    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        # The number of examples is part of the record, so each run must draw the same ones, and
        # must find none in a database.
        derandomize=True,
        phases=(Phase.generate, Phase.shrink) if shrinks else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        nonlocal count, tried
        # Examples are counted up to the first that breaks the law. Shrinking has a count of its
        # own, since Hypothesis has no limit for it that can be set.
        count, tried = count + (not failures), tried + bool(failures)
        if tried > shrinks > 0:
            return  # which Hypothesis takes for a flaky law, and gives up
        drawing: Any = _Drawing(data)
        try:
            law.check(drawing, device)
        except LawViolation as error:
            failures.append(Caught(count, tuple(drawing.drawn), str(error), _written(data)))
            raise

    try:
        run()
    except LawViolation:
        # Hypothesis ends with the smallest
        return attrs.evolve(failures[-1], examples=failures[0].examples)
    # Shrinking that is cut off above ends so, with failures. Without any the law itself is flaky.
    except (Flaky, FlakyStrategyDefinition):
        if not failures:
            raise
    # Where shrinking was cut off, the last failure need not be the smallest one.
    return min(failures, key=lambda caught: len(str(caught.case)), default=None)


def replay(law: Law, choices: str, device: str = "cpu") -> Caught | None:
    """Check a law on one case found before; None if it holds there.

    Args:
        law: a row of `weft.proofs.evidence.runs.suite.LAWS`.
        choices: `Caught.choices`. Another version of Hypothesis, or of the strategies, may draw
            another case from them.
        device: the device of the case.
    """
    failures: list[tuple[Caught, LawViolation]] = []

    @settings(
        deadline=None,
        database=_OneCase(b64decode(choices)),
        report_multiple_bugs=False,
        derandomize=False,
        # Only what the database returns: a new case would say nothing about the recorded one.
        phases=(Phase.reuse,),
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        if (
            failures
        ):  # Hypothesis runs what failed once more, to report it, and finds that this draws nothing
            raise failures[0][1]
        drawing: Any = _Drawing(data)
        try:
            law.check(drawing, device)
        except LawViolation as error:
            failures.append((Caught(1, tuple(drawing.drawn), str(error), _written(data)), error))
            raise

    try:
        run()
    except Unsatisfiable:
        return None  # the strategies draw nothing from these choices now
    except (LawViolation, Flaky, FlakyStrategyDefinition):
        if not failures:
            raise
    if failures:
        return failures[0][0]
    return None


def _written(data: st.DataObject) -> str:
    # The choices and not the values: models, functions and engines have no text from which they
    # could be made again.
    return b64encode(choices_to_bytes(data.conjecture_data.choices)).decode()


class _OneCase(ExampleDatabase):
    """A Hypothesis database that returns one case for every test."""

    def __init__(self, choices: bytes) -> None:
        super().__init__()
        self.choices = choices

    def fetch(self, key: bytes) -> Iterable[bytes]:
        # Hypothesis asks for these lists of the same test as well, and the case would run again.
        if key.endswith((b".secondary", b".pareto")):
            return ()
        return (self.choices,)

    def save(self, key: bytes, value: bytes) -> None:
        """Do nothing: `weft.proofs.evidence.mutants` writes the record."""

    def delete(self, key: bytes, value: bytes) -> None:
        """Do nothing: a case that no longer breaks its law is kept, and the test reports it."""
