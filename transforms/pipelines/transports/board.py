"""The board: what ranks in processes of their own write down for each other, in a store that all can reach.

Each rank writes what it is about to do before it does it, and the first one that fails writes why. A launcher writes
how a process ended. Whoever waits in vain reads all three.
"""

import json
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import attrs

from weft.errors import RankError
from weft.transforms.pipelines.transports.failures import Failure
from weft.transforms.pipelines.transports.secret import VARIABLE, Secret, Store

T = TypeVar("T")

START = "its start"
"""Where a rank is before its first step."""


@attrs.frozen
class Position:
    """Where a rank is: in which of its steps, by which plan, how many effects it has performed, and what comes next."""

    step: int = 0
    digest: str = "-"
    index: int = 0
    instruction: str = START

    def __str__(self) -> str:
        return f"{self.step} {self.digest} {self.index} {self.instruction}"

    @classmethod
    def parse(cls, text: str) -> "Position":
        """The inverse of `str`."""
        step, digest, index, instruction = text.split(" ", 3)
        return cls(int(step), digest, int(index), instruction)


@attrs.frozen
class Exit:
    """How a process ended, as its launcher saw it: with a result (clean), or without."""

    clean: bool
    text: str


@attrs.frozen
class Beat:
    """What a rank's guard last said: how often it has looked, and what its device is about to do; None: nothing."""

    count: int
    position: Position | None


@attrs.frozen(eq=False)
class Board:
    """One rank's access to what all wrote.

    Args:
        store: shared by all ranks of a transport.
        rank: whose access.
        exits: where a launcher writes.
        secret: of the run; every record is sealed with it.
        host: the rank whose process hosts the store; None: a launcher's does.
        prefix: of the store's keys; what was sealed under another one is no record of this transport.

    Every method raises RankError where the store is gone, or holds a record that no rank of the run wrote.
    """

    store: Store
    rank: int
    exits: Store
    secret: Secret
    host: int | None = None
    prefix: str = ""

    def has(self, key: str) -> bool:
        return self._reach(lambda: self.store.check([key]))

    def read(self, key: str) -> str:
        """The text of a key that is there."""
        return self._open(self._name(key), self._reach(lambda: self.store.get(key)))

    def write(self, key: str, text: str) -> None:
        self._reach(lambda: self.store.set(key, self.secret.seal(self._name(key), text)))

    def _name(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def place(self, position: Position) -> None:
        """Say where this rank is."""
        self.write(f"at/{self.rank}", str(position))

    def position(self, rank: int) -> Position:
        """Where a rank last said that it is."""
        key = f"at/{rank}"
        return Position.parse(self.read(key)) if self.has(key) else Position()

    def beat(self, count: int, position: Position | None) -> None:
        """Say where this rank's device is."""
        self.write(f"device/{self.rank}", f"{count}|{position or ''}")

    def heard(self, rank: int) -> Beat | None:
        """What a rank's guard last said; None where it has none."""
        key = f"device/{rank}"
        if not self.has(key):
            return None
        count, _, text = self.read(key).partition("|")
        return Beat(int(count), Position.parse(text) if text else None)

    def device(self, rank: int) -> Position:
        """Where a rank's device is: behind the rank itself, or as far."""
        beat = self.heard(rank)
        return self.position(rank) if beat is None or beat.position is None else beat.position

    def post(self, failure: Failure) -> Failure:
        """Write down a failure, unless there is one: the first to write is believed, and returned."""
        record = json.dumps([failure.rank, failure.instruction, failure.cause])
        name = self._name("failure")
        sealed = self.secret.seal(name, record)
        found = self._reach(lambda: self.store.compare_set("failure", "", sealed))
        return Failure(*json.loads(self._open(name, found)))

    def failure(self) -> Failure | None:
        """The failure that is written down."""
        return Failure(*json.loads(self.read("failure"))) if self.has("failure") else None

    def exit(self, rank: int) -> Exit | None:
        """How a rank's process ended, if its launcher saw it end."""
        key = _exit_key(rank)
        if not self._reach(lambda: self.exits.check([key])):
            return None
        return Exit(*json.loads(self._open(key, self._reach(lambda: self.exits.get(key)))))

    def _open(self, key: str, sealed: bytes) -> str:
        try:
            return self.secret.open(key, bytes(sealed))
        except ValueError as error:
            instead = f"the same {VARIABLE} for all processes of the run, and nobody else who writes to its store"
            raise RankError(f"rank {self.rank}", f"{error}", instead, None, "its part of the run", f"{error}") from None

    def _reach(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except RuntimeError as error:
            host = "the launcher" if self.host is None else f"rank {self.host}"
            cause = f"{host}, which hosts the store of the run, has ended ({str(error).splitlines()[0]:.80})"
            instead = "look there for the reason"
            raise RankError(f"rank {self.rank}", cause, instead, self.host, "its part of the run", cause) from error


class Pulse:
    """How long each rank was seen not to beat; one that never did is not counted."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[Beat | None, float, float]] = {}

    def feel(self, board: Board, ranks: Iterable[int]) -> None:
        """Look at the beats of some ranks; the first look begins to count."""
        now = time.monotonic()
        for rank in ranks:
            beat = board.heard(rank)
            known = self._last.get(rank)
            self._last[rank] = (beat, now if known is None or known[0] != beat else known[1], now)

    def silent(self, seconds: float) -> list[int]:
        """The ranks that were seen not to beat for so long."""
        seen = list(self._last.items())  # another thread may look
        return [rank for rank, (beat, since, felt) in seen if beat is not None and felt - since > seconds]


def note_exit(store: Store, rank: int, ended: Exit, *, secret: Secret) -> None:
    """A launcher writes down how a process ended, for all transports that it used."""
    key = _exit_key(rank)
    store.set(key, secret.seal(key, json.dumps([ended.clean, ended.text])))


def _exit_key(rank: int) -> str:
    return f"weft/ended/{rank}"
