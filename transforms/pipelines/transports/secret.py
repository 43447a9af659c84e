"""The secret of a run: who holds it is a rank, and whoever else finds the run's ports is not.

Whatever ranks write for each other carries a tag that only the secret makes, and is refused before it is read where the
tag is wrong. Nothing is encrypted.
"""

import hashlib
import hmac
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import attrs

from weft.errors import ProgramError

VARIABLE = "WEFT_SECRET"
LEAST = 16
"""Characters of a secret at least."""
_TAG = 16
"""Bytes of a tag."""
OWN = "export WEFT_SECRET=$(openssl rand -hex 16), the same on every node"


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: Any, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: Any, /) -> bytes: ...


@attrs.frozen
class Secret:
    """The secret of a run."""

    key: bytes = attrs.field(repr=False)

    @classmethod
    def fresh(cls) -> "Secret":
        """A new one, drawn from the system's randomness."""
        return cls(secrets.token_hex(LEAST).encode())

    @property
    def text(self) -> str:
        """As `WEFT_SECRET` holds it."""
        return self.key.decode()

    def tag(self, *parts: bytes) -> bytes:
        """What only the secret makes of these parts: 16 bytes."""
        found = hashlib.blake2b(key=self.key[:64], digest_size=_TAG)
        for part in parts:
            found.update(len(part).to_bytes(8, "little"))
            found.update(part)
        return found.digest()

    def seal(self, name: str, text: str) -> bytes:
        """A text under a name, with its tag before it."""
        return self.tag(name.encode(), text.encode()) + text.encode()

    def open(self, name: str, sealed: bytes) -> str:
        """The text that was sealed under the name.

        Raises:
            ValueError: it was not sealed with this secret, or not under this name.
        """
        tag, text = sealed[:_TAG], sealed[_TAG:]
        if not hmac.compare_digest(tag, self.tag(name.encode(), text)):
            raise ValueError(f"'{name}' holds {len(sealed)} bytes that are not sealed with this run's secret")
        return text.decode()

    def derived(self, *parts: bytes) -> "Secret":
        """A secret for one connection."""
        return Secret(self.tag(b"derived", *parts))


@contextmanager
def shared_secret(given: Secret | None, store: Store, rank: int) -> Iterator[Secret]:
    """The secret of a run for as long as its ranks meet: the one that was given; else rank 0 leaves a fresh one in a
    file that this user alone can read, and names the file in the store. A stranger who names another file in its place
    names one that he did not write.

    Raises:
        ProgramError: the folder of such files is not this user's alone, or the file named is not in it.
    """
    if given is not None:
        yield given
        return
    folder = _private_folder()
    if rank == 0:
        secret, name = Secret.fresh(), secrets.token_hex(8)
        file = folder / name
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(secret.key)
        try:
            store.set("secret", name)
            yield secret
        finally:
            with suppress(FileNotFoundError):
                file.unlink()
        return
    name = bytes(store.get("secret")).decode(errors="replace")
    try:
        if not re.fullmatch("[0-9a-f]{16}", name):
            raise FileNotFoundError(f"a file of 16 hexadecimal digits, not {name!r:.60}")
        key = (folder / name).read_bytes()
    except OSError as error:
        seen = f"no secret that rank 0 left in {folder} ({error})"
        raise ProgramError(
            f"Distributed() on rank {rank}", seen, f"all ranks as one user on one machine, or {OWN}"
        ) from error
    yield Secret(key)


def _private_folder() -> Path:
    """The folder of secrets, which nobody else may read or write."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / f"weft-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ProgramError(
            "Distributed()", f"{folder}, which others may read or write", f"chmod 700 {folder}, or {OWN}"
        )
    return folder
