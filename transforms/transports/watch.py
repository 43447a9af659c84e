"""How ranks in processes of their own see each other beside the messages: through a store that all can reach.

Each rank writes down what it is about to do before it does it, and the first one that fails writes down why. Whoever
waits in vain reads both, and can say which rank, at which instruction, and what happened.
"""

import json
import time
from typing import Any, Protocol

import attrs

from weft.errors import ProgramError, RankError
from weft.transforms.transports.failures import Failure, culprit
from weft.transforms.transports.plan import Plan

CAPACITY = 2
"""Messages that an edge between processes holds: of more, a sender waits."""
_POLL = 0.1
"""The most seconds between two looks at the store by a rank that waits for it."""
_GRACE = 1.0
"""Seconds to wait for a rank that failed to say why, after its connections closed."""
_SAME = "the same code, configuration and batches on every rank: batches by a pure function of what all know"


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: Any, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


@attrs.frozen
class Position:
    """Where a rank is: in which of its steps, by which plan, how many effects it has performed, and what comes next."""

    step: int
    digest: str
    index: int
    instruction: str

    def __str__(self) -> str:
        return f"{self.step} {self.digest} {self.index} {self.instruction}"

    @classmethod
    def parse(cls, text: str) -> "Position":
        """The inverse of `str`."""
        step, digest, index, instruction = text.split(" ", 3)
        return cls(int(step), digest, int(index), instruction)


class Watch:
    """A rank's view of the others.

    Args:
        store: shared by all ranks of the run.
        rank, num_ranks: whose view, of how many.
        timeout: seconds that a rank may keep another one waiting.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int, timeout: float) -> None:
        self.store = store
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeout = timeout
        self.failure: Failure | None = None
        self._plan: Plan | None = None
        self._here = Position(0, "-", 0, "its start")
        self._agreed: set[str] = set()

    def begin(self, plan: Plan) -> None:
        """A step begins: all ranks must run the same plan, which they compare the first time that they do.

        Raises:
            ProgramError: another rank runs another plan; it names the first line that differs.
            RankError: another rank does not come.
        """
        if self.failure is not None:
            raise self.failure.for_rank(self.rank, "the next step")
        self._plan = plan
        self._here = Position(self._here.step + 1, plan.digest, 0, "agree on the programs")
        if plan.digest in self._agreed:
            return
        self.at(0, self._here.instruction)
        key = f"plan/{len(self._agreed)}"
        self.store.set(f"{key}/{self.rank}", plan.text)
        for peer in range(self.num_ranks):
            if peer != self.rank:
                self._compare(plan, peer, self.wait(f"{key}/{peer}", peer).decode())
        self._agreed.add(plan.digest)

    def _compare(self, plan: Plan, peer: int, theirs: str) -> None:
        mine = plan.text
        if theirs == mine:
            return
        lines = zip(mine.splitlines(), theirs.splitlines(), strict=False)
        a, b = next((pair for pair in lines if pair[0] != pair[1]), ("(all its lines)", "(more lines)"))
        raise ProgramError(
            f"step {self._here.step} of rank {self.rank}",
            f"'{a.strip()}', where rank {peer} has '{b.strip()}'",
            _SAME,
        )

    def at(self, index: int, instruction: object) -> None:
        """Say what this rank is about to do."""
        self._here = attrs.evolve(self._here, index=index, instruction=str(instruction))
        self.store.set(f"at/{self.rank}", str(self._here))

    def position(self, rank: int) -> Position:
        """Where a rank last said that it is."""
        key = f"at/{rank}"
        if rank == self.rank:
            return self._here
        return Position.parse(self.store.get(key).decode()) if self._has(key) else Position(0, "-", 0, "its start")

    def wait(self, key: str, peer: int) -> bytes:
        """The value that `peer` sets for a key.

        Raises:
            RankError: it does not come.
        """
        start, pause = time.monotonic(), _POLL / 64
        while not self._has(key):
            if time.monotonic() - start > self.timeout:
                raise self.explain(peer, f"no progress for {self.timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _POLL)
            self.raise_failure()
            self._compare_positions(peer)
        return self.store.get(key)

    def _has(self, key: str) -> bool:
        try:
            return self.store.check([key])
        except RuntimeError as error:
            text = f"the store of the run is gone ({str(error).splitlines()[0]:.80}): the process that hosts it ended"
            raise Failure(0, "its part of the run", text).for_rank(self.rank, self._here.instruction) from error

    def _compare_positions(self, peer: int) -> None:
        """A rank that is in the same step by another plan, which it need not agree on, will never come."""
        theirs = self.position(peer)
        if theirs.step == self._here.step and theirs.digest != self._here.digest:
            raise ProgramError(
                f"step {self._here.step} of rank {self.rank}: '{self._here.instruction}'",
                f"rank {peer} is at '{theirs.instruction}' of another program",
                _SAME,
            )

    def fail(self, instruction: str, error: BaseException) -> None:
        """Write down that this rank failed, for the others; the first to write is believed."""
        cause = f"{type(error).__name__}: {error}"
        if isinstance(error, RankError) and error.rank is not None:
            self._post(Failure(error.rank, error.instruction, error.cause))
        else:
            self._post(Failure(self.rank, instruction, cause))

    def _post(self, failure: Failure) -> None:
        self.failure = self.failure or failure
        record = json.dumps([failure.rank, failure.instruction, failure.cause])
        try:
            self.store.compare_set("failure", "", record)
        except RuntimeError:  # the store is gone: its host ended, which the others see as well
            return

    def raise_failure(self) -> None:
        """Raise RankError if some rank wrote down that it failed."""
        if self._has("failure"):
            rank, instruction, cause = json.loads(self.store.get("failure"))
            self.failure = Failure(rank, instruction, cause)
            raise self.failure.for_rank(self.rank, self._here.instruction)

    def explain(self, peer: int, cause: str, *, closed: bool = False) -> RankError:
        """The error of this rank, which waited for `peer` in vain.

        Args:
            peer: for whom it waited.
            cause: what it saw.
            closed: that was a connection to it that broke: then it is its fault, unless it soon says why it is not.
        """
        end = time.monotonic() + (_GRACE if closed else 0.0)
        try:
            while True:
                self.raise_failure()
                if time.monotonic() >= end:
                    break
                time.sleep(_POLL / 4)
            rank = peer if closed else self._blame(peer)
            where = self.position(rank).instruction
        except RankError as error:
            return error
        failure = Failure(rank, where, cause)
        self._post(failure)
        return failure.for_rank(self.rank, self._here.instruction)

    def _blame(self, peer: int) -> int:
        """Whom the rank that this one waits for waits for in the end."""
        if self._plan is None:
            return peer
        programs, at = self._plan.programs, []
        for program in programs:
            found, count = self.position(program.rank), len(program.effects)
            ahead = found.step - self._here.step
            at.append(0 if ahead < 0 else count if ahead > 0 else min(found.index, count))
        return culprit(programs, at, peer, CAPACITY)

    def closed(self, peer: int, error: BaseException) -> RankError:
        """The error for a wait on a connection to `peer` that ended in an error."""
        text = str(error).splitlines()[0]
        if "timed out" in text.lower() or "timeout" in text.lower():
            return self.explain(peer, f"no progress for {self.timeout:g} s")
        return self.explain(peer, f"its process ended, or was cut off ({text:.120})", closed=True)
