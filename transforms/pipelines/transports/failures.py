"""What went wrong on a rank, and how the others find out which one it was."""

from collections.abc import Callable, Collection, Sequence

import attrs

from weft.arguments import is_number
from weft.effects import Program
from weft.errors import ProgramError, RankError
from weft.transforms.pipelines.checker import Machine, takes

_MOST_SECONDS = 1e6


def check_timeout(call: str, timeout: object) -> None:
    """Raise ProgramError unless it is a number of seconds."""
    if not is_number(timeout, 0, _MOST_SECONDS) or timeout == 0:
        instead = f"timeout=30.0: more than 0, and {_MOST_SECONDS:.0e} at most"
        raise ProgramError(f"{call}(timeout={timeout!r})", "no number of seconds", instead)


def described(error: BaseException) -> str:
    """An error in words; one whose own words fail says at least what it is.

    >>> described(ValueError("no such row"))
    'ValueError: no such row'
    """
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as worse:
        return f"{type(error).__name__}, which cannot be printed ({type(worse).__name__})"


@attrs.frozen(eq=False)
class Failure:
    """The first thing that went wrong in a run.

    Args:
        rank: where.
        instruction: what it was about to do.
        cause: what happened.
        error: what it raised, where that is at hand.
    """

    rank: int
    instruction: str
    cause: str
    error: BaseException | None = None

    def for_rank(self, rank: int, waiting: str) -> RankError:
        """The error of a rank that this failure keeps waiting."""
        seen = f"rank {self.rank} failed at '{self.instruction}': {self.cause}"
        instead = f"mend what failed on rank {self.rank}; a transport's timeout=... says how long it may keep others"
        return RankError(f"rank {rank}: '{waiting}'", seen, instead, self.rank, self.instruction, self.cause)


def blockers(
    programs: Sequence[Program], at: Sequence[int], rank: int, capacity: int, silent: Collection[int] = ()
) -> Sequence[int]:
    """The ranks that must move before one can.

    Args:
        programs: of all ranks.
        at: how many of its effects each has performed.
        rank: the one that waits, or not.
        capacity: messages that an edge holds.
        silent: ranks that have stopped: they wait for nobody, and what they sent last may not have left them.
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
    """Whom a rank waits for in the end: along who waits for whom, to one that nothing keeps from going on."""
    seen = set[int]()
    while rank not in seen and (others := waits_for(rank)):
        seen.add(rank)
        rank = others[0]
    return rank
