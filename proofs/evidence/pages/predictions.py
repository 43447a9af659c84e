"""Predicted against measured decodes of models over several GPUs: `python -m
weft.proofs.evidence.pages.predictions`.

For each kind of GPU, `calibrate` fits two numbers of a `Machine`, its bandwidth and the time of a
kernel, to decodes on one GPU alone. Collectives take what an all-reduce by itself took
(`bench.operators.collectives`), and messages what a message by itself took
(`bench.operators.transfers`). Then `predict_decode` says the time of a token over several GPUs,
without a look at what was measured there.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import attrs
import torch

from weft.display.tables import Table
from weft.meshes.collectives import AllToAll, Collective
from weft.proofs.evidence.pages.records import Record, read
from weft.stages.config import ModelConfig, parse_config
from weft.stages.random_weights import PRESETS
from weft.transforms.pipelines.timing.costs import collective_bytes
from weft.transforms.pipelines.timing.hardware import KERNELS_PER_LAYER, Machine
from weft.transforms.pipelines.timing.prediction import predict_decode

# The mean number of tokens before a new one, with 2 tokens in and 512 out.
_CONTEXT = 2 + 512 // 2


@attrs.frozen
class Decode:
    """A measured decode of 2 tokens in and 512 out, of requests that all arrive at once.

    Args:
        gpu: its kind.
        model: a name in `PRESETS`.
        shards, stages: ranks that share each layer, and pipeline stages.
        requests: their number.
        seconds: the median time per output token, of each run.
        record: that has them.
    """

    gpu: str
    model: str
    shards: int
    stages: int
    requests: int
    seconds: tuple[float, ...]
    record: Record

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return parse_config(PRESETS[self.model], source=self.model)

    @property
    def num_gpus(self) -> int:
        """The ranks."""
        return self.shards * self.stages

    @property
    def measured(self) -> float:
        """The median of the runs."""
        return statistics.median(self.seconds)

    def predicted(self, machine: Machine) -> float:
        """The seconds of a step on a machine, with one cohort a stage, as the engine has it."""
        prediction = predict_decode(
            self.config,
            self.stages,
            shards=self.shards,
            requests=self.requests,
            context=_CONTEXT,
            cohorts=self.stages,
            machine=machine,
        )
        return prediction.chosen.step_time


def _decode(
    gpu: str, model: str, split: tuple[int, int], rows: Sequence[dict[str, Any]], record: Record
) -> Decode:
    seconds = tuple(row["tpot"]["p50"] / 1e3 for row in rows)
    return Decode(gpu, model, *split, rows[0]["num_requests"], seconds, record)


def _grouped(rows: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The rows of decodes in one graph a step, by number of requests."""
    decode_rows = [
        row for row in rows if row.get("workload") == "decode" and row["mode"].startswith("full")
    ]
    # Batch-invariant kernels have other times, and the fit knows one time of a kernel only.
    decode_rows = [row for row in decode_rows if not row.get("batch_invariant")]
    for requests in dict.fromkeys(row["num_requests"] for row in decode_rows):
        yield [row for row in decode_rows if row["num_requests"] == requests]


def decodes() -> Iterator[Decode]:
    """The measured decodes, those on one GPU first."""
    price = read("h100-batch-invariant-price")
    by_model = dict[tuple[str, int], list[dict[str, Any]]]()
    for run in price.data["runs"]:
        # Runs of one model are put together, so that a decode has the median of all.
        by_model.setdefault((run["preset"], run["stages"]), []).extend(run["rows"])
    for (model, stages), rows in by_model.items():
        for group in _grouped(rows):
            yield _decode("H100", model, (1, stages), group, price)
    tensor = read("h100x2-tensor-later")
    for run in tensor.data["runs"]:
        for group in _grouped(run["rows"]):
            yield _decode("H100", run["preset"], (tensor.data["shares"], 1), group, tensor)
    for model, name, stages in (
        ("qwen3-0.6b", "h200-serving-dense-1", 1),
        ("qwen3-0.6b", "h200-serving-dense", 1),
        ("qwen3-30b-a3b-fp8", "h200-serving-moe-1", 1),
        ("qwen3-30b-a3b-fp8", "h200-serving-moe", 1),
        ("qwen3-30b-a3b-fp8", "h200x2-serving-moe-peer", 2),
        ("qwen3-30b-a3b-fp8", "h200x2-serving-moe-peer-256", 2),
        ("qwen3-30b-a3b-fp8", "h200x4-serving-moe-peer-512", 4),
    ):
        record = read(name)
        for group in _grouped(record.data["rows"]):
            yield _decode("H200", model, (1, stages), group, record)
    builds = read("h200-decodes-two-builds")
    for requests in (1, 128):
        rows = [
            row
            for row in builds.data["rows"]
            if (row["model"], row["num_requests"]) == ("llama-3.1-8b", requests)
        ]
        seconds = tuple(ms / 1e3 for row in rows if row["build"] == "now" for ms in row["tpot_ms"])
        yield Decode("H200", "llama-3.1-8b", 1, 1, requests, seconds, builds)


def measured_collective() -> Callable[[Collective], float]:
    """The seconds of a collective of 2 H100s by `peer`: those of the all-to-alls of
    `bench.operators.collectives`, and for any other that of an all-reduce of its bytes. Between the
    measured sizes, and past the largest, they lie on lines."""
    points = dict[bool, list[tuple[int, float]]]()
    for row in read("h100x2-collectives").data["rows"]:
        if row["way"] == "peer":
            is_exchange = row["collective"].startswith("all_to_all")
            points.setdefault(is_exchange, []).append(
                # Two bytes for each element of bfloat16.
                (math.prod(row["shape"]) * 2, row["graph_us"] / 1e6)
            )
    lines = {kind: list(pairwise(curve)) for kind, curve in points.items()}

    def seconds(effect: Collective) -> float:
        size = collective_bytes(effect)
        kind = isinstance(effect, AllToAll)
        place = bisect_left([measured_size for measured_size, _ in points[kind]], size) - 1
        # Sizes beyond the measured ones continue the nearest line.
        (small, fast), (large, slow) = lines[kind][min(max(place, 0), len(lines[kind]) - 1)]
        return fast + (slow - fast) * (size - small) / (large - small)

    return seconds


def calibrate(alone: Sequence[Decode], **links: Any) -> Machine:
    """The machine with the bandwidth and the time of a kernel that fit decodes on one GPU best: by
    least squares of relative errors. A prediction is the bytes over the first, and the number of
    kernels times the second."""
    features = [
        (
            # With a bandwidth of 1 the prediction is the number of bytes. Over what was measured,
            # the errors are relative: a batch of 128 does not outweigh a single request.
            one.predicted(Machine(bandwidth=1.0)) / one.measured,
            KERNELS_PER_LAYER * one.config.num_layers / one.measured,
        )
        for one in alone
    ]
    matrix = torch.tensor(features, dtype=torch.float64)
    # Bytes and kernels differ by many powers of ten, which least squares do not take well.
    scale = matrix.amax(0)
    solution = (
        torch.linalg.lstsq(
            matrix / scale, torch.ones(len(alone), 1, dtype=torch.float64)
        ).solution.flatten()
        / scale
    )
    return Machine(bandwidth=1 / float(solution[0]), kernel=float(solution[1]), **links)


def machines(measurements: Sequence[Decode]) -> dict[str, Machine]:
    """The calibrated machine of each kind of GPU. Both have the messages that were measured on
    H200s."""
    rows = [
        row
        for run in read("h200x2-transfers").data["runs"]
        for row in run["rows"]
        if row["backend"] == "peer"
    ]
    # A round trip is two messages, and its floor is the bytes of both.
    latency = statistics.median((row["graph_us"] - row["floor_us"]) / 2e6 for row in rows)
    link = statistics.median(2 * 64 * 2048 * 2 / row["floor_us"] * 1e6 for row in rows)
    alone = {
        # One GPU alone: a fit that had seen several would predict what it was told.
        gpu: [x for x in measurements if x.gpu == gpu and x.num_gpus == 1]
        for gpu in ("H100", "H200")
    }
    measured: dict[str, Any] = {"H100": {"collective": measured_collective()}, "H200": {}}
    return {
        gpu: calibrate(gpu_decodes, latency=latency, link=link, **measured[gpu])
        for gpu, gpu_decodes in alone.items()
    }


def predicted() -> Iterator[tuple[Decode, float]]:
    """Each measured decode with the seconds that are predicted for a token, by kind of GPU, one GPU
    first."""
    measurements = list(decodes())
    by_gpu = machines(measurements)
    for one in sorted(measurements, key=lambda one: (one.gpu, one.num_gpus > 1)):
        yield one, one.predicted(by_gpu[one.gpu])


def table() -> Table:
    """A row for each measured decode: its measured and its predicted time per token."""
    rows = []
    for one, seconds in predicted():
        rows.append(
            {
                "GPU": one.gpu,
                "model": one.model,
                "--tp": one.shards,
                "--pp": one.stages,
                "requests": one.requests,
                "measured ms": f"{one.measured * 1e3:.2f}",
                "predicted ms": f"{seconds * 1e3:.2f}",
                "error": f"{seconds / one.measured - 1:+.1%}",
                "": "fitted" if one.num_gpus == 1 else "",
            }
        )
    return Table.of(rows)


def predicted_rows() -> Iterator[tuple[str, ...]]:
    """The decodes over several GPUs, for the page of measurements."""
    for one, seconds in predicted():
        if one.num_gpus > 1:
            requests = f"{one.requests} request{'s' * (one.requests > 1)}, 2 in, 512 out"
            what = (
                f"{one.model}: {requests}, `--tp {one.shards} --pp {one.stages}`: predicted from"
                " one GPU"
            )
            against = f"{one.measured * 1e3:.2f} ms measured: {seconds / one.measured - 1:+.0%}"
            yield one.record.row(
                what, f"{seconds * 1e3:.2f} ms a token", against, f"{one.num_gpus} {one.gpu}"
            )


if __name__ == "__main__":
    print(table())
    for gpu, machine in machines(list(decodes())).items():
        speeds = f"--bandwidth {machine.bandwidth / 1e9:.0f} --link {machine.link / 1e9:.0f}"
        times = f"--latency {machine.latency * 1e6:.2f} --kernel {machine.kernel * 1e6:.2f}"
        print(f"{gpu}: weft plan {speeds} {times} ...")
