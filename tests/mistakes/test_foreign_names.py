"""Arguments by the names that transformers, vLLM, SGLang and OpenAI's API have for them are
answered by what to write here: by whichever function they are given to."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from answers import model

import weft
from weft.arguments import equivalents
from weft.errors import ArgumentError
from weft.stages import DEMO

ONE = weft.EngineLimits(max_num_reqs=1, max_num_tokens=16, max_model_len=64)
CALLS: dict[str, Callable[..., Any]] = {
    "generate": lambda **kwargs: weft.generate(model(), ["A"], max_tokens=1, **kwargs),
    "add": lambda **kwargs: weft.Engine(model(), ONE, graph="none").add(
        "A", max_tokens=1, **kwargs
    ),
    "stream": lambda **kwargs: weft.Engine(model(), ONE, graph="none").stream(
        "A", max_tokens=1, **kwargs
    ),
    "SamplingParams": lambda **kwargs: weft.SamplingParams(**kwargs),
    "Engine": lambda **kwargs: weft.Engine(model(), ONE, **kwargs),
    "EngineLimits": lambda **kwargs: weft.EngineLimits(**kwargs),
    "load": lambda **kwargs: weft.load(DEMO, "cpu", **kwargs),
    "with_stages": lambda **kwargs: model().with_stages(**kwargs),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "generate": weft.generate,
    "add": weft.Engine.add,
    "stream": weft.Engine.stream,
    "SamplingParams": weft.SamplingParams,
    "Engine": weft.Engine,
    "EngineLimits": weft.EngineLimits,
    "load": weft.load,
    "with_stages": weft.Model.with_stages,
}
OWN = ("temperature", "top_p")
TABLES: dict[str, dict[str, str]] = {
    "generate": equivalents.for_generate(OWN),
    "add": equivalents.for_add(OWN),
    "stream": equivalents.for_add(OWN),
    "SamplingParams": equivalents.SAMPLING,
    "Engine": equivalents.ENGINE,
    "EngineLimits": equivalents.LIMITS,
    "load": equivalents.LOAD,
    "with_stages": equivalents.STAGES,
}
MASK = "mask=...): a function from the tokens said so far to those that may be next"
STAGES = "weft.transforms.make_runner(model, limits): its stages are functions that return them"
ANSWERS = {
    ("generate", "top_p"): "sampling=weft.SamplingParams(top_p=...)",
    ("generate", "num_return_sequences"): "sampling=weft.SamplingParams(n=...)",
    ("generate", "logits_processor"): f"weft.Engine(model).add(prompt, ..., {MASK}",
    ("generate", "output_hidden_states"): STAGES,
    ("generate", "streamer"): "stream=True",
    (
        "generate",
        "num_beams",
    ): "nothing like it: weft.SamplingParams(n=...) draws several completions",
    ("generate", "attention_mask"): "leave it out: prompts have any lengths, and none is padded",
    ("add", "top_p"): "weft.SamplingParams(top_p=...), after the prompt",
    ("add", "structured_outputs"): f"engine.add(prompt, ..., {MASK}",
    ("add", "lora_request"): "adapter=..., the name of one of Engine(..., adapters={...})",
    ("stream", "top_p"): "weft.SamplingParams(top_p=...), after the prompt",
    ("SamplingParams", "do_sample"): "temperature=...",
    (
        "SamplingParams",
        "max_new_tokens",
    ): "generate(..., max_tokens=...), or engine.add(..., max_tokens=...)",
    ("SamplingParams", "guided_decoding"): f"engine.add(prompt, ..., {MASK}",
    ("Engine", "gpu_memory_utilization"): "limits=weft.EngineLimits(num_pages=...)",
    ("Engine", "enforce_eager"): 'graph="none"',
    ("EngineLimits", "max_running_requests"): "max_num_reqs=...",
    (
        "load",
        "attn_implementation",
    ): "leave it out: weft has one attention for each device (`weft doctor` names it)",
    ("load", "revision"): "a folder with the files: weft downloads nothing",
    (
        "load",
        "load_in_8bit",
    ): "leave it out: linear layers are in FP8 where the checkpoint has them so",
    ("with_stages", "attn"): ("attention=..., or attend=... for attention between its projections"),
    ("with_stages", "mlp"): "feed_forward=...",
    # A slip of the pen is of the nearest name, which may be another library's.
    ("generate", "topp"): "sampling=weft.SamplingParams(top_p=...)",
    ("generate", "max_token"): "max_tokens=...",
    ("with_stages", "logit"): "logits=...",
}


@pytest.mark.parametrize(("function", "name"), ANSWERS)
def test_a_name_is_answered(function: str, name: str) -> None:
    with pytest.raises(ArgumentError) as error:
        CALLS[function](**{name: 1})
    assert error.value.call == f"{function}(..., {name}=...)"
    assert error.value.problem == f"{name!r}, which is no argument of it"
    assert error.value.instead == ANSWERS[function, name]


@pytest.mark.parametrize("function", TABLES)
def test_all_names_of_a_table_are_answered_by_it(function: str) -> None:
    for name, instead in TABLES[function].items():
        if (function, name) == ("generate", "temperature"):
            continue  # which it takes
        with pytest.raises(ArgumentError) as error:
            CALLS[function](**{name: None})
        assert error.value.instead == instead
        assert len(str(error.value)) < 250
        for path in re.findall(r"weft((?:\.\w+)+)\(", instead):
            target: Any = weft
            for part in path[1:].split("."):
                target = getattr(target, part)
        if match := re.match(r"(\w+)=", instead):
            assert match[1] in inspect.signature(FUNCTIONS[function]).parameters
