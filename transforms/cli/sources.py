"""The models that a command runs: a folder's, or a preset's with random weights; and the model that drafts."""

from pathlib import Path

import attrs

from weft.errors import RequestError
from weft.stages.checkpoint import Origin, digest_params
from weft.stages.config import ModelConfig, config_in_folder, load_config, parse_config
from weft.stages.layout import split_model
from weft.stages.model import Model, load, pick_device, pick_dtype
from weft.stages.random_weights import random_params
from weft.transforms.cli.presets import PRESETS
from weft.transforms.cli.ranks import Here
from weft.transforms.engine.speculation import Speculation


@attrs.frozen
class Source:
    """A model that a command can load.

    Args:
        model: a folder; None: the preset.
        preset: a name in `PRESETS`; None: the folder.
        dummy: whether the weights are random, drawn on the device, instead of the folder's.
        dtype: of the weights; None: the one that the configuration declares.
    """

    model: str | None
    preset: str | None
    dummy: bool
    dtype: str | None

    @property
    def name(self) -> str:
        """The folder, or the preset."""
        return self.model or str(self.preset)

    def config(self) -> ModelConfig:
        """The configuration, as `read_config` reads it."""
        return read_config(self.model, self.preset)

    def open(self, here: Here, *, progress: bool, seed: int = 0) -> Model:
        """The part of the model that runs in this process.

        Raises:
            Whatever `weft.load` raises.
        """
        if not self.dummy:
            return load(self.name, here.device, self.dtype, stage=here.stage, progress=progress)
        call, config = f"random weights for {self.name!r}", self.config()
        device = pick_device(here.device, call=call)
        dtype = pick_dtype(self.dtype or config.dtype, call=call)
        index, num_stages = here.stage or (0, 1)
        layout = split_model(config, num_stages)[index]
        params = random_params(config, layout, seed=seed, device=device, dtype=dtype)
        origin = Origin(f"random {self.name} {seed}", digest_params(params))
        return Model(config, params, None, Path(self.name), layout=layout, origin=origin)


def read_config(model: str | None, preset: str | None) -> ModelConfig:
    """The configuration of a folder, or else of a preset.

    Raises:
        CheckpointNotFoundError, ConfigError: there is none, or it has a field that weft does not support.
    """
    if model is not None:
        return config_in_folder(Path(model), f"--model {model}")
    return parse_config(PRESETS[str(preset)], source=f"preset {preset!r}")


def check_drafts(command: str, count: int | None, folder: str | None) -> None:
    """Refuse a draft model without a number of drafts, or one that is not there.

    Raises:
        RequestError: `--draft` without `--speculate`.
        CheckpointNotFoundError, ConfigError: as `read_config`.
    """
    if folder is not None and count is None:
        raise RequestError(f"{command} --draft {folder:.300}", "no --speculate", "--draft DIR --speculate K")
    if folder is not None:
        config_in_folder(Path(folder), f"--draft {folder}")


def open_drafts(here: Here, count: int | None, folder: str | None, dtype: str | None) -> Speculation | None:
    """The speculation that the options ask for. The draft model is loaded on the first rank alone.

    Raises:
        Whatever `weft.load` raises.
    """
    if count is None:
        return None
    if folder is None:
        return Speculation(count)
    return Speculation(count, model=load(folder, here.device, dtype) if here.first else load_config(folder))
