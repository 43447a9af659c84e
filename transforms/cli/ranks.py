"""Where the stages of a command run: in this process, in ranks of its own, or as one of torchrun's."""

import os
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple, cast

import attrs
import torch

from weft.errors import ConfigWarning, DeviceError, ProgramError, RequestError
from weft.stages.model import pick_device
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.launch import launch
from weft.transforms.pipelines.transports.local import Local
from weft.transforms.pipelines.transports.threads import Threads

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@attrs.frozen
class Place:
    """The options of a command that say where its stages run.

    Args:
        command: as its errors name it.
        stages: None where `--pp` was not given.
        transport, device: None where they were not.
        timeout: seconds that a stage may keep another one waiting.
    """

    command: str
    stages: int | None
    transport: str | None
    device: str | None
    timeout: float = 30.0


@attrs.frozen(eq=False)
class Here:
    """This process's part.

    Args:
        transport: to the other stages.
        num_stages: of the pipeline.
        device: where its tensors go; None: `load` chooses.
        stage: which stage to load, and of how many; None: all of the model.
    """

    transport: Transport
    num_stages: int
    device: torch.device | str | None
    stage: tuple[int, int] | None = None

    @property
    def first(self) -> bool:
        """Whether this process is the one that speaks."""
        return self.stage is None or self.stage[0] == 0

    def collect(self, value: T) -> list[T]:
        """The value of each process, in order. All call it, in the same order."""
        return self.transport.collect(value) if isinstance(self.transport, Distributed) else [value]


def in_ranks(fn: Callable[[Here, *Ts], T], place: Place, *args: *Ts) -> T | None:
    """Call `fn(here, *args)` in every process of the pipeline, and return what the first one's returned; None on a rank
    of torchrun's that is not the first.

    Args:
        fn: a function of a module (it is pickled by name).

    Raises:
        ProgramError: `--pp` is not torchrun's number of processes, or there is one stage and a transport of processes.
        DeviceError: fewer GPUs than stages.
        Whatever `fn` raises.
    """
    world = _world()
    if world > 1 and place.stages not in (None, world):
        seen = f"--pp {place.stages} under torchrun with {world} processes"
        raise ProgramError(place.command, seen, f"--pp {world}, or leave it out")
    if world > 1:
        result = _as_rank(fn, place, *args)
        return result if os.environ["RANK"] == "0" else None
    stages = 1 if place.stages is None else place.stages
    if stages == 1 and place.transport not in (None, "local", "threads"):
        seen = f"one stage, which sends nothing by {place.transport}"
        raise ProgramError(f"{place.command} --transport {place.transport}", seen, "--pp 2 or more, or no --transport")
    if stages == 1 or place.transport in ("local", "threads"):
        transport = Threads(timeout=place.timeout) if place.transport == "threads" else Local()
        return fn(Here(transport, stages, place.device), *args)
    _check_devices(place)
    return cast(T, launch(_as_rank, stages, fn, place, *args, timeout=place.timeout)[0])


def check_stages(place: Place, num_layers: int) -> None:
    """Refuse a split that no model of so many layers has, before anything is loaded.

    Raises:
        RequestError: it is so.
    """
    stages = _world() if place.stages is None else place.stages
    if not 1 <= stages <= num_layers:
        seen = f"{stages} stages; the model has {num_layers} layers"
        raise RequestError(f"{place.command} --pp {stages}", seen, "from 1 stage to one a layer")


def _world() -> int:
    """The number of torchrun's processes; 1 without torchrun."""
    text = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    if not text.isdecimal():
        raise ProgramError("weft", f"WORLD_SIZE={text!r} in the environment", "torchrun's number, or unset RANK")
    return int(text)


def _as_rank(fn: Callable[[Here, *Ts], T], place: Place, *args: *Ts) -> T:
    """This process's part, as one rank."""
    backend: Any = place.transport
    warnings.simplefilter("ignore", ConfigWarning)  # the command has read the configuration before, and told
    transport = Distributed(device=place.device, backend=backend, timeout=place.timeout)
    try:
        stage = (transport.rank, transport.num_ranks)
        return fn(Here(transport, transport.num_ranks, transport.device, stage), *args)
    finally:
        transport.close()


def _check_devices(place: Place) -> None:
    """Refuse ranks that would have no GPU, where GPUs are used."""
    call, stages = f"{place.command} --pp {place.stages}", place.stages or 1
    device = pick_device(place.device, call=call)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and count < stages:
        seen = f"{count} GPU{'s' * (count != 1)} for as many stages"
        raise DeviceError(call, seen, "--transport local (all stages on one GPU), --device cpu, or fewer stages")
