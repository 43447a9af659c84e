"""The capture of a whole ladder: its seconds, its memory, and the error of the estimate.

    python -m weft.proofs.evidence.bench.startup.ladder_capture --out FOLDER [--quick]

The model has Qwen3-0.6B's dimensions and random weights, bfloat16, on one GPU, in mode
full_and_piecewise with 128 requests: 31 classes, 19 whole decode graphs and 12 in pieces of up to
256 tokens. Its kernels are compiled, and the ladder is captured, twice: the first time compiles
whatever is not yet in triton's cache on disk. Memory is the loss of free memory on the GPU during
the captures, the driver's share included, plus the input buffers. Without a GPU a tiny model runs
on the tape, only to show that it runs: its figures mean nothing.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from weft.batches.batch import Batch
from weft.batches.sampling import SamplingParams
from weft.proofs.evidence.bench.decode_modes import TINY
from weft.proofs.evidence.environment import environment
from weft.proofs.evidence.runs.gpu_run import QWEN3_0_6B, random_model
from weft.stages.model import Model
from weft.transforms.engine.setup import make_runner, make_state
from weft.transforms.graphs.graphified import num_pieces
from weft.transforms.graphs.ladder import Limits


def capture_ladder(model: Model, limits: Limits, device: str) -> dict[str, Any]:
    """Estimate, capture and count one ladder."""
    runner = make_runner(model, limits, mode="full_and_piecewise")
    rows = range(limits.max_num_reqs)
    state = make_state(
        model,
        runner.layouts,
        [300] * len(rows),
        [SamplingParams(temperature=1.0, seed=row) for row in rows],
    )
    (graph,) = runner.graphs
    example = runner.params, state, Batch.decode(rows, device=device)
    start = time.perf_counter()
    # By itself, so that the seconds of the captures have no compilation in them.
    graph.compile_ahead(*example)
    compile_seconds = time.perf_counter() - start
    start = time.perf_counter()
    graph.capture(*example)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    used = graph.memory_analysis()
    pieces = num_pieces(graph)
    # The estimate must not find the graphs that it estimates.
    graph.cache_clear()
    start = time.perf_counter()
    estimate = graph.memory_estimate(*example)
    return {
        "graphs": used.num_graphs,
        "in_pieces": sum(n > 1 for n in pieces),
        "cuda_graphs": sum(pieces),
        "compile_seconds": compile_seconds,
        "seconds": seconds,
        "bytes": used.total_bytes,
        "buffer_bytes": used.buffer_bytes,
        "estimated_bytes": estimate.total_bytes,
        "measured_for_the_estimate": estimate.num_measured,
        "estimate_seconds": time.perf_counter() - start,
    }


def main() -> None:
    """Run everything, write `ladder_capture.json`, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model and ladder, to see that it runs"
    )
    args = parser.parse_args()
    if torch.cuda.is_available():
        device = "cuda"
    else:
        device = "cpu"
    quick = args.quick or device == "cpu"
    model = random_model(TINY if quick else QWEN3_0_6B, device)
    if quick:
        limits = Limits(2, 4)
    else:
        limits = Limits(128, 256)
    runs = [
        # The second time the driver has kept memory, and triton its kernels: both figures are of
        # use.
        {"run": which, **capture_ladder(model, limits, device)}
        for which in ("first", "second")
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    report = {"environment": environment(device), "runs": runs}
    (args.out / "ladder_capture.json").write_text(json.dumps(report, indent=1))
    columns = f"{'compiled':>9}{'captured':>9}{'GiB':>8}{'estimated':>10}{'in seconds':>11}"
    print(f"{'run':<8}{'graphs':>7}{'in pieces':>10}{columns}")
    for run in runs:
        sizes = f"{run['bytes'] / 2**30:>8.3f}{run['estimated_bytes'] / 2**30:>10.3f}{run['estimate_seconds']:>11.2f}"
        seconds = f"{run['compile_seconds']:>9.2f}{run['seconds']:>9.2f}"
        print(f"{run['run']:<8}{run['graphs']:>7}{run['in_pieces']:>10}{seconds}{sizes}")


if __name__ == "__main__":
    main()
