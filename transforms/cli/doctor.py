"""`weft doctor`: what weft would run on here, and why."""

import os
import platform
from collections.abc import Iterator
from importlib import metadata

import attrs
import torch
from rich.console import Console
from rich.table import Table

from weft import __version__
from weft.ops.table import backends
from weft.transforms.graphs.backends import make_backend

_PACKAGES = {
    "triton": "triton",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "hypothesis": "hypothesis",
    "transformers": "transformers",
}


@attrs.frozen
class Device:
    """A device of this machine.

    Args:
        device: as `--device` takes it.
        name: the maker's.
        memory: in bytes, all of it; None where the system does not say.
        capability: the compute capability of a GPU, the vector instructions that torch uses on a CPU.
        threads: that torch computes with; None on a GPU.
    """

    device: str
    name: str
    memory: int | None
    capability: str
    threads: int | None


@attrs.frozen
class GraphBackend:
    """What `graphify` would capture with on a device, or why a back end is of no use here."""

    backend: str
    device: str | None
    reason: str


@attrs.frozen
class Op:
    """What an op would run as on a device."""

    device: str
    op: str
    implementation: str
    reason: str


@attrs.frozen
class Report:
    """What `weft doctor` found; a version is None where the package is not installed."""

    versions: dict[str, str | None]
    devices: tuple[Device, ...]
    graph_backends: tuple[GraphBackend, ...]
    ops: tuple[Op, ...]


def examine() -> Report:
    """Look at this machine; changes nothing."""
    devices = (_cpu(), *_gpus())
    ops = (
        Op(device.device, row.op, row.implementation, row.reason)
        for device in devices
        for row in backends(device.device)
    )
    return Report(_versions(), devices, tuple(_graph_backends(devices)), tuple(ops))


def _versions() -> dict[str, str | None]:
    own = {
        "weft": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda,
    }
    return own | {name: _installed(package) for name, package in _PACKAGES.items()}


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> Device:
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        memory = None
    return Device("cpu", _cpu_name(), memory, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _gpus() -> Iterator[Device]:
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = torch.cuda.get_device_properties(index)
        yield Device(f"cuda:{index}", found.name, found.total_memory, f"{found.major}.{found.minor}", None)


def _graph_backends(devices: tuple[Device, ...]) -> Iterator[GraphBackend]:
    """What graphify itself chooses for each device, and CUDA graphs even where there is no device for them."""
    reasons = {"tape": "a record of operators, with a graph's hazards", "cuda": "torch.cuda.CUDAGraph"}
    for device in devices:
        chosen = make_backend(None, [torch.empty(0, device=device.device)]).name
        yield GraphBackend(chosen, device.device, reasons[chosen])
    if len(devices) == 1:
        yield GraphBackend("cuda", None, no_cuda())


def no_cuda() -> str:
    """Why torch sees no CUDA device."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    return f"torch is built for CUDA {torch.version.cuda}, but finds no device or no driver"


def show(report: Report, console: Console | None = None) -> None:
    """Print the report as tables."""
    console = console or Console(highlight=False)
    versions = _table("versions", "package", "version")
    for name, version in report.versions.items():
        versions.add_row(name, version or "not installed" if name != "CUDA" else version or "none")
    devices = _table("devices", "device", "name", "memory", "capability", "threads")
    for d in report.devices:
        memory = "unknown" if d.memory is None else f"{d.memory / 2**30:.1f} GiB"
        devices.add_row(d.device, d.name, memory, d.capability, "" if d.threads is None else str(d.threads))
    graphs = _table("graphs", "device", "back end", "why")
    for g in report.graph_backends:
        graphs.add_row(g.device or "none", g.backend if g.device else f"{g.backend}: not used", g.reason)
    ops = _table("ops", "device", "op", "implementation", "why")
    for o in report.ops:
        ops.add_row(o.device, o.op, o.implementation, o.reason)
    for table in (versions, devices, graphs, ops):
        console.print(table)
        console.print()


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index == 0, overflow="fold")
    return table
