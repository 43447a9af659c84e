"""`weft bench`: serve many requests at once, and time the tokens when the host reads them."""

import gc
import itertools
import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from rich.text import Text
from tqdm import tqdm

from weft import __version__
from weft.arguments.json_text import write_json
from weft.sampling import SamplingParams
from weft.stages.model import Model
from weft.transforms.cli import evaluate
from weft.transforms.cli.models import check_models, open_drafts, open_model, read_config
from weft.transforms.cli.options import Bench
from weft.transforms.cli.printing import check_file, console, counted, table, write_file
from weft.transforms.cli.ranks import Here, in_ranks
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits
from weft.transforms.engine.stats import Stats

_WARM_UP_TOKENS = 8
"""The most tokens that each request of the warm-up generates."""


@attrs.frozen
class RankFigures:
    """The start of one process, in seconds, and its memory.

    Args:
        load_seconds: until the weights are on the device.
        engine_seconds: the state with its KV cache, and the stages.
        capture_seconds: all graphs.
        warm_up_seconds: a few tokens of as many requests as run at once.
        first_token_seconds: from the start of the load until the first of these tokens was read.
        num_graphs, graph_bytes: captured graphs, and their memory, the driver's included.
        peak_bytes: the most GPU memory that torch held; None on a CPU.
    """

    device: str
    load_seconds: float
    engine_seconds: float
    capture_seconds: float
    warm_up_seconds: float = 0.0
    first_token_seconds: float = 0.0
    num_graphs: int = 0
    graph_bytes: int = 0
    peak_bytes: int | None = None


@attrs.frozen
class Served:
    """One serving of requests.

    Args:
        read: for each request, when the host read each of its tokens, in seconds after all requests arrived.
        before, after: the engine's counts.
    """

    read: list[list[float]]
    before: Stats
    after: Stats


def run(options: Bench) -> int:
    """Measure, or evaluate with `--eval`, and print the report; the exit code is 1 if evaluated modes differ."""
    _check(options)
    check_file(options, "--out", options.out)
    progress = sys.stderr.isatty()
    if options.eval is None:
        report = bench(options, progress=progress)
    else:
        report = evaluate.evaluate(options, progress=progress)
    if report is None:
        return 0  # the first rank prints
    text = write_json(report, indent=2)
    if options.out is not None:
        write_file(options, "--out", options.out, text + "\n")
    if options.json:
        print(text)
    elif options.eval is None:
        show(report)
    else:
        evaluate.show(report)
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
        Whatever `check_models`, `weft.load`, `Engine` and `in_ranks` raise.
    """
    config, (input_len, output_len) = read_config(options.model, options.preset), options.lengths
    check_models(options, config)
    if input_len + output_len > (most := config.max_position_embeddings):
        flags, seen = (
            f"--input-len {input_len} --output-len {output_len}",
            f"requests of {input_len + output_len} tokens",
        )
        options.refuse(flags, seen, f"at most {most} together, the model's limit")
    found = in_ranks(_bench, options, options, progress)
    return None if found is None else as_report(options, found)


def _bench(here: Here, options: Bench, progress: bool) -> dict[str, Any]:
    """This process's part: start, warm up, and serve."""
    shows = progress and here.first
    engine, started = start(here, options, shows)
    (found,) = measure(here, engine, options, started, progress=shows)
    return found


def start(here: Here, options: Bench, progress: bool, opened: Model | None = None) -> tuple[Engine, RankFigures]:
    """An engine with all its graphs captured, and how long each part took; of a model that may be `opened` before."""
    times = [time.perf_counter()]
    model = opened or open_model(options, here, progress=progress)
    times.append(_now(model.device))
    limits = EngineLimits(
        max_num_reqs=options.max_num_seqs,
        max_num_tokens=options.tokens_per_step,
        max_model_len=sum(options.lengths),
    )
    engine = Engine(
        model,
        limits,
        pipeline=here.num_stages,
        graph=options.graphs[0],
        transport=here.transport,
        run_ahead=options.run_ahead,
        seed=options.seed,
        speculation=open_drafts(options, here),
    )
    times.append(_now(model.device))
    engine.warm_up()
    times.append(_now(model.device))
    load, made, captured = (b - a for a, b in itertools.pairwise(times))
    return engine, RankFigures(str(model.device), load, made, captured)


def measure(
    here: Here, engine: Engine, options: Bench, started: RankFigures, *, repeats: int = 1, progress: bool = False
) -> Iterator[dict[str, Any]]:
    """The figures of serving all requests, `repeats` times, after a few tokens of as many requests as run at once.

    Prompts are random token ids, which share no pages except by chance.
    """
    draw, device, (input_len, output_len) = random.Random(options.seed), engine.model.device, options.lengths

    def prompts(count: int) -> list[list[int]]:
        return [draw.choices(range(engine.model.config.vocab_size), k=input_len) for _ in range(count)]

    first = prompts(options.max_num_seqs)
    begun = time.perf_counter()
    warm = serve(engine, first, options.temperature, min(output_len, _WARM_UP_TOKENS))
    took = _now(device) - begun
    until = started.load_seconds + started.engine_seconds + started.capture_seconds
    until += min(times[0] for times in warm.read)
    for _ in range(repeats):
        asked = prompts(options.num_prompts)
        gc.collect()
        gc.freeze()  # a collection that walks torch, triton and the model takes 0.1 s, in the middle of a step
        try:
            served = serve(engine, asked, options.temperature, output_len, progress)
        finally:
            gc.unfreeze()
        memory = [graph.memory_analysis() for graph in engine.graphs]
        own = attrs.evolve(
            started,
            warm_up_seconds=took,
            first_token_seconds=until,
            num_graphs=sum(one.num_graphs for one in memory),
            graph_bytes=sum(one.total_bytes for one in memory),
            peak_bytes=torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
        )
        yield figures(served, input_len, here.collect(own))


def serve(
    engine: Engine, prompts: Sequence[Sequence[int]], temperature: float, max_tokens: int, progress: bool = False
) -> Served:
    """Complete prompts that all arrive at once, and note when the host read each token. No completion ends early."""
    sampling, before = SamplingParams(temperature=temperature, ignore_eos=True), engine.stats()
    began = time.perf_counter()
    read: dict[str, list[float]] = {}
    for prompt in prompts:
        read[engine.add(prompt, sampling, max_tokens=max_tokens)] = []
    with tqdm(total=len(prompts) * max_tokens, desc="bench", unit="token", disable=not progress) as bar:
        for output in engine:
            if output.error is not None:
                raise output.error
            read[output.id] += [time.perf_counter() - began] * len(output.token_ids)
            bar.update(len(output.token_ids))
    return Served(list(read.values()), before, engine.stats())


def _now(device: torch.device) -> float:
    """The time, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def figures(served: Served, input_len: int, ranks: Sequence[RankFigures]) -> dict[str, Any]:
    """The figures of requests whose prompts have `input_len` tokens each, as the JSON report has them.

    Seconds run from the arrival of all requests until the last token was read. In milliseconds are `ttft`, from arrival
    to a request's first token; `tpot`, the mean gap between a request's tokens; and `itl`, each of these gaps. The last
    two are None if requests have one token. The shares are those of the steps in each mode, and of padding in all
    computed tokens. `captures` counts the graphs that the start did not capture.
    """
    read, before, after = served.read, served.before, served.after
    seconds, output = max(times[-1] for times in read), sum(map(len, read))
    total = output + input_len * len(read)
    modes = {mode: after.modes.get(mode, 0) - before.modes.get(mode, 0) for mode in ("full", "piecewise", "none")}
    names = "tokens", "padding", "captures", "drafted", "accepted"
    grown = {name: getattr(after, name) - getattr(before, name) for name in names}
    return {
        "num_requests": len(read),
        "output_tokens": output,
        "total_tokens": total,
        "seconds": seconds,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": total / seconds,
        "ttft": spread([times[0] for times in read]),
        "tpot": spread([(times[-1] - times[0]) / (len(times) - 1) for times in read if len(times) > 1]),
        "itl": spread([b - a for times in read for a, b in itertools.pairwise(times)]),
        "num_steps": sum(modes.values()),
        "graphs": {
            "shares": {mode: count / max(sum(modes.values()), 1) for mode, count in modes.items()},
            "padding": grown["padding"] / max(grown["tokens"] + grown["padding"], 1),
        },
        **{name: grown[name] for name in names[2:]},
        "ranks": [attrs.asdict(rank) for rank in ranks],
    }


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """The mean and two percentiles, in milliseconds; None for no values.

    >>> spread([0.001, 0.002, 0.003])
    {'mean': 2.0, 'p50': 2.0, 'p99': 2.98}
    """
    if not seconds:
        return None
    values = 1e3 * np.asarray(seconds)
    found = (values.mean(), *np.percentile(values, [50, 99]))
    return {name: round(float(value), 6) for name, value in zip(("mean", "p50", "p99"), found, strict=True)}


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
    for one in (*shown, table("seconds of the start", ranks)):
        out.print(one)
        out.print()


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
