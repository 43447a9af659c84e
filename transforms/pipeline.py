"""`pipeline`: stages as one step. Each rank's part is a program of effects, checked before the first tensor moves."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import attrs

from weft.batch import Batch
from weft.donation import donated_argnames, refuse_donated
from weft.effects import Program, Schema, listing
from weft.errors import ProgramError
from weft.torchapi import in_dispatch_mode
from weft.transforms.microbatch import join, split
from weft.transforms.schedule import Job, count_running, decode_jobs, jobs_for, make_programs
from weft.transforms.transports import Transport
from weft.transforms.transports.failures import described
from weft.transforms.transports.fingerprint import fingerprint
from weft.transforms.transports.local import Local
from weft.transforms.transports.plan import Plan
from weft.transforms.transports.worker import Worker, call_stage
from weft.trees import find_descriptors, tree_leaves, tree_map

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
    stages = _checked_stages("compose", stages)

    def step(params: Sequence[Any], state: Sequence[Any], batch: Any) -> tuple[Any, Any]:
        _check_entries("compose", len(stages), params, state)
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


def _checked_stages(transform: str, stages: Any) -> tuple[Stage, ...]:
    call = f"{transform}({stages!r:.80})"
    if callable(stages):
        raise ProgramError(call, "one function", f"a list of stages: {transform}([stage])")
    if not isinstance(stages, Iterable):
        raise ProgramError(call, f"a {type(stages).__name__}", f"a list of stages: {transform}([stage])")
    checked: tuple[Stage, ...] = tuple(stages)
    if not checked:
        raise ProgramError(call, "no stage", "at least one function (params, state, batch, x) -> (state, y)")
    for index, stage in enumerate(checked):
        if hasattr(stage, "named_parameters"):
            raise ProgramError(call, f"stage {index} is an nn.Module", "weft.stages.from_module(module).stage")
        if not callable(stage):
            raise ProgramError(
                call, f"stage {index} is a {type(stage).__name__}, no function", "its .stage, if it has one"
            )
    return checked


def _refuse_schema(call: str, schema: Any) -> NoReturn:
    instead = f"Schema.parse({schema!r:.60})" if isinstance(schema, str) else "a weft.effects.Schema, or None"
    raise ProgramError(f"{call}schema={schema!r:.60})", f"a {type(schema).__name__}", instead)


def _is_number(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_entries(transform: str, count: int, params: Sequence[Any], state: Sequence[Any]) -> None:
    for name, given in (("params", params), ("state", state)):
        if not isinstance(given, tuple | list) or len(given) != count:
            raise ProgramError(
                f"{transform}(<{count} stages>)(params, state, batch)",
                f"{name} has {len(given)} entries"
                if isinstance(given, tuple | list)
                else f"{name} is a {type(given).__name__}",
                "pass a tuple or list with one entry a stage",
            )
    for leaf in tree_leaves(list(state)):  # before the first stage takes the first state
        refuse_donated(leaf, call=f"{transform}(<{count} stages>)(params, state, batch)")


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
            *(fingerprint(f"stage {index}", stage) for index, stage in enumerate(self.stages)),
            "no advance" if advance is None else fingerprint("advance", advance),
        )
        self._plans: dict[Any, Plan] = {}
        self.__weft_donates__ = _donations(self.stages, advance)
        self.__name__ = f"pipeline of {len(self.stages)} stages"
        self.programs(microbatches)

    def programs(self, microbatches: int) -> tuple[Program, ...]:
        """Each rank's program for so many micro-batches, checked."""
        if not _is_number(microbatches, least=0):
            raise ProgramError(f"{self.__name__}.programs({microbatches!r})", "no number of parts", "an int >= 0")
        return self._plan([Job(feeds=self._returns)] * microbatches, ()).programs

    def _plan(
        self, jobs: Sequence[Job], classes: Sequence[str], spans: tuple[tuple[int, int], ...] | None = None
    ) -> Plan:
        key = (tuple(jobs), tuple(classes), spans)
        if (plan := self._plans.get(key)) is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            advances = self._advance is not None
            made = make_programs(len(self.stages), jobs, schema=self._schema, advances=advances, buffers=self._buffers)
            programs = tuple(attrs.evolve(program, classes=tuple(classes)) for program in made)
            plan = self._plans[key] = Plan(programs, self._buffers, self._fingerprints, spans)
        return plan

    def __call__(self, params: Sequence[Any], state: Sequence[Any], batch: Any) -> tuple[Any, Any]:
        batches = split(batch, self.microbatches)
        states, outputs = self._run(params, state, batches, [Job(feeds=self._returns)] * len(batches))
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
        found = self._jobs(batches) if jobs is None else jobs
        if len(found) != len(batches):
            seen = f"{len(batches)} batches and {len(found)} jobs"
            raise ProgramError(f"{self.__name__}.stream(...)", seen, "a job for each batch")
        return self._run(params, state, batches, found)

    def repeat(self, params: Sequence[Any], state: Sequence[Any], batch: Any, length: int) -> tuple[Any, list[Any]]:
        """Run the same batch `length` times, as calls in a row would, but so that stages overlap: the micro-batches are
        cohorts, each of which waits only for its own tokens of the step before. What `scan` does.

        Returns:
            The new state, and the output of each step.
        """
        if not _is_number(length, least=0):
            raise ProgramError(f"{self.__name__}.repeat(..., {length!r})", "no number of steps", "an int >= 0")
        cohorts = split(batch, self.microbatches)
        jobs: Sequence[Job] = decode_jobs(len(cohorts), length)
        if self._advance is None:
            jobs = [Job(feeds=self._returns)] * len(jobs)
        state, outputs = self._run(params, state, cohorts * length, jobs)
        starts = range(0, len(outputs), len(cohorts))
        return state, [join(outputs[i : i + len(cohorts)], cohorts) for i in starts]

    def _jobs(self, batches: Sequence[Any]) -> Sequence[Job]:
        if not all(isinstance(batch, Batch) for batch in batches):
            return [Job(feeds=self._returns, after=i - 1 if i and self._returns else None) for i in range(len(batches))]
        return jobs_for([frozenset(b.rows.tolist()) for b in batches], [bool(b.samples.any()) for b in batches])

    def _run(
        self, params: Sequence[Any], state: Sequence[Any], batches: Sequence[Any], jobs: Sequence[Job]
    ) -> tuple[tuple[Any, ...], list[Any]]:
        plan = self._plan(jobs, [class_text(batch) for batch in batches])
        workers = self._workers(params, state)
        put_batches(workers, batches)
        self.transport.run(plan, workers, self.transport.mail(len(self.stages)))
        returned = workers[0].outputs if self._returns else workers[-1].results | workers[-1].outputs
        return tuple(worker.state for worker in workers), [returned.get(mb) for mb in range(len(batches))]

    def _workers(self, params: Sequence[Any], state: Sequence[Any]) -> list[Worker]:
        _check_entries("pipeline", len(self._ranks), params, state)
        last = len(self.stages) - 1
        keeps, traced = getattr(self.stages[last], "lends", False), in_dispatch_mode()
        # What a graphified stage returns is a copy of its own, unless it only becomes part of a graph around it.
        shares = [bool(self.__weft_donates__) and (traced or not hasattr(stage, "lends")) for stage in self.stages]
        return [
            Worker(rank, self.stages[rank], p, s, self._advance, (), keeps and rank == last, shares[rank])
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
        return listing(self.programs(self.microbatches))

    def __repr__(self) -> str:
        return f"<{self.__name__}, {self.microbatches} micro-batches>"


class Session:
    """A pipeline under way. Made by `Pipelined.session`.

    What returns from the last stage is taken in where the schedule has it, which may be some submissions later: then it
    is among what `submit` returns. Every rank gets the same from the same call.
    """

    def __init__(self, pipelined: Pipelined, workers: Sequence[Worker]) -> None:
        self._pipelined = pipelined
        self._workers = workers
        self._mail = pipelined.transport.mail(len(pipelined.stages))
        self._jobs: list[Job] = []  # those from `_first` on: what some rank is to take in, and all behind it
        self._batches: list[Any] = []
        self._first = 0
        self._done = (0,) * len(pipelined.stages)  # effects performed, of the programs of `_jobs`
        self._ended = ""

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
            ProgramError: no job for each batch; a job that runs after one that does not feed, or is not before it:
                then nothing ran. Or the session was closed, or failed before: its state is lost.
        """
        call = f"session.submit(<{len(batches)} batches>, <{len(jobs)} jobs>)"
        self._refuse_ended(call)
        if len(jobs) != len(batches):
            raise ProgramError(call, f"{len(batches)} batches and {len(jobs)} jobs", "a job for each batch")
        self._refuse_waits(call, jobs)
        self._jobs += [attrs.evolve(job, after=_shifted(job.after, self._first)) for job in jobs]
        self._batches += batches
        return self._advance_to(*self._count())

    def close(self) -> tuple[tuple[Any, ...], list[tuple[int, Any]]]:
        """Take in all that is still to return; the state, which is the caller's from now on, and these outputs.

        Raises:
            ProgramError: the session was closed, or failed before.
        """
        self._refuse_ended("session.close()")
        ends = tuple(len(program.effects) for program in self._plan(None).programs) if self._jobs else self._done
        outputs = self._advance_to(ends, len(self._jobs))
        self._ended = "it was closed, and its state is the caller's"
        return tuple(worker.state for worker in self._workers), outputs

    def _refuse_ended(self, call: str) -> None:
        if self._ended:
            raise ProgramError(call, f"a session that is over: {self._ended}", "pipelined.session(params, state) anew")

    def _refuse_waits(self, call: str, jobs: Sequence[Job]) -> None:
        """Raise ProgramError if a job runs after one that does not feed, or is not before it. All ranks are past what
        lies before the jobs that are kept: who runs after one of those waits for nothing."""
        kept = [*self._jobs, *jobs]
        for index, job in enumerate(jobs, self.num_jobs):
            after = job.after
            if after is None or 0 <= after < self._first:
                continue
            if not (0 <= after < index and kept[after - self._first].feeds):
                seen = f"job {index} runs after job {job.after}"
                raise ProgramError(call, seen, "an earlier job of the session, whose output returns")

    def _count(self) -> tuple[tuple[int, ...], int]:
        return count_running(len(self._pipelined.stages), self._jobs, advances=True, buffers=self._pipelined._buffers)

    def _plan(self, spans: tuple[tuple[int, int], ...] | None) -> Plan:
        return self._pipelined._plan(self._jobs, [class_text(batch) for batch in self._batches], spans)

    def _advance_to(self, ends: tuple[int, ...], taken: int) -> list[tuple[int, Any]]:
        """Perform each rank's effects up to `ends`; the jobs before `taken` are over then."""
        if ends != self._done:
            put_batches(self._workers, self._batches, self._first)
            try:
                self._pipelined.transport.run(
                    self._plan(tuple(zip(self._done, ends, strict=True))), self._workers, self._mail
                )
            except BaseException as error:  # some ranks are further than others, and messages are left
                self._ended = f"it failed ({described(error):.200})"
                raise
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
        process: with `Local` and `Threads` all, with `Distributed` and `Peer` this rank's alone. Its `programs(m)` are
        data.

    Raises:
        ProgramError: no stage, fewer than one micro-batch, or a program that the check refuses.

    >>> print(pipeline([lambda p, s, batch, x: (s, batch + p), lambda p, s, batch, x: (s, x * p)], microbatches=1))
    rank 0 of 2
      run stage 0 [mb 0]
      send to 1 [mb 0]
    rank 1 of 2
      recv from 0 [mb 0]
      run stage 1 [mb 0]
    """
    stages = _checked_stages("pipeline", stages)
    call = f"pipeline(<{len(stages)} stages>, "
    if not _is_number(microbatches, least=1):
        raise ProgramError(f"{call}microbatches={microbatches!r})", "no number of parts", "an int >= 1")
    if advance is not None and not callable(advance):
        raise ProgramError(f"{call}advance={advance!r:.60})", "no function", "(state, batch, out) -> state, or None")
    if not isinstance(schema, Schema | None):
        _refuse_schema(call, schema)
    return Pipelined(stages, microbatches, advance, schema, transport or Local())
