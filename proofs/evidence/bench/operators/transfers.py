"""Round trips of a message between two GPUs, inside a captured graph and eagerly.

    python -m weft.proofs.evidence.bench.operators.transfers [--backends nccl peer] [--out FOLDER]

Rank 0 sends [64, 2048] bfloat16, the hidden states of a decode step of 64 requests, and rank 1
sends them back. A graph holds several round trips in a row. The figure is the device's time of a
replay divided by their number, the median of rounds. The floor is the bytes over the bandwidth of
the link, measured in the same run by a large message.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.proofs.evidence.environment import environment
from weft.transforms.pipelines.transports.distributed import BackendName, Distributed, end_of
from weft.transforms.pipelines.transports.launch import launch
from weft.transforms.pipelines.transports.messaging.messages import ProcessEnd

SHAPE = (64, 2048)
# Several in one graph, or its launch would be most of the time.
TRIPS = 20
ROUNDS = 9


@attrs.frozen
class Row:
    """One back end's microseconds per round trip, in a graph and eagerly; the floor; and whether
    the message came back as it was sent."""

    backend: str
    graph_us: float
    eager_us: float
    floor_us: float
    equal: bool


def trips(end: ProcessEnd, rank: int, message: Tensor, back: Tensor, count: int) -> None:
    """Make `count` round trips, one after another."""
    for _ in range(count):
        if rank == 0:
            end.send([message], 1, 0)
            end.recv([back], 1, 0)
        else:
            end.recv([back], 0, 0)
            # What came, and not what rank 1 has: only so does rank 0 see whether the message was
            # right.
            end.send([back], 0, 0)


def timed(fn: Callable[[], Any], rounds: int) -> float:
    """The median seconds of a call, by device events; the first call is not counted."""
    spans = []
    for _ in range(rounds + 1):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        fn()
        end.record()
        torch.cuda.synchronize()
        spans.append(start.elapsed_time(end) / 1e3)
    return float(statistics.median(spans[1:]))


def measure(backend: BackendName, timeout: float) -> Row:
    """Run on each of the two ranks."""
    transport = Distributed(backend=backend, timeout=timeout)
    end = end_of(transport)
    rank = transport.rank
    message = torch.randn(SHAPE, dtype=torch.bfloat16, device=transport.device)
    back = torch.zeros_like(message)
    eager = timed(lambda: trips(end, rank, message, back, TRIPS), ROUNDS) / TRIPS
    # Or the eager run's values would still be there, and pass for those of the graph.
    back.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        trips(end, rank, message, back, TRIPS)
    replayed = timed(graph.replay, ROUNDS) / TRIPS
    equal = rank != 0 or torch.equal(back, message)
    # 16 MiB, of which the latency is a small part.
    large = torch.randn(2**22, device=transport.device)
    bulk = timed(lambda: trips(end, rank, large, torch.empty_like(large), 1), ROUNDS)
    floor = message.nbytes / large.nbytes * bulk
    transport.close()
    return Row(backend, replayed * 1e6, eager * 1e6, floor * 1e6, equal)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m weft.proofs.evidence.bench.operators.transfers", description=__doc__
    )
    parser.add_argument("--backends", nargs="+", choices=("nccl", "peer"), default=("nccl", "peer"))
    parser.add_argument("--out", type=Path, help="a folder for the record")
    args = parser.parse_args(argv)
    rows = []
    print(
        f"{'back end':10}{'graph us':>10}{'eager us':>10}{'floor us':>10}  [64, 2048] bfloat16,"
        " there and back"
    )
    for backend in args.backends:
        row = launch(measure, 2, backend, 60.0)[0]
        rows.append(row)
        ok = "as sent" if row.equal else "NOT as sent"
        print(
            f"{row.backend:10}{row.graph_us:10.1f}{row.eager_us:10.1f}{row.floor_us:10.2f}  {ok}",
            flush=True,
        )
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        record = {"rows": [attrs.asdict(row) for row in rows], "environment": environment("cuda")}
        (args.out / "transfers.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
