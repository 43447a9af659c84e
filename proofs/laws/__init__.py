"""The laws: what graphify, padding, pipelines and donation may not change. Each raises `LawViolation` where it breaks.

A law takes a scenario (a model and a *sequence* of batches, so that a replay follows somebody else's replay) or a
random pure function, and compares with a run that no transform touched. `weft.proofs.mutants` plants the bug that each
is to catch.
"""

from weft.proofs.laws.compare import LawViolation, assert_equal
from weft.proofs.laws.dispatch import class_is_kept, dispatch_is_least, nothing_is_captured_after_start
from weft.proofs.laws.graph import graph_is_eager, graph_is_eager_on_functions, graph_is_eager_on_padded_functions
from weft.proofs.laws.ownership import capture_leaves_no_trace, capture_leaves_no_trace_on_functions, ownership_is_kept
from weft.proofs.laws.padding import padding_is_inert, stage_padding_is_inert
from weft.proofs.laws.pieces import pieces_are_the_whole, pieces_are_the_whole_on_functions
from weft.proofs.laws.pipeline import (
    microbatches_are_one,
    pipeline_is_composition,
    pipeline_is_composition_on_functions,
)

__all__ = [
    "LawViolation",
    "assert_equal",
    "capture_leaves_no_trace",
    "capture_leaves_no_trace_on_functions",
    "class_is_kept",
    "dispatch_is_least",
    "graph_is_eager",
    "graph_is_eager_on_functions",
    "graph_is_eager_on_padded_functions",
    "microbatches_are_one",
    "nothing_is_captured_after_start",
    "ownership_is_kept",
    "padding_is_inert",
    "pieces_are_the_whole",
    "pieces_are_the_whole_on_functions",
    "pipeline_is_composition",
    "pipeline_is_composition_on_functions",
    "stage_padding_is_inert",
]
