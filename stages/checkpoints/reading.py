"""A checkpoint's tensors as a stage's parameters, and the reader of a folder of safetensors."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from weft.arguments.checks import Rule, check_values
from weft.arguments.json_text import Fields, read_object
from weft.errors import CheckpointError, CheckpointNotFoundError, ConfigError, DeviceError
from weft.stages.architectures import ARCHITECTURES
from weft.stages.config import DTYPES, ModelConfig, find_file
from weft.stages.layer_fields import Field, Part
from weft.stages.layout import StageLayout, check_layout
from weft.stages.params import DecoderParams, LayerParams
from weft.stages.shares import WHOLE, Share, share_fields, share_rows

# The number of rows compared at a time, when a tied head is checked against the embedding.
_ROWS = 4096
EMBED = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
FLOATS = ("F16", "BF16", "F32", "F64")
# Buffers that old versions of transformers saved, and that weft computes from the configuration.
_NEUTRAL = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_FP8 = "F8_E4M3"
_RULES: dict[str, Rule] = {
    "dtype": (
        lambda dtype: dtype in (None, *DTYPES.values()),
        f"one of {', '.join(map(str, DTYPES.values()))}",
    )
}
_SHOWN = 4


class TensorReader(Protocol):
    """Reads a checkpoint's tensors, by transformers' names."""

    def check(self, parts: Iterable[tuple[Part, Sequence[str]]]) -> None:
        """Raise CheckpointError unless the checkpoint has these parts of a stage, each in one of
        its dtypes (safetensors' names), and no tensor that the configuration does not explain."""

    def read(self, part: Part, dtype: torch.dtype, /) -> Tensor:
        """The tensor of a part, or a share of it, on any device and in any dtype. A format that has
        to convert the tensor converts it to `dtype`."""


def read_params(
    reader: TensorReader,
    config: ModelConfig,
    layout: StageLayout,
    device: torch.device,
    dtype: torch.dtype,
    *,
    shard: Share = WHOLE,
    progress: bool,
) -> DecoderParams:
    """Read a stage's parameters, or a rank's share of them, after checking every name, shape and
    dtype."""
    fields = dict(stage_fields(config, layout, shard))
    checks = []
    for field in fields.values():
        # A field in FP8 must be in FP8 in the file; any other may be any float, and is cast.
        dtypes = FLOATS if field.dtype is None or field.dtype.itemsize > 1 else (_FP8,)
        checks += [(part, dtypes) for part in field.parts]
    # All checks before the first read: a checkpoint of 100 GB must not fail in its last file.
    reader.check(checks)
    bar = tqdm(
        total=len(checks), desc=f"stage {layout.index}", unit=" tensors", disable=not progress
    )

    def read(part: Part, dtype: torch.dtype) -> Tensor:
        bar.update()
        return reader.read(part, dtype)

    with bar:
        tensors = {path: _fill(field, read, dtype, device) for path, field in fields.items()}
    return assemble(config, layout, tensors)


@attrs.frozen
class SafetensorsReader:
    """Reads the tensors of a folder of safetensors (`TensorReader`), each straight to the device.

    Args:
        folder: the folder of the checkpoint.
        config: the configuration of the whole model.
        device: the device of the tensors.
        call: the call that the user wrote, for errors.
        stack: the stack that closes the files.
    """

    folder: Path
    config: ModelConfig
    device: torch.device
    call: str
    stack: ExitStack
    _files: dict[str, Path] = attrs.field(init=False)
    _handles: dict[Path, Any] = attrs.field(factory=dict, init=False)

    @_files.default
    def _of_folder(self) -> dict[str, Path]:
        return _tensor_files(self.folder, self.call)

    def check(self, parts: Iterable[tuple[Part, Sequence[str]]]) -> None:
        """Like `TensorReader.check`."""
        needed = dict(parts)
        _check_names(self._files, [part.name for part in needed], self.config, self.call)
        if (
            self.config.tie_word_embeddings
            and HEAD in self._files
            and EMBED in {part.name for part in needed}
        ):
            _check_tied(self._files, self.call)
        files = {part: self._files[part.name] for part in needed}
        # Checked on the CPU, from the headers; opened on the device only for the read.
        with ExitStack() as stack:
            handles = _open_all(files.values(), "cpu", self.call, stack)
            for part, file in files.items():
                expected = part.name, part.stored_shape, needed[part], file.name
                check_tensor(handles[file], *expected, "config.json", self.call)
        self._handles.update(_open_all(files.values(), str(self.device), self.call, self.stack))

    def read(self, part: Part, _: torch.dtype) -> Tensor:
        """Like `TensorReader.read`, in the checkpoint's dtype."""
        handle = self._handles[self._files[part.name]]
        if part.slices:
            # A slice reads only its own bytes: a rank does not read the shares of the others.
            tensor: Tensor = handle.get_slice(part.name)[part.slices]
        else:
            tensor = handle.get_tensor(part.name)
        return tensor


def _fill(
    field: Field,
    read: Callable[[Part, torch.dtype], Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The field's tensor: its only part as it is, or a new tensor that holds all parts."""
    dtype = field.dtype or dtype
    # A part that is the whole field is not copied: on the CPU it may stay a view of the file.
    if len(field.parts) == 1 and field.parts[0].shape == field.shape:
        return read(field.parts[0], dtype).to(device, dtype)
    # Zeros, since a field may have gaps between its parts.
    whole = torch.zeros(field.shape, dtype=dtype, device=device)
    for part in field.parts:
        part.place(whole).copy_(read(part, dtype))
    return whole


@attrs.frozen(eq=False)
class PartView:
    """The view of a stage's parameters that holds one of the checkpoint's tensors, or a rank's
    share of it. Writing to it changes the parameters.

    Args:
        view: the view of the parameters.
        part: the checkpoint's tensor.
    """

    view: Tensor
    part: Part

    def share_of(self, whole: Tensor) -> Tensor:
        """A rank's share of a tensor of the checkpoint's shape."""
        return whole[self.part.slices]


def places(
    params: DecoderParams, config: ModelConfig, layout: StageLayout, shard: Share = WHOLE
) -> dict[str, PartView]:
    """The views of the checkpoint's tensors in a stage's parameters, or in a rank's share of them,
    by transformers' names."""
    views: dict[str, PartView] = {}
    for path, field in stage_fields(config, layout, shard):
        *layer, name = path.split(".")
        owner = params.layers[int(layer[1]) - layout.start] if layer else params
        # A last stage that is not the first holds the tied embedding as its head.
        if path == "embed_tokens" and not layout.first:
            name = "lm_head"
        views |= {
            part.name: PartView(part.place(getattr(owner, name)), part) for part in field.parts
        }
    # The last: a tied name stands for a view that is there by its first name.
    views |= {name: views[other] for name, other in tied_names(config).items() if other in views}
    return views


def tied_names(config: ModelConfig) -> dict[str, str]:
    """A dict from a tensor's second name in the checkpoint to its first: a tied head is the
    embedding."""
    if config.tie_word_embeddings:
        return {HEAD: EMBED}
    return {}


def tensor_shapes(config: ModelConfig, layout: StageLayout) -> dict[str, tuple[int, ...]]:
    """The shapes of the checkpoint's tensors that a stage needs, by transformers' names, in the
    order of the computation."""
    return {
        part.name: part.shape for _, field in stage_fields(config, layout) for part in field.parts
    }


def stage_fields(
    config: ModelConfig, layout: StageLayout, shard: Share = WHOLE
) -> Iterator[tuple[str, Field]]:
    """The fields of a stage's parameters, or of a rank's share of them, each with its path, such as
    `layers.3.qkv_proj`, where layers are numbered in the whole model.

    The field of a tied head is the embedding.
    """
    vocabulary = config.vocab_size, config.hidden_size
    embedding = share_rows(Field(vocabulary, (Part(EMBED, vocabulary),)), shard)
    if layout.first:
        yield "embed_tokens", embedding
    for i in layout.layers:
        for name, field in share_fields(config, i, shard).items():
            yield f"layers.{i}.{name}", field
    if layout.last:
        yield "norm", Field((config.hidden_size,), (Part(NORM, (config.hidden_size,)),))
        if not config.tie_word_embeddings:
            yield "lm_head", share_rows(Field(vocabulary, (Part(HEAD, vocabulary),)), shard)
        elif not layout.first:
            yield "embed_tokens", embedding


def assemble(
    config: ModelConfig, layout: StageLayout, tensors: Mapping[str, Tensor]
) -> DecoderParams:
    """A stage's parameters, from the tensors by the paths of `stage_fields`."""
    layers = []
    for i in layout.layers:
        prefix = f"layers.{i}."
        layer_tensors: dict[str, Any] = {
            k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)
        }
        layers.append(LayerParams(**layer_tensors, index=i))
    # None if the head is tied to an embedding in this stage: an optimizer would train a second leaf
    # apart from the first.
    lm_head = None
    if layout.last and not config.tie_word_embeddings:
        lm_head = tensors["lm_head"]
    elif layout.last and not layout.first:
        lm_head = tensors["embed_tokens"]
    return DecoderParams(
        embed_tokens=tensors["embed_tokens"] if layout.first else None,
        layers=tuple(layers),
        norm=tensors["norm"] if layout.last else None,
        lm_head=lm_head,
    )


def checked_dtype(
    config: ModelConfig, layout: StageLayout, dtype: torch.dtype | None, call: str
) -> torch.dtype:
    """The dtype to load. Raises an error if no decoder has this dtype, or if the layout does not
    fit the model."""
    check_layout(layout, config.num_layers, call)
    check_values(call, _RULES, {"dtype": dtype}, ConfigError)
    if dtype is None:
        return config.dtype
    return dtype


def checked_device(device: torch.device | str, call: str) -> torch.device:
    """The device with its index: a bare `cuda` is `cuda:0` to safetensors, and the current device
    to torch."""
    try:
        # By making a tensor there, because torch finds out only then that a device is missing.
        return torch.empty(0, device=device).device
    # A build of torch without CUDA raises AssertionError for `cuda`.
    except (RuntimeError, AssertionError) as error:
        # After the first line, torch gives advice on debugging kernels, which does not apply here.
        reason = str(error).splitlines()[0]
        raise DeviceError(
            call, f"device={str(device)!r}: {reason}", "use a device of this machine, or 'cpu'"
        ) from error


def weight_files(folder: Path, call: str) -> list[Path]:
    """The files that hold a checkpoint's tensors, and the index that names them.

    Raises:
        CheckpointNotFoundError, CheckpointError: there are no such files, or they cannot be read.
    """
    # Sorted, so that the digest does not depend on the order in the index.
    shards = sorted(set(_tensor_files(folder, call).values()))
    for file in shards:
        open_tensors(file, "cpu", call)
    if shards == [folder / _WEIGHTS]:
        return shards
    return [folder / _INDEX, *shards]


def _tensor_files(folder: Path, call: str) -> dict[str, Path]:
    """The file that holds each of the checkpoint's tensors."""
    convert = (
        "convert it: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…,"
        " safe_serialization=True)"
    )
    written = "pass a folder that save_pretrained wrote"
    file = find_file(folder, (_WEIGHTS, _INDEX), call, written, {"pytorch_model*.bin": convert})
    if file.name == _INDEX:
        return _indexed_files(file, call)
    with open_tensors(file, "cpu", call) as handle:
        return dict.fromkeys(handle.keys(), file)


def _indexed_files(index: Path, call: str) -> dict[str, Path]:
    try:
        fields = Fields(read_object(index, call), call, "it")
        shards = fields.value("weight_map", None, lambda one: isinstance(one, Mapping), "an object")
        weight_map = attrs.evolve(fields, raw=shards, prefix="weight_map.")
        for name in shards:
            weight_map.value(name, None, _is_inside, f"the name of a file of {str(index.parent)!r}")
    except ConfigError as error:
        problem = f"{index.name} is not an index of shards: {error.problem}; {error.instead}"
        raise CheckpointError(
            call, problem, f"copy {index.name} again from where it came from"
        ) from error
    if missing := sorted(
        name for name in set(shards.values()) if not os.path.isfile(index.parent / name)
    ):
        problem = (
            f"{index.name} names {list_some(missing)}, and {str(index.parent)!r} has no such file"
        )
        raise CheckpointNotFoundError(
            call, problem, "finish the download, or copy the missing shards"
        )
    return {name: index.parent / shard for name, shard in shards.items()}


def _is_inside(name: Any) -> bool:
    """Whether this is a relative path that stays in its folder. Symbolic links may lead out of the
    folder, as in Hugging Face's cache."""
    if not isinstance(name, str):
        return False
    # An index comes from strangers, and must not name a file elsewhere on this machine. The colon
    # refuses drives of Windows.
    return all(part not in ("", ".", "..") for part in re.split(r"[/\\]", name)) and ":" not in name


def open_tensors(file: Path, device: str, call: str) -> Any:
    """`safe_open` of a file: maps it, and reads no tensor yet.

    Raises:
        CheckpointError: it is damaged, or this user may not read it.
    """
    try:
        return safe_open(file, framework="pt", device=device)
    except (SafetensorError, OSError) as error:
        problem = f"{file.name} ({file.stat().st_size} bytes) is damaged: {error!s:.300}"
        instead = f"copy {file.name} again from where it came from"
        if not os.access(file, os.R_OK):
            problem = f"{str(file)!r:.300}, which this user may not read"
            instead = "chmod u+r, or another user's rights"
        raise CheckpointError(call, problem, instead) from error


def _open_all(files: Iterable[Path], device: str, call: str, stack: ExitStack) -> dict[Path, Any]:
    return {
        file: stack.enter_context(open_tensors(file, device, call)) for file in dict.fromkeys(files)
    }


def _check_names(
    files: Mapping[str, Path], needed: Iterable[str], config: ModelConfig, call: str
) -> None:
    missing = [name for name in needed if name not in files]
    explained = tensor_shapes(config, StageLayout(0, 1, 0, config.num_layers))
    # A file may store a tied head all the same; `_check_tied` compares it with the embedding.
    if config.tie_word_embeddings:
        tied = {HEAD}
    else:
        tied = set()
    other = ARCHITECTURES[config.architecture].other_tensors
    left = [
        name
        for name in files
        if name not in explained and name not in tied and not name.startswith(other)
    ]
    extra = [name for name in left if not _NEUTRAL.fullmatch(name)]
    refuse_names(missing, extra, "the checkpoint", "config.json", call)


def _check_tied(files: Mapping[str, Path], call: str) -> None:
    """Raise CheckpointError if the files hold a head that differs from the embedding to which it is
    tied."""
    with ExitStack() as stack:
        handles = _open_all((files[HEAD], files[EMBED]), "cpu", call, stack)
        head, embed = (handles[files[name]].get_slice(name) for name in (HEAD, EMBED))
        # In parts: both matrices together may not fit into memory.
        rows = range(0, head.get_shape()[0], _ROWS)
        same = head.get_shape() == embed.get_shape()
        if same and all(
            torch.equal(head[row : row + _ROWS], embed[row : row + _ROWS]) for row in rows
        ):
            return
    problem = f"{HEAD} is not {EMBED}, and config.json has tie_word_embeddings=true"
    instead = "set it to false to use the head that is stored, or leave that head out of the files"
    raise CheckpointError(call, problem, instead)


def refuse_names(missing: list[str], extra: list[str], holder: str, source: str, call: str) -> None:
    """Raise CheckpointError for tensors that are missing from a checkpoint or an adapter, or that
    its configuration does not explain.

    Args:
        holder: the name of the file or checkpoint, for the error.
        source: the name of the configuration file.
    """
    if missing:
        problem = f"no {list_some(missing)}"
    else:
        problem = f"{list_some(extra)}, and no field of {source} explains that"
    if missing or extra:
        raise CheckpointError(call, f"{holder} has {problem}", _belong(source))


def _belong(source: str) -> str:
    return f"check that {source} and the weights belong together"


def check_tensor(
    handle: Any,
    name: str,
    shape: tuple[int, ...],
    dtypes: Sequence[str],
    file: str,
    source: str,
    call: str,
) -> None:
    """Raise CheckpointError unless an open file of a checkpoint or an adapter has this tensor.

    Args:
        shape, dtypes: the tensor's shape, and the dtypes that it may have.
        file: the file's name.
        source: the name of the configuration file.
    """
    try:
        view = handle.get_slice(name)
    except SafetensorError:
        problem = f"{_INDEX} says that {file} holds {name}, and it does not"
        instead = "copy the index and the shards again from where they came from"
    else:
        stored_shape = tuple(view.get_shape())
        dtype = view.get_dtype()
        if stored_shape == shape and dtype in dtypes:
            return
        problem = (
            f"{name} in {file} is {dtype} {stored_shape}, and {source} makes it {shape} of"
            f" {', '.join(dtypes)}"
        )
        quantized = dtypes == FLOATS and dtype not in FLOATS
        if quantized:
            instead = "use the checkpoint before quantization"
        else:
            instead = _belong(source)
    raise CheckpointError(call, problem, instead)


def list_some(names: list[str]) -> str:
    """The names, or the first few and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(f"{name:.200}" for name in names[:_SHOWN]) + (
        f" and {more} more" if more > 0 else ""
    )
