"""`weft bench`: serve many requests at once, and time the tokens when the host reads them."""

import platform
import sys
from typing import Any

import torch
from rich.text import Text

from weft import __version__
from weft.arguments.json_text import write_json
from weft.display.quantities import counted
from weft.stages.model import Model
from weft.transforms.cli import evaluate
from weft.transforms.cli.models import check_models, open_drafts, open_model, read_config
from weft.transforms.cli.options import Bench
from weft.transforms.cli.printing import check_file, console, show_tables, table, write_file
from weft.transforms.cli.ranks import Here, in_ranks
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.evaluation.serving import RankFigures, Workload, measure, start
from weft.transforms.engine.options import EngineLimits


def run(options: Bench) -> int:
    """Measure, or evaluate with `--eval`, and print the report; the exit code is 1 if evaluated modes differ."""
    _check(options)
    check_file(options, "--out", options.out)
    make, shows = (bench, show) if options.eval is None else (evaluate.evaluate, evaluate.show)
    report = make(options, progress=sys.stderr.isatty())
    if report is None:
        return 0  # the first rank prints
    text = write_json(report, indent=2)
    if options.out is not None:
        write_file(options, "--out", options.out, text + "\n")
    if options.json:
        print(text)
    else:
        shows(report)
    return 0 if report.get("agree", True) else 1


def _check(options: Bench) -> None:
    """Refuse options that contradict each other."""
    tokens, pp = options.tokens_per_step, ",".join(map(str, options.splits))
    if options.preset is not None and options.load_format == "auto":
        options.refuse("--load-format auto", "a preset has no weights", "--load-format dummy, or --model DIR")
    if options.eval is not None and options.dummy:
        seen = "random weights; --eval scores the weights and the tokenizer of a folder"
        options.refuse(f"--eval {options.eval}", seen, "--model DIR, without --load-format dummy")
    if options.eval is None and (options.graph == "all" or "," in pp):
        flag = "--graph all" if options.graph == "all" else f"--pp {pp}"
        options.refuse(flag, "several modes or splits, of which one is timed", "one of them, or --eval FILE")
    if tokens < options.max_num_seqs:
        seen = f"{tokens} tokens a step for {options.max_num_seqs} requests"
        instead = f"{options.max_num_seqs} or more, or a lower --max-num-seqs"
        options.refuse(f"--max-num-tokens {tokens}", seen, instead)


def bench(options: Bench, *, progress: bool) -> dict[str, Any] | None:
    """The report; None on a rank of torchrun that is not the first.

    Raises:
        RequestError: requests longer than the model has positions for.
    """
    config, (input_len, output_len) = read_config(options.model, options.preset), options.lengths
    check_models(options, config)
    total, most = input_len + output_len, config.max_position_embeddings
    if total > most:
        flags = f"--input-len {input_len} --output-len {output_len}"
        options.refuse(flags, f"requests of {total} tokens", f"at most {most} together, the model's limit")
    found = in_ranks(_bench, options, options, progress)
    return None if found is None else as_report(options, found)


def _bench(here: Here, options: Bench, progress: bool) -> dict[str, Any]:
    """This process's part: start, warm up, and serve."""
    shows = progress and here.first
    engine, started = start_engine(here, options, shows)
    (found,) = measure(engine, workload_of(options), started, progress=shows)
    return found


def start_engine(here: Here, options: Bench, progress: bool, opened: Model | None = None) -> tuple[Engine, RankFigures]:
    """An engine with all its graphs captured, and how long each part took; of a model that may be `opened` before."""
    limits = EngineLimits(
        max_num_reqs=options.max_num_seqs,
        max_num_tokens=options.tokens_per_step,
        max_model_len=sum(options.lengths),
    )

    def make(model: Model) -> Engine:
        return Engine(
            model,
            limits,
            pipeline=here.num_stages,
            graph=options.graphs[0],
            transport=here.transport,
            run_ahead=options.run_ahead,
            seed=options.seed,
            speculation=open_drafts(options, here),
        )

    return start(lambda: opened or open_model(options, here, progress=progress), make)


def workload_of(options: Bench) -> Workload:
    """The requests that the options ask for."""
    input_len, output_len = options.lengths
    return Workload(
        num_requests=options.num_prompts,
        input_len=input_len,
        output_len=output_len,
        temperature=options.temperature,
        seed=options.seed,
    )


def as_report(options: Bench, found: dict[str, Any]) -> dict[str, Any]:
    """The JSON report: the options, the environment, and the figures. Times are in seconds, except for `ttft`, `tpot`
    and `itl`, which are in milliseconds."""
    own = "model preset dummy dtype num_prompts max_num_seqs temperature seed run_ahead speculate draft stages"
    wanted = {name: getattr(options, name) for name in (*own.split(), "transport", "device")}
    wanted |= dict(zip(("input_len", "output_len"), options.lengths, strict=True))
    wanted |= {"max_num_tokens": options.tokens_per_step, "graph": options.graphs[0]}
    device = found["ranks"][0]["device"]
    environment = {
        "weft": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda if device.startswith("cuda") else None,
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine(),
        "python": platform.python_version(),
    }
    return {"wanted": wanted, "environment": environment, **found}


def show(report: dict[str, Any]) -> None:
    """Print the report as tables."""
    out, asked = console(), report["wanted"]
    stages = counted(max(len(report["ranks"]), asked["stages"] or 1), "stage")
    title = f"{asked['model'] or asked['preset']}, {stages}, graphs: {asked['graph']}"
    out.print(Text(title, style="bold"), soft_wrap=True)
    throughput = {
        "requests": report["num_requests"],
        "in": asked["input_len"],
        "out": asked["output_len"],
        "seconds": f"{report['seconds']:.3f}",
        "output tok/s": f"{report['output_tokens_per_s']:,.0f}",
        "total tok/s": f"{report['total_tokens_per_s']:,.0f}",
    }
    latencies = {
        "time to the first token (TTFT)": report["ttft"],
        "time per later token (TPOT)": report["tpot"],
        "between two tokens (ITL)": report["itl"],
    }
    latency = [
        {"": name, **{key: f"{value:,.2f}" for key, value in found.items()}}
        for name, found in latencies.items()
        if found is not None
    ]
    shares = {"whole graphs": "full", "pieces": "piecewise", "eager": "none"}
    steps = {
        "steps": report["num_steps"],
        **{name: f"{report['graphs']['shares'][mode]:.1%}" for name, mode in shares.items()},
        "padding": f"{report['graphs']['padding']:.1%}",
        "late captures": report["captures"],
    }
    shown = [table("", [throughput]), table("milliseconds", latency), table("steps", [steps])]
    if asked["speculate"] is not None:
        drafts = {
            "by": asked["draft"] or "prompt lookup",
            "a step": asked["speculate"],
            "verified": f"{report['drafted']:,}",
            "right": f"{report['accepted']:,}",
            "share": f"{report['accepted'] / max(report['drafted'], 1):.1%}",
        }
        shown.append(table("drafts", [drafts]))
    ranks = [_rank_row(rank, started) for rank, started in enumerate(report["ranks"])]
    show_tables(out, *shown, table("seconds of the start", ranks))


def _rank_row(rank: int, started: dict[str, Any]) -> dict[str, Any]:
    parts = {"load": "load", "engine": "engine", "capture": "capture", "until the\nfirst token": "first_token"}
    row = {
        "rank": rank,
        "device": started["device"],
        **{name: f"{started[f'{part}_seconds']:.2f}" for name, part in parts.items()},
        "graphs": started["num_graphs"],
        "graphs'\nMiB": f"{started['graph_bytes'] / 2**20:.1f}",
    }
    peak = started["peak_bytes"]
    return row if peak is None else row | {"peak\nGiB": f"{peak / 2**30:.2f}"}
