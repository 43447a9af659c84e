"""Mistakes with an engine, its requests, adapters, drafts and state."""

from typing import Any

from answers import Mistake, model

import weft
from weft.errors import ArgumentError, ProgramError, RequestError
from weft.stages import DEMO
from weft.transforms import make_state

ONE = weft.EngineLimits(max_num_reqs=1, max_num_tokens=16, max_model_len=64)


def engine(**options: Any) -> weft.Engine:
    return weft.Engine(model(), ONE, graph="none", **options)


def two_of_a_name() -> None:
    serving = engine()
    serving.add("A", max_tokens=1, id="mine")
    serving.add("B", max_tokens=1, id="mine")


MISTAKES = {
    "engine: limits by vLLM's names": Mistake(
        lambda: weft.EngineLimits(max_num_seqs=4),
        ArgumentError,
        "EngineLimits(..., max_num_seqs=...)",
        "'max_num_seqs', which is no argument of it",
        "max_num_reqs=...",
    ),
    "engine: a limit of zero": Mistake(
        lambda: weft.EngineLimits(max_model_len=0),
        RequestError,
        "weft.EngineLimits(max_model_len=0)",
        "max_model_len=0",
        "a whole number >= 1, or None",
    ),
    "engine: a number for limits": Mistake(
        lambda: weft.Engine(model(), 4),
        RequestError,
        "weft.Engine(model, pipeline=1, graph='full_and_piecewise', run_ahead=1)",
        "limits is an int",
        "weft.EngineLimits(...), or None",
    ),
    "engine: two prompts at once": Mistake(
        lambda: engine().add(["A", "B"], max_tokens=1),
        RequestError,
        "engine.add(prompt, max_tokens=1, id='request 0')",
        "the prompt holds 'A'",
        "one prompt: a string or a list of token ids",
    ),
    "engine: a dict for sampling": Mistake(
        lambda: engine().add("A", {"temperature": 1}, max_tokens=1),
        RequestError,
        "engine.add(prompt, {'temperature': 1}, max_tokens=1, id='request 0')",
        "sampling is a dict",
        "weft.SamplingParams(...), or None",
    ),
    "engine: no number of tokens": Mistake(
        lambda: engine().add("A", id="mine"),
        ArgumentError,
        "add(..., id=...)",
        "no max_tokens",
        "max_tokens=...",
    ),
    "engine: graphs of another device": Mistake(
        lambda: engine(backend="cuda"),
        ProgramError,
        "weft.Engine(model, pipeline=1, graph='none', run_ahead=1)",
        "backend='cuda', and a model on 'cpu'",
        'backend=None; or weft.load(..., device="cuda")',
    ),
    "engine: extras of a model without any": Mistake(
        lambda: engine().add("A", max_tokens=1, extras={"v": 1}),
        RequestError,
        "engine.add(prompt, max_tokens=1, id='request 0')",
        "extras={'v': 1}",
        "no extras, since the model has none; model.with_stages(..., extras={name: default}) gives"
        " it some",
    ),
    "engine: two requests of one id": Mistake(
        two_of_a_name,
        RequestError,
        "engine.add(prompt, max_tokens=1, id='mine')",
        "a request of that id that has not ended",
        "another id, or abort it first",
    ),
    "engine: more than the pages hold": Mistake(
        lambda: engine().add([5] * 60, max_tokens=9),
        RequestError,
        "engine.add(..., id='request 0')",
        "a prompt of 60 tokens, and 9 to generate; a request may have 64, by"
        " EngineLimits.max_model_len",
        "a shorter prompt, fewer max_tokens, or a greater max_model_len",
    ),
    "engine: a chat for a prompt": Mistake(
        lambda: engine().add([{"role": "user", "content": "A"}], max_tokens=1),
        RequestError,
        "engine.add(prompt, max_tokens=1, id='request 0')",
        "the prompt holds {'role': 'user', 'content': 'A'}",
        "model.encode_chat(messages), or weft.generate(model, [messages], chat=True)",
    ),
    "adapter: one that the engine does not have": Mistake(
        lambda: engine().add("A", max_tokens=1, adapter="sql"),
        RequestError,
        "engine.add(prompt, max_tokens=1, id='request 0')",
        "adapter='sql'",
        "Engine(..., adapters={name: weft.load_adapter(model, folder)}): this one has none",
    ),
    "adapter: folder and model the other way": Mistake(
        lambda: weft.load_adapter(DEMO, model()),
        RequestError,
        "weft.load_adapter(model, folder)",
        "model is a PosixPath",
        "model = weft.load(folder) first, then weft.load_adapter(model, the adapter's folder)",
    ),
    "speculation: a number": Mistake(
        lambda: engine(speculation=3),
        RequestError,
        "weft.Engine(model, pipeline=1, graph='none', run_ahead=1)",
        "speculation is an int",
        "weft.Speculation(...), or None",
    ),
    "speculation: no drafts": Mistake(
        lambda: weft.Speculation(num_tokens=0),
        RequestError,
        "weft.Speculation(num_tokens=0, ngram=None, model=None)",
        "num_tokens=0",
        "a whole number from 1 to 1024",
    ),
    "state: a number for lengths": Mistake(
        lambda: make_state(model(), (), 32),
        RequestError,
        "make_state(model, layouts, lengths)",
        "lengths=32",
        "a list of whole numbers >= 1, one a request",
    ),
    "engine: rows for an engine": Mistake(
        lambda: weft.Engine(model(), max_num_seqs=4),
        ArgumentError,
        "Engine(..., max_num_seqs=...)",
        "'max_num_seqs', which is no argument of it",
        "limits=weft.EngineLimits(max_num_reqs=...)",
    ),
    "engine: a temperature for a request": Mistake(
        lambda: engine().add([1], max_tokens=1, temperature=1.0),
        ArgumentError,
        "add(..., temperature=...)",
        "'temperature', which is no argument of it",
        "weft.SamplingParams(temperature=...), after the prompt",
    ),
    "engine: n-grams of no tokens": Mistake(
        lambda: weft.Speculation(2, ngram=0),
        RequestError,
        "weft.Speculation(num_tokens=2, ngram=0, model=None)",
        "ngram=0",
        "the fewest tokens and the most, as in ngram=(1, 3)",
    ),
    "engine: limits by position": Mistake(
        lambda: weft.EngineLimits(4),
        ArgumentError,
        "EngineLimits(...)",
        "1 argument by position, of which it takes none",
        "max_num_reqs=..., <any>",
    ),
}
