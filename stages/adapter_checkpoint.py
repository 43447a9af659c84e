"""`load_adapter`: a LoRA in the format of PEFT's `save_pretrained`."""

import os
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.arguments import kind_of
from weft.errors import CheckpointError, CheckpointNotFoundError, ConfigError, RequestError
from weft.stages.adapter_config import LoraConfig, parse_lora
from weft.stages.adapters import Adapter, adaptable
from weft.stages.checkpoint import FLOATS, list_some, open_tensors
from weft.stages.config import read_object
from weft.stages.digest import Origin, digest_files, digest_params
from weft.stages.model import Model

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<which>[AB])\.weight")


def load_adapter(model: Model, folder: str | os.PathLike[str]) -> Adapter:
    """Load a LoRA adapter: adapter_config.json and adapter_model.safetensors, as PEFT's `save_pretrained` writes them.

    Any of the linear layers of attention and of feed-forward blocks may be changed, but for experts. Of a model that is
    one stage of a pipeline, only that stage's layers are read. Values are float32, and computed with in the dtype of
    the model's activations.

    Args:
        model: the base model of the adapter.
        folder: a local folder.

    Raises:
        CheckpointNotFoundError: no folder, or one of the two files is missing.
        ConfigError: adapter_config.json has a field that weft does not support: another kind of adapter, a bias, DoRA,
            modules that are saved whole.
        CheckpointError: a file is damaged; a tensor is missing, of another shape than the model and the configuration
            say, or of something that weft does not adapt.
        RequestError: no model, or no folder.
    """
    _check_arguments(model, folder)
    call, path = f"weft.load_adapter({model!r}, {os.fspath(folder)!r:.300})", Path(folder)
    _check_files(path, call)
    config = parse_lora(read_object(path / _CONFIG, call), call)
    parts = {n: part for i in range(model.config.num_layers) for n, (_, _, part) in adaptable(model.config, i).items()}
    pairs = _changed(config, parts, call)
    wanted = set(pairs)
    own = {name for i in model.layout.layers for name in adaptable(model.config, i)} & wanted
    with ExitStack() as stack:
        handle = stack.enter_context(open_tensors(path / _WEIGHTS, "cpu", call))
        _check_names(list(handle.keys()), wanted, call)
        deltas = {name: _read(handle, name, pairs[name], parts[name].shape, call) for name in parts if name in own}
    origin = Origin(digest_files(path, (path / _CONFIG, path / _WEIGHTS)), digest_params(deltas))
    return Adapter(deltas, path, origin=origin)


def _check_arguments(model: Any, folder: Any) -> None:
    if not isinstance(model, Model) or not isinstance(folder, str | os.PathLike):
        seen = f"{kind_of(model)} and {kind_of(folder)}"
        raise RequestError(
            "weft.load_adapter(model, folder)", seen, "model = weft.load(folder) first, then the adapter's folder"
        )


def _changed(config: LoraConfig, names: Iterable[str], call: str) -> dict[str, tuple[int, float]]:
    """Of these linear layers those that have a pair of matrices: its rank and its scaling."""
    try:
        return {name: (config.rank_of(name), config.scaling_of(name)) for name in names if config.changes(name)}
    except ConfigError as error:
        raise ConfigError(call, f"{_CONFIG} has {error.call}, and {error.seen}", error.instead) from None


def _check_files(path: Path, call: str) -> None:
    for name in (_CONFIG, _WEIGHTS):
        if not os.path.isfile(path / name):
            seen, instead = f"{str(path)!r:.300} has no {name}", "pass a folder that PEFT's save_pretrained wrote"
            if os.path.isfile(path / "adapter_model.bin"):
                seen, instead = f"{seen}, only adapter_model.bin", "save it again, as safetensors"
            raise CheckpointNotFoundError(call, seen, instead)


def _check_names(names: list[str], wanted: set[str], call: str) -> None:
    found = {name: _NAME.fullmatch(name) for name in names}
    if strange := [name for name, match in found.items() if match is None or match["layer"] not in wanted]:
        seen = f"{_WEIGHTS} has {list_some(strange)}, which {_CONFIG} or the model does not explain"
        if not wanted:
            seen = f"{_CONFIG} names no module of the model that can be adapted; {_WEIGHTS} has {list_some(strange)}"
        instead = "adapters of the model's own q, k, v, o, gate, up and down projections alone, none of experts"
        raise CheckpointError(call, seen, instead)
    if missing := [name for name in sorted(wanted) if any(_tensor(name, which) not in found for which in "AB")]:
        seen = f"{_WEIGHTS} has no pair of matrices for {list_some(missing)}, and {_CONFIG} says so"
        raise CheckpointError(call, seen, "check that the two files, and the base model, belong together")
    if not wanted:
        raise ConfigError(call, f"{_CONFIG} names no layer of the model", "an adapter of this model")


def _tensor(name: str, which: str) -> str:
    return f"base_model.model.{name}.lora_{which}.weight"


def _read(
    handle: Any, name: str, wanted: tuple[int, float], shape: tuple[int, ...], call: str
) -> tuple[Tensor, Tensor]:
    """The pair of matrices of a linear layer `[out, in]`, of this rank, the scaling in the second."""
    (rows, columns), (rank, scaling), pair = shape, wanted, []
    for which, size in (("A", (rank, columns)), ("B", (rows, rank))):
        view = handle.get_slice(_tensor(name, which))
        seen = f"{_tensor(name, which)} is {view.get_dtype()} {tuple(view.get_shape())}"
        if tuple(view.get_shape()) != size or view.get_dtype() not in FLOATS:
            instead = f"the model and {_CONFIG} make it {size}, of {', '.join(FLOATS)}"
            raise CheckpointError(call, seen, instead)
        pair.append(handle.get_tensor(_tensor(name, which)).to(torch.float32))
    return pair[0], pair[1] * scaling
