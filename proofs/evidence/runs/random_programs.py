"""Random programs: weft gives what each means, or refuses it.

    python -m weft.proofs.evidence.runs.random_programs --law L24 --programs 20000 --out
    proofs/results

Draws programs of tensors for law L24 (`tensor_programs`), nests of transforms for law L25
(`compositions`), or functions with a compiler for law L26 (`compiled_cases`), checks the law on
each, and writes a record: how many there were, what weft refused and how often, and the smallest
case of each difference. It exits with 1 if there is one.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import attrs
import hypothesis
import torch
from hypothesis import HealthCheck, Phase, settings, strategies as st
from tqdm.auto import tqdm

from weft.errors import DeviceError
from weft.proofs._laws.captures import Tally, graph_is_eager_on_tensor_programs
from weft.proofs._laws.compiler import compiled_graphs_are_their_functions
from weft.proofs._laws.compositions import compositions_mean_their_parts
from weft.proofs._strategies.captures.tensor_programs import tensor_programs
from weft.proofs._strategies.compiled import compiled_cases
from weft.proofs._strategies.compositions.composition import compositions
from weft.proofs.checks.difference import LawViolation
from weft.proofs.evidence.environment import environment


@attrs.frozen
class Subject:
    """What a law of random programs draws and checks.

    Args:
        draw: the strategy for a device.
        check: the law: `(program, device, tally)`.
        record: the name of the record's file, before the device.
    """

    draw: Callable[[str], st.SearchStrategy[Any]]
    check: Callable[[Any, str, Tally], None]
    record: str


# The laws that this draws programs for.
SUBJECTS = {
    "L24": Subject(tensor_programs, graph_is_eager_on_tensor_programs, "random-programs"),
    "L25": Subject(lambda device: compositions(), compositions_mean_their_parts, "compositions"),
    "L26": Subject(compiled_cases, compiled_graphs_are_their_functions, "compiled"),
}

# Programs a seed.
_AT_ONCE = 50
_PHASES = [Phase.generate, Phase.shrink]
_MOST_DIFFERENCES = 20


@attrs.frozen
class Difference:
    """A program whose graph gives something else: the seed of its batch, what differs, and the
    program, made small."""

    seed: int
    violation: str
    program: str


@attrs.define
class Run:
    """The outcome of a run.

    Args:
        device, seed: of the programs; each batch of programs has the next seed.
        law: one of `SUBJECTS`.
        tally: what there was to compare.
        differences: the programs that broke the law, made small.
        device_failed: whether a program made the device fail, which ends the run.
        seconds: the time that it took.
    """

    device: str
    seed: int
    law: str = "L24"
    tally: Tally = attrs.field(factory=Tally)
    differences: list[Difference] = attrs.field(factory=list)
    device_failed: bool = False
    seconds: float = 0.0

    @property
    def refused_share(self) -> float:
        """The share of programs that weft refused."""
        # Beside the differences: a weft that refused everything would have none.
        return self.tally.refused.total() / max(self.tally.programs, 1)

    @property
    def ended(self) -> bool:
        """Whether no further program runs: there are enough differences, or the device failed."""
        return self.device_failed or len(self.differences) >= _MOST_DIFFERENCES

    def add(self, other: "Run") -> None:
        """Count another run's programs too."""
        self.tally.add(other.tally)
        self.differences += other.differences
        self.device_failed |= other.device_failed

    def __str__(self) -> str:
        tally = self.tally
        refused = _lines(tally.refused)
        text = (
            f"{tally.programs} programs on {self.device}, {tally.calls} calls, {tally.captures} captures,"
            f" {tally.replays} replays; {len(self.differences)} differences; {tally.errors} programs"
            f" raise without graphs too; {self.seconds:.0f} s\nrefused:"
            f" {self.refused_share:.1%}{refused}"
        )
        if tally.uncompiled:
            text += f"\ncaptured without their compiler: {tally.uncompiled.total()}"
            text += _lines(tally.uncompiled)
        return text

    def record(self) -> dict[str, Any]:
        """All of it for a JSON file."""
        return {
            "environment": environment(self.device),
            "hypothesis": hypothesis.__version__,
            "refused_share": round(self.refused_share, 4),
            **attrs.asdict(self),
        }


def _lines(reasons: Counter[str]) -> str:
    return "".join(f"\n  {count:6} {reason}" for reason, count in reasons.most_common())


def run(
    num_programs: int,
    device: str = "cpu",
    seed: int = 0,
    minutes: float | None = None,
    law: str = "L24",
    workers: int = 0,
) -> Run:
    """Check so many programs, or as many as there is time for.

    Args:
        num_programs: the number of programs, at least; those that make a counterexample small are
            not counted.
        minutes: the time after which no further batch of programs begins.
        law: one of `SUBJECTS`.
        workers: the number of processes that share the batches; 0: this process alone.
    """
    total = Run(device, seed, law)
    start = time.monotonic()
    seeds = itertools.count(seed)
    with tqdm(total=num_programs, unit="program") as bar:

        def is_over(num_pending: int = 0) -> bool:
            late = minutes is not None and time.monotonic() - start > 60 * minutes
            return (
                # Batches under way count as if they were done, so that no worker begins one too
                # many.
                late or total.ended or total.tally.programs + num_pending * _AT_ONCE >= num_programs
            )

        def add(batch: Run) -> None:
            total.add(batch)
            total.seconds = time.monotonic() - start
            bar.update(batch.tally.programs)
            bar.set_postfix(
                differences=len(total.differences), refused=f"{total.refused_share:.1%}"
            )

        if workers == 0:
            while not is_over():
                add(_check_batch(device, next(seeds), law))
            return total
        with ProcessPoolExecutor(
            # Not forked: a process that has used CUDA, or threads, cannot be.
            workers,
            multiprocessing.get_context("spawn"),
            _start_worker,
        ) as pool:
            pending: set[Future[Run]] = set()
            while not is_over() or pending:
                while not is_over(len(pending)) and len(pending) < workers:
                    pending.add(pool.submit(_check_batch, device, next(seeds), law))
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    add(future.result())
    return total


def _start_worker() -> None:
    """What a process does before its first program."""
    # Several processes share the cores already, and sums then have one order.
    torch.set_num_threads(1)
    # Or cuBLAS raises under deterministic algorithms
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


# No Exception, which Hypothesis would take for a failure of the case.
class _DeviceFailed(BaseException):
    """The device failed. It runs no program after that, so Hypothesis must not make this one small."""


def _check_batch(device: str, seed: int, law: str) -> Run:
    """Check the programs of one seed."""
    batch = Run(device, seed, law)
    failing: list[Any] = []
    subject = SUBJECTS[law]

    @hypothesis.seed(seed)
    @settings(
        max_examples=_AT_ONCE,
        deadline=None,
        database=None,
        phases=_PHASES,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(subject.draw(device))
    def check(program: Any) -> None:
        tally = Tally() if failing else batch.tally  # what makes a case small is not counted
        try:
            subject.check(program, device, tally)
        except LawViolation:
            failing.append(program)
            raise
        # Which program made it fail is known only if each is waited for; the last one is the best
        # guess.
        except torch.AcceleratorError as error:
            failing.append(program)
            raise _DeviceFailed(str(error).splitlines()[0]) from error

    try:
        check()
    except _DeviceFailed as error:
        batch.differences.append(
            Difference(seed, f"the device failed, which ends the run: {error}", repr(failing[-1]))
        )
        batch.device_failed = True
    except LawViolation as error:
        batch.differences.append(Difference(seed, str(error), repr(failing[-1])))
    except hypothesis.errors.Flaky as error:
        if not failing:  # the device or the strategy failed, and not a law
            raise
        # There is no smallest case of Hypothesis's own: it stopped because the same program did not
        # fail again.
        smallest = min(failing, key=lambda program: len(repr(program)))
        batch.differences.append(Difference(seed, f"not always: {error}", repr(smallest)))
    return batch


def main(arguments: Sequence[str] | None = None) -> int:
    """Check what the command line asks for, print the outcome, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--law", choices=SUBJECTS, default="L24")
    parser.add_argument(
        "--programs", type=int, default=20_000, help="how many (default: %(default)s)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        help="processes that share the programs (default: this one)",
    )
    parser.add_argument(
        "--minutes", type=float, help="the time after which no further programs are drawn"
    )
    parser.add_argument(
        "--out", type=Path, help="the folder to write the record to (default: none)"
    )
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        call = "weft.proofs.evidence.runs.random_programs --device cuda"
        raise DeviceError(call, "this machine has no CUDA device", "--device cpu")
    _start_worker()
    outcome = run(args.programs, args.device, args.seed, args.minutes, args.law, args.workers)
    for difference in outcome.differences:
        print(f"\nseed {difference.seed}: {difference.violation}\n{difference.program}")
    print(outcome)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / f"{SUBJECTS[args.law].record}-{args.device}.json"
        path.write_text(json.dumps(outcome.record(), indent=1) + "\n", encoding="utf-8")
    if outcome.differences:
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
