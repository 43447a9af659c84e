"""What went wrong on a rank, and how the others find out which one it was."""

from collections.abc import Callable

import attrs

from weft.effects import Broadcast, Effect, Recv, Send
from weft.errors import RankError


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


def waits_for(rank: int, effect: Effect | None) -> int | None:
    """The rank that an effect may be waiting for; None where it waits for nobody."""
    match effect:
        case Recv(source):
            return source
        case Broadcast(root) if root != rank:
            return root
        case Send(to):
            return to
    return None


def culprit(rank: int, at: Callable[[int], Effect | None]) -> int:
    """From a rank that others wait for, along who waits for whom, to one that waits for nobody; or into a cycle.

    Args:
        rank: where to begin.
        at: what each rank is about to do; None at its end.
    """
    seen = {rank}
    while (following := waits_for(rank, at(rank))) is not None and following not in seen:
        rank = following
        seen.add(rank)
    return rank
