"""weft beside vLLM, by turns on one GPU: the rows of `proofs/pages/measured.md`, and a short table
of the newest."""

from collections.abc import Iterator
from typing import Any

import attrs

from weft.proofs.evidence.pages.records import Record, read, span
from weft.proofs.evidence.pages.roofline import MODELS

_TOTAL = "total_tokens_per_s"
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
    model: str
    peer: str
    row: dict[str, Any]
    once: bool

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
                yield Turns(record.of_run(run), machine, MODELS[run["preset"]], peer, row, once)


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


def newest_table() -> list[tuple[str, ...]]:
    """A header with the workloads; then, for each model, vLLM and machine, the newest ratios and
    weft's medians."""
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for one in sorted(turns(), key=lambda one: one.record.build):
        shown = f"{one.row['ratio']:.2f}{'²' * one.once} ({one.row['weft']['median']:,.0f})"
        name = one.workload + "¹" * (one.row["unit"] == _TOTAL)
        rows.setdefault((one.model, one.peer, one.machine), {})[name] = shown
    workloads = dict.fromkeys(name for cells in rows.values() for name in cells)
    ordered = sorted(rows.items(), key=lambda pair: ([*MODELS.values()].index(pair[0][0]), pair[0]))
    lines = ((*key, *(cells.get(name, "") for name in workloads)) for key, cells in ordered)
    return [("model", "against", "machine", *workloads), *lines]
