"""Ranks in processes of their own against one process: every trace gives the same tokens, logits
and states, bitwise.

    python -m weft.proofs.evidence.runs.ranks --ranks 3            # starts its own processes
    torchrun --nproc-per-node 3 -m weft.proofs.evidence.runs.ranks

Every rank draws the same traces of requests (they come, end, are aborted, make room for others),
serves each with its own scheduler as one rank of a pipeline, and serves it again alone, all stages
in its process. What differs is an error.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from hypothesis import HealthCheck, Phase, given, settings
from tqdm.auto import tqdm

from weft.batches.state import advance
from weft.proofs._laws.engine.serving import spanned
from weft.proofs._strategies.engine.traces import Trace, traces
from weft.proofs.checks.difference import assert_equal, visible
from weft.proofs.evidence.environment import environment
from weft.proofs.serving import serve
from weft.transforms.engine.steps.executor import PipelineExecutor, StepExecutor
from weft.transforms.graphs.graphified import Graphified
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.ladder import Limits, make_ladder
from weft.transforms.pipelines.pipeline import pipeline
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.distributed import BackendName, Distributed
from weft.transforms.pipelines.transports.launch import launch
from weft.transforms.pipelines.transports.local import Local

# How a rank runs: its stage eagerly, or graphified in a mode; or all of its step as one graph:
# receive, run, sample, send, advance.
VARIANTS = ("none", "piecewise", "full", "full_and_piecewise", "whole step")


@attrs.define
class Row:
    """What a variant did: traces served, steps, tokens, graphs captured, and seconds."""

    variant: str
    traces: int = 0
    steps: int = 0
    tokens: int = 0
    captures: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.variant:20}{self.traces:8}{self.steps:8}{self.tokens:8}{self.captures:10}{self.seconds:8.1f}"
            "  equal"
        )


HEADER = f"{'a rank runs':20}{'traces':>8}{'steps':>8}{'tokens':>8}{'captures':>10}{'seconds':>8}"


def draw_traces(count: int, min_layers: int) -> list[Trace]:
    """The same traces in every process."""
    drawn: list[Trace] = []

    @settings(
        max_examples=count,
        # Every process draws for itself, and all must draw the same: nothing is sent, which could
        # be wrong in the same way as what is tested.
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    # Each rank needs a layer at least.
    @given(traces(min_layers=min_layers, max_layers=max(min_layers, 3)))
    def keep(trace: Trace) -> None:
        drawn.append(trace)

    keep()
    return drawn


def make_run(
    trace: Trace, variant: str, num_stages: int, transport: Transport, device: torch.device | str
) -> PipelineExecutor | StepExecutor:
    """What does the trace's work, for the ranks that run here."""
    here = transport.ranks(num_stages)
    # Only this rank's part is kept, as in service: a rank that could read another's state might do
    # so.
    params = tuple(trace.params(num_stages, device)[rank] for rank in here)
    state = tuple(trace.state(num_stages, device)[rank] for rank in here)
    if variant != "whole step":
        return PipelineExecutor(
            spanned(trace, num_stages, variant, transport, device=device), params, state, device
        )
    ladder = make_ladder("full", Limits(trace.budget.cohort_size, trace.budget.max_num_tokens))
    step = pipeline(trace.stages(num_stages, device), advance=advance, transport=transport)
    return StepExecutor(graphify(step, ladder=ladder, collectives=True), params, state, device)


def check_trace(trace: Trace, variant: str, transport: Distributed, row: Row) -> None:
    """Serve a trace on these ranks, and in this process alone.

    Raises:
        LawViolation: a token, a logit or an entry of this rank's state differs.
    """
    rank = transport.rank
    num_ranks = transport.num_ranks
    device = transport.device
    spread = make_run(trace, variant, num_ranks, transport, device)
    # In the same variant and on the same device, so that the bits must be equal.
    alone = make_run(trace, variant, num_ranks, Local(), device)
    for here, there in zip(serve(trace, spread), serve(trace, alone), strict=True):
        law = f"{variant}, rank {rank} of {num_ranks}, {trace!r}"
        assert [work.job for work, _ in here.done] == [work.job for work, _ in there.done], (
            f"{law}: jobs"
        )
        assert_equal(
            f"{law}: outputs", [out for _, out in here.done], [out for _, out in there.done]
        )
        # In the midst of its steps a rank may be ahead of another, so that only settled states
        # compare.
        if here.settled:
            assert_equal(f"{law}: state", visible(spread.state), visible([alone.state[rank]]))
        row.steps += len(here.works)
        row.tokens += sum(sum(work.samples) for work in here.works)
    row.traces += 1
    row.captures += count_captures(spread)


def count_captures(run: PipelineExecutor | StepExecutor) -> int:
    """The graphs that this rank captured."""
    if isinstance(run, StepExecutor):
        steps: list[Any] = [run.step]
    else:
        steps = [*run.pipelined.stages]
    for index, step in enumerate(steps):
        # Stages may have wrappers around their graphs.
        while not isinstance(step, Graphified) and hasattr(step, "__wrapped__"):
            step = step.__wrapped__
        steps[index] = step
    return sum(step.cache_info().captures for step in steps if isinstance(step, Graphified))


def run(
    num_traces: int, variants: Sequence[str], backend: BackendName | None, timeout: float
) -> list[Row]:
    """All of it, on this rank."""
    torch.set_num_threads(1)
    transport = Distributed(backend=backend, timeout=timeout)
    drawn = draw_traces(num_traces, transport.num_ranks)
    rows = [Row(variant) for variant in variants]
    # The ranks compare equal things, so that one of them may speak for all. A difference is raised
    # on any.
    say = print if transport.rank == 0 else lambda *_, **__: None
    say(
        f"{transport!r}, rank 0 of {transport.num_ranks}, against one process: tokens, logits and"
        " states, bitwise"
    )
    say(HEADER, flush=True)
    for row in rows:
        start = time.perf_counter()
        for trace in tqdm(drawn, desc=row.variant, disable=transport.rank > 0 or None):
            check_trace(trace, row.variant, transport, row)
        row.seconds = time.perf_counter() - start
        say(row, flush=True)
    transport.close()
    return rows


def keep(rows: Sequence[Row], ranks: int, backend: str, out: Path) -> None:
    """Write the record."""
    out.mkdir(parents=True, exist_ok=True)
    device = "cpu" if backend == "gloo" else "cuda"
    record = {"ranks": ranks, "backend": backend, "rows": [attrs.asdict(row) for row in rows]}
    record["environment"] = environment(device)
    (out / f"ranks-{ranks}-{backend}.json").write_text(json.dumps(record, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m weft.proofs.evidence.runs.ranks", description=str(__doc__).split("\n\n")[0]
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=2,
        help="processes to start; under torchrun those that there are",
    )
    parser.add_argument(
        "--backend", choices=("gloo", "nccl", "peer"), help="default: by the device"
    )
    parser.add_argument("--traces", type=int, default=20, help="traces to draw")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=VARIANTS, metavar="V", help=str(VARIANTS)
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds without progress that are a failure"
    )
    parser.add_argument("--out", type=Path, help="a folder for the record")
    args = parser.parse_args(argv)
    work: tuple[Any, ...] = (args.traces, tuple(args.variants), args.backend, args.timeout)
    # Torchrun has started the processes, and says so in the environment.
    under_torchrun = "RANK" in os.environ
    ranks = int(os.environ.get("WORLD_SIZE", args.ranks))
    call: Callable[..., Any] = run
    if under_torchrun:
        rows = call(*work)
    else:
        rows = launch(call, ranks, *work, timeout=args.timeout)[0]
    if args.out is not None and int(os.environ.get("RANK", "0")) == 0:
        keep(
            rows,
            ranks,
            args.backend or ("nccl" if torch.cuda.is_available() else "gloo"),
            args.out,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
