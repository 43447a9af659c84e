"""The process that answers clients, beside the one that runs the engine: `HttpProcess` starts it, `main` is it."""

import contextlib
import functools
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from weft.errors import RequestError
from weft.stages.chat import ChatTemplate
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.masks import Mask
from weft.transforms.server.bodies import ServerLimits
from weft.transforms.server.host import EngineHost, Host
from weft.transforms.server.remote import RemoteHost, Unpacker, pack, run_engine

_SIGNALS = signal.SIGINT, signal.SIGTERM


@attrs.frozen(kw_only=True, eq=False)
class Settings:
    """What the process must know.

    Args:
        model: without its weights, where it travels.
        max_model_len, max_waiting, max_num_reqs: the bounds of requests.
        name, adapters, chat_template, api_key, limits: as `Server` takes them.
        address, port: to listen on.
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
    port: int


def mask_maker(model: Model) -> Callable[[Mapping[str, Any]], Mask]:
    """Makes masks of `response_format`s; XGrammar reads the vocabulary at the first one."""
    from weft.transforms.server.grammars import Grammars
    from weft.transforms.server.vocabulary import Vocabulary

    @functools.cache
    def grammars() -> Grammars:
        if model.tokenizer is None:
            raise RequestError("response_format", "a checkpoint without a tokenizer", "one with tokenizer.json")
        return Grammars(Vocabulary(model.tokenizer, model.config.vocab_size), model.config.eos_token_ids)

    return lambda form: grammars().mask(form)


def listen(host: Host, settings: Settings) -> None:
    """Answer clients until a signal, or until the engine's process has gone."""
    import uvicorn

    from weft.transforms.server.app import Server

    class Listener(uvicorn.Server):
        """A server that says where it listens once it does, and to which a signal is no failure."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            with _handled(self.handle_exit):
                yield

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            for own in self.servers:
                for bound in own.sockets:
                    address, port = bound.getsockname()[:2]
                    print(f"{settings.name} is served at http://{address}:{port}/v1", flush=True)

        async def on_tick(self, counter: int) -> bool:
            return await super().on_tick(counter) or host.is_final

    server = Server(
        host,
        settings.name,
        adapters=settings.adapters,
        chat_template=settings.chat_template,
        api_key=settings.api_key,
        limits=settings.limits,
        make_mask=mask_maker(settings.model),
    )
    config = uvicorn.Config(
        server.app(), settings.address, settings.port, log_level="warning", access_log=False, server_header=False
    )
    gc.collect()
    gc.freeze()  # a collection that walks all modules takes 0.1 s
    Listener(config).run()


@contextlib.contextmanager
def _handled(handler: Callable[..., Any]) -> Iterator[None]:
    before = {each: signal.signal(each, handler) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, own in before.items():
            signal.signal(each, own)


class HttpProcess:
    """The process as its parent sees it. It is started before the model is loaded, so that it imports meanwhile; and it
    ends when the parent has gone. Where sockets cannot be inherited (Windows), its work is done in the parent."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if os.name != "posix":
            return
        self._socket, theirs = socket.socketpair()
        words = [sys.executable, "-m", "weft.transforms.cli.http_process", str(theirs.fileno())]
        with theirs:  # a terminal's Ctrl-C reaches the parent alone, which passes it on
            self._process = subprocess.Popen(words, pass_fds=[theirs.fileno()], start_new_session=True)

    def run(self, engine: Engine, settings: Settings, num_ranks: int) -> int:
        """Serve; returns the exit code."""
        make_mask, process = mask_maker(engine.model), self._process
        if process is None:
            host = EngineHost(engine, settings.max_waiting, make_mask, num_ranks=num_ranks)
            listen(host, settings)
            return _exit_code(host.fault)
        model = engine.model
        own = model.config, None, model.tokenizer, model.path  # without its weights
        bare = Model(*own, chat_template=model.chat_template)  # type: ignore[arg-type]
        with self._socket, _handled(lambda number, _: process.send_signal(number)):
            with contextlib.suppress(OSError):  # it has gone: its exit code says why
                self._socket.sendall(pack(attrs.evolve(settings, model=bare)))
            fault = run_engine(self._socket, engine, make_mask, num_ranks=num_ranks)
            code = process.wait()
        return _exit_code(None if fault is None else f"{type(fault).__name__}: {fault}") or code

    def close(self) -> None:
        """End the process, if it goes on."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._socket.close()
            self._process.wait()


def _exit_code(fault: str | None) -> int:
    if fault is not None:
        print(f"error: a step of the engine raised {fault}", file=sys.stderr)
    return 0 if fault is None else 1


def main() -> None:
    """Read the settings from a socket whose number is the argument, and serve."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    sock, unpacker = socket.socket(fileno=int(sys.argv[1])), Unpacker()
    import weft.transforms.server.app  # noqa: F401, while the parent loads the model

    while raw := sock.recv(2**16):
        for settings in unpacker.feed(raw):
            host = RemoteHost(
                sock, settings.model, settings.max_model_len, settings.max_num_reqs + settings.max_waiting
            )
            listen(host, settings)
            return


if __name__ == "__main__":
    main()
