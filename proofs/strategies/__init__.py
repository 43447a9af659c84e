"""Hypothesis strategies from which weft's laws draw, for tests to import and combine.

| strategy | draws |
|---|---|
| `tensors(*shape)` | tensors of a few simple values; dimensions may be drawn too |
| `descriptors()` | a `weft.BatchDescriptor`, uniform or ragged |
| `batches()` | a `weft.Batch` of any class |
| `ladders(batches)` | ladders whose classes cover these batches, largest first |
| `limits()` | `weft.Limits`, for `weft.make_ladder` |
| `pure_functions()` | a random function `.fn(params, state, batch) -> (state, out)`, and arguments for it |
| `mappings()` | a random function `(params, x) -> y` that can be differentiated and mapped |
| `stage_lists()` | functions that fit together as stages of a pipeline |
| `scenarios()` | a small random model, and batches in an order that its state can serve |
| `step_times(max_limit)`, `timed_traces()` | limits on a step's seconds, with step times; traces with such limits |
| `traces()` | requests that arrive, end or are aborted, and a model that serves them |
| `programs()` | the programs of a pipeline's ranks; `edited_programs()` and `broken_programs()` have faults |
| `woven_programs()` | programs that run several stages on each rank in any order, and an edit of them |
| `loops()` | a loop on integers for `weft.while_loop`, and its expected result |
| `loop_bodies()` | a loop of torch's operators, which indexes by its counter and reads it |
| `tensor_programs()` | a random program on tensors as Python code, and calls of it, for graphs and eager runs |
| `compositions()` | a nest of weft's and torch's transforms around a random function, and how it is called |
| `bodies()` | the functions inside these nests |
| `hazards()` | code that a graph would get wrong if weft did not notice it |
| `meshes()`, `meshes(axes=("data", "tensor"))` | a `weft.Mesh` of one or two axes, or of the named axes |
| `rank_functions()` | a random function of one rank's part, with collectives, and the same function without ranks |
| `disagreements()` | such a function, with different collectives on one rank |
| `shared_scenarios()` | a scenario, and a number of ranks that can share its model's layers |
| `cut_scenarios()` | a scenario of a batch-invariant model whose sums are cut into leaves |
| `image_scenarios()`, `resolution_ladders()` | images of a resolution, a shape class other than batches of requests |

They combine like any other strategies: `st.tuples(tensors(4, 4), batches())`,
`ladders().filter(bool)`, `batches().flatmap(lambda b: st.tuples(st.just(b), ladders([b])))`.

>>> from hypothesis import find, strategies as st
>>> pairs = batches().flatmap(lambda b: st.tuples(st.just(b), ladders([b])))
>>> batch, ladder = find(pairs, lambda pair: not pair[0].descriptor.is_uniform)
>>> all(d.covers(batch.descriptor) for d in ladder)
True
"""

from weft.proofs.strategies.captures.calls import (
    PLACES,
    STATICS,
    VALUES,
    Call,
    call_sequences,
    called,
    worlds,
)
from weft.proofs.strategies.captures.functions import (
    OPERATIONS,
    UPDATES,
    Function,
    Mapping,
    Rows,
    mappings,
    pure_functions,
    stage_lists,
)
from weft.proofs.strategies.captures.hazards import HAZARDS, Hazard, hazards
from weft.proofs.strategies.captures.tensor_programs import TensorProgram, tensor_programs
from weft.proofs.strategies.classes import batches, descriptors, ladders, limits
from weft.proofs.strategies.compositions.bodies import Body, bodies
from weft.proofs.strategies.compositions.composition import Composition, compositions
from weft.proofs.strategies.engine.traces import Trace, step_times, timed_traces, traces
from weft.proofs.strategies.images import (
    FILTERS,
    Image,
    ImageScenario,
    Resolution,
    image_scenarios,
    resolution_ladders,
    resolutions,
)
from weft.proofs.strategies.loops import Loop, LoopBody, loop_bodies, loops
from weft.proofs.strategies.models import ARCHITECTURES, ROPES, Move, Scenario, configs, scenarios
from weft.proofs.strategies.programs import (
    EDITS,
    FAULTS,
    Broken,
    Scheduled,
    broken_programs,
    edited_programs,
    job_lists,
    programs,
)
from weft.proofs.strategies.sampling import sampling_params
from weft.proofs.strategies.schedules import Woven, woven_programs
from weft.proofs.strategies.shards import (
    DISAGREEMENTS,
    Disagreement,
    RankFunction,
    disagreements,
    meshes,
    rank_functions,
)
from weft.proofs.strategies.shares import cut_scenarios, shared_scenarios
from weft.proofs.strategies.surrounded import SurroundedShard, surrounded_shards
from weft.proofs.strategies.tensors import tensors

__all__ = [
    "ARCHITECTURES",
    "DISAGREEMENTS",
    "EDITS",
    "FAULTS",
    "FILTERS",
    "HAZARDS",
    "OPERATIONS",
    "PLACES",
    "ROPES",
    "STATICS",
    "UPDATES",
    "VALUES",
    "Body",
    "Broken",
    "Call",
    "Composition",
    "Disagreement",
    "Function",
    "Hazard",
    "Image",
    "ImageScenario",
    "Loop",
    "LoopBody",
    "Mapping",
    "Move",
    "RankFunction",
    "Resolution",
    "Rows",
    "Scenario",
    "Scheduled",
    "SurroundedShard",
    "TensorProgram",
    "Trace",
    "Woven",
    "batches",
    "bodies",
    "broken_programs",
    "call_sequences",
    "called",
    "compositions",
    "configs",
    "cut_scenarios",
    "descriptors",
    "disagreements",
    "edited_programs",
    "hazards",
    "image_scenarios",
    "job_lists",
    "ladders",
    "limits",
    "loop_bodies",
    "loops",
    "mappings",
    "meshes",
    "programs",
    "pure_functions",
    "rank_functions",
    "resolution_ladders",
    "resolutions",
    "sampling_params",
    "scenarios",
    "shared_scenarios",
    "stage_lists",
    "step_times",
    "surrounded_shards",
    "tensor_programs",
    "tensors",
    "timed_traces",
    "traces",
    "worlds",
    "woven_programs",
]
