"""All tiles of linear layers, timed on the shapes of published models: the data of the model in `weft.ops.tiles`.

    python -m weft.proofs.bench.tile_search --out FOLDER [--limit SECONDS] [--dry]

It writes `tile_search.json.xz`: the seconds of a call for each shape, number of tokens and tile, and for torch's own
products. Work is ordered so that the time limit cuts off what matters least: all shapes have their first number of
tokens before any has its second. With `--dry` it prints the numbers of kernels and timings, and needs no GPU.
"""

import argparse
import json
import lzma
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

from weft.ops.tile_candidates import linear_candidates
from weft.ops.tiles import Tile
from weft.proofs.bench.tile_shapes import COUNTS, HELD_COUNTS, HELD_OUT, TRAINING, shapes
from weft.proofs.bench.tile_timing import (
    LIBRARIES,
    Choice,
    Compiled,
    GpuTimer,
    Kind,
    Product,
    compile_kinds,
    device_facts,
    kind_of,
)
from weft.proofs.environment import environment

_HOPELESS = 1.4
"""A choice whose first replays take this much longer than the best so far is not replayed again."""
_FINALISTS, _NEAR = 5, 1.1
"""The choices that are timed again in the end, and how near to the best they are."""
_WIDEST_FP8 = 100_000
"""The rows from which a layer is a head, which is never in FP8."""
_ORDER = (1, 64, 2048, 6, 128, 96, 8, 512, 16, 256, 32, 700, 24, 4)
"""The order of the numbers of tokens."""


class Timer(Protocol):
    """What times a choice: `GpuTimer`, or a test's own."""

    def start(self, product: Product, choice: Choice) -> Callable[[], float] | None:
        """A function that returns the seconds of a call each time it is called; None: the choice does not run."""


@attrs.frozen
class Measured:
    """The seconds of a call of a product by each choice.

    Args:
        again: the seconds of the best choices in a second graph.
    """

    product: Product
    seconds: dict[Choice, float]
    again: dict[Choice, float]


def products() -> list[Product]:
    """All products, in the order in which they are timed."""
    training = shapes(TRAINING)
    held = [shape for shape in shapes(HELD_OUT) if shape not in training]
    found = [
        Product(kind, count, *shape)
        for kind in LIBRARIES
        for counts, some in ((COUNTS, training), (HELD_COUNTS, held))
        for count in counts
        for shape in some
        if kind == "linear" or shape[0] < _WIDEST_FP8
    ]
    return sorted(found, key=lambda product: _ORDER.index(product.tokens))


def choices(product: Product) -> list[Choice]:
    """torch's own products, and the candidate tiles."""
    tiles = linear_candidates(product.tokens, product.rows, product.columns, product.kind == "fp8_linear")
    return [*LIBRARIES[product.kind], *tiles]


def measure(product: Product, timer: Timer) -> Measured:
    """Time every choice that runs; the best are timed again, in graphs of their own."""
    seconds = dict[Choice, float]()
    for choice in choices(product):
        if (replay := timer.start(product, choice)) is None:
            continue
        seconds[choice] = replay()
        if seconds[choice] <= _HOPELESS * min(seconds.values()):
            seconds[choice] = replay()
    again = dict[Choice, float]()
    for choice in sorted(seconds, key=seconds.__getitem__)[:_FINALISTS]:
        if seconds[choice] <= _NEAR * min(seconds.values()) and (replay := timer.start(product, choice)):
            replay()
            again[choice] = replay()
    return Measured(product, seconds, again)


def search(work: Iterable[Product], timer: Timer, until: float) -> Iterator[Measured]:
    """Time the products until the time is over."""
    for product in work:
        if time.time() >= until:
            return
        yield measure(product, timer)


def as_json(found: Sequence[Measured], compiled: dict[Kind, Compiled | str], facts: dict[str, Any]) -> dict[str, Any]:
    """The record: choices have numbers, and times are nanoseconds."""
    names = list(dict.fromkeys(choice for one in found for choice in one.seconds))
    number = {choice: i for i, choice in enumerate(names)}

    def rows(seconds: dict[Choice, float]) -> list[tuple[int, int]]:
        return [(number[choice], round(value * 1e9)) for choice, value in seconds.items()]

    return {
        **facts,
        "choices": [attrs.astuple(choice)[:6] if isinstance(choice, Tile) else choice for choice in names],
        "products": [[*attrs.astuple(one.product), rows(one.seconds), rows(one.again)] for one in found],
        "kernels": [
            [
                attrs.astuple(kind.tile)[:5],
                kind.fp8,
                kind.split,
                kind.grouped,
                one if isinstance(one, str) else attrs.astuple(one),
            ]
            for kind, one in compiled.items()
        ],
    }


def read(path: Path) -> tuple[list[Measured], dict[str, Any]]:
    """The measurements of a file, and the record that they are from."""
    record = json.loads(lzma.decompress(path.read_bytes()))
    names: list[Choice] = [name if isinstance(name, str) else Tile(*name) for name in record["choices"]]
    found = []
    for *fields, seconds, again in record["products"]:
        times = ({names[i]: nanoseconds / 1e9 for i, nanoseconds in some} for some in (seconds, again))
        found.append(Measured(Product(*fields), *times))
    return found, record


def write(folder: Path, record: dict[str, Any]) -> None:
    """Write `tile_search.json.xz`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tile_search.json.xz").write_bytes(lzma.compress(json.dumps(record).encode()))


def main(argv: Sequence[str] | None = None) -> None:
    """Compile, time, and write; or count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=float, default=420.0, help="seconds of wall time in all (420)")
    parser.add_argument("--dry", action="store_true", help="only count")
    given = parser.parse_args(argv)
    start, work = time.time(), products()
    every = [(product, choice) for product in work for choice in choices(product)]
    kinds = {kind_of(product, choice) for product, choice in every if isinstance(choice, Tile)}
    print(f"{len(work)} products, {len(every)} timings, {len(kinds)} kernels", flush=True)
    if given.dry:
        print(f"an estimated {estimate(every, len(kinds)):.0f} s")
        return
    compiled = compile_kinds(kinds, 0.45 * given.limit)
    print(f"{len(compiled)} compiled by {time.time() - start:.0f} s", flush=True)
    for kind, made in compiled.items():
        if isinstance(made, str) or not made.error < 0.02:
            print(kind, made)
    facts: dict[str, Any] = {"compile_seconds": time.time() - start}
    timer = GpuTimer(compiled)
    facts |= {"environment": environment("cuda"), "device": dict(device_facts()), "errors": timer.errors}
    found, tokens = list[Measured](), 0
    try:
        for one in search(work, timer, start + given.limit - 30):
            if one.product.tokens != tokens:
                tokens = one.product.tokens
                print(f"{time.time() - start:.0f} s: {len(found)} products, next {tokens} tokens", flush=True)
            found.append(one)
        facts["consumers"] = list(timer.consumers())
    finally:
        facts |= {"seconds": time.time() - start, "scaled_mm_error": timer.scaled_mm_error}
        write(given.out, as_json(found, compiled, facts))
    print(f"{len(found)} of {len(work)} products in {facts['seconds']:.0f} s; {timer.errors}")


def estimate(every: Sequence[tuple[Product, Choice]], kernels: int) -> float:
    """The seconds that a search takes on an H100, from its bytes at 2 TB/s and its operations at 300 TFLOP/s: a replay
    for each, four more for every second one, and two milliseconds of the host; and a second of a core a kernel."""
    seconds = kernels / 10 + 30
    for product, _ in every:
        size = product.rows * product.columns
        itemsize = 1 if product.kind == "fp8_linear" else 2
        launches = max(2, math.ceil(2**28 / size / itemsize))
        each = max(size * itemsize / 2e12, 2 * size * product.tokens / 3e14)
        seconds += 0.002 + 3 * launches * each
    return seconds


if __name__ == "__main__":
    main()
