"""What `weft generate` does: in this process, in ranks of its own, or as one of torchrun's."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import attrs
import torch

from weft.errors import DeviceError, ProgramError, RequestError
from weft.stages.config import load_config
from weft.stages.model import Model, load, pick_device
from weft.transforms.generate import Completion, generate
from weft.transforms.transports import Transport
from weft.transforms.transports.distributed import Distributed
from weft.transforms.transports.launch import launch
from weft.transforms.transports.local import Local
from weft.transforms.transports.threads import Threads


@attrs.frozen
class Wanted:
    """The options of `weft generate`; `stages` is None where `--pp` was not given."""

    model: str
    prompts: Sequence[str | list[int]]
    max_tokens: int
    temperature: float
    seed: int | None
    graph: str
    device: str | None
    dtype: str | None
    transport: str | None
    stages: int | None


Completed = tuple[list[str], list[Completion] | None]
"""The prompts as text, or as ids in the form that `--prompt-ids` takes, and what completes them."""


def complete(wanted: Wanted, *, progress: bool) -> Completed:
    """The completions; None on a rank of torchrun's that is not the first.

    Raises:
        ProgramError: `--pp` is not torchrun's number of processes.
        RequestError: no stage, or more of them than layers.
        DeviceError: fewer GPUs than stages.
        Whatever `weft.load` and `weft.generate` raise.
    """
    world = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if world > 1 and wanted.stages not in (None, world):
        seen = f"--pp {wanted.stages} under torchrun with {world} processes"
        raise ProgramError("weft generate", seen, f"--pp {world}, or leave it out")
    wanted = attrs.evolve(wanted, stages=world if wanted.stages is None else wanted.stages)
    _check_stages(wanted)
    if world > 1:
        prompts, completions = complete_rank(wanted, progress)
        return prompts, completions if os.environ["RANK"] == "0" else None
    if wanted.stages == 1 or wanted.transport in ("local", "threads"):
        return _complete(
            wanted, load(wanted.model, wanted.device, wanted.dtype, progress=progress), _here(wanted), progress
        )
    _check_devices(wanted)
    return cast(Completed, launch(complete_rank, wanted.stages or 1, wanted, progress)[0])


def complete_rank(wanted: Wanted, progress: bool) -> Completed:
    """This process's part, as one rank."""
    backend: Any = wanted.transport
    transport = Distributed(device=wanted.device, backend=backend)
    shows = progress and transport.rank == 0
    stage = (transport.rank, transport.num_ranks)
    model = load(wanted.model, transport.device, wanted.dtype, stage=stage, progress=shows)
    try:
        return _complete(wanted, model, transport, shows)
    finally:
        transport.close()


def _here(wanted: Wanted) -> Transport:
    return Threads() if wanted.transport == "threads" else Local()


def _complete(wanted: Wanted, model: Model, transport: Transport, progress: bool) -> Completed:
    completions = generate(
        model,
        wanted.prompts,
        max_tokens=wanted.max_tokens,
        temperature=wanted.temperature,
        seed=wanted.seed,
        pipeline=wanted.stages or 1,
        graph=wanted.graph,
        transport=transport,
        progress=progress,
    )
    return [_shown(model, prompt) for prompt in wanted.prompts], completions


def _shown(model: Model, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return ",".join(map(str, prompt)) if model.tokenizer is None else str(model.decode(prompt))


def _check_stages(wanted: Wanted) -> None:
    layers = load_config(Path(wanted.model)).num_layers
    if not 1 <= (wanted.stages or 0) <= layers:
        call, seen = f"weft generate --pp {wanted.stages}", f"{wanted.stages} stages; the model has {layers} layers"
        raise RequestError(call, seen, "from 1 stage to one a layer")


def _check_devices(wanted: Wanted) -> None:
    """Refuse ranks that would have no GPU, where GPUs are used."""
    device = pick_device(wanted.device, call=f"weft generate --pp {wanted.stages}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and count < (wanted.stages or 1):
        call, seen = f"weft generate --pp {wanted.stages}", f"{count} GPU{'s' * (count != 1)} for as many stages"
        raise DeviceError(call, seen, "--transport local (all stages on one GPU), --device cpu, or fewer stages")
