"""lower and compile: the listing shows the operators, and the compiled graph takes only its own
signature."""

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft.batches.descriptor import BatchDescriptor
from weft.errors import CacheMissError, CaptureError, DonatedError
from weft.proofs import assert_equal
from weft.proofs.strategies import Rows
from weft.transforms.graphs.graphify import graphify, piecewise
from weft.values.donation import clone
from weft.values.trees import tree_structure


def step(params: Tensor, state: dict[str, Tensor], batch: Rows) -> tuple[dict[str, Tensor], Rows]:
    y = batch.x @ params
    return {"n": state["n"].add_(1)}, Rows(batch.descriptor, torch.sin(y).t().contiguous().t())


def arguments(n: int = 2) -> tuple[Tensor, dict[str, Tensor], Rows]:
    return torch.eye(2), {"n": torch.zeros(2)}, Rows(BatchDescriptor(n, n), torch.ones(n, 2))


def test_a_listing_names_inputs_operators_and_results() -> None:
    g = graphify(step, ladder=[BatchDescriptor(4, 4)], donate_argnames="state")
    assert (
        g.lower(*arguments()).as_text()
        == """\
step(state, params, batch), full for 'ragged 4 tokens, 4 reqs'
  %0 : float32[2]  state['n'], donated
  %1 : float32[2, 2]  params, by reference
  %2 : float32[4, 2]  batch.x, copied in
  %3 = aten::view(%0, [2])  : float32[2]
  %4 = aten::mm(%2, %1)  : float32[4, 2]
  aten::add_.Tensor(%3, 1)
  %5 = aten::sin(%4)  : float32[4, 2]
  %6 = aten::t(%5)  : float32[2, 4]
  %7 = aten::clone(%6, memory_format=contiguous_format)  : float32[2, 4]
  %8 = aten::t(%7)  : float32[4, 2]
  return [0]['n'] = state['n'], in its place
  return [1].x = %8"""
    )


def test_a_listing_shows_where_pieces_are_cut() -> None:
    g = piecewise(lambda x: torch.sort(x * 2).values + 1, split_at="aten::sort")
    lines = g.lower(torch.ones(3)).as_text().splitlines()
    assert lines[3] == "  -- runs by itself, between piece 1 and piece 2:"
    assert lines[4] == "  %2, %3 = aten::sort(%1)  : float32[3], int64[3]"


def test_a_tensor_from_outside_is_an_input() -> None:
    constant = torch.ones(2)
    assert (
        "%1 : float32[2]  from outside"
        in graphify(lambda x: x + constant).lower(torch.ones(2)).as_text()
    )


def test_dot_is_a_graph_of_the_operators() -> None:
    g = graphify(lambda x, y: torch.sin(x) + y)
    text = g.lower(torch.ones(2), torch.ones(2)).as_text("dot")
    assert text.startswith("digraph {")
    assert text.endswith("}")
    assert 'n0 [shape=box, label="aten::sin"];' in text
    assert 'n0 -> n1 [label="float32[2]"];' in text
    assert text.count("->") == 3
    assert text.count('"') % 2 == 0


def test_dot_is_read_by_graphviz(tmp_path: Any) -> None:
    text = graphify(step, donate_argnames="state").lower(*arguments()).as_text("dot")
    try:
        done = subprocess.run(
            ["dot", "-Tsvg"], input=text, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("Graphviz is not installed")
    assert done.returncode == 0, done.stderr


def test_there_is_no_other_form() -> None:
    with pytest.raises(CaptureError, match="'text' or 'dot'"):
        graphify(lambda x: x).lower(torch.ones(1)).as_text("json")


def test_lowering_leaves_no_trace() -> None:
    g = graphify(step, donate_argnames="state")
    params, state, batch = arguments()
    before = clone((params, state, batch))
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    g.lower(params, state, batch)
    assert_equal("lower leaves no trace", (params, state, batch), before)
    assert torch.equal(torch.rand(1), expected)
    assert g.cache_info().captures == 0
    g.lower(params, state, batch).compile()
    assert_equal("compile leaves no trace", (params, state, batch), before)


def test_a_compiled_graph_is_the_function_and_is_captured_once() -> None:
    g = graphify(step, donate_argnames="state")
    params, state, batch = arguments()
    with weft.assert_max_captures(1):
        compiled = g.lower(params, state, batch).compile()
        again = g.lower(params, state, batch).compile()
    expected = step(params, clone(state), batch)
    assert_equal("compile is the function", compiled(params, state, batch), expected)
    with pytest.raises(DonatedError):
        again(params, state, batch)


def test_a_compiled_graph_refuses_other_signatures() -> None:
    compiled = graphify(lambda x, k: x * k).lower(torch.ones(2), 2).compile()
    assert torch.equal(compiled(torch.ones(2), 2), torch.full((2,), 2.0))
    with pytest.raises(
        CacheMissError, match=r"arguments unlike the lowered ones: x: shape \(3,\), captured \(2,\)"
    ):
        compiled(torch.ones(3), 2)
    with pytest.raises(CacheMissError, match=r"k: 3, captured 2"):
        compiled(torch.ones(2), 3)


def test_a_lowered_call_prints_as_its_listing() -> None:
    lowered = graphify(lambda x: x + 1).lower(torch.ones(2))
    assert str(lowered) == lowered.as_text() == str(lowered.listing)


def test_a_compiled_graph_says_what_to_do_about_a_state_elsewhere() -> None:
    g = graphify(step, donate_argnames="state")
    params, state, batch = arguments()
    compiled = g.lower(params, state, batch).compile()
    with pytest.raises(CacheMissError) as error:
        compiled(params, clone(state), batch)
    assert (
        error.value.problem
        == "arguments unlike the lowered ones: state['n']: another tensor than the captured one"
        " (captured by reference)"
    )
    assert (
        error.value.instead
        == "call step itself, which captures what it needs; or pass arguments like the lowered"
        " ones, "
        "and by reference the same tensors, or the ones that a call returned in their place"
    )
    for turn in (1.0, 2.0):
        state, _ = compiled(params, state, batch)
        assert state["n"].tolist() == [turn, turn]


def square(x: Tensor) -> Tensor:
    return (x * x).sum()


X = torch.tensor([1.0, 3.0])
UNDER: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "grad": lambda f: torch.func.grad(f)(X),
    "jvp": lambda f: torch.func.jvp(f, (X,), (X,)),
    "jacrev": lambda f: torch.func.jacrev(f)(X),
    "vmap": lambda f: torch.func.vmap(f)(torch.stack([X, X + 1])),
    "a graph": lambda f: graphify(lambda x: f(x) * 2)(X),
    "no capture": lambda f: [weft.no_capture(replay=False)(f)(X)],
}


@pytest.mark.parametrize("way", UNDER)
def test_a_compiled_graph_runs_inline_where_the_graphified_function_does(way: str) -> None:
    compiled = graphify(square).lower(X).compile()
    assert_equal("compile is the function", UNDER[way](compiled), UNDER[way](square))
    assert_equal("compile is the function", compiled(X), square(X))


def test_a_compiled_graph_drops_no_gradient() -> None:
    w, module = torch.ones(2, requires_grad=True), torch.nn.Linear(2, 2)
    compiled = graphify(lambda w, x: (w * x).sum()).lower(w, X).compile()
    compiled(w, X).backward()
    assert_equal("the gradient", w.grad, X)
    g = graphify(module)
    closed = g.lower(X).compile()
    closed(X).sum().backward()
    assert_equal("the gradient of what it closes over", module.bias.grad, torch.ones(2))
    assert g.cache_info().eager == 1
    with torch.no_grad():
        assert_equal("compile is the function", closed(X), module(X))
    assert g.cache_info().replays == 1


def test_trees_in_and_out() -> None:
    g = graphify(lambda x, y: {"sum": x[0] + y, "x": x})
    lowered = g.lower([torch.ones(2), torch.ones(2)], torch.ones(2))
    compiled = lowered.compile()
    x = [torch.ones(2), torch.ones(2)]
    assert lowered.in_tree == tree_structure({"x": x, "y": torch.ones(2)})
    assert lowered.out_tree == tree_structure({"sum": torch.ones(2), "x": x})
    assert compiled.as_text() == lowered.as_text()
    assert repr(lowered) == "<Lowered <lambda>: 1 operators, full>"
    assert repr(compiled) == "<Compiled <lambda>: 1 graphs, full>"


def test_a_compiled_graph_says_what_its_own_graph_takes() -> None:
    g = graphify(lambda x: x * 2)
    compiled = [g.lower(torch.ones(size)).compile() for size in (2, 300)]
    assert [one.memory_analysis().num_graphs for one in compiled] == [1, 1]
    assert [one.memory_analysis().output_bytes for one in compiled] == [8, 1200]
    assert g.memory_analysis().num_graphs == 2


def test_what_cannot_be_captured_cannot_be_lowered() -> None:
    with pytest.raises(CaptureError, match=r"Tensor\.item reads a tensor on the host"):
        graphify(lambda x: x + x.sum().item()).lower(torch.ones(2))
    g = graphify(step, ladder=[BatchDescriptor(1, 1)], donate_argnames="state")
    with pytest.raises(CaptureError, match="no captured class covers 'ragged 2 tokens, 2 reqs'"):
        g.lower(*arguments())


def test_a_parameter_that_was_put_elsewhere_before_the_capture_is_no_other() -> None:
    g = graphify(lambda params, x: params + x)
    params, x = torch.zeros(2), torch.ones(2)
    before = params.detach()
    lowered = g.lower(params, x)
    params.data = torch.full((2,), 5.0)
    compiled = lowered.compile()
    for _ in range(2):
        assert_equal(
            "g is the function",
            [compiled(params, x), g(before, x), g(params, x)],
            [x * 6, x, x * 6],
        )
