"""How ranks in processes of their own see each other beside the messages: through a store that all can reach.

Each rank writes down what it is about to do before it does it, and the first one that fails writes down why. Whoever
waits in vain reads both, and can say which rank, at which instruction, and what happened.
"""

import json
import time
from datetime import timedelta
from typing import Any, Protocol

import attrs

from weft.effects import Effect, parse_effect
from weft.errors import ProgramError, RankError
from weft.transforms.transports.failures import Failure, culprit
from weft.transforms.transports.plan import Plan

_POLL = 0.1
"""Seconds between two looks at the store by a rank that waits for it."""
_GRACE = 1.0
"""Seconds to wait for a rank that failed to say why, after its connections closed."""
_SAME = "the same code, configuration and batches on every rank: batches by a pure function of what all know"


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: Any, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


@attrs.frozen
class Position:
    """What a rank is about to do, in which of its steps, by which plan."""

    step: int
    digest: str
    instruction: str

    @property
    def effect(self) -> Effect | None:
        """The instruction as an effect; None where it is none."""
        try:
            return parse_effect(self.instruction)
        except ProgramError:
            return None


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
        self._step, self._digest, self._now = 0, "-", "-"
        self._agreed: set[str] = set()

    def begin(self, plan: Plan) -> None:
        """A step begins: all ranks must run the same plan, which they compare the first time that they do.

        Raises:
            ProgramError: another rank runs another plan; it names the first line that differs.
            RankError: another rank does not come.
        """
        if self.failure is not None:
            raise self.failure.for_rank(self.rank, "the next step")
        self._step, self._digest = self._step + 1, plan.digest
        if plan.digest in self._agreed:
            return
        self.at("agree on the programs")
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
            f"step {self._step} of rank {self.rank}",
            f"'{a.strip()}', where rank {peer} has '{b.strip()}'",
            _SAME,
        )

    def at(self, instruction: str) -> None:
        """Say what this rank is about to do."""
        self._now = instruction
        self.store.set(f"at/{self.rank}", f"{self._step} {self._digest} {instruction}")

    def position(self, rank: int) -> Position:
        """What a rank last said that it is about to do."""
        key = f"at/{rank}"
        if rank == self.rank or not self.store.check([key]):
            return Position(self._step, self._digest, self._now if rank == self.rank else "its start")
        step, digest, instruction = self.store.get(key).decode().split(" ", 2)
        return Position(int(step), digest, instruction)

    def wait(self, key: str, peer: int) -> bytes:
        """The value that `peer` sets for a key.

        Raises:
            RankError: it does not come.
        """
        end = time.monotonic() + self.timeout
        while time.monotonic() < end:
            try:
                self.store.wait([key], timedelta(seconds=_POLL))
                return self.store.get(key)
            except RuntimeError:  # not yet, or the store is gone
                self.raise_failure()
                self._compare_positions(peer)
        raise self.explain(peer, f"no progress for {self.timeout:g} s")

    def _compare_positions(self, peer: int) -> None:
        """A rank that is in the same step by another plan, which it need not agree on, will never come."""
        theirs = self.position(peer)
        if theirs.step == self._step and theirs.digest not in ("-", self._digest):
            raise ProgramError(
                f"step {self._step} of rank {self.rank}: '{self._now}'",
                f"rank {peer} is at '{theirs.instruction}' of another program ({theirs.digest}, not {self._digest})",
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
        try:
            found = self.store.check(["failure"]) and self.store.get("failure")
        except RuntimeError as error:
            text = f"the store of the run is gone ({str(error).splitlines()[0][:80]}): the process that hosts it ended"
            raise Failure(0, "its part of the run", text).for_rank(self.rank, self._now) from error
        if found:
            rank, instruction, cause = json.loads(found)
            self.failure = Failure(rank, instruction, cause)
            raise self.failure.for_rank(self.rank, self._now)

    def explain(self, peer: int, cause: str, grace: float = 0.0) -> RankError:
        """The error of this rank, which waited for `peer` in vain.

        Args:
            peer: for whom it waited.
            cause: what it saw: a time-out, or a closed connection.
            grace: seconds to wait for the one that failed to say why.
        """
        end = time.monotonic() + grace
        try:
            while True:
                self.raise_failure()
                if time.monotonic() >= end:
                    break
                time.sleep(_POLL / 4)
            rank = culprit(peer, lambda rank: None if rank == self.rank else self.position(rank).effect)
            where = self.position(rank).instruction
        except RankError as error:
            return error
        failure = Failure(rank, where, cause)
        self._post(failure)
        return failure.for_rank(self.rank, self._now)

    def closed(self, peer: int, error: BaseException) -> RankError:
        """The error for a connection to `peer` that broke."""
        text = str(error).splitlines()[0]
        timed_out = "timed out" in text.lower() or "timeout" in text.lower()
        cause = (
            f"no progress for {self.timeout:g} s" if timed_out else f"its process ended, or was cut off ({text:.120})"
        )
        return self.explain(peer, cause, grace=0.0 if timed_out else _GRACE)
