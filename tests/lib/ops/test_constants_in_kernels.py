"""A constant of a kernel's module stands before no tensor. Triton 3.8's interpreter makes a
constant, not a tensor, of `constant + tensor`, and refuses it later; `tl.full` makes a tensor of a
constant."""

import ast
from pathlib import Path

import pytest

import weft.ops

KERNELS = sorted(Path(weft.ops.__path__[0]).rglob("*_triton.py"))


def constants(tree: ast.Module) -> set[str]:
    """The names to which a module binds `tl.constexpr(…)`, or several of them at once."""
    return {
        name.id
        for node in tree.body
        if isinstance(node, ast.Assign) and "tl.constexpr(" in ast.unparse(node.value)
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }


ALL_CONSTANTS = {
    name for file in KERNELS for name in constants(ast.parse(file.read_text(encoding="utf-8")))
}


def constants_before_tensors(code: str) -> list[str]:
    """The operations in which a constant is left of what may be a tensor."""

    def is_constant(node: ast.expr) -> bool:
        if isinstance(node, ast.UnaryOp):
            return is_constant(node.operand)
        if isinstance(node, ast.BinOp):
            return is_constant(node.left) and is_constant(node.right)
        return isinstance(node, ast.Constant) or (
            isinstance(node, ast.Name) and node.id in ALL_CONSTANTS
        )

    def names_one(node: ast.expr) -> bool:
        return any(isinstance(name, ast.Name) for name in ast.walk(node)) and is_constant(node)

    functions = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef)]
    operations = [
        node for function in functions for node in ast.walk(function) if isinstance(node, ast.BinOp)
    ]
    return [
        ast.unparse(node)
        for node in operations
        if names_one(node.left) and not is_constant(node.right)
    ]


def test_there_are_kernels_with_constants() -> None:
    assert {"_MOST", "_INFINITE", "FILTERED"} <= ALL_CONSTANTS


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: file.stem)
def test_no_constant_stands_before_a_tensor(file: Path) -> None:
    assert constants_before_tensors(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "planted", ["_MOST + tl.zeros_like(most)", "-_MOST * x", "(_MOST + 1) / most"]
)
def test_a_constant_before_a_tensor_is_found(planted: str) -> None:
    assert constants_before_tensors(
        f"def kernel(x, most):\n    return tl.div_rn({planted}, most)"
    ) == [planted]
