"""`weft doctor`: the versions, devices, graph back ends and kernels that weft would use here, and
why."""

import json
import os
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
import torch

from weft import __version__
from weft.display.tables import Table
from weft.ops.backends import backends
from weft.transforms.cli.options import Doctor
from weft.transforms.cli.printing import show
from weft.transforms.graphs.backends import make_backend

_PACKAGES = (
    *(
        "triton",
        "flashinfer-python",
        "numpy",
        "safetensors",
        "gguf",
        "tokenizers",
        "hypothesis",
        "transformers",
    ),
    *("starlette", "uvicorn", "pydantic", "prometheus-client", "llguidance"),
)
_REASONS = {"tape": "a record of operators, with a graph's hazards", "cuda": "torch.cuda.CUDAGraph"}


def run(options: Doctor) -> int:
    """Print the report; the exit code is 0."""
    report = examine()
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show(tables(report))
    return 0


def examine() -> dict[str, Any]:
    """The report on this machine, as lists of rows; nothing is changed.

    A version is None if the package is not installed. Memory is in bytes, or None if unknown. A
    capability is a GPU's compute capability, or the vector instructions that torch uses on a CPU. A
    graph back end whose device is None is not used here.
    """
    devices = [*_devices()]
    names = [device["device"] for device in devices]
    installed = {
        package: next(iter(metadata.distributions(name=package)), None) for package in _PACKAGES
    }
    versions = {
        "weft": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    return {
        "versions": versions
        | {"CUDA": torch.version.cuda}
        | {name: d and d.version for name, d in installed.items()},
        "devices": devices,
        "graph_backends": [*_graph_backends(names)],
        "ops": [{"device": name, **attrs.asdict(row)} for name in names for row in backends(name)],
    }


def _devices() -> Iterator[dict[str, Any]]:
    cpu = {"device": "cpu", "name": _cpu_name(), "memory": _cpu_memory()}
    yield {
        **cpu,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    # `device_count` may ask the driver's NVML, which also counts GPUs that CUDA cannot use.
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(index)
        about = {"device": f"cuda:{index}", "name": gpu.name, "memory": gpu.total_memory}
        yield {**about, "capability": f"{gpu.major}.{gpu.minor}", "threads": None}


def _cpu_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        return None


def _cpu_name() -> str:
    try:
        # `platform.processor()` is empty on many Linux systems.
        named = re.search(
            r"^model name\s*: (.*)$",
            Path("/proc/cpuinfo").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    except OSError:
        named = None
    if named:
        return named[1].strip()
    return platform.processor() or platform.machine()


def _graph_backends(devices: list[str]) -> Iterator[dict[str, Any]]:
    """The back end that graphify chooses for each device; without a GPU, also why CUDA graphs are
    not used."""
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


def tables(report: dict[str, Any]) -> Iterator[Any]:
    """The report as tables for a reader."""
    versions = [
        {"package": name, "version": version or ("none" if name == "CUDA" else "not installed")}
        for name, version in report["versions"].items()
    ]
    devices = [
        device
        | {
            "memory": "unknown"
            if device["memory"] is None
            else f"{device['memory'] / 2**30:.1f} GiB"
        }
        for device in report["devices"]
    ]
    graphs = []
    for backend in report["graph_backends"]:
        if backend["device"]:
            chosen = backend["backend"]
        else:
            chosen = f"{backend['backend']}: not used"
        graphs.append(
            {"device": backend["device"] or "none", "back end": chosen, "why": backend["reason"]}
        )
    ops = [
        {("why" if name == "reason" else name): value for name, value in op.items()}
        for op in report["ops"]
    ]
    for title, rows in {
        "versions": versions,
        "devices": devices,
        "graphs": graphs,
        "ops": ops,
    }.items():
        yield from (Table.of(rows, title), "")
