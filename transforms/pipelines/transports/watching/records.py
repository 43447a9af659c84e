"""Records: what each rank's process writes for the others, in a store that all ranks can reach or
in shared memory of one machine.

Each rank writes what it is about to do before it does it, and the first rank that fails writes why.
A launcher writes how a process ended. A rank that waits in vain reads all three kinds of records.
"""

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import attrs

from weft.errors import RankError
from weft.transforms.pipelines.transports.messaging.network import SECRET, Secret, Store
from weft.transforms.pipelines.transports.watching.failures import Clock, Failure
from weft.transforms.pipelines.transports.watching.places import Places

T = TypeVar("T")

# The most characters of an instruction; the rest of a longer one is cut off.
_LONGEST = 4096
_encode = json.JSONEncoder(ensure_ascii=False).encode
# The instruction of a rank before its first step.
START = "its start"


@functools.lru_cache(maxsize=1024)
def _quoted(text: str) -> str:
    """A text as JSON, cut to the most characters of an instruction. It is cached, since ranks write
    the same instructions in every step."""
    return _encode(text[:_LONGEST])


@attrs.frozen
class Position:
    """The position of a rank: its step, the digest of that step's programs, the number of effects
    performed (`index`), the next effect (`instruction`), and the number of collectives that it has
    reached over all steps (`meetings`)."""

    step: int = 0
    digest: str = "-"
    index: int = 0
    instruction: str = START
    meetings: int = 0


@attrs.frozen
class Exit:
    """The end of a process, as its launcher saw it: clean (with a result) or not."""

    clean: bool
    text: str


@attrs.frozen
class Beat:
    """A rank's last heartbeat: its number, and what the rank's device is about to do (None:
    nothing)."""

    count: int
    position: Position | None


@attrs.frozen(eq=False)
class Records:
    """One rank's access to the records of all ranks.

    Args:
        store: the store that all ranks of a transport share.
        rank: the rank that writes here.
        exits: the store to which a launcher writes.
        secret: the secret of the run, with which every record is sealed.
        host: the rank whose process hosts the store. None: a launcher's process hosts it.
        prefix: the prefix of the store's keys. A record that was sealed under another prefix is not
            a record of this transport.
        places: the shared memory in which ranks write their positions, if all of them are on one
            machine. None: they write them to the store.

    Every method raises RankError if the store is gone, or holds a record that no rank of the run
    wrote.
    """

    store: Store
    rank: int
    exits: Store
    secret: Secret
    host: int | None = None
    prefix: str = ""
    places: Places | None = None

    def has(self, key: str) -> bool:
        """Whether something was written under a key."""
        return self._ask(lambda: self.store.check([key]))

    def read(self, key: str) -> Any:
        """The value under a key, which must exist."""
        return self._open(self._name(key), self._ask(lambda: self.store.get(key)))

    def write(self, key: str, value: Any) -> None:
        """Write a value, as JSON, under a key."""
        self._ask(lambda: self.store.set(key, self.secret.seal(self._name(key), json.dumps(value))))

    def _name(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def write_position(self, position: Position) -> None:
        """Write this rank's position."""
        step = position.step
        digest = position.digest
        index = position.index
        meetings = position.meetings
        if self.places is None:
            self.write(
                f"at/{self.rank}", (step, digest, index, position.instruction[:_LONGEST], meetings)
            )
        else:
            here = (
                f"[{step}, {_quoted(digest)}, {index}, {_quoted(position.instruction)}, {meetings}]"
            )
            self.places.write(here.encode())

    def position(self, rank: int) -> Position:
        """The position that a rank last wrote."""
        key = f"at/{rank}"
        if self.places is None:
            written = None
        else:
            written = self.places.read(rank)
        if written is not None:
            return Position(*json.loads(written))
        if self.has(key):
            return Position(*self.read(key))
        return Position()

    def write_beat(self, count: int, position: Position | None) -> None:
        """Write a heartbeat of this rank."""
        self.write(
            f"device/{self.rank}", [count, None if position is None else attrs.astuple(position)]
        )

    def beat(self, rank: int) -> Beat | None:
        """A rank's last heartbeat; None if it has not written any."""
        key = f"device/{rank}"
        if not self.has(key):
            return None
        count, position = self.read(key)
        return Beat(count, None if position is None else Position(*position))

    def device_position(self, rank: int) -> Position:
        """The position of a rank's device, which is the host's position or an earlier one."""
        beat = self.beat(rank)
        if beat is None or beat.position is None:
            return self.position(rank)
        return beat.position

    def write_failure(self, failure: Failure) -> Failure:
        """Write a failure, unless there is one already. Returns the failure that was written first,
        on which all ranks agree."""
        name = self._name("failure")
        sealed = self.secret.seal(
            name, json.dumps([failure.rank, failure.instruction, failure.cause])
        )
        written = Failure(
            *self._open(name, self._ask(lambda: self.store.compare_set("failure", "", sealed)))
        )
        if self.places is not None:
            self.places.mark_failure()
        return written

    def may_have_failure(self) -> bool:
        """Whether there may be a failure. This is cheap, while `failure` takes a round trip to the
        store."""
        return self.places is None or self.places.may_have_failure()

    def failure(self) -> Failure | None:
        """The failure that was written first, or None."""
        if self.has("failure"):
            return Failure(*self.read("failure"))
        return None

    def exit(self, rank: int) -> Exit | None:
        """The end of a rank's process, if its launcher saw it."""
        key = _exit_key(rank)
        if not self._ask(lambda: self.exits.check([key])):
            return None
        return Exit(*self._open(key, self._ask(lambda: self.exits.get(key))))

    def _open(self, key: str, sealed: bytes) -> Any:
        try:
            return json.loads(self.secret.open(key, bytes(sealed)))
        except ValueError as error:
            instead = (
                f"the same {SECRET} for all processes of the run, and nobody else who writes to its"
                " store"
            )
            raise RankError(
                f"rank {self.rank}", f"{error}", instead, None, "its part of the run", f"{error}"
            ) from None

    def _ask(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except RuntimeError as error:
            if self.host is None:
                host = "the launcher"
            else:
                host = f"rank {self.host}"
            cause = (
                f"{host}, which hosts the store of the run, has ended"
                f" ({str(error).splitlines()[0]:.80})"
            )
            instead = "look there for the reason"
            raise RankError(
                f"rank {self.rank}", cause, instead, self.host, "its part of the run", cause
            ) from error


class Liveness:
    """The time since each rank's heartbeat last changed, as this process observed it.

    Args:
        clock: the clock that measures the time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last: dict[int, tuple[Beat | None, float, float]] = {}

    def observe(self, records: Records, ranks: Iterable[int]) -> None:
        """Read the heartbeats of some ranks. The first call for a rank only starts its time."""
        now = self._clock.now()
        for rank in ranks:
            beat = records.beat(rank)
            last = self._last.get(rank)
            self._last[rank] = (beat, now if last is None or last[0] != beat else last[1], now)

    def silent(self, seconds: float) -> list[int]:
        """The ranks without a new heartbeat for more than `seconds`. Ranks that never had one do
        not count."""
        # A copy, since another thread may call `observe`
        entries = list(self._last.items())
        return [
            rank
            for rank, (beat, since, last) in entries
            # Up to the last look, not up to now: while this process was stopped itself, it saw
            # nothing.
            if beat is not None and last - since > seconds
        ]


def write_exit(store: Store, rank: int, ended: Exit, *, secret: Secret) -> None:
    """As a launcher, write how a process ended, for all transports that it used."""
    key = _exit_key(rank)
    store.set(key, secret.seal(key, json.dumps([ended.clean, ended.text])))


def _exit_key(rank: int) -> str:
    return f"weft/ended/{rank}"
