"""A GGUF's tensors, by transformers' names, unpacked by the package `gguf`."""

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from weft.errors import CheckpointError
from weft.stages.checkpoints.gguf.file import GgufFile, StoredTensor, gguf_module, kind_name
from weft.stages.checkpoints.reading import refuse_names, stage_fields
from weft.stages.config import ModelConfig
from weft.stages.layer_fields import Part
from weft.stages.layout import StageLayout

# The types of ggml that are dtypes of torch.
KINDS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
# The tensor that divides the frequencies of the rotary embedding.
ROPE_FACTORS = "rope_freqs.weight"
_EXPERT = re.compile(r"(?<=mlp\.experts\.)(\d+)\.")
# The number of elements unpacked at a time: 16 MiB of float32 beside the parameters.
_AT_ONCE = 2**22


def stored_name(name: str, architecture: str, num_layers: int) -> str:
    """The name in a GGUF of one of transformers' tensors, from the package gguf; a GGUF has the
    experts of a layer in one tensor.

    >>> stored_name("model.layers.3.mlp.experts.7.up_proj.weight", "qwen3moe", 4)
    'blk.3.ffn_up_exps.weight'
    """
    names = _names(architecture, num_layers)
    # A name that the package does not map stays as it is, and is then reported as missing.
    return names.get_name(_EXPERT.sub("", name), try_suffixes=(".weight", ".bias")) or name


@functools.cache
def _names(architecture: str, num_layers: int) -> Any:
    kinds = {name: kind for kind, name in gguf_module("constants").MODEL_ARCH_NAMES.items()}
    return gguf_module("tensor_mapping").get_tensor_name_map(kinds[architecture], num_layers)


@attrs.frozen
class GgufTensors:
    """Reads the tensors of a file (`weft.stages.checkpoints.reading.TensorReader`).

    Args:
        file: the file.
        config: the configuration of the whole model, from the file's metadata.
        call: the call that the user wrote, for errors.
    """

    file: GgufFile
    config: ModelConfig
    call: str

    def _stored_name(self, part: Part) -> str:
        return stored_name(part.name, self.file.architecture, self.config.num_layers)

    def check(self, parts: Iterable[tuple[Part, Sequence[str]]]) -> None:
        """Raise CheckpointError unless the file has these tensors, and none that the model does not
        have."""
        fields = stage_fields(self.config, StageLayout(0, 1, 0, self.config.num_layers))
        explained = {self._stored_name(part) for _, field in fields for part in field.parts} | {
            ROPE_FACTORS
        }
        needed = {part: self._stored_name(part) for part, _ in parts}
        missing = sorted({name for name in needed.values() if name not in self.file.tensors})
        extra = [name for name in self.file.tensors if name not in explained]
        refuse_names(missing, extra, self.file.path.name, "its metadata", self.call)
        for part, name in needed.items():
            self._check(part, name)

    def _check(self, part: Part, name: str) -> None:
        stored = self.file.tensors[name]
        shape = part.stored_shape
        if part.expert is not None and self.config.moe is not None:
            shape = self.config.moe.num_experts, *shape
        if not _unpacks(stored.kind):
            problem = f"{name} is {kind_name(stored.kind)}, which the package gguf does not unpack"
            raise CheckpointError(
                self.call, problem, "another quantization of the model, such as Q4_K_M or Q8_0"
            )
        if stored.shape != shape:
            problem = (
                f"{name} in {self.file.path.name} is {stored.shape}, but its metadata says {shape}"
            )
            raise CheckpointError(
                self.call, problem, "check that it is a whole file, of this architecture"
            )

    def read(self, part: Part, dtype: torch.dtype) -> Tensor:
        """A tensor on the CPU, or a part's share of it: a view of the mapped file, or, if the
        tensor is packed, a new one of `dtype`."""
        stored = self.file.tensors[self._stored_name(part)]
        if expert := _EXPERT.search(part.name):
            # The experts of a layer lie one after the other, so one of them is a contiguous range
            # of bytes.
            size = stored.size // stored.shape[0]
            stored = StoredTensor(
                stored.shape[1:], stored.kind, stored.start + int(expert[1]) * size, size
            )
        tensor = self._tensor(stored, dtype)
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}.get(
            part.name.split(".")[-2]
        )
        if heads is not None and self.file.architecture == "llama":
            # For llama, llama.cpp rotates neighbouring rows of a head as a pair, so its files
            # interleave the two halves of a head; weft rotates the halves.
            halves: Tensor = tensor.unflatten(0, (heads, -1, 2))
            tensor = halves.transpose(1, 2).flatten(0, 2)
        return tensor[part.slices]

    def _tensor(self, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        if kind := KINDS.get(stored.kind):
            count = stored.size // kind.itemsize
            flat: Tensor = torch.frombuffer(
                self.file.data, dtype=kind, count=count, offset=stored.start
            )
            return flat.view(stored.shape)
        columns = stored.shape[-1]
        unpacked = torch.empty(stored.shape, dtype=dtype, device="cpu").view(-1, columns)
        packed = np.frombuffer(self.file.data, np.uint8, stored.size, stored.start).reshape(
            len(unpacked), -1
        )
        step = max(_AT_ONCE // columns, 1)
        for start in range(0, len(unpacked), step):
            rows = _unpack(packed[start : start + step], stored.kind)
            unpacked[start : start + step] = torch.from_numpy(rows)
        return unpacked.view(stored.shape)


def rope_factors(file: GgufFile, pairs: int, call: str) -> tuple[float, ...] | None:
    """The divisors of the frequencies of a head's pairs; None if the file has none.

    Raises:
        CheckpointError: another number of them, or numbers that are not finite and positive.
    """
    if ROPE_FACTORS not in file.tensors:
        return None
    stored = file.tensors[ROPE_FACTORS]
    if kind_name(stored.kind) == "F32" and stored.shape == (pairs,):
        factors = np.frombuffer(file.data, "<f4", pairs, stored.start)
        if bool((np.isfinite(factors) & (factors > 0)).all()):
            return tuple(factors.tolist())
    problem = f"{ROPE_FACTORS} is {kind_name(stored.kind)} {stored.shape}"
    raise CheckpointError(
        call, problem, f"{pairs} finite numbers greater than 0 in F32, one for each pair of a head"
    )


@functools.cache
def _unpacks(kind: int) -> bool:
    """Whether the package gguf can unpack this type. It has no list, so one block is tried."""
    if kind in KINDS:
        return True
    constants = gguf_module("constants")
    try:
        _, size = constants.GGML_QUANT_SIZES[constants.GGMLQuantizationType(kind)]
        _unpack(np.zeros((1, size), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return False
    return True


def _unpack(packed: Any, kind: int) -> Any:
    """Rows of blocks as float32."""
    # A scale may be any float16, infinity and NaN included: no warnings.
    with np.errstate(all="ignore"):
        return gguf_module("quants").dequantize(
            packed, gguf_module("constants").GGMLQuantizationType(kind)
        )
