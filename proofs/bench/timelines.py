"""Simulated against measured: pipelines whose parts are measured alone, and then all at once.

    python -m weft.proofs.bench.timelines [--ranks N] [--backend gloo|nccl|peer] [--out FOLDER]

Each rank measures its own stage by itself, and ranks 0 and 1 measure their link; from these costs alone `simulate`
predicts programs (streaming, and decode loops of several cohorts), which then run. On CPUs a stage is a chain of matrix
products of one thread, on GPUs
larger ones, as a captured graph.
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

from weft.proofs.environment import environment
from weft.transforms.events import Event
from weft.transforms.graphify import graphify
from weft.transforms.measure import measure
from weft.transforms.pipeline import Pipelined, pipeline
from weft.transforms.schedule import Job, decode_jobs, make_programs
from weft.transforms.simulate import Costs, simulate
from weft.transforms.timeline import Comparison, Timeline, compare
from weft.transforms.transports.distributed import Distributed
from weft.transforms.transports.launch import launch

ROUNDS = 5


@attrs.frozen
class Case:
    """A program: its jobs, and what it is called."""

    name: str
    jobs: tuple[Job, ...]


def cases(num_ranks: int) -> tuple[Case, ...]:
    """What is run."""
    streams = (Case(f"{m} micro-batches", tuple(Job(feeds=True) for _ in range(m))) for m in (1, num_ranks, 8))
    loops = (Case(f"{c} cohorts, 6 steps each", decode_jobs(c, 6)) for c in (1, num_ranks, num_ranks + 1))
    return (*streams, *loops)


@attrs.frozen
class Found:
    """A case on all ranks: predicted and measured seconds, and by how much they differ."""

    name: str
    simulated: float
    measured: float
    comparison: Comparison

    def __str__(self) -> str:
        error = self.comparison.step_time
        return f"{self.name:24}{self.simulated * 1e3:12.2f}{self.measured * 1e3:12.2f}{error:+10.1%}"


def make_stage(device: torch.device, rank: int) -> tuple[Callable[..., Any], Tensor]:
    """A stage of some milliseconds, more on later ranks, and its weights; it keeps the shape of what it gets."""
    on_gpu = device.type == "cuda"
    size, products = _shape(device.type)[1], 12 if on_gpu else 6
    weights = torch.randn(products + 2 * rank, size, size, device=device) / size**0.5

    def stage(params: Tensor, state: Tensor, batch: Tensor, x: Tensor | None) -> tuple[Tensor, Tensor]:
        y = batch if x is None else x
        for weight in params:
            y = torch.tanh(y @ weight)
        return state, y

    return (graphify(stage) if on_gpu else stage), weights


def _shape(kind: str) -> tuple[int, int]:
    """Of a batch, and of what travels."""
    return (256, 512) if kind == "cpu" else (512, 4096)


def seconds(fn: Callable[[], Any], device: torch.device) -> float:
    """The median of some calls, each to the end of its device's work."""
    spans = []
    for _ in range(ROUNDS + 2):
        start = time.perf_counter()
        fn()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spans.append(time.perf_counter() - start)
    return statistics.median(spans[2:])


def link_costs(transport: Distributed, batch: Tensor) -> tuple[float, float]:
    """Seconds of a transfer whatever its size, and bytes a second, between ranks 0 and 1: of round trips of two
    sizes."""
    end, rank = transport.end, transport.rank
    found = []
    for message in (batch[:1].clone(), batch.repeat(8, 1)):

        def trip(message: Tensor = message) -> None:
            for step in (0, 1):
                if rank == step:
                    end.send([message], 1 - step, 0)
                elif rank == 1 - step:
                    end.recv([message], step, 0)

        found.append((message.nbytes, seconds(trip, transport.device) / 2 if rank < 2 else 0.0))
    (small, fast), (large, slow) = found
    rate = (large - small) / max(slow - fast, 1e-9)
    return max(fast - small / rate, 0.0), rate


def measure_rank(backend: str | None, timeout: float) -> tuple[float, tuple[float, float], list[list[Event]]]:
    """On each rank: its stage alone, its link, and then each case; the events of the fastest of some runs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transport = Distributed(backend=backend, timeout=timeout)  # type: ignore[arg-type]
    device, rank, num_ranks = transport.device, transport.rank, transport.num_ranks
    made = [make_stage(device if r == rank else torch.device("meta"), r) for r in range(num_ranks)]
    batch, state = (
        torch.randn(256 if device.type == "cpu" else 512, made[0][1].shape[-1], device=device),
        torch.zeros(1, device=device),
    )
    stage, weights = made[rank]
    link = link_costs(transport, batch)
    alone = seconds(lambda: stage(weights, state, batch, batch), device)
    step = pipeline([stage for stage, _ in made], advance=lambda state, batch, out: state, transport=transport)
    return alone, link, [_run_case(step, case, weights, state, batch) for case in cases(num_ranks)]


def _run_case(step: Pipelined, case: Case, weights: Tensor, state: Tensor, batch: Tensor) -> list[Event]:
    kind: Literal["cpu", "cuda"] = "cuda" if batch.is_cuda else "cpu"
    runs = []
    for _ in range(ROUNDS):
        with measure(kind) as recorder:
            step.stream((weights,), (state,), [batch] * len(case.jobs), case.jobs)
        runs.append(recorder.events())
    return sorted(runs[1:], key=lambda events: events[-1].end - events[0].start)[len(runs) // 2 - 1]


def hold_together(ranks: Sequence[Any], nbytes: int) -> list[Found]:
    """What `simulate` says of each case, and what all ranks did."""
    num_ranks = len(ranks)
    latency, rate = ranks[0][1]
    costs = Costs(
        stages=tuple(alone for alone, _, _ in ranks),
        latency=latency,
        bytes_per_second=rate,
        message_bytes=nbytes,
        output_bytes=nbytes,
    )
    found = []
    for index, case in enumerate(cases(num_ranks)):
        measured = Timeline.of([event for _, _, runs in ranks for event in runs[index]])
        simulated = simulate(make_programs(num_ranks, case.jobs, advances=True), costs)
        found.append(Found(case.name, simulated.step_time, measured.step_time, compare(simulated, measured)))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m weft.proofs.bench.timelines", description=str(__doc__))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", choices=("gloo", "nccl", "peer"))
    parser.add_argument("--out", type=Path, help="a folder for the record")
    given = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ranks = launch(measure_rank, given.ranks, given.backend, 60.0)
    on_gpu = given.backend in ("nccl", "peer")
    nbytes = math.prod(_shape("cuda" if on_gpu else "cpu")) * 4
    rows = hold_together(ranks, nbytes)
    print(f"stages alone: {', '.join(f'{alone * 1e3:.2f} ms' for alone, _, _ in ranks)}; ", end="")
    print(f"link: {ranks[0][1][0] * 1e6:.0f} us and {ranks[0][1][1] / 1e9:.2f} GB/s")
    print(f"{'':24}{'simulated ms':>12}{'measured ms':>12}{'error':>10}", *rows, sep="\n", flush=True)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        record = {"rows": [attrs.asdict(row) for row in rows], "environment": environment("cuda" if on_gpu else "cpu")}
        name = f"timelines-{given.ranks}-{given.backend or 'gloo'}.json"
        (given.out / name).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
