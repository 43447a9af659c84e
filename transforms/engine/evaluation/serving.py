"""`measure`: the throughput and latencies of an engine that serves many requests at once."""

import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from tqdm import tqdm

from weft.batches.sampling import SamplingParams
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.stats import Stats

# The most tokens that each request of the warm-up generates.
_WARM_UP_TOKENS = 8


@attrs.frozen(kw_only=True)
class Workload:
    """Requests that all arrive at once. Prompts are random token ids, so that they share no pages
    except by chance.

    Args:
        num_requests: the number of requests.
        input_len, output_len: tokens of each prompt, and of each completion.
        temperature: 0 is greedy.
        seed: the seed of the prompts.
    """

    num_requests: int
    input_len: int
    output_len: int
    temperature: float = 1.0
    seed: int = 0


@attrs.frozen
class RankFigures:
    """The start-up times of one process, in seconds, and its memory.

    Args:
        load_seconds: until the weights are on the device.
        engine_seconds: the state with its KV cache, and the stages.
        capture_seconds: the capture of all graphs.
        warm_up_seconds: a few tokens for as many requests as run at once.
        first_token_seconds: from the start of the load until the host read the first of these
            tokens.
        num_graphs, graph_bytes: the number of captured graphs, and their memory, including the
            driver's.
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
    """The result of serving a workload once.

    Args:
        read: for each request, the seconds from the arrival of all requests until the host read
            each of its tokens.
        before, after: the engine's statistics.
    """

    read: list[list[float]]
    before: Stats
    after: Stats


def start(load: Callable[[], Model], make: Callable[[Model], Engine]) -> tuple[Engine, RankFigures]:
    """Load a model, make its engine, capture all graphs, and time each part."""
    times = [time.perf_counter()]
    model = load()
    times.append(_now(model.device))
    engine = make(model)
    times.append(_now(model.device))
    engine.warm_up()
    times.append(_now(model.device))
    load_seconds, engine_seconds, capture_seconds = (b - a for a, b in itertools.pairwise(times))
    return engine, RankFigures(str(model.device), load_seconds, engine_seconds, capture_seconds)


def measure(
    engine: Engine,
    workload: Workload,
    started: RankFigures,
    *,
    repeats: int = 1,
    progress: bool = False,
) -> Iterator[dict[str, Any]]:
    """Serve all requests `repeats` times, after a warm-up of a few tokens for as many requests as
    run at once; yields the figures.

    Args:
        engine, started: from `start`.
        workload: the requests.
        repeats: how often to serve the whole workload, each time with new prompts.
        progress: show a progress bar.

    Returns:
        The figures of each repeat, from `figures`.

    >>> import weft
    >>> limits = weft.EngineLimits(max_num_reqs=2)
    >>> engine, started = start(lambda: weft.load("demo", "cpu"), lambda model: Engine(model, limits, graph="none"))
    >>> [result] = measure(engine, Workload(num_requests=3, input_len=4, output_len=2), started)
    >>> result["output_tokens"], result["total_tokens"], result["graphs"]["shares"]["none"]
    (6, 18, 1.0)
    """
    draw, device, vocabulary = (
        random.Random(workload.seed),
        engine.model.device,
        range(engine.model.config.vocab_size),
    )

    def prompts(count: int) -> list[list[int]]:
        # New prompts for each pass: the prefix cache would hold those of the warm-up.
        return [draw.choices(vocabulary, k=workload.input_len) for _ in range(count)]

    first = prompts(engine.limits.budget.max_num_reqs)
    begun = time.perf_counter()
    warm = serve(engine, first, workload.temperature, min(workload.output_len, _WARM_UP_TOKENS))
    took = _now(device) - begun
    until = started.load_seconds + started.engine_seconds + started.capture_seconds
    until += min(times[0] for times in warm.read)
    for _ in range(repeats):
        workload_prompts = prompts(workload.num_requests)
        # Before the freeze, which would keep garbage as well.
        gc.collect()
        frozen = gc.get_freeze_count() > 0  # the caller froze objects, which then stay frozen
        if not frozen:
            # A full collection that walks torch, triton and the model would take 0.1 s in the
            # middle of a step.
            gc.freeze()
        try:
            served = serve(
                engine, workload_prompts, workload.temperature, workload.output_len, progress
            )
        finally:
            if not frozen:
                gc.unfreeze()
        memory = [graph.memory_analysis() for graph in engine.graphs]
        rank_figures = attrs.evolve(
            started,
            warm_up_seconds=took,
            first_token_seconds=until,
            num_graphs=sum(one.num_graphs for one in memory),
            graph_bytes=sum(one.total_bytes for one in memory),
            peak_bytes=torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
        )
        most = engine.limits.budget.max_num_tokens
        yield {
            "max_num_tokens": most,
            **figures(served, workload.input_len, engine.transport.collect(rank_figures)),
        }


def serve(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    max_tokens: int,
    progress: bool = False,
) -> Served:
    """Complete prompts that all arrive at once, and record when the host reads each token. No
    completion ends early."""
    # Otherwise the drawn tokens would decide how much work there is to measure.
    sampling = SamplingParams(temperature=temperature, ignore_eos=True)
    before = engine.stats()
    began = time.perf_counter()
    read: dict[str, list[float]] = {}
    for prompt in prompts:
        read[engine.add(prompt, sampling, max_tokens=max_tokens)] = []
    with tqdm(
        total=len(prompts) * max_tokens, desc="bench", unit="token", disable=not progress
    ) as bar:
        for output in engine:
            if output.error is not None:
                raise output.error
            read[output.id] += [time.perf_counter() - began] * len(output.token_ids)
            bar.update(len(output.token_ids))
    return Served(list(read.values()), before, engine.stats())


def _now(device: torch.device) -> float:
    """The time once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def figures(served: Served, input_len: int, ranks: Sequence[RankFigures]) -> dict[str, Any]:
    """The figures of the JSON report, for requests whose prompts have `input_len` tokens each.

    `seconds` run from the arrival of all requests until the last token was read. In milliseconds
    are `ttft`, the time from arrival to a request's first token; `tpot`, the mean gap between a
    request's tokens; and `itl`, the individual gaps. The last two are None if requests have one
    token. `graphs` has the share of the steps in each mode, and the share of padding in all
    computed tokens. `captures` counts graphs that the warm-up had not captured.
    """
    read = served.read
    before = served.before
    after = served.after
    seconds = max(times[-1] for times in read)
    output = sum(map(len, read))
    total = output + input_len * len(read)
    modes = {
        mode: after.modes.get(mode, 0) - before.modes.get(mode, 0)
        for mode in ("full", "piecewise", "none")
    }
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
        "tpot": spread(
            [(times[-1] - times[0]) / (len(times) - 1) for times in read if len(times) > 1]
        ),
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
    """The mean and two percentiles, in milliseconds; None if there are no values.

    >>> spread([0.001, 0.002, 0.003])
    {'mean': 2.0, 'p50': 2.0, 'p99': 2.98}
    """
    if not seconds:
        return None
    values = 1e3 * np.asarray(seconds)
    statistics = (values.mean(), *np.percentile(values, [50, 99]))
    return {
        name: round(float(value), 6)
        for name, value in zip(("mean", "p50", "p99"), statistics, strict=True)
    }
