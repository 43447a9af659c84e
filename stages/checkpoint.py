"""Parameters from a folder of safetensors, each stage reading its own tensors; and random ones of the same shape."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from weft.errors import CheckpointError, CheckpointNotFoundError, ConfigError, DeviceError, ProgramError
from weft.stages.config import DTYPES, ModelConfig
from weft.stages.layout import StageLayout
from weft.stages.params import DecoderParams, LayerParams, layer_shapes
from weft.stages.rope import inverse_frequencies

_EMBED, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F16", "BF16", "F32", "F64")
# Buffers that old versions of transformers saved, and that follow from the configuration.
_NEUTRAL = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_SHOWN = 4


def load_params(
    path: str | os.PathLike[str],
    config: ModelConfig,
    layout: StageLayout,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: bool = False,
) -> DecoderParams:
    """A stage's parameters from `model.safetensors`, or from the shards that `model.safetensors.index.json` names.

    Only the stage's own tensors are read, each straight to `device`, and none before every name, shape and dtype was
    found right. On the CPU a tensor that needs no cast is a view of the mapped file: do not change the file meanwhile.

    Args:
        path: a folder that transformers' `save_pretrained` wrote.
        config: from `load_config(path)`.
        layout: the stage, from `split_layers(config.num_layers, num_stages)`.
        dtype: what the tensors are cast to; None: `config.dtype`.
        progress: whether to show a bar, one tick a tensor.

    Raises:
        CheckpointNotFoundError: no folder, no safetensors, or a shard is missing.
        CheckpointError: a file is damaged; a tensor is missing, of another shape than the configuration says, not a
            float, or one that the configuration has no use for.
        ConfigError: a dtype that no decoder computes in.
        ProgramError: a layout for another number of layers.
        DeviceError: a device that is not there.
    """
    call = f"load_params({os.fspath(path)!r}, config, {layout!r})"
    dtype, device = _checked_dtype(config, layout, dtype, call), _checked_device(device, call)
    files, shapes = _tensor_files(Path(path), call), tensor_shapes(config, layout)
    _check_names(files, shapes, config, call)
    files = {name: files[name] for name in shapes}
    with ExitStack() as stack:
        handles = _open_all(files, "cpu", call, stack)
        for name, shape in shapes.items():
            _check_tensor(handles[files[name]], name, shape, files[name].name, call)
    with ExitStack() as stack:
        handles = _open_all(files, str(device), call, stack)
        bar = tqdm(shapes, desc=f"stage {layout.index}", unit=" tensors", disable=not progress)
        tensors = {name: handles[files[name]].get_tensor(name).to(dtype) for name in bar}
    return _assemble(config, layout, tensors, device)


def random_params(
    config: ModelConfig,
    layout: StageLayout,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    std: float = 0.02,
) -> DecoderParams:
    """Parameters of the right structure and no meaning, for benchmarks and tests: normal with deviation `std`.

    A tensor's values depend on `seed`, its name and the kind of device alone, so that the stages of any split agree
    with the whole model. Norms are 1 plus the same noise.

    Raises:
        ConfigError: a dtype that no decoder computes in.
        ProgramError: a layout for another number of layers.
        DeviceError: a device that is not there.
    """
    call = f"random_params(config, {layout!r}, seed={seed})"
    dtype, device = _checked_dtype(config, layout, dtype, call), _checked_device(device, call)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:6], "little"))
        mean = 1.0 if "norm" in name else 0.0
        noise = torch.empty(shape, dtype=torch.float32, device=device)
        return noise.normal_(mean, std, generator=generator).to(dtype)

    tensors = {name: draw(name, shape) for name, shape in tensor_shapes(config, layout).items()}
    return _assemble(config, layout, tensors, device)


def tensor_shapes(config: ModelConfig, layout: StageLayout) -> dict[str, tuple[int, ...]]:
    """The checkpoint's tensors that a stage needs: transformers' names, in the order of the computation."""
    fields, vocabulary = layer_shapes(config), (config.vocab_size, config.hidden_size)
    head = _EMBED if config.tie_word_embeddings else _HEAD
    shapes: dict[str, tuple[int, ...]] = {_EMBED: vocabulary} if layout.first else {}
    shapes |= {_layer_name(i, field): shape for i in layout.layers for field, shape in fields.items()}
    return shapes | ({_NORM: (config.hidden_size,), head: vocabulary} if layout.last else {})


def _layer_name(index: int, field: str) -> str:
    """transformers' name of a field of `LayerParams`: `q_bias` of layer 3 is model.layers.3.self_attn.q_proj.bias."""
    module, _, kind = field.rpartition("_")
    if field.endswith("layernorm"):
        return f"model.layers.{index}.{field}.weight"
    if kind == "norm":
        return f"model.layers.{index}.self_attn.{field}.weight"
    block = "mlp" if module in ("gate", "up", "down") else "self_attn"
    return f"model.layers.{index}.{block}.{module}_proj.{'bias' if kind == 'bias' else 'weight'}"


def _assemble(
    config: ModelConfig, layout: StageLayout, tensors: Mapping[str, Tensor], device: torch.device
) -> DecoderParams:
    fields = layer_shapes(config)
    layers = (LayerParams(**{field: tensors[_layer_name(i, field)] for field in fields}) for i in layout.layers)
    inv_freq, _ = inverse_frequencies(config.rope, config.head_dim, config.max_position_embeddings)
    return DecoderParams(
        embed_tokens=tensors[_EMBED] if layout.first else None,
        layers=tuple(layers),
        norm=tensors[_NORM] if layout.last else None,
        lm_head=tensors[_EMBED if config.tie_word_embeddings else _HEAD] if layout.last else None,
        inv_freq=inv_freq.to(device),
    )


def _checked_dtype(config: ModelConfig, layout: StageLayout, dtype: torch.dtype | None, call: str) -> torch.dtype:
    """The dtype to load, once the layout was found to be one of this model."""
    if layout.stop > config.num_layers or layout.last != (layout.stop == config.num_layers):
        instead = f"split_layers({config.num_layers}, {layout.num_stages})[{layout.index}]"
        seen = f"a layout that ends with layer {layout.stop - 1}, and a model of {config.num_layers} layers"
        raise ProgramError(call, seen, instead)
    if dtype is not None and dtype not in DTYPES.values():
        raise ConfigError(call, f"dtype={dtype}", f"use one of {', '.join(f'torch.{name}' for name in DTYPES)}")
    return config.dtype if dtype is None else dtype


def _checked_device(device: torch.device | str, call: str) -> torch.device:
    """The device with its index: safetensors takes a bare `cuda` for `cuda:0`, torch for the current one."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(
            call, f"device={str(device)!r}: {reason}", "use a device of this machine, or 'cpu'"
        ) from error


def _tensor_files(folder: Path, call: str) -> dict[str, Path]:
    """Which file holds each of the checkpoint's tensors."""
    if not folder.is_dir():
        instead = "pass a local folder; `hf download <name> --local-dir <folder>` makes one"
        raise CheckpointNotFoundError(call, f"there is no folder {str(folder)!r}", instead)
    if (folder / _WEIGHTS).is_file():
        with _open(folder / _WEIGHTS, "cpu", call) as handle:
            return dict.fromkeys(handle.keys(), folder / _WEIGHTS)
    if (folder / _INDEX).is_file():
        return _indexed_files(folder / _INDEX, call)
    seen, instead = f"{str(folder)!r} has no {_WEIGHTS} and no {_INDEX}", "pass a folder that save_pretrained wrote"
    pickles = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
    if pickles:
        seen += f", only {pickles[0]}"
        instead = "convert it: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…, safe_serialization=True)"
    raise CheckpointNotFoundError(call, seen, instead)


def _indexed_files(index: Path, call: str) -> dict[str, Path]:
    try:
        shards: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: index.parent / shard for name, shard in shards.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        seen = f"{index.name} is no index of shards: {type(error).__name__}: {error}"
        raise CheckpointError(call, seen, f"copy {index.name} again from where it came from") from error
    missing = sorted({file.name for file in files.values() if not file.is_file()})
    if missing:
        seen = f"{index.name} names {_some(missing)}, and {str(index.parent)!r} has no such file"
        raise CheckpointNotFoundError(call, seen, "finish the download, or copy the missing shards")
    return files


def _open(file: Path, device: str, call: str) -> Any:
    """The file's `safe_open`, which maps it and reads no tensor yet."""
    try:
        return safe_open(file, framework="pt", device=device)
    except (SafetensorError, OSError) as error:
        seen = f"{file.name} ({file.stat().st_size} bytes) is damaged: {error}"
        raise CheckpointError(call, seen, f"copy {file.name} again from where it came from") from error


def _open_all(files: Mapping[str, Path], device: str, call: str, stack: ExitStack) -> dict[Path, Any]:
    return {file: stack.enter_context(_open(file, device, call)) for file in dict.fromkeys(files.values())}


def _check_names(
    files: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, call: str
) -> None:
    missing = [name for name in shapes if name not in files]
    if missing:
        instead = "check that config.json and the weights belong together"
        raise CheckpointError(call, f"the checkpoint has no {_some(missing)}", instead)
    explained = tensor_shapes(config, StageLayout(0, 1, 0, config.num_layers))
    tied = {_HEAD} if config.tie_word_embeddings else set()
    extra = [name for name in files if name not in explained and name not in tied and not _NEUTRAL.fullmatch(name)]
    if extra:
        seen = f"the checkpoint has {_some(extra)}, and no field of config.json explains that"
        raise CheckpointError(call, seen, "check that config.json and the weights belong together")


def _check_tensor(handle: Any, name: str, shape: tuple[int, ...], file: str, call: str) -> None:
    try:
        view = handle.get_slice(name)
    except SafetensorError as error:
        instead = "copy the index and the shards again from where they came from"
        raise CheckpointError(call, f"{_INDEX} says that {file} holds {name}, and it does not", instead) from error
    if tuple(view.get_shape()) != shape:
        seen = f"{name} in {file} is {tuple(view.get_shape())}, and config.json makes it {shape}"
        raise CheckpointError(call, seen, "check that config.json and the weights belong together")
    if view.get_dtype() not in _FLOATS:
        seen = f"{name} in {file} is {view.get_dtype()}"
        raise CheckpointError(call, seen, f"weft loads {', '.join(_FLOATS)}: use the checkpoint before quantization")


def _some(names: list[str]) -> str:
    """The names, or the first few and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
