"""`weft serve`: a checkpoint over HTTP, by OpenAI's API."""

import contextlib
import errno
import gc
import importlib
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.display.quantities import byte_size, counted
from weft.extras import install_command
from weft.stages.adapters.adapter import load_adapter
from weft.stages.checkpoints.chat import ChatTemplate
from weft.stages.model import Model
from weft.transforms.cli.options import Serve
from weft.transforms.cli.ranks import Here, in_ranks, open_drafts, open_model, read_config
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits

# The errors of binding an IPv6 address on a machine without IPv6, where IPv4 alone is served.
_NO_SUCH_FAMILY = errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT
# The most connections that may wait to be accepted.
_BACKLOG = 2048


def run(options: Serve) -> int:
    """Serve until a signal, or until a rank has ended; the exit code is 1 if the engine failed."""
    name = (
        options.served_model_name
        or options.preset
        or Path(str(options.model)).resolve().name.removesuffix(".gguf")
    )
    try:
        # Fail on a missing package here, before the model is loaded.
        importlib.import_module("weft.transforms.server.app")
    except ImportError as error:
        options.refuse("", f"{error}", install_command("serve"))
    _check_files(options)
    max_len = options.max_model_len
    limit = read_config(options).max_position_embeddings
    if max_len is not None and max_len > limit:
        flag = "--max-model-len"
        options.refuse(
            f"{flag} {max_len}", f"the model's limit is {limit}", f"{flag} {limit}, or fewer"
        )
    with _signals_forwarded():
        return in_ranks(_serve, options, options, name)


def _check_files(options: Serve) -> None:
    """Refuse a limit of open files that leaves too few connections, before loading the model."""
    from weft.transforms.server.listening import MIN_CONNECTIONS, SPARE_FILES, raise_file_limit

    limit = raise_file_limit()
    needed = SPARE_FILES + MIN_CONNECTIONS
    if limit < needed:
        problem = (
            f"a limit of {limit} open files (ulimit -Hn); {SPARE_FILES} of them are the"
            " server's own"
        )
        instead = (
            f"ulimit -n {needed} or more before it, as the user who may raise it; each connection"
            " is one file"
        )
        options.refuse("", problem, instead)


@contextlib.contextmanager
def _signals_forwarded() -> Iterator[None]:
    """Within, forward signals to the first rank, if this process has started ranks.

    The first signal goes to the first rank, which lets requests finish; the second ends all ranks.
    Without ranks, signals have their usual effect until the server listens.
    """
    told = list[int]()

    def forward(sig: int, _: Any) -> None:
        first = next(
            (child for child in multiprocessing.active_children() if child.name == "weft rank 0"),
            None,
        )
        if first is None or first.pid is None or told:
            # End by SIGTERM's own action, so that the exit status shows the signal.
            if sig == signal.SIGTERM and first is None:
                signal.signal(sig, signal.SIG_DFL)
                os.kill(os.getpid(), sig)
            raise KeyboardInterrupt
        told.append(sig)
        os.kill(first.pid, signal.SIGTERM)

    # Python lets only the main thread set signal handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, forward) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _serve(here: Here, options: Serve, name: str) -> int:
    from weft.transforms.cli.http_process import HttpProcess, Settings
    from weft.transforms.server.bodies import ServerLimits
    from weft.transforms.server.commands import follow
    from weft.transforms.server.grammars.masks import mask_maker
    from weft.transforms.server.host import max_model_len

    key = _api_key(options)
    template = _template(options)
    if here.first:
        http = HttpProcess(_bound(options))
    else:
        http = None
    try:
        engine = _engine(here, options, name)
        gc.collect()
        # A garbage collection that visits torch and the model takes 0.1 s, and would delay a step.
        gc.freeze()
        if http is None:
            follow(engine, mask_maker(engine.model))
            return 0
        settings = Settings(
            model=engine.model,
            max_model_len=max_model_len(engine),
            max_num_reqs=engine.limits.budget.max_num_reqs,
            max_waiting=options.max_waiting,
            name=name,
            adapters=[each for each, _ in options.adapter],
            chat_template=(
                None if template is None else ChatTemplate(template, _special_tokens(engine.model))
            ),
            api_key=key,
            limits=ServerLimits(
                max_body=options.max_body,
                max_n=options.max_n,
                max_logprobs=engine.num_logprobs,
                has_priorities=options.scheduling_policy == "priority",
                timeout=options.request_timeout,
            ),
            address=options.host,
        )
        return http.run(engine, settings, num_ranks=here.num_ranks)
    finally:
        # Otherwise nanobind, which Triton uses, reports uncollected objects on stderr at exit.
        gc.unfreeze()
        if http is not None:
            http.close()


def _bound(options: Serve) -> list[socket.socket]:
    """The sockets of the address, already listening.

    Sockets that are only bound could share a port; since they listen, one of two servers started at
    the same time learns that the port is taken. Connections wait until the model is loaded.
    """
    sockets = list[socket.socket]()
    wrong = OSError("no address")
    try:
        places = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, *_, place in dict.fromkeys(places):
            try:
                sockets.append(_listening_on(family, place))
            except OSError as error:
                if error.errno not in _NO_SUCH_FAMILY:
                    raise
                wrong = error
        if not sockets:
            raise wrong
    except OSError as error:
        for sock in sockets:
            sock.close()
        flags = f"--host {options.host} --port {options.port}"
        problem = f"{error.strerror or error}"
        options.refuse(flags, problem, "an address of this machine, and a port that is free, or 0")
    return sockets


def _listening_on(family: int, place: Any) -> socket.socket:
    """A listening socket. If two begin to listen at the same moment, both may be refused, so try
    again after a random pause."""
    pauses = [secrets.randbelow(100) / 1000 for _ in range(2)]
    for pause in pauses:
        try:
            return _bound_to(family, place)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            time.sleep(pause)
    return _bound_to(family, place)


def _bound_to(family: int, place: Any) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Else a port could not be used again for a while after a server on it has ended. On Windows
        # the option would let two servers share the port.
        if os.name == "posix":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # IPv4 has a socket of its own on the same port
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(place)
        bound.listen(_BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound


def _engine(here: Here, options: Serve, name: str) -> Engine:
    """The engine, with its graphs captured."""
    start = time.monotonic()

    def say(text: str) -> None:
        if here.first:
            print(f"{time.monotonic() - start:6.1f} s  {text}", file=sys.stderr, flush=True)

    say(f"loading {name}")
    model = open_model(options, here)
    graph = options.graph_mode
    limits = EngineLimits(
        max_num_reqs=options.max_num_seqs,
        max_num_tokens=options.max_num_tokens,
        max_model_len=options.max_model_len,
        num_pages=options.num_pages,
        max_step_seconds=options.max_step_seconds,
    )
    say(f"making its engine, on {model.device} in {str(model.dtype).removeprefix('torch.')}")
    engine = Engine(
        model,
        limits,
        pipeline=here.num_stages,
        graph=graph,
        compiler=options.compiler,
        transport=here.transport,
        run_ahead=options.run_ahead,
        num_logprobs=min(options.max_logprobs, model.config.vocab_size),
        seed=options.seed,
        prefix_caching=not options.no_prefix_caching,
        adapters={each: load_adapter(model, folder) for each, folder in options.adapter},
        speculation=open_drafts(options, here),
    )
    if graph != "none":
        by = "" if options.compiler is None else f", compiled by {options.compiler}"
        say(f"capturing graphs of mode {graph}{by}")
    stats = engine.warm_up()
    pages = f"{counted(stats.pages_free, 'page')} of the KV cache"
    say(f"{counted(stats.captures, 'graph')}; {pages}, {byte_size(stats.kv_cache_bytes)}")
    return engine


def _api_key(options: Serve) -> str | None:
    key = options.api_key
    name = "--api-key ''"
    if key is None:
        key = os.environ.get("WEFT_API_KEY")
        name = "WEFT_API_KEY="
    if key == "":
        options.refuse(name, "an empty key", "a key; or none at all, and anybody is answered")
    return key


def _template(options: Serve) -> str | None:
    """The template of `--chat-template`."""
    if options.chat_template is None:
        return None
    try:
        return Path(options.chat_template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        options.refuse(f"--chat-template {options.chat_template}", f"{error}", "a file in Jinja")


def _special_tokens(model: Model) -> Mapping[str, str]:
    if model.chat_template is None:
        return {}
    return model.chat_template.special_tokens
