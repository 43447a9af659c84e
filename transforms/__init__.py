"""Transforms, functions to functions: `graphify`, `pipeline`, `microbatch`, and what they are made of.

Of a pipeline: where its ranks run (`Local`, `Threads`, `Distributed`, `launch`), its schedules (`Job`, `decode_jobs`,
`jobs_for`, `make_programs`, `check`), and its time (`Costs`, `simulate`, `measure`, `compare`, `balance`,
`plan_cohorts`). Effects and programs themselves are in `weft.effects`.

A transform of your own is a function `f -> f` written with `functools.wraps`; or a `Transform`, if it carries something
from call to call.
"""

from weft.stages.balance import balance
from weft.transforms.captured import CapturedGraph, CapturedGraphs
from weft.transforms.checker import check
from weft.transforms.cohorts import CohortPlan, CohortRow, plan_cohorts
from weft.transforms.dispatch import Decision, dispatch
from weft.transforms.dispatch_table import DispatchTable, dispatch_table
from weft.transforms.events import Event
from weft.transforms.graphified import Graphified
from weft.transforms.graphify import graphify
from weft.transforms.graphs import Explanation
from weft.transforms.ladder import MODES, Ladder, Limits, lora_rungs, make_ladder
from weft.transforms.lower import Compiled, Lowered
from weft.transforms.measure import Recorder, measure
from weft.transforms.memo import CacheInfo
from weft.transforms.memory import MemoryAnalysis, MemoryEstimate
from weft.transforms.microbatch import join, microbatch, split
from weft.transforms.piecewise import piecewise
from weft.transforms.pipeline import Pipelined, compose, pipeline
from weft.transforms.runner import Runner, make_runner, make_state
from weft.transforms.scan import scan
from weft.transforms.schedule import Job, decode_jobs, jobs_for, make_programs, streaming
from weft.transforms.session import Session
from weft.transforms.simulate import Costs, simulate
from weft.transforms.timeline import Comparison, Timeline, compare
from weft.transforms.transform import Carried, Transform, lift
from weft.transforms.transports import Transport
from weft.transforms.transports.distributed import Distributed
from weft.transforms.transports.launch import launch
from weft.transforms.transports.local import Local
from weft.transforms.transports.threads import Threads

__all__ = [
    "MODES",
    "CacheInfo",
    "CapturedGraph",
    "CapturedGraphs",
    "Carried",
    "CohortPlan",
    "CohortRow",
    "Comparison",
    "Compiled",
    "Costs",
    "Decision",
    "DispatchTable",
    "Distributed",
    "Event",
    "Explanation",
    "Graphified",
    "Job",
    "Ladder",
    "Limits",
    "Local",
    "Lowered",
    "MemoryAnalysis",
    "MemoryEstimate",
    "Pipelined",
    "Recorder",
    "Runner",
    "Session",
    "Threads",
    "Timeline",
    "Transform",
    "Transport",
    "balance",
    "check",
    "compare",
    "compose",
    "decode_jobs",
    "dispatch",
    "dispatch_table",
    "graphify",
    "jobs_for",
    "join",
    "launch",
    "lift",
    "lora_rungs",
    "make_ladder",
    "make_programs",
    "make_runner",
    "make_state",
    "measure",
    "microbatch",
    "piecewise",
    "pipeline",
    "plan_cohorts",
    "scan",
    "simulate",
    "split",
    "streaming",
]
