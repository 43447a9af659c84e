"""Planted bugs of nests of transforms (L25), which other laws catch on cases of their own."""

from weft.proofs.mutants.captures import CAPTURES
from weft.proofs.mutants.graphs import GRAPHS
from weft.proofs.mutants.loops import LOOPS
from weft.proofs.mutants.mutant import Mutant
from weft.proofs.mutants.shards import SHARDS
from weft.proofs.suite import find

NAMES = ()
_NESTS = find("L25", "nests of transforms")
_PLANTED = {mutant.name: mutant for mutant in (*CAPTURES, *GRAPHS, *LOOPS, *SHARDS)}

COMPOSITIONS = tuple(Mutant(name, _NESTS, _PLANTED[name].plant) for name in NAMES)
"""The bugs that a nest of transforms shows."""
