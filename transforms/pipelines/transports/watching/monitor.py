"""The monitor: a rank's view of the others. It ends a wait with an error that names the rank to
blame.

A process that ends closes its connections, which whoever waits for a message of it sees at once.
Before ranks are connected, a launcher's record of the end says the same. Both name the cause that
the launcher saw. A process that is stopped, or ends without a launcher, shows as a heartbeat that
does not change, and a rank that runs and does not move on as a position that does not: those two
are found when the time-out is over.
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

# Messages that an edge between processes holds; a sender waits if there are more.
CAPACITY = 2
# The instruction of a rank that begins a step.
BEGIN = "its first instruction"
# The instruction of a host that waits for its device, which may first replay steps that write no
# records.
SYNC = "synchronize"
# The instruction of a rank after a step.
END = "its end"
# The instruction of a rank that connects to the others.
CONNECT = "connect"
# The instruction of a rank that needs another one before its first step; the number follows.
_WAITS = "wait for rank "
# It stands in the instruction of a rank in a collective, before its number.
_NUMBER = ", number "
# The longest pause in seconds between two looks at the records.
_POLL = 0.1
# Seconds that a rank whose process runs may take to come to its first step: it loads, compiles and
# captures. torch's process groups wait as long.
_STARTING = 1800.0
# Seconds without a heartbeat after which a process counts as ended or stopped; fewer if the
# time-out is short.
_SILENT = 1.0
# Seconds to wait for a record of why a rank's connections closed: another rank may have made it
# fail.
_GRACE = 3.0
# The programs that are kept to say who waits for whom. A rank that keeps others waiting is only a
# few steps back.
_MAX_PROGRAMS = 16


class Monitor:
    """A rank's view of the others.

    Args:
        records: shared by all ranks of the run.
        num_ranks: the number of ranks.
        timeout: seconds that a rank may keep another one waiting.
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
        self._programs: dict[str, CheckedPrograms] = {}

    def for_thread(self, records: Records) -> "Monitor":
        """The view of the same rank for another thread, which reads records by a connection of its
        own."""
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
        # Not to be written: the first instruction will be, and before the first step others wait
        # for a start.
        self.here = Position(self.here.step + 1, checked.digest, 0, BEGIN, self.here.meetings)
        self._programs.pop(checked.digest, None)
        self._programs[checked.digest] = checked
        if len(self._programs) > _MAX_PROGRAMS:
            del self._programs[next(iter(self._programs))]

    def move_to(self, index: int, instruction: object) -> None:
        """Write what this rank is about to do."""
        here = self.here
        self._move(Position(here.step, here.digest, index, str(instruction), here.meetings))

    def _move(self, here: Position) -> None:
        self.here = here
        self.records.write_position(here)

    @contextmanager
    def at_collective(self, effect: Collective, number: int) -> Iterator[None]:
        """Within, this rank takes part in a collective, inside an effect of its program; `number`
        counts them. After an error the rank stays there, so that the others hear where it failed.
        """
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
        """Wait until all ranks have begun their first step. From then on, the time-out holds for
        every wait.

        Raises:
            RankError: a rank does not come to its first step.
        """
        self.records.write_position(self.here)
        self.records.write(f"begun/{self.rank}", True)
        for peer in range(self.num_ranks):
            self.wait(f"begun/{peer}", peer)

    def wait(self, key: str, peer: int, timeout: float | None = None) -> Any:
        """The value that `peer` writes under a key.

        Raises:
            RankError: it does not come.
        """
        pause = _POLL / 64
        with self._waiting(peer, self.timeout if timeout is None else timeout) as check:
            while True:
                failure = self.records.failure()
                if self.records.has(
                    key
                ):  # asked after the failure: what a rank wrote before it failed counts
                    return self.records.read(key)
                self._raise(failure, self.here.instruction)
                check()
                if self.records.exit(peer) and not self.records.has(key):
                    raise self.explain(peer, "its process ended", gone=[peer])
                self.clock.sleep(pause)
                pause = min(2 * pause, _POLL)

    @contextmanager
    def waiting_for(self, peer: int) -> Iterator[Callable[[], None]]:
        """Within, this rank waits for a message of `peer`. Yields a function to call now and then,
        which raises RankError if no message will come."""

        def look() -> None:
            self.raise_failure()
            check()
            if self.records.exit(peer):  # its connection may stay open in a process that it forked
                raise self.explain(peer, "its process ended", gone=[peer])

        with self._waiting(peer, self.timeout) as check:
            yield look

    @contextmanager
    def _waiting(self, peer: int, limit: float) -> Iterator[Callable[[], None]]:
        """Within, this rank waits for `peer`. Yields a function to call now and then. It raises
        RankError after `limit` seconds; if the rank to blame runs and has not come to its first
        step, only after `_STARTING` seconds."""
        start = self.clock.now()
        told = False
        end = start + limit

        def check() -> None:
            nonlocal end, told
            if self.here.instruction == START and not told:
                self.records.write_position(attrs.evolve(self.here, instruction=f"{_WAITS}{peer}"))
                told = True
            now = self.clock.now()
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
        """Within, the error of a connection to `peer` is raised as the RankError that it follows
        from."""
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
        """Whether the rank that `peer` waits for in the end runs, and has not come to its first
        step."""
        silent = self.liveness.silent(self._silence)
        rank = culprit(peer, lambda waiting: self._blockers(waiting, silent))
        runs = self.records.beat(rank) is not None and rank not in silent
        return runs and self.records.position(rank).instruction == START

    def fail(self, error: BaseException) -> None:
        """Write for the others that this rank failed, and where; the failure that was written first
        is believed."""
        if isinstance(error, RankError) and error.rank is not None:
            failure = Failure(error.rank, error.instruction, error.cause)
        else:
            failure = Failure(self.rank, self.here.instruction, described(error))
        self.write_failure(failure)

    def write_failure(self, failure: Failure) -> Failure:
        """Write a failure; returns the failure that was written first, which all believe."""
        try:
            self.failure = self.records.write_failure(failure)
        except RankError:  # the store is gone, which the others see as well
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
            peer: the rank that it waited for; itself, if it waited for its device.
            cause: what it saw.
            gone: the ranks that may have ended. Then one of them is to blame if a launcher saw its
                end, or else `peer`, unless some rank soon writes who failed.
            waiting: what this rank was about to do; None: what it last wrote.
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
        """The failure of the rank that `peer` waits for in the end, unless one was written."""
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
        """The failure that the ranks of a collective find, if this rank is not one of them and
        `rank` is in it with all the others: whose tensor is late, only they know. They may have
        begun to wait as late as now."""
        met = _collective_of(self.records.position(rank))
        end = self.clock.now() + self.timeout + _GRACE
        if met is None or rank in silent or self.rank in met.ranks:
            return None
        while (failure := self.records.failure()) is None and self.clock.now() < end:
            self.clock.sleep(_POLL / 4)
        return failure

    def _blockers(self, rank: int, silent: Collection[int]) -> Sequence[int]:
        """The ranks that must move before a rank can, as far as its programs are known here."""
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
        """The ranks that share a stage with a rank whose device runs it, and have not yet launched
        that run themselves, or have stopped."""
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
        if reached[rank] <= (here.step, here.index):  # its host itself is at that run
            return ()
        stage = lane_rank(checked.mesh, rank)
        members = [r for r in checked.mesh if lane_rank(checked.mesh, r) == stage and r != rank]
        late = [r for r in members if reached[r] <= (here.step, here.index)]
        return sorted(late, key=lambda r: reached[r]) or [r for r in members if r in silent]

    def connect_together(self, connect: Callable[[], None], timeout: float) -> None:
        """Call a function that all ranks call together. It runs in a thread, since it may not
        return if a rank has gone.

        Raises:
            RankError: a rank has gone or does not come, or the function raised. It blames a rank
                that has gone or stopped, or else this one.
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
                if any(
                    self.records.exit(peer) for peer in peers
                ):  # perhaps connected, and done with its work
                    left = True
                    pause = self._silence
        if error is not None:
            blamed = (self.liveness.silent(self._silence) or [self.rank])[0]
            cause = f"{type(error).__name__}: {str(error).splitlines()[0]:.120}"
            raise self.explain(blamed, cause, gone=peers) from error
        self.move_to(0, START)


def _collective_of(place: Position) -> Collective | None:
    """The collective in which a rank is."""
    if _NUMBER not in place.instruction:
        return None
    met = parse_effect(place.instruction.partition(_NUMBER)[0])
    assert isinstance(met, Collective), "only collectives have numbers"
    return met


def _reached(place: Position) -> tuple[int, int]:
    """The progress of a rank: its steps, and its waits for its device since the last one."""
    return place.step, place.index + 1 if place.instruction == SYNC else 0
