"""The models that a command runs: a folder's, or a preset's with random weights; and the model that drafts."""

from pathlib import Path

from weft.stages.config import ModelConfig, config_in_folder, load_config, parse_config
from weft.stages.model import Model, load
from weft.stages.presets import PRESETS
from weft.stages.random_weights import random_model
from weft.transforms.cli.options import Bench, Options, RunOptions
from weft.transforms.cli.ranks import Here, world_size
from weft.transforms.engine.options import Speculation


def read_config(model: str | None, preset: str | None = None) -> ModelConfig:
    """The configuration of a folder, or else of a preset.

    Raises:
        CheckpointNotFoundError, ConfigError: there is none, or it has a field that weft does not support.
    """
    if model is not None:
        return config_in_folder(Path(model), f"--model {model}")
    return parse_config(PRESETS[str(preset)], source=f"preset {preset!r}")


def check_models(options: RunOptions, config: ModelConfig) -> None:
    """Refuse stages and drafts that a model cannot have, before anything is loaded.

    Raises:
        RequestError: more stages than layers.
        CheckpointNotFoundError, ConfigError: as `read_config`, for the model that drafts.
    """
    if options.draft is not None:
        config_in_folder(Path(options.draft), f"--draft {options.draft}")
    check_stages(options, config, options.stages)


def check_stages(options: Options, config: ModelConfig, stages: int | None) -> None:
    """Refuse more stages than layers; without `--pp`, torchrun's processes are the stages."""
    layers, count = config.num_layers, stages or world_size()
    if count > layers:
        flag = f"under torchrun with {count} processes" if stages is None else f"--pp {count}"
        instead = f"use 1 to {layers} stages, so that each owns a layer"
        options.refuse(flag, f"{layers} layers for {count} stages", instead)


def open_model(options: Bench, here: Here, *, progress: bool = False) -> Model:
    """The part of the model that runs in this process."""
    if not options.dummy:
        return load(str(options.model), here.device, options.dtype, stage=here.stage, progress=progress)
    config, name = read_config(options.model, options.preset), options.model or str(options.preset)
    return random_model(config, seed=options.seed, device=here.device, dtype=options.dtype, stage=here.stage, name=name)


def open_drafts(options: RunOptions, here: Here) -> Speculation | None:
    """The speculation that the options ask for. The draft model is loaded on the first rank alone."""
    count, folder = options.speculate, options.draft
    if count is None or folder is None:
        return None if count is None else Speculation(count)
    return Speculation(count, model=load(folder, here.device, options.dtype) if here.first else load_config(folder))
