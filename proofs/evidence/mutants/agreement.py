"""Planted bugs of agreement between ranks: the journal of requests, and its comparison with each
message."""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

from weft.proofs.evidence.mutants.mutant import Mutant
from weft.proofs.evidence.runs.suite import find
from weft.transforms.pipelines.checker import CheckedPrograms
from weft.transforms.pipelines.transports.agreement import Agreement, JournalState

_LAW = find("L11", "differs")


def _method(name: str, value: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    return partial(mock.patch.object, Agreement, name, value)


# Every journal stays empty, so ranks that were asked for different requests agree in everything.
def _not_noted(self: Agreement, subject: str, value: str) -> None:
    pass


# The chain of digests stands still. A test that only drops a note on one rank would still pass,
# since the counts differ; as many notes with other contents are needed.
def _counted(self: Agreement, subject: str, value: str) -> None:
    self._count += 1
    self._entries.append((subject, value))


# The scheduler serves first come, first served, so the same requests in another order are other
# requests. Here both orders give one chain.
def _in_any_order(self: Agreement, subject: str, value: str) -> None:
    self._count += 1
    self._entries.append((subject, value))
    self._chain = str(sorted(self._entries))


# A difference is forgotten at the next equal note. A test that compares after each note would find
# it in time; the law lets several notes come before one message.
def _last_alone(self: Agreement, subject: str, value: str) -> None:
    self._count += 1
    self._entries.append((subject, value))
    self._chain = hashlib.blake2b(f"{subject}{value}".encode(), digest_size=8).hexdigest()


def _newest(self: Agreement, checked: CheckedPrograms, first: int, step: int) -> None:
    """Late messages are compared with the rank's current requests."""
    self._programs[checked.digest] = checked
    # The right version keeps the state with which each micro-batch was submitted. This one is too
    # strict and not too lax: ranks that agree refuse each other, which a test of differences alone
    # would pass.
    state = JournalState(step, self._count, self._chain, checked.digest)
    self._states = dict.fromkeys(range(first, first + checked.num_microbatches), state)


def _any_program(self: Agreement, checked: CheckedPrograms, first: int, step: int) -> None:
    # One digest for all programs: ranks with equal requests but other stages exchange messages.
    self._programs[""] = checked
    state = JournalState(step, self._count, self._chain, "")
    for microbatch in range(first, first + checked.num_microbatches):
        self._states.setdefault(microbatch, state)


# The bugs of the journal and of its comparison.
AGREEMENT = (
    Mutant("nothing is noted", _LAW, _method("add", _not_noted)),
    Mutant("notes are counted, not compared", _LAW, _method("add", _counted)),
    Mutant("notes are compared in any order", _LAW, _method("add", _in_any_order)),
    Mutant("the last note alone is compared", _LAW, _method("add", _last_alone)),
    Mutant("late messages are compared with the newest notes", _LAW, _method("begin", _newest)),
    Mutant("programs are not compared", _LAW, _method("begin", _any_program)),
)
