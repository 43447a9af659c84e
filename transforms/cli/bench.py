"""`weft bench`: serve many requests at once, and time the tokens when the host reads them."""

import argparse
import gc
import itertools
import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import torch
from rich.text import Text
from tqdm import tqdm

from weft import __version__
from weft.arguments.json_text import write_json
from weft.errors import RequestError
from weft.sampling import SamplingParams
from weft.stages.model import Model
from weft.transforms.cli import evaluate
from weft.transforms.cli.presets import WORKLOADS
from weft.transforms.cli.ranks import Here, Place, check_stages, in_ranks
from weft.transforms.cli.shared import MODES, check_writable, console, counted, table, write_file
from weft.transforms.cli.sources import Source, check_drafts, open_drafts
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.setup import EngineLimits
from weft.transforms.engine.stats import Stats

_WARM_UP_TOKENS = 8
"""The most tokens that each request of the warm-up generates."""


@attrs.frozen
class BenchOptions:
    """The options of `weft bench`.

    Args:
        source: the model.
        input_len, output_len: tokens of each prompt, and of each completion.
        num_prompts: requests; all arrive at the start.
        max_num_seqs: requests that run at once.
        max_num_tokens: tokens per step.
        graph: a mode.
        temperature: 0 is greedy.
        seed: of random weights, of the prompts and of sampling.
        run_ahead: steps that are launched before the first of them is read.
        place: where the stages run.
        speculate: tokens drafted per step; None: none.
        draft: the folder of the model that drafts; None: prompt lookup drafts.
    """

    source: Source
    input_len: int
    output_len: int
    num_prompts: int
    max_num_seqs: int
    max_num_tokens: int
    graph: str
    temperature: float
    seed: int
    run_ahead: int
    place: Place
    speculate: int | None = None
    draft: str | None = None

    @property
    def sampling(self) -> SamplingParams:
        """The sampling of every request: none ends before it has all its tokens."""
        return SamplingParams(temperature=self.temperature, ignore_eos=True)


@attrs.frozen
class RankFigures:
    """The start of one process, in seconds, and its memory.

    Args:
        load_seconds: until the weights are on the device.
        engine_seconds: the state with its KV cache, and the stages.
        capture_seconds: all graphs.
        warm_up_seconds: a few tokens of as many requests as run at once.
        first_token_seconds: from the start of the load until the first of these tokens was read; 0 if the model was
            loaded before.
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

    def count(self, name: str) -> int:
        """How much one of the engine's counts grew."""
        return int(getattr(self.after, name) - getattr(self.before, name))

    def modes(self) -> dict[str, int]:
        """The number of steps by mode: whole graphs (`full`), `piecewise`, or the step itself (`none`)."""
        return {m: self.after.modes.get(m, 0) - self.before.modes.get(m, 0) for m in ("full", "piecewise", "none")}

    def graphs(self) -> dict[str, Any]:
        """Which share of the steps ran in each mode, and which share of the computed tokens was padding."""
        modes, padding = self.modes(), self.count("padding")
        shares = {mode: count / max(sum(modes.values()), 1) for mode, count in modes.items()}
        return {"shares": shares, "padding": padding / max(self.count("tokens") + padding, 1)}


def figures(served: Served, input_len: int, ranks: Sequence[RankFigures]) -> dict[str, Any]:
    """The figures of requests whose prompts have `input_len` tokens each, as the JSON report has them.

    Seconds run from the arrival of all requests until the last token was read. In milliseconds are `ttft`, from arrival
    to a request's first token; `tpot`, the mean gap between a request's tokens; and `itl`, each of these gaps. The last
    two are None if requests have one token. `captures` counts the graphs that the start did not capture.
    """
    read = served.read
    seconds, output = max(times[-1] for times in read), sum(map(len, read))
    total = output + input_len * len(read)
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
        "num_steps": sum(served.modes().values()),
        "graphs": served.graphs(),
        "captures": served.count("captures"),
        "drafted": served.count("drafted"),
        "accepted": served.count("accepted"),
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


def run(arguments: argparse.Namespace) -> int:
    """Measure, or evaluate with `--eval`, and print the report; the exit code is 1 if evaluated modes differ."""
    _check(arguments)
    check_writable(arguments.out, f"weft bench --out {arguments.out}")
    progress, place = sys.stderr.isatty(), Place.of(arguments, (arguments.pp or [None])[0])
    dummy = arguments.preset is not None or arguments.load_format == "dummy"
    source = Source(arguments.model, arguments.preset, dummy, arguments.dtype)
    report, code = None, 0
    if arguments.eval is None:
        options = _options(arguments, source, place)
        found = bench(options, progress=progress)
        report = None if found is None else as_report(options, found)
    else:
        report = evaluate.evaluate(_eval_options(arguments, source), place, progress=progress)
        code = 0 if report is None or report["agree"] else 1
    if report is None:
        return 0  # the first rank prints
    text = write_json(report, indent=2)
    if arguments.out is not None:
        write_file(arguments.out, text + "\n", f"weft bench --out {arguments.out}")
    if arguments.json:
        print(text)
    elif arguments.eval is None:
        show(report)
    else:
        evaluate.show(report)
    return code


def _check(arguments: argparse.Namespace) -> None:
    """Refuse flags that contradict each other, or that would count for nothing."""

    def refuse(flag: str, seen: str, instead: str) -> RequestError:
        return RequestError(f"weft bench {flag:.300}", seen, instead)

    if arguments.preset is not None and arguments.load_format == "auto":
        raise refuse("--load-format auto", "a preset has no weights", "--load-format dummy, or --model DIR")
    if arguments.eval is not None:
        names = "workload", "input_len", "output_len", "num_prompts", "temperature", "seed", "speculate", "draft"
        if useless := [name for name in names if getattr(arguments, name) is not None]:
            flag = f"--{useless[0].replace('_', '-')}"
            raise refuse(flag, f"{flag} says what is timed, and --eval times nothing", f"leave out {flag}, or --eval")
        if arguments.preset is not None or arguments.load_format == "dummy":
            seen = "random weights; --eval scores the weights and the tokenizer of a folder"
            raise refuse(f"--eval {arguments.eval}", seen, "--model DIR, without --load-format dummy")
    elif arguments.graph == "all" or len(arguments.pp or []) > 1:
        flag = "--graph all" if arguments.graph == "all" else f"--pp {','.join(map(str, arguments.pp))}"
        raise refuse(flag, "several modes or splits, of which one is timed", "one of them, or --eval FILE")
    if (arguments.input_len is None) != (arguments.output_len is None):
        flag = "--output-len" if arguments.input_len is None else "--input-len"
        raise refuse(flag, "one length of two", "--input-len and --output-len, or --workload")
    if arguments.input_len is not None and arguments.workload is not None:
        seen = "a workload and the lengths that it stands for"
        raise refuse(f"--workload {arguments.workload}", seen, "--workload, or --input-len and --output-len")
    tokens = _max_num_tokens(arguments)
    if tokens < arguments.max_num_seqs:
        seen = f"{tokens} tokens a step for {arguments.max_num_seqs} requests"
        raise refuse(f"--max-num-tokens {tokens}", seen, f"{arguments.max_num_seqs} or more, or a lower --max-num-seqs")
    check_drafts("weft bench", arguments.speculate, arguments.draft)


def _max_num_tokens(arguments: argparse.Namespace) -> int:
    if arguments.max_num_tokens is not None:
        return int(arguments.max_num_tokens)
    return 2048 if arguments.eval is None else int(arguments.max_num_seqs)


def _options(arguments: argparse.Namespace, source: Source, place: Place) -> BenchOptions:
    """The options of a run that is timed, with their defaults, which `--eval` has no use for."""

    def given(name: str, default: Any) -> Any:
        value = getattr(arguments, name)
        return default if value is None else value

    input_len, output_len = WORKLOADS[arguments.workload or "decode"]
    return BenchOptions(
        source=source,
        input_len=given("input_len", input_len),
        output_len=given("output_len", output_len),
        num_prompts=given("num_prompts", 128),
        max_num_seqs=arguments.max_num_seqs,
        max_num_tokens=_max_num_tokens(arguments),
        graph=arguments.graph or "full_and_piecewise",
        temperature=given("temperature", 1.0),
        seed=given("seed", 0),
        run_ahead=arguments.run_ahead,
        place=place,
        speculate=arguments.speculate,
        draft=arguments.draft,
    )


def _eval_options(arguments: argparse.Namespace, source: Source) -> evaluate.EvalOptions:
    return evaluate.EvalOptions(
        source=source,
        file=arguments.eval,
        graphs=MODES if arguments.graph in (None, "all") else (arguments.graph,),
        splits=arguments.pp or (None,),
        max_num_seqs=arguments.max_num_seqs,
        max_num_tokens=_max_num_tokens(arguments),
        run_ahead=arguments.run_ahead,
    )


def bench(options: BenchOptions, *, progress: bool) -> dict[str, Any] | None:
    """The figures; None on a rank of torchrun that is not the first.

    Raises:
        RequestError: requests longer than the model has positions for, or more stages than layers.
        Whatever `weft.load`, `Engine` and `in_ranks` raise.
    """
    config, length = options.source.config(), options.input_len + options.output_len
    check_stages(options.place, config.num_layers)
    positions = config.max_position_embeddings
    if length > positions:
        call = f"weft bench --input-len {options.input_len} --output-len {options.output_len}"
        raise RequestError(call, f"requests of {length} tokens", f"at most {positions} together, the model's limit")
    return in_ranks(measure, options.place, options, progress)


def measure(here: Here, options: BenchOptions, progress: bool) -> dict[str, Any]:
    """This process's part: start, warm up, and serve."""
    shows = progress and here.first
    engine, started = start(here, options, shows)
    draw = random.Random(options.seed)
    own, first = warm_up(engine, options, draw, started)
    first += own.load_seconds + own.engine_seconds + own.capture_seconds
    own = attrs.evolve(own, first_token_seconds=first)
    prompts = make_prompts(engine, options, draw, options.num_prompts)
    with evenly():
        served = serve(engine, prompts, options.sampling, options.output_len, shows)
    return figures(served, options.input_len, here.collect(finish(engine, own)))


def start(here: Here, options: BenchOptions, progress: bool, opened: Model | None = None) -> tuple[Engine, RankFigures]:
    """An engine with all its graphs captured, and how long each part took; of a model that may be `opened` before."""
    times = [time.perf_counter()]
    model = opened or options.source.open(here, progress=progress, seed=options.seed)
    times.append(_now(model.device))
    length = options.input_len + options.output_len
    engine = Engine(
        model,
        EngineLimits(max_num_reqs=options.max_num_seqs, max_num_tokens=options.max_num_tokens, max_model_len=length),
        pipeline=here.num_stages,
        graph=options.graph,
        transport=here.transport,
        run_ahead=options.run_ahead,
        seed=options.seed,
        speculation=open_drafts(here, options.speculate, options.draft, options.source.dtype),
    )
    times.append(_now(model.device))
    engine.warm_up()
    times.append(_now(model.device))
    load, made, captured = (b - a for a, b in itertools.pairwise(times))
    return engine, RankFigures(str(model.device), load, made, captured)


def warm_up(
    engine: Engine, options: BenchOptions, draw: random.Random, started: RankFigures
) -> tuple[RankFigures, float]:
    """Serve a few tokens of as many requests as run at once. Returns the figures with the time that it took, and the
    seconds until the first token was read."""
    prompts = make_prompts(engine, options, draw, options.max_num_seqs)
    begun = time.perf_counter()
    served = serve(engine, prompts, options.sampling, min(options.output_len, _WARM_UP_TOKENS), False)
    took = _now(engine.model.device) - begun
    return attrs.evolve(started, warm_up_seconds=took), min(times[0] for times in served.read)


def make_prompts(engine: Engine, options: BenchOptions, draw: random.Random, count: int) -> list[list[int]]:
    """Prompts of random token ids, which share no pages except by chance."""
    vocabulary = range(engine.model.config.vocab_size)
    return [draw.choices(vocabulary, k=options.input_len) for _ in range(count)]


@contextmanager
def evenly() -> Iterator[None]:
    """Within, the garbage collector skips the objects that exist already: walking those of torch, triton and a model
    takes 0.1 s, in the middle of a step."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def serve(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams, max_tokens: int, progress: bool
) -> Served:
    """Complete prompts that all arrive at once, and note when the host read each token."""
    before = engine.stats()
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


def finish(engine: Engine, started: RankFigures) -> RankFigures:
    """The figures of this process, with the memory of its graphs and tensors."""
    used, device = [graph.memory_analysis() for graph in engine.graphs], engine.model.device
    return attrs.evolve(
        started,
        num_graphs=sum(one.num_graphs for one in used),
        graph_bytes=sum(one.total_bytes for one in used),
        peak_bytes=torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
    )


def _now(device: torch.device) -> float:
    """The time, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def as_report(options: BenchOptions, found: dict[str, Any]) -> dict[str, Any]:
    """The JSON report: the options, the environment, and the figures. Times are in seconds, except for `ttft`, `tpot`
    and `itl`, which are in milliseconds."""
    asked = attrs.asdict(options)
    source, place = asked.pop("source"), asked.pop("place")
    asked = {**source, **asked, **{name: place[name] for name in ("stages", "transport", "device")}}
    device = found["ranks"][0]["device"]
    environment = {
        "weft": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda if device.startswith("cuda") else None,
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine(),
        "python": platform.python_version(),
    }
    return {"wanted": asked, "environment": environment, **found}


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
    shown = [table(None, [throughput]), table("milliseconds", latency), table("steps", [steps])]
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
