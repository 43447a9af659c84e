"""The tiles of products in `weft.ops.tiles.candidates`, timed on the shapes of published models:
the data of the model in `weft.ops.tiles.model`.

    python -m weft.proofs.evidence.bench.tiles.search --out FOLDER [--experts] [--counts N ...]
    [--limit SECONDS] [--dry]

It writes `tile_search.json.xz`, or `tile_search_experts.json.xz`: the seconds of a call for each
shape, number of tokens and tile, and for torch's own products. Work is ordered so that the time
limit cuts off what matters least: all shapes have their first number of tokens before any has its
second. With `--dry` it prints the numbers of kernels and timings, and needs no GPU.
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

from weft.ops.tiles.candidates import candidates
from weft.ops.tiles.tile import Tile
from weft.proofs.evidence.bench.tiles import experts
from weft.proofs.evidence.bench.tiles.experts import ExpertProduct
from weft.proofs.evidence.bench.tiles.machine import compile_all, device_facts
from weft.proofs.evidence.bench.tiles.shapes import COUNTS, HELD_COUNTS, HELD_OUT, TRAINING, shapes
from weft.proofs.evidence.bench.tiles.timing import (
    LIBRARIES,
    Choice,
    Compiled,
    Kind,
    LinearTimer,
    Product,
    compile_kind,
    kind_of,
)
from weft.proofs.evidence.environment import environment

# A choice whose first replays take this much longer than the best so far is not replayed again.
_HOPELESS = 1.4
_FINALISTS = 5
# The choices that are timed again in the end, and how near to the best they are.
_NEAR = 1.1
# The rows from which a layer is a head, which is never in FP8.
_WIDEST_FP8 = 100_000
# The order of the numbers of tokens.
# Far apart first, so that a run that is cut off has all ends of the range.
_ORDER = (1, 64, 2048, 6, 128, 96, 8, 512, 16, 256, 32, 700, 24, 4)


class Timer(Protocol):
    """What times a choice: `LinearTimer`, `ExpertTimer`, or a test's own."""

    def start(self, product: Any, choice: Any) -> Callable[[], float] | None:
        """A function that returns the seconds of a call each time it is called; None: the choice
        does not run."""


@attrs.frozen
class Measured:
    """The seconds of a call of a product by each choice.

    Args:
        again: the seconds of the best choices in a second graph.
    """

    product: Product | ExpertProduct
    seconds: dict[Choice, float]
    again: dict[Choice, float]


def products() -> list[Product]:
    """All products, in the order in which they are timed."""
    training = shapes(TRAINING)
    validation_shapes = [shape for shape in shapes(HELD_OUT) if shape not in training]
    all_products = [
        Product(kind, count, *shape)
        for kind in LIBRARIES
        for counts, some in ((COUNTS, training), (HELD_COUNTS, validation_shapes))
        for count in counts
        for shape in some
        if kind == "linear" or shape[0] < _WIDEST_FP8
    ]
    # The sort is stable: all shapes have one number of tokens before any has the next.
    return sorted(all_products, key=lambda product: _ORDER.index(product.tokens))


def choices(product: Product | ExpertProduct) -> list[Choice]:
    """torch's own products, and the candidate tiles."""
    if isinstance(product, ExpertProduct):
        return [*experts.choices(product)]
    tiles = candidates(product.tokens, product.rows, product.columns, product.kind == "fp8_linear")
    return [*LIBRARIES[product.kind], *tiles]


def measure(product: Product | ExpertProduct, timer: Timer) -> Measured:
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
        if seconds[choice] <= _NEAR * min(seconds.values()) and (
            replay := timer.start(product, choice)
        ):
            replay()
            # In a graph of its own, whose memory lies elsewhere: a choice may have been lucky in
            # the first.
            again[choice] = replay()
    return Measured(product, seconds, again)


def search(
    work: Iterable[Product | ExpertProduct], timer: Timer, until: float
) -> Iterator[Measured]:
    """Time the products until the time is over."""
    for product in work:
        if time.time() >= until:
            return
        yield measure(product, timer)


def as_json(measurements: Sequence[Measured], facts: dict[str, Any]) -> dict[str, Any]:
    """The record: choices have numbers, and times are nanoseconds."""
    names = list(dict.fromkeys(choice for one in measurements for choice in one.seconds))
    number = {choice: i for i, choice in enumerate(names)}

    def rows(seconds: dict[Choice, float]) -> list[tuple[int, int]]:
        # Whole nanoseconds are finer than events measure, and short in the file.
        return [(number[choice], round(value * 1e9)) for choice, value in seconds.items()]

    return {
        **facts,
        "choices": [
            attrs.astuple(choice)[:7] if isinstance(choice, Tile) else choice for choice in names
        ],
        "products": [
            [*attrs.astuple(one.product), rows(one.seconds), rows(one.again)]
            for one in measurements
        ],
    }


def kernels_as_json(compiled: dict[Kind, Compiled | str]) -> list[Any]:
    """What was compiled: tile, whether in FP8, in parts and in groups, and its facts or its error."""
    return [
        [
            attrs.astuple(kind.tile)[:5],
            *attrs.astuple(kind)[1:],
            one if isinstance(one, str) else attrs.astuple(one),
        ]
        for kind, one in compiled.items()
    ]


def read(path: Path) -> tuple[list[Measured], dict[str, Any]]:
    """The measurements of a file, and the record that they are from."""
    record = json.loads(lzma.decompress(path.read_bytes()))
    names: list[Choice] = [
        name if isinstance(name, str) else Tile(*name) for name in record["choices"]
    ]
    measurements = []
    for *fields, seconds, again in record["products"]:
        times = (
            {names[i]: nanoseconds / 1e9 for i, nanoseconds in some} for some in (seconds, again)
        )
        measurements.append(
            Measured((Product if len(fields) == 4 else ExpertProduct)(*fields), *times)
        )
    return measurements, record


def write(path: Path, record: dict[str, Any]) -> None:
    """Write a record, compressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(json.dumps(record).encode()))


def main(argv: Sequence[str] | None = None) -> None:
    """Compile, time, and write; or count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--experts", action="store_true", help="products with experts, in place of linear layers"
    )
    parser.add_argument(
        "--counts", type=int, nargs="+", help="the numbers of tokens of products with experts"
    )
    parser.add_argument(
        "--limit", type=float, default=420.0, help="seconds of wall time in all (420)"
    )
    parser.add_argument("--dry", action="store_true", help="only count")
    args = parser.parse_args(argv)
    if args.counts and not args.experts:
        parser.error("--counts is for products with experts: add --experts")
    counts = tuple(args.counts or (count for count in _ORDER if count in COUNTS))
    work = experts.products(counts) if args.experts else products()
    every = [(product, choice) for product in work for choice in choices(product)]
    kinds = dict.fromkeys(
        _kind_of(product, choice) for product, choice in every if isinstance(choice, Tile)
    )
    print(f"{len(work)} products, {len(every)} timings, {len(kinds)} kernels", flush=True)
    if args.dry:
        print(f"an estimated {estimate(every, len(kinds)):.0f} s")
    elif args.experts:
        run_experts(work, list(kinds), args.limit, args.out / "tile_search_experts.json.xz", counts)
    else:
        run_linear(work, list(kinds), args.limit, args.out / "tile_search.json.xz")


def _kind_of(product: Product | ExpertProduct, tile: Tile) -> Kind | experts.ExpertKind:
    if isinstance(product, ExpertProduct):
        return experts.kind_of(product, tile)
    return kind_of(product, tile)


def run_linear(
    work: Sequence[Product | ExpertProduct], kinds: Sequence[Any], limit: float, path: Path
) -> None:
    """Compile, time and write linear layers."""
    start = time.time()
    # The longest compilations first, or the last of them would run alone.
    slow_first = sorted(
        kinds, key=lambda kind: -kind.tile.rows * kind.tile.tokens * kind.tile.stages
    )
    # Less than half, so that there is time left for what was compiled.
    compiled = compile_all(slow_first, compile_kind, 0.45 * limit)
    print(f"{len(compiled)} compiled by {time.time() - start:.0f} s", flush=True)
    for kind, result in compiled.items():
        # `not <`, so that NaN is printed as well.
        if isinstance(result, str) or not result.error < 0.02:
            print(kind, result)
    timer = LinearTimer(compiled)
    facts = _facts() | {"kernels": kernels_as_json(compiled)}
    facts |= {"compile_seconds": time.time() - start, "errors": timer.errors}
    measurements = list[Measured]()
    try:
        _search(work, timer, start, limit, measurements)
        facts["consumers"] = list(timer.consumers())
    finally:
        facts |= {"seconds": time.time() - start, "scaled_mm_error": timer.scaled_mm_error}
        write(path, as_json(measurements, facts))
    print(
        f"{len(measurements)} of {len(work)} products in {time.time() - start:.0f} s; {timer.errors}"
    )


def run_experts(
    work: Sequence[Product | ExpertProduct],
    kinds: Sequence[Any],
    limit: float,
    path: Path,
    counts: tuple[int, ...],
) -> None:
    """Compile, time and write products with experts."""
    start = time.time()
    compiled = compile_all(kinds, experts.compile_kind, 0.5 * limit)
    print(f"{len(compiled)} compiled by {time.time() - start:.0f} s", flush=True)
    for kind, error in compiled.items():
        if error:
            print(kind, error)
    timer = experts.ExpertTimer(compiled)
    measurements = list[Measured]()
    facts = _facts() | {
        "compile_seconds": time.time() - start,
        "aligning": list(timer.aligning(counts)),
    }
    try:
        _search(work, timer, start, limit, measurements)
    finally:
        write(path, as_json(measurements, facts | {"seconds": time.time() - start}))
    print(f"{len(measurements)} of {len(work)} products in {time.time() - start:.0f} s")


def _facts() -> dict[str, Any]:
    return {"environment": environment("cuda"), "device": dict(device_facts())}


def _search(
    work: Sequence[Product | ExpertProduct],
    timer: Timer,
    start: float,
    limit: float,
    measurements: list[Measured],
) -> None:
    """Add what is measured to `measurements`, and print how far it is."""
    tokens = 0
    # 30 seconds are left for the consumers of parts, and the record.
    for one in search(work, timer, start + limit - 30):
        if one.product.tokens != tokens:
            tokens = one.product.tokens
            print(
                f"{time.time() - start:.0f} s: {len(measurements)} products, now {tokens} tokens",
                flush=True,
            )
        measurements.append(one)


def estimate(every: Sequence[tuple[Product | ExpertProduct, Choice]], kernels: int) -> float:
    """The seconds that a search takes on an H100, from its bytes at 2 TB/s and its operations at
    300 TFLOP/s: a replay for each, four more for every second one, and two milliseconds of the
    host; and a second of a core a kernel."""
    seconds = kernels / 10 + 30
    for product, _ in every:
        size = product.rows * product.columns
        flops = 2 * product.rows * product.columns * product.tokens
        is_fp8 = product.kind == "fp8_linear"
        if isinstance(product, ExpertProduct):
            size = size * min(product.num_experts, product.tokens * product.top_k)
            flops = flops * product.top_k
            is_fp8 = product.fp8
        bytes = size if is_fp8 else 2 * size
        seconds += 0.002 + 3 * max(2, math.ceil(2**28 / bytes)) * max(bytes / 2e12, flops / 3e14)
    return seconds


if __name__ == "__main__":
    main()
