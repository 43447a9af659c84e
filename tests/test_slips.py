"""Slips of a new user's first day, beyond those of `tests/mistakes`: each error says the call, what was seen and what
to write instead."""

import contextlib
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusal import refused
from torch import Tensor, nn

import weft
from weft import errors
from weft.proofs import assert_equivalent, strategies
from weft.proofs import check as check_laws
from weft.proofs.strategies.engines import small_model
from weft.stages import DEMO, from_module
from weft.transforms import Costs, Transform, balance, lift, make_runner, make_state, plan_cohorts
from weft.transforms.graphify import graphify

X = torch.ones(3)
ONE = weft.BatchDescriptor.uniform(1)
LADDER = [ONE]
THREE = "a step (params, state, batch) -> (state, out)"


def f(x: Tensor) -> Tensor:
    return x + 1


def stage(params: Any, state: Any, batch: Tensor, x: Tensor | None) -> tuple[Any, Tensor]:
    return state, batch


@attrs.define
class Unhashable:
    size: int

    def covers(self, other: "Unhashable") -> bool:
        return self.size >= other.size


@attrs.frozen
class Length:
    steps: int

    def covers(self, other: "Length") -> bool:
        return self.steps >= other.steps


@weft.pytree
@attrs.frozen(eq=False)
class Signal:
    length: Length = attrs.field(metadata=weft.descriptor_field())
    x: Tensor = attrs.field(metadata=weft.axes("steps"))


@weft.pytree
@attrs.frozen(eq=False)
class Picture:
    length: Length = attrs.field(metadata=weft.descriptor_field())
    x: Tensor = attrs.field(metadata=weft.axes("steps", "steps"))


def set_config(name: str, value: Any) -> None:
    setattr(weft.config, name, value)


def dict_for_static() -> None:
    graphify(lambda x, how: x, static_argnames="how")(X, {"by": 2})


def stage_of(index: int, params: int, x: Any) -> None:
    """A stage of the demo, with the parameters of one, and what comes from the stage before."""
    model = weft.load(DEMO, "cpu")
    runner = make_runner(model, weft.Limits(1, 8), num_stages=2, mode="none")
    state = make_state(model, runner.layouts, lengths=[16])
    runner.stages[index](runner.params[params], state[index], weft.Batch.ragged([0], [[5]]), x)


SLIPS: dict[str, tuple[Callable[[], Any], type[errors.WeftError], str, str, str]] = {
    # settings
    "a setting of another name": (
        lambda: set_config("log_capture", True),
        errors.ArgumentError,
        "weft.config.log_capture = True",
        "'log_capture', which is no setting",
        "explain_cache_misses or log_captures",
    ),
    "a setting that is no bool": (
        lambda: set_config("log_captures", "yes"),
        errors.ArgumentError,
        "weft.config.log_captures = 'yes'",
        "a str",
        "True or False",
    ),
    # graphify
    "a number for names": (
        lambda: graphify(f, donate_argnames=0),
        errors.CaptureError,
        "graphify(f, ...)",
        "donate_argnames=0",
        "donate_argnames=[...], the names of arguments",
    ),
    "a dict that is static": (
        dict_for_static,
        errors.CaptureError,
        "<lambda>(...)",
        "how is no tensor and cannot be hashed (<any>)",
        "<any>, or take how out of static_argnames",
    ),
    "a move to another device": (
        lambda: graphify(lambda x: x.to("meta"))(X),
        errors.CaptureError,
        "graphify(<lambda>)",
        "a copy from cpu to meta inside the function\n<any>",
        "copy it before the call, or after it: x.to(device)",
    ),
    "a form of listing": (
        lambda: graphify(f).lower(X).as_text("svg"),
        errors.CaptureError,
        "f.lower(...).as_text('svg')",
        "no such form",
        "'text' or 'dot'",
    ),
    # ladders and batches
    "a class that cannot be hashed": (
        lambda: graphify(f, ladder=[Unhashable(4)]),
        errors.CaptureError,
        "graphify(f, ...)",
        "ladder=[Unhashable(size=4)]; Unhashable cannot be hashed",
        "<any>(such as an @attrs.frozen one) with a method covers(other)",
    ),
    "a query length for several": (
        lambda: weft.Limits(4, 16, query_lens=1),
        errors.DescriptorError,
        "weft.Limits(4, 16, query_lens=1)",
        "an int",
        "a tuple of whole numbers: query_lens=(1,)",
    ),
    "a size below one": (
        lambda: weft.make_ladder("full", weft.Limits(4, 16), sizes=[-1]),
        errors.DescriptorError,
        "make_ladder('full', <any>, sizes=[-1], <any>)",
        "sizes=[-1]",
        "sizes of at least 1, or None for the usual rungs",
    ),
    "a table of one class": (
        lambda: weft.dispatch_table(LADDER, ONE),
        errors.DescriptorError,
        "dispatch_table(list, BatchDescriptor)",
        "one class",
        "dispatch_table(ladder, [descriptor, ...])",
    ),
    "a table the other way round": (
        lambda: weft.dispatch_table(LADDER, weft.make_ladder("full", weft.Limits(4, 16))),
        errors.DescriptorError,
        "dispatch_table(list, Ladder)",
        "a ladder where the classes of batches should be",
        "dispatch_table(ladder, [descriptor, ...])",
    ),
    "a size to plot that no class has": (
        lambda: weft.dispatch_table(LADDER, LADDER).plot("tokens"),
        errors.DescriptorError,
        "dispatch_table(...).plot('tokens')",
        "no size of these classes",
        "one of num_tokens, num_reqs, query_len, num_active_loras, or None: the first that is padded",
    ),
    "a token that is half": (
        lambda: weft.Batch.ragged([0], [[5, 1.5]]),
        errors.DescriptorError,
        "Batch.ragged(rows, token_ids)",
        "token_ids[0] holds 1.5, a float",
        "whole numbers",
    ),
    "a row by name": (
        lambda: weft.Batch.decode(["A"]),
        errors.DescriptorError,
        "Batch.decode(['A'])",
        "rows holds 'A', a str",
        "whole numbers",
    ),
    "a number for a name of a size": (
        lambda: weft.axes(0),
        errors.DescriptorError,
        "weft.axes(0)",
        "0, an int",
        'names of sizes of the descriptor, as in axes("num_tokens"); None for a size of its own',
    ),
    "more names than dimensions": (
        lambda: weft.pad(Picture(Length(3), X), Length(4)),
        errors.DescriptorError,
        "Picture(x=<tensor of shape (3,)>)",
        "1 dimensions in a field with axes('steps', 'steps')",
        "a name for each dimension, or for the first ones",
    ),
    "a class that the tensors contradict": (
        lambda: weft.pad(Signal(Length(2), X), Length(4)),
        errors.DescriptorError,
        "weft.pad(Signal, Length(steps=4))",
        "a tensor of shape (3,) in a batch of class 'Length(steps=2)', which says (2,)",
        "give the batch the descriptor of its tensors",
    ),
    # pipelines
    "stages one by one": (
        lambda: weft.pipeline(stage, stage),
        errors.ArgumentError,
        "pipeline(..., ...)",
        "2 arguments by position, of which it takes 1",
        "a list of stages: pipeline([f, g])",
    ),
    # engines
    "rows for an engine": (
        lambda: weft.Engine(small_model(), max_num_seqs=4),
        errors.ArgumentError,
        "Engine(..., max_num_seqs=...)",
        "'max_num_seqs', which is no argument of it",
        "limits=weft.EngineLimits(max_num_reqs=...)",
    ),
    "a temperature for a request": (
        lambda: weft.Engine(small_model(), graph="none").add([1], max_tokens=1, temperature=1.0),
        errors.ArgumentError,
        "add(..., temperature=...)",
        "'temperature', which is no argument of it",
        "weft.SamplingParams(temperature=...), behind the prompt",
    ),
    "n-grams of no tokens": (
        lambda: weft.Speculation(2, ngram=0),
        errors.RequestError,
        "weft.Speculation(num_tokens=2, ngram=0, model=None)",
        "ngram=0",
        "the fewest tokens and the most, as in ngram=(1, 3)",
    ),
    "limits by position": (
        lambda: weft.EngineLimits(4),
        errors.ArgumentError,
        "EngineLimits(...)",
        "1 argument by position, of which it takes none",
        "max_num_reqs=..., <any>",
    ),
    "no stage": (
        lambda: weft.pipeline([stage, None]),
        errors.ProgramError,
        "pipeline(<2 stages>)",
        "stage 1 is None, no function",
        "a stage (params, state, batch, x) -> (state, y)",
    ),
    "a stage of three results": (
        lambda: weft.pipeline([lambda p, s, b, x: (s, b, x)])([X], [None], X),
        errors.ProgramError,
        "stage 0 (<lambda>)",
        "it returned a tuple of 3",
        "return (state, y)",
    ),
    "a batch for batches": (
        lambda: weft.pipeline([stage]).stream([X], [None], X),
        errors.ProgramError,
        "pipeline(<1 stage>).stream(params, state, batches)",
        "batches is a Tensor",
        "a list of batches: [batch]",
    ),
    "micro-batches of another function": (
        lambda: weft.microbatch(f, 2),
        errors.ProgramError,
        "microbatch(f, 2)",
        "f(x: torch.Tensor) -> torch.Tensor",
        THREE,
    ),
    "a scan of another function": (
        lambda: weft.scan(f, 2),
        errors.ProgramError,
        "scan(f, 2)",
        "f(x: torch.Tensor) -> torch.Tensor",
        THREE,
    ),
    "a scan the other way round": (
        lambda: weft.scan(2, f),
        errors.ProgramError,
        "scan(2, f)",
        "length=f",
        "an int >= 1",
    ),
    "more stages than layers to balance": (
        lambda: balance([1.0, 2.0, 3.0], 5),
        errors.ProgramError,
        "balance(<3 layers>, 5)",
        "3 layers for 5 stages",
        "from 1 to 3 stages, so that each owns a layer",
    ),
    "a number for costs": (
        lambda: Costs(stages=3),
        errors.CostError,
        "Costs(stages=3, …)",
        "an int",
        "seconds of each stage: <any>",
    ),
    "seconds for a function of them": (
        lambda: plan_cohorts([1.0, 2.0], 4, 2),
        errors.ProgramError,
        "plan_cohorts(stage_seconds, ...)",
        "stage_seconds is a list",
        "a function from a cohort's size to the seconds of each stage; <any>",
    ),
    "a class for a module": (
        lambda: from_module(nn.Linear),
        errors.ProgramError,
        "weft.stages.from_module(module)",
        "Linear, the class",
        "a module of it: Linear(...)",
    ),
    "a builtin for an operator": (
        lambda: weft.piecewise(f, split_at=torch.sort),
        errors.CaptureError,
        "graphify(f, ...)",
        "split_at=sort",
        "operators by name, as in 'weft::paged_attention' or 'aten::sort', or as torch.ops.aten.sort",
    ),
    "a number to lift": (
        lambda: lift(3),
        errors.ProgramError,
        "lift(3)",
        "an int, no function",
        "an advance (state, batch, out) -> state",
    ),
    # models
    "more stages than layers": (
        lambda: make_runner(weft.load(DEMO, "cpu"), weft.Limits(1, 8), num_stages=9),
        errors.ProgramError,
        "make_runner(model, limits, num_stages=9)",
        "num_stages=9; the model has 6 layers",
        "from 1 stage to one a layer",
    ),
    "parameters of another stage": (
        lambda: stage_of(0, 1, None),
        errors.ProgramError,
        "stage 0 of 2(params, state, batch, x)",
        "params of 3 layers, the head",
        "this stage's own, of layers 0 to 2: Runner.params[0]",
    ),
    "nothing to go on from": (
        lambda: stage_of(1, 1, None),
        errors.ProgramError,
        "stage 1 of 2(params, state, batch, x)",
        "x is None",
        "what the stage before returned",
    ),
    "a number for a speculation": (
        lambda: weft.generate(weft.load(DEMO, "cpu"), ["A"], max_tokens=1, speculation=3),
        errors.RequestError,
        "weft.generate(model, prompts, max_tokens=1, temperature=0.0, pipeline=1)",
        "speculation is an int",
        "weft.Speculation(num_tokens=...), or None",
    ),
    # laws
    "no examples": (
        lambda: check_laws(f, (strategies.tensors(3),), max_examples=0),
        errors.CheckError,
        "weft.proofs.check(f, ...)",
        "max_examples=0, which compares nothing",
        "a whole number >= 1, or None",
    ),
    "a law by its number": (
        lambda: check_laws(f, (X,), laws="L1"),
        errors.CheckError,
        "weft.proofs.check(f, ...)",
        "laws='L1'",
        "some, by name, of pure, graph (L1), replay (L9), <any>",
    ),
    "laws on no device": (
        lambda: check_laws(f, (X,), device="gpu"),
        errors.DeviceError,
        "weft.proofs.check(f, ...)",
        "device 'gpu', which torch does not know",
        "'cpu', 'cuda' or 'cuda:N'",
    ),
    "a tolerance below zero": (
        lambda: assert_equivalent(torch.exp, torch.sin, (X,), atol=-1),
        errors.CheckError,
        "assert_equivalent(exp, sin, given=...)",
        "atol=-1",
        "a number >= 0; 0 is bitwise",
    ),
    "an exception by its name": (
        lambda: assert_equivalent(torch.exp, torch.sin, (X,), raises="ValueError"),
        errors.CheckError,
        "assert_equivalent(exp, sin, given=...)",
        "raises='ValueError'",
        "a type of exceptions: raises=ValueError, or a tuple of such",
    ),
    "a shape as one": (
        lambda: strategies.tensors((2, 3)),
        errors.CheckError,
        "tensors((2, 3), dtype=torch.float32)",
        "(2, 3), a tuple",
        "each dimension by itself, a whole number or a strategy: tensors(2, 3)",
    ),
    "a dtype by its name": (
        lambda: strategies.tensors(2, dtype="float32"),
        errors.CheckError,
        "tensors(2, dtype='float32')",
        "dtype is a str",
        "a dtype of torch: dtype=torch.float32",
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_answered(slip: str) -> None:
    wrong, kind, call, seen, instead = SLIPS[slip]
    with refused(kind, call, seen, instead):
        wrong()


def test_an_engine_and_what_it_says_print_in_a_line() -> None:
    engine = weft.Engine(small_model(), graph="none")
    engine.add([1], max_tokens=2)
    assert repr(engine) == "<Engine of Qwen3ForCausalLM; graphified steps here: 0; requests under way: 1>"
    assert all(len(repr(output)) < 2000 for output in engine)


def test_what_was_refused_leaves_the_settings_alone() -> None:
    for name, value in (("log_capture", True), ("log_captures", "yes")):
        with contextlib.suppress(errors.ArgumentError):
            set_config(name, value)
    assert attrs.asdict(weft.config) == {"explain_cache_misses": False, "log_captures": False}


@pytest.mark.parametrize("spans", [weft.pipeline, weft.compose])
def test_an_advance_that_was_not_lifted_is_noted(spans: Any) -> None:
    counts = Transform(lambda params, state: 0, lambda stage, own, p, s, batch, x: (own + 1, *stage(p, s, batch, x)))

    def total(state: Tensor, batch: Tensor, out: Tensor) -> Tensor:
        return state + out.sum()

    step, given = spans([counts(stage)], advance=total), ([X], [counts.carry(X, X)], X)
    with pytest.raises(TypeError) as error:
        step(*given)
    note = "in advance (total) on stage 0's state, a Carried, which a transform made: advance=lift(...)"
    assert note in error.value.__notes__
    (state,), _ = spans([counts(stage)], advance=lift(total))(*given)
    assert (state.own, state.state.tolist()) == (1, [4, 4, 4])


def test_a_runner_prints_in_a_line() -> None:
    runner = make_runner(weft.load(DEMO, "cpu"), weft.Limits(1, 8), num_stages=2)
    assert repr(runner) == "<Runner of 2 stages: layers 0 to 2, 3 to 5 here, 2 graphified>"


@given(st.lists(st.one_of(st.integers(0, 256), st.floats(), st.booleans(), st.none(), st.text()), min_size=1))
def test_only_whole_numbers_are_token_ids(ids: list[Any]) -> None:
    whole = all(isinstance(token, int) for token in ids)
    with contextlib.nullcontext() if whole else pytest.raises(errors.DescriptorError, match=r"token_ids\[0\] holds"):
        assert weft.Batch.ragged([0], [ids]).input_ids.tolist() == [int(token) for token in ids]


def test_no_evidence_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters that require grad keep a module from being replayed."""
    check_laws(nn.Linear(3, 3), (X,), laws=("graph", "replay"))
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("no evidence:") == 1
    assert "runs inline: it reads a tensor from outside that requires grad" in out
    check_laws(nn.Linear(3, 3).requires_grad_(False), (X,), laws=("graph", "replay"))
    assert "no evidence" not in capsys.readouterr().out
