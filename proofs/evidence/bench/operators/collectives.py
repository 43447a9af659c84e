"""Collectives between GPUs, inside a captured graph and eagerly, next to NCCL's own.

    python -m weft.proofs.evidence.bench.operators.collectives [--ranks 2] [--out FOLDER]

All-reduces of [tokens, 2048] bfloat16, the hidden states after a block of a model that the ranks
share; and all-to-alls of logits, in which each rank has its columns of all rows, and gets all
columns of its rows. A graph holds several collectives in a row. The figure is the device's time of
a replay divided by their number, the median of rounds; eagerly it is the host's time too, with what
the ranks tell one another. Results are compared bit for bit with those of `combine`, whose sums are
made in float32 and rounded once.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.meshes.collectives import AllReduce, AllToAll, Collective, combine, verb_of
from weft.ops.transfers.collective import Member
from weft.ops.transfers.transfer import find
from weft.proofs.evidence.bench.operators.transfers import ROUNDS, timed
from weft.proofs.evidence.environment import environment
from weft.torchapi.distributed import nccl_group
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.launch import launch

TOKENS = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 8192)
HIDDEN = 2048
# Several in one graph, or the launch of the graph would be most of its time.
COUNT = 20
ROWS = (1, 8, 64)
# Rows of logits that a rank gets, and their columns.
VOCABULARY = 151936
WAYS = ("ncclAllReduce", "nccl", "peer")
"""NCCL's own collectives, which the transport's does not use; and the transports'."""


@attrs.frozen
class Row:
    """One way's microseconds per collective, in a graph and eagerly; and whether every bit was as
    `combine` defines it."""

    way: str
    collective: str
    shape: tuple[int, ...]
    graph_us: float
    eager_us: float
    equal: bool


def cases(ranks: int) -> Iterator[tuple[Collective, tuple[int, int]]]:
    """Collectives, with the shape of each rank's tensor."""
    among = (*range(ranks),)
    for tokens in TOKENS:
        yield AllReduce(among), (tokens, HIDDEN)
    for rows in ROWS:
        # From columns of all rows to all columns of some: what ranks that share a head do before
        # they sample.
        yield AllToAll(among, split_dim=0, concat_dim=1), (rows * ranks, VOCABULARY // ranks)


def measure(way: str, timeout: float) -> list[Row]:
    """Run on each rank."""
    library = way == WAYS[0]
    kind: Any = "nccl" if library else way
    transport = Distributed(backend=kind, timeout=timeout)
    rank = transport.rank
    ranks = transport.num_ranks
    device = transport.device
    member: Member = find(transport.member, "a collective")
    perform: Callable[[Collective, Tensor], Tensor] = member.perform
    if library:
        perform = Library(
            nccl_group("library", transport.monitor.records.store, rank, ranks, 60.0, "lo")
        ).perform
    rows = []
    for effect, shape in cases(ranks):
        # Each rank draws the values of all, from one seed, so that it can compute what it should
        # get.
        drawn = torch.randn(
            ranks, *shape, generator=torch.Generator(device).manual_seed(shape[0]), device=device
        )
        every = drawn.to(torch.bfloat16)
        x = every[rank].contiguous()
        expected = combine(effect, list(every))[rank]
        eager = timed(_several(partial(perform, effect), x), ROUNDS) / COUNT
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outs = [perform(effect, x) for _ in range(COUNT)]
        replayed = timed(graph.replay, ROUNDS) / COUNT
        # Bit for bit. NCCL adds up in another order and rounds in between, so that its bits may be
        # others.
        equal = all(torch.equal(out, expected) for out in outs)
        graph.reset()  # a communicator waits for the graphs that hold it
        rows.append(Row(way, verb_of(effect), shape, replayed * 1e6, eager * 1e6, equal))
    transport.close()
    return rows


@attrs.frozen(eq=False)
class Library:
    """NCCL's own collectives."""

    group: Any

    def perform(self, effect: Collective, x: Tensor) -> Tensor:
        """An all-reduce; or an all-to-all of rows, whose columns are then joined."""
        if isinstance(effect, AllReduce):
            # NCCL reduces in place.
            out = x.clone()
            self.group.allreduce([out]).wait()
            return out
        ranks = len(effect.ranks)
        out = torch.empty_like(x)
        self.group.alltoall_base(out, x, [], []).wait()
        return out.view(ranks, -1, x.shape[1]).transpose(0, 1).reshape(-1, ranks * x.shape[1])


def _several(fn: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    def run() -> None:
        for _ in range(COUNT):
            fn(x)

    return run


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m weft.proofs.evidence.bench.operators.collectives", description=__doc__
    )
    parser.add_argument("--ranks", type=int, default=2, help="a GPU for each (2)")
    parser.add_argument("--out", type=Path, help="a folder for the record")
    args = parser.parse_args(argv)
    rows = list[Row]()
    print(
        f"{'way':14}{'collective':>22}{'a rank brings':>16}{'graph us':>10}{'eager us':>10} "
        " bfloat16"
    )
    for way in WAYS:
        for row in launch(measure, args.ranks, way, 60.0)[0]:
            rows.append(row)
            if row.equal:
                ok = "the bits of the definition"
            else:
                ok = "other bits"
            figures = f"{row.graph_us:10.1f}{row.eager_us:10.1f}  {ok}"
            print(f"{row.way:14}{row.collective:>22}{list(row.shape)!s:>16}{figures}", flush=True)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        record = {"ranks": args.ranks, "rows": [attrs.asdict(row) for row in rows]}
        record["environment"] = environment("cuda")
        (args.out / "collectives.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
