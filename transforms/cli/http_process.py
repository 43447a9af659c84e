"""The process that answers clients, separate from the one that runs the engine: `HttpProcess`
starts it, and it runs `main`."""

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
    """What the process needs to answer clients.

    Args:
        model: the model; without its weights if it is sent to another process.
        max_model_len, max_waiting, max_num_reqs: the bounds of requests.
        name, adapters, chat_template, api_key, limits: as in `Server`.
        address: the address of the sockets, as in `--host`.
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
    gc.freeze()  # a garbage collection that visits all modules takes 0.1 s
    try:
        listener.run([*sockets])
    finally:
        gc.unfreeze()  # for the same reason as at the end of `weft serve`


@contextlib.contextmanager
def forwarded(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Within, forward signals to a process.

    Python runs a signal handler only when the main thread executes Python code, and here that may
    be blocked waiting for a command. So a thread reads the signals from the wakeup descriptor.
    """
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
    """The process that answers clients, as its parent sees it.

    It is started before the model is loaded, so that its imports run meanwhile, and it ends with
    the parent. On Windows, where sockets cannot be inherited, the parent does its work.

    Args:
        sockets: bound to addresses, to be listened on.
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
        # In a session of its own, since a terminal's Ctrl-C is to reach the parent alone, which
        # forwards it.
        with theirs:
            self._process = subprocess.Popen(words, pass_fds=inherited, start_new_session=True)
        for sock in sockets:
            sock.close()

    def run(self, engine: Engine, settings: Settings, num_ranks: int) -> int:
        """Serve clients, and return the exit code."""
        make_mask = mask_maker(engine.model)
        process = self._process
        if process is None:
            host = EngineHost(engine, settings.max_waiting, make_mask, num_ranks=num_ranks)
            serve_clients(host, settings, self._sockets)
            return _exit_code(host.fault)
        model = engine.model
        # Without weights, which are large and not needed there, and without the path, which clients
        # must not see.
        model_fields = (
            model.config,
            None,
            model.tokenizer,
            Path(settings.name),
        )
        bare = Model(*model_fields, chat_template=model.chat_template)  # type: ignore[arg-type]
        with self._socket, forwarded(process):
            # If the process has ended already, its exit code is reported below.
            with contextlib.suppress(OSError):
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
        """End this process if the other one has ended and the engine is stuck in a step, since no
        client is left to wait for it."""
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
        """Terminate the process if it is still running."""
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
    """Exit without waiting for threads, one of which may compile a grammar for minutes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """Read the settings from the socket whose file descriptor is the first argument, and serve on
    the sockets of the other arguments."""
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
