"""Decodes served by one GPU as shares of the roofline, by model and batch size: the oldest record
and the newest one.

The roofline is the speed at which the bytes of a step are read at the bandwidth of the data sheet,
and nothing else takes time: `predict_decode` with a `Machine` that has only a bandwidth. A step
reads the weights (of experts as many as random routing chooses), the keys and values of each
request, of as many tokens as it has on average (258 after 2 tokens in and 512 out), and the logits.
A share compares all output tokens over all seconds, the prompts' included.
"""

import functools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from weft.proofs.evidence.pages.records import RESULTS, Record, span
from weft.stages.config import parse_config
from weft.stages.random_weights import PRESETS
from weft.transforms.pipelines.timing.hardware import Machine
from weft.transforms.pipelines.timing.prediction import predict_decode

# Bytes per second, from the data sheets.
# Not what a copy reaches, as in the benchmarks of kernels: a floor that depends on a measurement
# would move with it.
BANDWIDTHS = {"H200": 4.8e12, "H100": 3.35e12}
# Presets, and their names in print.
MODELS = {
    "qwen3-0.6b": "Qwen3-0.6B, bfloat16",
    "llama-3.2-1b": "Llama-3.2-1B, bfloat16",
    "llama-3.1-8b": "Llama-3.1-8B, bfloat16",
    "qwen2.5-3b": "Qwen2.5-3B, bfloat16",
    "qwen2.5-7b": "Qwen2.5-7B, bfloat16",
    "qwen3-14b": "Qwen3-14B, bfloat16",
    "qwen3-32b-fp8": "Qwen3-32B, FP8",
    "qwen3-30b-a3b-fp8": "Qwen3-30B-A3B, FP8",
}
_INPUT = 2
_OUTPUTS = 512, 256
_LENGTHS = _INPUT, _OUTPUTS[0]
_REQUESTS = 1, 8, 128
_WORKLOADS = "decode", "one", "eight"
_DEFAULT = "full_and_piecewise"


@attrs.frozen(order=True)
class Served:
    """Decodes after 2 tokens in by one GPU, with requests that all arrive at once: runs of one
    build.

    Args:
        time: when the run began (UTC), to the minute, or the day; and which of the builds that took
            turns.
        output_len: the tokens of a completion, 256 or 512.
        speeds: output tokens per second of each run.
    """

    time: tuple[str, int]
    gpu: str
    model: str
    requests: int
    output_len: int = attrs.field(order=False)
    speeds: tuple[float, ...] = attrs.field(order=False)
    record: Record = attrs.field(order=False)

    @property
    def speed(self) -> float:
        """The median of the runs."""
        return statistics.median(self.speeds)

    @property
    def share(self) -> float:
        """Of the roofline."""
        return self.speed / self.most

    @property
    def most(self) -> float:
        """The roofline, in output tokens per second."""
        return roofline(self.gpu, self.model, self.requests, self.output_len)


@functools.cache
def roofline(gpu: str, model: str, requests: int, output_len: int = _OUTPUTS[0]) -> float:
    """The most output tokens per second, by bytes over bandwidth."""
    config = parse_config(PRESETS[model], source=model)
    machine = Machine(bandwidth=BANDWIDTHS[gpu])
    # The mean over a completion: the bytes of a step grow with each token.
    context = _INPUT + output_len // 2
    prediction = predict_decode(
        config, 1, requests=requests, context=context, cohorts=1, machine=machine
    )
    return prediction.chosen.tokens_per_second


def served_alone() -> Iterator[Served]:
    """The decodes in a graph a step of all records of one GPU that tell their time."""
    # One GPU: the names of records of several go on with `x2` or `x4`.
    for path in sorted(RESULTS.glob("????-??-??-h[12]00-*.json")):
        record = Record(path.name, json.loads(path.read_text(encoding="utf-8")))
        by_key: dict[tuple[Any, ...], dict[str, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for model, environment, row in _rows(record):
            if not row.get("batch_invariant"):
                gpu = next(
                    gpu
                    for gpu in BANDWIDTHS
                    if gpu in (environment.get("gpu") or environment["device"])
                )
                if "time" in environment:
                    time = environment["time"][:16].replace("T", " ")
                else:
                    time = record.file[:10]
                length = row.get("output_len", _OUTPUTS[0])
                key = (
                    # Builds that took turns in one run have one time; the newer one comes second.
                    (time, int(row.get("build") == "now")),
                    gpu,
                    model,
                    row["num_requests"],
                    length,
                )
                speeds = row["output_tokens_per_s"]
                by_key[key][row.get("mode", _DEFAULT)] += (
                    speeds if isinstance(speeds, list) else [speeds]
                )
        for key, modes in by_key.items():
            # The default where it was measured: decodes run in the same graphs in both modes.
            speeds = modes.get(_DEFAULT) or modes.get("full_decode_only")
            if speeds:
                yield Served(*key, tuple(speeds), record)


def _rows(record: Record) -> Iterator[tuple[str, Mapping[str, Any], dict[str, Any]]]:
    """The rows of decodes by one GPU, each with its model and the environment that it was measured
    in."""
    data = record.data
    # Without the date, so that each record of a kind is read, and not only the newest.
    name = record.file[11:]
    if "wanted" in data:  # `weft bench --json`
        options = data["wanted"]
        if (options["input_len"], options["output_len"]) == _LENGTHS:
            yield options["preset"], data["environment"], data | {"mode": options["graph"]}
    elif name.startswith(("h200-serving-dense", "h200-serving-moe")):
        if "dense" in name:
            model = "qwen3-0.6b"
        else:
            model = "qwen3-30b-a3b-fp8"
        for row in data["rows"]:
            if row.get("workload") == "decode" and "output_tokens_per_s" in row:
                yield model, data["environment"], row
    elif "decodes-two-builds" in name:
        for row in data["rows"]:
            if (row["input_len"], row["output_len"]) == _LENGTHS:
                yield row["model"], data["environment"], row
    elif name == "h200-http.json" and (data["input_len"], data["output_len"]) == _LENGTHS:
        for entry in data["models"]:
            for row in entry["alone"]:
                yield entry["model"], data["environment"], row
    for run in (*data.get("runs", ()), *data.get("earlier", ())):
        if run.get("stages") == 1:
            for row in run["rows"]:
                # A first pass still compiles and captures.
                is_weft = row.get("engine", "weft") == "weft" and not row.get("first")
                decodes = (
                    row.get("input_len", _INPUT) == _INPUT
                    and row.get("output_len", _OUTPUTS[0]) in _OUTPUTS
                )
                if row["workload"] in _WORKLOADS and is_weft and decodes:
                    yield run["preset"], record.of_run(run).data["environment"], row


def before_and_after() -> dict[tuple[str, str, int], tuple[Served, ...]]:
    """By GPU, model and number of requests the oldest decodes and the newest; only one, where only
    one was measured."""
    by_key: dict[tuple[str, str, int], list[Served]] = defaultdict(list)
    for one in sorted(served_alone()):
        by_key[one.gpu, one.model, one.requests].append(one)
    keys = (
        (gpu, model, requests) for gpu in BANDWIDTHS for model in MODELS for requests in _REQUESTS
    )
    # The second slice is empty where there is one record only, which then stands alone.
    return {key: (*by_key[key][:1], *by_key[key][1:][-1:]) for key in keys if key in by_key}


def roofline_rows() -> Iterator[tuple[str, ...]]:
    """The newest decodes of one GPU, for the page of measurements."""
    for (gpu, model, requests), ends in before_and_after().items():
        newest = ends[-1]
        lengths = f"{_INPUT} in, {newest.output_len} out"
        what = (
            f"{MODELS[model]}: {requests} request{'s' * (requests > 1)}, {lengths}: share of the"
            " roofline"
        )
        most = f"{newest.most:,.0f} tokens/s at {BANDWIDTHS[gpu] / 1e12:g} TB/s"
        if len(ends) > 1:
            first = f"; {ends[0].share:.0%} on {ends[0].time[0]}"
        else:
            first = "; no older record"
        figure = f"{newest.share:.0%}: {span(newest.speeds, '{:,.0f}')} tokens/s"
        yield what, figure, most + first, newest.time[0], f"1 {gpu}", f"`{newest.record.file}`"
