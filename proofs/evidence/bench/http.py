"""`weft serve` under load, next to the same work without HTTP: throughput, and latency against
load.

    python -m weft.proofs.evidence.bench.http --presets qwen3-0.6b qwen3-30b-a3b-fp8 \\
        --rates 4 16 inf --out FOLDER
    python -m weft.proofs.evidence.bench.http --models demo --device cpu --graph none \\
        --num-prompts 64 --output-len 64
    python -m weft.proofs.evidence.bench.http --url http://127.0.0.1:8000/v1 --vocab-size 32000
    python -m weft.proofs.evidence.bench.http --presets qwen3-0.6b --vllm "vllm bench serve" \\
        --out FOLDER

For each model a process first serves the requests by an `Engine` alone, as `weft bench` does, and
ends. Then `weft serve` answers them on this machine, and this process is the client: streams of
`/v1/completions` with random tokens as prompts, each on a connection of its own. At a finite rate
requests arrive as a Poisson process; at `inf` all at once, as in the engine alone, which is what
the ratio compares (medians of the repeats). Neither has logprobs. Each answer is checked to have
the tokens that were asked for; otherwise the command exits with 1. Presets have random weights, and
a tokenizer that is made here, with a text for each token. `--vllm` names the client of vLLM, which
then asks the same server at the same rates.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence as PreTokenizers, Split

from weft.display.plots import GREY, new_axes
from weft.errors import MissingPackageError
from weft.proofs.evidence.environment import environment
from weft.proofs.evidence.http.client import Load, drive
from weft.proofs.evidence.http.process import serving
from weft.stages.checkpoints.known_models import path_of
from weft.stages.random_weights import PRESETS
from weft.transforms.cli.bench import start_engine, workload_of
from weft.transforms.cli.options import Bench
from weft.transforms.cli.ranks import Here, read_config
from weft.transforms.engine.evaluation.serving import measure
from weft.transforms.pipelines.transports.local import Local

# The length of each completion of the warm-up.
_WARM_UP_TOKENS = 8
# The most seconds until the server listens.
_START_SECONDS = 300.0
# The seconds over which requests arrive at a finite rate, unless there are too few.
_FINITE_SECONDS = 15
# The most seconds that vLLM's client may take.
_CLIENT_SECONDS = 1800.0


def write_preset(folder: Path, name: str) -> None:
    """A checkpoint folder without weights: the dimensions of a known model, and a tokenizer whose
    tokens are different texts: bytes, and words with a space before them, which are encoded as the
    tokens that they were."""
    size = int(PRESETS[name]["vocab_size"])
    tokens = [*ByteLevel.alphabet(), *(f"Ġt{number}" for number in range(size))][:size]
    tokenizer = Tokenizer(
        # Whole words are tokens without any merge, as no vocabulary was trained.
        BPE({token: place for place, token in enumerate(tokens)}, [], ignore_merges=True)
    )
    # A word with the space before it, as the tokens have it, so that a text is read as it was
    # written.
    words = Split(Regex(" ?[^ ]+"), "isolated")
    tokenizer.pre_tokenizer = PreTokenizers([words, ByteLevel(False, use_regex=False)])
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "config.json").write_text(json.dumps(PRESETS[name]))


def options_of(args: argparse.Namespace, name: str) -> Bench:
    """The options of `weft bench` for a model."""
    if name in PRESETS:
        source: dict[str, Any] = {"preset": name}
    else:
        source = {"model": name}
    return Bench(
        **source,
        input_len=args.input_len,
        output_len=args.output_len,
        num_prompts=args.num_prompts,
        max_num_seqs=args.concurrency,
        graph=args.graph,
        device=args.device,
        seed=args.seed,
    )


def offline(options: Bench, repeats: int) -> list[dict[str, Any]]:
    """The figures of an engine alone."""
    engine, started = start_engine(Here(Local(), 1, options.device), options)
    return [*measure(engine, workload_of(options), started, repeats=repeats)]


def online(args: argparse.Namespace, url: str, vocab_size: int) -> Iterator[dict[str, Any]]:
    """The figures at each rate, after a few tokens of as many requests as run at once."""
    draw = random.Random(args.seed)
    vocabulary = range(vocab_size)

    def prompts(count: int) -> list[list[int]]:
        return [draw.choices(vocabulary, k=args.input_len) for _ in range(count)]

    shared: dict[str, Any] = {"url": url, "concurrency": args.concurrency, "seed": args.seed}
    asyncio.run(
        drive(Load(prompts=prompts(args.concurrency), output_len=_WARM_UP_TOKENS, **shared))
    )
    for rate in args.rates:
        # Only all at once is compared with the engine alone.
        for _ in range(args.repeats if math.isinf(rate) else 1):
            load = Load(
                prompts=prompts(_count(args, rate)),
                output_len=args.output_len,
                rate=rate,
                **shared,
            )
            yield asyncio.run(drive(load))


def run(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """The record of a model: its rows, those without HTTP, and the ratio of both at the rate `inf`."""
    options = options_of(args, name)
    vocab_size = read_config(options).vocab_size
    # In a process of its own, whose memory is free again before the server measures what is free;
    # and before the server, not beside it: two engines would share the GPU.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        alone = pool.apply(offline, (options, args.repeats))
    for row in alone:
        print(f"{name:<18} {'alone':>6}: {show(row)}", flush=True)
    # vLLM's client sends texts, which may be some tokens longer than the prompts that it drew.
    max_model_len = sum(options.lengths) + 16
    flags = ["--max-num-seqs", str(args.concurrency)]
    flags += ["--max-model-len", str(max_model_len)]
    flags += ["--graph", args.graph]
    flags += ["--max-logprobs", "0"]
    flags += ["--seed", str(args.seed)]
    flags += ["--served-model-name", name]
    if args.device:
        flags += ["--device", args.device]
    if options.preset:
        flags += ["--load-format", "dummy"]
    rows = list[dict[str, Any]]()
    vllm_rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as temporary:
        if options.preset:
            folder = Path(temporary)
            write_preset(folder, name)
        else:
            folder = path_of(name, "--models")
        with serving(str(folder), *flags, seconds=_START_SECONDS, shows_log=True) as server:
            for row in online(args, server.url, vocab_size):
                rows.append(row)
                print(f"{name:<18} {row['rate']:>6}: {show(row)}", flush=True)
            if args.vllm:
                for rate in args.rates:
                    row = vllm_bench(args, server.url, name, folder, rate)
                    vllm_rows.append(row)
                    print(f"{name:<18} {rate:>6g}: {show(row)} by vLLM's client", flush=True)
    speeds = [row["output_tokens_per_s"] for row in rows if row["rate"] == "inf"]
    baseline = statistics.median(row["output_tokens_per_s"] for row in alone)
    if speeds:
        ratio = statistics.median(speeds) / baseline
    else:
        ratio = None
    return {
        "model": name,
        "flags": flags,
        "alone": alone,
        "rows": rows,
        "vllm": vllm_rows,
        "ratio": ratio,
    }


def vllm_bench(
    args: argparse.Namespace, url: str, name: str, folder: Path, rate: float
) -> dict[str, Any]:
    """The figures of vLLM's client at a rate, for the same numbers and lengths of requests.

    Raises:
        RuntimeError: it did not end as it should.
        subprocess.TimeoutExpired: it did not end.
    """
    count = _count(args, rate)
    with tempfile.TemporaryDirectory() as results:
        flags: dict[str, Any] = {
            "base-url": url.removesuffix("/v1"),
            "backend": "openai",
            "model": name,
            "endpoint": "/v1/completions",
            "tokenizer": folder,
            "dataset-name": "random",
            "random-input-len": args.input_len,
            "random-output-len": args.output_len,
            "request-rate": rate,
            "num-prompts": count,
            "max-concurrency": args.concurrency,
            "seed": args.seed,
            "result-dir": results,
        }
        words = [
            *shlex.split(args.vllm),
            "--ignore-eos",
            "--save-result",
            "--result-filename",
            "result.json",
        ]
        words += [word for flag, value in flags.items() for word in (f"--{flag}", f"{value}")]
        pipes: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }
        ended = subprocess.run(words, **pipes, check=False, timeout=_CLIENT_SECONDS)
        if ended.returncode:
            raise RuntimeError(
                f"{shlex.join(words)} ended with {ended.returncode}:\n{ended.stdout[-3000:]}"
            )
        result = json.loads((Path(results) / "result.json").read_text())
    times = {
        key: {
            "mean": result[f"mean_{key}_ms"],
            "p50": result[f"median_{key}_ms"],
            "p99": result[f"p99_{key}_ms"],
        }
        for key in ("ttft", "tpot", "itl")
    }
    completed = result["completed"]
    # A server that ends completions early looks faster.
    wrong = result["total_output_tokens"] != count * args.output_len
    return {
        "rate": "inf" if math.isinf(rate) else rate,
        "requests": count,
        "completed": completed,
        "failed": count - completed,
        "wrong_lengths": int(wrong),
        "seconds": result["duration"],
        "output_tokens_per_s": result["output_throughput"],
        **times,
    }


def _count(args: argparse.Namespace, rate: float) -> int:
    """The number of requests at a rate."""
    if math.isinf(rate):
        return int(args.num_prompts)
    # As many as arrive in that time: a low rate with all requests would take minutes.
    return min(int(args.num_prompts), math.ceil(_FINITE_SECONDS * rate))


def show(row: dict[str, Any]) -> str:
    """The printed line of a row."""
    times = "  ".join(
        f"{name.upper()} {row[name]['p50']:.2f} (p99 {row[name]['p99']:.2f})"
        for name in ("ttft", "tpot", "itl")
        if row[name] is not None
    )
    more = ""
    if "failed" in row:
        more += f"; {row['completed']} of {row['requests']} completed"
    if "tokens_per_event" in row:
        more += f", {row['tokens_per_event']:.2f} tokens an event"
    return f"{row['output_tokens_per_s']:>9,.0f} tokens/s  ms: {times}{more}"


def draw_latency(records: Sequence[dict[str, Any]], title: str) -> Any:
    """Three panels: the median and the 99th percentile of each latency against the rate; dotted:
    without HTTP."""
    figure, axes = new_axes("bench.http --out", 11, 3.8, ncols=3)
    figure.suptitle(title, color=GREY)
    names = {
        "ttft": "to the first token",
        "tpot": "a later token (TPOT)",
        "itl": "between two events (ITL)",
    }
    for ax, (key, label) in zip(axes, names.items(), strict=True):
        for index, record in enumerate(records):
            rows = [
                row
                for row in {row["rate"]: row for row in record["rows"]}.values()
                if row[key] is not None
            ]
            rates = [f"{row['rate']:g}" if row["rate"] != "inf" else "inf" for row in rows]
            colour = f"C{index}"
            for part, style in (("p50", "o-"), ("p99", "^--")):
                values = [row[key][part] for row in rows]
                ax.plot(rates, values, style, color=colour, label=f"{record['model']}, {part}")
            if record["alone"]:
                ax.axhline(
                    record["alone"][-1][key]["p50"],
                    color=colour,
                    ls=":",
                    label=f"{record['model']}, engine without HTTP, p50",
                )
        ax.set(xlabel="requests a second", ylabel="ms")
        # From 0, or small differences would look large.
        ax.set_ylim(bottom=0)
        ax.set_title(label, fontsize=10)
        ax.grid(alpha=0.3)
    lines = axes[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=3, frameon=False, labelcolor=GREY)
    return figure


def draw_record(file: Path) -> None:
    """Draw a record, as an SVG beside it.

    Raises:
        MissingPackageError: there is no matplotlib.
    """
    record = json.loads(file.read_text())
    gpu = record["environment"]["gpu"]
    lengths = f"{record['input_len']} tokens in, {record['output_len']} out"
    title = f"weft serve, {'a CPU' if gpu == 'none' else gpu}: {lengths}; milliseconds"
    draw_latency(record["models"], title).savefig(file.with_suffix(".svg"), bbox_inches="tight")


def _rate(text: str) -> float:
    rate = float(text)
    if not rate > 0:
        raise argparse.ArgumentTypeError(f"{text!r}: write a number > 0, or inf")
    return rate


def main(argv: Sequence[str] | None = None) -> None:
    """Run all models, print the rows, and write `http.json` and `http.svg`."""
    parser = argparse.ArgumentParser(
        prog="python -m weft.proofs.evidence.bench.http",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--presets", "--preset", nargs="+", choices=PRESETS, default=[], help="of `weft serve`"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=[],
        metavar="DIR",
        help="checkpoint folders; demo: weft's own",
    )
    parser.add_argument(
        "--url", help="of a server that runs, such as http://127.0.0.1:8000/v1, instead of a model"
    )
    parser.add_argument("--vocab-size", type=int, default=256, help="of that server's model (256)")
    parser.add_argument(
        "--rates", nargs="+", type=_rate, default=[4.0, 16.0, math.inf], help="a second (4 16 inf)"
    )
    parser.add_argument(
        "--num-prompts", type=int, default=128, metavar="N", help="at a rate of inf (128)"
    )
    parser.add_argument(
        "--concurrency", type=int, default=128, metavar="N", help="the most under way (128)"
    )
    parser.add_argument(
        "--input-len", type=int, default=2, metavar="N", help="tokens of each prompt (2)"
    )
    parser.add_argument(
        "--output-len", type=int, default=512, metavar="N", help="tokens of each completion (512)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="at a rate of inf, and alone (3)"
    )
    parser.add_argument(
        "--graph", default="full_and_piecewise", help="graph mode (full_and_piecewise)"
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if there is a GPU)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm", metavar="COMMAND", help="vLLM's client, as in 'vllm bench serve'")
    parser.add_argument("--out", type=Path, help="a folder for the record and the picture")
    parser.add_argument(
        "--draw", type=Path, metavar="FILE", help="only draw the record that a run has written"
    )
    args = parser.parse_args(argv)
    if args.draw is not None:
        draw_record(args.draw)
        return
    if bool(args.url) == bool(args.presets or args.models):
        parser.error("name --presets or --models, or a --url")
    if args.url and args.vllm:
        parser.error(
            "--vllm needs --presets or --models, whose tokenizer it reads; a --url has none"
        )
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)  # an error here comes before the long run
    if args.url:
        rows = [*online(args, args.url, args.vocab_size)]
        print(*map(show, rows), sep="\n")
        records = [
            {"model": args.url, "flags": [], "alone": [], "rows": rows, "vllm": [], "ratio": None}
        ]
    else:
        records = [run(args, name) for name in (*args.presets, *args.models)]
    for record in records:
        if record["ratio"] is not None:
            print(f"{record['model']}: {record['ratio']:.1%} of the tokens a second without HTTP")
    if args.out is not None:
        where = environment("cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu")
        lengths = {
            "input_len": args.input_len,
            "output_len": args.output_len,
            "concurrency": args.concurrency,
        }
        text = json.dumps({**lengths, "models": records, "environment": where}, indent=1)
        (args.out / "http.json").write_text(text + "\n")
        try:
            draw_record(args.out / "http.json")
        # The run has taken minutes of a GPU: a picture that cannot be drawn must not lose it.
        except MissingPackageError as error:
            print(f"{error}\nThe record is written: draw it elsewhere, by --draw")
    all_rows = [row for record in records for row in (*record["rows"], *record["vllm"])]
    sys.exit(any(row["failed"] or row["wrong_lengths"] for row in all_rows))


if __name__ == "__main__":
    main()
