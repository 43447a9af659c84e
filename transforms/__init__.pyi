from . import engine as engine
from .engine.setup import Runner as Runner, make_runner as make_runner, make_state as make_state
from .graphs.calls.key import CacheInfo as CacheInfo
from .graphs.dispatch import (
    Decision as Decision,
    DispatchTable as DispatchTable,
    dispatch as dispatch,
    dispatch_table as dispatch_table,
)
from .graphs.explain import Explanation as Explanation
from .graphs.graphified import Graphified as Graphified
from .graphs.graphify import graphify as graphify, piecewise as piecewise
from .graphs.ladder import (
    MODES as MODES,
    Ladder as Ladder,
    Limits as Limits,
    lora_rungs as lora_rungs,
    make_ladder as make_ladder,
)
from .graphs.lower import Compiled as Compiled, Lowered as Lowered
from .graphs.memory import (
    CapturedGraph as CapturedGraph,
    CapturedGraphs as CapturedGraphs,
    MemoryAnalysis as MemoryAnalysis,
    MemoryEstimate as MemoryEstimate,
)
from .graphs.while_loop import while_loop as while_loop
from .pipelines.checker import check as check
from .pipelines.microbatch import microbatch as microbatch, scan as scan
from .pipelines.parts import join as join, split as split
from .pipelines.pipeline import Pipelined as Pipelined, compose as compose, pipeline as pipeline
from .pipelines.schedule import (
    Job as Job,
    decode_jobs as decode_jobs,
    jobs_for as jobs_for,
    make_programs as make_programs,
    streaming as streaming,
)
from .pipelines.session import Session as Session
from .pipelines.timing.cohorts import (
    CohortPlan as CohortPlan,
    CohortRow as CohortRow,
    plan_cohorts as plan_cohorts,
)
from .pipelines.timing.costs import Costs as Costs
from .pipelines.timing.events import Event as Event
from .pipelines.timing.hardware import Machine as Machine
from .pipelines.timing.prediction import Prediction as Prediction, predict_decode as predict_decode
from .pipelines.timing.simulate import simulate as simulate
from .pipelines.timing.splits import SplitPlan as SplitPlan, plan_splits as plan_splits
from .pipelines.timing.timeline import (
    Comparison as Comparison,
    Recorder as Recorder,
    Timeline as Timeline,
    compare as compare,
    measure as measure,
)
from .pipelines.transports import Transport as Transport
from .pipelines.transports.distributed import Distributed as Distributed
from .pipelines.transports.launch import launch as launch
from .pipelines.transports.local import Local as Local
from .pipelines.transports.threads import Threads as Threads
from .pipelines.weaving import interleaved as interleaved, weave as weave
from .shards.shard import Sharded as Sharded, shard as shard
from .transform import Carried as Carried, Transform as Transform, lift as lift
