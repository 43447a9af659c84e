"""A product of many tokens that ends with a gate, in each way that there is: microseconds on this
GPU.

    python -m weft.proofs.evidence.bench.tiles.gates [--sustained] [--out FOLDER]

`many` is the kernel of many tokens (`weft.ops.products.gated_many_triton`), `torch` is torch's
product and a kernel for the gate, and `tile` the best tile of one part whose end is the gate, up to
1,024 tokens. The figure is the median of replays of a graph. With `--sustained` each way runs for a
second at a time, to and fro, so that the power cap acts.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from weft.ops.products.gate_triton import silu_mul
from weft.ops.products.gated_many_triton import swiglu_many
from weft.ops.products.linear_triton import run_tile
from weft.ops.tiles.linear import GATED_MANY, one_part_tile
from weft.proofs.evidence.bench.graphs import graph_seconds, run_seconds
from weft.proofs.evidence.environment import environment

# Rows of the gate and of up, and columns.
SHAPES = (
    (6144, 1024),
    (16384, 2048),
    (22016, 2048),
    (19456, 2560),
    (24576, 4096),
    (28672, 4096),
    (37888, 3584),
    (34816, 5120),
)
TOKENS = 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 8192
_ONE_PART = 1024
_SECONDS = 1.0


def ways(tokens: int, rows: int, columns: int) -> dict[str, Callable[[], Any]]:
    """The calls by name."""
    weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) / columns**0.5
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {
        "many": lambda: swiglu_many(x, weight, None, GATED_MANY),
        "torch": lambda: silu_mul(torch.nn.functional.linear(x, weight), x.dtype),
    }
    if tokens <= _ONE_PART:
        tile = one_part_tile(tokens, rows, columns, fp8=False)
        calls["tile"] = lambda: run_tile(x, None, weight, None, None, x.dtype, tile, gate=True)
    return calls


def measure(sustained: bool) -> Iterator[dict[str, Any]]:
    """The rows of the record."""
    places = [
        (*shape, tokens) for shape in SHAPES for tokens in (TOKENS[-1:] if sustained else TOKENS)
    ]
    for rows, columns, tokens in tqdm(places, unit="product", disable=None):
        calls = ways(tokens, rows, columns)
        if sustained:
            samples = {name: list[float]() for name in calls}
            # To and fro: the GPU gets warmer, and what comes later would always be slower.
            for name in (*calls, *reversed(calls)):
                times = int(_SECONDS / run_seconds(calls[name], 5)) + 1
                # Once without counting, until the clock has fallen to what the power cap allows.
                run_seconds(calls[name], times)
                samples[name].append(run_seconds(calls[name], times))
            timings = {name: statistics.mean(values) for name, values in samples.items()}
        else:
            timings = {name: graph_seconds([call], "cuda") for name, call in calls.items()}
        us = {name: round(1e6 * seconds, 2) for name, seconds in timings.items()}
        yield {"rows": rows, "columns": columns, "tokens": tokens, "us": us}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a row a product, and write `gates.json`."""
    parser = argparse.ArgumentParser(
        prog="python -m weft.proofs.evidence.bench.tiles.gates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--sustained", action="store_true", help="8,192 tokens alone, under the power cap"
    )
    parser.add_argument("--out", type=Path, help="a folder for the record")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no GPU, and nothing to time")
    rows = list[dict[str, Any]]()
    for row in measure(args.sustained):
        rows.append(row)
        print(f"{row['rows']}x{row['columns']}, {row['tokens']} tokens: {row['us']}", flush=True)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        record = {"sustained": args.sustained, "rows": rows, "environment": environment("cuda")}
        (args.out / "gates.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
