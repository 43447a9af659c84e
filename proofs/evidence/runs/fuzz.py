"""Odd requests in numbers: whatever an engine accepts breaks no step, and says nothing forbidden.

    python -m weft.proofs.evidence.runs.fuzz --requests 5000

Draws engines and requests until so many were accepted, and checks each
(`weft.proofs._laws.engine.faults`). It prints how they ended. Where the law breaks, it prints the
smallest case and exits with 1.
"""

import argparse
import sys
import time
from collections.abc import Callable

import attrs
import hypothesis
from hypothesis import HealthCheck, Phase, settings

from weft.proofs._laws.engine.faults import Tally, faults_end_their_own_request
from weft.proofs._strategies.engine.odd import OddLoad, odd_loads
from weft.proofs.checks.difference import LawViolation

# Engines a seed.
_AT_ONCE = 40
# No database: a run is told by its seed.
_PHASES = [Phase.generate, Phase.shrink]


@attrs.define
class Fuzzed:
    """Counts of engines and requests.

    Args:
        engines: that served; `lost`: of them, with the law broken.
        tally: of their requests.
        seconds: that it took.
    """

    engines: int = 0
    lost: int = 0
    tally: Tally = attrs.field(factory=Tally)
    seconds: float = 0.0

    def __str__(self) -> str:
        tally = self.tally
        ended = ", ".join(f"{count} {reason}" for reason, count in tally.ended.most_common())
        errors = "".join(f"\n  {count:6} {error}" for error, count in tally.errors.most_common())
        return (
            f"{tally.accepted} requests accepted, {tally.masked} of them with masks and {tally.embedded}"
            f" with embeddings; {tally.refused} refused; {self.engines} engines, {self.lost} lost or"
            f" with a forbidden token; {tally.tokens} tokens in {self.seconds:.0f} s\ncompletions"
            f" ended: {ended}\nerrors:{errors}"
        )


def fuzz(
    num_requests: int, seed: int = 0, tell: Callable[[Fuzzed], None] = lambda outcome: None
) -> Fuzzed:
    """Serve odd requests until so many were accepted.

    Args:
        seed: of the first engines; those that follow have the next ones.
        tell: called now and then with what there is by then.

    Raises:
        LawViolation: of the smallest case that was found.
    """
    outcome = Fuzzed()
    begin = time.perf_counter()
    while outcome.tally.accepted < num_requests:
        _serve(outcome, seed)
        outcome.seconds = time.perf_counter() - begin
        seed = seed + 1
        tell(outcome)
    return outcome


def _serve(outcome: Fuzzed, seed: int) -> None:
    @hypothesis.seed(seed)
    @settings(
        max_examples=_AT_ONCE,
        deadline=None,
        database=None,
        phases=_PHASES,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(odd_loads())
    def serve(load: OddLoad) -> None:
        outcome.engines += 1
        try:
            faults_end_their_own_request(load, outcome.tally)
        except LawViolation:
            outcome.lost += 1
            raise

    serve()


def main() -> int:
    """Serve as many as the command line asks for, and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=5000, help="accepted ones, at least")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        outcome = fuzz(
            arguments.requests,
            arguments.seed,
            lambda outcome: print(outcome.tally.accepted, flush=True),
        )
    except LawViolation as error:
        print(error, *getattr(error, "__notes__", ()), sep="\n")
        return 1
    print(outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main())
