"""A server of a small model, on a port of its own, for a test."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import httpx
import uvicorn

from weft.stages.checkpoints.chat import ChatTemplate
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits
from weft.transforms.server.app import Server
from weft.transforms.server.bodies import ServerLimits
from weft.transforms.server.grammars.masks import grammar_compiler, mask_maker
from weft.transforms.server.host import EngineHost, Host, max_model_len
from weft.transforms.server.remote import RemoteHost, run_engine

TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
LIMITS = EngineLimits(max_num_reqs=4, max_num_tokens=64, max_model_len=128)


@attrs.frozen(eq=False)
class Served:
    """A server that listens."""

    url: str
    port: int
    host: Any
    server: Server
    stop: Callable[[], None]


@contextmanager
def served(
    model: Model,
    *,
    limits: EngineLimits = LIMITS,
    limits_of: ServerLimits | None = None,
    max_waiting: int = 64,
    remote: tuple[socket.socket, socket.socket] | None = None,
    **options: Any,
) -> Iterator[Served]:
    """A server of the model; options are those of `Server` and `Engine`.

    Args:
        remote: a pair of sockets, between which the engine and its clients are; None: they share a
            process.
    """
    engine_options = {
        name: options.pop(name)
        for name in ("adapters", "pipeline", "graph", "num_logprobs")
        if name in options
    }
    engine = Engine(model, limits, seed=0, **{"num_logprobs": 5, "graph": "none", **engine_options})
    make_mask = mask_maker(model)
    host: Host = (
        EngineHost(engine, max_waiting, make_mask)
        if remote is None
        else _apart(engine, remote, max_waiting)
    )
    names = {
        "chat_template": TEMPLATE,
        "limits": limits_of,
        "adapters": [*engine_options.get("adapters", {})],
    }
    server = Server(host, "demo", compile_grammar=grammar_compiler(model), **{**names, **options})
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    config = uvicorn.Config(server.app(), log_level="warning", access_log=False)
    listener = uvicorn.Server(config)
    thread = threading.Thread(
        target=lambda: asyncio.run(listener.serve(sockets=[bound])), daemon=True
    )
    thread.start()
    while not listener.started:
        assert thread.is_alive()
        thread.join(0.01)
    port = bound.getsockname()[1]

    def stop() -> None:
        listener.should_exit = True

    try:
        yield Served(f"http://127.0.0.1:{port}", port, host, server, stop)
    finally:
        stop()
        thread.join(20)
        assert not thread.is_alive()


def _apart(
    engine: Engine, remote: tuple[socket.socket, socket.socket], max_waiting: int
) -> RemoteHost:
    ours, theirs = remote
    model = Model(engine.model.config, None, engine.model.tokenizer, engine.model.path)  # type: ignore[arg-type]
    options = {"daemon": True, "args": (theirs, engine, mask_maker(engine.model))}
    threading.Thread(target=run_engine, **options).start()  # type: ignore[arg-type]
    return RemoteHost(
        ours, model, max_model_len(engine), engine.limits.budget.max_num_reqs + max_waiting
    )


BODY = {"prompt": "The function returns", "temperature": 0, "max_tokens": 100, "ignore_eos": True}


def ask(server: Served, body: Any = BODY, path: str = "/v1/completions", **options: Any) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{server.url}{path}", content=content, **{"timeout": 60, **options})


@contextmanager
def standing_still(server: Served) -> Iterator[threading.Event]:
    """A context in which the engine's next step waits for the event, which is set at the end at the
    latest."""
    engine = server.host.engine
    goes_on = threading.Event()
    step = engine.step

    def wait_and_step() -> Any:
        goes_on.wait(60)
        return step()

    engine.step = wait_and_step
    try:
        yield goes_on
    finally:
        goes_on.set()


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
