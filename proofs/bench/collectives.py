"""All-reduces between GPUs, inside a captured graph and eagerly, next to NCCL's own.

    python -m weft.proofs.bench.collectives [--ranks 2] [--out FOLDER]

Each rank brings [tokens, 2048] bfloat16, the hidden states after a block of a model that the ranks share. A graph holds
several all-reduces in a row. The figure is the device's time of a replay divided by their number, the median of rounds.
The results are compared with the sum in float32 of all ranks' tensors, rounded once.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.meshes.collectives import AllReduce, combine
from weft.proofs.bench.transfers import ROUNDS, timed
from weft.proofs.environment import environment
from weft.torchapi.distributed import nccl_group
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.launch import launch

TOKENS, HIDDEN, COUNT = (1, 8, 32, 128, 256, 2048), 2048, 20


@attrs.frozen
class Row:
    """One way's microseconds per all-reduce, in a graph and eagerly; and whether every bit was that of the sum in
    float32, rounded once."""

    way: str
    tokens: int
    graph_us: float
    eager_us: float
    equal: bool


def measure(backend: str, timeout: float) -> list[Row]:
    """Run on each rank. `ncclAllReduce` is NCCL's own, which the transport's does not use."""
    library = backend == "ncclAllReduce"
    kind: Any = "nccl" if library else backend
    transport = Distributed(backend=kind, timeout=timeout)
    rank, ranks, device = transport.rank, transport.num_ranks, transport.device
    effect = AllReduce(tuple(range(ranks)))
    group: Any = None
    if library:
        group = nccl_group("library", transport.monitor.records.store, rank, ranks, 60.0, "lo")

    def reduced(x: Tensor) -> Tensor:
        if not library:
            return transport.end.perform(effect, x, 0)
        out = x.clone()
        group.allreduce([out]).wait()
        return out

    rows = []
    for tokens in TOKENS:
        drawn = torch.randn(ranks, tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))
        every = drawn.to(device, torch.bfloat16)
        x = every[rank].contiguous()
        expected = combine(effect, list(every))[0]
        eager = timed(_several(reduced, x), ROUNDS) / COUNT
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outs = [reduced(x) for _ in range(COUNT)]
        replayed = timed(graph.replay, ROUNDS) / COUNT
        equal = all(torch.equal(out, expected) for out in outs)
        rows.append(Row(backend, tokens, replayed * 1e6, eager * 1e6, equal))
    transport.close()
    return rows


def _several(fn: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    def run() -> None:
        for _ in range(COUNT):
            fn(x)

    return run


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m weft.proofs.bench.collectives", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="a GPU for each (2)")
    parser.add_argument("--out", type=Path, help="a folder for the record")
    given = parser.parse_args(argv)
    rows = list[Row]()
    print(f"{'way':16}{'tokens':>8}{'graph us':>10}{'eager us':>10}  all-reduce of [tokens, {HIDDEN}] bfloat16")
    for way in ("ncclAllReduce", "nccl", "peer"):
        for row in launch(measure, given.ranks, way, 60.0)[0]:
            rows.append(row)
            ok = "the bits of the sum" if row.equal else "other bits"
            print(f"{row.way:16}{row.tokens:8}{row.graph_us:10.1f}{row.eager_us:10.1f}  {ok}", flush=True)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        record = {"ranks": given.ranks, "rows": [attrs.asdict(row) for row in rows]}
        record["environment"] = environment("cuda")
        (given.out / "collectives.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
