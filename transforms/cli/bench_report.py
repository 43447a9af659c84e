"""`weft bench`, shown: as tables, or as one JSON object."""

import platform
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft import __version__
from weft.transforms.cli.bench import Wanted
from weft.transforms.cli.bench_figures import Figures, Spread


def as_dict(wanted: Wanted, found: Figures) -> dict[str, Any]:
    """Everything, for a JSON object: what was asked, where it ran, what was found. Times are in seconds, but for those
    of requests, which are in milliseconds."""
    asked = attrs.asdict(wanted)
    source, place = asked.pop("source"), asked.pop("place")
    asked = {**source, **asked, **{name: place[name] for name in ("stages", "transport", "device")}}
    return {"wanted": asked, "environment": _environment(found), **attrs.asdict(found)}


def _environment(found: Figures) -> dict[str, Any]:
    on_gpu = found.ranks[0].device.startswith("cuda")
    return {
        "weft": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda if on_gpu else None,
        "device": torch.cuda.get_device_name(found.ranks[0].device) if on_gpu else platform.machine(),
        "python": platform.python_version(),
    }


def show(wanted: Wanted, found: Figures, console: Console | None = None) -> None:
    """Print the tables."""
    console = console or Console(highlight=False)
    stages = max(len(found.ranks), wanted.place.stages or 1)
    title = f"{wanted.source.name}, {stages} stage{'s' * (stages != 1)}, graphs: {wanted.graph}"
    console.print(Text(title, style="bold"), soft_wrap=True)
    drafts = [] if wanted.speculate is None else [_drafts(wanted, found)]
    for table in (_throughput(wanted, found), _latency(found), _graphs(found), *drafts, _start(found)):
        console.print(table)
        console.print()


def _throughput(wanted: Wanted, found: Figures) -> Table:
    table = _table(None, "requests", "in", "out", "seconds", "output tok/s", "total tok/s")
    sizes = (found.num_requests, wanted.input_len, wanted.output_len)
    rates = (found.output_tokens_per_s, found.total_tokens_per_s)
    table.add_row(*map(str, sizes), f"{found.seconds:.3f}", *(f"{rate:,.0f}" for rate in rates))
    return table


def _latency(found: Figures) -> Table:
    table = _table("milliseconds", "", "mean", "p50", "p99")
    rows: dict[str, Spread | None] = {
        "time to the first token (TTFT)": found.ttft,
        "for each token after it (TPOT)": found.tpot,
        "between two tokens (ITL)": found.itl,
    }
    for name, spread in rows.items():
        if spread is not None:
            table.add_row(name, *(f"{value:,.2f}" for value in attrs.astuple(spread)))
    return table


def _graphs(found: Figures) -> Table:
    table = _table("steps", "steps", "whole graphs", "pieces", "eager", "padding", "captured meanwhile")
    shares = (*found.graphs.shares.values(), found.graphs.padding)
    table.add_row(str(found.num_steps), *(f"{share:.1%}" for share in shares), str(found.captures))
    return table


def _drafts(wanted: Wanted, found: Figures) -> Table:
    table = _table("drafts", "by", "a step", "verified", "right", "share")
    share = found.accepted / max(found.drafted, 1)
    counts = (str(wanted.speculate), f"{found.drafted:,}", f"{found.accepted:,}", f"{share:.1%}")
    table.add_row(wanted.draft or "prompt lookup", *counts)
    return table


def _start(found: Figures) -> Table:
    names = ("rank", "device", "load", "engine", "capture", "first\ntoken", "graphs", "their\nMiB")
    on_gpu = any(rank.peak_bytes is not None for rank in found.ranks)
    table = _table("start: seconds of each part, and of all until the first token", *names, *(["peak\nGiB"] * on_gpu))
    for index, rank in enumerate(found.ranks):
        seconds = (rank.load_seconds, rank.engine_seconds, rank.capture_seconds, rank.first_token_seconds)
        sizes = [str(rank.num_graphs), f"{rank.graph_bytes / 2**20:.1f}"]
        sizes += [] if rank.peak_bytes is None else [f"{rank.peak_bytes / 2**30:.2f}"]
        table.add_row(str(index), rank.device, *(f"{value:.2f}" for value in seconds), *sizes)
    return table


def _table(title: str | None, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=True, vertical="bottom", justify="left" if index == 0 else "right")
    return table
