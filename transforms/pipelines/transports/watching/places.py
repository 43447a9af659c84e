"""Places: the position of each rank on a machine, and whether it wrote a failure, in shared memory.

A rank writes its position before each effect, and looks for failures before it reads each result.
With the store, either would take longer than many effects do. Another rank can still read a
position after the process that wrote it was killed.
"""

import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_SLOT = 2**15
_HEAD = struct.Struct("<Q")
# The offset of the byte that says whether the rank wrote a failure
_FAILED = _HEAD.size + 2 * _SLOT
_SIZE = _FAILED + 1


class Places:
    """The files of the ranks. Each file has two slots, used in turn, and the number of texts
    written so far, so that a reader never reads the slot that is being written.

    Args:
        files: the files of all ranks, in a folder that only this user can read. This rank's file is
            created here.
        rank: this rank.

    Raises:
        OSError: this rank's file cannot be created.
    """

    def __init__(self, files: Sequence[Path], rank: int) -> None:
        self._files = files
        self._rank = rank
        self._count = 0
        self._maps: dict[int, mmap.mmap] = {}
        # Write a temporary file and rename it, so that others find it only when it is complete.
        temporary = files[rank].with_name(f"{files[rank].name}.{os.getpid()}")
        try:
            with os.fdopen(
                os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
            ) as file:
                # Write all bytes now: in a sparse file on a full disk, a later write to the mapping
                # would kill the process (SIGBUS).
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
        """Open the files of all ranks that have one. Later this is impossible, since the files lose
        their names."""
        for rank in range(len(self._files)):
            self._find(rank)

    def unlink(self) -> None:
        """Remove the name of this rank's file. Processes that have opened the file keep it."""
        with suppress(FileNotFoundError):
            self._files[self._rank].unlink()

    def write(self, text: bytes) -> None:
        """Write this rank's text, of at most 2**15 - 8 bytes."""
        buffer = self._maps[self._rank]
        self._count = self._count + 1
        start = _HEAD.size + self._count % 2 * _SLOT
        buffer[start : start + _HEAD.size + len(text)] = _HEAD.pack(len(text)) + text
        # The count comes last: only now do readers turn to this slot.
        buffer[: _HEAD.size] = _HEAD.pack(self._count)

    def mark_failure(self) -> None:
        """Note that this rank has written a failure to the store."""
        self._maps[self._rank][_FAILED] = 1

    def may_have_failure(self) -> bool:
        """Whether some rank has noted a failure, or has no file that this rank can open."""
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
            # If the count has changed, the slot may have been overwritten meanwhile: read again.
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
