"""Where figures come from."""

import platform
import time
from typing import Any

import attrs
import torch

from weft.ops.backends import backends


def environment(device: str) -> dict[str, Any]:
    """Where the figures come from."""
    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "none",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "machine": platform.platform(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "ops": [attrs.asdict(row) for row in backends(device)],
    }
