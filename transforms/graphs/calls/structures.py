"""Tree structures as text, and the differences between two of them."""

from collections.abc import Iterator

from weft.trees import TreeSpec, node_fields


def structure_text(structure: TreeSpec) -> str:
    """A structure as Python code, with `*` for each leaf.

    >>> from weft.trees import tree_structure
    >>> structure_text(tree_structure({"a": [1, 2], "b": (3,)}))
    "{'a': [*, *], 'b': (*,)}"
    """
    if structure.type is None:
        return "*"
    parts = [structure_text(child) for child in structure.children()]
    if structure.type is dict:
        return "{" + ", ".join(f"{k!r}: {part}" for k, part in zip(structure.context, parts, strict=True)) + "}"
    if structure.type is list:
        return f"[{', '.join(parts)}]"
    if structure.type is tuple:
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    named = structure.context if isinstance(structure.context, type) else structure.type
    if (fields := node_fields(structure.type)) is not None:
        parts = [f"{name}={part}" for name, part in zip(fields.of(structure.context), parts, strict=True)]
        parts += [f"{name}=None" for name in structure.context.absent]
        parts += [f"{name}={value!r}" for name, value in zip(fields.statics, structure.context.values, strict=True)]
    return f"{named.__name__}({', '.join(parts)})"


def structure_differences(new: TreeSpec, old: TreeSpec) -> Iterator[tuple[str, str, str]]:
    """The differences between two structures: for each, the path and the text of both structures there.

    >>> from weft.trees import tree_structure
    >>> [*structure_differences(tree_structure({"a": [1, 2]}), tree_structure({"a": 3}))]
    [("['a']", '[*, *]', '*')]
    """
    if new == old:
        return
    if (new.type, new.context, new.num_children) != (old.type, old.context, old.num_children):
        yield "", f"{structure_text(new):.200}", f"{structure_text(old):.200}"
        return
    fields = node_fields(new.type)
    keys = [f"[{k!r}]" for k in new.context] if new.type is dict else [f"[{i}]" for i in range(new.num_children)]
    steps = [f".{name}" for name in fields.of(new.context)] if fields else keys
    for step, one, other in zip(steps, new.children(), old.children(), strict=True):
        for path, seen, captured in structure_differences(one, other):
            yield step + path, seen, captured
