"""Hypothesis strategies for tests of your own functions, stages and schedules.

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
| `configs()` | the configuration of a small decoder, of any text architecture |
| `scenarios()` | a small random model, and batches in an order that its state can serve |
| `sampling_params(vocab_size)` | a request's `weft.SamplingParams` |
| `job_lists()` | the jobs of a pipeline, which a schedule orders |
| `programs()` | such jobs, and the programs of each rank that `make_programs` makes of them |
| `meshes()`, `meshes(axes=("data", "tensor"))` | a `weft.Mesh` of one or two axes, or of the named axes |
| `rank_functions()` | a random function of one rank's part, with collectives, and the same function without ranks |

They combine like any other strategies: `st.tuples(tensors(4, 4), batches())`,
`ladders().filter(bool)`, `batches().flatmap(lambda b: st.tuples(st.just(b), ladders([b])))`.

>>> from hypothesis import find, strategies as st
>>> pairs = batches().flatmap(lambda b: st.tuples(st.just(b), ladders([b])))
>>> batch, ladder = find(pairs, lambda pair: pair[0].descriptor.query_len is None)
>>> all(d.covers(batch.descriptor) for d in ladder)
True
"""

from weft.proofs._strategies.captures.functions import (
    Function,
    Mapping,
    Rows,
    mappings,
    pure_functions,
    stage_lists,
)
from weft.proofs._strategies.classes import batches, descriptors, ladders, limits
from weft.proofs._strategies.models import Move, Scenario, configs, scenarios
from weft.proofs._strategies.programs import Scheduled, job_lists, programs
from weft.proofs._strategies.sampling import sampling_params
from weft.proofs._strategies.shards import RankFunction, meshes, rank_functions
from weft.proofs._strategies.tensors import tensors

__all__ = [
    "Function",
    "Mapping",
    "Move",
    "RankFunction",
    "Rows",
    "Scenario",
    "Scheduled",
    "batches",
    "configs",
    "descriptors",
    "job_lists",
    "ladders",
    "limits",
    "mappings",
    "meshes",
    "programs",
    "pure_functions",
    "rank_functions",
    "sampling_params",
    "scenarios",
    "stage_lists",
    "tensors",
]
