"""L5: a step captured in pieces equals the whole step."""

from collections.abc import Sequence

from weft.batches.descriptor import BatchDescriptor
from weft.batches.padding import pad, unpad
from weft.proofs._laws.compare import whole
from weft.proofs._strategies.captures.functions import Function
from weft.proofs._strategies.models import Scenario
from weft.proofs.checks.difference import LawViolation, assert_equal
from weft.transforms.graphs.graphified import num_pieces
from weft.transforms.graphs.graphify import graphify, piecewise
from weft.values.donation import clone
from weft.values.trees import tree_map


def pieces_are_the_whole(
    scenario: Scenario, ladder: Sequence[BatchDescriptor], device: str = "cpu"
) -> None:
    """L5: a step captured in pieces, with attention between them, gives bitwise the results of the
    whole graph and of the function at the same padded class.

    The number of pieces is the number of layers plus one."""
    pieces = piecewise(whole(scenario, device), split_at="weft::paged_attention", ladder=ladder)
    one = graphify(whole(scenario, device), ladder=ladder)
    eager = whole(scenario, device)
    params = scenario.params(1, device)
    states = [scenario.state(1, device) for _ in range(3)]
    for batch in scenario.batches(device):
        padded = pad(batch, pieces.explain(params, states[0], batch).decision.descriptor)
        states[0], result = pieces(params, states[0], batch)
        states[1], other = one(params, states[1], batch)
        states[2], out = eager(params, states[2], padded)
        assert_equal("L5 pieces are the whole: output", result, unpad(out, batch.descriptor))
        assert_equal("L5 pieces are the whole: output", result, other)
        assert_equal("L5 pieces are the whole: state", states[0], states[2])
        assert_equal("L5 pieces are the whole: state", states[0], states[1])
    if any(n != scenario.config.num_layers + 1 for n in num_pieces(pieces)):
        raise LawViolation(
            f"L5 pieces are the whole: {num_pieces(pieces)} for {scenario.config.num_layers} layers"
        )


def pieces_are_the_whole_on_functions(function: Function, device: str = "cpu") -> None:
    """L5 for any pure function, split at every matrix product, sort and softmax in it."""
    split_at = {"matmul": "aten::mm", "sort": "aten::sort", "softmax": "aten::_softmax"}
    split_at["gather"] = split_at["sort"]  # "gather" calls argsort, which calls aten::sort
    names = [split_at[name] for name in function.code if name in split_at]
    # A function without a split is one whole graph, as in L1.
    if not names:
        return
    cut = piecewise(function.fn, split_at=names)
    params = function.params.to(device)
    state = tree_map(lambda x: x.to(device), function.state)
    other = clone(state)
    for x in (x.to(device) for x in function.inputs):
        state, out = function.fn(params, state, x)
        other, result = cut(params, other, x)
        assert_equal("L5 pieces are the whole: output", result, out)
        assert_equal("L5 pieces are the whole: state", other, state)
    if any(n != len(names) + 1 for n in num_pieces(cut)):
        raise LawViolation(f"L5 pieces are the whole: {num_pieces(cut)} pieces for {names}")
