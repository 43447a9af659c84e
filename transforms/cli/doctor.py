"""`weft doctor`: the versions, devices, graph back ends and kernels that weft would use here, and why."""

import json
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import attrs
import torch

from weft import __version__
from weft.ops.backends import backends
from weft.transforms.cli.options import Doctor
from weft.transforms.cli.printing import console, show_tables, table
from weft.transforms.graphs.backends import make_backend

_PACKAGES = ("triton", "numpy", "safetensors", "tokenizers", "hypothesis", "transformers")
_REASONS = {"tape": "a record of operators, with a graph's hazards", "cuda": "torch.cuda.CUDAGraph"}


def run(options: Doctor) -> int:
    """Print the report; the exit code is 0."""
    report = examine()
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    return 0


def examine() -> dict[str, Any]:
    """The report on this machine, whose parts are rows. It changes nothing.

    A version is None if the package is not installed. Memory is in bytes, None if the system does not tell. A
    capability is a GPU's compute capability, or the vector instructions that torch uses on a CPU. A graph back end
    whose device is None is not used here.
    """
    devices = [*_devices()]
    names = [device["device"] for device in devices]
    own = {"weft": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    return {
        "versions": own | {"CUDA": torch.version.cuda} | {package: _installed(package) for package in _PACKAGES},
        "devices": devices,
        "graph_backends": list(_graph_backends(names)),
        "ops": [{"device": name, **attrs.asdict(row)} for name in names for row in backends(name)],
    }


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> Iterator[dict[str, Any]]:
    names = "device", "name", "memory", "capability", "threads"
    vectors, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    yield dict(zip(names, ("cpu", _cpu_name(), _cpu_memory(), vectors, threads), strict=True))
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(index)
        facts = f"cuda:{index}", gpu.name, gpu.total_memory, f"{gpu.major}.{gpu.minor}", None
        yield dict(zip(names, facts, strict=True))


def _cpu_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _graph_backends(devices: list[str]) -> Iterator[dict[str, Any]]:
    """The back end that graphify chooses for each device; CUDA graphs even if there is no device for them."""
    for device in devices:
        chosen = make_backend(None, [torch.empty(0, device=device)]).name
        yield {"backend": chosen, "device": device, "reason": _REASONS[chosen]}
    if len(devices) == 1:
        yield {"backend": "cuda", "device": None, "reason": no_cuda()}


def no_cuda() -> str:
    """The reason why torch sees no CUDA device."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    return f"torch is built for CUDA {torch.version.cuda}, but finds no device or no driver"


def show(report: dict[str, Any]) -> None:
    """Print the report as tables."""
    versions = [
        {"package": name, "version": version or ("none" if name == "CUDA" else "not installed")}
        for name, version in report["versions"].items()
    ]
    devices = []
    for device in report["devices"]:
        memory = "unknown" if device["memory"] is None else f"{device['memory'] / 2**30:.1f} GiB"
        devices.append(device | {"memory": memory, "threads": device["threads"] or ""})
    graphs = []
    for found in report["graph_backends"]:
        chosen = found["backend"] if found["device"] else f"{found['backend']}: not used"
        graphs.append({"device": found["device"] or "none", "back end": chosen, "why": found["reason"]})
    ops = [{("why" if name == "reason" else name): value for name, value in op.items()} for op in report["ops"]]
    titled = {"versions": versions, "devices": devices, "graphs": graphs, "ops": ops}
    show_tables(console(), *(table(title, rows) for title, rows in titled.items()))
