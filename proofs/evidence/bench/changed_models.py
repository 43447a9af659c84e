"""The cost of changes of a model in serving: the time per output token of the model as it is, and
of changed ones.

    python -m weft.proofs.evidence.bench.changed_models [--preset NAME] [--models plain ...]
    [--lengths IN OUT] [--out FOLDER]

The changes: `steered` adds a vector of each request's own to the hidden states after the middle
layer; `captured` gives these states back for each token; `fp8 cache` keeps keys and values in FP8.
All engines share the weights, which are random, and live in one process, so that the KV caches of
all must fit. They serve the same requests in turns. A figure is the median over the turns of the
median time per output token, with the least and the greatest.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from weft.proofs.evidence.environment import environment
from weft.stages.custom.functions import Layer
from weft.stages.custom.sown import sow
from weft.stages.model import Model
from weft.stages.random_weights import PRESETS
from weft.transforms.cli.bench import start_engine, workload_of
from weft.transforms.cli.options import Bench
from weft.transforms.cli.ranks import Here, in_ranks, open_model
from weft.transforms.engine.evaluation.serving import measure


def steered(model: Model) -> Model:
    """With a vector of each request's own added after the middle layer."""
    zeros = torch.zeros(model.config.hidden_size, device=model.device, dtype=model.dtype)

    def change(layer: Layer) -> Layer:
        def run(params: Any, kv_pages: Any, batch: Any, tables: Any, hidden: Any) -> Any:
            hidden, kv_pages = layer(params, kv_pages, batch, tables, hidden)
            return hidden + batch.per_token(batch.extras["vector"]), kv_pages

        return run

    return model.with_stages(
        layers={model.config.num_layers // 2: change}, extras={"vector": zeros}
    )


def captured(model: Model) -> Model:
    """With the states after the middle layer given back."""
    example = torch.zeros(model.config.hidden_size, device=model.device, dtype=model.dtype)

    def change(layer: Layer) -> Layer:
        def run(*args: Any) -> Any:
            hidden, kv_pages = layer(*args)
            sow("hidden", hidden)
            return hidden, kv_pages

        return run

    return model.with_stages(
        layers={model.config.num_layers // 2: change}, captures={"hidden": example}
    )


CHANGES: dict[str, Callable[[Model], Model]] = {
    "plain": lambda model: model,
    "steered": steered,
    "captured": captured,
    "fp8 cache": lambda model: attrs.evolve(model, kv_dtype=torch.float8_e4m3fn),
}


def run(here: Here, options: Bench, models: Sequence[str], turns: int) -> list[dict[str, Any]]:
    """The figures of each turn of each model."""
    model = open_model(options, here)
    # All alive at once: one after another, a clock that falls would count for the later ones.
    engines = {name: start_engine(here, options, CHANGES[name](model)) for name in models}
    rows = list[dict[str, Any]]()
    for turn in range(turns):
        for name, (engine, started) in engines.items():
            [row] = measure(engine, workload_of(options), started)
            rows.append({"model": name, "turn": turn, **row})
            print(
                f"{name:<10} {row['tpot']['p50']:8.3f} ms a token"
                f" {row['output_tokens_per_s']:10,.0f} out/s",
                flush=True,
            )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Run the turns, print the table, and write `changed_models.json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--preset", choices=PRESETS, default="qwen3-0.6b", help="of `weft bench` (qwen3-0.6b)"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=CHANGES,
        default=[*CHANGES],
        help="the first is the base (all)",
    )
    parser.add_argument(
        "--requests", type=int, default=128, metavar="N", help="all there from the start (128)"
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs=2,
        default=(2, 512),
        metavar=("IN", "OUT"),
        help="tokens (2 512)",
    )
    parser.add_argument(
        "--turns", type=int, default=4, metavar="N", help="of all models, one after the other (4)"
    )
    parser.add_argument("--out", type=Path, help="a folder for the record")
    args = parser.parse_args(argv)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)  # an error here comes before the long run
    taken, output_len = args.lengths
    counts = {"num_prompts": args.requests, "max_num_seqs": args.requests}
    options = Bench(preset=args.preset, input_len=taken, output_len=output_len, **counts)
    rows = in_ranks(run, options, options, args.models, args.turns)
    times = {
        name: [row["tpot"]["p50"] for row in rows if row["model"] == name] for name in args.models
    }
    base = statistics.median(times[args.models[0]])
    for name, model_times in times.items():
        middle = statistics.median(model_times)
        print(
            f"{name:<10} {middle:8.3f} ms ({min(model_times):.3f} to {max(model_times):.3f})"
            f" {middle / base - 1:+7.1%}"
        )
    if args.out is not None:
        settings = {"preset": args.preset, "requests": args.requests, "lengths": args.lengths}
        record = {
            **settings,
            "rows": rows,
            "environment": environment("cuda" if torch.cuda.is_available() else "cpu"),
        }
        (args.out / "changed_models.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
