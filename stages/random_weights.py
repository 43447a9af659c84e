"""Random parameters, models and adapters for a configuration, drawn on their device: for benchmarks and tests."""

import hashlib
import math
import os
from collections.abc import Collection, Iterable
from pathlib import Path

import torch
from torch import Tensor

from weft.errors import DeviceError
from weft.stages.adapters import Adapter
from weft.stages.checkpoint import (
    Origin,
    assemble,
    checked_device,
    checked_dtype,
    digest_params,
    stage_fields,
)
from weft.stages.config import ModelConfig
from weft.stages.layer_fields import Field, adaptable
from weft.stages.layout import StageLayout, split_model
from weft.stages.model import Model, pick_device, pick_dtype, pick_stage
from weft.stages.params import DecoderParams

_AT_ONCE = 2**28
"""Elements that are drawn at a time: 1 GiB of float32 beside the parameters."""


def random_params(
    config: ModelConfig,
    layout: StageLayout,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    std: float = 0.02,
) -> DecoderParams:
    """Random parameters of the right structure, for benchmarks and tests: normal with deviation `std`.

    A field's values depend on `seed`, its name, the layer and the kind of device alone, so that the stages of any split
    agree with the whole model. Norms are 1 plus the same noise. Weights in FP8 are normal with deviation 16, and their
    scales `std / 16` times a uniform number from 0.5 to 1.5.

    Args:
        config, layout: the model's, and the stage's.
        seed, std: as above.
        device: the device on which they are made.
        dtype: `float32`, `bfloat16` or `float16`; None: the configuration's.

    Raises:
        ConfigError: a dtype that no decoder computes in.
        ProgramError: a layout for another number of layers.
        DeviceError: a device that this machine does not have, or whose memory is too small.
    """
    call = f"random_params(config, {layout!r}, seed={seed})"
    dtype, device = checked_dtype(config, layout, dtype, call), checked_device(device, call)
    fields = dict(stage_fields(config, layout))
    _check_memory(fields.values(), dtype, device, call)

    def draw(path: str, field: Field) -> Tensor:
        digest = hashlib.sha256(f"{seed} {path}".encode()).digest()
        generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:6], "little"))
        whole = torch.empty(field.shape, dtype=field.dtype or dtype, device=device)
        for some in whole.view(-1).split(_AT_ONCE):
            some.copy_(_noise(path, field, some, std, generator))
        return _without_gaps(field, whole)

    tensors = {path: draw(path, field) for path, field in fields.items()}
    return assemble(config, layout, tensors, device)


def _check_memory(fields: Iterable[Field], dtype: torch.dtype, device: torch.device, call: str) -> None:
    """Refuse parameters larger than the device's whole memory: on a CPU the process would be killed."""
    wanted = sum(math.prod(field.shape) * (field.dtype or dtype).itemsize for field in fields)
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if wanted > there:
        seen = f"weights of {wanted / 2**30:.1f} GiB, and {device} has {there / 2**30:.1f} GiB of memory"
        raise DeviceError(call, seen, "more stages, each on a device of its own, or a smaller model")


def _without_gaps(field: Field, whole: Tensor) -> Tensor:
    """Write zeros outside the parts of the field."""
    if sum(math.prod(part.shape) for part in field.parts) < whole.numel():
        kept = torch.zeros_like(whole, dtype=torch.bool)
        for part in field.parts:
            rows = kept if part.expert is None else kept[part.expert]
            rows[part.start : part.start + part.shape[0], : part.shape[-1]] = True
        whole.view(torch.uint8 if whole.itemsize == 1 else whole.dtype).masked_fill_(~kept, 0)
    return whole


def _noise(path: str, field: Field, like: Tensor, std: float, generator: torch.Generator) -> Tensor:
    noise = torch.empty(like.shape, dtype=torch.float32, device=like.device)
    if path.endswith("_scale"):
        return noise.uniform_(0.5 * std / 16, 1.5 * std / 16, generator=generator)
    if field.dtype is torch.float8_e4m3fn:
        return noise.normal_(0.0, 16.0, generator=generator)
    return noise.normal_(1.0 if "norm" in path else 0.0, std, generator=generator)


def random_model(
    config: ModelConfig,
    *,
    seed: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    stage: tuple[int, int] | None = None,
    name: str = "model",
) -> Model:
    """A model with random weights and without a tokenizer, for benchmarks and tests.

    Args:
        config: the whole model's, from `load_config`, or `parse_config(PRESETS["tiny"], source="tiny")`.
        seed: as in `random_params`.
        device, dtype, stage: as in `weft.load`.
        name: its name; ranks compare it with the seed.

    Raises:
        DeviceError: a device that this machine does not have, or whose memory is too small.
        ProgramError: a stage that is not one of its numbers.
        RequestError: a dtype that no decoder runs in.
    """
    call = f"random_model(config, seed={seed}, device={device!r}, dtype={dtype!r})"
    where, kind = pick_device(device, call=call), pick_dtype(dtype or config.dtype, call=call)
    index, num_stages = pick_stage(stage, call=call)
    layout = split_model(config, num_stages)[index]
    params = random_params(config, layout, seed=seed, device=where, dtype=kind)
    origin = Origin(f"random {name} {seed}", digest_params(params))
    return Model(config, params, None, Path(name), layout=layout, origin=origin)


def random_adapter(config: ModelConfig, names: Collection[str], *, rank: int, seed: int, std: float) -> Adapter:
    """A random adapter for benchmarks and tests: normal with deviation `std`.

    Args:
        config: the base model's.
        names: the linear layers that it changes, as in `Adapter.deltas`.
        rank: the rank of its matrices.
        seed, std: as in `random_params`.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = {name: part for i in range(config.num_layers) for name, (_, _, part) in adaptable(config, i).items()}
    deltas = {}
    for name in names:
        rows, columns = parts[name].shape
        a, b = (torch.randn(size, generator=generator) * std for size in ((rank, columns), (rows, rank)))
        deltas[name] = (a, b)
    return Adapter(deltas, Path(f"random {seed}"))
