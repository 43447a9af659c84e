"""Simulated against measured times: pipelines whose parts are first measured alone, and then run
together.

    python -m weft.proofs.evidence.bench.timelines [--ranks N] [--backend gloo|nccl|peer] [--out
    FOLDER]

Each rank measures its own stage alone, and ranks 0 and 1 measure their link. From these costs
`simulate` predicts programs (streaming, and decode loops of several cohorts), which then run. On
GPUs a stage is a captured graph of matrix products. On CPUs, whose cores share caches and clocks,
it sleeps some milliseconds, as if it waited for a device.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from weft.effects import Run
from weft.proofs.evidence.environment import environment
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.pipeline import Pipelined, pipeline
from weft.transforms.pipelines.schedule import Job, decode_jobs, make_programs
from weft.transforms.pipelines.timing.costs import Costs
from weft.transforms.pipelines.timing.events import Event
from weft.transforms.pipelines.timing.simulate import simulate
from weft.transforms.pipelines.timing.timeline import (
    Comparison,
    compare,
    make_timeline,
    measure,
)
from weft.transforms.pipelines.transports.distributed import BackendName, Distributed, end_of
from weft.transforms.pipelines.transports.launch import launch

ROUNDS = 5


@attrs.frozen
class Case:
    """A program: its name and its jobs."""

    name: str
    jobs: tuple[Job, ...]


def cases(num_ranks: int) -> tuple[Case, ...]:
    """The plan of a run."""
    streams = (
        Case(f"{m} micro-batches", tuple(Job(feeds=True) for _ in range(m)))
        for m in (1, num_ranks, 8)
    )
    loops = (
        Case(f"{c} cohorts, 6 steps each", decode_jobs(c, 6)) for c in (1, num_ranks, num_ranks + 1)
    )
    return (*streams, *loops)


@attrs.frozen
class Found:
    """A case on all ranks: its predicted and measured seconds, and their relative difference."""

    name: str
    simulated: float
    measured: float
    comparison: Comparison

    def __str__(self) -> str:
        error = self.comparison.step_time
        return (
            f"{self.name:24}{self.simulated * 1e3:12.2f}{self.measured * 1e3:12.2f}{error:+10.1%}"
        )


def make_stage(kind: str, device: torch.device, rank: int) -> tuple[Callable[..., Any], Tensor]:
    """A rank's stage for a `kind` of device, and its weights. It takes some milliseconds, more on
    later ranks, and keeps the shape of its input."""
    size = _shape(kind)[1]
    weights = torch.randn(12 + 2 * rank, size, size, device=device) / size**0.5

    def multiply(
        params: Tensor, state: Tensor, batch: Tensor, x: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        y = batch if x is None else x
        for weight in params:
            y = torch.tanh(y @ weight)
        return state, y

    def wait(
        params: Tensor, state: Tensor, batch: Tensor, x: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        # Sleeping takes no core, so that ranks on one CPU do not slow each other down.
        time.sleep(len(params) * 2e-3)
        return state, batch if x is None else x

    return (graphify(multiply) if kind == "cuda" else wait), weights


def _shape(kind: str) -> tuple[int, int]:
    """The shape of a batch, and of the tensors sent."""
    if kind == "cpu":
        return (64, 512)
    return (512, 4096)


def seconds(fn: Callable[[], Any], device: torch.device) -> float:
    """The median seconds of some calls, each timed until its device's work has ended."""
    spans = []
    for _ in range(ROUNDS + 2):
        start = time.perf_counter()
        fn()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spans.append(time.perf_counter() - start)
    # The first two compile and capture.
    return statistics.median(spans[2:])


def link_costs(transport: Distributed, batch: Tensor) -> tuple[float, float]:
    """The latency in seconds and the bandwidth in bytes per second between ranks 0 and 1, from
    round trips of two sizes."""
    end = end_of(transport)
    rank = transport.rank
    timings = []
    # Two sizes for two unknowns: the latency and the bandwidth.
    for message in (batch[:1].clone(), batch.repeat(8, 1)):

        def trip(message: Tensor = message) -> None:
            for step in (0, 1):
                if rank == step:
                    end.send([message], 1 - step, 0)
                elif rank == 1 - step:
                    end.recv([message], step, 0)

        timings.append((message.nbytes, seconds(trip, transport.device) / 2 if rank < 2 else 0.0))
    (small, fast), (large, slow) = timings
    rate = (large - small) / max(slow - fast, 1e-9)
    return max(fast - small / rate, 0.0), rate


@attrs.frozen
class Measured:
    """One rank's measurements: the seconds of its stage alone, of a transfer's latency, and of
    reporting its position before an effect; the bytes per second of its link; and each case's
    events, from the run of median length."""

    stage: float
    latency: float
    bytes_per_second: float
    launch: float
    events: list[list[Event]]


def measure_rank(backend: BackendName | None, timeout: float) -> Measured:
    """Run on each rank: measure its parts alone, and then each case."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transport = Distributed(backend=backend, timeout=timeout)
    device = transport.device
    rank = transport.rank
    num_ranks = transport.num_ranks
    all_stages = [
        # Only this rank's weights are real: the others need a stage to count, and none to run.
        make_stage(device.type, device if r == rank else torch.device("meta"), r)
        for r in range(num_ranks)
    ]
    batch, state = torch.randn(_shape(device.type), device=device), torch.zeros(1, device=device)
    stage, weights = all_stages[rank]
    link = link_costs(transport, batch)
    alone = seconds(lambda: stage(weights, state, batch, batch), device)
    step = pipeline(
        [stage for stage, _ in all_stages],
        advance=lambda state, batch, out: state,
        transport=transport,
    )
    # the host runs ahead of a GPU
    if device.type == "cuda":
        launch = 0.0
    else:
        # On a CPU the report of a position is in the way of the work.
        launch = seconds(lambda: transport.monitor.move_to(0, Run("stage 0", 0)), device)
    events = [_run_case(transport, step, case, weights, state, batch) for case in cases(num_ranks)]
    return Measured(alone, *link, launch, events)


def _run_case(
    transport: Distributed,
    step: Pipelined,
    case: Case,
    weights: Tensor,
    state: Tensor,
    batch: Tensor,
) -> list[Event]:
    if batch.is_cuda:
        kind: Literal["cpu", "cuda"] = "cuda"
    else:
        kind = "cpu"
    runs = []
    for _ in range(ROUNDS):
        transport.collect(None)  # all ranks begin together
        with measure(kind) as recorder:
            step.stream((weights,), (state,), [batch] * len(case.jobs), case.jobs)
        runs.append(recorder.events())
    spans = transport.collect([events[-1].end - events[0].start for events in runs])
    # A run is as long as its slowest rank.
    longest = [max(durations) for durations in zip(*spans, strict=True)]
    # The same run on every rank
    return runs[sorted(range(1, ROUNDS), key=longest.__getitem__)[(ROUNDS - 1) // 2]]


def hold_together(ranks: Sequence[Measured], nbytes: int) -> list[Found]:
    """For each case, the times that `simulate` predicts and those that the ranks measured."""
    costs = Costs(
        stages=tuple(rank.stage for rank in ranks),
        latency=ranks[0].latency,
        bytes_per_second=ranks[0].bytes_per_second,
        message_bytes=nbytes,
        output_bytes=nbytes,
        launch=statistics.median(rank.launch for rank in ranks),
    )
    comparisons = []
    for index, case in enumerate(cases(len(ranks))):
        measured = make_timeline(
            _from_first_run([event for rank in ranks for event in rank.events[index]])
        )
        simulated = simulate(make_programs(len(ranks), case.jobs, advances=True), costs)
        comparisons.append(
            Found(case.name, simulated.step_time, measured.step_time, compare(simulated, measured))
        )
    return comparisons


def _from_first_run(events: Sequence[Event]) -> list[Event]:
    """The events with their times cut to begin at the first run: ranks' processes start at
    different times."""
    first = min(event.start for event in events if isinstance(event.effect, Run))
    return [
        attrs.evolve(e, start=first, waited=min(e.waited, e.end - first))
        if e.start < first < e.end
        else e
        for e in events
        if e.end > first
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m weft.proofs.evidence.bench.timelines", description=str(__doc__)
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", choices=("gloo", "nccl", "peer"))
    parser.add_argument("--out", type=Path, help="a folder for the record")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ranks = launch(measure_rank, args.ranks, args.backend, 60.0)
    on_gpu = args.backend in ("nccl", "peer")
    nbytes = math.prod(_shape("cuda" if on_gpu else "cpu")) * 4
    rows = hold_together(ranks, nbytes)
    print(f"stages alone: {', '.join(f'{rank.stage * 1e3:.2f} ms' for rank in ranks)}; ", end="")
    print(
        f"link: {ranks[0].latency * 1e6:.0f} us and {ranks[0].bytes_per_second / 1e9:.2f} GB/s",
        end="; ",
    )
    print(f"each effect: {ranks[0].launch * 1e6:.0f} us")
    print(
        f"{'':24}{'simulated ms':>12}{'measured ms':>12}{'error':>10}", *rows, sep="\n", flush=True
    )
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        record = {
            "rows": [attrs.asdict(row) for row in rows],
            "environment": environment("cuda" if on_gpu else "cpu"),
        }
        name = f"timelines-{args.ranks}-{args.backend or 'gloo'}.json"
        (args.out / name).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
