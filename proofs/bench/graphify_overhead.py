"""The host's time for one call of a graphified function, beside its peers, in one run.

    python -m weft.proofs.bench.graphify_overhead --out FOLDER [--quick]

A step of n tensor leaves adds neighbours, so that it has n results and one small kernel each; what is timed is the
host alone: calls are issued in bursts with the device idle at the start, and a burst is short enough that the device's
queue never makes the host wait. Rows say what a call is given and gives back:

    reference, borrowed   the same input tensors in each call, the graph's own results
    fresh, safe           inputs copied in, results that no later call changes

`make_graphed_callables` copies in whatever is not its own sample (`fresh`) or is given its own samples (`reference`),
and its results are borrowed in both; so are those of `reduce-overhead`, which copies inputs in. A bare replay is given
nothing. Without a GPU the same code runs on the tape, in `--quick` numbers, to show that it runs: its figures mean
nothing.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.transforms.graphify import Graphified, graphify

Step = Callable[..., tuple[Tensor, ...]]


@attrs.frozen
class Row:
    """One figure: microseconds of the host a call, the median and the least over rounds."""

    what: str
    given: str
    leaves: int
    captures: int
    us: float
    least_us: float


@attrs.frozen
class Sizes:
    """How much to run: leaves of a step, captures held, calls a burst and bursts."""

    leaves: tuple[int, ...] = (3, 30, 300)
    captures: tuple[int, ...] = (1, 100, 1000)
    calls: int = 100
    bursts: int = 15
    peer_leaves: tuple[int, ...] = (3, 30, 300)


QUICK = Sizes(leaves=(3, 30), captures=(1, 10), calls=20, bursts=3, peer_leaves=())


def neighbours(*leaves: Tensor) -> tuple[Tensor, ...]:
    """The step: n leaves in, n results out."""
    return tuple(a + b for a, b in zip(leaves, (*leaves[1:], leaves[0]), strict=True))


def inputs(count: int, size: int, device: str) -> tuple[Tensor, ...]:
    """Leaves of `size` elements."""
    return tuple(torch.full((size,), float(i), device=device) for i in range(count))


def fixed(count: int) -> Step:
    """`neighbours` with as many named arguments: by reference needs names."""
    names = ", ".join(f"x{i}" for i in range(count))
    made: dict[str, Any] = {"neighbours": neighbours}
    exec(f"def step({names}):\n    return neighbours({names})\n", made)
    step: Step = made["step"]
    return step


def synchronize(device: str) -> None:
    """Wait for the device, if it is one."""
    if device == "cuda":
        torch.cuda.synchronize()


def host_time(call: Callable[[], Any], sizes: Sizes, device: str) -> tuple[float, float]:
    """Microseconds a call: the median and the least over bursts."""
    for _ in range(3):
        call()
    rounds = []
    for _ in range(sizes.bursts):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(sizes.calls):
            call()
        rounds.append((time.perf_counter() - start) / sizes.calls * 1e6)
    synchronize(device)
    return statistics.median(rounds), min(rounds)


def graphified(count: int, captures: int, sizes: Sizes, device: str) -> Iterator[Row]:
    """Both modes, with `captures` signatures captured and called in turn."""
    names = [f"x{i}" for i in range(count)]
    modes: list[tuple[str, Graphified[..., Any]]] = [
        ("reference, borrowed", graphify(fixed(count), reference_argnames=names, outputs="borrow")),
        ("fresh, safe", graphify(fixed(count))),
    ]
    calls = [inputs(count, 8 + i, device) for i in range(captures)]
    for given, g in modes:
        for leaves in calls:
            g(*leaves)
        assert g.cache_info().captures == captures
        turn = cycle(calls)

        def in_turn(g: Graphified[..., Any] = g, turn: Iterator[Sequence[Tensor]] = turn) -> None:
            g(*next(turn))

        def again(g: Graphified[..., Any] = g, leaves: Sequence[Tensor] = calls[0]) -> None:
            g(*leaves)

        yield Row("graphify", given, count, captures, *host_time(again, sizes, device))
        if captures > 1:
            yield Row("graphify, in turn", given, count, captures, *host_time(in_turn, sizes, device))


def bare_replay(count: int, captures: int, sizes: Sizes) -> Iterator[Row]:
    """`torch.cuda.CUDAGraph.replay` of the same step: the floor; also with many graphs replayed in turn."""
    graphs = []
    for i in range(captures):
        leaves, graph = inputs(count, 8 + i, "cuda"), torch.cuda.CUDAGraph()
        neighbours(*leaves)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            held = neighbours(*leaves)
        graphs.append((graph, leaves, held))
    turn = cycle(graphs)
    yield Row("bare replay", "nothing", count, captures, *host_time(graphs[0][0].replay, sizes, "cuda"))
    if captures > 1:
        in_turn = host_time(lambda: next(turn)[0].replay(), sizes, "cuda")
        yield Row("bare replay, in turn", "nothing", count, captures, *in_turn)


def peers(count: int, sizes: Sizes) -> Iterator[Row]:
    """The step as it is, `make_graphed_callables` and `torch.compile(mode="reduce-overhead")`."""
    samples, fresh = inputs(count, 8, "cuda"), inputs(count, 8, "cuda")
    step = fixed(count)
    yield Row("eager", "fresh, safe", count, 1, *host_time(lambda: step(*fresh), sizes, "cuda"))
    made = torch.cuda.make_graphed_callables(fixed(count), samples)
    for given, leaves in (("reference, borrowed", samples), ("fresh, borrowed", fresh)):

        def replayed(leaves: Sequence[Tensor] = leaves) -> None:
            made(*leaves)

        yield Row("make_graphed_callables", given, count, 1, *host_time(replayed, sizes, "cuda"))
    compiled = torch.compile(fixed(count), mode="reduce-overhead")

    def call() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        compiled(*fresh)

    for _ in range(5):
        call()
    yield Row("reduce-overhead", "fresh, borrowed", count, 1, *host_time(call, sizes, "cuda"))


def environment() -> dict[str, str]:
    """Where the figures come from."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "gpu": device, "torch": torch.__version__, "cuda": str(torch.version.cuda), "python": platform.python_version(),
        "machine": platform.platform(), "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }  # fmt: skip


def measure(sizes: Sizes, device: str) -> Iterator[Row]:
    """All rows."""
    for count in sizes.leaves:
        for captures in sizes.captures:
            if count * captures > 30_000:
                continue  # a kernel each: 300,000 kernels in graphs are no figure of the host's
            if device == "cuda":
                yield from bare_replay(count, captures, sizes)
            yield from graphified(count, captures, sizes, device)
        if device == "cuda" and count in sizes.peer_leaves:
            yield from peers(count, sizes)


def main() -> None:
    """Run everything, write `graphify_overhead.json`, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="small numbers, to see that it runs")
    parser.add_argument(
        "--peer-leaves", type=int, nargs="*", help="for which steps to run the peers (compiling is slow)"
    )
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = QUICK if arguments.quick or device == "cpu" else Sizes()
    if arguments.peer_leaves is not None:
        sizes = attrs.evolve(sizes, peer_leaves=tuple(arguments.peer_leaves))
    rows = []
    with torch.no_grad():
        for row in measure(sizes, device):
            rows.append(row)
            print(f"{row.what} {row.given} {row.leaves} {row.captures}: {row.us:.2f}", file=sys.stderr, flush=True)
    report = {"environment": environment(), "rows": [attrs.asdict(row) for row in rows]}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "graphify_overhead.json").write_text(json.dumps(report, indent=1))
    show(rows)


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    print(f"{'microseconds of the host a call':<24}{'':<22}{'leaves':>7}{'captures':>9}{'median':>9}{'least':>8}")
    for row in rows:
        print(f"{row.what:<24} {row.given:<21}{row.leaves:>7}{row.captures:>9}{row.us:>9.2f}{row.least_us:>8.2f}")


if __name__ == "__main__":
    main()
