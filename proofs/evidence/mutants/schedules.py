"""Planted bugs of schedules: in the generators of programs, and in the checker."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import attrs

from weft.effects import Broadcast, Effect, Fence, Program, Recv, Run, Send
from weft.errors import ProgramError
from weft.meshes.collectives import Collective
from weft.proofs.evidence.mutants.mutant import Mutant, replace
from weft.proofs.evidence.runs.suite import find
from weft.transforms.pipelines.checker import _check_runs, check_buffers, check_needs, check_peers
from weft.transforms.pipelines.machine import Machine, Step, interleave
from weft.transforms.pipelines.schedule import _effects
from weft.transforms.pipelines.weaving import _Loom
from weft.values.schema import Schema

_SCHEDULE = "weft.transforms.pipelines.schedule"
_CHECKER = "weft.transforms.pipelines.checker"
_MACHINE = "weft.transforms.pipelines.machine"
_PIPELINE = "weft.transforms.pipelines.pipeline"


def _generating(
    change: Callable[[int, list[Effect]], None],
) -> Callable[[], AbstractContextManager[Any]]:
    """Changes the list of a rank's effects in the generators."""

    def changed(rank: int, *args: Any) -> list[Effect]:
        effects = list(_effects(rank, *args))
        change(rank, effects)
        return effects

    # The generators and not the programs: `make_programs` itself is under test, with the checker
    # that must refuse what comes of it.
    return replace(_SCHEDULE, "_effects", changed)


def _sends(effects: Sequence[Effect]) -> list[int]:
    return [place for place, effect in enumerate(effects) if isinstance(effect, Send)]


def _drop_a_send(rank: int, effects: list[Effect]) -> None:
    # The last send: ranks are stuck only at the end, after everything else has gone well.
    for place in _sends(effects)[-1:]:
        del effects[place]


def _swap_sends(rank: int, effects: list[Effect]) -> None:
    places = _sends(effects)
    if len(places) > 1:
        # The counts on the edge still agree; only the order does not.
        effects[places[0]], effects[places[-1]] = effects[places[-1]], effects[places[0]]


def _other_schema(rank: int, effects: list[Effect]) -> None:
    # The order and the number of messages agree: the ends differ in what a message is.
    effects[:] = [attrs.evolve(e, schema=Schema(())) if isinstance(e, Recv) else e for e in effects]


def _no_fence(rank: int, effects: list[Effect]) -> None:
    # A run without fences gives right results wherever messages happen to be fast enough.
    effects[:] = [e for e in effects if not isinstance(e, Fence)]


def _rank_0_stays_behind(rank: int, effects: list[Effect]) -> None:
    # No rank waits for an advance, so nothing gets stuck: the states of the ranks are what differs.
    effects[:] = [e for e in effects if rank or not (isinstance(e, Run) and e.what == "advance")]


def _waiting_for_none(
    rank: int, num_stages: int, jobs: Sequence[Any], *args: Any
) -> Iterator[Effect]:
    # Programs do not contain `Job.after`, so the checker cannot see this: the law compares the
    # order of effects with the jobs.
    return _effects(rank, num_stages, [attrs.evolve(job, after=None) for job in jobs], *args)


def _one_further_ahead(stages_behind: int) -> int:
    # One more than the bound of `_ahead`, beyond which a rank may block the last one, for which it
    # waits itself. An edge that holds several messages hides it.
    return 2 * stages_behind + (2 if stages_behind else 1)


def _same_microbatch(sent: Step, taken: Step) -> bool:
    # From here on it is the checker that is wrong, and the law feeds it programs that are known to
    # be.
    return sent.effect.microbatch == taken.effect.microbatch


def _wide(programs: Sequence[Program], *, capacity: int) -> Iterator[Step]:
    # Enough room that no program of a test blocks. `check` promises an end with one message an
    # edge, which is the hardest case.
    return interleave(programs, capacity=1000)


def _nothing(*args: Any, **options: Any) -> tuple[()]:
    """Finds no mistake."""
    return ()


def _what_was_sent(program: Program, buffers: int, num_stages: int) -> Iterator[ProgramError]:
    """Checks the messages in flight, and not those still to be sent."""
    prefix: list[Effect] = []
    for effect in program.effects:
        # Each run is checked with the effects before it alone: a send that comes too late is not in
        # them, so that only a missing fence is found.
        prefix.append(effect)
        if isinstance(effect, Run) and effect.what != "advance":
            yield from check_buffers(
                attrs.evolve(program, effects=tuple(prefix)), buffers, num_stages
            )


def _any_root(program: Program, num_stages: int) -> Iterator[ProgramError]:
    """Checks senders and receivers, and not whose output returns."""
    effects = (
        # A root beyond the ranks is still refused: the test that is left out is that it is the last
        # rank.
        e
        for e in program.effects
        if not (isinstance(e, Broadcast) and e.root < program.num_ranks)
    )
    return check_peers(attrs.evolve(program, effects=tuple(effects)), num_stages)


def _in_order_of_numbers(programs: Sequence[Program]) -> Iterator[ProgramError]:
    """Refuses micro-batches that are not in the order of their numbers, though the same order on
    all ranks is right."""
    ran = [e.microbatch for e in programs[0].effects if isinstance(e, Run) and e.what != "advance"]
    # Too strict. A law that only offers broken programs to the checker would not notice.
    if ran != sorted(ran):
        yield ProgramError("check", f"micro-batches {ran}", "in order")
    yield from _check_runs(programs)


def _outputs_of_nobody(
    program: Program, returning: frozenset[int], num_stages: int
) -> Iterator[ProgramError]:
    # With no output that returns, an advance needs nothing but its stage's run.
    return check_needs(program, frozenset(), num_stages)


@contextmanager
def _lazy_loom() -> Iterator[None]:
    """Ranks receive only where they would otherwise wait, so that others wait for room."""
    take_in = _Loom._take_in

    def late(self: _Loom, rank: int) -> None:
        # Each message is received in the end, and with room for all of them nothing differs.
        if not self._is_ready(rank):
            take_in(self, rank)

    with mock.patch.object(_Loom, "_take_in", late):
        yield


def _any_collective(program: Program, num_stages: int) -> Iterator[ProgramError]:
    """Finds nothing wrong with collectives."""
    # A program of a pipeline performs no collective. It would be accepted here, and then not run.
    effects = (e for e in program.effects if not isinstance(e, Collective))
    return check_peers(attrs.evolve(program, effects=tuple(effects)), num_stages)


_ENDING_ANYHOW = partial(mock.patch.object, Machine, "leftover", _nothing)
_MADE, _CHECKED, _BROKEN = (
    find("L10", "schedules are right"),
    find("L10", "checker"),
    find("L10", "broken"),
)
_OWN = find("L10", "own schedules")
_WORKER = "weft.transforms.pipelines.worker"

# The bugs of `make_programs`, of its window, and of each part of `check`.
SCHEDULES = (
    Mutant("a send is dropped", _MADE, _generating(_drop_a_send)),
    Mutant("two sends on an edge change places", _MADE, _generating(_swap_sends)),
    Mutant("a receive is of another schema", _MADE, _generating(_other_schema)),
    Mutant("no fence before a buffer is used again", _MADE, _generating(_no_fence)),
    Mutant(
        "a rank runs one job too far ahead", _MADE, replace(_SCHEDULE, "_ahead", _one_further_ahead)
    ),
    Mutant(
        "a job does not wait for its tokens",
        _MADE,
        replace(_SCHEDULE, "_effects", _waiting_for_none),
    ),
    Mutant("rank 0 never advances", _MADE, _generating(_rank_0_stays_behind)),
    Mutant("schemas are not compared", _BROKEN, replace(_MACHINE, "matches", _same_microbatch)),
    Mutant(
        "an edge is taken to hold 1000 messages", _BROKEN, replace(_CHECKER, "interleave", _wide)
    ),
    Mutant(
        "a buffer may be used again in flight",
        _BROKEN,
        replace(_CHECKER, "check_buffers", _nothing),
    ),
    Mutant(
        "a result may be overwritten unsent",
        _BROKEN,
        replace(_CHECKER, "check_buffers", _what_was_sent),
    ),
    Mutant(
        "an advance may miss its output",
        _BROKEN,
        replace(_CHECKER, "check_needs", _outputs_of_nobody),
    ),
    # Every rank reaches its end, so a checker that only looks for a deadlock accepts the program.
    Mutant("messages that nobody receives are accepted", _BROKEN, _ENDING_ANYHOW),
    Mutant(
        "micro-batches must come in order",
        _CHECKED,
        replace(_CHECKER, "_check_runs", _in_order_of_numbers),
    ),
    Mutant("effects need nothing", _BROKEN, replace(_CHECKER, "check_needs", _nothing)),
    Mutant(
        "ranks may differ in what they run", _BROKEN, replace(_CHECKER, "_check_runs", _nothing)
    ),
    Mutant(
        "own schedules may leave work undone",
        _OWN,
        replace(_PIPELINE, "refuse_other_work", _nothing),
    ),
    # With one stage a rank the first index is the only one: ranks must run several stages in turn.
    Mutant("states come back by rank", _OWN, replace(_WORKER, "_index", lambda stage_run: 0)),
    Mutant("messages wait until a rank needs them", _OWN, _lazy_loom),
    Mutant(
        "a collective is accepted, and not performed",
        _BROKEN,
        replace(_CHECKER, "check_peers", _any_collective),
    ),
    Mutant("any rank's result may return", _BROKEN, replace(_CHECKER, "check_peers", _any_root)),
)
