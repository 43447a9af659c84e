"""The kernels of a decoder layer, timed inside a CUDA graph, against the bytes that they must move.

    python -m weft.proofs.evidence.bench.operators.kernels [--out FOLDER] [--quick] [--tokens 1 64]

The sizes are those of Qwen3-30B-A3B in FP8 and of Qwen3-0.6B in bfloat16. Each row has the
microseconds per call over repeated replays of a graph (which uses more copies of the weights than a
cache holds), the floor at 4.27 TB/s (the copy bandwidth of an H200), their ratio, and the greatest
relative error against the reference. Without a GPU the references run at tiny sizes, only to show
that it runs: the figures mean nothing.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch

from weft.proofs.evidence.bench.graphs import graph_seconds
from weft.proofs.evidence.bench.operators.kernel_cases import (
    Case,
    Maker,
    layer_cases,
    relative_error,
)
from weft.proofs.evidence.bench.operators.sizes import (
    QWEN3_0_6B,
    QWEN3_30B_A3B,
    TINY,
    TINY_EXPERTS,
    Sizes,
)
from weft.proofs.evidence.environment import environment

# Of a large copy, measured, and not the data sheet's.
BANDWIDTH = 4.27e12
TOKENS = (1, 8, 64, 128, 256)


@attrs.frozen
class Row:
    """One figure: microseconds per call, the floor, the ratio of both, and the error (None: not
    checked)."""

    model: str
    kernel: str
    shape: str
    tokens: int
    us: float
    floor_us: float
    share: float
    error: float | None


def time_case(case: Case, model: str, device: str) -> Row:
    """Check a kernel, then time it."""
    if case.expected is None:
        error = None
    else:
        # Before it is timed: the time of a wrong result says nothing.
        error = relative_error(case.calls[0](), case.expected())
    us = graph_seconds(case.calls, device) * 1e6
    floor = case.bytes / BANDWIDTH * 1e6
    return Row(model, case.kernel, case.shape, case.tokens, us, floor, floor / us, error)


def time_layers(sizes: Sequence[Sizes], tokens: Sequence[int], device: str) -> list[Row]:
    """The figures of all kernels of all layers."""
    rows = []
    for size in sizes:
        for count in tokens:
            torch.manual_seed(count)
            make = Maker(device, torch.bfloat16)
            rows += [time_case(case, size.name, device) for case in layer_cases(make, size, count)]
    return rows


def show(rows: Sequence[Row]) -> None:
    """Print the table, and the total of each layer's kernels."""
    print(
        f"{'model':<14}{'tokens':>7}"
        f" {'kernel':<23}{'shape':<30}{'us':>8}{'floor':>8}{'share':>7}{'error':>9}"
    )
    for row in rows:
        sizes = f"{row.model:<14}{row.tokens:>7} {row.kernel:<23}{row.shape:<30}"
        if row.error is None:
            error = ""
        else:
            error = f"{row.error:.1e}"
        print(f"{sizes}{row.us:>8.2f}{row.floor_us:>8.2f}{row.share:>7.0%}{error:>9}")
    for model, tokens in dict.fromkeys((row.model, row.tokens) for row in rows):
        us = sum(row.us for row in rows if (row.model, row.tokens) == (model, tokens))
        floor = sum(row.floor_us for row in rows if (row.model, row.tokens) == (model, tokens))
        print(
            f"{model:<14}{tokens:>7} {'all of these':<53}{us:>8.2f}{floor:>8.2f}{floor / us:>7.0%}"
        )


def main() -> None:
    """Time everything, write `kernels.json`, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    args = parser.parse_args()
    if torch.cuda.is_available():
        device = "cuda"
    else:
        device = "cpu"
    quick = args.quick or device == "cpu"
    # References multiply in float32, which TF32 would round to ten bits.
    torch.backends.cuda.matmul.allow_tf32 = False
    if quick:
        sizes = (TINY_EXPERTS, TINY)
    else:
        sizes = (QWEN3_30B_A3B, QWEN3_0_6B)
    rows = time_layers(sizes, args.tokens, device)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        report = {
            "environment": environment(device),
            "bandwidth": BANDWIDTH,
            "rows": [attrs.asdict(r) for r in rows],
        }
        (args.out / "kernels.json").write_text(json.dumps(report, indent=1))
    show(rows)


if __name__ == "__main__":
    main()
