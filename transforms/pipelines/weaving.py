"""`weave`: makes programs from the order in which each rank runs its stages; `interleaved` uses it
for schedules with several stages on each rank.

A schedule is a pure function `(num_stages, jobs, *, schema, advances, buffers) -> programs`, such
as `make_programs`. To write one, choose the order in which each rank runs its stages, and let
`weave` add the effects that move the results.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from weft.effects import Broadcast, Effect, Fence, Program, Recv, Run, Send
from weft.errors import ProgramError
from weft.transforms.pipelines.argument_checks import check_count
from weft.transforms.pipelines.schedule import Job
from weft.values.schema import Schema

# `(num_stages, jobs, *, schema, advances, buffers) -> programs`, with the arguments of
# `make_programs`.
Schedule = Callable[..., Sequence[Program]]


def interleaved(num_ranks: int) -> Schedule:
    """The schedule of interleaved stages: stage s runs on rank s % num_ranks, and a rank runs its
    first stage on `num_ranks` micro-batches, then its second stage on the same micro-batches, and
    so on (Narayanan et al., 2021, "Efficient large-scale language model training on GPU clusters
    using Megatron-LM", forward only).

    With p equally fast ranks, v stages on each and m micro-batches (a multiple of p), the idle time
    of a rank is (p - 1) / (v * m) of its working time; with one stage on each rank, it is
    (p - 1) / m.

    Args:
        num_ranks: the number of ranks; the number of stages must be a multiple of it.

    Raises:
        ProgramError: `num_ranks` is not a whole number >= 1; or, when the schedule is called, the
            number of stages is not a multiple of it.

    >>> print(interleaved(2)(4, [Job(feeds=False)] * 2, advances=False)[1])
    rank 1 of 2
      recv stage 0 from 0 [mb 0]
      run stage 1 [mb 0]
      send stage 1 to 0 [mb 0]
      recv stage 0 from 0 [mb 1]
      run stage 1 [mb 1]
      send stage 1 to 0 [mb 1]
      recv stage 2 from 0 [mb 0]
      run stage 3 [mb 0]
      recv stage 2 from 0 [mb 1]
      run stage 3 [mb 1]
    """
    check_count(f"interleaved({num_ranks!r})", "num_ranks", num_ranks)

    def schedule(
        num_stages: int,
        jobs: Sequence[Job],
        *,
        schema: Schema | None = None,
        advances: bool = True,
        buffers: int | None = None,
    ) -> tuple[Program, ...]:
        if num_stages < 1 or num_stages % num_ranks:
            call = f"interleaved({num_ranks})({num_stages}, <{len(jobs)} jobs>)"
            raise ProgramError(
                call, f"{num_stages} stages on {num_ranks} ranks", "as many stages on each rank"
            )
        groups = list(_groups(jobs, num_ranks, advances))
        runs = [
            [
                Run(f"stage {first + rank}", mb)
                for group in groups
                for first in range(0, num_stages, num_ranks)
                for mb in group
            ]
            for rank in range(num_ranks)
        ]
        return weave(runs, jobs, schema=schema, advances=advances, buffers=buffers)

    return schedule


def _groups(jobs: Sequence[Job], size: int, advances: bool) -> Iterator[list[int]]:
    """The jobs in groups of at most `size`, such that no job waits for another job of its group."""
    group: list[int] = []
    for mb, job in enumerate(jobs):
        # A group runs the first stage on all its jobs before the last stage on any, so a job that
        # waits for another one of its group would wait forever.
        waits = job.after is not None and group and job.after >= group[0]
        # With `advances`, a job also waits until the jobs before it that do not feed have advanced.
        if group and (len(group) == size or waits or (advances and not jobs[mb - 1].feeds)):
            yield group
            group = []
        group.append(mb)
    if group:
        yield group


def weave(
    runs: Sequence[Iterable[Run]],
    jobs: Sequence[Job],
    *,
    schema: Schema | None = None,
    advances: bool = True,
    buffers: int | None = None,
) -> tuple[Program, ...]:
    """The programs in which each rank runs stages in the given order: `weave` adds the receives,
    sends, returned outputs, fences and advances so that one message per edge is enough.

    It simulates the runs in rounds, as if all stages were equally fast. A message is received in
    the round after it was sent, before the rank's next run, so that no rank waits for room on an
    edge. Each rank runs as soon as its next run has what it needs, so no other programs for these
    orders take fewer rounds. Every order works in which each run comes after the runs it needs.

    Args:
        runs: for each rank, its runs of stages in order; stage s runs on rank s % len(runs).
        jobs: one per micro-batch. A run waits for the output of its job's `after`. A job that does
            not feed advances once the rank has run all its stages on it, and runs of later jobs
            wait for this advance.
        schema, advances, buffers: as for `make_programs`.

    Raises:
        ProgramError: runs that cannot end, for example because one rank runs a stage before the
            stage that makes its input.

    >>> runs = [Run("stage 0", 0), Run("stage 2", 0)], [Run("stage 1", 0), Run("stage 3", 0)]
    >>> print(weave(runs, [Job()])[0])
    rank 0 of 2
      run stage 0 [mb 0]
      send stage 0 to 1 [mb 0]
      recv stage 1 from 1 [mb 0]
      run stage 2 [mb 0]
      send stage 2 to 1 [mb 0]
      broadcast from 1 [mb 0]
      run advance [mb 0]
    """
    orders = [list(order) for order in runs]
    call = f"weave(<the runs of {len(orders)} ranks>, <{len(jobs)} jobs>)"
    for rank, order in enumerate(orders):
        for run in order:
            if (
                run.stage is None
                or run.stage % len(orders) != rank
                or not 0 <= run.microbatch < len(jobs)
            ):
                instead = (
                    f"Run('stage s', mb), with s % {len(orders)} the rank and mb less than"
                    f" {len(jobs)}"
                )
                raise ProgramError(call, f"'{run}' on rank {rank}", instead)
    loom = _Loom(orders, jobs, schema, advances, buffers)
    while loom.play():
        pass
    stuck = next(((rank, order[0]) for rank, order in enumerate(orders) if order), None)
    if stuck is not None:
        instead = (
            "runs in an order in which each finds its input: stage by stage, and after the job that"
            " its own is after"
        )
        raise ProgramError(call, f"rank {stuck[0]} waits for ever at '{stuck[1]}'", instead)
    return tuple(
        Program(rank, len(orders), tuple(effects)) for rank, effects in enumerate(loom.effects)
    )


@attrs.define(eq=False)
class _Loom:
    """Programs in the making: the runs that are left, and the messages under way.

    Args:
        orders: for each rank, the runs that are left.
        jobs, schema, advances, buffers: as for `weave`.
        effects: for each rank, its effects so far.
        channels: for each pair of ranks, the sends and broadcasts under way, oldest first.
        available: the results (stage and micro-batch) that have arrived on the next stage's rank,
            but on which that stage has not run yet.
        taken: for each rank, the jobs that are over: their output has returned, or they do not feed
            and have advanced.
        ran: for each stage, the micro-batches that it has run on.
        last: for each rank, the stage and the micro-batch of its last run.
        num_stages: the number of stages on all ranks together.
    """

    orders: list[list[Run]]
    jobs: Sequence[Job]
    schema: Schema | None
    advances: bool
    buffers: int | None
    effects: list[list[Effect]] = attrs.field(init=False)
    channels: dict[tuple[int, int], list[Send | Broadcast]] = attrs.field(init=False, factory=dict)
    available: set[tuple[int, int]] = attrs.field(init=False, factory=set)
    taken: list[set[int]] = attrs.field(init=False)
    ran: dict[int, list[int]] = attrs.field(init=False)
    last: dict[int, tuple[int, int]] = attrs.field(init=False, factory=dict)
    num_stages: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        ranks = len(self.orders)
        self.effects = [[] for _ in range(ranks)]
        self.taken = [set() for _ in range(ranks)]
        stages = [run.stage for order in self.orders for run in order if run.stage is not None]
        self.num_stages = -(-(max(stages, default=0) + 1) // ranks) * ranks
        self.ran = {stage: [] for stage in range(self.num_stages)}

    def play(self) -> bool:
        """Play one round; False if no rank can do anything."""
        count = sum(map(len, self.effects))
        ranks = range(len(self.orders))
        for rank in ranks:
            self._take_in(rank)
        # Choose the ranks before any of them runs: no result of this round may be used in it.
        going = [rank for rank in ranks if self._is_ready(rank)]
        for rank in going:
            self._start(rank)
        for rank in going:
            self._finish(rank)
        return sum(map(len, self.effects)) > count

    def _take_in(self, rank: int) -> None:
        """Receive everything that was sent in the previous round. As a result, each edge has room
        for what this round sends, and no run waits for a fence."""
        last = len(self.orders) - 1
        before = (rank - 1) % len(self.orders)
        # The two may be the same rank, whose channel is then read once.
        for source in dict.fromkeys((last, before)):
            for sent in self.channels.pop((source, rank), []):
                if isinstance(sent, Broadcast):
                    self.effects[rank].append(Broadcast(last, sent.microbatch))
                    self._return(rank, sent.microbatch)
                else:
                    self.effects[rank].append(
                        Recv(source, sent.microbatch, self.schema, sent.stage)
                    )
                    self.available.add(
                        (source if sent.stage is None else sent.stage, sent.microbatch)
                    )

    def _return(self, rank: int, mb: int) -> None:
        self.taken[rank].add(mb)
        if self.advances:
            self.effects[rank].append(Run("advance", mb))

    def _next(self, rank: int) -> tuple[int, int]:
        run = self.orders[rank][0]
        assert run.stage is not None, "weave has checked that"
        return run.stage, run.microbatch

    def _is_ready(self, rank: int) -> bool:
        """Whether a rank's next run has its input and the output that it waits for."""
        if not self.orders[rank]:
            return False
        stage, mb = self._next(rank)
        before = {index for index in range(mb) if self.advances and not self.jobs[index].feeds}
        if (after := self.jobs[mb].after) is not None:
            before.add(after)
        # A run that is listed twice never gets ready the second time, so that `weave` refuses the
        # order.
        if not before <= self.taken[rank] or mb in self.ran[stage]:
            return False
        if (
            len(self.orders) == 1
            and self.buffers is not None
            and any(source == stage for source, _ in self.available)
        ):
            # On a single rank no fence protects a result: the next stage must read it before this
            # stage runs again and overwrites it.
            return False
        return stage == 0 or (stage - 1, mb) in self.available

    def _send(self, stage: int, mb: int) -> Send:
        ranks = len(self.orders)
        return Send(
            (stage + 1) % ranks, mb, self.schema, stage if self.num_stages > ranks else None
        )

    def _fenced(self, stage: int) -> int | None:
        """The micro-batch whose result the next run of a stage overwrites; None if that run needs
        no fence, because it overwrites none or one that was not sent."""
        ran = self.ran[stage]
        buffers = self.buffers
        if (
            buffers is None
            or len(ran) < buffers
            or (len(self.orders) == 1 and stage < self.num_stages - 1)
        ):
            return None
        mb = ran[-buffers]
        if stage < self.num_stages - 1 or self.jobs[mb].feeds:
            return mb
        return None

    def _start(self, rank: int) -> None:
        """Start a rank's next run."""
        stage, mb = self._next(rank)
        if (fence := self._fenced(stage)) is not None:
            self.effects[rank].append(Fence(fence))
        self.available.discard((stage - 1, mb))
        self.effects[rank].append(self.orders[rank].pop(0))
        self.ran[stage].append(mb)
        self.last[rank] = stage, mb

    def _finish(self, rank: int) -> None:
        """Send the result of the run that a rank started."""
        (stage, mb), ranks = self.last[rank], len(self.orders)
        if stage < self.num_stages - 1:
            if ranks == 1:
                self.available.add((stage, mb))
            else:
                self.effects[rank].append(send := self._send(stage, mb))
                self.channels.setdefault((rank, send.to), []).append(send)
        elif self.jobs[mb].feeds:
            self.effects[rank].append(returned := Broadcast(rank, mb))
            # The last stage is on the last rank, so these are all the others.
            for to in range(rank):
                self.channels.setdefault((rank, to), []).append(returned)
            self._return(rank, mb)
        if not self.jobs[mb].feeds and all(
            mb in self.ran[local_stage] for local_stage in range(rank, self.num_stages, ranks)
        ):
            self._return(rank, mb)
