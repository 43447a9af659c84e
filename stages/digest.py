"""Short digests of weights, by which ranks that hold different parts of a model see whether it is one model."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.trees import tree_leaves

_SAMPLES = 512
"""Places of a checkpoint that are read."""
_BYTES = 64
"""Bytes that are read at each."""
_MAX_HEADER = 2**27
_VALUES = 4
"""Values of a tensor that are read."""


@attrs.frozen
class Origin:
    """Where weights come from.

    Args:
        checkpoint: a digest of all of it.
        params: a digest of the part that was loaded, as it was then.
    """

    checkpoint: str
    params: str

    def describe(self, params: Any) -> str:
        """This, and whether the parameters have changed since, as `digest_params` sees it."""
        changed = ", changed since it was loaded" * (digest_params(params) != self.params)
        return f"checkpoint {self.checkpoint}{changed}"


def digest_files(folder: Path, files: Iterable[Path]) -> str:
    """A digest of the files of a checkpoint: of their names in the folder, sizes and headers, and of 512 samples of 64
    bytes; JSON is read as a whole. It tells checkpoints apart, not files that differ in a few values.

    Raises:
        OSError: a file cannot be read.
    """
    files = sorted(set(files))
    found = hashlib.blake2b(digest_size=8)
    for file in files:
        size = file.stat().st_size
        found.update(f"{file.relative_to(folder).as_posix()} {size} ".encode())
        with file.open("rb") as opened:
            header = min(8 + int.from_bytes(opened.read(8), "little"), size)
            opened.seek(0)
            found.update(opened.read(min(header, _MAX_HEADER)))
            count = max(_SAMPLES // len(files), 16)
            for index in range(count):
                opened.seek(header + max(size - header - _BYTES, 0) * index // (count - 1))
                found.update(opened.read(_BYTES))
    return found.hexdigest()


def digest_params(params: Any) -> str:
    """A digest of 4 values of each tensor in a tree, of its shapes and dtypes. It reads them on the host, once."""
    tensors = [leaf.detach() for leaf in tree_leaves(params) if isinstance(leaf, Tensor)]
    found = hashlib.blake2b(digest_size=8)
    found.update(str([(tuple(x.shape), x.dtype) for x in tensors]).encode())
    filled = [x.reshape(-1) for x in tensors if x.numel()]
    samples = [x[:: max(x.numel() // _VALUES, 1)][:_VALUES].to(torch.float32) for x in filled]
    if samples:
        found.update(torch.cat(samples).cpu().numpy().tobytes())
    return found.hexdigest()
