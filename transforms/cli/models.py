"""The models that a command runs: a folder's, or a preset's with random weights; and the model that drafts."""

from pathlib import Path

from weft.stages.checkpoint import Origin, digest_params
from weft.stages.config import ModelConfig, config_in_folder, load_config, parse_config
from weft.stages.layout import split_layers, split_model
from weft.stages.model import Model, load, pick_device, pick_dtype
from weft.stages.random_weights import random_params
from weft.transforms.cli.options import Bench, RunOptions
from weft.transforms.cli.presets import PRESETS
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
        ProgramError: more stages than layers.
        CheckpointNotFoundError, ConfigError: as `read_config`, for the model that drafts.
    """
    if options.draft is not None:
        config_in_folder(Path(options.draft), f"--draft {options.draft}")
    split_layers(config.num_layers, options.stages or world_size())


def open_model(options: Bench, here: Here, *, progress: bool = False) -> Model:
    """The part of the model that runs in this process.

    Raises:
        Whatever `weft.load` raises.
    """
    if not options.dummy:
        return load(str(options.model), here.device, options.dtype, stage=here.stage, progress=progress)
    name, config = options.model or str(options.preset), read_config(options.model, options.preset)
    call = f"random weights for {name!r}"
    device, dtype = pick_device(here.device, call=call), pick_dtype(options.dtype or config.dtype, call=call)
    index, num_stages = here.stage or (0, 1)
    layout = split_model(config, num_stages)[index]
    params = random_params(config, layout, seed=options.seed, device=device, dtype=dtype)
    origin = Origin(f"random {name} {options.seed}", digest_params(params))
    return Model(config, params, None, Path(name), layout=layout, origin=origin)


def open_drafts(options: RunOptions, here: Here) -> Speculation | None:
    """The speculation that the options ask for. The draft model is loaded on the first rank alone.

    Raises:
        Whatever `weft.load` raises.
    """
    count, folder = options.speculate, options.draft
    if count is None or folder is None:
        return None if count is None else Speculation(count)
    return Speculation(count, model=load(folder, here.device, options.dtype) if here.first else load_config(folder))
