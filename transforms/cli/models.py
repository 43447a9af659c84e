"""The models and engines that a command runs: a folder's, or a preset's with random weights; and drafts."""

from pathlib import Path

from weft.stages.config import ModelConfig, config_in_folder, load_config, parse_config
from weft.stages.layout import split_layers
from weft.stages.model import Model, load
from weft.stages.presets import PRESETS
from weft.stages.random_weights import random_model
from weft.transforms.cli.options import Bench, ModelOptions, RunOptions
from weft.transforms.cli.ranks import Here, world_size
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits, Speculation


def read_config(options: ModelOptions) -> ModelConfig:
    """The configuration of the folder or the preset. It is read before anything is loaded, and so is that of the model
    that drafts.

    Raises:
        CheckpointNotFoundError, ConfigError: there is none, or it has a field that weft does not support.
        RequestError: more stages than layers; without `--pp`, torchrun's processes are the stages.
    """
    if options.draft is not None:
        config_in_folder(Path(options.draft), f"--draft {options.draft}")
    if options.model is None:
        config = parse_config(PRESETS[str(options.preset)], source=f"preset {options.preset!r}")
    else:
        config = config_in_folder(Path(options.model), f"--model {options.model}")
    count = options.stages or world_size()
    with options.about(f"under torchrun with {count} processes" if options.stages is None else f"--pp {count}"):
        split_layers(config.num_layers, count)
    return config


def open_model(options: Bench, here: Here) -> Model:
    """The part of the model that runs in this process."""
    if not options.dummy:
        return load(str(options.model), here.device, options.dtype, stage=here.stage, progress=here.progress)
    config, name = read_config(options), options.model or str(options.preset)
    return random_model(config, seed=options.seed, device=here.device, dtype=options.dtype, stage=here.stage, name=name)


def open_drafts(options: RunOptions, here: Here) -> Speculation | None:
    """The speculation that the options ask for. The draft model is loaded on the first rank alone."""
    count, folder = options.speculate, options.draft
    if count is None or folder is None:
        return None if count is None else Speculation(count)
    return Speculation(count, model=load(folder, here.device, options.dtype) if here.first else load_config(folder))


def make_engine(
    options: Bench, here: Here, model: Model, graph: str, max_model_len: int, num_cohorts: int | None = None
) -> Engine:
    """The engine that the options ask for, in one of the graph modes."""
    limits = EngineLimits(
        max_num_reqs=options.max_num_seqs,
        max_num_tokens=options.tokens_per_step,
        max_model_len=max_model_len,
        num_cohorts=num_cohorts,
    )
    return Engine(
        model,
        limits,
        pipeline=here.num_stages,
        graph=graph,
        transport=here.transport,
        run_ahead=options.run_ahead,
        seed=options.seed,
        speculation=open_drafts(options, here),
    )
