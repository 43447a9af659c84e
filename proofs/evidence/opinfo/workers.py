"""Operators shared out to worker processes, of which one may die without ending the run."""

import gc
import multiprocessing
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import attrs
import torch

from weft.proofs._strategies.operator_samples import NoSamplesError, full_name
from weft.proofs.evidence.opinfo.outcome import Outcome, outcomes
from weft.torchapi.operator_database import operator_database

# Seconds after which an operator counts as hung, and its process is ended.
LONGEST = 1200.0

# The index of the sample in the outcome of an operator whose samples torch could not make.
NO_SAMPLES = -2

# Seconds that the operators in work have when the time is over.
_GRACE = 30.0


@attrs.frozen
class Task:
    """One operator with one dtype.

    Args:
        index: of the operator in torch's database.
        operator, dtype: the names of both.
    """

    index: int
    operator: str
    dtype: str


@attrs.frozen
class Settings:
    """The settings of a run.

    Args:
        device: `cpu` or `cuda`.
        transforms, dtypes: the names of those to run.
        operators: a part of the names of the operators to run.
        samples: the most samples per operator, transform and dtype; None: all.
        seed: of the samples' values, and of the order of operators.
        jobs: the number of processes.
        minutes: the time after which no further operator starts; None: no limit.
        compiler: of the graphs; None: nothing is compiled.
    """

    device: str = "cpu"
    transforms: tuple[str, ...] = ("forward", "backward", "vmap", "jvp")
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "int64", "complex64")
    operators: str = ""
    samples: int | None = None
    seed: int = 0
    jobs: int = 2
    minutes: float | None = None
    compiler: str | None = None


def tasks(settings: Settings) -> list[Task]:
    """The tasks of a run, in an order that depends on the seed alone, so that a part of them is a
    fair sample."""
    names = [full_name(entry) for entry in operator_database()]
    selected = [
        Task(index, name, dtype)
        for dtype in settings.dtypes
        for index, name in enumerate(names)
        if settings.operators in name
    ]
    # A generator of its own, so that nothing else that draws changes the order.
    order = torch.randperm(len(selected), generator=torch.Generator().manual_seed(settings.seed))
    return [selected[i] for i in order.tolist()]


class Worker:
    """A process that runs tasks, one at a time."""

    def __init__(self, settings: Settings) -> None:
        # Not forked: CUDA does not work in a fork of a process that has used it.
        context = multiprocessing.get_context("spawn")
        self.end, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, settings), daemon=True)
        self.process.start()
        # Or this process would hold the other end open, and never see that the worker has died.
        theirs.close()
        self.task: Task | None = None
        self.num_tasks = 0
        self.since = 0.0

    def give(self, task: Task) -> None:
        """Start a task."""
        self.task = task
        self.since = time.monotonic()
        self.num_tasks = self.num_tasks + 1
        self.end.send(task)

    def outcomes(self, ready: bool) -> list[Outcome] | None:
        """The outcomes of the task; None if it still runs. A process that died or hangs is a crash.

        Args:
            ready: whether there is something to read from the process.
        """
        assert self.task is not None
        task = self.task
        fault = ""
        if ready:
            try:
                results: list[Outcome] = self.end.recv()
                self.task = None
                return results
            except (EOFError, ConnectionError):
                self.process.join()
                # The code of a signal says how: a segmentation fault is -11.
                fault = f"the process ended with code {self.process.exitcode}"
        elif time.monotonic() - self.since > LONGEST:
            self.process.kill()
            self.process.join()
            fault = f"no result after {LONGEST:.0f} s"
        if not fault:
            return None
        self.task = None
        return [Outcome("crash", task.operator, "any", task.dtype, -1, fault)]

    def stop(self) -> None:
        """End the process."""
        self.end.close()
        self.process.terminate()
        self.process.join()


def run_all(settings: Settings, todo: Sequence[Task]) -> Iterator[list[Outcome]]:
    """The outcomes of each task, in the order in which tasks end. It ends early when the time is
    over, or its caller stops."""
    waiting = deque(todo)
    deadline = _deadline(settings)
    workers = [Worker(settings) for _ in range(min(settings.jobs, len(todo)))]
    try:
        while True:
            for i, worker in enumerate(workers):
                if worker.task is None and waiting and time.monotonic() < deadline:
                    if not worker.process.is_alive():
                        worker = workers[i] = Worker(settings)
                    worker.give(waiting.popleft())
            busy = [worker for worker in workers if worker.task is not None]
            # Operators in work may end, since half an operator is no outcome.
            if not busy or time.monotonic() > deadline + _GRACE:
                return
            # With a time limit: a worker that hangs sends nothing, and must be noticed too.
            ready = set(wait([worker.end for worker in busy], timeout=1.0))
            for worker in busy:
                task = worker.task
                assert task is not None
                if (results := worker.outcomes(worker.end in ready)) is None:
                    continue
                if any(outcome.device_lost or outcome.sample == NO_SAMPLES for outcome in results):
                    worker.stop()
                    if (
                        worker.num_tasks > 1 and results[-1].sample == NO_SAMPLES
                    ):  # an earlier operator may be the cause
                        # At the end, in a new process: if it fails there as the first one, it is
                        # its own fault.
                        waiting.append(task)
                        continue
                yield results
    finally:
        for worker in workers:
            worker.stop()


def _deadline(settings: Settings) -> float:
    if settings.minutes is None:
        return float("inf")
    return time.monotonic() + 60 * settings.minutes


def _serve(end: Connection, settings: Settings) -> None:
    """The loop of a worker: a task in, its outcomes out."""
    # Workers share the cores, and a sum by several threads has no fixed order.
    torch.set_num_threads(1)
    database: tuple[Any, ...] = operator_database()
    gc.freeze()  # the database is large, and captures collect garbage
    while True:
        try:
            task: Task = end.recv()
        except EOFError:
            return
        results: list[Outcome] = []
        try:
            results += outcomes(
                database[task.index],
                settings.transforms,
                task.dtype,
                settings.device,
                settings.samples,
                settings.seed,
                settings.compiler,
            )
        # Torch could not make the samples, which says nothing of weft.
        except NoSamplesError as error:
            results.append(
                Outcome("torch", task.operator, "any", task.dtype, NO_SAMPLES, str(error))
            )
        except Exception as error:
            results.append(
                Outcome(
                    # An error outside of a case, such as in the database itself: reported, or the
                    # task would be lost.
                    "crash",
                    task.operator,
                    "any",
                    task.dtype,
                    -1,
                    f"no outcome: {error!r:.300}",
                )
            )
        end.send(results)
