"""`weft bench`: serve many requests and time their tokens, or score a file in each graph mode and
split."""

import gc
import platform
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from rich.text import Text
from tqdm import tqdm

from weft import __version__
from weft.arguments.json_text import write_json
from weft.display.quantities import counted
from weft.display.tables import Table
from weft.stages.model import Model
from weft.transforms.cli.options import Bench
from weft.transforms.cli.printing import check_file, heading, show, write_file
from weft.transforms.cli.ranks import (
    Here,
    in_ranks,
    make_engine,
    num_stages,
    open_model,
    read_config,
)
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.evaluation.scoring import Score, Task, read_tasks, score
from weft.transforms.engine.evaluation.serving import RankFigures, Workload, measure, start

# The most tokens of a request that is scored.
_MAX_CONTEXT = 4096


def run(options: Bench) -> int:
    """Measure, or evaluate with `--eval`, and print the report; the exit code is 1 if the scores of
    modes or splits differ."""
    _check(options)
    check_file(options, "--out", options.out)
    report, parts = (bench if options.eval is None else evaluate)(options)
    text = write_json(report, indent=2)
    write_file(options, "--out", options.out, text + "\n")
    if options.json:
        print(text)
    else:
        show(parts)
    if report.get("agree", True):
        return 0
    return 1


def _check(options: Bench) -> None:
    """Refuse options that contradict each other."""
    tokens = options.tokens_per_step
    pp = ",".join(map(str, options.splits))
    if options.eval is not None and options.dummy:
        problem = "random weights; --eval scores the weights and the tokenizer of a folder"
        options.refuse(
            f"--eval {options.eval}", problem, "--model DIR, without --load-format dummy"
        )
    if options.eval is None and (options.graph == "all" or "," in pp):
        if options.graph == "all":
            flag = "--graph all"
        else:
            flag = f"--pp {pp}"
        options.refuse(
            flag,
            "several modes or splits; without --eval, weft bench times a single one",
            "one of them, or --eval FILE",
        )
    if options.eval is not None and options.max_step_seconds is not None:
        problem = "--eval compares scores, and a time limit makes the batches depend on the clock"
        options.refuse(
            f"--eval ... --max-step-seconds {options.max_step_seconds:g}",
            problem,
            "leave out one of the two",
        )
    if tokens is not None and tokens < options.max_num_seqs:
        problem = f"{tokens} tokens a step for {options.max_num_seqs} requests"
        instead = f"{options.max_num_seqs} or more, or a lower --max-num-seqs"
        options.refuse(f"--max-num-tokens {tokens}", problem, instead)


def bench(options: Bench) -> tuple[dict[str, Any], Iterator[Any]]:
    """Serve the workload, and return the report and its tables.

    Raises:
        RequestError: the requests are longer than the model's positions.
    """
    config, (input_len, output_len) = read_config(options), options.lengths
    total = input_len + output_len
    most = config.max_position_embeddings
    if total > most:
        flags = f"--input-len {input_len} --output-len {output_len}"
        options.refuse(
            flags, f"requests of {total} tokens", f"at most {most} together, the model's limit"
        )
    report = as_report(options, in_ranks(_bench, options, options))
    return report, tables(report)


def _bench(here: Here, options: Bench) -> dict[str, Any]:
    """Run in each process: start, warm up, and serve."""
    engine, started = start_engine(here, options)
    (report,) = measure(engine, workload_of(options), started, progress=here.progress)
    return report


def start_engine(
    here: Here, options: Bench, opened: Model | None = None
) -> tuple[Engine, RankFigures]:
    """An engine with all its graphs captured, and how long each part of the start took; `opened` is
    the model if it is loaded already."""
    graph = options.graphs[0]
    length = sum(options.lengths)
    make = partial(make_engine, options, here, graph=graph, max_model_len=length)
    return start(lambda: opened or open_model(options, here), make)


def workload_of(options: Bench) -> Workload:
    """The workload that the options describe."""
    input_len, output_len = options.lengths
    return Workload(
        num_requests=options.num_prompts,
        input_len=input_len,
        output_len=output_len,
        temperature=options.temperature,
        seed=options.seed,
    )


def as_report(options: Bench, figures: dict[str, Any]) -> dict[str, Any]:
    """The JSON report: the options, the environment, and the figures. Times are in seconds, except
    for `ttft`, `tpot` and `itl`, which are in milliseconds."""
    names = (
        "model preset dummy dtype num_prompts max_num_seqs max_step_seconds num_pages temperature"
        " seed run_ahead"
    )
    settings = {
        name: getattr(options, name)
        for name in (*names.split(), "speculate", "draft", "transport", "device", "compiler")
    }
    settings |= dict(zip(("input_len", "output_len"), options.lengths, strict=True))
    settings |= {"max_num_tokens": figures["max_num_tokens"], "graph": options.graphs[0]}
    settings |= {"stages": options.num_stages, "own_stages": options.stages}
    device = figures["ranks"][0]["device"]
    on_gpu = device.startswith("cuda")
    environment = {
        "weft": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda if on_gpu else None,
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "python": platform.python_version(),
    }
    return {"wanted": settings, "environment": environment, **figures}


def tables(report: dict[str, Any]) -> Iterator[Any]:
    """The report as tables for a reader."""
    settings = report["wanted"]
    graphs = report["graphs"]
    stages = counted(max(len(report["ranks"]), settings["stages"] or 1), "stage")
    compiler = settings.get("compiler")
    by = f", compiled by {compiler}" * (compiler is not None)
    yield heading(
        f"{settings['model'] or settings['preset']}, {stages}, graphs: {settings['graph']}{by}"
    )
    throughput = {
        "requests": report["num_requests"],
        "in": settings["input_len"],
        "out": settings["output_len"],
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
        {"": name, **{key: f"{value:,.2f}" for key, value in percentiles.items()}}
        for name, percentiles in latencies.items()
        if percentiles is not None
    ]
    shares = {"whole graphs": "full", "pieces": "piecewise", "eager": "none"}
    steps = {
        "steps": report["num_steps"],
        **{name: f"{graphs['shares'][mode]:.1%}" for name, mode in shares.items()},
        "padding": f"{graphs['padding']:.1%}",
        "late captures": report["captures"],
    }
    shown = {"": [throughput], "milliseconds": latency, "steps": [steps]}
    if settings["speculate"] is not None:
        share = report["accepted"] / max(report["drafted"], 1)
        drafts = {"by": settings["draft"] or "prompt lookup", "a step": settings["speculate"]}
        drafts |= {
            name: f"{report[count]:,}"
            for name, count in (("verified", "drafted"), ("right", "accepted"))
        }
        shown["drafts"] = [{**drafts, "share": f"{share:.1%}"}]
    shown["seconds of the start"] = [
        _started(rank, started) for rank, started in enumerate(report["ranks"])
    ]
    for title, rows in shown.items():
        yield from (Table.of(rows, title), "")


def _started(rank: int, started: dict[str, Any]) -> dict[str, Any]:
    parts = {
        "load": "load",
        "engine": "engine",
        "capture": "capture",
        "until the\nfirst token": "first_token",
    }
    row = {
        "rank": rank,
        "device": started["device"],
        **{name: f"{started[f'{part}_seconds']:.2f}" for name, part in parts.items()},
        "graphs": started["num_graphs"],
        "graphs'\nMiB": f"{started['graph_bytes'] / 2**20:.1f}",
    }
    peak = started["peak_bytes"]
    if peak is None:
        return row
    return row | {"peak\nGiB": f"{peak / 2**30:.2f}"}


def evaluate(options: Bench) -> tuple[dict[str, Any], Iterator[Any]]:
    """Score the file in each mode and split, and return the report and its table.

    Raises:
        RequestError: `read_tasks` or `score` refuses the file.
    """
    with options.about(f"--eval {options.eval}"):
        tasks = read_tasks(str(options.eval))
    splits = [attrs.evolve(options, pp=pp) for pp in options.splits]
    for split in splits:  # refuse a wrong split before the first one runs
        read_config(split)
    scores = [one for split in splits for one in in_ranks(score_modes, split, split, tasks)]
    labels = [{"graph": graph, "stages": num_stages(s)} for s in splits for graph in options.graphs]
    first = scores[0]
    compared = [
        {"difference": one.difference(first), "agrees": one.agrees(first)} for one in scores
    ]
    report = {
        "file": options.eval,
        "dtype": first.dtype,
        "texts": len(first.logprobs),
        "tokens": first.num_tokens,
        "bytes": first.num_bytes,
        "questions": len(first.answers),
        "agree": all(one["agrees"] for one in compared),
        "scores": [a | one.figures | b for a, one, b in zip(labels, scores, compared, strict=True)],
    }
    return report, score_table(report, scores)


def score_modes(here: Here, options: Bench, tasks: Sequence[Task]) -> list[Score]:
    """Run in each process: score one model in each mode, with a new engine for each."""
    model = open_model(options, here)
    scores = []
    for graph in tqdm(options.graphs, desc="eval", unit="mode", disable=not here.progress):
        scores.append(_score(here, options, model, graph, tasks))
        # The last engine may be in reference cycles, and its pages and graphs would stay beside the
        # next engine's.
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # the next engine sizes its KV cache by the free memory
    return scores


def _score(here: Here, options: Bench, model: Model, graph: str, tasks: Sequence[Task]) -> Score:
    """The score in one mode, with one cohort, so that every split runs the same batches."""
    length = min(model.config.max_position_embeddings, _MAX_CONTEXT)
    engine = make_engine(options, here, model, graph, length, num_cohorts=1)
    with options.about(f"--eval {options.eval}"):
        return score(engine, tasks)


def score_table(report: dict[str, Any], scores: Sequence[Score]) -> Iterator[Any]:
    """The scores, and whether the modes agree."""
    counts = f"{report['tokens']} tokens, {report['bytes']} bytes, {report['questions']} questions"
    yield heading(f"{report['file']}: {counts}, {report['dtype']}")
    rows = []
    for one, result in zip(report["scores"], scores, strict=True):
        if one["agrees"]:
            differs = f"{one['difference']:.1e}"
        else:
            differs = "DIFFERS"
        rows.append({"graph": one["graph"], "pp": one["stages"], **result.row, "differs": differs})
    yield from (Table.of(rows), "")
    if len(rows) > 1:
        if report["agree"]:
            how = "score the same"
        else:
            how = "do NOT score the same"
        yield Text(
            f"{len(rows)} modes and splits {how} ('differs': the largest difference of a token's"
            " logprob)."
        )
