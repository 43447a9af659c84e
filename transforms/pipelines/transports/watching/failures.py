"""Failures: the first thing that went wrong in a run, the rank that is to blame, and the clock of
the time-outs."""

import time
from collections.abc import Callable, Collection, Sequence

import attrs

from weft.arguments.checks import Rule, check_values, is_number
from weft.effects import Program
from weft.errors import ProgramError, RankError
from weft.transforms.pipelines.machine import Machine, takes

_MOST_SECONDS = 1e6
_TIMEOUT: Rule = (
    lambda value: is_number(value, 0, _MOST_SECONDS) and value > 0,
    f"a number of seconds, as in timeout=30.0: more than 0, and {_MOST_SECONDS:.0e} at most",
)


@attrs.frozen
class Clock:
    """The clock of a monitor or a watchdog. Tests use one that they move themselves.

    Args:
        now: returns the time in seconds.
        sleep: waits for a number of seconds.
    """

    # Not the time of day: when that is set forward, every rank would look stalled.
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def check_timeout(call: str, timeout: object) -> None:
    """Raise ProgramError unless `timeout` is a positive number of seconds, of at most 1e6."""
    check_values(
        f"{call}(timeout={timeout!r})", {"timeout": _TIMEOUT}, {"timeout": timeout}, ProgramError
    )


def described(error: BaseException) -> str:
    """An error as text, or at least its type if the error cannot be printed.

    >>> described(ValueError("no such row"))
    'ValueError: no such row'
    """
    try:
        return f"{type(error).__name__}: {error}"
    # The text is user code, too. An error in it must not replace the failure that is reported.
    except Exception as worse:
        return f"{type(error).__name__}, which cannot be printed ({type(worse).__name__})"


@attrs.frozen(eq=False)
class Failure:
    """The first thing that went wrong in a run.

    Args:
        rank: the rank that failed.
        instruction: what the rank was about to do.
        cause: what happened.
        error: the exception that the rank raised, if it is in this process.
    """

    rank: int
    instruction: str
    cause: str
    error: BaseException | None = None

    def for_rank(self, rank: int, waiting: str) -> RankError:
        """The error of a rank that waits at the instruction `waiting` because of this failure."""
        problem = f"rank {self.rank} failed at '{self.instruction}': {self.cause}"
        instead = (
            f"mend what failed on rank {self.rank}; if it needs longer, a greater timeout= or"
            " --timeout"
        )
        return RankError(
            f"rank {rank}: '{waiting}'", problem, instead, self.rank, self.instruction, self.cause
        )


def blockers(
    programs: Sequence[Program],
    at: Sequence[int],
    rank: int,
    capacity: int,
    silent: Collection[int] = (),
) -> Sequence[int]:
    """The ranks that must move before a rank can.

    Args:
        programs: the programs of all ranks.
        at: for each rank, the number of effects that it has performed.
        rank: the rank that may have to wait.
        capacity: the number of messages that an edge holds.
        silent: the ranks that have stopped. They wait for nobody, and their last message may not
            have arrived.
    """
    machine = Machine(programs, capacity)
    machine.place(at)
    step = machine.next(rank)
    if step is None or rank in silent:
        return ()
    edge = takes(step)
    late = (edge.source,) if edge is not None and edge.source in silent else ()
    return machine.blockers(step) or late


def culprit(rank: int, waits_for: Callable[[int], Sequence[int]]) -> int:
    """The rank that `rank` ultimately waits for: the first rank in the chain of waits that does not
    wait itself."""
    visited = set[int]()
    # In a cycle every rank waits: stop at the first one that comes again.
    while rank not in visited and (awaited := waits_for(rank)):
        visited.add(rank)
        rank = awaited[0]
    return rank
