"""The laws: graphify, padding, pipelines and donation do not change results. A broken law raises
`LawViolation`.

A law takes a scenario (a model and a *sequence* of batches, so that a replay follows other replays)
or a random pure function, and compares a transformed run with a run without transforms.
`weft.proofs.evidence.mutants` plants the bugs that each law must catch.
"""

from weft.proofs.checks.difference import LawViolation, assert_equal
from weft.proofs.laws.captures import (
    graph_is_eager_on_tensor_programs,
    hazards_are_right_or_refused,
)
from weft.proofs.laws.compositions import compositions_mean_their_parts
from weft.proofs.laws.derivatives import (
    derivatives_are_of_the_step,
    graphs_of_gradients_are_gradients,
)
from weft.proofs.laws.dispatch import (
    class_is_kept,
    dispatch_is_least,
    nothing_is_captured_after_start,
    own_classes_are_dispatched,
)
from weft.proofs.laws.engine.agreement import differences_are_refused
from weft.proofs.laws.engine.bits import bits_are_of_the_request
from weft.proofs.laws.engine.completions import engine_serves_as_alone, run_ahead_is_none
from weft.proofs.laws.engine.fairness import served_in_turn
from weft.proofs.laws.engine.faults import faults_end_their_own_request
from weft.proofs.laws.engine.own_stages import own_stages_serve_as_alone
from weft.proofs.laws.engine.pages import (
    pages_are_of_the_parameters,
    pages_are_read_by_whom_they_were_written_for,
)
from weft.proofs.laws.engine.requests import WAYS, order_is_free, seed_and_position_fix_the_sample
from weft.proofs.laws.engine.serving import hosts_agree, speculation_changes_nothing, stages_agree
from weft.proofs.laws.engine.versions import changed_parameters_compute_all
from weft.proofs.laws.func import (
    TRANSFORMS,
    functions_of_graphs_are_functions,
    graphs_of_functions_are_functions,
)
from weft.proofs.laws.graph import (
    graph_is_eager,
    graph_is_eager_on_calls,
    graph_is_eager_on_functions,
    graph_is_eager_on_images,
    graph_is_eager_on_padded_functions,
)
from weft.proofs.laws.loop_bodies import loop_bodies_are_pythons
from weft.proofs.laws.loops import loops_are_python_loops
from weft.proofs.laws.memory import dropped_graphs_are_not_in_use, memory_is_estimated
from weft.proofs.laws.ownership import (
    borrowed_results_are_right,
    capture_leaves_no_trace,
    capture_leaves_no_trace_on_functions,
    graph_keeps_what_it_reads,
    ownership_is_kept,
)
from weft.proofs.laws.padding import (
    image_padding_is_inert,
    padding_is_inert,
    stage_padding_is_inert,
)
from weft.proofs.laws.pieces import pieces_are_the_whole, pieces_are_the_whole_on_functions
from weft.proofs.laws.pipeline import (
    microbatches_are_one,
    pipeline_is_composition,
    pipeline_is_composition_on_functions,
    transforms_commute,
    transforms_commute_on_functions,
)
from weft.proofs.laws.schedule import (
    broken_programs_are_refused,
    checker_is_right,
    own_schedules_are_compositions,
    schedules_are_right,
)
from weft.proofs.laws.shards import (
    TRANSFORMS as SHARD_TRANSFORMS,
    derivatives_of_shards_are_derivatives,
    disagreeing_ranks_are_refused,
    false_replicas_are_refused,
    shards_are_the_function,
    shards_commute,
    shares_are_the_model,
    shares_have_the_same_bits,
    stages_of_shards_are_stages,
    surroundings_of_shards_change_nothing,
)

__all__ = [
    "SHARD_TRANSFORMS",
    "TRANSFORMS",
    "WAYS",
    "LawViolation",
    "assert_equal",
    "bits_are_of_the_request",
    "borrowed_results_are_right",
    "broken_programs_are_refused",
    "capture_leaves_no_trace",
    "capture_leaves_no_trace_on_functions",
    "changed_parameters_compute_all",
    "checker_is_right",
    "class_is_kept",
    "compositions_mean_their_parts",
    "derivatives_are_of_the_step",
    "derivatives_of_shards_are_derivatives",
    "differences_are_refused",
    "disagreeing_ranks_are_refused",
    "dispatch_is_least",
    "dropped_graphs_are_not_in_use",
    "engine_serves_as_alone",
    "false_replicas_are_refused",
    "faults_end_their_own_request",
    "functions_of_graphs_are_functions",
    "graph_is_eager",
    "graph_is_eager_on_calls",
    "graph_is_eager_on_functions",
    "graph_is_eager_on_images",
    "graph_is_eager_on_padded_functions",
    "graph_is_eager_on_tensor_programs",
    "graph_keeps_what_it_reads",
    "graphs_of_functions_are_functions",
    "graphs_of_gradients_are_gradients",
    "hazards_are_right_or_refused",
    "hosts_agree",
    "image_padding_is_inert",
    "loop_bodies_are_pythons",
    "loops_are_python_loops",
    "memory_is_estimated",
    "microbatches_are_one",
    "nothing_is_captured_after_start",
    "order_is_free",
    "own_classes_are_dispatched",
    "own_schedules_are_compositions",
    "own_stages_serve_as_alone",
    "ownership_is_kept",
    "padding_is_inert",
    "pages_are_of_the_parameters",
    "pages_are_read_by_whom_they_were_written_for",
    "pieces_are_the_whole",
    "pieces_are_the_whole_on_functions",
    "pipeline_is_composition",
    "pipeline_is_composition_on_functions",
    "run_ahead_is_none",
    "schedules_are_right",
    "seed_and_position_fix_the_sample",
    "served_in_turn",
    "shards_are_the_function",
    "shards_commute",
    "shares_are_the_model",
    "shares_have_the_same_bits",
    "speculation_changes_nothing",
    "stage_padding_is_inert",
    "stages_agree",
    "stages_of_shards_are_stages",
    "surroundings_of_shards_change_nothing",
    "transforms_commute",
    "transforms_commute_on_functions",
]
