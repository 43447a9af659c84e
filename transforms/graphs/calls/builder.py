"""Generated code that makes the caller's result from the tensors of a replay; the counterpart of
`reader`.

The code depends only on the structure of a result. The class of its batch is a constant that the
code refers to by name, so that calls of any class share the code.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from torch import Tensor

from weft.batches.padding import unpad
from weft.transforms.graphs.calls.reader import as_tuple, child_nodes, compiled
from weft.values.trees import (
    Axes,
    TreeSpec,
    built,
    leaf_axes,
    node_fields,
    sized_class_fields,
    tree_structure,
    tree_unflatten,
)


class _Slot:
    """A leaf that stands for the expression that a builder evaluates in its place."""

    def __init__(self, expression: str) -> None:
        self.expression = expression


@attrs.frozen(eq=False)
class Template:
    """The code that makes a caller's result, for results of any class.

    Args:
        source: the source of a function `generated(outputs, references)`, which returns the result
            or the list of its leaves.
        names: the constants that the source uses.
        descriptors: the names of the constants that are descriptors of sized values.
        axes: returns the axes of each leaf, or None.
        structure: takes a class and returns the structure of the result; None if `generated`
            returns the whole result.
    """

    source: str
    names: dict[str, Any]
    descriptors: tuple[str, ...]
    axes: Callable[[], list[Axes | None]]
    structure: Callable[[Any], TreeSpec] | None

    def builder(self, descriptor: Any) -> Callable[[Sequence[Tensor], Sequence[Any]], Any]:
        """A function `(outputs, references) -> result` for results of class `descriptor`; None: the
        class of the graph."""
        if descriptor is None:
            names = self.names
        else:
            names = self.names | dict.fromkeys(self.descriptors, descriptor)
        generated: Callable[[Sequence[Tensor], Sequence[Any]], Any] = compiled(
            self.source, {**names}
        )
        if self.structure is None:
            return generated
        structure = self.structure(descriptor)
        return lambda outputs, references: tree_unflatten(generated(outputs, references), structure)


def write_template(
    structure: TreeSpec,
    leaves: Sequence[Any],
    references: Sequence[int | None],
    detached: Sequence[bool],
) -> Template:
    """Generate the code that makes a result from the outputs of a recording (`Outputs`)."""
    names, descriptors, expressions, count = (
        dict[str, Any](built=built),
        list[str](),
        list[str](),
        0,
    )
    for i, (leaf, reference) in enumerate(zip(leaves, references, strict=True)):
        if reference is not None:
            expressions.append(f"references[{reference}]{'.detach()' * detached[i]}")
        elif isinstance(leaf, Tensor):
            expressions.append(f"outputs[{count}]")
            count += 1
        else:
            names[f"value{i}"] = leaf
            expressions.append(f"value{i}")

    def build(node: Any, is_cut: bool = True) -> str:
        """The expression of a node. `is_cut`: sized values in it are cut to the class of the
        call."""
        if isinstance(node, _Slot):
            return node.expression
        kind = f"T{len(names)}"
        names[kind] = type(node)
        if (fields := node_fields(type(node))) is not None:
            sized = sized_class_fields(type(node))
            pairs = list[str]()
            for name in fields.children:
                child = getattr(node, name)
                is_whole = sized is not None and name in sized.axes
                if child is None:
                    expression = None
                else:
                    expression = build(child, is_cut and not is_whole)
                pairs.append(f"({name!r}, {expression})")
            for name in fields.statics:
                constant = f"S{len(names)}"
                names[constant] = getattr(node, name)
                descriptors.extend(
                    [constant] * (is_cut and sized is not None and name in sized.descriptors)
                )
                pairs.append(f"({name!r}, {constant})")
            return f"built({kind}, {as_tuple(pairs)})"
        parts = [build(child, is_cut) for child in child_nodes(node)]
        if type(node) is dict:
            keys = f"D{len(names)}"
            names[keys] = [*node]
            return "{" + ", ".join(f"{keys}[{i}]: {part}" for i, part in enumerate(parts)) + "}"
        if type(node) is list:
            return f"[{', '.join(parts)}]"
        if type(node) is tuple:
            return as_tuple(parts)
        return f"{kind}({', '.join(parts)})"

    def structure_of(descriptor: Any) -> TreeSpec:
        if descriptor is None:
            return structure
        return tree_structure(unpad(tree_unflatten(list(leaves), structure), descriptor))

    axes = functools.cache(lambda: leaf_axes(tree_unflatten(list(leaves), structure)))
    try:
        source = build(tree_unflatten([_Slot(e) for e in expressions], structure))
        structure_factory = None
    except Exception:  # a user's class, which generated code cannot read
        source = f"[{', '.join(expressions)}]"
        structure_factory = structure_of
    source = f"def generated(outputs, references):\n    return {source}\n"
    return Template(source, names, tuple(descriptors), axes, structure_factory)
