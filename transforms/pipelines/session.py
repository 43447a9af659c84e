"""`Session`: a pipeline under way, to which batches are submitted a few at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from weft.arguments.checks import kind_of
from weft.errors import ProgramError
from weft.transforms.pipelines.argument_checks import refuse
from weft.transforms.pipelines.checker import CheckedPrograms
from weft.transforms.pipelines.microbatch import after_first, class_text
from weft.transforms.pipelines.schedule import Job, mistake_in_jobs
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.watching.failures import described
from weft.transforms.pipelines.worker import Worker, put_batches, states_of
from weft.values.bounded import BoundedDict
from weft.values.donation import refuse_donated_in

# For each rank, the effects `start:stop` that a run performs.
Spans = tuple[tuple[int, int], ...]
# The most counts that a session caches, since it may run for ever.
_MAX_COUNTS = 1024


@attrs.frozen(eq=False)
class Submission:
    """A batch, the part of it that stages after the first one get (`later`), and the text of its
    class, on which all ranks must agree. A caller that submits the same immutable batch repeatedly
    can make its `Submission` once."""

    batch: Any
    later: Any
    text: str

    @classmethod
    def of(cls, batch: Any) -> "Submission":
        refuse_donated_in("session.submit(...)", batch=batch)
        return cls(batch, after_first(batch), class_text(batch))


class Session:
    """A pipeline under way. Made by `Pipelined.session`.

    The schedule determines when an output returns from the last stage, so a batch's output may come
    from a later `submit` or from `close`. Every rank gets the same outputs from the same call.

    >>> from weft.transforms.pipelines.pipeline import pipeline
    >>> stages = [lambda p, s, batch, x: (s, 10 * batch), lambda p, s, batch, x: (s, x + s)]
    >>> session = pipeline(stages, advance=lambda s, batch, out: s + 1).session((None, None), (0, 0))
    >>> outputs = session.submit([1], [Job()]) + session.submit([2, 3], [Job(after=0), Job(after=0)])
    >>> state, rest = session.close()
    >>> state, outputs + rest
    ((3, 3), [(0, 10), (1, 21), (2, 32)])
    """

    def __init__(
        self,
        num_ranks: int,
        transport: Transport,
        workers: Sequence[Worker],
        checked: Callable[[Sequence[Job], Sequence[str], Spans | None], CheckedPrograms],
        count: Callable[[Sequence[Job]], tuple[tuple[int, ...], int]],
    ) -> None:
        self._transport = transport
        self._workers = workers
        self._make_checked = checked
        self._count_running = count
        self._mail = transport.mail(num_ranks)
        # The jobs that are not over, and their batches. They are numbered from `_first` on, the
        # first job whose output some rank has yet to receive.
        self._jobs: list[Job] = []
        self._batches: list[Submission] = []
        self._first = 0
        # For each rank, how many effects of the programs for `_jobs` it has performed
        self._done = (0,) * num_ranks
        # Why the session is over; empty while it is not
        self._ended = ""
        self._counts = BoundedDict[tuple[Job, ...], tuple[tuple[int, ...], int]](_MAX_COUNTS)

    def submit(self, batches: Sequence[Any], jobs: Sequence[Job]) -> list[tuple[int, Any]]:
        """Run batches after all batches that were submitted before.

        Args:
            batches: batches or their `Submission`s, in order.
            jobs: one per batch; `after` counts from the first job of the session.

        Returns:
            The number and the output of each job that ended during this call, that is, whose output
            has now returned to all ranks. The output is None for a job that does not feed.

        Raises:
            ProgramError: there is not one job per batch, or a job's `after` is not an earlier job
                that feeds; nothing ran in these cases. Or the session was closed; or it failed
                before, and its state is lost.
        """
        self._check(batches, jobs)
        submissions = [
            one if isinstance(one, Submission) else Submission.of(one) for one in batches
        ]
        all_jobs = [*self._jobs, *(_shifted(job, self._first) for job in jobs)]
        # This may refuse the schedule's programs, so it comes before anything changes.
        ends, taken = self._count(all_jobs)
        self._batches += submissions
        self._jobs = all_jobs
        return self._advance_to(ends, taken)

    def close(self) -> tuple[tuple[Any, ...], list[tuple[int, Any]]]:
        """Receive all outputs that have not returned yet. Returns the state, which now belongs to
        the caller, and these outputs.

        Raises:
            ProgramError: the session was closed or failed before.
        """
        self._refuse_ended("session.close()")
        if self._jobs:
            ends = tuple(len(program.effects) for program in self._checked(None).lane)
        else:
            ends = self._done
        outputs = self._advance_to(ends, len(self._jobs))
        self._ended = "it was closed, and its state is the caller's"
        return states_of(self._workers), outputs

    def _refuse_ended(self, call: str) -> None:
        if self._ended:
            raise ProgramError(
                call,
                f"a session that is over: {self._ended}",
                "pipelined.session(params, state) anew",
            )

    def _check(self, batches: Sequence[Any], jobs: Sequence[Job]) -> None:
        """Raise ProgramError if these batches and jobs cannot be submitted."""
        are_lists = isinstance(batches, list | tuple) and isinstance(jobs, list | tuple)
        sizes = [
            f"{len(x)} {of}" if are_lists else kind_of(x)
            for x, of in ((batches, "batches"), (jobs, "jobs"))
        ]
        call = f"session.submit(<{sizes[0]}>, <{sizes[1]}>)"
        self._refuse_ended(call)
        if are_lists and len(batches) == len(jobs) and all(isinstance(job, Job) for job in jobs):
            # The kept jobs were checked before, and their `after` counts from `_first`, unlike that
            # of the new jobs: leave it out.
            kept = [Job(job.feeds) for job in self._jobs]
            mistake = mistake_in_jobs([*kept, *jobs], self._first)
        else:
            mistake = (
                f"{sizes[0]} and the jobs {jobs!r:.60}",
                "a Job for each batch: submit([batch], [Job()])",
            )
        refuse(call, mistake)

    def _count(self, jobs: Sequence[Job]) -> tuple[tuple[int, ...], int]:
        key = tuple(jobs)
        if (counts := self._counts.get(key)) is None:
            counts = self._counts[key] = self._count_running(jobs)
        return counts

    def _checked(self, spans: Spans | None) -> CheckedPrograms:
        return self._make_checked(self._jobs, [one.text for one in self._batches], spans)

    def _advance_to(self, ends: tuple[int, ...], taken: int) -> list[tuple[int, Any]]:
        """Perform each rank's effects up to `ends`, after which the first `taken` jobs are over.
        Returns the number and the output of each of them."""
        if ends != self._done:
            whole = [one.batch for one in self._batches]
            later = [one.later for one in self._batches]
            put_batches(self._workers, whole, later, self._first)
            try:
                self._transport.run(
                    self._checked(tuple(zip(self._done, ends, strict=True))),
                    self._workers,
                    self._mail,
                )
            except BaseException as error:
                # The session cannot go on: some ranks are further than others, and messages are
                # under way.
                self._ended = f"it failed ({described(error):.200})"
                raise
            finally:
                # So that an idle session does not keep batches alive
                put_batches(self._workers, (), (), self._first)
        outputs = [(self._first + mb, self._workers[0].outputs.get(mb)) for mb in range(taken)]
        for worker in self._workers:
            worker.drop_finished(taken)
        self._jobs = [_shifted(job, taken) for job in self._jobs[taken:]]
        self._batches = self._batches[taken:]
        self._first += taken
        # The programs of the remaining jobs lack the effects of the jobs that are over, so the
        # performed effects are counted anew.
        self._done = self._count(self._jobs)[0]
        return outputs


def _shifted(job: Job, by: int) -> Job:
    """The job, with `after` counted from job `by` on. All ranks are past the jobs before `by`, so
    waiting for one of them becomes waiting for nothing."""
    after = job.after
    if after is None:
        return job
    return Job(job.feeds, None if after < by else after - by)
