"""One step as data (`Work`, the scheduler's output), and the executors that run it on the device's states."""

import functools
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import torch

from weft.batch import EMBEDDED, LAST_TOKEN, Batch
from weft.descriptor import BatchDescriptor
from weft.donation import donates
from weft.outputs import Output
from weft.sampling import SamplingParams
from weft.state import State, admit, advance, copy_pages, grow
from weft.torchapi.private import to_device
from weft.transforms.engine.inputs import batch_embeds, batch_positions
from weft.transforms.engine.masks import stack_masks
from weft.transforms.engine.requests import PromptExtras
from weft.transforms.graphs.graphified import Graphified
from weft.transforms.graphs.memory import MemoryEstimate
from weft.transforms.pipelines.pipeline import Pipelined, Stage
from weft.transforms.pipelines.schedule import Job
from weft.transforms.pipelines.session import Session
from weft.trees import pytree

_STATIC = {"weft.static": True}


@attrs.frozen
class Admission:
    """A request gets a row of the device state.

    Args:
        row: the row.
        pages: its pages, in order.
        computed: tokens whose keys and values are in them already.
        sampling, prompt: of the request.
        generated: the tokens that it generated before it was preempted.
        adapter: the slot of its LoRA adapter; -1: none.
        limit: the most tokens that it can have, its prompt included.
        mrope_position_delta: position minus index, for each token after the prompt.
    """

    row: int
    pages: tuple[int, ...]
    computed: int
    sampling: SamplingParams
    prompt: tuple[int, ...]
    generated: tuple[int, ...] = ()
    adapter: int = -1
    limit: int = 0
    mrope_position_delta: int = 0


@attrs.frozen
class Growth:
    """A request gets more pages, after the `start` pages that it has."""

    row: int
    start: int
    pages: tuple[int, ...]


@attrs.frozen
class Edits:
    """Changes to the state's tables before a step.

    Args:
        copies: (source, target): pages to copy, so that another request can write on the copy.
        admissions, growths: requests that get a row, and requests that get pages.
    """

    copies: tuple[tuple[int, int], ...] = ()
    admissions: tuple[Admission, ...] = ()
    growths: tuple[Growth, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.copies or self.admissions or self.growths)


@attrs.frozen
class Work:
    """One step as the scheduler decided it, on the host; equal on all ranks.

    Each tuple has one entry per request, in the order of the batch.

    Args:
        job: the number of the step.
        edits: changes to the tables before it.
        requests: ids.
        rows: rows of the device state.
        token_ids: the tokens to compute; empty for a uniform decode, which continues from each request's last token.
        samples: whether the request samples a token.
        after: the job whose tokens must have returned before this one runs; None: no such job.
        targets: the prompt token after each token, or 0 where the request wants no logprobs of its prompt; empty if no
            request does.
        starts: tokens in the cache before this step; for a decode, an upper bound.
        num_active_loras: number of different adapters.
        query_len: tokens per request of a uniform decode: the last one, and drafts.
        given: the prompt's embeddings and positions; empty if no prompt has them.
        masks: the bits of the tokens that may be sampled, None for any token; empty if no request has a mask.
    """

    job: int
    edits: Edits
    requests: tuple[str, ...]
    rows: tuple[int, ...]
    token_ids: tuple[tuple[int, ...], ...]
    samples: tuple[bool, ...]
    after: int | None
    targets: tuple[tuple[int, ...], ...] = ()
    starts: tuple[int, ...] = ()
    num_active_loras: int = 0
    query_len: int = 1
    given: tuple[PromptExtras | None, ...] = ()
    masks: tuple[bytes | None, ...] = ()

    @property
    def feeds(self) -> bool:
        """Whether the step returns tokens or logprobs."""
        return any(self.samples) or bool(self.targets)

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch."""
        return sum(map(len, self.token_ids)) or len(self.rows) * self.query_len

    @property
    def descriptor(self) -> BatchDescriptor:
        """The shape class of the batch."""
        count, loras = len(self.rows), self.num_active_loras
        if not self.token_ids:
            return BatchDescriptor.uniform(count, self.query_len, loras)
        return BatchDescriptor(self.num_tokens, count, num_active_loras=loras)

    @property
    def kind(self) -> str:
        """`decode`, `prompts`, or `mixed`."""
        return "decode" if not self.token_ids else "mixed" if (LAST_TOKEN,) in self.token_ids else "prompts"

    @property
    def summary(self) -> str:
        """One line, which must be equal on all ranks: the rows, their numbers of tokens, and a digest of the masks."""
        digest = hashlib.blake2b(digest_size=6)
        for mask in self.masks:
            digest.update(b"any;" if mask is None else b"%d;" % len(mask) + mask)
        return f"{self}{f', masks {digest.hexdigest()}' * bool(self.masks)}"

    def place(self, device: torch.device | str, first: bool = True) -> "DeviceWork":
        """The batch as tensors on a device.

        Args:
            first: whether the first stage runs here; no other stage takes embeddings and positions.
        """
        loras = self.num_active_loras
        if not self.token_ids:
            batch = Batch.decode(self.rows, query_len=self.query_len, num_active_loras=loras, device=device)
            return DeviceWork(self._masked(batch, device), self.edits)
        ids, given = self.token_ids, self.given if first else ()
        if self.given and not first:
            ids = tuple(tuple(0 if token == EMBEDDED else token for token in own) for own in ids)
        batch = Batch.ragged(
            self.rows,
            ids,
            samples=self.samples,
            inputs_embeds=batch_embeds(given, self.starts, ids, device) if given else None,
            positions=batch_positions(given, self.starts, ids, device) if given else None,
            num_active_loras=loras,
            device=device,
        )
        if self.targets:
            targets = torch.tensor([token for own in self.targets for token in own], dtype=torch.int64)
            batch = attrs.evolve(batch, targets=to_device(targets, device))
        return DeviceWork(self._masked(batch, device), self.edits)

    def _masked(self, batch: Batch, device: torch.device | str) -> Batch:
        return attrs.evolve(batch, token_mask=to_device(stack_masks(self.masks), device)) if self.masks else batch

    def __str__(self) -> str:
        counts = [len(ids) if ids != (LAST_TOKEN,) else "last" for ids in self.token_ids] or ["last"] * len(self.rows)
        more = ["" if sampled else " and more" for sampled in self.samples]
        parts = (f"row {row}: {count}{rest}" for row, count, rest in zip(self.rows, counts, more, strict=True))
        return f"job {self.job}: " + ", ".join(parts)


@pytree
@attrs.frozen(eq=False)
class DeviceWork:
    """Work whose batch is on the device: what a stage made by `with_edits` takes as its batch."""

    batch: Batch
    edits: Edits = attrs.field(metadata=_STATIC)


def with_edits(stage: Stage) -> Stage:
    """Turn a stage over batches into a stage over `DeviceWork`, which edits the tables first. The edits are outside of
    the stage's graph."""

    @donates("state")
    @functools.wraps(stage)
    def run(params: Any, state: Any, work: DeviceWork, x: Any) -> tuple[Any, Any]:
        return stage(params, apply_edits(state, work.edits), work.batch, x)

    return run


@donates("state")
def advance_work(state: State, work: DeviceWork, out: Output | None) -> State:
    """`weft.state.advance` over `DeviceWork`."""
    return advance(state, work.batch, out)


@donates("state")
def apply_edits(state: State, edits: Edits) -> State:
    """Apply a step's edits to the tables of a state.

    Args:
        state: donated.
        edits: no two of them give the same row.
    """
    if edits.copies:
        state = copy_pages(state, *zip(*edits.copies, strict=True))
    if admissions := edits.admissions:
        state = admit(
            state,
            [a.row for a in admissions],
            [a.pages for a in admissions],
            [a.sampling for a in admissions],
            [a.prompt for a in admissions],
            generated=[a.generated for a in admissions],
            positions=[a.computed for a in admissions],
            adapters=[a.adapter for a in admissions],
            limits=[a.limit for a in admissions],
            mrope_position_deltas=[a.mrope_position_delta for a in admissions],
        )
    if edits.growths:
        state = grow(state, [(g.row, g.start, g.pages) for g in edits.growths])
    return state


_MAX_CACHED_BATCHES = 16

FinishedWork = tuple[Work, Output | None]
"""Work that is done, and the last stage's output; None where the step returns nothing."""


class Executor(Protocol):
    """Runs work in order, without waiting for the device."""

    state: Any  # one entry for each stage that runs here, once no work is running

    @property
    def graphs(self) -> Sequence[Graphified[..., Any]]:
        """The graphified functions that run here."""

    @property
    def num_running(self) -> int:
        """Works that were launched and have not been returned as finished."""

    def __call__(self, works: Sequence[Work]) -> Sequence[FinishedWork]:
        """Launch works; returns what is finished by now, in order. A pipeline returns works of earlier calls."""

    def flush(self) -> Sequence[FinishedWork]:
        """Finish and return all launched work."""

    def received(self, finished: Sequence[FinishedWork], /) -> Callable[[], None]:
        """A function to call before the host reads finished work: it raises if other ranks were asked for other
        work."""

    def capture(self) -> None:
        """Capture all graphs of the ladders, without a trace in the states."""

    def memory_estimates(self) -> list[MemoryEstimate]:
        """An estimate, for each graphified function, of the memory that its graphs will take."""


@attrs.frozen
class BatchCache:
    """Puts batches on the device, and reuses the batch of an earlier decode of the same rows.

    Args:
        device: the device.
        first: whether the first stage runs here.
    """

    device: torch.device | str
    first: bool = True
    _decodes: dict[tuple[tuple[int, ...], int, int], Batch] = attrs.field(factory=dict, init=False)

    def __call__(self, work: Work) -> DeviceWork:
        if work.token_ids or work.masks:
            return work.place(self.device, self.first)
        key = work.rows, work.query_len, work.num_active_loras
        if (batch := self._decodes.get(key)) is None:
            if len(self._decodes) >= _MAX_CACHED_BATCHES:
                del self._decodes[next(iter(self._decodes))]
            batch = self._decodes[key] = work.place(self.device).batch
        return DeviceWork(batch, work.edits)


Example = tuple[Graphified[..., Any], tuple[Any, ...]]
"""A graphified function, and arguments to capture it with."""


def capture_all(examples: Sequence[Example]) -> None:
    """Compile the kernels of these functions, and capture their ladders."""
    for graph, example in examples:
        graph.compile_ahead(*example)
        graph.capture(*example)


def estimate_all(examples: Sequence[Example]) -> list[MemoryEstimate]:
    """Compile the kernels of these functions, and estimate the memory of their graphs."""
    estimates = []
    for graph, example in examples:
        graph.compile_ahead(*example)
        estimates.append(graph.memory_estimate(*example))
    return estimates


class StepExecutor:
    """Runs each work as one step, one after the other; finished work returns at once.

    Args:
        step: `(params, state, batch) -> (state, Output)` over tuples with one entry for each stage that runs here.
        params, state: those tuples.
        device: the device of the batches.
    """

    def __init__(
        self, step: Callable[[Any, Any, Any], tuple[Any, Any]], params: Any, state: Any, device: torch.device | str
    ) -> None:
        self.step = step
        self.params = params
        self.state = state
        self.graphs: tuple[Graphified[..., Any], ...] = (step,) if isinstance(step, Graphified) else ()
        self._batches = BatchCache(device)

    @property
    def num_running(self) -> int:
        return 0

    def __call__(self, works: Sequence[Work]) -> Sequence[FinishedWork]:
        finished = []
        for work in works:
            state = tuple(apply_edits(state, work.edits) for state in self.state) if work.edits else self.state
            self.state, out = self.step(self.params, state, self._batches(work).batch)
            finished.append((work, out))
        return finished

    def flush(self) -> Sequence[FinishedWork]:
        return ()

    def received(self, _: Sequence[FinishedWork], /) -> Callable[[], None]:
        return lambda: None

    def capture(self) -> None:
        capture_all(self._examples())

    def memory_estimates(self) -> list[MemoryEstimate]:
        return estimate_all(self._examples())

    def _examples(self) -> list[Example]:
        example = self.params, self.state, Batch.decode([0], device=self._batches.device)
        return [(graph, example) for graph in self.graphs]


class PipelineExecutor:
    """Runs work in a session of a pipeline: the stages overlap, within a call and from one call to the next.

    Args:
        pipelined: a pipeline of stages over `DeviceWork` (`with_edits`), with `advance_work`.
        params, state: one entry for each stage that runs here.
        device: the device of the batches.
        graphs: the graphified stages that run here, each with an example of what the stage before sends it.
    """

    def __init__(
        self,
        pipelined: Pipelined,
        params: Any,
        state: Any,
        device: torch.device | str = "cpu",
        graphs: Sequence[tuple[Graphified[..., Any], Any]] = (),
    ) -> None:
        self.pipelined = pipelined
        self.params = params
        self.state = state
        self.graphs = tuple(graph for graph, _ in graphs)
        self._inputs = tuple(x for _, x in graphs)
        self._batches = BatchCache(device, 0 in pipelined.transport.ranks(len(pipelined.stages)))
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
            self._session, self._first_job = self.pipelined.session(self.params, self.state), works[0].job
        self._running += works
        jobs = [Job(work.feeds, self._after(work)) for work in works]
        return self._finished(self._session.submit([self._batches(work) for work in works], jobs))

    def flush(self) -> Sequence[FinishedWork]:
        if self._session is None:
            return ()
        self.state, outputs = self._session.close()
        self._session = None
        return self._finished(outputs)

    def received(self, finished: Sequence[FinishedWork], /) -> Callable[[], None]:
        last = None if self._session is None else finished[-1][0].job - self._first_job
        return self.pipelined.transport.received(last)

    def _after(self, work: Work) -> int | None:
        """The job of this session that the work waits for; jobs of earlier sessions have returned."""
        return None if work.after is None or work.after < self._first_job else work.after - self._first_job

    def _finished(self, outputs: Sequence[tuple[int, Any]]) -> Sequence[FinishedWork]:
        return [(self._running.popleft(), out) for _, out in outputs]

    def capture(self) -> None:
        capture_all(self._examples())

    def memory_estimates(self) -> list[MemoryEstimate]:
        return estimate_all(self._examples())

    def _examples(self) -> list[Example]:
        batch = Batch.decode([0], device=self._batches.device)
        stages = zip(self.graphs, self.params, self.state, self._inputs, strict=False)
        return [(graph, (params, state, batch, x)) for graph, params, state, x in stages]
