"""Planted bugs of derivatives: gradients that are zero where they should not be."""

from typing import Any

from torch import Tensor

from weft.ops.attention.functional import _by_kv_head, keep
from weft.ops.norm import functional_rms_norm
from weft.proofs.evidence.mutants.mutant import Mutant, replace
from weft.proofs.evidence.mutants.steps import _in_capture
from weft.proofs.evidence.runs.suite import find


def _keeps_constants(k: Tensor, v: Tensor, *where: Any) -> Tensor:
    """Keys and values that a step writes to the cache are read as constants."""
    # Every value stays the same to the bit: no law that compares outputs can see it, only one that
    # compares derivatives, and with finite differences rather than with another run of autograd.
    return keep(k.detach(), v.detach(), *where)


def _keeps_constants_in_graphs(k: Tensor, v: Tensor, *where: Any) -> Tensor:
    # Eager derivatives stay right, so finite differences of the eager step do not show it.
    return (_keeps_constants if _in_capture() else keep)(k, v, *where)


def _norm_of_constants(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """An operator that torch.func cannot see into."""
    return functional_rms_norm(x.detach(), weight.detach(), eps)


def _constant_queries(q: Tensor, kv_heads: int) -> Tensor:
    return _by_kv_head(q.detach(), kv_heads)


_STEPS = find("L15", "derivatives")
_ROTARY = "weft.ops.rotary"

# The bugs of the operators' derivatives.
DERIVATIVES = (
    Mutant("keys and values are constants", _STEPS, replace(_ROTARY, "keep", _keeps_constants)),
    Mutant(
        "queries are constants",
        _STEPS,
        replace("weft.ops.attention.functional", "_by_kv_head", _constant_queries),
    ),
    Mutant(
        "a norm's derivative is 0",
        _STEPS,
        replace("weft.ops.norm", "functional_rms_norm", _norm_of_constants),
    ),
    Mutant(
        "in a graph, keys and values are constants",
        find("L15", "gradients"),
        replace(_ROTARY, "keep", _keeps_constants_in_graphs),
    ),
)
