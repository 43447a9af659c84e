"""The processes that run a command's stages: this one, ranks that it starts, or the ranks of torchrun."""

import argparse
import os
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple, cast

import attrs
import torch

from weft.errors import ConfigWarning, DeviceError, ProgramError, RequestError
from weft.stages.model import pick_device
from weft.transforms.cli.shared import counted
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.launch import launch
from weft.transforms.pipelines.transports.local import Local
from weft.transforms.pipelines.transports.threads import Threads

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_IN_PROCESS = ("local", "threads")


@attrs.frozen
class Place:
    """The options that say where a command's stages run.

    Args:
        command: its name in errors, such as `weft bench`.
        stages: None without `--pp`.
        transport, device: None without the flag.
        timeout: seconds that a stage may keep another one waiting.
    """

    command: str
    stages: int | None
    transport: str | None
    device: str | None
    timeout: float = 30.0

    @classmethod
    def of(cls, arguments: argparse.Namespace, stages: int | None) -> "Place":
        """The place that the options of a command ask for."""
        return cls(f"weft {arguments.command}", stages, arguments.transport, arguments.device, arguments.timeout)


@attrs.frozen(eq=False)
class Here:
    """This process's part.

    Args:
        transport: to the other stages.
        num_stages: stages of the whole pipeline.
        device: holds its tensors; None: `load` chooses.
        stage: the stage to load, and the number of stages; None: the whole model.
    """

    transport: Transport
    num_stages: int
    device: torch.device | str | None
    stage: tuple[int, int] | None = None

    @property
    def first(self) -> bool:
        """Whether this process prints."""
        return self.stage is None or self.stage[0] == 0

    def collect(self, value: T) -> list[T]:
        """The value of each process, in order. All processes make the call, in the same order."""
        return self.transport.collect(value) if isinstance(self.transport, Distributed) else [value]


def in_ranks(fn: Callable[[Here, *Ts], T], place: Place, *args: *Ts) -> T | None:
    """Call `fn(here, *args)` in every process of the pipeline, and return the first one's result; None on a rank of
    torchrun that is not the first.

    Args:
        fn: a function of a module (it is pickled by name).

    Raises:
        ProgramError: `--pp` is not torchrun's number of processes, or `--transport` needs several stages.
        DeviceError: a transport that does not serve the device, or fewer GPUs than stages.
        Whatever `fn` raises.
    """
    world = _world()
    if world > 1 and place.stages not in (None, world):
        seen = f"--pp {place.stages} under torchrun with {world} processes"
        raise ProgramError(f"{place.command} --pp {place.stages}", seen, f"--pp {world}, or leave it out")
    if world > 1:
        if place.transport in _IN_PROCESS:
            seen = f"{world} processes of torchrun, and a transport within one process"
            raise ProgramError(f"{place.command} --transport {place.transport}", seen, "no torchrun, or no --transport")
        _check_device(place)
        result = _as_rank(fn, place, *args)
        return result if os.environ["RANK"] == "0" else None
    stages = 1 if place.stages is None else place.stages
    if stages == 1 and place.transport not in (None, *_IN_PROCESS):
        seen = f"one stage, which sends nothing by {place.transport}"
        raise ProgramError(f"{place.command} --transport {place.transport}", seen, "--pp 2 or more, or no --transport")
    if stages == 1 or place.transport in _IN_PROCESS:
        transport = Threads(timeout=place.timeout) if place.transport == "threads" else Local()
        return fn(Here(transport, stages, place.device), *args)
    _check_count(place, _check_device(place))
    return cast(T, launch(_as_rank, stages, fn, place, *args, timeout=place.timeout)[0])


def check_stages(place: Place, num_layers: int) -> None:
    """Refuse more stages than layers, before anything is loaded.

    Raises:
        RequestError: there are more.
    """
    stages = _world() if place.stages is None else place.stages
    if not 1 <= stages <= num_layers:
        seen = f"{counted(stages, 'stage')}; the model has {num_layers} layers"
        raise RequestError(f"{place.command} --pp {stages}", seen, f"from --pp 1 to --pp {num_layers}")


def _world() -> int:
    """The number of torchrun's processes; 1 without torchrun."""
    text = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    if not text.isdecimal():
        raise ProgramError(f"WORLD_SIZE={text!r} weft", "RANK is set, and WORLD_SIZE is not a number", "unset both")
    return int(text)


def _as_rank(fn: Callable[[Here, *Ts], T], place: Place, *args: *Ts) -> T:
    """Call `fn` as one rank."""
    backend: Any = place.transport
    device = None if place.device == "cuda" else place.device  # each rank takes a GPU of its own
    warnings.simplefilter("ignore", ConfigWarning)  # the command has read the configuration before, and warned
    transport = Distributed(device=device, backend=backend, timeout=place.timeout)
    try:
        stage = (transport.rank, transport.num_ranks)
        return fn(Here(transport, transport.num_ranks, transport.device, stage), *args)
    finally:
        transport.close()


def _check_device(place: Place) -> torch.device:
    """The device that ranks run on, unless their transport does not serve it, or one GPU would have to serve all."""
    device = pick_device(place.device, call=f"{place.command} --device {place.device}")
    suiting = ("gloo",) if device.type == "cpu" else ("nccl", "peer")
    if place.transport not in (None, *suiting):
        seen = f"stages on {'the CPU' if device.type == 'cpu' else 'GPUs'}, which {place.transport} does not connect"
        instead = f"--transport {' or '.join(suiting)}, or another --device"
        raise DeviceError(f"{place.command} --transport {place.transport}", seen, instead)
    if device.index is not None and device.type == "cuda":
        seen = "one GPU for several processes, of which each needs its own"
        instead = "--device cuda, or --transport local: all stages in one process, on that GPU"
        raise DeviceError(f"{place.command} --device {place.device}", seen, instead)
    return device


def _check_count(place: Place, device: torch.device) -> None:
    """Refuse more ranks than GPUs."""
    stages, count = place.stages or 1, torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and count < stages:
        seen = f"{counted(count, 'GPU')} for {stages} stages"
        instead = "--transport local (all stages on one GPU), --device cpu, or a smaller --pp"
        raise DeviceError(f"{place.command} --pp {stages}", seen, instead)
