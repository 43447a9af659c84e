"""Planted bugs of nests of transforms (L25), which other laws catch on cases of their own."""

from functools import partial
from typing import Any
from unittest import mock

from weft.proofs.evidence.mutants.captures import CAPTURES
from weft.proofs.evidence.mutants.graphs import GRAPHS
from weft.proofs.evidence.mutants.loops import LOOPS
from weft.proofs.evidence.mutants.mutant import Mutant
from weft.proofs.evidence.mutants.shards import SHARDS
from weft.proofs.evidence.mutants.steps import STEPS
from weft.proofs.evidence.runs.suite import find
from weft.transforms.graphs.backends.audit import Audit

# Bugs of one transform that a nest also shows. They are named, so that a bug that is renamed or
# removed raises a KeyError here and is not silently left out.
NAMES = (
    "a live input is held weakly",
    "a capture draws from the default generator",
    "a torch.func transform is not inlined",
    "what may draw counts as a draw",
    "parts are joined backwards",
    "a collective has no gradient",
    "what is closed over has no derivative",
    "nothing outside is compared",
    "a name that is bound anew is not seen",
    "tensors of inference mode are written outside it",
    "new state is not written",
    "the state is not restored",
    "the key forgets shapes",
    "the key forgets strides",
    "the fast path checks no tensor",
    "results are borrowed",
    "a replay reads its capture's inputs",
    "a split operator is not run again",
    "a loop runs one step",
    "a loop runs a step whatever holds",
    "a loop's counter is a constant",
    "a sum over the ranks is missing",
    "in a graph, a sum is missing",
    "tensors are permuted backwards",
    "a detached value has a gradient",
    "a trace is found without its shapes",
    "micro-batches run backwards",
    "outputs are joined backwards",
)
_NESTS = find("L25", "nests of transforms")
_PLANTED = {mutant.name: mutant for mutant in (*CAPTURES, *GRAPHS, *LOOPS, *SHARDS, *STEPS)}


def _nothing(*args: Any) -> None:
    pass


# The bugs that a nest of transforms shows.
COMPOSITIONS = (
    *(Mutant(name, _NESTS, _PLANTED[name].plant) for name in NAMES),
    Mutant(
        # Only a function whose operators run in a thread of its own shows it: the capture sees
        # tensors that it did not see being made, and takes them for constants from outside.
        "another thread's results are constants",
        _NESTS,
        partial(mock.patch.object, Audit, "_refuse_unseen", _nothing),
    ),
)
