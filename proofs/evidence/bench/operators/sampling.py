"""Sampling at a model's head: the microseconds of `sample_rows`, by the sampling features that
requests use.

    python -m weft.proofs.evidence.bench.operators.sampling --out FOLDER [--quick]

Logits are bfloat16, normal with deviation 3, over 151,936 tokens; one graph holds 20 draws. A time
is the device's time for one draw, and beside it stands that of `sample`, which supports only
temperature. Without a GPU the references run on a small vocabulary, only to show that it runs:
their figures mean nothing.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.batches.sampling import SamplingParams
from weft.batches.sampling_rows import write_rows
from weft.ops.sampling.sample import sample, sample_rows
from weft.ops.sampling.table import SamplingTable
from weft.proofs.evidence.environment import environment
from weft.transforms.graphs.graphify import graphify

# One feature at a time, and then together: a row without one pays nothing for it.
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "greedy": {"temperature": 0.0},
    "min_p": {"min_p": 0.05},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "top_k and top_p": {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5},
    "allowed tokens": {"allowed_token_ids": range(10)},
    "bias": {"logit_bias": {1: 2.0, 5: -3.0}},
    "all": {
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "logit_bias": {1: 2.0},
    },
}
NUM_REQS = (1, 16, 256)
DRAWS = 20


def time_draws(draw: Callable[[], Tensor], device: str) -> float:
    """Microseconds per draw in a graph of `DRAWS` draws, the least of several replays."""
    # Twenty in a graph, so that its launch is a small part of the time.
    graph = graphify(lambda: [draw() for _ in range(DRAWS)][-1])
    graph()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        graph()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start) / DRAWS)
    return min(times)


def time_case(name: str, count: int, vocab: int, device: str) -> dict[str, Any]:
    """One row of the report: a batch of `count` requests with the same sampling parameters."""
    generator = torch.Generator().manual_seed(0)
    # Deviation 3, so that some tokens are much likelier than others, as a model's are.
    logits = (torch.randn(count, vocab, generator=generator) * 3).to(device, torch.bfloat16)
    # One row more than requests: the last one is that of padding.
    table = SamplingTable.zeros(count + 1, vocab, 300, device)
    params = [
        SamplingParams(**{"temperature": 1.0, "seed": row} | ASKED[name]) for row in range(count)
    ]
    write_rows(table, range(count), params, [[1, 2, 3]] * count, [[4, 5]] * count)
    rows = torch.arange(count, device=device)
    temperature = torch.full((count,), float(params[0].temperature), device=device)
    ours = time_draws(lambda: sample_rows(logits, table, rows, rows)[0], device)
    plain = time_draws(lambda: sample(logits, temperature, rows, rows)[0], device)
    return {"asked": name, "reqs": count, "us": ours, "sample_us": plain}


def main() -> None:
    """Run everything, write `sampling.json`, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--quick", action="store_true", help="a small vocabulary and batch, to see that it runs"
    )
    args = parser.parse_args()
    if torch.cuda.is_available():
        device = "cuda"
    else:
        device = "cpu"
    vocab, counts = (64, (2,)) if args.quick or device == "cpu" else (151936, NUM_REQS)
    rows = [time_case(name, count, vocab, device) for count in counts for name in ASKED]
    args.out.mkdir(parents=True, exist_ok=True)
    report = {"environment": environment(device), "vocab_size": vocab, "rows": rows}
    (args.out / "sampling.json").write_text(json.dumps(report, indent=1))
    show(rows)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    print(f"{'requests':>8}  {'asked':<18}{'us':>9}{'sample':>9}")
    for row in rows:
        print(f"{row['reqs']:>8}  {row['asked']:<18}{row['us']:>9.1f}{row['sample_us']:>9.1f}")


if __name__ == "__main__":
    main()
