"""The network of a run: the address at which each process listens, and the secret that only its
ranks hold.

Everything that ranks write for each other carries a tag that can only be made with the secret. Data
with a wrong tag is refused before it is parsed. Nothing is encrypted.
"""

import hashlib
import hmac
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import attrs

from weft.errors import ProgramError

ADDRESS = "WEFT_ADDRESS"
SECRET = "WEFT_SECRET"
LOOPBACK = "127.0.0.1"
# The least number of characters of a secret
_LEAST = 16
# The number of bytes of a tag
_TAG = 16
_EXPORT = "export WEFT_SECRET=$(openssl rand -hex 16), the same on every node"


class Store(Protocol):
    """The part of `torch.distributed.Store` that weft uses."""

    def set(self, key: str, value: Any, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: Any, /) -> bytes: ...


@attrs.frozen
class Secret:
    """The secret of a run: a process that holds it is a rank.

    Args:
        key: the bytes of the secret.
    """

    key: bytes = attrs.field(repr=False)

    @classmethod
    def fresh(cls) -> "Secret":
        """A new secret, from the system's randomness."""
        return cls(secrets.token_hex(_LEAST).encode())

    @property
    def text(self) -> str:
        """The secret as `WEFT_SECRET` holds it."""
        return self.key.decode()

    def tag(self, *parts: bytes) -> bytes:
        """The tag of these parts: 16 bytes that can only be made with the secret."""
        # blake2b takes keys of at most 64 bytes.
        hasher = hashlib.blake2b(key=self.key[:64], digest_size=_TAG)
        # The lengths keep other parts with the same concatenation from having the same tag.
        for part in parts:
            hasher.update(len(part).to_bytes(8, "little"))
            hasher.update(part)
        return hasher.digest()

    def seal(self, name: str, text: str) -> bytes:
        """The text, preceded by its tag, which is valid only under this name."""
        return self.tag(name.encode(), text.encode()) + text.encode()

    def open(self, name: str, sealed: bytes) -> str:
        """The text that was sealed for the name.

        Raises:
            ValueError: the text was not sealed with this secret, or not for this name.
        """
        tag = sealed[:_TAG]
        text = sealed[_TAG:]
        # In constant time: `!=` takes longer the more of the tag is right, which would help to
        # guess it.
        if not hmac.compare_digest(tag, self.tag(name.encode(), text)):
            raise ValueError(
                f"'{name}' holds {len(sealed)} bytes that are not sealed with this run's secret"
            )
        return text.decode()

    def derived(self, *parts: bytes) -> "Secret":
        """A secret for one connection, derived from this secret and the parts."""
        return Secret(self.tag(b"derived", *parts))


@contextmanager
def shared_secret(configured: Secret | None, store: Store, rank: int) -> Iterator[Secret]:
    """The secret of a run, while its ranks find each other. If none is configured, rank 0 writes a
    fresh one to a file that only this user can read, and names the file in the store. An attacker
    may name another file there, but cannot have written it.

    Raises:
        ProgramError: other users may use the folder of such files, or the named file is not in it.
    """
    if configured is not None:
        yield configured
        return
    folder = private_folder()
    if rank == 0:
        secret = Secret.fresh()
        name = secrets.token_hex(8)
        file = folder / name
        # O_EXCL refuses a file, or a link, that is there already.
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(secret.key)
        try:
            store.set("secret", name)
            yield secret
        finally:
            # The ranks connect to each other within this context, so all of them have read the file
            # by now.
            with suppress(FileNotFoundError):
                file.unlink()
        return
    name = bytes(store.get("secret")).decode(errors="replace")
    # The store is not trusted: a name with slashes could lead out of the folder.
    if re.fullmatch("[0-9a-f]{16}", name):
        key = _read(folder / name)
    else:
        key = None
    if key is None:
        problem = (
            f"no secret that rank 0 left in {folder}, which is said to be in its file {name!r:.60}"
        )
        instead = f"all ranks as one user on one machine, or {_EXPORT}"
        raise ProgramError(f"Distributed() on rank {rank}", problem, instead)
    yield Secret(key)


def _read(file: Path) -> bytes | None:
    """The contents of a file; None if it is missing or cannot be read."""
    try:
        return file.read_bytes()
    except OSError:
        return None


def private_folder() -> Path:
    """The folder for files that ranks of one machine share. Only this user may read or write it.

    Raises:
        ProgramError: other users may read or write it too.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / f"weft-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # `lstat` and the checks below: another user may have made the folder, or a link, before.
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ProgramError(
            "Distributed()",
            f"{folder}, which others may read or write",
            f"chmod 700 {folder}, or {_EXPORT}",
        )
    return folder


@attrs.frozen
class Network:
    """The network of a run, as the launcher's variables describe it.

    Args:
        address: the address of this machine at which this rank listens.
        one_node: whether all ranks are on this machine.
        secret: the secret of the run, if it is configured.
    """

    address: str
    one_node: bool
    secret: Secret | None

    @classmethod
    def of(cls, environment: Mapping[str, str], num_ranks: int) -> "Network":
        """The network that the variables describe. Its address is the loopback address on one node,
        and the address named by the user on several nodes.

        Raises:
            ProgramError: there are several nodes without an address or a secret; or the secret is
                too short.
        """
        secret_text = environment.get(SECRET)
        master = environment.get("MASTER_ADDR", LOOPBACK)
        if secret_text is None:
            secret = None
        else:
            secret = Secret(secret_text.encode())
        one_node = environment.get("LOCAL_WORLD_SIZE") == str(num_ranks)
        one_node = one_node or master in ("localhost", "::1") or master.startswith("127.")
        problem = f"ranks on several nodes (MASTER_ADDR={master}), and no "
        if secret_text is not None and len(secret_text) < _LEAST:
            problem = f"{SECRET} of {len(secret_text)} characters"
            instead = f"at least {_LEAST}: {_EXPORT}"
        elif one_node:
            return cls(LOOPBACK, True, secret)
        elif secret_text is None:
            problem = problem + SECRET
            instead = _EXPORT
        elif ADDRESS not in environment:
            problem += ADDRESS
            instead = (
                f"export {ADDRESS}=<the address of this node that the other nodes reach>, on each"
                " node"
            )
        else:
            return cls(environment[ADDRESS], False, secret)
        raise ProgramError("Distributed()", problem, instead)
