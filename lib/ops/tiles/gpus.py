"""The GPU for which tiles are chosen."""

import functools

import attrs
import torch


@attrs.frozen
class Device:
    """A GPU's multiprocessors, and its bandwidth (bytes/s) and bfloat16 peak (operations/s) from
    the data sheet."""

    processors: int
    bandwidth: float
    peak: float


# The GPU on which tiles were measured, an H100 with 80 GB.
MEASURED = Device(132, 3.35e12, 989e12)
# The supported GPUs by the name that CUDA reports.
_DEVICES = {"NVIDIA H100 80GB HBM3": MEASURED, "NVIDIA H200": Device(132, 4.8e12, 989e12)}


@functools.cache
def device() -> Device | None:
    """This machine's first GPU, or an H100 if there is none; None: a GPU without measurements,
    whose tiles are chosen by rule."""
    if not torch.cuda.is_available():
        return MEASURED
    properties = torch.cuda.get_device_properties(0)
    facts = _DEVICES.get(properties.name)
    # The measurements hold for a whole GPU, not for a part of one.
    if facts is not None and facts.processors == properties.multi_processor_count:
        return facts
    return None
