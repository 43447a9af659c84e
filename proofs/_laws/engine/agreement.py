"""L11: ranks with the same requests accept each other's messages, and the first message after a
difference is refused."""

import functools
import json
from collections.abc import Sequence

import attrs

from weft.errors import ProgramError
from weft.proofs.checks.difference import LawViolation
from weft.transforms.pipelines.checker import CheckedPrograms
from weft.transforms.pipelines.schedule import Job, make_programs
from weft.transforms.pipelines.transports.agreement import Agreement, header_bytes

_LAW = "L11 what differs is refused with the first message"


@attrs.frozen
class Asked:
    """What a rank is asked to do in one step: notes to record, then a program to run."""

    notes: tuple[tuple[str, str], ...]
    program: str = "scale"


@functools.cache
def _programs(microbatches: int, program: str) -> CheckedPrograms:
    return CheckedPrograms(
        make_programs(2, [Job()] * microbatches), read_sources=lambda: (program,)
    )


def differences_are_refused(
    steps: Sequence[tuple[int, bool]], mine: Sequence[Asked], theirs: Sequence[Asked]
) -> None:
    """L11: a rank accepts another rank's message if and only if both had the same requests up to
    the message's step.

    Later requests do not matter.

    Args:
        steps: the number of micro-batches of each step, and whether the last one is sent and
            received only in the next step.
        mine, theirs: what the sender and the receiver are asked to do in each step.
    """
    sender = Agreement(0)
    receiver = Agreement(1)
    first = 0
    waiting = list[int]()
    same_in: dict[int, bool] = {}
    for step, (microbatches, late) in enumerate(steps):
        oldest = min([first, *waiting])
        after = first + microbatches
        for agreement, requests in ((sender, mine[step]), (receiver, theirs[step])):
            for note in requests.notes:
                agreement.add(*note)
            agreement.begin(_programs(after - oldest, requests.program), oldest, step)
        # The oracle compares all that was asked so far, and no digest of it.
        same_in |= dict.fromkeys(range(first, after), mine[: step + 1] == theirs[: step + 1])
        owed = [*waiting, *range(first, after)]
        first = after
        waiting = owed[-1:] if late else []
        for microbatch in owed[: len(owed) - len(waiting)]:
            refused = _refusal(sender, receiver, microbatch)
            if same_in[microbatch] and refused:
                raise LawViolation(
                    f"{_LAW}: both were asked for {mine[: step + 1]}, and it said: {refused}"
                )
            if not same_in[microbatch] and not refused:
                raise LawViolation(
                    f"{_LAW}: {mine[: step + 1]} and {theirs[: step + 1]} were taken for the same"
                )
            if refused:
                return


def _refusal(sender: Agreement, receiver: Agreement, microbatch: int) -> str:
    """The reason why the receiver refuses the sender's message, or an empty string."""
    # Through JSON, as over the wire, where tuples become lists.
    header = json.loads(header_bytes(sender.header(1, microbatch, False)))
    try:
        receiver.compare(0, receiver.expect(microbatch, False), header)
    except ProgramError as error:
        return error.problem
    return ""
