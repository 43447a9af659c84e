"""Hypothesis strategies, the shared vocabulary: random models, batches of every class, pure functions; in sequences.

@given(strategies.scenarios())
def test_my_step(scenario): ...
"""

from weft.proofs.strategies.classes import descriptors, ladders, limits
from weft.proofs.strategies.functions import OPERATIONS, UPDATES, Function, Rows, pure_functions, stage_lists
from weft.proofs.strategies.models import ARCHITECTURES, ROPES, Move, Scenario, configs, scenarios

__all__ = [
    "ARCHITECTURES",
    "OPERATIONS",
    "ROPES",
    "UPDATES",
    "Function",
    "Move",
    "Rows",
    "Scenario",
    "configs",
    "descriptors",
    "ladders",
    "limits",
    "pure_functions",
    "scenarios",
    "stage_lists",
]
