"""Decode steps in each graph mode: the milliseconds of one, and the floor that the memory sets.

    python -m weft.proofs.bench.decode_modes --out FOLDER [--quick]

The model has Qwen3-0.6B's dimensions and random weights, bfloat16, on one GPU: a step embeds, runs all layers, samples
and advances the state, and is timed by the device's clock over steps issued one after another. The floor is the bytes
that a step must read (the weights, and the keys and values of the context) over the bandwidth of a large copy, measured
in the same run. Without a GPU a tiny model runs on the tape, to show that it runs: its figures mean nothing.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from weft.proofs.environment import environment
from weft.proofs.gpu_run import QWEN3_0_6B, copy_bandwidth, random_model, time_decode

MODES = ("none", "piecewise", "full")
CASES = ((1, 256), (64, 256), (128, 512))
"""Requests, and the context of each."""

TINY = {
    **QWEN3_0_6B, "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "torch_dtype": "float32",
}  # fmt: skip


def main() -> None:
    """Run everything, write `decode_modes.json`, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="a tiny model and one case, to see that it runs")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    quick = given.quick or device == "cpu"
    bandwidth = copy_bandwidth(device)
    model = random_model(TINY if quick else QWEN3_0_6B, device)
    cases = [(2, 8)] if quick else CASES
    rows = [time_decode(model, *case, 1, mode, bandwidth) for case in cases for mode in MODES]
    report = {"environment": environment(device), "copy_bandwidth": bandwidth, "rows": rows}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "decode_modes.json").write_text(json.dumps(report, indent=1))
    show(rows)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    print(f"{'requests':>8}{'context':>8}  {'mode':<10}{'ms':>8}{'floor':>8}{'share':>7}{'tokens/s':>10}{'graphs':>7}")
    for row in rows:
        sizes = f"{row['reqs']:>8}{row['context']:>8}  {row['mode']:<10}"
        times = f"{row['ms']:>8.3f}{row['floor_ms']:>8.3f}{row['share']:>7.0%}{row['tokens_per_s']:>10,.0f}"
        print(f"{sizes}{times}{row['captures']:>7}")


if __name__ == "__main__":
    main()
