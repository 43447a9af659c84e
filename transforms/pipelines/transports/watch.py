"""A rank's view of the others, beside the messages: where they are, and who keeps it waiting."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import attrs

from weft.errors import ProgramError, RankError
from weft.transforms.pipelines.transports.agreement import SAME
from weft.transforms.pipelines.transports.board import START, Board, Position, Pulse
from weft.transforms.pipelines.transports.failures import Failure, blockers, culprit, described
from weft.transforms.pipelines.transports.plan import Plan

CAPACITY = 2
"""Messages that an edge between processes holds: of more, a sender waits."""
BEGIN = "its first instruction"
"""Where a rank is that begins a step."""
SYNC = "synchronize"
"""What a host does that waits for its device; before it, the device may replay steps of which nothing is written."""
_POLL = 0.1
"""The most seconds between two looks at the board by a rank that waits for it."""
END = "its end"
"""Where a rank is after a step."""
_WAITS = "wait for rank "
"""What a rank does, before its first step, that needs another one."""
_STARTING = 1800.0
"""Seconds that a rank whose process runs may take to its first step: it loads, compiles and captures. torch's process
groups wait as long."""
_SILENT = 1.0
"""Seconds without a beat after which a process counts as ended, or stopped; less where the time-out is short."""
_GRACE = 3.0
"""Seconds to wait for a rank to say why, after its connections closed: it may have waited in vain, and look."""
_MAX_PLANS = 16
"""Plans that are kept to say who waits for whom: a rank that keeps others waiting is few steps behind."""


class Watch:
    """A rank's view of the others.

    Args:
        board: shared by all ranks of the run.
        num_ranks: how many.
        timeout: seconds that a rank may keep another one waiting.
    """

    def __init__(self, board: Board, num_ranks: int, timeout: float) -> None:
        self.board = board
        self.rank = board.rank
        self.num_ranks = num_ranks
        self.timeout = timeout
        self.failure: Failure | None = None
        self.here = Position()
        self.pulse = Pulse()
        self._plans: dict[str, Plan] = {}

    def beside(self, board: Board) -> "Watch":
        """The view of the same rank from another thread, which asks by a board of its own."""
        other = Watch(board, self.num_ranks, self.timeout)
        other.pulse, other._plans = self.pulse, self._plans
        return other

    def begin(self, plan: Plan) -> None:
        """A step begins.

        Raises:
            RankError: a rank failed before.
        """
        if self.failure is not None:
            raise self.failure.for_rank(self.rank, "the next step")
        self.here = Position(self.here.step + 1, plan.digest, 0, BEGIN)
        self._plans.pop(plan.digest, None)
        self._plans[plan.digest] = plan
        if len(self._plans) > _MAX_PLANS:
            del self._plans[next(iter(self._plans))]

    def at(self, index: int, instruction: object) -> None:
        """Say what this rank is about to do."""
        self.here = attrs.evolve(self.here, index=index, instruction=str(instruction))
        self.board.place(self.here)

    def at_sync(self) -> None:
        """Say that this rank waits for its device, and for which time since its last step."""
        self.at(self.here.index + 1 if self.here.instruction == SYNC else 0, SYNC)

    def await_ranks(self) -> None:
        """Wait until all ranks have begun their first step: what they wait for from then on is timed.

        Raises:
            RankError: one does not come to it.
        """
        self.board.place(self.here)
        self.board.write(f"begun/{self.rank}", "")
        for peer in range(self.num_ranks):
            self.wait(f"begun/{peer}", peer)

    def wait(self, key: str, peer: int, timeout: float | None = None) -> str:
        """The text that `peer` writes under a key.

        Raises:
            RankError: it does not come.
        """
        pause = _POLL / 64
        with self._waiting(peer, self.timeout if timeout is None else timeout) as check:
            while True:
                failure = self.board.failure()
                if self.board.has(key):  # asked after: what a rank wrote before it failed counts
                    return self.board.read(key)
                if failure is not None:
                    self.failure = failure
                    raise failure.for_rank(self.rank, self.here.instruction)
                check()
                if self.board.exit(peer) and not self.board.has(key):
                    raise self.explain(peer, "its process ended", closed=True)
                time.sleep(pause)
                pause = min(2 * pause, _POLL)

    @contextmanager
    def ask(self, peer: int) -> Iterator[Callable[[], None]]:
        """Within, this rank waits for a message of `peer`. Yields what to call now and then: it raises where none will
        come, which is RankError, or ProgramError where `peer` is in the same step by another program."""
        was_elsewhere = False

        def look() -> None:
            nonlocal was_elsewhere
            self.raise_failure()
            check()
            if self.board.exit(peer):
                raise self.explain(peer, "its process ended", closed=True)
            theirs = self.board.position(peer)
            is_elsewhere = theirs.step == self.here.step and theirs.digest != self.here.digest
            if is_elsewhere and was_elsewhere:  # by then a message that says more would have come
                raise ProgramError(
                    f"step {self.here.step} of rank {self.rank}: '{self.here.instruction}'",
                    f"rank {peer} is at '{theirs.instruction}' of another program",
                    SAME,
                )
            was_elsewhere = is_elsewhere

        with self._waiting(peer, self.timeout) as check:
            yield look

    @contextmanager
    def _waiting(self, peer: int, limit: float) -> Iterator[Callable[[], None]]:
        """Within, this rank waits for `peer`. Yields what to call now and then: it raises RankError after `limit`
        seconds, or where a rank that runs keeps it waiting by its start, after `_STARTING`."""
        start, told = time.monotonic(), False
        end = start + limit

        def check() -> None:
            nonlocal end, told
            if self.here.instruction == START and not told:
                self.board.place(attrs.evolve(self.here, instruction=f"{_WAITS}{peer}"))
                told = True
            now = time.monotonic()
            if now > end - 2 * self._silence:
                self.pulse.feel(self.board, range(self.num_ranks))
            if now > end:
                if end - start >= _STARTING or not self._is_starting(peer):
                    raise self.explain(peer, f"no progress for {end - start:g} s")
                end += limit

        yield check
        if told:
            self.board.place(self.here)

    @property
    def _silence(self) -> float:
        return min(_SILENT, self.timeout / 4)

    def _is_starting(self, peer: int) -> bool:
        """Whether whom `peer` waits for in the end has not come to its first step, and runs."""
        silent = self.pulse.silent(self._silence)
        rank = culprit(peer, lambda waiting: self._blockers(waiting, silent))
        runs = self.board.heard(rank) is not None and rank not in silent
        return runs and self.board.position(rank).instruction == START

    def fail(self, error: BaseException) -> None:
        """Write down that this rank failed, where it is, for the others; the first to write is believed."""
        if isinstance(error, RankError) and error.rank is not None:
            failure = Failure(error.rank, error.instruction, error.cause)
        else:
            failure = Failure(self.rank, self.here.instruction, described(error))
        self.post(failure)

    def post(self, failure: Failure) -> Failure:
        """Write a failure down; the one that is believed."""
        try:
            self.failure = self.board.post(failure)
        except RankError:  # the store is gone, which the others see as well
            self.failure = failure
        return self.failure

    def raise_failure(self) -> None:
        """Raise RankError if some rank wrote down that it failed."""
        failure = self.board.failure()
        if failure is not None:
            self.failure = failure
            raise failure.for_rank(self.rank, self.here.instruction)

    def explain(
        self,
        peer: int,
        cause: str,
        *,
        closed: bool = False,
        waiting: str | None = None,
    ) -> RankError:
        """The error of this rank, which waited in vain.

        Args:
            peer: for whom it waited, or itself if its device did.
            cause: what it saw.
            closed: that was the end of `peer`: then it is its fault, unless it soon says why it is not.
            waiting: what it was to do; None: what this rank last said.
        """
        waits = self.here.instruction if waiting is None else waiting
        try:
            found = self.gone([peer], Failure(peer, "", cause)) if closed else self._stalled(peer, cause)
        except RankError as error:
            return error
        return self.post(found).for_rank(self.rank, waits)

    def gone(self, peers: Sequence[int], otherwise: Failure) -> Failure:
        """Why some of `peers` have gone: what one wrote about it in the end, or how its process ended."""
        end = time.monotonic() + _GRACE
        while time.monotonic() < end:
            if (failure := self.board.failure()) is not None:
                return failure
            for peer in peers:
                if (ended := self.board.exit(peer)) is not None:
                    return Failure(peer, self.board.position(peer).instruction, f"its process ended: {ended.text}")
            time.sleep(_POLL / 4)
        return attrs.evolve(otherwise, instruction=self.board.position(otherwise.rank).instruction)

    def _stalled(self, peer: int, cause: str) -> Failure:
        """Whom `peer` waits for in the end, and what that one does not get done; unless somebody has said so."""
        still = self.pulse.silent(self._silence)
        if (failure := self.board.failure()) is not None:
            return failure
        rank = culprit(peer, lambda waiting: self._blockers(waiting, still))
        if (ended := self.board.exit(rank)) is not None:
            cause = f"its process ended: {ended.text}"
        elif rank in still:
            cause = f"{cause}: its process ended, or was stopped"
        alive = ended is None and rank not in still
        where = self.board.device(rank) if alive else self.board.position(rank)
        return Failure(rank, where.instruction, cause)

    def _blockers(self, rank: int, silent: Collection[int]) -> Sequence[int]:
        """The ranks that must move before one can, as far as is known of its plan."""
        places = [self.board.device(r) for r in range(self.num_ranks)]
        here = places[rank]
        if here.instruction.startswith(_WAITS):
            return [int(here.instruction.removeprefix(_WAITS))]
        if here.instruction == SYNC:
            behind = [r for r, place in enumerate(places) if _reached(place) < _reached(here)]
            return sorted(behind, key=lambda r: _reached(places[r]))
        if (plan := self._plans.get(here.digest)) is None:
            return ()
        counts = [len(program.effects) for program in plan.programs]
        ahead = [place.step - here.step for place in places]
        at = [
            0 if a < 0 else count if a > 0 or place.instruction == SYNC else min(place.index, count)
            for a, place, count in zip(ahead, places, counts, strict=True)
        ]
        return blockers(plan.programs, at, rank, CAPACITY, silent)

    def closed(self, peer: int, error: BaseException) -> RankError:
        """The error for a wait on a connection to `peer` that ended in an error."""
        text = str(error).splitlines()[0]
        if "timed out" in text.lower() or "timeout" in text.lower():
            return self.explain(peer, f"no progress for {self.timeout:g} s")
        return self.explain(peer, f"its process ended, or was cut off ({text:.120})", closed=True)


def _reached(place: Position) -> tuple[int, int]:
    """How far a rank is: in steps, and in waits for its device since."""
    return place.step, place.index + 1 if place.instruction == SYNC else 0
