"""JAX's tests of `lower` and `compile`, as scenarios of `graphify`.

A docstring names JAX's test. After it stands `refused` or `differs`, with the reason, where weft
does not do the same.
"""

from typing import Any

import pytest
import torch
from graphified import X, captures
from torch import Tensor

from weft.errors import CacheMissError, CaptureError
from weft.transforms.graphs.graphify import graphify


def root(x: Tensor) -> Tensor:
    return (x**2).sqrt() + 1


def test_lower_and_compile() -> None:
    """jax: JitTest.test_jit_lower_compile, PJitTest.testLowerCompile"""
    lowered = graphify(root).lower(X)
    compiled = lowered.compile()
    assert torch.equal(compiled(-X), X + 1)
    assert lowered.in_tree == compiled.in_tree == torch.utils._pytree.tree_structure({"x": X})
    assert lowered.out_tree == compiled.out_tree == torch.utils._pytree.tree_structure(X)


def test_lowering_with_keywords() -> None:
    """jax: PJitTest.testLowerCompileWithKwargs"""
    compiled = graphify(lambda x, *, by: x * by).lower(X, by=X + 1).compile()
    assert torch.equal(compiled(X + 2, by=X), (X + 2) * X)


def test_one_tensor_for_two_arguments_is_another_signature() -> None:
    """jax: JitTest.test_jit_lower_compile_arg_type_mismatch (aliased arguments); differs: a tensor
    has an identity, which the function can see"""
    compiled = graphify(lambda x, y: x * 2 if x is y else x + y).lower(X, X + 1).compile()
    assert torch.equal(compiled(X, X + 5), X + X + 5)
    with pytest.raises(CacheMissError, match="tensors passed twice"):
        compiled(X, X)


def test_lowering_with_static_arguments() -> None:
    """jax: ArrayPjitTest.testLowerCompileWithStaticArguments; differs: static arguments are passed
    again, and compared"""
    compiled = graphify(lambda x, n: x * n, static_argnames="n").lower(X, 3).compile()
    assert torch.equal(compiled(X, 3), X * 3)
    with pytest.raises(CacheMissError, match="n: 4, captured 3"):
        compiled(X, 4)


def test_lowering_with_tensors_that_hold_nothing() -> None:
    """jax: JitTest.test_jit_lower_duck_typing, PJitTest.testLowerWithDuckTyping; differs: a graph
    has addresses of a device, so what is lowered on meta tensors is a listing only"""
    g = graphify(lambda x: 2 * x)
    lowered = g.lower(torch.empty(4, device="meta"))
    assert "aten::mul" in lowered.as_text()
    assert torch.equal(g(X), 2 * X)


MISMATCHES: dict[str, tuple[Any, str]] = {
    "structure": ([X], r"x: structure \[\*\], captured \*"),
    "dtype": (X.int(), "x: dtype torch.int32, captured torch.float32"),
    "shape": (X[:2], r"x: shape \(2,\), captured \(4,\)"),
}


@pytest.mark.parametrize("identity", [False, True])
@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_a_compiled_function_names_the_mismatch(mismatch: str, identity: bool) -> None:
    """jax: JitTest.test_jit_lower_compile_in_tree_mismatch,
    JitTest.test_jit_lower_compile_trivial_in_tree_mismatch,
    JitTest.test_jit_lower_compile_arg_type_mismatch, PJitTest.testLowerCompileInTreeMismatch,
    PJitTest.testLowerCompileArgTypeMismatch, ArrayPjitTest.test_aot_compile_in_tree_mismatch"""
    argument, problem = MISMATCHES[mismatch]
    compiled = graphify((lambda x: x) if identity else root).lower(X).compile()
    with pytest.raises(CacheMissError, match=f"arguments unlike the lowered ones: {problem}"):
        compiled(argument)


def test_an_identity_compiles() -> None:
    """jax: JitTest.test_jit_lower_compile_trivial"""
    assert torch.equal(graphify(lambda x: x).lower(X).compile()(X + 3), X + 3)


@pytest.mark.parametrize(
    "fn", [lambda *args: args[0].sqrt() + 1, lambda *args: args[0]], ids=["sqrt", "identity"]
)
def test_several_arguments_compile(fn: Any) -> None:
    """jax: JitTest.test_jit_lower_compile_multi_arg,
    JitTest.test_jit_lower_compile_trivial_multi_arg"""
    compiled = graphify(fn).lower(X, X.clone()).compile()
    assert torch.equal(compiled(X + 1, X), fn(X + 1, X))


def test_a_compiled_function_under_vmap() -> None:
    """jax: JitTest.test_jit_lower_compile_vmap; differs: under a transform the function itself runs"""
    compiled = graphify(lambda x: x + 4).lower(X).compile()
    assert torch.equal(
        torch.vmap(lambda x: compiled(x) + 2)(torch.ones(3, 4)), torch.full((3, 4), 7.0)
    )


@pytest.mark.parametrize("fn", [lambda x: x + 4, lambda x: x], ids=["add", "identity"])
def test_the_operators_as_text(fn: Any) -> None:
    """jax: JitTest.test_jit_lower_as_text, test_jit_lower_compiler_ir,
    test_jit_lower_trivial_compiler_ir, test_jit_lower_compile_as_text, PJitTest.testLowerAsText"""
    lowered = graphify(fn).lower(X)
    text = lowered.as_text()
    assert text.splitlines()[0] == "<lambda>(x), full"
    assert ("aten::add" in text) == (fn(X)[0].item() == 4)
    assert lowered.compile().as_text() == text
    assert lowered.as_text(form="dot").startswith("digraph")


def test_a_form_of_text_that_does_not_exist() -> None:
    """jax: JitTest.test_jit_lower_compile_with_compiler_options_invalid"""
    with pytest.raises(CaptureError, match="no such form"):
        graphify(root).lower(X).as_text("stablehlo")


def test_unused_arguments_are_kept() -> None:
    """jax: JitTest.test_jit_lower_no_pruning, ArrayPjitTest.test_pjit_keep_unused_default_false;
    differs: an argument that is not used stays in the listing and in the key"""
    lowered = graphify(lambda x, y: x * 2).lower(X, X[:2])
    assert "y, copied in" in lowered.as_text()
    with pytest.raises(CacheMissError, match=r"y: shape \(3,\), captured \(2,\)"):
        lowered.compile()(X, X[:3])


def test_the_memory_of_a_compiled_function() -> None:
    """jax: JitTest.test_jit_lower_compile_memory_analysis, PJitTest.testLowerCompileMemoryAnalysis"""
    for fn in (lambda x: x, root):
        analysis = graphify(fn).lower(X).compile().memory_analysis()
        assert (analysis.num_graphs, analysis.buffer_bytes) == (1, 16)


def test_the_results_of_a_lowered_function_are_listed() -> None:
    """jax: ArrayPjitTest.test_lowered_out_info, test_compiled_out_info, test_jit_trace,
    test_jit_trace_lower_and_compile"""
    lowered = graphify(lambda x: {"a": (x * 2).int(), "b": x}).lower(X)
    *_, a, b = lowered.as_text().splitlines()
    assert a.strip().startswith("return ['a'] = %")
    assert b.strip() == "return ['b'] = %0"
    assert ": int32[4]" in lowered.as_text()
    assert lowered.out_tree.num_leaves == 2


def test_a_compiled_function_closes_over_constants() -> None:
    """jax: ArrayPjitTest.test_aot_nested_pjit_closing_over_const_top_level"""
    constant = torch.arange(4.0)
    compiled = graphify(lambda x: graphify(lambda x: constant * 2 + x)(x)).lower(X).compile()
    assert torch.equal(compiled(X), constant * 2 + X)
    constant += 1
    assert torch.equal(compiled(X), constant * 2 + X)


def test_lowering_leaves_the_memo_alone_and_compiling_fills_it() -> None:
    """jax: ArrayPjitTest.test_cache_hit_pjit_lower_with_cpp_cache_miss"""
    g = graphify(root)
    lowered = g.lower(X)
    assert captures(g) == 0
    lowered.compile()
    lowered.compile()
    g(X)
    assert captures(g) == 1


def test_options_of_a_compiler_are_unknown() -> None:
    """jax: JitTest.test_compile_options_jit, test_jit_compile_with_compiler_options_multiple;
    refused: nothing is compiled"""
    with pytest.raises(TypeError, match="compiler_options"):
        graphify(root, compiler_options={"a": True})  # type: ignore[call-overload]
