"""L11 and L12 over traces: all stages agree on the requests, and each request gets the tokens that
it gets alone."""

from collections.abc import Sequence
from itertools import zip_longest

import attrs
import torch

from weft.batches.batch import Batch
from weft.batches.state import State, admit, advance
from weft.ops.requests import LAST_TOKEN
from weft.proofs._strategies.engine.traces import Trace
from weft.proofs.checks.difference import LawViolation, assert_equal
from weft.proofs.serving import Window, serve
from weft.stages.layout import empty_states
from weft.transforms.engine.requests.host_state import Request
from weft.transforms.engine.requests.prompts import PromptContent
from weft.transforms.engine.steps.executor import PipelineExecutor
from weft.transforms.engine.steps.results import FinishedWork
from weft.transforms.engine.steps.step import Work, advance_work, with_edits
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.ladder import Limits, lora_rungs, make_ladder
from weft.transforms.pipelines.pipeline import Pipelined, compose, pipeline
from weft.transforms.pipelines.transports import Transport
from weft.values.trees import leaves_with_names

# The fields of the state in which every stage keeps its copy of the requests' data.
TABLES = (
    ".block_table",
    ".positions",
    ".last_tokens",
    ".adapters",
    ".mrope_position_deltas",
    ".sampling.floats",
    ".sampling.ints",
    ".drafting.limits",
)


def spanned(
    trace: Trace,
    num_stages: int,
    mode: str,
    transport: Transport | None = None,
    backend: str | None = None,
    device: torch.device | str = "cpu",
) -> Pipelined:
    """The trace's model as a pipeline over work, with stages graphified in the given mode."""
    # No step has more adapters than rows.
    loras = lora_rungs(min(trace.num_adapters, trace.budget.cohort_size))
    limits = Limits(
        trace.budget.cohort_size, trace.budget.max_num_tokens, trace.budget.query_lens, loras
    )
    stages = trace.stages(num_stages, device)
    if mode != "none":
        ladder = make_ladder(mode, limits)
        split_at = ("weft::paged_attention",)
        stages = [
            graphify(stage, ladder=ladder, split_at=split_at, backend=backend) for stage in stages
        ]
    return pipeline(
        [with_edits(stage) for stage in stages], advance=advance_work, transport=transport
    )


def stages_agree(trace: Trace, num_stages: int, mode: str, device: str = "cpu") -> None:
    """L11: after any number of steps all stages have the same tables, whichever requests came,
    ended, were aborted or were preempted.

    Each request gets the tokens that it gets alone and eagerly."""
    _serve("L11", trace, num_stages, mode, device)


def speculation_changes_nothing(
    trace: Trace, num_stages: int, mode: str, device: str = "cpu"
) -> None:
    """L12: whatever is drafted, and by whatever method, each request gets the tokens, greedy or
    random, that it gets alone, eagerly, one at a time, and all stages have the same tables."""
    _serve("L12", trace, num_stages, mode, device)


def _serve(law: str, trace: Trace, num_stages: int, mode: str, device: str) -> None:
    run = PipelineExecutor(
        spanned(trace, num_stages, mode, device=device),
        trace.params(num_stages, device),
        trace.state(num_stages, device),
        device,
    )
    windows: list[Window] = []
    for window in serve(trace, run):
        # The stages' tables are comparable only once no step is in flight.
        states = run.state if window.settled else ()
        tables = [
            # Without the last row, the scratch row, which belongs to padding.
            {name: x[:-1] for name, x in leaves_with_names(state) if name in TABLES}
            for state in states
        ]
        for index, table in enumerate(tables[1:], 1):
            assert_equal(f"{law} stages agree: stage {index} and stage 0", table, tables[0])
        windows.append(window)
    # The oracle does not draft.
    served_as_alone(attrs.evolve(trace, drafts=None), windows, device, law)


def hosts_agree(trace: Trace, num_ranks: int, device: str = "cpu") -> None:
    """L11: ranks that each schedule for themselves and see the same tokens decide on equal work."""
    first = _First(
        PipelineExecutor(
            spanned(trace, 1, "none", device=device),
            trace.params(1, device),
            trace.state(1, device),
            device,
        ),
        [],
        [],
    )
    ranks = [serve(trace, first), *(serve(trace, _Other(first)) for _ in range(num_ranks - 1))]
    for windows in zip_longest(*ranks):
        if len({window is None for window in windows}) > 1:
            raise LawViolation("L11 hosts agree: one has come to its end, and another has not")


@attrs.define(eq=False)
class _First:
    """The rank that computes; it keeps the work and results of its last call and last flush."""

    run: PipelineExecutor
    works: Sequence[Work] = ()
    done: Sequence[FinishedWork] = ()
    flushed: Sequence[FinishedWork] = ()

    def __call__(self, works: Sequence[Work]) -> Sequence[FinishedWork]:
        self.works, self.done = works, self.run(works)
        return self.done

    def flush(self) -> Sequence[FinishedWork]:
        self.flushed = self.run.flush()
        return self.flushed


@attrs.frozen(eq=False)
class _Other:
    """A rank that schedules for itself, but takes its results from the first one."""

    first: _First

    def __call__(self, works: Sequence[Work]) -> Sequence[FinishedWork]:
        if list(works) != list(self.first.works):
            theirs = [str(work) for work in self.first.works]
            raise LawViolation(
                f"L11 hosts agree: one does {[str(work) for work in works]}, another {theirs}"
            )
        return self.first.done

    def flush(self) -> Sequence[FinishedWork]:
        return self.first.flushed


def served_as_alone(
    trace: Trace, windows: Sequence[Window], device: str = "cpu", law: str = "L11"
) -> None:
    """Raise LawViolation unless each request got the tokens that it gets alone, or a prefix of them
    if it was aborted."""
    got = {running.request.id: running for window in windows for running in window.got}
    for arrival in trace.arrivals:
        request = arrival.request
        running = got.get(request.id)
        if running is None:
            tokens = []
        else:
            tokens = running.tokens[len(request.prompt) :]
        expected = alone(trace, request, device)
        aborted = arrival.aborted is not None and (
            running is None or running.reason in ("", "abort")
        )
        if tokens != (expected[: len(tokens)] if aborted else expected):
            raise LawViolation(
                f"{law} served as alone: {request} got {tokens}, and alone {expected}"
            )


def alone(trace: Trace, request: Request, device: str = "cpu") -> list[int]:
    """The tokens of a request that runs by itself, eagerly, on one stage.

    If its prompt has positions, this function counts those of later tokens, and the state has no
    position delta."""
    step = compose(trace.stages(1, device), advance=advance)
    params = trace.params(1, device)
    most = -(-(len(request.prompt) + request.max_tokens) // trace.page_size)
    empty = _small(trace, most, device)
    sampling = request.sampling
    loras = int(request.adapter >= 0)
    state: tuple[State, ...] = (
        admit(empty, [0], [range(most)], [sampling], [request.prompt], adapters=[request.adapter]),
    )
    content = request.prompt_content or PromptContent(None, None, 0, ())
    batch = Batch.ragged(
        [0],
        [request.prompt],
        inputs_embeds=content.inputs_embeds,
        positions=content.positions,
        num_active_loras=loras,
        device=device,
    )
    tokens: list[int] = []
    while len(tokens) < request.max_tokens and not (
        tokens and tokens[-1] in request.sampling.stop_token_ids
    ):
        state, out = step(params, state, batch)
        tokens.append(int(out.token_ids[0]))
        batch = Batch.decode([0], num_active_loras=loras, device=device)
        if content.positions is not None:
            place = int(content.positions.max()) + len(tokens)
            batch = Batch.ragged(
                [0],
                [[LAST_TOKEN]],
                positions=torch.full((3, 1), place),
                num_active_loras=loras,
                device=device,
            )
    return tokens


def _small(trace: Trace, num_pages: int, device: torch.device | str) -> State:
    (state,) = empty_states(
        trace.config,
        trace.layouts(1),
        max_num_reqs=1,
        num_pages=num_pages,
        max_pages=num_pages,
        page_size=trace.page_size,
        device=device,
    )
    return state
