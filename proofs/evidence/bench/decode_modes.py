"""Decode steps in each graph mode: the milliseconds of a step, and the floor set by memory
bandwidth.

    python -m weft.proofs.evidence.bench.decode_modes --out FOLDER [--curves] [--quick]

The model has Qwen3-0.6B's dimensions and random weights, bfloat16, on one GPU: a step embeds, runs
all layers, samples and advances the state, and is timed by the device's clock over steps issued one
after another. The floor is the bytes that a step must read (the weights, and the keys and values of
the context) over the bandwidth of a large copy, measured in the same run. With `--curves` there are
more cases, and a plot of them: 1 to 256 requests at a context of 256, and 64 requests at contexts
of 256 to 8,192 tokens. Without a GPU a tiny model runs on the tape, only to show that it runs: its
figures mean nothing.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from weft.display.plots import GREY, new_axes
from weft.proofs.evidence.environment import environment
from weft.proofs.evidence.runs.gpu_run import QWEN3_0_6B, copy_bandwidth, random_model, time_decode

MODES = ("none", "piecewise", "full")
# A number of requests, and the context of each.
CASES = ((1, 256), (64, 256), (128, 512))
# Powers of two, as the curves have logarithmic axes.
BY_REQUESTS = tuple((2**i, 256) for i in range(9))
BY_CONTEXT = tuple((64, 256 * 2**i) for i in range(6))
QUICK = ((2, 8), (2, 16))

# The same kind of model, so that it runs the same code.
TINY = {
    **QWEN3_0_6B,
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "torch_dtype": "float32",
}


def main() -> None:
    """Run everything, write `decode_modes.json`, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--curves", action="store_true", help="more cases, and a drawing of them")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model and one case, to see that it runs"
    )
    args = parser.parse_args()
    if torch.cuda.is_available():
        device = "cuda"
    else:
        device = "cpu"
    quick = args.quick or device == "cpu"
    bandwidth = copy_bandwidth(device)
    model = random_model(TINY if quick else QWEN3_0_6B, device)
    by_requests, by_context = (QUICK[:1], QUICK) if quick else (BY_REQUESTS, BY_CONTEXT)
    if quick:
        cases: Sequence[tuple[int, int]] = QUICK[:1]
    else:
        cases = CASES
    if args.curves:
        # Both curves have 64 requests at 256: it is timed once.
        cases = [*dict.fromkeys((*by_requests, *by_context))]
    rows = [time_decode(model, *case, 1, mode, bandwidth) for case in cases for mode in MODES]
    report: dict[str, Any] = {
        "environment": environment(device),
        "copy_bandwidth": bandwidth,
        "rows": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "decode_modes.json").write_text(json.dumps(report, indent=1))
    if args.curves:
        if quick:
            what = "a tiny model"
        else:
            what = "Qwen3-0.6B in bfloat16"
        title = f"{what}, {report['environment']['gpu']}: milliseconds a decode step"
        draw(rows, title, by_requests, by_context).savefig(
            args.out / "decode_modes.svg", bbox_inches="tight"
        )
    show(rows)


def draw(rows: Sequence[dict[str, Any]], title: str, *curves: Sequence[tuple[int, int]]) -> Any:
    """One panel per curve: milliseconds per step in each mode, and the floor."""
    figure, axes = new_axes("decode_modes --curves", 10, 4, ncols=len(curves))
    figure.suptitle(title, color=GREY)
    for ax, cases, name in zip(axes, curves, ("requests", "context"), strict=True):
        places = [dict(zip(("requests", "context"), case, strict=True)) for case in cases]
        other = cases[0]
        for mode in MODES:
            mode_rows = {(row["reqs"], row["context"]): row for row in rows if row["mode"] == mode}
            ax.plot(
                [p[name] for p in places],
                [mode_rows[case]["ms"] for case in cases],
                "o-",
                label=mode,
            )
        ax.plot(
            [p[name] for p in places],
            [mode_rows[case]["floor_ms"] for case in cases],
            "--",
            color=GREY,
            label="floor: bytes at a copy's bandwidth",
        )
        ax.set(xscale="log", yscale="log", xlabel=name, ylabel="ms a decode step")
        ax.set_title(
            f"context {other[1]}" if name == "requests" else f"{other[0]} requests", fontsize=10
        )
        ax.set_xticks([p[name] for p in places], [f"{p[name]}" for p in places], minor=False)
        ax.minorticks_off()
        ax.yaxis.set_major_formatter("{x:g}")
        ax.grid(alpha=0.3)
    lines = ax.get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=4, frameon=False, labelcolor=GREY)
    return figure


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    print(
        f"{'requests':>8}{'context':>8} "
        f" {'mode':<10}{'ms':>8}{'floor':>8}{'share':>7}{'tokens/s':>10}{'graphs':>7}"
    )
    for row in rows:
        sizes = f"{row['reqs']:>8}{row['context']:>8}  {row['mode']:<10}"
        times = f"{row['ms']:>8.3f}{row['floor_ms']:>8.3f}{row['share']:>7.0%}{row['tokens_per_s']:>10,.0f}"
        print(f"{sizes}{times}{row['captures']:>7}")


if __name__ == "__main__":
    main()
