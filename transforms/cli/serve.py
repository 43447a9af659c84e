"""`weft serve`: a checkpoint over HTTP, by OpenAI's API."""

import contextlib
import functools
import importlib
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from weft.errors import RankError, RequestError
from weft.stages.adapters import load_adapter
from weft.stages.chat import ChatTemplate, read_chat_template
from weft.stages.model import DEMO, Model
from weft.transforms.cli.options import Serve
from weft.transforms.cli.ranks import Here, in_ranks, open_drafts, open_model, read_config
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.inputs import Mask
from weft.transforms.engine.options import EngineLimits


def run(options: Serve) -> int:
    """Serve until a signal, or until a rank has ended; the exit code is 1 if the engine failed."""
    name = options.served_model_name or Path(options.model).resolve().name
    if options.model == "demo":
        name, options = options.served_model_name or "demo", attrs.evolve(options, model=str(DEMO))
    try:
        importlib.import_module("weft.transforms.server.app")  # an error here comes before the model is loaded
    except ImportError as error:
        options.refuse("", f"{error}", "pip install 'weft[serve]'")
    read_config(options)
    with _signals_forwarded():
        return in_ranks(_serve, options, options, name)


@contextlib.contextmanager
def _signals_forwarded() -> Iterator[None]:
    """Within, in the process that has started ranks, a first signal goes to the first rank, which lets requests end; a
    second one ends all of them. Without ranks, signals do what they do until the server listens."""
    told = list[int]()

    def forward(sig: int, _: Any) -> None:
        first = next((own for own in multiprocessing.active_children() if own.name == "weft rank 0"), None)
        if first is None or first.pid is None or told:
            if sig == signal.SIGTERM and first is None:
                signal.signal(sig, signal.SIG_DFL)
                os.kill(os.getpid(), sig)
            raise KeyboardInterrupt
        told.append(sig)
        os.kill(first.pid, signal.SIGTERM)

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
    model = open_model(options, here)
    limits = EngineLimits(
        max_num_reqs=options.max_num_seqs,
        max_num_tokens=options.max_num_tokens,
        max_model_len=options.max_model_len,
        num_pages=options.num_pages,
    )
    engine = Engine(
        model,
        limits,
        pipeline=here.num_stages,
        graph=options.graph,
        transport=here.transport,
        run_ahead=options.run_ahead,
        num_logprobs=min(options.max_logprobs, model.config.vocab_size),
        seed=options.seed,
        adapters={each: load_adapter(model, folder) for each, folder in options.adapter},
        speculation=open_drafts(options, here),
    )
    engine.warm_up()
    num_ranks = 1 if here.stage is None else here.num_stages
    make_mask = mask_maker(model, num_ranks, here.first)
    if here.first:
        return _listen(options, name, engine, make_mask, num_ranks)
    from weft.transforms.server.host import follow

    follow(engine, make_mask)
    return 0


def mask_maker(model: Model, num_ranks: int = 1, is_first: bool = True) -> Callable[[Mapping[str, Any]], Mask]:
    """Makes masks of `response_format`s; XGrammar reads the vocabulary at the first one. The first rank compiles within
    limits. Masks of several ranks have no limit of time, by which these could decide differently."""
    from weft.transforms.server.compiling import GrammarLimits
    from weft.transforms.server.grammars import Grammars
    from weft.transforms.server.vocabulary import Vocabulary

    @functools.cache
    def grammars() -> Grammars:
        if model.tokenizer is None:
            raise RequestError("response_format", "a checkpoint without a tokenizer", "one with tokenizer.json")
        limits = GrammarLimits() if num_ranks == 1 else GrammarLimits(token_seconds=math.inf)
        vocabulary = Vocabulary(model.tokenizer, model.config.vocab_size)
        return Grammars(vocabulary, model.config.eos_token_ids, limits if is_first else None)

    return lambda form: grammars().mask(form)


def _listen(options: Serve, name: str, engine: Engine, make_mask: Any, num_ranks: int) -> int:
    from weft.transforms.server.app import Server
    from weft.transforms.server.bodies import ServerLimits
    from weft.transforms.server.browsers import is_loopback
    from weft.transforms.server.host import EngineHost
    from weft.transforms.server.listening import listen

    def stop() -> None:
        if isinstance(host.fault, RankError):  # a rank that ended does not come back
            listener.should_exit = True

    host = EngineHost(engine, options.max_waiting, make_mask, num_ranks=num_ranks, on_fault=stop)
    server = Server(
        host,
        name,
        adapters=[each for each, _ in options.adapter],
        chat_template=_template(options, engine.model),
        api_key=options.api_key or os.environ.get("WEFT_API_KEY"),
        limits=ServerLimits(max_body=options.max_body, max_n=options.max_n, timeout=options.request_timeout),
        make_mask=make_mask,
        is_local=is_loopback(options.host),
    )
    listener = listen(server.app(), host, name, options.host, options.port)
    listener.run()
    if host.fault is not None:
        print(f"error: a step of the engine raised {type(host.fault).__name__}: {host.fault}", file=sys.stderr)
    return 1 if host.fault is not None else 0


def _template(options: Serve, model: Model) -> ChatTemplate | None:
    own = read_chat_template(model.path, f"weft serve {options.model}")
    if options.chat_template is None:
        return own
    try:
        source = Path(options.chat_template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        options.refuse(f"--chat-template {options.chat_template}", f"{error}", "a file in Jinja")
    return ChatTemplate(source, {} if own is None else own.special_tokens)
