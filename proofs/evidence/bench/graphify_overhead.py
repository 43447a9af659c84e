"""The host's time for one call of a graphified function, compared to its peers in the same run.

    python -m weft.proofs.evidence.bench.graphify_overhead --out FOLDER [--quick]

A step of n tensor leaves adds neighbours, so that it has n results, each from one small kernel.
Only the host is timed: calls are issued in bursts that start with the device idle, and a burst is
short enough that the device's queue never makes the host wait. As in `timeit`, Python's garbage
collector is off. Each row names the arguments and the results of a call:

    reference, borrowed   the same input tensors in each call, the graph's own results
    fresh, borrowed       inputs copied in, the graph's own results
    fresh, safe           inputs copied in, results that no later call changes

`make_graphed_callables` copies in inputs that are not its own samples (`fresh`), or is given its
own samples (`reference`); its results are borrowed in both. `reduce-overhead` copies inputs in, and
its results are borrowed too. A bare replay takes no arguments. `weights by reference` has as many
leaves by reference, and a batch's rows, which one graph pads: batches of eight sizes in turn, or
each of a size that no call had before. Without a GPU the same code runs on the tape, with `--quick`
numbers: these figures say nothing of a GPU, or of the peers, which need one. Those of `weights by
reference`, whose step is one small operator, compare the Python of two builds on one machine.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.batches.descriptor import BatchDescriptor
from weft.proofs.evidence.environment import environment
from weft.transforms.graphs.graphified import Graphified
from weft.transforms.graphs.graphify import graphify
from weft.values.trees import axes, descriptor_field, pytree

Step = Callable[..., tuple[Tensor, ...]]


@attrs.frozen(eq=False)
class Contender:
    """A contender: its name, the arguments and results of a call, the leaves of its step, and the
    captures it holds."""

    what: str
    mode: str
    leaves: int
    captures: int
    call: Callable[[], Any]


@attrs.frozen
class Row:
    """One figure: the host's microseconds per call, the median and the least over rounds."""

    what: str
    mode: str
    leaves: int
    captures: int
    us: float
    least_us: float


@attrs.frozen
class Sizes:
    """The amount to run: leaves per step, captures held, leaves for which peers run, calls per
    burst, and bursts."""

    leaves: tuple[int, ...] = (3, 30, 300)
    captures: tuple[int, ...] = (1, 100, 1000)
    peers: tuple[int, ...] = (3, 30, 300)
    calls: int = 100
    bursts: int = 25


QUICK = Sizes(leaves=(3, 30), captures=(1, 10), peers=(), calls=20, bursts=3)


def neighbours(*leaves: Tensor) -> tuple[Tensor, ...]:
    """The step: n leaves in, n leaves out."""
    return tuple(a + b for a, b in zip(leaves, (*leaves[1:], leaves[0]), strict=True))


def inputs(count: int, size: int, device: str) -> tuple[Tensor, ...]:
    """A list of leaves of `size` elements."""
    return tuple(torch.full((size,), float(i), device=device) for i in range(count))


def fixed(count: int) -> Step:
    """`neighbours` with one named argument per leaf: by reference needs names."""
    names = ", ".join(f"x{i}" for i in range(count))
    namespace: dict[str, Any] = {"neighbours": neighbours}
    exec(f"def step({names}):\n    return neighbours({names})\n", namespace)
    step: Step = namespace["step"]
    return step


def synchronize(device: str) -> None:
    """Wait for the device, if it is a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def host_times(contenders: Sequence[Contender], sizes: Sizes, device: str) -> Iterator[Row]:
    """One row per contender. Their bursts take turns, so that a slow moment of the machine affects
    all of them."""
    rounds: list[list[float]] = [[] for _ in contenders]
    for burst in range(sizes.bursts + 1):
        for contender, times in zip(contenders, rounds, strict=True):
            synchronize(device)
            start = time.perf_counter()
            for _ in range(sizes.calls):
                contender.call()
            if burst:  # the first burst warms up
                times.append((time.perf_counter() - start) / sizes.calls * 1e6)
    synchronize(device)
    for c, times in zip(contenders, rounds, strict=True):
        yield Row(c.what, c.mode, c.leaves, c.captures, statistics.median(times), min(times))


def graphified(count: int, captures: int, device: str) -> Iterator[Contender]:
    """All modes, with `captures` signatures captured: one of them called repeatedly, and all of
    them in turn."""
    names = [f"x{i}" for i in range(count)]
    modes: list[tuple[str, Graphified[..., Any]]] = [
        ("reference, borrowed", graphify(fixed(count), reference_argnames=names, outputs="borrow")),
        ("fresh, borrowed", graphify(fixed(count), outputs="borrow")),
        ("fresh, safe", graphify(fixed(count))),
    ]
    # Sizes that all differ, as each needs a graph of its own.
    calls = [inputs(count, 8 + i, device) for i in range(captures)]
    for mode, g in modes:
        for leaves in calls:
            g(*leaves)
        # Otherwise the row would be of fewer graphs than it says.
        assert g.cache_info().captures == captures
        yield Contender("graphify", mode, count, captures, partial(g, *calls[0]))
        if captures > 1:
            yield Contender(
                "graphify, in turn",
                mode,
                count,
                captures,
                _in_turn([partial(g, *x) for x in calls]),
            )


def _in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    turn = cycle(calls)
    return lambda: next(turn)()


@pytree
@attrs.frozen(eq=False)
class Rows:
    """A batch with one value for each token."""

    descriptor: BatchDescriptor = attrs.field(metadata=descriptor_field())
    x: Tensor = attrs.field(metadata=axes("num_tokens"))


def padded(count: int, sizes: Sizes, device: str) -> Iterator[Contender]:
    """A step with `count` weights, for batches of few sizes and for batches of new ones."""
    # As many sizes as there are calls, so that one row meets a new size in each.
    most = max(8, sizes.calls * (sizes.bursts + 1))
    batches = [
        Rows(BatchDescriptor(n, n), torch.ones(n, device=device)) for n in range(1, most + 1)
    ]

    def step(weights: tuple[Tensor, ...], rows: Rows) -> Rows:
        return Rows(rows.descriptor, rows.x + weights[0][0])

    for what, turn in (
        ("graphify, few sizes", cycle(batches[:8])),
        ("graphify, new sizes", iter(batches)),
    ):
        g = graphify(step, reference_argnames="weights", ladder=[BatchDescriptor(most, most)])
        call = partial(_of_next, g, inputs(count, 8, device), turn)
        yield Contender(what, "weights by reference", count, 1, call)


def _of_next(g: Graphified[..., Any], weights: tuple[Tensor, ...], batches: Iterator[Rows]) -> None:
    g(weights, next(batches))


def bare_replays(count: int, captures: int) -> Iterator[Contender]:
    """`torch.cuda.CUDAGraph.replay` of the same step, which is the floor; also of many graphs in
    turn."""
    replays = []
    for i in range(captures):
        leaves = inputs(count, 8 + i, "cuda")
        graph = torch.cuda.CUDAGraph()
        # Outside of the capture once, since a first run may load kernels, which a capture does not
        # allow.
        neighbours(*leaves)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            outputs = neighbours(*leaves)
        replays.append(partial(_replay, graph, leaves, outputs))
    graph = replays[0].args[0]
    yield Contender("bare replay", "nothing", count, captures, graph.replay)
    if captures > 1:
        yield Contender("bare replay, in turn", "nothing", count, captures, _in_turn(replays))


def _replay(graph: torch.cuda.CUDAGraph, *kept_alive: Any) -> None:
    graph.replay()


def peers(count: int) -> Iterator[Contender]:
    """The eager step, `make_graphed_callables` and `torch.compile(mode="reduce-overhead")`."""
    samples = inputs(count, 8, "cuda")
    fresh = inputs(count, 8, "cuda")
    yield Contender("eager", "fresh, safe", count, 1, partial(fixed(count), *fresh))
    graphed: Any = torch.cuda.make_graphed_callables(fixed(count), samples)
    for mode, leaves in (("reference, borrowed", samples), ("fresh, borrowed", fresh)):
        yield Contender("make_graphed_callables", mode, count, 1, partial(graphed, *leaves))
    compiled: Any = torch.compile(fixed(count), mode="reduce-overhead")

    def call() -> None:
        # Without it torch takes the next call for a continuation of the last one, and keeps its
        # results alive.
        torch.compiler.cudagraph_mark_step_begin()
        compiled(*fresh)

    # The first calls compile, warm up and record.
    for _ in range(5):
        call()
    yield Contender("reduce-overhead", "fresh, borrowed", count, 1, call)


@contextmanager
def collector_off() -> Iterator[None]:
    """Turn Python's garbage collector off: with thousands of graphs alive, a collection takes as
    long as many calls."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def contenders(count: int, sizes: Sizes, device: str) -> Iterator[Contender]:
    """All contenders for a step of `count` leaves."""
    for captures in sizes.captures:
        if device == "cuda":
            yield from bare_replays(count, captures)
        yield from graphified(count, captures, device)
    yield from padded(count, sizes, device)
    if device == "cuda" and count in sizes.peers:
        yield from peers(count)


def main() -> None:
    """Run everything, write `graphify_overhead.json`, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="small numbers, to see that it runs")
    for name in ("leaves", "captures", "peers"):
        parser.add_argument(
            f"--{name}", type=int, nargs="*", help=f"instead of {getattr(Sizes(), name)}"
        )
    args = vars(parser.parse_args())
    if torch.cuda.is_available():
        device = "cuda"
    else:
        device = "cpu"
    if args["quick"] or device == "cpu":
        sizes = QUICK
    else:
        sizes = Sizes()
    chosen: dict[str, Any] = {
        k: tuple(args[k]) for k in ("leaves", "captures", "peers") if args[k] is not None
    }
    sizes = attrs.evolve(sizes, **chosen)
    rows: list[Row] = []
    with torch.no_grad(), collector_off():
        for count in sizes.leaves:
            start = time.perf_counter()
            rows += host_times(list(contenders(count, sizes, device)), sizes, device)
            gc.collect()  # free the graphs before the next capture
            print(
                f"{count} leaves: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True
            )
    report = {"environment": environment(device), "rows": [attrs.asdict(row) for row in rows]}
    args["out"].mkdir(parents=True, exist_ok=True)
    (args["out"] / "graphify_overhead.json").write_text(json.dumps(report, indent=1))
    show(rows)


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    print(
        f"{'microseconds of the host a call':<24}{'':<22}{'leaves':>7}{'captures':>9}{'median':>9}{'least':>8}"
    )
    for row in rows:
        print(
            f"{row.what:<24}"
            f" {row.mode:<21}{row.leaves:>7}{row.captures:>9}{row.us:>9.2f}{row.least_us:>8.2f}"
        )


if __name__ == "__main__":
    main()
