"""The page of measurements, its pictures and its data, made from `proofs/results/`: `python -m
weft.proofs.evidence.pages.measured`."""

import csv
import io
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from weft.proofs.evidence.bench.turns.tables import peer_rows, serving_table, summary
from weft.proofs.evidence.pages.pictures import modes, roofline, tiles
from weft.proofs.evidence.pages.predictions import predicted_rows
from weft.proofs.evidence.pages.records import RESULTS, read, served, span, speeds
from weft.proofs.evidence.pages.roofline import MODELS, roofline_rows

PAGE = Path(__file__).parents[2] / "pages" / "measured.md"
DATA = RESULTS / "measured.csv"
PICTURES = (modes, roofline, tiles)
# Each figure with what it is compared with, and where it comes from: one without these cannot be
# checked.
HEADER = ("what", "figure", "against what", "build", "machine", "result file")
_TITLE = """# Measured

What weft is measured against: two tables, two pictures. Every figure, with its build, its machine and its record, is a
row of [measured.csv](../results/measured.csv). `python -m weft.proofs.evidence.pages.measured` makes all of these from
the records in `proofs/results/`; a test compares them. [What was learned](../evidence/NOTES.md) has the conclusions.

## Serving, beside vLLM and the floor

SERVING

- **Cells**: weft's median tokens a second, all tokens for prompts and output tokens otherwise; for one request its
  milliseconds a token. In brackets: how many times as fast as vLLM's median; and for decodes, the share of the speed
  of the *floor*, at which a step's bytes are read at the data sheet's bandwidth and nothing else takes time.
- **Workloads**: decodes have 2 tokens in, and 512 out (1 and 8 requests: 256); *prompts* are 128 requests with 512 in
  and 64 out, *both* 128 with 512 in and 512 out. All requests arrive at once, and draw at temperature 1.
- **How**: both engines were alive on one GPU and took turns, with models of the real dimensions and random weights of
  one distribution; medians are of the passes after the first. torch 2.11, CUDA 13, Triton 3.6. vLLM had no sampler of
  FlashInfer's. DeepGEMM, where named, ran the FP8 layers that are not experts, without its own warm-up.
- **Which**: for each model and type of GPU, the record with vLLM's fastest configuration, then one with no other GPU of
  its host in use, then the newest. ¹ Slow host: its CPU takes longer to prepare a small model's step than the GPU to
  run it. ² The host's other GPU was in use, which slows vLLM's host code: the ratios of small models flatter weft.
  ³ One timed pass only; expect ±25 % noise.
- **The rest**: SUMMARY
  It also has graph modes, two and four GPUs, kernels, starts, memory and accuracy. Figures of different builds or hosts
  do not compare; eager steps and `piecewise` wait for the host, and vary with it.

To measure a model of your own: `python -m weft.proofs.evidence.bench.turns --python PYTHON --models FOLDER --out
RECORDS`, where PYTHON has vLLM, and FOLDER a `config.json`; `--workloads long uneven few_long` has long prompts. The
other benchmarks are modules of `proofs/evidence/bench/` too (`python -m weft.proofs.evidence.bench.serving --help`).

## Overheads, beside CUDA graphs by hand and torch.compile

OVERHEADS

GPUs are H200, if no other is named. Three numbers in a cell are for calls of 3, 30 and 300 tensors. A range is the
least and the greatest of the runs. Curves of decode steps: `proofs/results/2026-11-22-h200-decode-modes.svg`; of
latency over HTTP against load: `proofs/results/2026-11-24-h200-http.svg`.

## Decodes against the roofline

100 % is the floor of the first table: weights (of experts as many as random routing chooses), keys and values of each
request's tokens (258 on average after 2 in and 512 out), and logits. Bars are medians of the runs of the oldest and of
the newest record of one GPU; hosts differ, so the newest may be the slower one.

![Output tokens a second as a share of the roofline, oldest and newest record](roofline.svg)

## Tiles that nobody tuned

On an H100 (SXM) or H200, a model of the time of products, fitted to a search on one H100, chooses each product's tile;
nothing is tried out at run time. Other GPUs have torch's product, and in FP8 a rule. The loss is the time of the
choice over that of the best one in the search, less one; the target is 5 % at the median and 15 % at the worst. Each
sixth of the shapes was predicted by a fit without them (`python -m weft.proofs.evidence.bench.tiles.cross_validation`),
but not without their numbers of tokens: [What was learned](../evidence/NOTES.md) has the losses of both.

![Loss of the chosen tile, by shape and number of tokens](tiles.svg)
"""
# Rows of the table of overheads, by their texts in the data.
_CALL = "host time of a call of a graphified function of 3, 30 and 300 tensors"
_OVERHEADS = (
    f"{_CALL}: tensors read where they are, borrowed results",
    f"{_CALL}: fresh inputs, borrowed results",
    f"{_CALL}: fresh inputs, safe results",
    "Qwen3-0.6B, bfloat16: 128 requests, 2 in, 512 out, `full_and_piecewise`",
    "a message of [64, 2048] bfloat16 to another GPU and back in a graph, `peer`",
    "`all_reduce sum` of [128, 2048] bfloat16 in a graph, `peer`",
    "`weft serve`, qwen3-0.6b: 128 requests, all at once, 2 in, 512 out",
    "`weft serve`, qwen3-30b-a3b-fp8: 128 requests, all at once, 2 in, 512 out",
    "qwen3-0.6b: 128 requests, 2 in, 512 out, batch invariant",
    "llama-3.1-8b: 128 requests, 2 in, 512 out, batch invariant",
    "qwen3-30b-a3b-fp8: 128 requests, 2 in, 512 out, batch invariant",
)


# Model, record, machine, and the record whose eager runs it is compared with.
SERVED = (
    ("Qwen3-0.6B, bfloat16", "h200-serving-dense-modes", "1 GPU", "h200-serving-dense-modes"),
    ("Qwen3-0.6B, bfloat16", "h200-serving-dense", "1 GPU", ""),
    ("Qwen3-0.6B, bfloat16", "h200-serving-dense-slow-host", "1 GPU, slow host", ""),
    ("Qwen3-0.6B, bfloat16", "h200-serving-dense-1", "1 GPU, slow host", ""),
    ("Qwen3-30B-A3B, FP8", "h200-serving-moe", "1 GPU, slow host", ""),
    ("Qwen3-30B-A3B, FP8", "h200-serving-moe-1", "1 GPU, slow host", ""),
    (
        "Qwen3-30B-A3B, FP8",
        "h200x2-serving-moe-peer-modes",
        "2 GPUs, `peer`",
        "h200x2-serving-moe-peer-modes",
    ),
    ("Qwen3-30B-A3B, FP8", "h200x2-serving-moe-peer-eager", "2 GPUs, `peer`, another host", ""),
    (
        "Qwen3-30B-A3B, FP8",
        "h200x2-serving-moe-peer",
        "2 GPUs, `peer`",
        "h200x2-serving-moe-peer-modes",
    ),
    ("Qwen3-30B-A3B, FP8", "h200x2-serving-moe-peer-256", "2 GPUs, `peer`", ""),
    ("Qwen3-30B-A3B, FP8", "h200x4-serving-moe-peer-512", "4 GPUs, `peer`", ""),
)
_TOTAL = "total_tokens_per_s"
# The GPU of a check that has a record of its own, by preset.
_CHECKED = {
    "qwen3-0.6b": "H200",
    "llama-3.2-1b": "H100",
    "llama-3.1-8b": "H100",
    "qwen3-30b-a3b-fp8": "H200",
}
LENGTHS = {"decode": "2 in, 512 out", "mixed": "512 in, 512 out", "prefill": "512 in, 64 out"}


def serving_rows() -> Iterator[tuple[str, ...]]:
    """Tokens a second by mode, against eager steps."""
    for model, name, machine, eager_name in SERVED:
        record = read(name)
        if eager_name:
            eager = served(read(eager_name))
        else:
            eager = {}
        for (workload, mode), rows in served(record).items():
            tpot = [row["tpot"]["p50"] for row in rows]
            times = span(tpot, "{:.2f}" if min(tpot) < 10 else "{:.1f}")
            requests = rows[0]["num_requests"]
            what = (
                f"{model}: {requests} request{'s' * (requests > 1)}, {LENGTHS[workload]}, `{mode}`"
            )
            base = speeds(eager.get((workload, "none"), ()))
            if base and mode != "none":
                # The best of each, since other load on a host only ever makes a run slower.
                against = f"{span((max(speeds(rows)) / max(base),), '{:.1f}')} times eager"
            else:
                against = ""
            yield record.row(
                what,
                f"{span(speeds(rows), '{:,.0f}')} tokens/s, {times} ms a token",
                against,
                machine,
            )


def equality_rows() -> Iterator[tuple[str, ...]]:
    """Rows that count the greedy completions equal to those of eager steps."""
    ends = ("Qwen3-30B-A3B, FP8", "h200-serving-moe-ends", "1 GPU", "")
    checks = (
        (MODELS[preset], f"{gpu.lower()}-check-{preset}", f"1 {gpu}", "")
        for preset, gpu in _CHECKED.items()
    )
    for model, name, machine, _ in (*SERVED, ends, *checks):
        record = read(name)
        for row in (row for row in record.data["rows"] if "equal" in row):
            if name.endswith("ends"):
                more = ", their ends included"
            else:
                more = ""
            length = row["tokens"] // row["prompts"]
            what = (
                f"{model}: greedy completions of {length} tokens after {row['input_len']},"
                f" `{row['mode']}`{more}"
            )
            figure = (
                f"{row['equal']} of {row['prompts']} equal; {row['same']:,} of {row['tokens']:,}"
                " tokens"
            )
            yield record.row(what, figure, f"`{row['against']}` in the same run", machine)


def step_rows() -> Iterator[tuple[str, ...]]:
    """Single decode steps, and the floor that memory sets."""
    record = read("h200-decode-modes")
    bandwidth = f"{record.data['copy_bandwidth'] / 1e12:.2f} TB/s"
    for row in record.data["rows"]:
        if row["context"] == 256 and row["reqs"] in (1, 16, 64, 256):
            requests = f"{row['reqs']} request{'s' * (row['reqs'] > 1)}"
            what = (
                f"Qwen3-0.6B, bfloat16: a decode step of {requests}, context 256, `{row['mode']}`"
            )
            against = f"{row['floor_ms']:.2f} ms: the bytes it must read at {bandwidth}"
            yield record.row(what, f"{row['ms']:.2f} ms", against, "1 GPU, slow host")
    record = read("h200-step-profile-dense")
    step = record.data["profiles"][0]
    what = (
        f"Qwen3-0.6B, bfloat16: a decode step of {step['requests']} requests, context 256,"
        f" `{step['graph']}`"
    )
    yield record.row(
        what,
        f"{step['ms']:.2f} ms",
        f"{step['busy_ms']:.2f} ms: the sum of its kernels, which overlap",
        "1 GPU",
    )


def start_rows() -> Iterator[tuple[str, ...]]:
    """The time until the first token, and the capture of a ladder."""
    record = read("h200x2-start-moe-peer")
    cold, warm = (record.data[which]["ranks"] for which in ("cold", "warm"))
    # The slowest rank: a pipeline has its first token when the last stage has.
    first = [max(rank["first_token_seconds"] for rank in ranks) for ranks in (cold, warm)]
    memory = " and ".join(f"{rank['graph_bytes'] / 2**30:.3f}" for rank in warm)
    machine = "2 GPUs, `peer`"
    what = (
        "Qwen3-30B-A3B, FP8: start to first token, weights made on the GPU, every kernel compiled"
        " before"
    )
    yield record.row(
        what, f"{first[1]:.1f} s", f"{first[0]:.1f} s with none compiled before", machine
    )
    yield record.row(
        f"Qwen3-30B-A3B, FP8: memory of its {warm[0]['num_graphs']} graphs",
        f"{memory} GiB",
        "",
        machine,
    )
    record = read("h200-ladder-capture")
    once, again = record.data["runs"]
    what = (
        f"Qwen3-0.6B, bfloat16: a ladder of {once['graphs']} classes captured, every kernel"
        " compiled before"
    )
    figures = [f"{run['seconds']:.1f} s, {run['bytes'] / 2**30:.3f} GiB" for run in (once, again)]
    estimate = f"{again['estimated_bytes'] / 2**30:.3f} GiB estimated"
    yield record.row(what, figures[0], estimate, "1 GPU")
    yield record.row(
        "the same a second time, in memory that the driver has kept", figures[1], estimate, "1 GPU"
    )


def kernel_rows() -> Iterator[tuple[str, ...]]:
    """The kernels of a layer."""
    record = read("h200-kernels")
    bandwidth = f"{record.data['bandwidth'] / 1e12:.2f} TB/s"
    rows = [row for row in record.data["rows"] if row["model"] == "Qwen3-30B-A3B"]
    for tokens, which in product((8, 64, 128, 256), ("its experts", "all but attention")):
        part = [
            row
            for row in rows
            if row["tokens"] == tokens and (row["kernel"] == "run_experts" or which[0] == "a")
        ]
        # Sums of kernels that were timed one by one. In a step they overlap, so that a layer takes
        # less.
        took, floor = (sum(row[key] for row in part) for key in ("us", "floor_us"))
        what = f"Qwen3-30B-A3B, FP8: a layer on {tokens} tokens, {which}"
        yield record.row(
            what, f"{took:.1f} µs", f"{floor:.1f} µs: its bytes at {bandwidth}", "1 GPU"
        )


def attention_rows() -> Iterator[tuple[str, ...]]:
    """The attention back ends, by kind of shape."""
    record = read("h200-attention")
    by_shape: dict[tuple[str, str], dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in record.data["rows"]:
        by_shape[row["model"], row["shape"]][row["backend"]] = row
    kinds: dict[str, list[dict[str, dict[str, Any]]]] = {
        "decodes": [],
        "prompts": [],
        "decodes among prompts": [],
    }
    for (_, shape), by_backend in by_shape.items():
        # A share of the bandwidth is given for decodes alone.
        is_decode = by_backend["triton"]["share"] is not None
        kinds[
            "decodes" if is_decode else "decodes among prompts" if "decodes" in shape else "prompts"
        ].append(by_backend)
    for kind, shapes in kinds.items():
        rates = span(
            (by_backend["triton"]["rate"] for by_backend in shapes),
            "{:.2f}" if kind == "decodes" else "{:.0f}",
        )
        ratio = span(
            (by_backend["flashinfer"]["us"] / by_backend["triton"]["us"] for by_backend in shapes),
            "{:.2f}",
        )
        what = f"Attention in bfloat16, {len(shapes)} shapes of {kind}: our kernel"
        if kind == "decodes":
            unit = "TB/s"
        else:
            unit = "TFLOP/s"
        yield record.row(
            what, f"{rates} {unit}", f"FlashInfer takes {ratio} times as long", "1 GPU"
        )


def prompt_rows() -> Iterator[tuple[str, ...]]:
    """Prompts served, against the build before."""
    record = read("h200-prompts")
    by_workload: dict[tuple[str, int, int, int], list[dict[str, Any]]] = defaultdict(list)
    for row in record.data["rows"]:
        by_workload[row["model"], row["num_requests"], row["input_len"], row["output_len"]].append(
            row
        )
    for (model, requests, taken, output_len), rows in by_workload.items():
        if taken < 512:
            continue
        before, now = (
            [
                x
                for row in rows
                if row["build"] == build and row["max_num_tokens"] == most
                for x in row[_TOTAL]
            ]
            # Each build with the tokens a step that it had by default.
            for build, most in (("before", 2048), ("now", 8192))
        )
        what = f"{model}, bfloat16: {requests} requests, {taken:,} in, {output_len} out, by default"
        against = f"{span(before, '{:,.0f}')} of the build before, in the same run"
        yield record.row(what, f"{span(now, '{:,.0f}')} tokens/s in all", against, "1 GPU")


def change_rows() -> Iterator[tuple[str, ...]]:
    """Models with custom functions, or a smaller cache, against the same model without."""
    for name in ("qwen3-0.6b", "llama-3.1-8b"):
        record = read(f"h200-changed-{name}")
        times: dict[str, list[float]] = defaultdict(list)
        for row in record.data["rows"]:
            times[row["model"]].append(row["tpot"]["p50"])
        plain = statistics.median(times.pop("plain"))
        taken, output_len = record.data["lengths"]
        for change, tpots in times.items():
            what = (
                f"{name}, bfloat16: {record.data['requests']} requests, {taken:,} in, {output_len} out:"
                f" {change}"
            )
            more = span((100 * (one / plain - 1) for one in tpots), "{:+.1f}")
            against = f"the model as it is, {plain:.3f}; {more} %"
            yield record.row(what, f"{statistics.median(tpots):.3f} ms a token", against, "1 GPU")


def invariant_rows() -> Iterator[tuple[str, ...]]:
    """The cost of batch invariance, and completions compared bit for bit."""
    record = read("h100-batch-invariant-price")
    speeds: dict[tuple[Any, ...], dict[bool, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in record.data["runs"]:
        for row in run["rows"]:
            key = run["preset"], run["stages"], row["num_requests"], row["workload"], row["mode"]
            speeds[key][row["batch_invariant"]].append(
                row[_TOTAL if row["workload"] == "prefill" else "output_tokens_per_s"]
            )
    for (preset, stages, requests, workload, mode), speed in speeds.items():
        if mode == "full_and_piecewise":
            how = "batch invariant"
        else:
            how = f"{mode}, batch invariant"
        what = f"{preset}: {requests} request{'s' * (requests > 1)}, {LENGTHS[workload]}, {how}"
        share = statistics.median(speed[True]) / statistics.median(speed[False])
        figure = f"{span(speed[True], '{:,.0f}')} tokens/s{' in all' * (workload == 'prefill')}"
        against = f"{span(speed[False], '{:,.0f}')} in the fast mode, in the same run: {share:.0%}"
        yield record.row(
            what, figure, against, "1 H100" if stages == 1 else f"{stages} H100, `peer`"
        )
    record = read("h100x2-bits")
    for run in record.data["runs"]:
        ways = [row for row in run["rows"] if row["batch_invariant"]]
        equal = min(row["equal"] for row in ways)
        most = max(row["difference"] for row in ways)
        sizes = f"{ways[0]['completions']} completions, {ways[0]['tokens']:,} tokens"
        what = f"{run['preset']}: {sizes}, in {len(ways) - 1} ways"
        # Beside the differences of the fast mode: without those, no difference at all could mean
        # that the requests never shared a step.
        fast = [row["difference"] for row in run["rows"] if not row["batch_invariant"]]
        figure = f"{equal} equal in every way; logprobs differ by {most:.3g}"
        against = (
            "each alone"
            + f"; the fast mode's logprobs differ by {max(fast, default=0):.2g}" * bool(fast)
        )
        yield record.row(
            what, figure, against, "1 H100" if run["stages"] == 1 else "2 H100, `peer`"
        )


def call_rows() -> Iterator[tuple[str, ...]]:
    """The host's time for one call of a graphified function."""
    record = read("h200-graphify-overhead")
    took = {
        # Older records have the mode under another name.
        (row["what"], row.get("mode") or row["given"], row["captures"], row["leaves"]): row["us"]
        for row in record.data["rows"]
    }

    def cell(what: str, mode: str, captures: int = 1) -> str:
        return ", ".join(
            f"{took[what, mode, captures, leaves]:.{1 if leaves == 3 else 0}f}"
            for leaves in (3, 30, 300)
        )

    replay = ", ".join(
        f"{took['bare replay', 'nothing', 1, leaves]:.1f}" for leaves in (3, 30, 300)
    )
    kinds = {
        "reference, borrowed": (
            "tensors read where they are, borrowed results",
            f"; a bare `CUDAGraph.replay()` {replay}",
        ),
        "fresh, borrowed": (
            "fresh inputs, borrowed results",
            (
                '; `torch.compile(mode="reduce-overhead")`'
                f" {cell('reduce-overhead', 'fresh, borrowed')}"
            ),
        ),
    }
    start = "host time of a call of a graphified function of 3, 30 and 300 tensors"
    for mode, (words, more) in kinds.items():
        against = f"`make_graphed_callables` {cell('make_graphed_callables', mode)}{more}"
        yield record.row(f"{start}: {words}", f"{cell('graphify', mode)} µs", against, "1 GPU")
    yield record.row(
        f"{start}: fresh inputs, safe results",
        f"{cell('graphify', 'fresh, safe')} µs",
        f"the function itself, without a graph {cell('eager', 'fresh, safe')}",
        "1 GPU",
    )
    for mode, words in (
        ("reference, borrowed", kinds["reference, borrowed"][0]),
        ("fresh, safe", "fresh, safe"),
    ):
        one = f"{cell('graphify', mode)} µs with one graph"
        among_many = cell("graphify", mode, 1000)
        turn = cell("graphify, in turn", mode, 1000)
        yield record.row(f"the same, 1,000 graphs held: {words}", f"{among_many} µs", one, "1 GPU")
        yield record.row(
            f"the same, 1,000 graphs called in turn: {words}", f"{turn} µs", one, "1 GPU"
        )


def pipeline_rows() -> Iterator[tuple[str, ...]]:
    """Messages between GPUs, and simulated timelines against measured ones."""
    record = read("h200x2-transfers")
    rows = [row for run in record.data["runs"] for row in run["rows"]]
    floor = f"{span((row['floor_us'] for row in rows), '{:.1f}')} µs: its bytes alone"
    for backend in ("nccl", "peer"):
        took = span((row["graph_us"] for row in rows if row["backend"] == backend), "{:.1f}")
        what = f"a message of [64, 2048] bfloat16 to another GPU and back in a graph, `{backend}`"
        yield record.row(what, f"{took} µs", floor, "2 GPUs")
    names = [
        (f"h200x{n}-timelines-{way}", f"{n} GPUs, `{way}`")
        for n, way in product((2, 4), ("nccl", "peer"))
    ]
    for name, machine in (
        *names,
        ("cpu-timelines-3-gloo", "a CPU, 3 processes, `gloo`, torch 2.13"),
    ):
        record = read(name)
        rows = record.data["rows"]
        off = span((100 * (row["simulated"] / row["measured"] - 1) for row in rows), "{:+.1f}")
        took = span((1e3 * row["measured"] for row in rows), "{:.0f}")
        yield record.row(
            f"simulated time of {len(rows)} pipelines", f"{off} %", f"measured, {took} ms", machine
        )


def shared_rows() -> Iterator[tuple[str, ...]]:
    """Collectives of two GPUs next to NCCL's own, and models whose layers they share next to the
    peer's."""
    record = read("h100x2-collectives")
    took = {
        (row["way"], row["collective"], *row["shape"]): row["graph_us"]
        for row in record.data["rows"]
    }
    for (way, collective, *shape), us in took.items():
        if way == "peer":
            what = f"`{collective}` of {shape} bfloat16 in a graph, `peer`"
            yield record.row(
                what,
                f"{us:.1f} µs",
                f"NCCL's own {took['ncclAllReduce', collective, *shape]:.1f}",
                "2 H100",
            )
    beside = read("h100x2-tensor")
    later = read("h100x2-tensor-later")
    peers = {
        (row["preset"], row["num_requests"]): row["output_tokens_per_s"]
        for row in beside.data["vllm"]["rows"]
    }
    for record, place in ((beside, "2 H100, `peer`"), (later, "2 H100, `peer`, another machine")):
        for run in record.data["runs"]:
            requests = run["rows"][0]["num_requests"]
            what = (
                f"{run['preset']}: {requests} request{'s' * (requests > 1)}, {LENGTHS['decode']},"
                " `--tp 2`"
            )
            # vLLM was measured in this run alone, so that the other machine's figures have nothing
            # beside them.
            if record is beside:
                peer = peers.get((run["preset"], requests))
            else:
                peer = None
            if peer:
                against = f"vLLM 0.24.0 with tensor_parallel_size=2: {span(peer, '{:,.0f}')}"
            else:
                against = ""
            speed = span(speeds(run["rows"]), "{:,.0f}")
            yield record.row(
                f"{what}, build {record.data['build']}", f"{speed} tokens/s", against, place
            )


def http_rows() -> Iterator[tuple[str, ...]]:
    """`weft serve` next to an engine without HTTP, by our client and by vLLM's."""
    record = read("h200-http")
    lengths = f"{record.data['input_len']} in, {record.data['output_len']} out"
    for model in record.data["models"]:
        alone = span((row["output_tokens_per_s"] for row in model["alone"]), "{:,.0f}")
        where = "1 GPU"
        for by, key in (("", "rows"), (", by `vllm bench serve`", "vllm")):
            rates = dict.fromkeys(row["rate"] for row in model[key])
            for rate in rates:
                rows = [row for row in model[key] if row["rate"] == rate]
                times = ", ".join(
                    f"{name.upper()} {span((row[name]['p50'] for row in rows), '{:.1f}')}"
                    for name in ("ttft", "tpot")
                )
                speed = span((row["output_tokens_per_s"] for row in rows), "{:,.0f}")
                if rate == "inf":
                    every = "all at once"
                else:
                    every = f"{rate:g} a second"
                what = (
                    f"`weft serve`, {model['model']}: {rows[0]['requests']} requests, {every},"
                    f" {lengths}{by}"
                )
                if rate == "inf":
                    against = f"{alone} without HTTP"
                else:
                    against = ""
                yield record.row(what, f"{speed} tokens/s; {times} ms", against, where)


def client_rows() -> Iterator[tuple[str, ...]]:
    """Other people's clients against `weft serve`, on a CPU."""
    machine = "a CPU, 2 cores that others used too"
    record = read("cpu-http-vllm-bench")
    for row in record.data["rows"]:
        lengths = f"{row['input_len']} in, {row['output_len']} out"
        if row["backend"] == "openai-chat":
            api = "chats"
        else:
            api = "completions"
        what = (
            f"`vllm bench serve`, {row['model']}: {row['requests']} {api} at {row['rate']} a"
            f" second, {lengths}"
        )
        times = ", ".join(
            f"{name.upper()} {row[name]['p50']:.0f}" for name in ("ttft", "tpot", "itl")
        )
        figure = f"{times} ms; {row['output_tokens_per_s']:,.0f} tokens/s"
        yield record.row(what, figure, f"{row['failed']} failed", machine)
    record = read("cpu-accuracy-http")
    for row in record.data["rows"]:
        what = (
            f"`lm_eval --model {row['api']}`, {record.data['model']}: `{row['task']}`,"
            f" {row['mode']}"
        )
        if "largest_difference" in row:
            more = f", log-likelihoods within {row['largest_difference']:.0e}"
        else:
            more = ""
        against = f"{row['same']} of {row['questions']} answers as of mode none{more}"
        yield record.row(what, f"{row['value']:.3f} ± {row['stderr']:.3f}", against, machine)


def table() -> Iterator[tuple[str, ...]]:
    """All rows."""
    served = (
        serving_rows,
        peer_rows,
        prompt_rows,
        change_rows,
        invariant_rows,
        equality_rows,
        step_rows,
        roofline_rows,
    )
    kernels = kernel_rows, tiles.tile_rows, attention_rows, call_rows
    for rows in (
        *served,
        start_rows,
        *kernels,
        pipeline_rows,
        shared_rows,
        predicted_rows,
        http_rows,
        client_rows,
    ):
        yield from rows()


def overhead_table() -> list[tuple[str, ...]]:
    """A header, and the rows of the data that say what weft adds, each beside something else."""
    rows: dict[tuple[str, str], tuple[str, ...]] = {}
    for what, figure, against, _, machine, _ in table():
        if what in _OVERHEADS and against:
            name = what.replace(f"{_CALL}: ", "host time of a call: ")
            # The first record of each machine: the order of `table` says which one.
            rows.setdefault((what, machine), (name, figure, against, machine))
    ordered = sorted(rows.items(), key=lambda pair: _OVERHEADS.index(pair[0][0]))
    return [("what", "weft", "beside", "machine"), *(row for _, row in ordered)]


def page() -> str:
    """The text of the page."""
    return (
        _TITLE.replace("SERVING", _written(serving_table()))
        .replace("SUMMARY", summary())
        .replace("OVERHEADS", _written(overhead_table()))
    )


def data() -> str:
    """All rows, as CSV."""
    text = io.StringIO()
    # Not the CRLF of the standard, which would make the file differ by the machine that writes it.
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows((*cells, file.strip("`")) for *cells, file in table())
    return text.getvalue()


def _written(rows: Iterable[tuple[str, ...]]) -> str:
    """A table in Markdown, its header first."""
    header, *body = rows
    return "\n".join(
        f"| {' | '.join(cells)} |" for cells in (header, ("---",) * len(header), *body)
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    DATA.write_text(data(), encoding="utf-8")
    for one in PICTURES:
        one.PICTURE.write_text(one.picture(), encoding="utf-8")
    print(PAGE, DATA, *(one.PICTURE for one in PICTURES), sep="\n")
