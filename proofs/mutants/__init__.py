"""Bugs planted on purpose: for each law, versions of weft that break it. A law must catch each of its mutants.

Each is a real bug of an engine that patched a mutable runner, or the closest equivalent here. While a mutant is
planted, weft computes wrong results. `python -m weft.proofs.mutants --out FOLDER` records the law that caught each
mutant, and the case.
"""

from weft.proofs.mutants.agreement import AGREEMENT
from weft.proofs.mutants.derivatives import DERIVATIVES
from weft.proofs.mutants.drafts import DRAFTS
from weft.proofs.mutants.graphs import GRAPHS
from weft.proofs.mutants.planted import Mutant
from weft.proofs.mutants.schedules import SCHEDULES
from weft.proofs.mutants.serving import SERVING
from weft.proofs.mutants.steps import STEPS

__all__ = ["MUTANTS", "Mutant"]

_ALL = (*AGREEMENT, *DERIVATIVES, *DRAFTS, *GRAPHS, *SCHEDULES, *SERVING, *STEPS)
MUTANTS = tuple(sorted(_ALL, key=lambda mutant: int(mutant.law.number[1:])))
"""All planted bugs, at least one for each row of `weft.proofs.suite.LAWS`."""
