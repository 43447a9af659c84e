"""What ranks must say alike, compared with every message: programs, requests, weights.

Each rank keeps a journal of what it was asked to do. A message carries the state of its sender's journal when its batch
was submitted, and what was added since the last message; the receiver compares before it computes, and names the first
entry that differs.
"""

import hashlib
import json
from collections import deque
from typing import Any

import attrs

from weft.errors import ProgramError
from weft.transforms.pipelines.transports.plan import Plan

SAME = "the same code, configuration and batches on every rank: batches by a pure function of what all know"
_SAME_CALLS = "the same calls with the same arguments, in the same order, on every rank"
_MAX_ENTRIES = 4096
"""Entries of a journal that are kept to say what differs."""
_LONGEST = 500
"""Characters of an entry; of a longer one a digest stands for the rest."""
_MAX_PLANS = 64
"""Plans that are kept to say what differs."""


@attrs.frozen
class Mark:
    """The state of a journal when a micro-batch was submitted."""

    step: int
    count: int
    chain: str
    plan: str


@attrs.frozen
class Expected:
    """What a message must be of: a micro-batch, and a state of the journal."""

    mark: Mark
    microbatch: int
    returns: bool


class Agreement:
    """One rank's journal, and what it has told the others of it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._chain, self._count = "", 0
        self._entries: deque[tuple[str, str]] = deque(maxlen=_MAX_ENTRIES)
        self._marks: dict[int, Mark] = {}
        self._plans: dict[str, Plan] = {}
        self._told: dict[int, int] = {}  # to a peer, of so many entries
        self._shown: dict[int, deque[str]] = {}  # to a peer, the texts of these plans

    def add(self, subject: str, value: str) -> None:
        """Note what every rank must say alike, at the same place among its notes and steps."""
        if len(value) > _LONGEST:
            digest = hashlib.blake2b(value.encode(), digest_size=6).hexdigest()
            value = f"{value[: _LONGEST - 20]}… ({digest})"
        self._count += 1
        self._chain = hashlib.blake2b(f"{self._chain}\n{subject}\n{value}".encode(), digest_size=12).hexdigest()
        self._entries.append((subject, value))

    def begin(self, plan: Plan, first: int, step: int) -> None:
        """A step begins; its micro-batches are numbered from `first`, and those before are over."""
        self._plans.pop(plan.digest, None)
        self._plans[plan.digest] = plan
        if len(self._plans) > _MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        mark = Mark(step, self._count, self._chain, plan.digest)
        self._marks = {mb: found for mb, found in self._marks.items() if mb >= first}
        for mb in range(first, first + plan.num_microbatches):
            self._marks.setdefault(mb, mark)

    def end(self) -> None:
        """No message is under way: the next step numbers its micro-batches anew."""
        self._marks.clear()

    def head(self, peer: int, microbatch: int, returns: bool) -> dict[str, Any]:
        """What a message to a rank says of this rank's journal.

        Args:
            peer: who gets it.
            microbatch: its number.
            returns: whether it is an output that goes back to all ranks.
        """
        mark, told = self._marks[microbatch], self._told.get(peer, 0)
        head = {"mb": microbatch, "returns": returns, "count": mark.count, "chain": mark.chain, "plan": mark.plan}
        if told < mark.count:
            kept = self._count - len(self._entries)
            head["new"] = [max(told, kept), [self._entries[i - kept] for i in range(max(told, kept), mark.count)]]
            self._told[peer] = mark.count
        shown = self._shown.setdefault(peer, deque(maxlen=_MAX_PLANS // 2))
        if mark.plan not in shown:
            head["text"] = self._plans[mark.plan].text
            shown.append(mark.plan)
        return head

    def expect(self, microbatch: int, returns: bool) -> "Expected":
        """What the head of a message that this rank is to receive must say."""
        return Expected(self._marks[microbatch], microbatch, returns)

    def compare(self, peer: int, expected: "Expected", head: dict[str, Any]) -> None:
        """Raise ProgramError unless a rank that sent a message was in the same state when its batch was submitted."""
        mark = expected.mark
        if (head["count"], head["chain"]) != (mark.count, mark.chain):
            self._refuse_entry(mark, peer, head)
        if head["plan"] != mark.plan:
            known = self._plans.get(head["plan"])
            text = head.get("text", None if known is None else known.text)
            raise ProgramError(f"step {mark.step} of rank {self.rank}", self._plan_seen(mark, peer, text), SAME)
        microbatch = expected.microbatch
        if (head["mb"], head["returns"]) != (microbatch, expected.returns):
            raise ProgramError(
                f"step {mark.step} of rank {self.rank}: a message of micro-batch {microbatch} from rank {peer}",
                f"one of micro-batch {head['mb']}: rank {peer} is in another step",
                "the same batches, in the same order, on every rank",
            )

    def _refuse_entry(self, mark: Mark, peer: int, head: dict[str, Any]) -> None:
        start, theirs = head.get("new", (head["count"], []))
        kept = self._count - len(self._entries)
        mine = [self._entries[i - kept] for i in range(max(start, kept), mark.count)]
        theirs = [tuple(entry) for entry in theirs[max(start, kept) - start :]]
        index = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        if index is None:
            index = min(len(mine), len(theirs))
        own = _said(mine[index]) if index < len(mine) else f"nothing after its {mark.count} earlier calls"
        other = _said(theirs[index]) if index < len(theirs) else f"nothing after its {head['count']} earlier calls"
        raise ProgramError(
            f"step {mark.step} of rank {self.rank}", f"{own}, where rank {peer} has {other}", _SAME_CALLS
        )

    def _plan_seen(self, mark: Mark, peer: int, theirs: str | None) -> str:
        mine = self._plans[mark.plan].text
        if theirs is None:
            return f"another program than rank {peer} runs"
        lines = zip(mine.splitlines(), theirs.splitlines(), strict=False)
        a, b = next((pair for pair in lines if pair[0] != pair[1]), ("(all its lines)", "(more lines)"))
        return f"'{a.strip()}', where rank {peer} has '{b.strip()}'"


def _said(entry: tuple[str, ...]) -> str:
    return f"'{entry[0]}: {entry[1]}'"


def dumped(head: dict[str, Any]) -> bytes:
    """A head as bytes."""
    return json.dumps(head, separators=(",", ":")).encode()
