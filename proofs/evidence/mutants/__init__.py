"""Bugs planted on purpose: for each law, versions of weft that break it. A law must catch each of
its mutants.

Engines that patch a mutable runner had these bugs, or close relatives of them. While a mutant is
planted, weft computes wrong results. `python -m weft.proofs.evidence.mutants --out FOLDER` records
which law caught which mutant, and on what case.
"""

from weft.proofs.evidence.mutants.agreement import AGREEMENT
from weft.proofs.evidence.mutants.attention import ATTENTION
from weft.proofs.evidence.mutants.bits import BITS
from weft.proofs.evidence.mutants.captures import CAPTURES
from weft.proofs.evidence.mutants.compiled import COMPILED
from weft.proofs.evidence.mutants.compositions import COMPOSITIONS
from weft.proofs.evidence.mutants.derivatives import DERIVATIVES
from weft.proofs.evidence.mutants.drafts import DRAFTS
from weft.proofs.evidence.mutants.graphs import GRAPHS
from weft.proofs.evidence.mutants.loops import LOOPS
from weft.proofs.evidence.mutants.mutant import Mutant
from weft.proofs.evidence.mutants.own_stages import OWN_STAGES
from weft.proofs.evidence.mutants.schedules import SCHEDULES
from weft.proofs.evidence.mutants.serving import SERVING
from weft.proofs.evidence.mutants.shards import SHARDS
from weft.proofs.evidence.mutants.steps import STEPS

__all__ = ["MUTANTS", "Mutant"]

_ALL = (
    *AGREEMENT,
    *ATTENTION,
    *BITS,
    *CAPTURES,
    *COMPILED,
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
# All planted bugs, at least one for each row of `weft.proofs.evidence.runs.suite.LAWS`.
# By the law's number, so that the record lists what each law caught together. The sort is stable:
# mutants of one law keep the order of their modules.
MUTANTS = tuple(sorted(_ALL, key=lambda mutant: int(mutant.law.number[1:])))
