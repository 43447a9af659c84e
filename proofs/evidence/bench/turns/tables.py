"""weft beside vLLM, by turns on one GPU: the rows of `proofs/results/measured.csv`, and the table of
serving in `proofs/pages/measured.md`."""

from collections.abc import Iterator
from typing import Any

import attrs

from weft.proofs.evidence.pages.records import Record, read, span
from weft.proofs.evidence.pages.roofline import MODELS, roofline

_TOTAL = "total_tokens_per_s"
_DECODES = {"decode", "one", "eight"}
# Workloads, and their columns in the table of serving.
_COLUMNS = {
    "decode": "128 decodes",
    "one": "1 request, ms a token",
    "eight": "8 requests",
    "prefill": "prompts",
    "mixed": "both",
}
# The machine of each record.
_RECORDS = {
    "h200-vllm-two-more": "1 GPU",
    "h200-vllm": "1 GPU",
    "h200-vllm-deep-gemm": "1 GPU",
    "h200-shared-contexts": "1 of 2 GPUs, both in use",
    "h200-shared-among-prompts": "1 of 2 GPUs, both in use",
    "h200-llama-and-long": "1 of 2 GPUs, both in use",
    "h200-two-models-and-few-long": "1 of 2 GPUs, both in use",
    "h100-varied-and-sampled": "1 H100, slow host",
    "h100-all-workloads": "1 H100, slow host",
}


@attrs.frozen
class Turns:
    """The passes of both on one workload.

    Args:
        peer: vLLM's version and libraries.
        row: the figures of the record.
        once: whether each has one pass after the first, so that the medians are of one.
    """

    record: Record
    machine: str
    preset: str
    peer: str
    row: dict[str, Any]
    once: bool

    @property
    def model(self) -> str:
        """Its name in print."""
        return MODELS[self.preset]

    @property
    def gpu(self) -> str:
        """The type of GPU."""
        if "H100" in self.machine:
            return "H100"
        return "H200"

    @property
    def workload(self) -> str:
        """The requests, and their tokens in and out."""
        count = self.row["num_requests"]
        lengths = f"{self.row['input_len']} in, {self.row['output_len']} out"
        if long := self.row.get("num_long"):
            lengths = f"{lengths}, {long} of them {self.row['long_len']} in"
        descriptions = {
            **dict.fromkeys(("varied", "uneven"), f"1 to {lengths}"),
            "sampled": f"{lengths}, top-k, top-p",
        }
        return (
            f"{count} request{'s' * (count > 1)}, {descriptions.get(self.row['workload'], lengths)}"
        )


def turns() -> Iterator[Turns]:
    """All workloads of all records."""
    for name, machine in _RECORDS.items():
        record = read(name)
        for run in (run for run in record.data["runs"] if "vllm" in run):
            library = " with DeepGEMM" * (run["vllm"]["variables"]["VLLM_USE_DEEP_GEMM"] == "1")
            peer = f"vLLM {run['vllm']['version']}{library}"
            once = max(row["repeat"] for row in run["rows"]) <= 1
            for row in run["table"]:
                yield Turns(record.of_run(run), machine, run["preset"], peer, row, once)


def peer_rows() -> Iterator[tuple[str, ...]]:
    """A row for each workload of each record."""
    for one in turns():
        ours, theirs = (
            span((one.row[engine]["min"], one.row[engine]["max"]), "{:,.0f}")
            for engine in ("weft", "vllm")
        )
        if one.row["unit"] == _TOTAL:
            unit = "tokens/s, prompts included"
        else:
            unit = "tokens/s"
        peer = (
            f"{one.peer}: {theirs}; {one.row['ratio']:.2f} times, by"
            f" {'one pass each' if one.once else 'medians'}"
        )
        yield one.record.row(
            f"{one.model}: {one.workload}, by turns", f"{ours} {unit}", peer, one.machine
        )


def newest() -> list[Turns]:
    """The newest of each workload, by model, vLLM's libraries and machine."""
    ordered = sorted(turns(), key=lambda one: one.record.build)
    # The last one of a key stays in a dict, and records are in the order of their time.
    return [*{(one.model, one.peer, one.machine, one.workload): one for one in ordered}.values()]


def serving_table() -> list[tuple[str, ...]]:
    """A header, and a row for each model and type of GPU: weft's medians, the ratios to vLLM's, and
    the shares of the floor's speed."""
    rows: dict[tuple[str, str], dict[tuple[str, str], list[Turns]]] = {}
    for one in newest():
        rows.setdefault((one.model, one.gpu), {}).setdefault((one.peer, one.machine), []).append(
            one
        )
    lines = []
    order = [*MODELS.values()]
    for (model, gpu), ways in sorted(
        rows.items(), key=lambda row: (order.index(row[0][0]), row[0])
    ):
        peer, machine = max(ways, key=lambda way: _preference(way[0], way[1], ways[way]))
        cells = {one.row["workload"]: _cell(one) for one in ways[peer, machine]}
        marks = "¹" * ("slow host" in machine) + "²" * ("both in use" in machine)
        marks += "³" * ways[peer, machine][0].once
        against = peer.removeprefix("vLLM ")
        lines.append((model, against, f"{gpu}{marks}", *(cells.get(name, "") for name in _COLUMNS)))
    return [("model", "vLLM", "GPU", *_COLUMNS.values()), *lines]


def summary() -> str:
    """A sentence on all ratios in the data: how many there are, and the least."""
    ratios = [one.row["ratio"] for one in newest()]
    least = min(one.row["ratio"] for one in turns())
    return (
        f"the data has {len(ratios)} such ratios, also of sampling, varied lengths and long prompts:"
        f" {min(ratios):.2f} or more (once {least:.2f})."
    )


def _preference(peer: str, machine: str, passes: list[Turns]) -> tuple[bool, bool, str]:
    """vLLM's fastest configuration, then a GPU whose neighbour rests, then the newest."""
    return (
        "DeepGEMM" in peer,
        "both in use" not in machine,
        max(one.record.build for one in passes),
    )


def _cell(one: Turns) -> str:
    """weft's median, its ratio to vLLM's, and of decodes the share of the floor's speed."""
    median = one.row["weft"]["median"]
    if one.row["num_requests"] == 1:
        figure = f"{1e3 / median:.2f} ms"
    else:
        figure = f"{median:,.0f}"
    ratio = f"{one.row['ratio']:.2f}"
    if one.row["workload"] in _DECODES:
        most = roofline(one.gpu, one.preset, one.row["num_requests"], one.row["output_len"])
        shown = f"{figure} ({ratio}; {median / most:.0%})"
    else:
        shown = f"{figure} ({ratio})"
    return shown
