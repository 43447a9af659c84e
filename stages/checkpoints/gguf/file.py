"""`GgufFile`: a mapped GGUF file; its metadata and the places of its tensors, read with checks of
all bounds, as a file may be malformed.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3,
little-endian.
"""

import importlib
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from weft.errors import CheckpointError, CheckpointNotFoundError, WeftError
from weft.extras import install_command

# The letters of `struct` by the format's numbers of value types (`gguf_metadata_value_type`).
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING = 8
_ARRAY = 9
_VERSIONS = 2, 3
# The most bytes of metadata and names, and the most values of an array. The largest vocabularies
# take about 2**24 bytes, and 2**19 values.
_MOST_BYTES = 2**28
_MOST_VALUES = 2**22
_MOST_DIMS = 4
_SPLIT = "split.count"


class _Fault(Exception):
    """The bytes are not a valid GGUF file; the text says where."""


@attrs.frozen
class StoredTensor:
    """A tensor's place in a file.

    Args:
        shape: the shape in torch's order: the last dimension is contiguous.
        kind: ggml's number of its type, such as 0 for F32.
        start: its first byte in the file.
        size: its size in bytes.
    """

    shape: tuple[int, ...]
    kind: int
    start: int
    size: int


@attrs.frozen(eq=False)
class GgufFile:
    """A mapped file.

    Args:
        path: the path of the file.
        metadata: the values by their keys; arrays are lists.
        tensors: the places of the tensors, by their names in the file.
        start: the first byte of the tensors.
        data: the file's bytes. A write to them changes only memory, never the file.
    """

    path: Path
    metadata: Mapping[str, Any] = attrs.field(repr=False)
    tensors: Mapping[str, StoredTensor] = attrs.field(repr=False)
    start: int
    data: mmap.mmap = attrs.field(repr=False)

    @property
    def architecture(self) -> Any:
        """llama.cpp's name of the architecture; None if the file has none."""
        return self.metadata.get("general.architecture")


def gguf_module(name: str, call: str = "") -> Any:
    """A module of the package `gguf`.

    Raises:
        CheckpointError: the package is not installed.
    """
    try:
        return importlib.import_module(f"gguf.{name}")
    except ImportError as error:
        raise CheckpointError(call, f"a GGUF file, and {error}", install_command("gguf")) from error


def kind_name(kind: int) -> str:
    """The name of one of ggml's types, such as `Q4_K`; its number if the package `gguf` does not
    know it."""
    try:
        return str(gguf_module("constants").GGMLQuantizationType(kind).name)
    except ValueError:
        return f"type {kind}"


def open_gguf(path: Path, call: str) -> GgufFile:
    """Map a file, and read its header: everything before its tensors.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointError: it is not a GGUF file, it is damaged or one part of several, or its header
            is implausibly large.
    """
    sizes = gguf_module("constants", call).GGML_QUANT_SIZES
    block_sizes = {int(kind): size for kind, size in sizes.items()}
    try:
        # ACCESS_COPY: writable memory, as `torch.frombuffer` wants, and an unchanged file.
        with path.open("rb") as opened:
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        reader = _Reader(data)
        metadata, tensors, start = _read(reader, block_sizes)
        if (parts := metadata.get(_SPLIT, 1)) != 1:
            problem = f"{path.name} is one of {parts!r:.60} parts"
            raise CheckpointError(
                call, problem, "one file: llama-gguf-split --merge FIRST-PART whole.gguf"
            )
        return GgufFile(path, metadata, tensors, start, data)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            call, f"there is no file {str(path)!r:.300}", "a .gguf file"
        ) from error
    except (_Fault, OSError, ValueError) as error:
        if isinstance(error, WeftError):
            raise
        problem = f"{path.name} is not a GGUF file that weft can read: {error!s:.300}"
        raise CheckpointError(
            call, problem, f"copy {path.name} again from where it came from"
        ) from error


@attrs.define
class _Reader:
    """Reads numbers and strings one after the other. A count in the file cannot make it allocate
    more than the file has bytes."""

    data: mmap.mmap
    at: int = 0

    def numbers(self, form: str, count: int = 1) -> tuple[Any, ...]:
        """Numbers of one of `struct`'s forms."""
        size = struct.calcsize(f"<{form}")
        start = self._skip(size * count)
        return struct.unpack_from(f"<{count}{form}", self.data, start)

    def number(self, form: str) -> Any:
        """One of them."""
        return self.numbers(form)[0]

    def string(self) -> str:
        """A string: its length, and its bytes in UTF-8."""
        size = self.number("Q")
        start = self._skip(size)
        try:
            return self.data[start : start + size].decode()
        except UnicodeDecodeError as error:
            raise _Fault(f"at byte {start}: {error}") from None

    def count(self, size: int, what: str) -> int:
        """A count of items; raises `_Fault` if that many, of at least `size` bytes each, cannot
        follow."""
        count = self.number("Q")
        if count * size > self._left():
            raise _Fault(
                f"at byte {self.at}: {count} {what}, but only {self._left()} bytes are left"
            )
        return int(count)

    def value(self) -> Any:
        """A value of the metadata, preceded by its type."""
        kind = self.number("I")
        if kind != _ARRAY:
            return self._of(kind)
        kind = self.number("I")
        form = _SCALARS.get(kind)
        count = self.count(struct.calcsize(form) if form else 8, "values")
        if count > _MOST_VALUES:
            raise _Fault(
                f"at byte {self.at}: an array of {count} values; weft reads at most {_MOST_VALUES}"
            )
        if form:
            return list(self.numbers(form, count))
        if kind != _STRING:
            raise _Fault(f"at byte {self.at}: an array of type {kind}, which weft does not read")
        return [self.string() for _ in range(count)]

    def _of(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind not in _SCALARS:
            raise _Fault(
                f"at byte {self.at}: a value of type {kind}, which the format does not have"
            )
        return self.number(_SCALARS[kind])

    def _left(self) -> int:
        return min(len(self.data), _MOST_BYTES) - self.at

    def _skip(self, size: int) -> int:
        """Advance by `size` bytes, and return where they begin."""
        if size > self._left():
            if len(self.data) < _MOST_BYTES:
                end = f"the file ends at byte {len(self.data)}"
            else:
                end = f"weft reads headers of at most {_MOST_BYTES} bytes"
            raise _Fault(f"at byte {self.at}: the header goes on for {size} bytes, but {end}")
        start = self.at
        self.at = self.at + size
        return start


def _read(
    reader: _Reader, block_sizes: Mapping[int, tuple[int, int]]
) -> tuple[dict[str, Any], dict[str, StoredTensor], int]:
    """The metadata, the tensors, and where their bytes begin."""
    if reader.data[:4] != b"GGUF":
        raise _Fault(f"it begins with {reader.data[:4]!r}, not with b'GGUF'")
    reader.at = 4
    version = reader.number("I")
    if version not in _VERSIONS:
        # A big-endian file begins with the same four bytes; only the version shows the order of
        # bytes.
        big = struct.unpack("<I", struct.pack(">I", version))[0] in _VERSIONS
        raise _Fault("it is big-endian" if big else f"it has version {version}; weft reads 2 and 3")
    # The least bytes of an entry. A tensor: the length of its name, its dimensions, type and offset
    # (8 + 4 + 4 + 8). A value: the length of its key, its type, and one byte (8 + 4 + 1).
    num_tensors = reader.count(24, "tensors")
    num_values = reader.count(13, "values of metadata")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        _add(metadata, reader.string(), reader.value())
    alignment = metadata.get("general.alignment", 32)
    if not (isinstance(alignment, int) and 8 <= alignment <= 2**16 and alignment % 8 == 0):
        raise _Fault(
            f"general.alignment={alignment!r:.60}; it has to be a multiple of 8, from 8 to 65536"
        )
    infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = reader.string()
        dims = reader.number("I")
        if not 1 <= dims <= _MOST_DIMS:
            raise _Fault(f"{name:.200} has {dims} dimensions; it has to have 1 to {_MOST_DIMS}")
        # ggml has the contiguous dimension first, torch last.
        shape = reader.numbers("Q", dims)[::-1]
        _add(infos, name, (shape, *reader.numbers("I"), *reader.numbers("Q")))
    # Offsets of tensors count from the end of the header, rounded up to the alignment.
    start = -(-reader.at // alignment) * alignment
    tensors = {
        name: _place(name, *entry, start, len(reader.data), block_sizes)
        for name, entry in infos.items()
    }
    wrong = [name for name, entry in tensors.items() if entry.start % alignment]
    if wrong:
        raise _Fault(f"{wrong[0]:.200} does not start at a multiple of {alignment} bytes")
    return metadata, tensors, start


def _place(
    name: str,
    shape: tuple[int, ...],
    kind: int,
    offset: int,
    start: int,
    end: int,
    block_sizes: Mapping[int, tuple[int, int]],
) -> StoredTensor:
    if kind not in block_sizes:
        # An unknown type has an unknown size. `GgufTensors` refuses it if the model needs it.
        return StoredTensor(shape, kind, start, 0)
    block, size = block_sizes[kind]
    if min(shape) < 1:
        raise _Fault(f"{name:.200} has the shape {list(shape)}; every size has to be 1 or more")
    if shape[-1] % block:
        raise _Fault(
            f"{name:.200} has rows of {shape[-1]} values, which is no multiple of the block of"
            f" {block}"
        )
    size *= math.prod(shape) // block
    if start + offset + size > end:
        raise _Fault(
            f"{name:.200} ends at byte {start + offset + size}, but the file ends at byte {end}"
        )
    return StoredTensor(shape, kind, start + offset, size)


def _add(entries: dict[str, Any], name: str, value: Any) -> None:
    if name in entries:
        raise _Fault(f"two entries have the name {name!r:.200}")
    entries[name] = value
