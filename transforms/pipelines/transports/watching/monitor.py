"""The monitor: a rank's view of the others. It ends a wait with an error that names the rank to
blame.

A process that ends closes its connections, so a rank that waits for its message notices at once.
Before ranks are connected, the launcher's record of the end serves the same purpose. In both cases
the error names the cause that the launcher saw. A process that is stopped, or ends without a
launcher, shows as a heartbeat that does not change. A rank that runs but makes no progress shows as
a position that does not change. These two are found when the time-out is over.
"""

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from weft.effects import Run, parse_effect
from weft.errors import RankError
from weft.meshes.collectives import Collective
from weft.transforms.pipelines.checker import CheckedPrograms
from weft.transforms.pipelines.lanes import lane_rank
from weft.transforms.pipelines.transports.watching.failures import (
    Clock,
    Failure,
    blockers,
    culprit,
    described,
)
from weft.transforms.pipelines.transports.watching.records import START, Liveness, Position, Records
from weft.values.bounded import BoundedDict

# The number of messages that an edge between processes holds; a sender waits while it is full.
CAPACITY = 2
# The instruction of a rank that begins a step
BEGIN = "its first instruction"
# The instruction of a host that waits for its device. The device may first replay steps that write
# no records.
SYNC = "synchronize"
# The instruction of a rank after a step
END = "its end"
# The instruction of a rank that connects to the others
CONNECT = "connect"
# The instruction of a rank that waits for another rank before its first step; the number follows.
_WAITS = "wait for rank "
# In the instruction of a rank in a collective, this text precedes the collective's number.
_NUMBER = ", number "
# The longest pause in seconds between two reads of the records
_POLL = 0.1
# Seconds that a running process may take until its rank's first step, while it loads, compiles and
# captures. torch's process groups wait for the same time.
_STARTING = 1800.0
# Seconds without a heartbeat after which a process counts as ended or stopped; less if the time-out
# is short.
_SILENT = 1.0
# Seconds to wait for a record of why a rank's connections closed: another rank may have made it
# fail.
_GRACE = 3.0
# How many programs are kept to find out who waits for whom. This is enough, because a rank that
# keeps others waiting is only a few steps behind.
_MAX_PROGRAMS = 16


class Monitor:
    """A rank's view of the others.

    Args:
        records: the records, which all ranks of the run share.
        num_ranks: the number of ranks.
        timeout: seconds that a rank may keep another rank waiting.
        clock: the clock of the time-outs.
    """

    def __init__(
        self, records: Records, num_ranks: int, timeout: float, clock: Clock | None = None
    ) -> None:
        self.records = records
        self.rank = records.rank
        self.num_ranks = num_ranks
        self.timeout = timeout
        self.clock = clock or Clock()
        self.failure: Failure | None = None
        self.here = Position()
        self.liveness = Liveness(self.clock)
        self._programs = BoundedDict[str, CheckedPrograms](_MAX_PROGRAMS)

    def for_thread(self, records: Records) -> "Monitor":
        """The same rank's view for another thread, which reads records by a separate connection."""
        other = Monitor(records, self.num_ranks, self.timeout, self.clock)
        other.liveness = self.liveness
        other._programs = self._programs
        return other

    def begin(self, checked: CheckedPrograms) -> None:
        """Begin a step.

        Raises:
            RankError: a rank failed before.
        """
        self._raise(self.failure, "the next step")
        # This position is not written: the first instruction is written soon after, and before the
        # first step the others rely on the position `START`.
        self.here = Position(self.here.step + 1, checked.digest, 0, BEGIN, self.here.meetings)
        self._programs[checked.digest] = checked
        self._programs.move_to_end(checked.digest)

    def move_to(self, index: int, instruction: object) -> None:
        """Write what this rank is about to do."""
        here = self.here
        self._move(Position(here.step, here.digest, index, str(instruction), here.meetings))

    def _move(self, here: Position) -> None:
        self.here = here
        self.records.write_position(here)

    @contextmanager
    def at_collective(self, effect: Collective, number: int) -> Iterator[None]:
        """Within this context, the rank takes part in a collective, inside an effect of its
        program; `number` counts the collectives. After an error the position stays there, so that
        the others learn where the rank failed."""
        before = self.here.instruction
        self._move(
            attrs.evolve(self.here, instruction=f"{effect}{_NUMBER}{number}", meetings=number)
        )
        yield
        self._move(attrs.evolve(self.here, instruction=before))

    def move_to_sync(self) -> None:
        """Write that this rank waits for its device, and how many times it has done so since its
        last step."""
        self.move_to(self.here.index + 1 if self.here.instruction == SYNC else 0, SYNC)

    def await_first_step(self) -> None:
        """Wait until all ranks have begun their first step. After that, the time-out applies to
        every wait.

        Raises:
            RankError: a rank does not reach its first step.
        """
        self.records.write_position(self.here)
        self.records.write(f"begun/{self.rank}", True)
        for peer in range(self.num_ranks):
            self.wait(f"begun/{peer}", peer)

    def wait(self, key: str, peer: int, timeout: float | None = None) -> Any:
        """The value that `peer` writes under a key.

        Raises:
            RankError: the value does not come.
        """
        pause = _POLL / 64
        with self._waiting(peer, self.timeout if timeout is None else timeout) as check:
            while True:
                failure = self.records.failure()
                # Ask for the key after the failure: a value that was written before the failure
                # still counts.
                if self.records.has(key):
                    return self.records.read(key)
                self._raise(failure, self.here.instruction)
                check()
                if self.records.exit(peer) and not self.records.has(key):
                    raise self.explain(peer, "its process ended", gone=[peer])
                self.clock.sleep(pause)
                pause = min(2 * pause, _POLL)

    @contextmanager
    def waiting_for(self, peer: int) -> Iterator[Callable[[], None]]:
        """Within this context, the rank waits for a message of `peer`. Yields a function to call
        now and then, which raises RankError if no message will come."""

        def look() -> None:
            self.raise_failure()
            check()
            # The exit record is needed too: the connection of a process that ended stays open in
            # processes that it forked.
            if self.records.exit(peer):
                raise self.explain(peer, "its process ended", gone=[peer])

        with self._waiting(peer, self.timeout) as check:
            yield look

    @contextmanager
    def _waiting(self, peer: int, limit: float) -> Iterator[Callable[[], None]]:
        """Within this context, the rank waits for `peer`. Yields a function to call now and then.
        The function raises RankError after `limit` seconds, or after `_STARTING` seconds if the
        rank to blame runs and has not reached its first step."""
        start = self.clock.now()
        told = False
        end = start + limit

        def check() -> None:
            nonlocal end, told
            if self.here.instruction == START and not told:
                self.records.write_position(attrs.evolve(self.here, instruction=f"{_WAITS}{peer}"))
                told = True
            now = self.clock.now()
            # Read heartbeats only near the end of the wait, but for long enough to see whether they
            # change.
            if now > end - 2 * self._silence:
                self.liveness.observe(self.records, range(self.num_ranks))
            if now > end:
                if end - start >= _STARTING or not self._is_starting(peer):
                    raise self.explain(peer, f"no progress for {end - start:g} s")
                end += limit

        yield check
        if told:
            self.records.write_position(self.here)

    @contextmanager
    def explaining(self, peer: int) -> Iterator[None]:
        """Within this context, an error of a connection to `peer` is replaced by the RankError that
        explains it."""
        try:
            yield
        except RankError:
            raise
        except (OSError, RuntimeError) as error:
            text = str(error).splitlines()[0]
            gone = [peer]
            cause = f"its process ended, or was cut off ({text:.120})"
            if "timed out" in text.lower() or "timeout" in text.lower():
                gone = []
                cause = f"no progress for {self.timeout:g} s"
            raise self.explain(peer, cause, gone=gone) from error

    @property
    def _silence(self) -> float:
        return min(_SILENT, self.timeout / 4)

    def _is_starting(self, peer: int) -> bool:
        """Whether the rank that `peer` ultimately waits for runs and has not reached its first
        step."""
        silent = self.liveness.silent(self._silence)
        rank = culprit(peer, lambda waiting: self._blockers(waiting, silent))
        runs = self.records.beat(rank) is not None and rank not in silent
        return runs and self.records.position(rank).instruction == START

    def fail(self, error: BaseException) -> None:
        """Write for the others that this rank failed, and where. Only the first failure that was
        written counts."""
        if isinstance(error, RankError) and error.rank is not None:
            failure = Failure(error.rank, error.instruction, error.cause)
        else:
            failure = Failure(self.rank, self.here.instruction, described(error))
        self.write_failure(failure)

    def write_failure(self, failure: Failure) -> Failure:
        """Write a failure. Returns the failure that was written first, on which all ranks agree."""
        try:
            self.failure = self.records.write_failure(failure)
        except RankError:
            # The store is gone, which the others notice as well.
            self.failure = failure
        return self.failure

    def raise_failure(self) -> None:
        """Raise RankError if some rank wrote that it failed."""
        if self.records.may_have_failure():
            self._raise(self.records.failure(), self.here.instruction)

    def _raise(self, failure: Failure | None, waiting: str) -> None:
        if failure is not None:
            self.failure = failure
            raise failure.for_rank(self.rank, waiting)

    def explain(
        self, peer: int, cause: str, *, gone: Sequence[int] = (), waiting: str | None = None
    ) -> RankError:
        """The error of this rank after it waited in vain.

        Args:
            peer: the rank that it waited for, or itself if it waited for its device.
            cause: what it saw.
            gone: the ranks that may have ended. If some rank soon writes who failed, that counts.
                Otherwise the one whose end a launcher saw is to blame, or else `peer`.
            waiting: what this rank was about to do. None: the instruction that it last wrote.
        """
        if waiting is None:
            waits = self.here.instruction
        else:
            waits = waiting
        try:
            if gone:
                failure = self._find_gone(gone, peer, cause)
            else:
                failure = self._find_stalled(peer, cause)
        except RankError as error:
            return error
        return self.write_failure(failure).for_rank(self.rank, waits)

    def _find_gone(self, gone: Sequence[int], otherwise: int, cause: str) -> Failure:
        end = self.clock.now() + _GRACE
        while self.clock.now() < end:
            if (failure := self.records.failure()) is not None:
                return failure
            for peer in gone:
                if (ended := self.records.exit(peer)) is not None:
                    return Failure(
                        peer,
                        self.records.position(peer).instruction,
                        f"its process ended: {ended.text}",
                    )
            self.clock.sleep(_POLL / 4)
        return Failure(otherwise, self.records.position(otherwise).instruction, cause)

    def _find_stalled(self, peer: int, cause: str) -> Failure:
        """The failure that was written; or else a failure of the rank that `peer` ultimately waits
        for."""
        silent = self.liveness.silent(self._silence)
        rank = culprit(peer, lambda waiting: self._blockers(waiting, silent))
        if (failure := self._await_members(rank, silent) or self.records.failure()) is not None:
            return failure
        if (ended := self.records.exit(rank)) is not None:
            cause = f"its process ended: {ended.text}"
        elif rank in silent:
            cause = f"{cause}: its process ended, or was stopped"
        alive = ended is None and rank not in silent
        if alive:
            where = self.records.device_position(rank)
        else:
            where = self.records.position(rank)
        return Failure(rank, where.instruction, cause)

    def _await_members(self, rank: int, silent: Collection[int]) -> Failure | None:
        """The failure that the ranks of a collective find, if `rank` is in one and this rank is
        not: only its members know whose tensor is late. They may have begun to wait just now, so
        this waits for their time-out too. None if they find no failure."""
        met = _collective_of(self.records.position(rank))
        end = self.clock.now() + self.timeout + _GRACE
        if met is None or rank in silent or self.rank in met.ranks:
            return None
        while (failure := self.records.failure()) is None and self.clock.now() < end:
            self.clock.sleep(_POLL / 4)
        return failure

    def _blockers(self, rank: int, silent: Collection[int]) -> Sequence[int]:
        """The ranks that must move before a rank can, as far as this process knows its programs."""
        places = [self.records.device_position(r) for r in range(self.num_ranks)]
        here = places[rank]
        if here.instruction.startswith(_WAITS):
            return [int(here.instruction.removeprefix(_WAITS))]
        if here.instruction == SYNC:
            behind = [r for r, place in enumerate(places) if _reached(place) < _reached(here)]
            return sorted(behind, key=lambda r: _reached(places[r]))
        if (met := _collective_of(here)) is not None:
            if rank in silent:
                return ()
            late = [r for r in met.ranks if places[r].meetings < here.meetings]
            return late or [r for r in met.ranks if r in silent]
        if (checked := self._programs.get(here.digest)) is None:
            return ()
        counts = [len(program.effects) for program in checked.programs]
        # Place every rank in this step's programs: at their start if it is in an earlier step, and
        # at their end if it is in a later one.
        ahead = [place.step - here.step for place in places]
        at = [
            0 if a < 0 else count if a > 0 or place.instruction == SYNC else min(place.index, count)
            for a, place, count in zip(ahead, places, counts, strict=True)
        ]
        blocking = blockers(checked.programs, at, rank, CAPACITY, silent)
        if blocking or rank in silent:
            return blocking
        return self._late_members(checked, rank, here, silent)

    def _late_members(
        self, checked: CheckedPrograms, rank: int, here: Position, silent: Collection[int]
    ) -> Sequence[int]:
        """For a rank whose device runs a stage: the ranks that share the stage and have not yet
        launched that run, or otherwise those that have stopped."""
        effects = checked.programs[rank].effects
        hosts = [self.records.position(r) for r in range(self.num_ranks)]
        if (
            checked.mesh is None
            or not here.index < len(effects)
            or not isinstance(effects[here.index], Run)
        ):
            return ()
        reached = [
            (place.step, len(effects) if place.instruction == SYNC else place.index)
            for place in hosts
        ]
        # The rank's own host is still at that run.
        if reached[rank] <= (here.step, here.index):
            return ()
        stage = lane_rank(checked.mesh, rank)
        members = [r for r in checked.mesh if lane_rank(checked.mesh, r) == stage and r != rank]
        late = [r for r in members if reached[r] <= (here.step, here.index)]
        return sorted(late, key=lambda r: reached[r]) or [r for r in members if r in silent]

    def connect_together(self, connect: Callable[[], None], timeout: float) -> None:
        """Call a function that all ranks call together. It runs in a thread, since it may not
        return if a rank has gone.

        Raises:
            RankError: a rank has gone or does not come, or the function raised. The error blames a
                rank that has gone or stopped, or otherwise this rank.
        """

        def attempt() -> None:
            try:
                connect()
            except Exception as error:
                results.put(error)
            else:
                results.put(None)

        self.move_to(0, CONNECT)
        results: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        threading.Thread(target=attempt, name=CONNECT, daemon=True).start()
        peers = [peer for peer in range(self.num_ranks) if peer != self.rank]
        end = self.clock.now() + timeout
        left = False
        pause = _POLL / 4
        while True:
            self.liveness.observe(self.records, peers)
            try:
                error = results.get(timeout=pause)
                break
            except queue.Empty:
                self.raise_failure()
                if self.clock.now() >= end or left:
                    error = TimeoutError(f"no progress for {timeout:g} s")
                    break
                # A rank that ended may have connected and finished its work: give this rank a
                # little more time to connect.
                if any(self.records.exit(peer) for peer in peers):
                    left = True
                    pause = self._silence
        if error is not None:
            blamed = (self.liveness.silent(self._silence) or [self.rank])[0]
            cause = f"{type(error).__name__}: {str(error).splitlines()[0]:.120}"
            raise self.explain(blamed, cause, gone=peers) from error
        self.move_to(0, START)


def _collective_of(place: Position) -> Collective | None:
    """The collective in which a rank takes part; None if it is in none."""
    if _NUMBER not in place.instruction:
        return None
    met = parse_effect(place.instruction.partition(_NUMBER)[0])
    assert isinstance(met, Collective), "only collectives have numbers"
    return met


def _reached(place: Position) -> tuple[int, int]:
    """The progress of a rank: its step, and how many times it has waited for its device since."""
    return place.step, place.index + 1 if place.instruction == SYNC else 0
