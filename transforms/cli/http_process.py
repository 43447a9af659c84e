"""The process that answers clients, beside the one that runs the engine: `HttpProcess` starts it,
`main` is it."""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from weft.stages.checkpoints.chat import ChatTemplate
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine
from weft.transforms.server.bodies import ServerLimits
from weft.transforms.server.grammars.masks import mask_maker
from weft.transforms.server.host import STILL_SECONDS, EngineHost, Host
from weft.transforms.server.remote import RemoteHost, Unpacker, pack, run_engine

_SIGNALS = signal.SIGINT, signal.SIGTERM


@attrs.frozen(kw_only=True, eq=False)
class Settings:
    """What the process must know.

    Args:
        model: without its weights, where it travels.
        max_model_len, max_waiting, max_num_reqs: the bounds of requests.
        name, adapters, chat_template, api_key, limits: as `Server` takes them.
        address: of the sockets.
    """

    model: Model
    max_model_len: int
    max_waiting: int
    max_num_reqs: int
    name: str
    adapters: Sequence[str]
    chat_template: ChatTemplate | None
    api_key: str | None
    limits: ServerLimits
    address: str


def serve_clients(host: Host, settings: Settings, sockets: Sequence[socket.socket]) -> None:
    """Answer clients until a signal, or until the engine's process has gone.

    Args:
        sockets: bound to addresses.
    """
    from weft.transforms.server.app import Server
    from weft.transforms.server.browsers import is_loopback
    from weft.transforms.server.grammars.masks import grammar_compiler
    from weft.transforms.server.listening import listen

    server = Server(
        host,
        settings.name,
        adapters=settings.adapters,
        chat_template=settings.chat_template,
        api_key=settings.api_key,
        limits=settings.limits,
        compile_grammar=grammar_compiler(settings.model),
        is_local=is_loopback(settings.address),
    )
    listener = listen(server.app(), host, settings.name)
    gc.collect()
    gc.freeze()  # a collection that walks all modules takes 0.1 s
    try:
        listener.run([*sockets])
    finally:
        gc.unfreeze()  # as at the end of `weft serve`


@contextlib.contextmanager
def forwarded(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Signals go to a process. A thread passes them on: this one may wait for a command, and Python
    runs a handler only when the main thread goes on."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def forward() -> None:
        while raw := reader.recv(1):
            if raw[0] in _SIGNALS:
                process.send_signal(raw[0])

    thread = threading.Thread(target=forward, name="weft signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writer.fileno())
    handlers = {each: signal.signal(each, lambda *_: None) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(before)
        writer.close()
        thread.join()
        reader.close()


class HttpProcess:
    """The process as its parent sees it. It is started before the model is loaded, so that it
    imports meanwhile; and it ends when the parent has gone. Where sockets cannot be inherited
    (Windows), its work is done in the parent.

    Args:
        sockets: to listen on, bound to addresses.
    """

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._sockets = sockets
        self._has_returned = threading.Event()
        if os.name != "posix":
            return
        self._socket, theirs = socket.socketpair()
        inherited = [sock.fileno() for sock in (theirs, *sockets)]
        words = [sys.executable, "-m", "weft.transforms.cli.http_process", *map(str, inherited)]
        with theirs:  # a terminal's Ctrl-C reaches the parent alone, which passes it on
            self._process = subprocess.Popen(words, pass_fds=inherited, start_new_session=True)
        for sock in sockets:
            sock.close()

    def run(self, engine: Engine, settings: Settings, num_ranks: int) -> int:
        """Serve; returns the exit code."""
        make_mask = mask_maker(engine.model)
        process = self._process
        if process is None:
            host = EngineHost(engine, settings.max_waiting, make_mask, num_ranks=num_ranks)
            serve_clients(host, settings, self._sockets)
            return _exit_code(host.fault)
        model = engine.model
        # Without its weights; clients see no path
        model_fields = (
            model.config,
            None,
            model.tokenizer,
            Path(settings.name),
        )
        bare = Model(*model_fields, chat_template=model.chat_template)  # type: ignore[arg-type]
        with self._socket, forwarded(process):
            with contextlib.suppress(OSError):  # it has gone: its exit code says why
                self._socket.sendall(pack(attrs.evolve(settings, model=bare)))
            threading.Thread(target=self._end_if_still, name="weft end", daemon=True).start()
            fault = run_engine(self._socket, engine, make_mask, num_ranks=num_ranks)
            self._has_returned.set()
            code = process.wait()
        if code < 0:
            print(
                f"error: the process that answers clients was ended by signal {-code}",
                file=sys.stderr,
            )
            code = 1
        return _exit_code(None if fault is None else f"{type(fault).__name__}: {fault}") or code

    def _end_if_still(self) -> None:
        """End this process if the other one has ended and the engine stands still in a step: nobody
        waits for it."""
        assert self._process is not None
        self._process.wait()
        if not self._has_returned.wait(STILL_SECONDS):
            print(
                f"error: the engine stood still for {STILL_SECONDS:g} s more, and was given up",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)

    def close(self) -> None:
        """End the process, if it goes on."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._socket.close()
            self._process.wait()


def _exit_code(fault: str | None) -> int:
    if fault is not None:
        print(f"error: a step of the engine raised {fault}", file=sys.stderr)
    if fault is None:
        return 0
    return 1


def _leave() -> None:
    """End this process, without waiting for its threads: one may compile a grammar for minutes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """Read the settings from a socket whose number is the first argument, and serve on those of the
    others."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    sock, *sockets = (socket.socket(fileno=int(word)) for word in sys.argv[1:])
    unpacker = Unpacker()
    import weft.transforms.server.app  # noqa: F401, while the parent loads the model

    while raw := sock.recv(2**16):
        for settings in unpacker.feed(raw):
            host = RemoteHost(
                sock,
                settings.model,
                settings.max_model_len,
                settings.max_num_reqs + settings.max_waiting,
            )
            serve_clients(host, settings, sockets)
            _leave()


if __name__ == "__main__":
    main()
