"""Deliberate mistakes, one for each step that a new user takes, and what is said of each: the call, what was seen, and
what to write instead. The texts are whole, so that a change of a message is a change here, to be read as a user would.
"""
# ruff: noqa: E501  # messages as they print

import functools
import re
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import weft
from weft import errors
from weft.cli import main
from weft.effects import parse_listing
from weft.stages import DEMO, from_module
from weft.transforms import (
    Costs,
    Distributed,
    Threads,
    check,
    decode_jobs,
    launch,
    make_programs,
    make_runner,
    make_state,
    simulate,
)

X = torch.ones(3)
LIMITS = weft.Limits(max_num_reqs=4, max_num_tokens=16)
ONE = weft.EngineLimits(max_num_reqs=1, max_num_tokens=16, max_model_len=64)


@functools.cache
def model() -> weft.Model:
    return weft.load(DEMO, "cpu")


def stage(params: Any, state: Any, batch: Tensor, x: Tensor | None) -> tuple[Any, Tensor]:
    return state, params * (batch if x is None else x)


def engine(**options: Any) -> weft.Engine:
    return weft.Engine(model(), ONE, graph="none", **options)


def spanned(**options: Any) -> Any:
    """A pipeline of two stages, called."""
    step = weft.pipeline([stage, stage], **options)
    return step([torch.ones(()), torch.ones(())], [None, None], X)


@attrs.frozen
class NoOrder:
    """A descriptor that forgot `covers`."""

    size: int


@attrs.frozen(eq=False)
class NoPytree:
    """A class that forgot `@weft.pytree`."""

    x: Tensor


def f(x: Tensor) -> Tensor:
    return x + 1


def g(state: Tensor, x: Tensor) -> Tensor:
    return state + x


def collects(kept: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x + 1

    return keep


def frozen_miss() -> None:
    step = weft.graphify(f)
    step(X)
    step.freeze()
    step(torch.ones(4))


def one_capture_too_many() -> None:
    step = weft.graphify(f)
    with weft.assert_max_captures(1):
        step(X)
        step(torch.ones(4))


def donated_twice() -> None:
    step = weft.graphify(g, donate_argnames="state")
    state = torch.zeros(3)
    step(state, X)
    step(state, X)


def a_dead_state() -> None:
    runner = make_runner(model(), LIMITS, mode="none")
    (state,) = make_state(model(), runner.layouts, lengths=[16])
    runner.stages[0](runner.params[0], state, weft.Batch.ragged([0], [[5]]), None)
    _ = state.kv_pages


def a_borrowed_result() -> None:
    step = weft.graphify(f, outputs="borrow")
    with weft.check_borrowed():
        step(X)
        first = step(X)
        step(X)
        _ = first + 1


def two_of_a_name() -> None:
    serving = engine()
    serving.add("A", max_tokens=1, id="mine")
    serving.add("B", max_tokens=1, id="mine")


def waits(params: Any, state: Any, batch: Any, x: Any) -> Any:
    import time

    time.sleep(1.5)
    return state, x


def stalled() -> None:
    weft.pipeline([stage, waits], transport=Threads(timeout=0.2))([X, X], [None, None], X)


DEADLOCK = """rank 0 of 2
  run stage 0 [mb 0]
rank 1 of 2
  recv from 0 [mb 0]
  run stage 1 [mb 0]
"""

# fmt: off
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "name: the transform as JAX calls it": (lambda: weft.jit, """
        AttributeError: module 'weft' has no attribute 'jit'; weft.graphify is what does it here
    """),
    # own function, graphify
    "graphify: an option of jit": (lambda: weft.graphify(g, donate_argnums=(0,)), """
        ArgumentError: graphify(..., donate_argnums=...)
          saw: 'donate_argnums', which is no argument of it
          instead: donate_argnames=[...], by name
    """),
    "graphify: an argument that is none": (lambda: weft.graphify(f, donate_argnames=["state"]), """
        CaptureError: graphify(f, ...)
          saw: donate_argnames holds 'state', which is no argument of it
          instead: one of x
    """),
    "graphify: a back end that is none": (lambda: weft.graphify(f, backend="cudagraph"), """
        DeviceError: graphify(..., backend='cudagraph')
          saw: no such back end
          instead: backend='tape', 'cuda' or None
    """),
    "graphify: a call in place of a function": (lambda: weft.graphify(f(X)), """
        CaptureError: graphify(<a Tensor>, ...)
          saw: a tensor of shape (3,), the result of a call
          instead: the function itself: graphify(f), and not graphify(f(x))
    """),
    "graphify: a value read on the host": (lambda: weft.graphify(lambda x: x * x.max().item())(X), """
        CaptureError: graphify(<lambda>)
          saw: Tensor.item reads a tensor on the host
               at <line>
          instead: compute it with tensor operations (torch.where), pass it as a static argument, or move it out of the function
    """),
    "graphify: a branch on data": (lambda: weft.graphify(lambda x: x if x.sum() > 0 else -x)(X), """
        CaptureError: graphify(<lambda>)
          saw: a branch on a tensor's value
               at <line>
          instead: compute it with tensor operations (torch.where), pass it as a static argument, or move it out of the function
    """),
    "graphify: a write to an argument": (lambda: weft.graphify(lambda x: x.add_(1))(X), """
        CaptureError: graphify(<lambda>)
          saw: aten.add_.Tensor writes to x of shape (3,), which it does not own
               at <line>
          instead: return a new tensor, or donate the argument (donate_argnames=...)
    """),
    "graphify: a list that collects": (lambda: weft.graphify(collects([]))(X), """
        CaptureError: graphify(keep)
          saw: an argument, or a view of one, is kept and not returned (float32[3], float32[3]): in a cache, a global or an attribute
          instead: keep a clone of it outside the function
    """),
    "graphify: an array of numpy": (lambda: weft.graphify(f)(X.numpy()), """
        CaptureError: f(...)
          saw: x is no tensor and cannot be hashed (unhashable type: 'numpy.ndarray')
          instead: torch.from_numpy(array)
    """),
    "graphify: a class that is no pytree": (lambda: weft.graphify(lambda b: b.x)(NoPytree(X)), """
        CaptureError: <lambda>(...)
          saw: b is a NoPytree, which is neither a tensor, a plain value nor a pytree
          instead: register its class (weft.pytree), pass its tensors, or name it in static_argnames if it never changes
    """),
    "graphify: a new shape after freeze": (frozen_miss, """
        CacheMissError: f(...)
          saw: a miss after freeze(): x: shape (4,), captured (3,)
          instead: capture this signature before freeze(), or call with arguments like the captured ones
    """),
    "graphify: a capture too many": (one_capture_too_many, """
        TooManyCapturesError: with weft.assert_max_captures(1): f
          saw: one capture more (x: shape (4,), captured (3,)), after: f
          instead: call with arguments like the captured ones, or allow more captures
    """),
    "piecewise: an operator that is not called": (lambda: weft.piecewise(f, split_at="aten::sort")(X), """
        CaptureError: graphify(f)
          saw: no call of aten::sort, where it was to be cut into pieces
          instead: name an operator that it calls: aten::add
    """),
    # padding and ladders
    "ladder: a mode of another name": (lambda: weft.make_ladder("cudagraph", LIMITS), """
        DescriptorError: make_ladder('cudagraph', Limits(max_num_reqs=4, max_num_tokens=16, query_lens=(1,), active_loras=(0,)), sizes=None, capability='always')
          saw: an unknown mode
          instead: one of none, piecewise, full_decode_only, full, full_and_piecewise
    """),
    "ladder: a number for limits": (lambda: weft.make_ladder("full", 8), """
        DescriptorError: make_ladder('full', 8, sizes=None, capability='always')
          saw: limits that are no weft.Limits
          instead: weft.Limits(max_num_reqs, max_num_tokens)
    """),
    "ladder: a class without covers": (lambda: weft.graphify(f, ladder=[NoOrder(4)]), """
        CaptureError: graphify(f, ...)
          saw: ladder=[NoOrder(size=4)]; NoOrder has no method covers
          instead: a sequence of descriptors, as from weft.make_ladder(mode, limits), or of a hashable class (such as an @attrs.frozen one) with a method covers(other)
    """),
    "ladder: a tensor where a batch should be": (lambda: weft.graphify(f, ladder=weft.make_ladder("full", LIMITS))(X), """
        CaptureError: graphify(f, ladder=...)(x)
          saw: a ladder, but no argument that holds a descriptor
          instead: pass a weft.Batch (or a class of your own with a weft.descriptor_field()) of one class, or leave the ladder out
    """),
    "dispatch: a batch for its class": (lambda: weft.dispatch(weft.Batch.decode([0]), weft.make_ladder("full", LIMITS)), """
        DescriptorError: dispatch(Batch, Ladder)
          saw: a batch where its class should be
          instead: dispatch(batch.descriptor, ladder)
    """),
    "batch: a row for rows": (lambda: weft.Batch.decode(3), """
        DescriptorError: Batch.decode(rows)
          saw: rows is 3, a int
          instead: rows of the state, as in [0, 2]
    """),
    "batch: texts for token ids": (lambda: weft.Batch.ragged([0], ["The"]), """
        DescriptorError: Batch.ragged(rows, token_ids)
          saw: token_ids[0] is 'The', a str
          instead: model.encode(token_ids[0])
    """),
    "batch: a class that contradicts itself": (lambda: weft.BatchDescriptor(7, 2, query_len=3), """
        DescriptorError: BatchDescriptor(7, 2, query_len=3)
          saw: num_tokens=7 is not num_reqs*query_len=2*3
          instead: BatchDescriptor.uniform(num_reqs=2, query_len=3), or query_len=None
    """),
    "pad: a number for a class": (lambda: weft.pad(weft.Batch.decode([0]), 4), """
        DescriptorError: weft.pad(Batch, 4)
          saw: 4 where a descriptor should be
          instead: a hashable value with a method covers(other): a weft.BatchDescriptor, or an @attrs.frozen class
    """),
    "pad: to a smaller class": (lambda: weft.pad(weft.Batch.decode([0, 1]), weft.BatchDescriptor.uniform(1)), """
        DescriptorError: weft.pad(batch, uniform x1, 1 reqs)
          saw: the batch is uniform x1, 2 reqs, which that descriptor does not cover
          instead: pad to a descriptor d with d.covers(batch.descriptor)
    """),
    # donation
    "donation: the old state again": (donated_twice, """
        DonatedError: g(...)
          saw: a tensor of shape (3,) that was donated to g(state)
          instead: use the value that it returned, or pass a copy (weft.clone) to keep the old one
    """),
    "donation: a field of the old state": (a_dead_state, """
        DonatedError: State.kv_pages
          saw: this State was donated to stage 0 of 1(state)
          instead: use the value that it returned, or pass a copy (weft.clone) to keep the old one
    """),
    "donation: a borrowed result too late": (a_borrowed_result, """
        StaleResultError: add(...)
          saw: a borrowed result of f, which 1 later replay has overwritten
          instead: use it before the next call, clone it, or write graphify(..., outputs="safe")
    """),
    # pipelines
    "pipeline: one stage, not a list": (lambda: weft.pipeline(stage), """
        ProgramError: pipeline(stage)
          saw: one function
          instead: a list of stages: pipeline([stage])
    """),
    "pipeline: a stage of another signature": (lambda: weft.pipeline([f, f]), """
        ProgramError: pipeline(<2 stages>)
          saw: stage 0, f(x: torch.Tensor) -> torch.Tensor
          instead: a stage (params, state, batch, x) -> (state, y)
    """),
    "pipeline: a module for a stage": (lambda: weft.pipeline([torch.nn.Linear(2, 2)]), """
        ProgramError: pipeline(<1 stage>)
          saw: stage 0 is an nn.Module
          instead: weft.stages.from_module(module).stage
    """),
    "pipeline: params of one stage": (lambda: weft.pipeline([stage, stage])([X], [None, None], X), """
        ProgramError: pipeline(<2 stages>)(params, state, batch)
          saw: params has 1 entries
          instead: pass a tuple or list with one entry a stage
    """),
    "pipeline: no state at all": (lambda: weft.pipeline([stage, stage])([X, X], None, X), """
        ProgramError: pipeline(<2 stages>)(params, state, batch)
          saw: state is None
          instead: pass a tuple or list with one entry a stage: (None, None) where they have no state
    """),
    "pipeline: a result without the state": (lambda: weft.pipeline([lambda p, s, b, x: b])([X], [None], X), """
        ProgramError: stage 0 (<lambda>)
          saw: it returned a Tensor
          instead: return (state, y)
    """),
    "pipeline: a transport by name": (lambda: spanned(transport="threads"), """
        ProgramError: pipeline(<2 stages>, transport=...)
          saw: transport='threads'
          instead: Local(), Threads() or Distributed(), of weft.transforms
    """),
    "pipeline: processes without a launcher": (lambda: spanned(transport=Distributed()), """
        ProgramError: Distributed()
          saw: no RANK and WORLD_SIZE in the environment
          instead: torchrun --nproc-per-node N script.py, or weft.transforms.launch(function, N)
    """),
    "pipeline: another schema than declared": (lambda: spanned(schema=weft.Schema.parse("[4] float32")), """
        ProgramError: rank 0: 'send to 1 [mb 0]: [4] float32'
          saw: a value of schema [3] float32
          instead: return [4] float32 from the stage
    """),
    "pipeline: a rank that stalls": (stalled, """
        RankError: rank 0: 'the whole step'
          saw: rank 1 failed at 'run stage 1 [mb 0]': no progress for 0.2 s
          instead: mend what failed on rank 1; a transport's timeout=... says how long it may keep others
    """),
    "pipeline: a program that cannot end": (lambda: check(parse_listing(DEADLOCK)), """
        ProgramError: check of 2 programs
          saw: no rank can go on: rank 1: 'recv from 0 [mb 0]' waits for rank 0, which is at its end
          instead: give every send a recv, and order them so that one message an edge is enough
    """),
    "pipeline: costs of fewer stages": (lambda: simulate(make_programs(2, decode_jobs(1, 1)), Costs(stages=(1e-3,))), """
        CostError: costs of 'run stage 1 [mb 0]'
          saw: costs of 1 stages
          instead: one for each stage
    """),
    "pipeline: a function that cannot travel": (lambda: launch(lambda: None, 2), """
        ProgramError: launch(<lambda>, 2)
          saw: Can't pickle local object '<lambda>.<locals>.<lambda>'
          instead: a function of a module or of the script itself, by its name, and arguments that can be pickled
    """),
    "scan: a step without a state": (lambda: weft.scan(lambda params, state, batch: batch, 2)(None, None, X), """
        ProgramError: scan(<lambda>, 2)
          saw: the step returned a Tensor
          instead: return (state, out)
    """),
    "stage: a function for a module": (lambda: from_module(f), """
        ProgramError: weft.stages.from_module(module)
          saw: f, a function and no nn.Module
          instead: a function (params, state, batch, x) -> (state, y) is a stage as it is
    """),
    # models and requests
    "load: a name of the hub": (lambda: weft.load("Qwen/Qwen3-0.6B", "cpu"), """
        CheckpointNotFoundError: load_config('Qwen/Qwen3-0.6B')
          saw: there is no folder 'Qwen/Qwen3-0.6B'
          instead: pass a local folder; `hf download <name> --local-dir <folder>` makes one
    """),
    "load: a file for its folder": (lambda: weft.load(DEMO / "config.json", "cpu"), """
        CheckpointNotFoundError: load_config('<demo>/config.json')
          saw: '<demo>/config.json' is a file
          instead: its folder: '<demo>'
    """),
    "load: a dtype by its short name": (lambda: weft.load("any", "cpu", "bf16"), """
        RequestError: weft.load('any', device='cpu', dtype='bf16')
          saw: dtype 'bf16'
          instead: one of float32, bfloat16, float16
    """),
    "generate: a prompt for a list of them": (lambda: weft.generate(model(), "A", max_tokens=1), """
        RequestError: weft.generate(model, prompts, max_tokens=1, temperature=0.0, pipeline=1)
          saw: prompts='A'
          instead: pass a list of prompts, each a string or a list of token ids
    """),
    "generate: the argument of transformers": (lambda: weft.generate(model(), ["A"], max_new_tokens=1), """
        ArgumentError: generate(..., max_new_tokens=...)
          saw: 'max_new_tokens', which is no argument of it
          instead: max_tokens=...
    """),
    "generate: a folder for a model": (lambda: weft.generate(DEMO, ["A"], max_tokens=1), """
        RequestError: weft.generate(model, prompts, max_tokens=1, temperature=0.0, pipeline=1)
          saw: model is a PosixPath
          instead: model = weft.load(folder)
    """),
    "generate: more stages than layers": (lambda: weft.generate(model(), ["A"], max_tokens=1, pipeline=9), """
        RequestError: weft.generate(model, prompts, max_tokens=1, temperature=0.0, pipeline=9)
          saw: pipeline=9; the model has 6 layers
          instead: from 1 stage to one a layer
    """),
    "sampling: a probability above one": (lambda: weft.SamplingParams(top_p=1.5), """
        RequestError: SamplingParams(top_p=1.5)
          saw: top_p=1.5
          instead: a number > 0 and <= 1; 1 keeps all
    """),
    "sampling: vLLM's max_tokens": (lambda: weft.SamplingParams(max_tokens=5), """
        ArgumentError: SamplingParams(..., max_tokens=...)
          saw: 'max_tokens', which is no argument of it
          instead: generate(..., max_tokens=...), or engine.add(..., max_tokens=...)
    """),
    "sampling: a token that is none": (
        lambda: weft.generate(model(), ["A"], max_tokens=1, sampling=weft.SamplingParams(bad_token_ids=[999])), """
        RequestError: SamplingParams(bad_token_ids=(999,))
          saw: bad_token_ids holds 999
          instead: token ids of this model go from 0 to 256
    """
    ),
    "engine: limits by vLLM's names": (lambda: weft.EngineLimits(max_num_seqs=4), """
        ArgumentError: EngineLimits(..., max_num_seqs=...)
          saw: 'max_num_seqs', which is no argument of it
          instead: max_num_reqs=...
    """),
    "engine: a limit of zero": (lambda: weft.EngineLimits(max_model_len=0), """
        RequestError: weft.EngineLimits(max_model_len=0)
          saw: max_model_len=0
          instead: a whole number >= 1, or None
    """),
    "engine: a number for limits": (lambda: weft.Engine(model(), 4), """
        RequestError: weft.Engine(model, pipeline=1, graph='full_and_piecewise', run_ahead=1)
          saw: limits is a int
          instead: weft.EngineLimits(...), or None
    """),
    "engine: two prompts at once": (lambda: engine().add(["A", "B"], max_tokens=1), """
        RequestError: engine.add(prompt, SamplingParams(temperature=0.0), max_tokens=1, id='request 0')
          saw: the prompt is a list of strings
          instead: one prompt: a string or a list of token ids
    """),
    "engine: a dict for sampling": (lambda: engine().add("A", {"temperature": 1}, max_tokens=1), """
        RequestError: engine.add(prompt, {'temperature': 1}, max_tokens=1, id='request 0')
          saw: sampling is a dict
          instead: weft.SamplingParams(...), or None
    """),
    "engine: two requests of one id": (two_of_a_name, """
        RequestError: engine.add(prompt, None, max_tokens=1, id='mine')
          saw: a request of that id that has not ended
          instead: another id, or abort it first
    """),
    "engine: more than the pages hold": (lambda: engine().add([5] * 60, max_tokens=9), """
        RequestError: engine.add(..., id='request 0')
          saw: 69 tokens with those to generate, where 4 pages hold 64
          instead: a shorter prompt, fewer max_tokens, or more pages
    """),
    "adapter: one that the engine does not have": (lambda: engine().add("A", max_tokens=1, adapter="sql"), """
        RequestError: engine.add(prompt, SamplingParams(temperature=0.0), max_tokens=1, id='request 0')
          saw: adapter='sql'
          instead: Engine(..., adapters={name: weft.load_adapter(model, folder)}): this one has none
    """),
    "adapter: folder and model the other way": (lambda: weft.load_adapter(DEMO, model()), """
        RequestError: weft.load_adapter(model, folder)
          saw: a PosixPath and a Model
          instead: model = weft.load(folder) first, then the adapter's folder
    """),
    "speculation: a number": (lambda: engine(speculation=3), """
        RequestError: weft.Engine(model, pipeline=1, graph='none', run_ahead=1)
          saw: speculation is a int
          instead: weft.Speculation(...), or None
    """),
    "speculation: no drafts": (lambda: weft.Speculation(num_tokens=0), """
        RequestError: weft.Speculation(num_tokens=0, ngram=None, model=None)
          saw: num_tokens=0
          instead: a whole number >= 1
    """),
    "state: a number for lengths": (lambda: make_state(model(), (), 32), """
        RequestError: make_state(model, layouts, lengths)
          saw: lengths=32
          instead: a list of whole numbers >= 1, one a request
    """),
}
# fmt: on

COMMANDS: dict[str, tuple[list[str], str]] = {
    "a command that is none": (["generat"], "argument COMMAND: invalid choice: 'generat' (choose from"),
    "no model": (["generate", "--prompt", "A"], "weft generate: error: the following arguments are required: --model"),
    "no prompt": (
        ["generate", "--model", str(DEMO)],
        "no prompt: give at least one --prompt TEXT or --prompt-ids 1,2,3",
    ),
    "an option of another name": (
        ["generate", "--model", str(DEMO), "--prompt", "A", "--speculation", "3"],
        "weft generate: error: unrecognized arguments: --speculation 3 (instead: --speculate, or see weft generate --help)",
    ),
    "an option that is none": (
        ["doctor", "--tensor-parallel-size=2"],
        "weft doctor: error: unrecognized arguments: --tensor-parallel-size=2 (instead: see weft doctor --help)",
    ),
    "a folder that is not there": (
        ["generate", "--model", "nowhere", "--prompt", "A"],
        "saw: there is no folder 'nowhere'\n  instead: pass a local folder; `hf download",
    ),
    "more stages than layers": (["plan", "--model", str(DEMO), "--pp", "9"], "instead: from 1 stage to one a layer"),
    "fewer tokens than requests": (
        ["bench", "--preset", "tiny", "--max-num-seqs", "4", "--max-num-tokens", "2"],
        "error: weft bench --max-num-tokens 2\n  saw: 2 tokens a step for 4 requests\n  instead: 4 or more",
    ),
    "more tokens than positions": (["demo", "--max-tokens", "9999"], "instead: a number from 1 to 492"),
}


def said_of(wrong: Callable[[], Any]) -> Exception:
    try:
        wrong()
    except Exception as error:
        return error
    pytest.fail("nothing was said")


def as_written(error: Exception) -> str:
    """Its text, without what is of this machine alone."""
    text = re.sub(r"\n       at .*", "\n       at <line>", f"{type(error).__name__}: {error}")
    return text.replace(str(DEMO), "<demo>")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered(mistake: str) -> None:
    wrong, text = MISTAKES[mistake]
    error = said_of(wrong)
    assert as_written(error) == dedent(text).strip()


@pytest.mark.parametrize("mistake", [mistake for mistake in MISTAKES if not mistake.startswith("name:")])
def test_it_is_of_the_call_what_was_seen_and_the_remedy(mistake: str) -> None:
    error = said_of(MISTAKES[mistake][0])
    assert isinstance(error, errors.WeftError)
    for part in (error.call, error.seen, error.instead):
        assert part.strip()
    assert "object at 0x" not in str(error)
    assert max(map(len, str(error).splitlines())) < 200


@pytest.mark.parametrize("mistake", COMMANDS)
def test_a_mistake_in_a_shell_is_answered(mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv, text = COMMANDS[mistake]
    try:
        code: object = main(argv)
    except SystemExit as left:  # argparse
        code = left.code
    assert code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err


def test_an_error_inside_a_stage_is_the_users_own_and_says_where() -> None:
    def forgets(params: Any, state: Any, batch: Tensor, x: Any) -> Any:
        return state, x * params

    with pytest.raises(TypeError, match="unsupported operand") as error:
        weft.pipeline([forgets, stage])([X, X], [None, None], X)
    note = "in stage 0 (forgets); x is None on the first stage, which computes from the batch"
    assert note in error.value.__notes__


def test_there_are_at_least_30_of_every_step() -> None:
    assert len(MISTAKES) + len(COMMANDS) >= 30
    steps = {mistake.partition(":")[0] for mistake in MISTAKES}
    assert steps >= {"graphify", "ladder", "pad", "donation", "pipeline", "load", "generate", "engine", "sampling"}
    assert steps >= {"adapter", "speculation"}


def test_the_line_that_is_named_is_the_users_own() -> None:
    error = said_of(lambda: weft.graphify(lambda x: x * x.max().item())(X))
    assert re.search(rf"at {re.escape(__file__)}:\d+: .*x\.max\(\)\.item\(\)", str(error))
