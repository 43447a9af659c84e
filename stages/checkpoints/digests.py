"""Digests of a checkpoint's files and of parameters, by which ranks check that they hold parts of
the same model."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.values.trees import tree_leaves

# The number of places in a checkpoint that a digest reads, and the bytes read at each.
_SAMPLES = 512
_BYTES = 64
# The most bytes of a header that are read: the size comes from the file, which may be damaged.
_MAX_HEADER = 2**27
# The number of values of a tensor that a digest reads.
_VALUES = 4


@attrs.frozen
class Origin:
    """Digests of the checkpoint that parameters were loaded from. Ranks that hold different parts
    compare them, to check that the model is the same.

    Args:
        checkpoint: a digest of the whole checkpoint.
        params: a digest of the loaded part, made when it was loaded.
    """

    checkpoint: str
    params: str

    def describe(self, params: Any) -> str:
        """The checkpoint's digest, with a note if the parameters have changed since loading."""
        changed = ", changed since it was loaded" * (digest_params(params) != self.params)
        return f"checkpoint {self.checkpoint}{changed}"


def digest_files(folder: Path, files: Iterable[Path], header: int | None = None) -> str:
    """A digest of the files of a checkpoint: of their names, sizes and headers, and of 512 samples
    of 64 bytes; small files such as JSON are read as a whole. It tells checkpoints apart, but may
    miss a difference in a few values.

    Args:
        header: the size of each file's header in bytes; None: read it as in a safetensors file.

    Raises:
        OSError: a file cannot be read.
    """
    files = sorted(set(files))
    hasher = hashlib.blake2b(digest_size=8)
    for file in files:
        size = file.stat().st_size
        hasher.update(f"{file.relative_to(folder).as_posix()} {size} ".encode())
        with file.open("rb") as opened:
            # A safetensors file begins with the length of its header: 8 bytes, little-endian.
            first = min(
                8 + int.from_bytes(opened.read(8), "little") if header is None else header, size
            )
            opened.seek(0)
            hasher.update(opened.read(min(first, _MAX_HEADER)))
            count = max(_SAMPLES // len(files), 16)
            for index in range(count):
                opened.seek(first + max(size - first - _BYTES, 0) * index // (count - 1))
                hasher.update(opened.read(_BYTES))
    return hasher.hexdigest()


def digest_params(params: Any) -> str:
    """A digest of the shapes, the dtypes and 4 values of each tensor in a tree. It copies these
    values to the host."""
    tensors = [leaf.detach() for leaf in tree_leaves(params) if isinstance(leaf, Tensor)]
    hasher = hashlib.blake2b(digest_size=8)
    hasher.update(str([(tuple(x.shape), x.dtype) for x in tensors]).encode())
    filled = [x.reshape(-1) for x in tensors if x.numel()]
    # As float32, because NumPy has neither bfloat16 nor FP8.
    samples = [x[:: max(x.numel() // _VALUES, 1)][:_VALUES].to(torch.float32) for x in filled]
    if samples:
        hasher.update(torch.cat(samples).cpu().numpy().tobytes())
    return hasher.hexdigest()
