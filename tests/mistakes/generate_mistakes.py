"""Mistakes with a model, what is generated with it, and how its tokens are drawn."""

from typing import Any

from answers import Mistake, model

import weft
from weft.errors import ArgumentError, CheckpointNotFoundError, ProgramError, RequestError
from weft.stages import DEMO
from weft.transforms import make_runner, make_state


def stage_of(index: int, params: int, x: Any) -> None:
    """A stage of the demo, with the parameters of one, and what comes from the stage before."""
    runner = make_runner(model(), weft.Limits(1, 8), num_stages=2, mode="none")
    state = make_state(model(), runner.layouts, lengths=[16])
    runner.stages[index](runner.params[params], state[index], weft.Batch.ragged([0], [[5]]), x)


MISTAKES = {
    "load: a name of the hub": Mistake(
        lambda: weft.load("Qwen/Qwen3-0.6B", "cpu"),
        CheckpointNotFoundError,
        "weft.load('Qwen/Qwen3-0.6B', device='cpu', dtype=None)",
        "there is no folder 'Qwen/Qwen3-0.6B'",
        "pass a local folder; `hf download <name> --local-dir <folder>` makes one",
    ),
    "load: a file for its folder": Mistake(
        lambda: weft.load(DEMO / "config.json", "cpu"),
        CheckpointNotFoundError,
        "weft.load('<demo>/config.json', device='cpu', dtype=None)",
        "'<demo>/config.json' is a file",
        "its folder: '<demo>'",
    ),
    "load: a dtype by its short name": Mistake(
        lambda: weft.load("any", "cpu", "bf16"),
        RequestError,
        "weft.load('any', device='cpu', dtype='bf16')",
        "dtype='bf16'",
        "one of float32, bfloat16, float16",
    ),
    "generate: a prompt for a list of them": Mistake(
        lambda: weft.generate(model(), "A", max_tokens=1),
        RequestError,
        "weft.generate(model, prompts, max_tokens=1, temperature=0.0, pipeline=1)",
        "prompts='A'",
        "pass a list of prompts, each a string or a list of token ids",
    ),
    "generate: the argument of transformers": Mistake(
        lambda: weft.generate(model(), ["A"], max_new_tokens=1),
        ArgumentError,
        "generate(..., max_new_tokens=...)",
        "'max_new_tokens', which is no argument of it",
        "max_tokens=...",
    ),
    "generate: a folder for a model": Mistake(
        lambda: weft.generate(DEMO, ["A"], max_tokens=1),
        RequestError,
        "weft.generate(model, prompts, max_tokens=1, temperature=0.0, pipeline=1)",
        "model is a PosixPath",
        "model = weft.load(folder)",
    ),
    "generate: more stages than layers": Mistake(
        lambda: weft.generate(model(), ["A"], max_tokens=1, pipeline=9),
        RequestError,
        "weft.generate(model, prompts, max_tokens=1, temperature=0.0, pipeline=9)",
        "pipeline=9",
        "a whole number from 1 to 6, the model's layers",
    ),
    "sampling: a probability above one": Mistake(
        lambda: weft.SamplingParams(top_p=1.5),
        RequestError,
        "SamplingParams(top_p=1.5)",
        "top_p=1.5",
        "a number > 0 and <= 1; 1 keeps all",
    ),
    "sampling: vLLM's max_tokens": Mistake(
        lambda: weft.SamplingParams(max_tokens=5),
        ArgumentError,
        "SamplingParams(..., max_tokens=...)",
        "'max_tokens', which is no argument of it",
        "generate(..., max_tokens=...), or engine.add(..., max_tokens=...)",
    ),
    "sampling: a token that is none": Mistake(
        lambda: weft.generate(
            model(), ["A"], max_tokens=1, sampling=weft.SamplingParams(bad_token_ids=[999])
        ),
        RequestError,
        "SamplingParams(bad_token_ids=(999,))",
        "bad_token_ids holds 999",
        "token ids of this model go from 0 to 256",
    ),
    "load: more stages than layers": Mistake(
        lambda: make_runner(weft.load(DEMO, "cpu"), weft.Limits(1, 8), num_stages=9),
        ProgramError,
        "make_runner(model, limits, num_stages=9)",
        "num_stages=9",
        "a whole number from 1 to 6, the model's layers",
    ),
    "load: parameters of another stage": Mistake(
        lambda: stage_of(0, 1, None),
        ProgramError,
        "stage 0 of 2(params, state, batch, x)",
        "params of 3 layers, the head",
        "this stage's own, of layers 0 to 2: Runner.params[0]",
    ),
    "load: nothing to go on from": Mistake(
        lambda: stage_of(1, 1, None),
        ProgramError,
        "stage 1 of 2(params, state, batch, x)",
        "x is None",
        "what the stage before returned",
    ),
    "load: a number for a speculation": Mistake(
        lambda: weft.generate(weft.load(DEMO, "cpu"), ["A"], max_tokens=1, speculation=3),
        RequestError,
        "weft.generate(model, prompts, max_tokens=1, temperature=0.0, pipeline=1)",
        "speculation is an int",
        "weft.Speculation(...), or None",
    ),
}
