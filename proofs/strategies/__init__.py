"""Hypothesis strategies, the shared vocabulary: random models, batches of every class, pure functions; in sequences.

@given(strategies.scenarios())
def test_my_step(scenario): ...
"""

from weft.proofs.strategies.calls import PLACES, STATICS, VALUES, Call, call_sequences, called, worlds
from weft.proofs.strategies.classes import descriptors, ladders, limits
from weft.proofs.strategies.functions import (
    OPERATIONS,
    UPDATES,
    Function,
    Mapping,
    Rows,
    mappings,
    pure_functions,
    stage_lists,
)
from weft.proofs.strategies.images import (
    FILTERS,
    Image,
    ImageScenario,
    Resolution,
    image_scenarios,
    resolution_ladders,
    resolutions,
)
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
from weft.proofs.strategies.traces import Arrival, Trace, traces

__all__ = [
    "ARCHITECTURES",
    "EDITS",
    "FAULTS",
    "FILTERS",
    "OPERATIONS",
    "PLACES",
    "ROPES",
    "STATICS",
    "UPDATES",
    "VALUES",
    "Arrival",
    "Broken",
    "Call",
    "Function",
    "Image",
    "ImageScenario",
    "Mapping",
    "Move",
    "Resolution",
    "Rows",
    "Scenario",
    "Scheduled",
    "Trace",
    "broken_programs",
    "call_sequences",
    "called",
    "configs",
    "descriptors",
    "edited_programs",
    "image_scenarios",
    "job_lists",
    "ladders",
    "limits",
    "mappings",
    "programs",
    "pure_functions",
    "resolution_ladders",
    "resolutions",
    "sampling_params",
    "scenarios",
    "stage_lists",
    "traces",
    "worlds",
]
