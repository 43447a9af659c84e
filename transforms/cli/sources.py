"""Where a command's model comes from: a folder, or a preset and random weights."""

from pathlib import Path

import attrs

from weft.stages.config import ModelConfig, config_in_folder, parse_config
from weft.stages.digest import Origin, digest_params
from weft.stages.model import Model, load, pick_device, pick_dtype
from weft.stages.random_weights import random_params
from weft.stages.split import split_model
from weft.transforms.cli.presets import PRESETS
from weft.transforms.cli.ranks import Here


@attrs.frozen
class Source:
    """A model to be had.

    Args:
        model: a folder; None: the preset's.
        preset: a name in `PRESETS`; None: the folder's.
        dummy: whether the weights are random, drawn where they will stand; else they are the folder's.
        dtype: of the weights; None: what the configuration declares.
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
        """Its configuration, as `read_config` does."""
        return read_config(self.model, self.preset)

    def open(self, here: Here, *, progress: bool, seed: int = 0) -> Model:
        """The part of it that runs in this process.

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
