"""Mistakes with stages, pipelines of them, and the programs that they run."""

import time
from typing import Any

import torch
from answers import Mistake, X, f
from torch import Tensor, nn

import weft
from weft.effects import parse_listing
from weft.errors import ArgumentError, CaptureError, CostError, ProgramError, RankError
from weft.stages import balance, from_module
from weft.transforms import (
    Costs,
    Distributed,
    Threads,
    check,
    decode_jobs,
    launch,
    lift,
    make_programs,
    plan_cohorts,
    simulate,
)

DEADLOCK = """rank 0 of 2
  run stage 0 [mb 0]
rank 1 of 2
  recv from 0 [mb 0]
  run stage 1 [mb 0]
"""


def stage(params: Any, state: Any, batch: Tensor, x: Tensor | None) -> tuple[Any, Tensor]:
    return state, params * (batch if x is None else x)


def spanned(**options: Any) -> Any:
    """A pipeline of two stages, called."""
    step = weft.pipeline([stage, stage], **options)
    return step([torch.ones(()), torch.ones(())], [None, None], X)


def waits(params: Any, state: Any, batch: Any, x: Any) -> Any:
    time.sleep(1.5)
    return state, x


def stalled() -> None:
    weft.pipeline([stage, waits], transport=Threads(timeout=0.2))([X, X], [None, None], X)


THREE = "a step (params, state, batch) -> (state, out)"


MISTAKES = {
    "pipeline: one stage, not a list": Mistake(
        lambda: weft.pipeline(stage),
        ProgramError,
        "pipeline(stage)",
        "one function",
        "a list of stages: pipeline([stage])",
    ),
    "pipeline: a stage of another signature": Mistake(
        lambda: weft.pipeline([f, f]),
        ProgramError,
        "pipeline(<2 stages>)",
        "stage 0, f(x: torch.Tensor) -> torch.Tensor",
        "a stage (params, state, batch, x) -> (state, y)",
    ),
    "pipeline: a module for a stage": Mistake(
        lambda: weft.pipeline([torch.nn.Linear(2, 2)]),
        ProgramError,
        "pipeline(<1 stage>)",
        "stage 0 is an nn.Module",
        "weft.stages.from_module(module).stage",
    ),
    "pipeline: params of one stage": Mistake(
        lambda: weft.pipeline([stage, stage])([X], [None, None], X),
        ProgramError,
        "pipeline(<2 stages>)(params, state, batch)",
        "params has 1 entries",
        "pass a tuple or list with one entry a stage",
    ),
    "pipeline: no state at all": Mistake(
        lambda: weft.pipeline([stage, stage])([X, X], None, X),
        ProgramError,
        "pipeline(<2 stages>)(params, state, batch)",
        "state is None",
        "pass a tuple or list with one entry a stage: (None, None) where they have no state",
    ),
    "pipeline: a result without the state": Mistake(
        lambda: weft.pipeline([lambda p, s, b, x: b])([X], [None], X),
        ProgramError,
        "stage 0 (<lambda>)",
        "it returned a Tensor",
        "return (state, y)",
    ),
    "pipeline: a transport by name": Mistake(
        lambda: spanned(transport="threads"),
        ProgramError,
        "pipeline(<2 stages>, transport='threads')",
        "transport='threads'",
        "Local(), Threads() or Distributed(), of weft.transforms",
    ),
    "pipeline: processes without a launcher": Mistake(
        lambda: spanned(transport=Distributed()),
        ProgramError,
        "Distributed()",
        "no RANK and WORLD_SIZE in the environment",
        "torchrun --nproc-per-node N script.py, or weft.transforms.launch(function, N)",
    ),
    "pipeline: another schema than declared": Mistake(
        lambda: spanned(schema=weft.Schema.parse("[4] float32")),
        ProgramError,
        "rank 0: 'send to 1 [mb 0]: [4] float32'",
        "a value of schema [3] float32",
        "return [4] float32 from the stage",
    ),
    "pipeline: a rank that stalls": Mistake(
        stalled,
        RankError,
        "rank 0: 'the whole step'",
        "rank 1 failed at 'run stage 1 [mb 0]': no progress for 0.2 s",
        "mend what failed on rank 1; if it needs longer, a greater timeout= or --timeout",
    ),
    "pipeline: a program that cannot end": Mistake(
        lambda: check(parse_listing(DEADLOCK)),
        ProgramError,
        "check of 2 programs",
        "no rank can go on: rank 1: 'recv from 0 [mb 0]' waits for rank 0, which is at its end",
        "give every send a recv, and order them so that one message an edge is enough",
    ),
    "pipeline: costs of fewer stages": Mistake(
        lambda: simulate(make_programs(2, decode_jobs(1, 1)), Costs(stages=(1e-3,))),
        CostError,
        "costs of 'run stage 1 [mb 0]'",
        "no cost of 'stage 1'",
        "Costs(stages=...) with a cost for each stage; a Run of 'stage N', or of 'advance'",
    ),
    "pipeline: a function that cannot travel": Mistake(
        lambda: launch(lambda: None, 2),
        ProgramError,
        "launch(<lambda>, 2)",
        "Can't <any> local object '<lambda>.<locals>.<lambda>'",
        "a function of a module or of the script itself, by its name, and arguments that can be"
        " pickled",
    ),
    "scan: a step without a state": Mistake(
        lambda: weft.scan(lambda params, state, batch: batch, 2)(None, None, X),
        ProgramError,
        "scan(<lambda>, 2)",
        "it returned a Tensor",
        "return (state, out)",
    ),
    "stage: a function for a module": Mistake(
        lambda: from_module(f),
        ProgramError,
        "weft.stages.from_module(module)",
        "f, a function and not an nn.Module",
        "a function (params, state, batch, x) -> (state, y) is a stage as it is",
    ),
    "pipeline: stages one by one": Mistake(
        lambda: weft.pipeline(stage, stage),
        ArgumentError,
        "pipeline(..., ...)",
        "2 arguments by position, of which it takes 1",
        "a list of stages: pipeline([f, g])",
    ),
    "pipeline: no stage": Mistake(
        lambda: weft.pipeline([stage, None]),
        ProgramError,
        "pipeline(<2 stages>)",
        "stage 1 is None, no function",
        "a stage (params, state, batch, x) -> (state, y)",
    ),
    "pipeline: a stage of three results": Mistake(
        lambda: weft.pipeline([lambda p, s, b, x: (s, b, x)])([X], [None], X),
        ProgramError,
        "stage 0 (<lambda>)",
        "it returned a tuple of 3",
        "return (state, y)",
    ),
    "pipeline: a batch for batches": Mistake(
        lambda: weft.pipeline([stage]).stream([X], [None], X),
        ProgramError,
        "pipeline(<1 stage>).stream(params, state, batches)",
        "batches is a Tensor",
        "a list of batches: [batch]",
    ),
    "pipeline: micro-batches of another function": Mistake(
        lambda: weft.microbatch(f, 2),
        ProgramError,
        "microbatch(f, 2)",
        "f(x: torch.Tensor) -> torch.Tensor",
        THREE,
    ),
    "scan: called as JAX's is": Mistake(
        lambda: weft.scan(f, X, X),  # type: ignore[call-arg, arg-type]
        ArgumentError,
        "scan(..., ..., ...)",
        "3 arguments by position, of which it takes 2",
        (
            "step and length: scan(step, length)(params, state, batch), where each step has the same"
            " batch"
        ),
    ),
    "pipeline: a scan of another function": Mistake(
        lambda: weft.scan(f, 2),
        ProgramError,
        "scan(f, 2)",
        "f(x: torch.Tensor) -> torch.Tensor",
        THREE,
    ),
    "pipeline: a scan the other way round": Mistake(
        lambda: weft.scan(2, f),
        ProgramError,
        "scan(2, f)",
        "length=<function f at <any>>",
        "a whole number >= 1",
    ),
    "pipeline: more stages than layers to balance": Mistake(
        lambda: balance([1.0, 2.0, 3.0], 5),
        ProgramError,
        "balance(<3 layers>, 5)",
        "3 layers for 5 stages",
        "use 1 to 3 stages, so that each owns a layer",
    ),
    "pipeline: a number for costs": Mistake(
        lambda: Costs(stages=3),
        CostError,
        "Costs(stages=3, …)",
        "stages=3",
        "seconds of each stage: <any>",
    ),
    "pipeline: seconds for a function of them": Mistake(
        lambda: plan_cohorts([1.0, 2.0], 4, 2),
        ProgramError,
        "plan_cohorts(stage_seconds, 4, 2, cohorts=None)",
        "stage_seconds=[1.0, 2.0]",
        "a function from a cohort's size to the seconds of each stage",
    ),
    "pipeline: a class for a module": Mistake(
        lambda: from_module(nn.Linear),
        ProgramError,
        "weft.stages.from_module(module)",
        "Linear, the class",
        "a module of it: Linear(...)",
    ),
    "pipeline: a builtin for an operator": Mistake(
        lambda: weft.piecewise(f, split_at=torch.sort),
        CaptureError,
        "graphify(f, ...)",
        "split_at=sort",
        "operators by name, as in 'weft::paged_attention' or 'aten::sort', or as"
        " torch.ops.aten.sort",
    ),
    "pipeline: a number to lift": Mistake(
        lambda: lift(3),
        ProgramError,
        "lift(3)",
        "advance=3",
        "an advance (state, batch, out) -> state",
    ),
}
