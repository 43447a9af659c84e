"""`pipeline`: stages as one step. Each rank's part is a program of effects, checked before the first tensor moves."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from weft.arguments import is_int, kind_of, names_arguments
from weft.batch import Batch
from weft.display import text, titled
from weft.donation import declare_donated, donated_argnames
from weft.effects import Program, Schema, listing, programs_html
from weft.errors import ProgramError
from weft.torchapi import in_dispatch_mode
from weft.transforms.graphs.calls.borrowing import declare_lending, lends
from weft.transforms.graphs.graphified import Graphified
from weft.transforms.pipelines.microbatch import join, split
from weft.transforms.pipelines.parts import after_first, class_text
from weft.transforms.pipelines.pipeline_checks import (
    check_entries,
    check_options,
    check_stages,
    refuse_transform,
)
from weft.transforms.pipelines.schedule import Job, decode_jobs, jobs_for, make_programs
from weft.transforms.pipelines.session import Session, Spans
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.fingerprint import fingerprint
from weft.transforms.pipelines.transports.local import Local
from weft.transforms.pipelines.transports.plan import Plan
from weft.transforms.pipelines.transports.worker import Worker, call_advance, call_stage, put_batches

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
        later = after_first(batch) if len(stages) > 1 else batch
        for stage, p, s in zip(stages, params, state, strict=True):
            new, x = call_stage(len(states), stage, p, s, later if states else batch, x)
            states.append(new)
        if advance is not None:
            states = [call_advance(index, advance, s, batch, x) for index, s in enumerate(states)]
        return tuple(states), x

    return declare_lending(declare_donated(step, _donations(stages, advance)), lends(stages[-1]))


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
        self._buffers = 1 if any(map(lends, self.stages)) else None
        self._fingerprints = (
            *(fingerprint(f"stage {index}", stage) for index, stage in enumerate(self.stages)),
            "advance: none" if advance is None else fingerprint("advance", advance),
        )
        self._plans: dict[Any, Plan] = {}
        self.__weft_donates__ = _donations(self.stages, advance)
        self.__name__ = f"pipeline of {len(self.stages)} stages"
        self._text = f"pipeline(<{len(self.stages)} stage{'s' * (len(self.stages) > 1)}>)"
        self.programs()

    def programs(self, microbatches: int | None = None) -> tuple[Program, ...]:
        """Each rank's program for so many micro-batches (None: the pipeline's own number), checked."""
        microbatches = self.microbatches if microbatches is None else microbatches
        if not is_int(microbatches, 1):
            raise ProgramError(f"{self._text}.programs({microbatches!r})", "no number of parts", "an int >= 1")
        return self._plan([Job(feeds=self._returns)] * microbatches, ()).programs

    def _plan(self, jobs: Sequence[Job], classes: Sequence[str], spans: Spans | None = None) -> Plan:
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
        given: Any = batches
        if not isinstance(given, Sequence):
            seen = f"batches is {kind_of(given)}"
            raise ProgramError(f"{self._text}.stream(params, state, batches)", seen, "a list of batches: [batch]")
        workers = self._workers(params, state)
        found = self._jobs(batches) if jobs is None else jobs
        if len(found) != len(batches):
            seen = f"{len(batches)} batches and {len(found)} jobs"
            raise ProgramError(f"{self._text}.stream(...)", seen, "a job for each batch")
        return self._run(workers, batches, found)

    def repeat(self, params: Sequence[Any], state: Sequence[Any], batch: Any, length: int) -> tuple[Any, list[Any]]:
        """Run the same batch `length` times, as calls in a row would, but so that stages overlap: the micro-batches are
        cohorts, each of which waits only for its own tokens of the step before. What `scan` does.

        Returns:
            The new state, and the output of each step.
        """
        workers = self._workers(params, state)
        if not is_int(length, least=0):
            raise ProgramError(f"{self._text}.repeat(..., {length!r})", "no number of steps", "an int >= 0")
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
        put_batches(workers, batches, [after_first(batch) for batch in batches])
        self.transport.run(plan, workers, self.transport.mail(len(self.stages)))
        returned = workers[0].outputs if self._returns else workers[-1].results | workers[-1].outputs
        return tuple(worker.state for worker in workers), [returned.get(mb) for mb in range(len(batches))]

    def _workers(self, params: Sequence[Any], state: Sequence[Any]) -> list[Worker]:
        check_entries("pipeline", len(self.stages), self._ranks, params, state)
        refuse_transform(self.transport)
        last = len(self.stages) - 1
        keeps, traced = lends(self.stages[last]), in_dispatch_mode()
        # What a graphified stage returns is a copy of its own, unless it only becomes part of a graph around it.
        graphs = [isinstance(stage, Graphified) for stage in self.stages]
        shares = [bool(self.__weft_donates__) and (traced or not graph) for graph in graphs]
        return [
            Worker(rank, self.stages[rank], p, s, self._advance, (), keeps and rank == last, shares[rank])
            for rank, p, s in zip(self._ranks, params, state, strict=True)
        ]

    def session(self, params: Sequence[Any], state: Sequence[Any]) -> Session:
        """A stream without an end: batches are submitted some at a time, and stages overlap across submissions.

        Args:
            params, state: as a call takes them; the state is the session's until `close()` returns it.

        Raises:
            ProgramError: a pipeline without `advance`, to whose ranks nothing returns.
        """
        if self._advance is None:
            call = f"{self._text}.session(params, state)"
            raise ProgramError(call, "no advance, so that nothing returns", "pipeline(stages, advance=...)")
        workers = self._workers(params, state)
        return Session(len(self.stages), self.transport, workers, self._plan, self._buffers)

    def __str__(self) -> str:
        return listing(self.programs())

    def _repr_html_(self) -> str:
        return titled(text(f"{self.__name__}, {self.microbatches} micro-batches"), programs_html(self.programs()))

    def __repr__(self) -> str:
        return f"<{self.__name__}, {self.microbatches} micro-batches>"


@names_arguments("a list of stages: pipeline([f, g])", num_microbatches="microbatches=...", chunks="microbatches=...")
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
