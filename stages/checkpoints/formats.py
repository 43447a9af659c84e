"""The formats of checkpoints: a folder as Hugging Face writes it, or a GGUF."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import attrs
import torch
from tokenizers import Tokenizer

from weft.errors import CheckpointNotFoundError
from weft.stages.checkpoints.chat import ChatTemplate, read_chat_template
from weft.stages.checkpoints.digests import digest_files
from weft.stages.checkpoints.gguf.file import GgufFile, open_gguf
from weft.stages.checkpoints.gguf.metadata import read_config
from weft.stages.checkpoints.gguf.tensors import GgufTensors
from weft.stages.checkpoints.gguf.tokenizer import chat_template_of, tokenizer_of
from weft.stages.checkpoints.known_models import path_of
from weft.stages.checkpoints.reading import (
    SafetensorsReader,
    TensorReader,
    checked_device,
    checked_dtype,
    read_params,
    weight_files,
)
from weft.stages.checkpoints.tokenizer import read_tokenizer
from weft.stages.config import ModelConfig, config_in_folder
from weft.stages.layout import StageLayout
from weft.stages.params import DecoderParams


class Checkpoint(Protocol):
    """A checkpoint in one of the formats. Errors name the `call` that the user wrote."""

    @property
    def path(self) -> Path:
        """The folder or the file."""

    def read_config(self, call: str, *, strict: bool) -> ModelConfig:
        """The configuration of its model."""

    def read_tokenizer(self, call: str, strict: bool, /) -> Tokenizer | None:
        """Its tokenizer, or None."""

    def read_chat_template(self, call: str) -> ChatTemplate | None:
        """Its chat template, or None."""

    def digest(self, call: str, /) -> str:
        """A digest of its weights (`weft.stages.checkpoints.digests.digest_files`)."""

    def open(
        self, config: ModelConfig, device: torch.device, call: str, /
    ) -> AbstractContextManager[TensorReader]:
        """A reader of its tensors."""


@attrs.frozen
class HuggingFaceFolder:
    """A folder with config.json, safetensors, and tokenizer.json if there is one (`Checkpoint`)."""

    path: Path

    def read_config(self, call: str, *, strict: bool) -> ModelConfig:
        """From config.json and generation_config.json."""
        return config_in_folder(self.path, call, strict=strict)

    def read_tokenizer(self, call: str, _: bool) -> Tokenizer | None:
        """From tokenizer.json."""
        return read_tokenizer(self.path, call)

    def read_chat_template(self, call: str) -> ChatTemplate | None:
        """From chat_template.jinja or tokenizer_config.json."""
        return read_chat_template(self.path, call)

    def digest(self, call: str) -> str:
        """Of the safetensors and their index."""
        return digest_files(self.path, weight_files(self.path, call))

    @contextmanager
    def open(self, config: ModelConfig, device: torch.device, call: str) -> Iterator[TensorReader]:
        """The files stay open within."""
        with ExitStack() as stack:
            yield SafetensorsReader(self.path, config, device, call, stack)


@attrs.frozen
class Gguf:
    """A GGUF (`Checkpoint`)."""

    file: GgufFile

    @property
    def path(self) -> Path:
        """The file."""
        return self.file.path

    def read_config(self, call: str, *, strict: bool) -> ModelConfig:
        """From the metadata."""
        return read_config(self.file, call, strict=strict)

    def read_tokenizer(self, call: str, strict: bool) -> Tokenizer | None:
        """From the metadata."""
        return tokenizer_of(self.file, call, strict=strict)

    def read_chat_template(self, call: str) -> ChatTemplate | None:
        """From the metadata."""
        return chat_template_of(self.file, call)

    def digest(self, _: str) -> str:
        """Of the file."""
        # A GGUF does not begin with the length of its header, which ends where the tensors begin.
        return digest_files(self.path.parent, [self.path], self.file.start)

    @contextmanager
    def open(self, config: ModelConfig, _: torch.device, call: str) -> Iterator[TensorReader]:
        """The file is mapped already."""
        yield GgufTensors(self.file, config, call)


def open_checkpoint(model: str | os.PathLike[str], call: str) -> Checkpoint:
    """The checkpoint at a path, or one that weft knows by name. A path is that of a .gguf or of a
    folder; a folder of one .gguf and no config.json stands for that file.

    Raises:
        CheckpointError: a .gguf that cannot be read.
        CheckpointNotFoundError: no such .gguf, or no package of that model.
    """
    path = path_of(model, call)
    if path.suffix == ".gguf" and not os.path.isdir(path):
        if not os.path.isfile(path):
            raise CheckpointNotFoundError(
                call, f"there is no file {str(path)!r:.300}", "the path of a .gguf"
            )
        return Gguf(open_gguf(path, call))
    # Downloads of a GGUF make a folder, and users pass that.
    if os.path.isdir(path) and not os.path.isfile(path / "config.json"):
        files = [file for file in path.glob("*.gguf") if os.path.isfile(file)]
        if len(files) == 1:
            return Gguf(open_gguf(files[0], call))
    return HuggingFaceFolder(path)


def load_config(path: str | os.PathLike[str], *, strict: bool = False) -> ModelConfig:
    """Read the configuration of a checkpoint: a folder, or a .gguf.

    As in transformers, the tokens that end a generation come from generation_config.json if there
    is one, even if it names none; otherwise from config.json. In a .gguf, they are the tokens that
    end a text, a turn or a message.

    Args:
        path: the folder, or the file.
        strict: as `parse_config` takes it.

    Raises:
        CheckpointNotFoundError: there is no such folder, or it has no config.json.
        CheckpointError: a .gguf that is damaged.
        ConfigError: what `parse_config` refuses, or a file that is not a JSON object.
    """
    call = f"load_config({os.fspath(path)!r:.300})"
    return open_checkpoint(path, call).read_config(call, strict=strict)


def load_params(
    path: str | os.PathLike[str],
    config: ModelConfig,
    layout: StageLayout,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: bool = False,
) -> DecoderParams:
    """A stage's parameters from `model.safetensors`, from the shards that
    `model.safetensors.index.json` names, or from a .gguf.

    Every name, shape and dtype is checked first. Then only the stage's own tensors are read, one by
    one. On the CPU, a tensor that needs no cast and is alone in its field is a view of the mapped
    file: do not change the file while the parameters are in use. The tensors of a .gguf are
    unpacked to `dtype`.

    Args:
        path: a folder that transformers' `save_pretrained` wrote, or a .gguf.
        config: from `load_config(path)`.
        layout: the stage's layout, from `split_model(config, num_stages)` if an engine runs it, or
            from `split_layers`.
        dtype: the dtype of all tensors except those in FP8 and their scales; None: `config.dtype`.
        progress: whether to show a progress bar, one tick for each tensor.

    Raises:
        CheckpointNotFoundError: no folder, no safetensors, or a shard is missing.
        CheckpointError: a file is damaged; a tensor is missing, of another shape than the
            configuration says, not a float (or not FP8 where it should be), packed in an unknown
            way, or not explained by the configuration.
        ConfigError: a dtype that no decoder computes in.
        ProgramError: a layout for another number of layers.
        DeviceError: a device that is not there.
    """
    call = f"load_params({os.fspath(path)!r}, config, {layout!r})"
    dtype = checked_dtype(config, layout, dtype, call)
    device = checked_device(device, call)
    with open_checkpoint(path, call).open(config, device, call) as reader:
        return read_params(reader, config, layout, device, dtype, progress=progress)
