"""Executors: run steps on the device's states, one after the other or through a pipeline's
stages."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import attrs
import torch
from torch import Tensor

from weft.batches.batch import Batch
from weft.batches.descriptor import BatchDescriptor
from weft.batches.padding import inert
from weft.torchapi.private import to_device
from weft.transforms.engine.steps.classes import Classes
from weft.transforms.engine.steps.results import FinishedWork
from weft.transforms.engine.steps.step import DeviceWork, Edits, Work, apply_edits
from weft.transforms.graphs.graphified import Graphified, compile_kernels, rehearse_call
from weft.transforms.graphs.lower import compiling_at_once
from weft.transforms.graphs.memory import MemoryEstimate
from weft.transforms.pipelines.microbatch import class_text
from weft.transforms.pipelines.pipeline import Pipelined, runs_first, stage_context
from weft.transforms.pipelines.schedule import Job
from weft.transforms.pipelines.session import Session, Submission
from weft.values.bounded import BoundedDict
from weft.values.trees import tree_map

T = TypeVar("T")

_MAX_CACHED_BATCHES = 16

# A graphified function, and arguments to capture it with.
Example = tuple[Graphified[..., Any], tuple[Any, ...]]


class Executor(Protocol):
    """Runs works in order, without waiting for the device."""

    state: Any  # one entry for each stage that runs here; valid while no work is running
    classes: Classes

    @property
    def graphs(self) -> Sequence[Graphified[..., Any]]:
        """The graphified functions that run here."""

    @property
    def num_running(self) -> int:
        """Works that were launched but not yet returned as finished."""

    def __call__(self, works: Sequence[Work]) -> Sequence[FinishedWork]:
        """Launch works; returns the works that are finished by now, in order. A pipeline returns
        works of earlier calls."""

    def flush(self) -> Sequence[FinishedWork]:
        """Finish and return all launched work."""

    def received(self, finished: Sequence[FinishedWork], /) -> Callable[[], None]:
        """A function to call before the host reads finished work: it raises if other ranks were
        given other work."""

    def examples(self) -> list["Example"]:
        """Each graphified function, with example arguments to capture it."""

    def placed(self) -> AbstractContextManager[None]:
        """The context in which the functions run."""


@attrs.frozen
class BatchCache(Generic[T]):
    """Puts batches on the device, and reuses the result for later decodes of the same rows.

    Args:
        device: the device.
        classes: that steps run under.
        make: what is made of a batch on the device.
        edited: what is made of the same batch with other edits.
        first: whether the first stage runs here.
    """

    device: torch.device | str
    classes: Classes
    make: Callable[[DeviceWork], T]
    edited: Callable[[T, Edits], T]
    first: bool = True
    _decodes: BoundedDict[tuple[tuple[int, ...], int, int], T] = attrs.field(
        factory=lambda: BoundedDict(_MAX_CACHED_BATCHES), init=False
    )

    def __call__(self, work: Work) -> T:
        if work.token_ids or work.masks:
            return self.make(self._place(work))
        # A decode's tokens and positions are in the state, so its batch depends on these alone.
        key = work.rows, work.query_len, work.num_active_loras
        if (batch := self._decodes.get(key)) is None:
            # Without edits, which differ from step to step.
            batch = self._decodes[key] = self.make(attrs.evolve(self._place(work), edits=Edits()))
        if work.edits:
            return self.edited(batch, work.edits)
        return batch

    def _place(self, work: Work) -> DeviceWork:
        # On the host, to be padded there before the upload; a prompt's embeddings may be on the
        # device.
        device_work = work.place(self.device if work.contents else "cpu", self.first)
        # Pad here, so that graphs see only the sizes of classes, and plan no new ones.
        batch = self.classes.pad(device_work.batch)
        return DeviceWork(tree_map(self._upload, batch), device_work.edits)

    def _upload(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return to_device(leaf, self.device)
        return leaf


def _submission(work: DeviceWork) -> Submission:
    """`Submission.of`, with the text and the later stages' batch made from the work's batch
    alone."""
    return Submission(
        work, DeviceWork(work.batch.after_first(), work.edits), class_text(work.batch)
    )


def _with_edits(submission: Submission, edits: Edits) -> Submission:
    return Submission(
        DeviceWork(submission.batch.batch, edits),
        DeviceWork(submission.later.batch, edits),
        submission.text,
    )


@torch.no_grad()
def capture_all(executor: Executor) -> None:
    """Compile the kernels of an executor's functions, capture their ladders, plan the replay of
    each class, and run larger steps once; in mode none, do nothing."""
    with executor.placed():
        _compile_ahead(executor)
        for graph, example in executor.examples():
            graph.capture(*example)
        for graph, example in _padding(
            executor, (*executor.classes.captured, *executor.classes.large)
        ):
            rehearse_call(graph, *example)


@torch.no_grad()
def estimate_all(executor: Executor) -> list[MemoryEstimate]:
    """Estimate the memory of the graphs of an executor's functions, after compiling their
    kernels."""
    with executor.placed():
        _compile_ahead(executor)
        return [graph.memory_estimate(*example) for graph, example in executor.examples()]


def _compile_ahead(executor: Executor) -> None:
    """Compile the kernels of all graphs, and of steps without a graph, all at once."""
    with compiling_at_once():
        for graph, example in (
            *executor.examples(),
            *_padding(executor, executor.classes.without_graph),
        ):
            compile_kernels(graph, *example)


def _padding(executor: Executor, classes: Iterable[BatchDescriptor]) -> Iterator[Example]:
    """Each graphified function, with an all-padding batch of each class."""
    for graph, (params, state, *copied) in executor.examples():
        for descriptor in classes:
            yield graph, (params, state, *inert(copied, descriptor))


class StepExecutor:
    """Runs each work as one step, one after the other, and returns it as finished at once.

    Args:
        step: `(params, state, batch) -> (state, Output)` over tuples with one entry for each stage
            that runs here.
        params, state: those tuples.
        device: the device of the batches.
        classes: that steps run under; None: their own.
    """

    def __init__(
        self,
        step: Callable[[Any, Any, Any], tuple[Any, Any]],
        params: Any,
        state: Any,
        device: torch.device | str,
        classes: Classes | None = None,
    ) -> None:
        self.step = step
        self.params = params
        self.state = state
        self.graphs: tuple[Graphified[..., Any], ...] = (
            (step,) if isinstance(step, Graphified) else ()
        )
        self.classes = classes or Classes()
        self._batches = BatchCache(
            device, self.classes, lambda work: work.batch, lambda batch, _: batch
        )

    @property
    def num_running(self) -> int:
        return 0

    def __call__(self, works: Sequence[Work]) -> Sequence[FinishedWork]:
        finished = []
        for work in works:
            if work.edits:
                # Before the step and outside its graph, since no two steps have the same edits.
                state = tuple(apply_edits(state, work.edits) for state in self.state)
            else:
                state = self.state
            # Custom functions in a stage may read tensors that require grad.
            with torch.no_grad():
                self.state, out = self.step(self.params, state, self._batches(work))
            finished.append((work, self.classes.unpad(out, work.descriptor)))
        return finished

    def flush(self) -> Sequence[FinishedWork]:
        return ()

    def received(self, _: Sequence[FinishedWork], /) -> Callable[[], None]:
        return lambda: None

    def placed(self) -> AbstractContextManager[None]:
        return nullcontext()

    def examples(self) -> list[Example]:
        example = self.params, self.state, Batch.decode([0], device=self._batches.device)
        return [(graph, example) for graph in self.graphs]


class PipelineExecutor:
    """Runs work in a session of a pipeline: the stages overlap, within a call and across calls.

    Args:
        pipelined: a pipeline of stages over `DeviceWork` (`with_edits`), with `advance_work`.
        params, state: one entry for each stage that runs here.
        device: the device of the batches.
        classes: that steps run under; None: their own.
        graphs: the graphified stages that run here, each with an example of what the previous stage
            sends it.
    """

    def __init__(
        self,
        pipelined: Pipelined,
        params: Any,
        state: Any,
        device: torch.device | str = "cpu",
        classes: Classes | None = None,
        graphs: Sequence[tuple[Graphified[..., Any], Any]] = (),
    ) -> None:
        self.pipelined = pipelined
        self.params = params
        self.state = state
        self.graphs = tuple(graph for graph, _ in graphs)
        self._inputs = tuple(x for _, x in graphs)
        self.classes = classes or Classes()
        self._batches = BatchCache(
            device, self.classes, _submission, _with_edits, runs_first(pipelined)
        )
        self._session: Session | None = None
        self._first_job = 0
        self._running: deque[Work] = deque()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def __call__(self, works: Sequence[Work]) -> Sequence[FinishedWork]:
        if not works:
            return ()
        if self._session is None:
            self._session = self.pipelined.session(self.params, self.state)
            self._first_job = works[0].job
        self._running += works
        jobs = [Job(work.feeds, self._after(work)) for work in works]
        return self._finished(self._session.submit([self._batches(work) for work in works], jobs))

    def flush(self) -> Sequence[FinishedWork]:
        if self._session is None:
            return ()
        self.state, outputs = self._session.close()
        # The next call opens a new session, whose jobs count from 0 again (`_first_job`).
        self._session = None
        return self._finished(outputs)

    def received(self, finished: Sequence[FinishedWork], /) -> Callable[[], None]:
        if self._session is None:
            last = None
        else:
            last = finished[-1][0].job - self._first_job
        return self.pipelined.transport.received(last)

    def _after(self, work: Work) -> int | None:
        """The job of this session that the work waits for; None if there is none, since jobs of
        earlier sessions have returned."""
        if work.after is None or work.after < self._first_job:
            return None
        return work.after - self._first_job

    def _finished(self, outputs: Sequence[tuple[int, Any]]) -> Sequence[FinishedWork]:
        works = [self._running.popleft() for _ in outputs]
        return [
            (work, self.classes.unpad(out, work.descriptor))
            for work, (_, out) in zip(works, outputs, strict=True)
        ]

    def placed(self) -> AbstractContextManager[None]:
        return stage_context(self.pipelined)

    def examples(self) -> list[Example]:
        batch = Batch.decode([0], device=self._batches.device)
        # Not strict: in mode none there are no graphs, but there are parameters and states.
        stages = zip(self.graphs, self.params, self.state, self._inputs, strict=False)
        return [(graph, (params, state, batch, x)) for graph, params, state, x in stages]
