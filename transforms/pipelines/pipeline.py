"""`pipeline`: joins stages into one step. Each rank performs a program of effects, which is checked
before the first tensor moves.

A transport (`transports`) executes the programs. In its `run`, each rank's worker
(`worker.Worker.perform`) performs the effects in order, and passes every send and receive to the
transport's link.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from weft.arguments.checks import check_values, kind_of, names_arguments
from weft.batches.batch import Batch
from weft.batches.descriptor import check_accepted, declare_check
from weft.display.tables import text, titled
from weft.effects import Program, listing, programs_html
from weft.errors import MeshError, ProgramError
from weft.meshes.mesh import Mesh
from weft.meshes.replicas import differing, ranks_in_words
from weft.ops.transfers.collective import Place, placed
from weft.torchapi.private import in_dispatch_mode, uncompiled
from weft.transforms.graphs.calls.borrowing import declare_lending, lends, owns_results
from weft.transforms.pipelines.argument_checks import (
    check_count,
    check_entries,
    check_lending,
    check_options,
    check_stages,
    refuse_transform,
)
from weft.transforms.pipelines.checker import PROGRAMS, CheckedPrograms
from weft.transforms.pipelines.lanes import lane_rank, pipeline_mesh
from weft.transforms.pipelines.microbatch import after_first, class_text, lends_state
from weft.transforms.pipelines.parts import join, split
from weft.transforms.pipelines.schedule import (
    Job,
    count_running,
    decode_jobs,
    jobs_for,
    make_programs,
    put_classes,
    refuse_other_work,
)
from weft.transforms.pipelines.session import Session, Spans
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.agreement import source_digest
from weft.transforms.pipelines.transports.local import Local
from weft.transforms.pipelines.weaving import Schedule
from weft.transforms.pipelines.worker import (
    StageRun,
    Worker,
    call_advance,
    call_stage,
    in_kind,
    put_batches,
    states_of,
)
from weft.values.bounded import BoundedDict
from weft.values.donation import clone, declare_donated, donated_argnames
from weft.values.schema import Schema
from weft.values.trees import leaves_with_names

Stage = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
Advance = Callable[[Any, Any, Any], Any]

# The most checked programs that are cached: without a limit, a stream that keeps bringing new
# mixtures of jobs would fill the memory.
_MAX_PROGRAMS = 1024


def compose(
    stages: Sequence[Stage], *, advance: Advance | None = None
) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """The step that runs the stages one after the other on the whole batch. Every pipeline must
    equal it.

    Args:
        stages: each `(params, state, batch, x) -> (state, y)`. x is None for the first stage, and
            the y of the previous stage for all others.
        advance: `(state, batch, out) -> state`, called for every stage with the last stage's
            output.

    Returns:
        A step `(params, state, batch) -> (state, out)`, where params and state have one entry per
        stage. The new state is a list if the old state is a list; otherwise it is a tuple.
    """
    stages = check_stages("compose", stages)

    def step(params: Sequence[Any], state: Sequence[Any], batch: Any) -> tuple[Any, Any]:
        check_entries("compose", len(stages), range(len(stages)), params, state, batch)
        x: Any = None
        states: list[Any] = []
        if len(stages) > 1:
            later = after_first(batch)
        else:
            later = batch
        for stage, p, s in zip(stages, params, state, strict=True):
            new, x = call_stage(len(states), stage, p, s, later if states else batch, x)
            states.append(clone(new) if lends_state(stage) else new)
        if advance is not None:
            states = [call_advance(index, advance, s, batch, x) for index, s in enumerate(states)]
        return in_kind(states, state), x

    def check(descriptor: Any) -> None:
        for stage in stages:
            check_accepted(stage, descriptor)

    declare_check(step, check)
    return declare_lending(declare_donated(step, _donations(stages, advance)), lends(stages[-1]))


def _donations(stages: Sequence[Stage], advance: Advance | None) -> tuple[str, ...]:
    functions: list[Callable[..., Any]] = [*stages, *([advance] if advance is not None else [])]
    if any("state" in donated_argnames(f) for f in functions):
        return ("state",)
    return ()


def _with_own_results(stages: Sequence[Stage]) -> Iterator[Stage]:
    """The stages, without result buffers in common. A function that lends its results is copied if
    it is used for several stages, because these may run at the same time.

    Raises:
        ProgramError: such a function cannot be copied.
    """
    used_ids: set[int] = set()
    for index, stage in enumerate(stages):
        if lends(stage) and id(stage) in used_ids:
            separate_stage = copy.copy(stage)
        else:
            separate_stage = stage
        # `copy.copy` returns the same object for a plain function.
        if id(separate_stage) in used_ids and lends(stage):
            seen_text = (
                f"stage {index} is an earlier stage too, and lends its results, which the other"
                " overwrites"
            )
            instead = 'graphify(..., outputs="safe"), or one graphified function for each stage'
            raise ProgramError(f"pipeline(<{len(stages)} stages>)", seen_text, instead)
        used_ids.add(id(separate_stage))
        yield separate_stage


def _sources(stages: Sequence[Stage], advance: Advance | None) -> tuple[str, ...]:
    """Digests of the stages' and of `advance`'s source code, which the ranks compare."""
    digests = (source_digest(f"stage {index}", stage) for index, stage in enumerate(stages))
    return *digests, "advance: none" if advance is None else source_digest("advance", advance)


class Pipelined:
    """A step over stages, made by `pipeline`. `print` it to read its programs."""

    def __init__(
        self,
        stages: Sequence[Stage],
        microbatches: int,
        advance: Advance | None,
        schema: Schema | None,
        transport: Transport,
        schedule: Schedule | Sequence[Program],
        mesh: Any = None,
    ) -> None:
        self.stages = tuple(_with_own_results(stages))
        self.microbatches = microbatches
        self.transport = transport
        self._advance = advance
        self._schema = schema
        # A stage that lends its results overwrites them when it runs again. A fence must come
        # first, so that a result is not overwritten while it is being sent.
        self._buffers = 1 if any(map(lends, self.stages)) else None
        self._text = f"pipeline(<{len(self.stages)} stage{'s' * (len(self.stages) > 1)}>)"
        self._schedule = schedule
        # Only the schedule knows how many ranks it uses.
        self._num_ranks = len(self._make_programs([Job()] * microbatches))
        self.mesh = pipeline_mesh(mesh, self._num_ranks, f"{self._text[:-1]}, mesh={mesh!s:.60})")
        self._all_ranks = self._num_ranks if self.mesh is None else self.mesh.num_ranks
        ranks = transport.ranks(self._all_ranks)
        self._here = [
            (index, rank)
            for index in range(len(self.stages))
            for rank in ranks
            if index % self._num_ranks == lane_rank(self.mesh, rank)
        ]
        # If the ranks are in several processes, each process must return the output to its caller.
        self._returns = advance is not None or len(ranks) < self._all_ranks
        self._read_sources = functools.cache(functools.partial(_sources, self.stages, advance))
        self._checked_by_key = BoundedDict[Any, CheckedPrograms](_MAX_PROGRAMS)
        self._has_compared = False
        self.__weft_donates__ = _donations(self.stages, advance)
        self.__name__ = f"pipeline of {len(self.stages)} stages"
        # Only for its check: a wrong schedule is refused here rather than at the first call.
        self.programs()

    def programs(self, microbatches: int | None = None) -> tuple[Program, ...]:
        """The checked program of each rank for the given number of micro-batches (None: the number
        that `pipeline` was called with)."""
        if microbatches is None:
            microbatches = self.microbatches
        check_count(f"{self._text}.programs({microbatches!r})", "microbatches", microbatches)
        return self._check_programs([Job(feeds=self._returns)] * microbatches, ()).programs

    def _check_programs(
        self, jobs: Sequence[Job], classes: Sequence[str], spans: Spans | None = None
    ) -> CheckedPrograms:
        key = (tuple(jobs), tuple(classes), spans)
        if (checked := self._checked_by_key.get(key)) is None:
            programs = tuple(
                put_classes(self._make_programs(jobs), classes, self._schema, self._text)
            )
            checked = CheckedPrograms(programs, self._buffers, self._read_sources, spans, self.mesh)
            # `make_programs` runs all jobs by construction; other schedules might not.
            if self._schedule is not make_programs:
                counts = len(self.stages), self._num_ranks
                refuse_other_work(
                    self._text, programs, counts, jobs, advances=self._advance is not None
                )
            self._checked_by_key[key] = checked
        return checked

    def _make_programs(self, jobs: Sequence[Job]) -> Sequence[Program]:
        """The schedule's programs, not yet checked by `CheckedPrograms`."""
        if not callable(self._schedule):
            return self._schedule
        advances = self._advance is not None
        arguments = (len(self.stages), jobs)
        programs = self._schedule(
            *arguments, schema=self._schema, advances=advances, buffers=self._buffers
        )
        check_values(
            f"{self._text}: schedule(...)",
            {"programs": PROGRAMS},
            {"programs": programs},
            ProgramError,
        )
        return programs

    @uncompiled
    def __call__(self, params: Sequence[Any], state: Sequence[Any], batch: Any) -> tuple[Any, Any]:
        workers = self._workers(params, state, batch)
        batches = split(batch, self.microbatches)
        states, outputs = self._run(
            state, workers, batches, [Job(feeds=self._returns)] * len(batches)
        )
        return states, join(outputs, batches, batch)

    def stream(
        self,
        params: Sequence[Any],
        state: Sequence[Any],
        batches: Sequence[Any],
        jobs: Sequence[Job] | None = None,
    ) -> tuple[Any, list[Any]]:
        """Run batches in order, with overlapping stages but the same results as separate calls:
        each batch is a micro-batch, and waits only for the tokens of its own requests.

        Args:
            params, state: as for a call.
            batches: prefills, chunks of prompts and decodes in any mixture.
            jobs: one per batch, which says what the batch waits for (`jobs_for`, `decode_jobs`).
                None: the host reads the batches to find out.

        Returns:
            The new state, and one output per batch (None if the batch's job does not feed).
        """
        batch_list: Any = batches
        is_list = isinstance(batch_list, Sequence)
        if not is_list or (jobs is not None and len(jobs) != len(batch_list)):
            if is_list:
                problem = f"{len(batch_list)} batches and {len(jobs or ())} jobs"
            else:
                problem = f"batches is {kind_of(batch_list)}"
            if is_list:
                instead = "a job for each batch"
            else:
                instead = "a list of batches: [batch]"
            raise ProgramError(f"{self._text}.stream(params, state, batches)", problem, instead)
        workers = self._workers(params, state, batches)
        return self._run(state, workers, batches, self._jobs(batches) if jobs is None else jobs)

    def __weft_repeat__(
        self, params: Sequence[Any], state: Sequence[Any], batch: Any, length: int
    ) -> tuple[Any, list[Any]]:
        """Run the same batch `length` times, with overlapping stages but the same results as
        separate calls: the micro-batches are cohorts, each of which waits only for its own tokens
        of the previous step. `scan` calls it.

        Returns:
            The new state, and the output of each step.
        """
        workers = self._workers(params, state, batch)
        cohorts = split(batch, self.microbatches)
        jobs: Sequence[Job] = decode_jobs(len(cohorts), length)
        # Without `advance` no state depends on an output, so that no cohort has to wait for one.
        if self._advance is None:
            jobs = [Job(feeds=self._returns)] * len(jobs)
        states, outputs = self._run(state, workers, cohorts * length, jobs)
        starts = range(0, len(outputs), len(cohorts))
        return states, [join(outputs[i : i + len(cohorts)], cohorts, batch) for i in starts]

    def _jobs(self, batches: Sequence[Any]) -> Sequence[Job]:
        # Only a `Batch` names its requests. Any other batch might hold a request of the previous
        # batch, so it waits for that batch's output.
        if not all(isinstance(batch, Batch) for batch in batches):
            return [
                Job(feeds=self._returns, after=i - 1 if i and self._returns else None)
                for i in range(len(batches))
            ]
        return jobs_for(
            [frozenset(b.rows.tolist()) for b in batches], [bool(b.samples.any()) for b in batches]
        )

    def _run(
        self,
        state: Sequence[Any],
        workers: Sequence[Worker],
        batches: Sequence[Any],
        jobs: Sequence[Job],
    ) -> tuple[Sequence[Any], list[Any]]:
        checked = self._check_programs(jobs, [class_text(batch) for batch in batches])
        put_batches(workers, batches, [after_first(batch) for batch in batches])
        self.transport.run(checked, workers, self.transport.mail(self._all_ranks))
        if self.mesh is not None and len(workers) == self._all_ranks:
            self._compare_lanes(self.mesh, workers)
        # Outputs that do not return are on the rank of the last stage alone.
        returned = self._outputs(workers[0 if self._returns else -1])
        return in_kind(states_of(workers), state), [returned.get(mb) for mb in range(len(batches))]

    def _outputs(self, worker: Worker) -> dict[int, Any]:
        """The pipeline's outputs that a rank holds, by micro-batch."""
        # Outputs that are not broadcast stay among the results of the last stage.
        if self._returns:
            kept = {}
        else:
            kept = {mb: value for (_, mb), value in worker.results.items()}
        return kept | worker.outputs

    def _compare_lanes(self, mesh: Mesh, workers: Sequence[Worker]) -> None:
        """Raise MeshError if ranks that share the last stage return different outputs, since the
        caller gets only one of them. Outputs on a GPU are compared only in the first run, because
        the host must wait for them. Ranks in other processes are not compared: each process
        returns its own output."""
        if self._returns:
            end = 0
        else:
            end = self._num_ranks - 1
        lanes = [worker for worker in workers if lane_rank(mesh, worker.rank) == end]
        outputs = [self._outputs(worker) for worker in lanes]
        for mb in outputs[0]:
            for (name, first), *other_leaves in zip(
                *(leaves_with_names(output.get(mb)) for output in outputs), strict=False
            ):
                if self._has_compared and isinstance(first, Tensor) and first.device.type != "cpu":
                    continue
                if differing_indices := differing([first, *(leaf for _, leaf in other_leaves)]):
                    ranks = ranks_in_words([lanes[index].rank for index in (0, *differing_indices)])
                    problem = f"output{name} of micro-batch {mb}: {ranks} have different values"
                    instead = (
                        "weft.all_reduce or weft.all_gather in the last stage, so that all of its"
                        " ranks return it"
                    )
                    raise MeshError(
                        f"{self._text[:-1]}, mesh={mesh})(params, state, batch)", problem, instead
                    )
        self._has_compared = True

    def _workers(
        self, params: Sequence[Any], state: Sequence[Any], batch: Any = None
    ) -> list[Worker]:
        stages_here = [index for index, _ in self._here]
        check_entries("pipeline", len(self.stages), stages_here, params, state, batch, self.mesh)
        refuse_transform(self.transport)
        traced = in_dispatch_mode()
        by_rank: dict[int, list[StageRun]] = {
            rank: [] for rank in sorted(rank for _, rank in self._here)
        }
        for (index, rank), own_params, own_state in zip(self._here, params, state, strict=True):
            stage = self.stages[index]
            is_last = index == len(self.stages) - 1
            # A graphified stage returns copies, except while it is traced into a surrounding graph.
            shares = bool(self.__weft_donates__) and (traced or not owns_results(stage))
            copies = lends(stage) and is_last, shares, lends_state(stage) and not traced
            by_rank[rank].append(StageRun(index, stage, own_params, own_state, *copies))
        return [
            Worker(rank, stages, self._advance, mesh=self.mesh) for rank, stages in by_rank.items()
        ]

    def session(self, params: Sequence[Any], state: Sequence[Any]) -> Session:
        """An open-ended stream: batches are submitted a few at a time, and stages overlap across
        submissions.

        Args:
            params, state: as for a call. The session owns the state until `close()` returns it.

        Raises:
            ProgramError: the pipeline has no `advance`, so that no output returns to its ranks.
        """
        if self._advance is None:
            call = f"{self._text}.session(params, state)"
            raise ProgramError(
                call, "no advance, so that nothing returns", "pipeline(stages, advance=...)"
            )
        workers = self._workers(params, state)
        return Session(
            self._num_ranks, self.transport, workers, self._check_programs, self._count_running
        )

    def _count_running(self, jobs: Sequence[Job]) -> tuple[tuple[int, ...], int]:
        """For each rank, the number of effects to perform once these jobs are submitted; and the
        first job that is then not yet over. With `make_programs`, the programs for more jobs
        continue those for fewer jobs. Other schedules may not have this property, so each
        submission runs to the end of its programs."""
        if self._schedule is make_programs:
            return count_running(len(self.stages), jobs, advances=True, buffers=self._buffers)
        if jobs:
            programs = self._check_programs(jobs, ()).programs
        else:
            programs = ()
        return tuple(len(program.effects) for program in programs) or (0,) * self._num_ranks, len(
            jobs
        )

    def __str__(self) -> str:
        return listing(self.programs())

    def _repr_html_(self) -> str:
        return titled(
            text(f"{self.__name__}, {self.microbatches} micro-batches"),
            programs_html(self.programs()),
        )

    def __repr__(self) -> str:
        return f"<{self.__name__}, {self.microbatches} micro-batches>"


def stage_context(pipelined: Pipelined) -> AbstractContextManager[None]:
    """The context in which this process can call a stage outside the pipeline."""
    member = pipelined.transport.member
    if pipelined.mesh is None or member is None:
        return nullcontext()
    return placed(Place(pipelined.mesh, pipelined._here[0][1], member))


def runs_first(pipelined: Pipelined) -> bool:
    """Whether the first stage runs in this process."""
    return any(index == 0 for index, _ in pipelined._here)


@names_arguments(
    "a list of stages: pipeline([f, g])",
    num_microbatches="microbatches=...",
    chunks="microbatches=...",
)
def pipeline(
    stages: Sequence[Stage],
    *,
    microbatches: int = 1,
    advance: Advance | None = None,
    schema: Schema | None = None,
    transport: Transport | None = None,
    schedule: Schedule | Sequence[Program] | None = None,
    mesh: Any = None,
) -> Pipelined:
    """Span a step over stages: each rank has a program of Send, Recv and Run, which is checked and
    then executed by a transport.

    Args:
        stages: each `(params, state, batch, x) -> (state, y)`. x is None for the first stage, and
            the y of the previous stage for all others. A stage may be graphified.
        microbatches: the largest number of parts into which the batch is split (one part per
            request if it has fewer requests). `weft.transforms.pipelines.parts.split` splits it,
            and can also split custom batch classes. With more than one part, the stages must be separable by rows:
            what they return for a request depends only on that request, the params and its own
            part of the state, and every output holds one entry per request or token. Only sizes
            are checked: a `batch.sum(0)` with as many columns as a part has rows is joined without
            an error, and the result is wrong.
        advance: `(state, batch, out) -> state`. If given, the last stage's output returns to every
            rank, and each rank advances its state with it.
        schema: the schema of the values that travel between two stages. If given, every such value
            is compared with it.
        transport: executes the programs. None: `Local()`, in this process and thread.
        schedule: a pure function `(num_stages, jobs, *, schema, advances, buffers) -> programs`,
            such as `interleaved(num_ranks)` or one that calls `weave`; or the programs themselves,
            for example edited ones (`parse_listing`). None: `make_programs`. Stage s runs on rank
            s % num_ranks, where num_ranks is the number of programs. The programs are checked for
            every new number of micro-batches. The check includes that they run the jobs in order,
            each after the job that it waits for, and return the output of each job that feeds.
        mesh: a `weft.Mesh` whose axis `pipeline` holds the ranks of the pipeline. Along the other
            axes, ranks share each stage; a stage is then a function of one rank's part, as for
            `weft.shard`. A mesh needs the transport `Threads` or `Distributed`. Nothing is split
            for you: params and state have one entry, stage by stage, for each rank that runs a
            stage here, and the entry holds that rank's part (`weft.distribute` splits whole
            params and states). Each rank of the first stage gets the whole batch. All ranks that
            share the last stage must return the same output.

    Returns:
        A step `(params, state, batch) -> (state, out)`, where params and state are tuples with one
        entry for each stage that runs in this process: all stages with `Local` and `Threads`, this
        rank's stages with `Distributed`. Its `programs(m)` are data. Lists work too: if the state
        is a list, so is the new state. Gradients flow with `Local` (also with `torch.func`) and
        `Threads` (only with `backward()`), but not between processes, nor through the collectives
        of a mesh.

    Raises:
        ProgramError: an argument of a wrong kind; a program that the check refuses; or one function
            used for two stages although it lends its results, which the second stage would
            overwrite.
        MeshError: at a call, if ranks in this process that share the last stage return different
            outputs.
        DonatedError: at a call, for an argument that was donated before.

    >>> print(pipeline([lambda p, s, batch, x: (s, batch + p), lambda p, s, batch, x: (s, x * p)], microbatches=1))
    rank 0 of 2
      run stage 0 [mb 0]
      send to 1 [mb 0]
    rank 1 of 2
      recv from 0 [mb 0]
      run stage 1 [mb 0]
    """
    stages = check_stages("pipeline", stages)
    check_lending(f"pipeline(<{len(stages)} stages>)", stages)
    check_options(len(stages), microbatches, advance, schema, transport, schedule)
    if transport is None:
        transport = Local()
    if schedule is None:
        schedule = make_programs
    return Pipelined(stages, microbatches, advance, schema, transport, schedule, mesh)
