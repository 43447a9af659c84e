"""`pipeline`: stages as one step. Each rank's part is a program of effects, checked before the first tensor moves."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from weft.batch import Batch
from weft.donation import donated_argnames
from weft.effects import Program, Schema, listing
from weft.errors import ProgramError
from weft.transforms.microbatch import join, split
from weft.transforms.pipeline_checks import check_entries, check_options, check_stages, refuse_transform
from weft.transforms.schedule import Job, count_running, decode_jobs, jobs_for, make_programs
from weft.transforms.transports import Transport
from weft.transforms.transports.fingerprint import fingerprint
from weft.transforms.transports.local import Local
from weft.transforms.transports.plan import Plan
from weft.transforms.transports.worker import Worker, call_stage
from weft.trees import find_descriptors, tree_map

Stage = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
Advance = Callable[[Any, Any, Any], Any]

_MAX_PLANS = 1024


def compose(stages: Sequence[Stage], *, advance: Advance | None = None) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """The step that runs the stages one after the other on the whole batch: what every pipeline must equal.

    Args:
        stages: each `(params, state, batch, x) -> (state, y)`; x is None on the first, then the y of the one before.
        advance: `(state, batch, out) -> state`, run for every stage with the last one's output.

    Returns:
        A step `(params, state, batch) -> (state, out)`, where params and state are tuples, one entry a stage.
    """
    stages = check_stages("compose", stages)

    def step(params: Sequence[Any], state: Sequence[Any], batch: Any) -> tuple[Any, Any]:
        check_entries("compose", len(stages), range(len(stages)), params, state)
        x: Any = None
        states: list[Any] = []
        for stage, p, s in zip(stages, params, state, strict=True):
            new, x = call_stage(len(states), stage, p, s, batch, x)
            states.append(new)
        if advance is not None:
            states = [advance(s, batch, x) for s in states]
        return tuple(states), x

    step.__weft_donates__ = _donations(stages, advance)  # type: ignore[attr-defined]
    return step


def _donations(stages: Sequence[Stage], advance: Advance | None) -> tuple[str, ...]:
    functions: list[Callable[..., Any]] = [*stages, *([advance] if advance is not None else [])]
    return ("state",) if any("state" in donated_argnames(f) for f in functions) else ()


class Pipelined:
    """What `pipeline` returns: a step, and the programs that it runs. `print` it to read them."""

    def __init__(
        self,
        stages: Sequence[Stage],
        microbatches: int,
        advance: Advance | None,
        schema: Schema | None,
        transport: Transport,
    ) -> None:
        self.stages = tuple(stages)
        self.microbatches = microbatches
        self.transport = transport
        self._advance = advance
        self._schema = schema
        self._ranks = transport.ranks(len(self.stages))
        self._returns = advance is not None or len(self._ranks) < len(self.stages)
        # A stage that lends its results overwrites them when it runs again.
        self._buffers = 1 if any(getattr(stage, "lends", False) for stage in self.stages) else None
        self._fingerprints = (
            *(fingerprint(index, stage) for index, stage in enumerate(self.stages)),
            "advance: none" if advance is None else fingerprint(None, advance),
        )
        self._plans: dict[Any, Plan] = {}
        self.__weft_donates__ = _donations(self.stages, advance)
        self.__name__ = f"pipeline of {len(self.stages)} stages"
        self.programs()

    def programs(self, microbatches: int | None = None) -> tuple[Program, ...]:
        """Each rank's program for so many micro-batches (None: the pipeline's own number), checked."""
        microbatches = self.microbatches if microbatches is None else microbatches
        if not isinstance(microbatches, int) or microbatches < 1:
            raise ProgramError(f"{self.__name__}.programs({microbatches!r})", "no number of parts", "an int >= 1")
        return self._plan([Job(feeds=self._returns)] * microbatches, ()).programs

    def _plan(
        self, jobs: Sequence[Job], classes: Sequence[str], spans: tuple[tuple[int, int], ...] | None = None
    ) -> Plan:
        key = (tuple(jobs), tuple(classes), spans)
        if key not in self._plans:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            advances = self._advance is not None
            made = make_programs(len(self.stages), jobs, schema=self._schema, advances=advances, buffers=self._buffers)
            programs = tuple(attrs.evolve(program, classes=tuple(classes)) for program in made)
            self._plans[key] = Plan(programs, self._buffers, self._fingerprints, spans)
        return self._plans[key]

    def __call__(self, params: Sequence[Any], state: Sequence[Any], batch: Any) -> tuple[Any, Any]:
        workers = self._workers(params, state)
        batches = split(batch, self.microbatches)
        states, outputs = self._run(workers, batches, [Job(feeds=self._returns)] * len(batches))
        return states, join(outputs, batches)

    def stream(
        self, params: Sequence[Any], state: Sequence[Any], batches: Sequence[Any], jobs: Sequence[Job] | None = None
    ) -> tuple[Any, list[Any]]:
        """Run batches one after the other, as calls in a row would, but so that stages overlap: each batch is a
        micro-batch, and waits only for the tokens of its own requests.

        Args:
            params, state: as a call takes them.
            batches: in order: prefills, chunks of prompts and decodes in any mixture.
            jobs: what each waits for (`jobs_for`, `decode_jobs`). None: found by reading the batches on the host.

        Returns:
            The new state, and for each batch the output; None for one whose job does not feed.
        """
        workers = self._workers(params, state)
        found = self._jobs(batches) if jobs is None else jobs
        if len(found) != len(batches):
            seen = f"{len(batches)} batches and {len(found)} jobs"
            raise ProgramError(f"{self.__name__}.stream(...)", seen, "a job for each batch")
        return self._run(workers, batches, found)

    def repeat(self, params: Sequence[Any], state: Sequence[Any], batch: Any, length: int) -> tuple[Any, list[Any]]:
        """Run the same batch `length` times, as calls in a row would, but so that stages overlap: the micro-batches are
        cohorts, each of which waits only for its own tokens of the step before. What `scan` does.

        Returns:
            The new state, and the output of each step.
        """
        workers = self._workers(params, state)
        cohorts = split(batch, self.microbatches)
        jobs: Sequence[Job] = decode_jobs(len(cohorts), length)
        if self._advance is None:
            jobs = [Job(feeds=self._returns)] * len(jobs)
        states, outputs = self._run(workers, cohorts * length, jobs)
        starts = range(0, len(outputs), len(cohorts))
        return states, [join(outputs[i : i + len(cohorts)], cohorts) for i in starts]

    def _jobs(self, batches: Sequence[Any]) -> Sequence[Job]:
        if not all(isinstance(batch, Batch) for batch in batches):
            return [Job(feeds=self._returns, after=i - 1 if i and self._returns else None) for i in range(len(batches))]
        return jobs_for([frozenset(b.rows.tolist()) for b in batches], [bool(b.samples.any()) for b in batches])

    def _run(
        self, workers: Sequence[Worker], batches: Sequence[Any], jobs: Sequence[Job]
    ) -> tuple[tuple[Any, ...], list[Any]]:
        plan = self._plan(jobs, [class_text(batch) for batch in batches])
        put_batches(workers, batches)
        self.transport.run(plan, workers, self.transport.mail(len(self.stages)))
        returned = workers[0].outputs if self._returns else workers[-1].results
        return tuple(worker.state for worker in workers), [returned.get(mb) for mb in range(len(batches))]

    def _workers(self, params: Sequence[Any], state: Sequence[Any]) -> list[Worker]:
        check_entries("pipeline", len(self.stages), self._ranks, params, state)
        refuse_transform(self.transport)
        last = len(self.stages) - 1
        keeps = getattr(self.stages[last], "lends", False)
        return [
            Worker(rank, self.stages[rank], p, s, self._advance, (), keeps and rank == last)
            for rank, p, s in zip(self._ranks, params, state, strict=True)
        ]

    def session(self, params: Sequence[Any], state: Sequence[Any]) -> "Session":
        """A stream without an end: batches are submitted some at a time, and stages overlap across submissions.

        Args:
            params, state: as a call takes them; the state is the session's until `close()` returns it.

        Raises:
            ProgramError: a pipeline without `advance`, to whose ranks nothing returns.
        """
        if self._advance is None:
            call = f"{self.__name__}.session(params, state)"
            raise ProgramError(call, "no advance, so that nothing returns", "pipeline(stages, advance=...)")
        return Session(self, self._workers(params, state))

    def __str__(self) -> str:
        return listing(self.programs())

    def __repr__(self) -> str:
        return f"<{self.__name__}, {self.microbatches} micro-batches>"


class Session:
    """A pipeline under way. Made by `Pipelined.session`.

    What returns from the last stage is taken in where the schedule has it, which may be some submissions later: then it
    is among what `submit` returns. Every rank gets the same from the same call.

    >>> stages = [lambda p, s, batch, x: (s, 10 * batch), lambda p, s, batch, x: (s, x + s)]
    >>> session = pipeline(stages, advance=lambda s, batch, out: s + 1).session((None, None), (0, 0))
    >>> outputs = session.submit([1], [Job()]) + session.submit([2, 3], [Job(after=0), Job(after=0)])
    >>> state, rest = session.close()
    >>> state, outputs + rest
    ((3, 3), [(0, 10), (1, 21), (2, 32)])
    """

    def __init__(self, pipelined: Pipelined, workers: Sequence[Worker]) -> None:
        self._pipelined = pipelined
        self._workers = workers
        self._mail = pipelined.transport.mail(len(pipelined.stages))
        self._jobs: list[Job] = []  # those from `_first` on: what some rank is to take in, and all behind it
        self._batches: list[Any] = []
        self._first = 0
        self._done = (0,) * len(pipelined.stages)  # effects performed, of the programs of `_jobs`
        self._closed = False

    @property
    def num_jobs(self) -> int:
        """Batches submitted so far."""
        return self._first + len(self._jobs)

    def submit(self, batches: Sequence[Any], jobs: Sequence[Job]) -> list[tuple[int, Any]]:
        """Run batches, behind all that were submitted before.

        Args:
            batches: in order.
            jobs: one a batch; `after` counts from the first job of the session.

        Returns:
            The number of each job whose output all ranks have taken in by now, and had not before, and the output; of
            jobs that do not feed, None.

        Raises:
            ProgramError: a job that runs after one that does not feed, or is not before it; other than a job a batch; a
                session that was closed. The session is as it was before.
        """
        self._check(batches, jobs)
        self._jobs += [attrs.evolve(job, after=self._relative(job.after)) for job in jobs]
        self._batches += batches
        return self._advance_to(*self._count())

    def close(self) -> tuple[tuple[Any, ...], list[tuple[int, Any]]]:
        """Take in all that is still to return; the state, and these outputs. The session is over."""
        self._refuse_closed("close()")
        self._closed = True
        ends = tuple(len(program.effects) for program in self._plan(None).programs) if self._jobs else self._done
        outputs = self._advance_to(ends, len(self._jobs))
        return tuple(worker.state for worker in self._workers), outputs

    def _refuse_closed(self, call: str) -> None:
        if self._closed:
            raise ProgramError(f"session.{call}", "a session that was closed", "pipeline(...).session(params, state)")

    def _check(self, batches: Sequence[Any], jobs: Sequence[Job]) -> None:
        """Raise ProgramError if these cannot be submitted."""
        self._refuse_closed("submit(batches, jobs)")
        call = f"session.submit(<a {type(batches).__name__}>, <a {type(jobs).__name__}>)"
        if not isinstance(batches, list | tuple) or not isinstance(jobs, list | tuple):
            raise ProgramError(call, "no list of batches, or none of jobs", "submit([batch, ...], [Job(...), ...])")
        if len(batches) != len(jobs) or not all(isinstance(job, Job) for job in jobs):
            raise ProgramError(call, f"{len(batches)} batches and the jobs {jobs!r:.60}", "a Job for each batch")
        feeds = [job.feeds for job in (*self._jobs, *jobs)]
        for index, job in enumerate(jobs, self.num_jobs):
            after = job.after
            if after is not None and not (0 <= after < index and (after < self._first or feeds[after - self._first])):
                raise ProgramError(call, f"job {index} runs after job {after}", "an earlier job, whose output returns")

    def _relative(self, after: int | None) -> int | None:
        return None if after is None or after < self._first else after - self._first

    def _count(self) -> tuple[tuple[int, ...], int]:
        return count_running(len(self._pipelined.stages), self._jobs, advances=True, buffers=self._pipelined._buffers)

    def _plan(self, spans: tuple[tuple[int, int], ...] | None) -> Plan:
        return self._pipelined._plan(self._jobs, [class_text(batch) for batch in self._batches], spans)

    def _advance_to(self, ends: tuple[int, ...], taken: int) -> list[tuple[int, Any]]:
        """Perform each rank's effects up to `ends`; the jobs before `taken` are over then."""
        if ends != self._done:
            put_batches(self._workers, self._batches, self._first)
            self._pipelined.transport.run(
                self._plan(tuple(zip(self._done, ends, strict=True))), self._workers, self._mail
            )
        outputs = [(self._first + mb, self._workers[0].outputs.get(mb)) for mb in range(taken)]
        for worker in self._workers:
            worker.forget(taken)
        self._jobs = [attrs.evolve(j, after=_shifted(j.after, taken)) for j in self._jobs[taken:]]
        self._batches = self._batches[taken:]
        self._first += taken
        self._done = self._count()[0]
        return outputs


def _shifted(after: int | None, by: int) -> int | None:
    return None if after is None or after < by else after - by


def put_batches(workers: Sequence[Worker], batches: Sequence[Any], first: int = 0) -> None:
    """Give workers the micro-batches of a run: to those behind the first stage not what only that one takes."""
    later = [after_first(batch) for batch in batches]
    for worker in workers:
        worker.batches, worker.first = (later if worker.rank else batches), first


def after_first(tree: Any) -> Any:
    """What stages behind the first one get of a batch, or of what holds one: not what only the first takes."""
    return tree_map(
        lambda x: x.after_first() if isinstance(x, Batch) else x, tree, is_leaf=lambda x: isinstance(x, Batch)
    )


def class_of(batch: Any) -> Any:
    """What all ranks must agree on of a batch: its descriptor, or of plain tensors the schema."""
    found = find_descriptors(batch)
    return found[0] if found else Schema.of(batch)


def class_text(batch: Any) -> str:
    """What all ranks must agree on of a batch (or of work that holds one as `batch`), and what the layout of its
    messages follows from: its class, and whether it has targets, whose logprobs come back."""
    targets = getattr(getattr(batch, "batch", batch), "targets", None)
    return f"{class_of(batch)}{'' if targets is None else ', with targets'}"


def pipeline(
    stages: Sequence[Stage],
    *,
    microbatches: int = 1,
    advance: Advance | None = None,
    schema: Schema | None = None,
    transport: Transport | None = None,
) -> Pipelined:
    """Span a step over stages: one program of Send, Recv and Run a rank, checked, and executed by a transport.

    Args:
        stages: each `(params, state, batch, x) -> (state, y)`; x is None on the first, then the y of the one before. A
            graphified stage is a stage.
        microbatches: parts that the batch is cut into, at most (a batch of fewer requests is cut into one a request).
            With more than one, the stages must be separable by rows: what they return for a request depends on that
            request, the params and its own part of the state alone, and every output holds one entry a request or a
            token (only sizes are checked: `batch.sum(0)` of as many columns as a part has rows is joined, and wrong).
        advance: `(state, batch, out) -> state`; where given, the last stage's output goes back to every rank, and each
            advances its state with it.
        schema: what travels between two stages; where given, every value is held against it.
        transport: where the ranks run; None: `Local()`, in this process and thread.

    Returns:
        A step `(params, state, batch) -> (state, out)` over tuples with one entry for each stage that runs in this
        process: with `Local` and `Threads` all, with `Distributed` this rank's alone. Its `programs(m)` are data.
        Lists will do; but the new state is a tuple, to `graphify` another structure, which it captures once more.
        Gradients pass with `Local` (`torch.func` too) and with `Threads` (`backward()` alone), not between processes.

    Raises:
        ProgramError: an argument that is none, or a program that the check refuses.

    >>> print(pipeline([lambda p, s, batch, x: (s, batch + p), lambda p, s, batch, x: (s, x * p)], microbatches=1))
    rank 0 of 2
      run stage 0 [mb 0]
      send to 1 [mb 0]
    rank 1 of 2
      recv from 0 [mb 0]
      run stage 1 [mb 0]
    """
    stages = check_stages("pipeline", stages)
    check_options(len(stages), microbatches, advance, schema, transport)
    return Pipelined(stages, microbatches, advance, schema, transport or Local())
