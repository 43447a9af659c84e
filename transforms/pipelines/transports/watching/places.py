"""Places: where each rank of a machine is, and whether it wrote a failure, in memory that its ranks
share.

A rank writes its place before each effect, and looks for failures before it reads each result: by
the store, either would take longer than many effects do. Another rank can still read a place after
the process was killed.
"""

import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_SLOT = 2**15
_HEAD = struct.Struct("<Q")
# The place of the byte that says whether the rank wrote a failure.
_FAILED = _HEAD.size + 2 * _SLOT
_SIZE = _FAILED + 1


class Places:
    """The files of the ranks. Each has two slots, which take turns, and the number of texts written
    so far: a text that is being written is not the one that is read.

    Args:
        files: of all ranks, in a folder that only this user can read. The own one is made here.
        rank: this one.

    Raises:
        OSError: the own file cannot be made.
    """

    def __init__(self, files: Sequence[Path], rank: int) -> None:
        self._files = files
        self._rank = rank
        self._count = 0
        self._maps: dict[int, mmap.mmap] = {}
        # Others find it when it is whole
        temporary = files[rank].with_name(f"{files[rank].name}.{os.getpid()}")
        try:
            with os.fdopen(
                os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
            ) as file:
                # On a full disk, a hole would end the process when it is written
                file.write(bytes(_SIZE))
            temporary.replace(files[rank])
        finally:
            temporary.unlink(missing_ok=True)
        self._open(rank)

    def _open(self, rank: int) -> mmap.mmap:
        with open(self._files[rank], "r+b") as file:
            self._maps[rank] = mmap.mmap(file.fileno(), _SIZE)
        return self._maps[rank]

    def meet(self) -> None:
        """Open the files of all ranks, as far as they are there: later they have no names any more."""
        for rank in range(len(self._files)):
            self._find(rank)

    def unlink(self) -> None:
        """Take the own file's name away: those who have opened it keep it."""
        with suppress(FileNotFoundError):
            self._files[self._rank].unlink()

    def write(self, text: bytes) -> None:
        """Write this rank's text, of at most 2**15 - 8 bytes."""
        buffer = self._maps[self._rank]
        self._count = self._count + 1
        start = _HEAD.size + self._count % 2 * _SLOT
        buffer[start : start + _HEAD.size + len(text)] = _HEAD.pack(len(text)) + text
        buffer[: _HEAD.size] = _HEAD.pack(self._count)

    def mark_failure(self) -> None:
        """Say that this rank has written a failure into the store."""
        self._maps[self._rank][_FAILED] = 1

    def may_have_failure(self) -> bool:
        """Whether some rank said so; also where one has no file that this one could open."""
        return any(
            (buffer := self._find(rank)) is None or buffer[_FAILED]
            for rank in range(len(self._files))
        )

    def read(self, rank: int) -> bytes | None:
        """The text that a rank last wrote; None if it wrote none here."""
        buffer = self._find(rank)
        while buffer is not None:
            (count,) = _HEAD.unpack_from(buffer)
            start = _HEAD.size + count % 2 * _SLOT
            (size,) = _HEAD.unpack_from(buffer, start)
            text = buffer[start + _HEAD.size : start + _HEAD.size + size]
            if _HEAD.unpack_from(buffer) == (count,):
                if count:
                    return text
                return None
        return None

    def _find(self, rank: int) -> mmap.mmap | None:
        if rank not in self._maps:
            with suppress(OSError):
                return self._open(rank)
        return self._maps.get(rank)
