"""Bugs planted on purpose: for each law, versions of weft that break it. A law must catch each of
its mutants.

Engines that patch a mutable runner had these bugs, or close relatives of them. While a mutant is
planted, weft computes wrong results. `python -m weft.proofs.mutants --out FOLDER` records which law
caught which mutant, and on what case.
"""

from weft.proofs.mutants.agreement import AGREEMENT
from weft.proofs.mutants.attention import ATTENTION
from weft.proofs.mutants.bits import BITS
from weft.proofs.mutants.captures import CAPTURES
from weft.proofs.mutants.compositions import COMPOSITIONS
from weft.proofs.mutants.derivatives import DERIVATIVES
from weft.proofs.mutants.drafts import DRAFTS
from weft.proofs.mutants.graphs import GRAPHS
from weft.proofs.mutants.loops import LOOPS
from weft.proofs.mutants.mutant import Mutant
from weft.proofs.mutants.own_stages import OWN_STAGES
from weft.proofs.mutants.schedules import SCHEDULES
from weft.proofs.mutants.serving import SERVING
from weft.proofs.mutants.shards import SHARDS
from weft.proofs.mutants.steps import STEPS

__all__ = ["MUTANTS", "Mutant"]

_ALL = (
    *AGREEMENT,
    *ATTENTION,
    *BITS,
    *CAPTURES,
    *COMPOSITIONS,
    *DERIVATIVES,
    *DRAFTS,
    *GRAPHS,
    *LOOPS,
    *OWN_STAGES,
    *SCHEDULES,
    *SERVING,
    *SHARDS,
    *STEPS,
)
MUTANTS = tuple(sorted(_ALL, key=lambda mutant: int(mutant.law.number[1:])))
"""All planted bugs, at least one for each row of `weft.proofs.suite.LAWS`."""
