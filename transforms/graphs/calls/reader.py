"""Generated code that reads the arguments of calls of one structure.

torch's pytree visits a tree node by node, in Python. Once a tree's structure is known, a few lines
of straight-line code unpack the next tree like it. These lines are generated here, with a check of
each type, length and key. They agree with `tree_flatten` and `value_key`, which handle the trees
that fail a check.
"""

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Sequence, Set
from functools import lru_cache
from types import CodeType
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.transforms.graphs.calls.buffers import ALIGNMENT
from weft.transforms.graphs.calls.key import attributes_of, is_held_weakly
from weft.transforms.graphs.calls.subtrees import SubtreeCache, is_frozen_tree
from weft.values.donation import TAKEN, is_donatable
from weft.values.keys import EXACT, by_identity, value_key
from weft.values.trees import node_fields, tree_leaves


class ForeignError(Exception):
    """A node of a class that generated code cannot read: a user's class, registered with torch's
    pytree."""


ReadCall = tuple[
    tuple[tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...], tuple[Tensor, ...], tuple[Any, ...]
]
"""The arguments of one call, as four tuples.

1. The key, in two parts: first the static values and, for arguments by reference, the values that
   are not tensors and the addresses of tensors; then the values and shapes of the copied arguments.
2. The leaves in flattening order, those by reference first.
3. The distinct tensors among the leaves.
4. The donatable nodes among the donated arguments."""


@attrs.frozen
class Argument:
    """One argument of an example call: the expression that reads it from `args` and `kwargs`
    (`argument_expressions`), its value, and, if it is donated, the call that takes it, in words."""

    expression: str
    value: Any
    taker: str | None = None


Read = Callable[[Sequence[Any], dict[str, Any]], ReadCall | None]


@attrs.frozen(eq=False)
class CallLayout:
    """A generated reader, and the positions of donated and referenced arguments in its result.

    Args:
        read: reads a call's arguments; None if they have another structure, or if one of their
            tensors was donated.
        nodes: for each donatable node among the donated arguments, the call that takes it.
        aliased: (index, the call that takes it) of each leaf that is a donated tensor outside a
            donatable node.
        num_references: the number of leaves, and the number of tensors, of the arguments by
            reference, which come first.
    """

    read: Read
    nodes: tuple[str, ...]
    aliased: tuple[tuple[int, str], ...]
    num_references: tuple[int, int]


# The names that generated code uses.
_NAMES = {"Tensor": Tensor, "value_key": value_key, "vars": vars}


@attrs.define
class _Writer:
    """The lines of a reader while it is generated, and the constants that they use."""

    lines: list[str] = attrs.field(factory=list)
    constants: dict[str, Any] = attrs.field(factory=dict)
    key: list[str] = attrs.field(factory=list)
    leaves: list[str] = attrs.field(factory=list)
    tensors: list[str] = attrs.field(factory=list)
    addresses: list[str] = attrs.field(factory=list)
    padded: Set[int] = frozenset()
    nodes: list[tuple[str, str]] = attrs.field(factory=list)
    aliased: list[tuple[int, str]] = attrs.field(factory=list)
    first_names: dict[int, str] = attrs.field(factory=dict)
    occurrences: Counter[int] = attrs.field(factory=Counter)
    num_leaves: int = 0
    num_tensors: int = 0
    count: int = 0

    def new_name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def name_of(self, expression: str) -> str:
        """A name for an expression's value: the expression itself if it is a name, else a new one
        to which it is assigned."""
        if expression.isidentifier():
            return expression
        name = self.new_name()
        self.lines.append(f"{name} = {expression}")
        return name

    def constant(self, value: Any) -> str:
        name = f"K{len(self.constants)}"
        self.constants[name] = value
        return name

    def require(self, condition: str) -> None:
        self.lines.append(f"if not ({condition}): return None")


def write_reader(
    signature: inspect.Signature,
    statics: Sequence[Argument],
    references: Sequence[Argument],
    copied: Sequence[Argument],
    padded: Set[int],
) -> CallLayout:
    """Generate the reader for calls like the one with these arguments. The alignment of copied
    tensors is part of the key, except for padded ones, whose `id`s are in `padded`.

    Raises:
        ForeignError: an argument contains a node of a class that generated code cannot read.
    """
    writer = _Writer(
        padded=padded,
        occurrences=sum((_tensors_in(a.value) for a in (*references, *copied)), Counter()),
    )
    for argument in statics:
        _write_value(writer, argument.expression, argument.value, is_held_weakly(argument.value))
    for argument in references:
        _write(writer, argument.expression, argument.value, True, argument.taker)
    num_first = len(writer.key)
    num_references = (writer.num_leaves, writer.num_tensors)
    for argument in copied:
        _write(writer, argument.expression, argument.value, False, None)
    if writer.addresses:
        # One test if all tensors are aligned, which is the usual case; else the offset of each.
        ends = [f"a{i} & {ALIGNMENT - 1}" for i in range(len(writer.addresses))]
        writer.lines += [f"a{i} = {address}" for i, address in enumerate(writer.addresses)]
        any_end = " | ".join(f"a{i}" for i in range(len(writer.addresses)))
        writer.key.append(f"not ({any_end}) & {ALIGNMENT - 1} or {as_tuple(ends)}")
    key = f"({as_tuple(writer.key[:num_first])}, {as_tuple(writer.key[num_first:])})"
    results = (
        key,
        as_tuple(writer.leaves),
        as_tuple(writer.tensors),
        as_tuple(n for n, _ in writer.nodes),
    )
    body = "\n    ".join((*writer.lines, f"return {', '.join(results)}"))
    names = {
        **writer.constants,
        "Tensor": Tensor,
        "value_key": value_key,
        "vars": vars,
        "parameters": signature.parameters,
    }
    read = compiled(f"def generated(args, kwargs):\n    {body}\n", names)
    return CallLayout(
        read, tuple(taker for _, taker in writer.nodes), tuple(writer.aliased), num_references
    )


def argument_expressions(
    signature: inspect.Signature, num_args: int, keywords: Sequence[str]
) -> dict[str, str]:
    """For each parameter, the expression that reads its argument from `args` and `kwargs` in calls
    of one form.

    Args:
        signature: the function's signature.
        num_args: the number of positional arguments.
        keywords: the keywords, in their order.
    """
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {name for name, parameter in signature.parameters.items() if parameter.kind in kinds}
    expressions = {}
    position = 0
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            expressions[name], position = f"args[{position}:]", num_args
        elif parameter.kind is parameter.VAR_KEYWORD:
            rest = [k for k in keywords if k not in named]
            expressions[name] = "{" + ", ".join(f"{k!r}: kwargs[{k!r}]" for k in rest) + "}"
        elif position < num_args and parameter.kind is not parameter.KEYWORD_ONLY:
            expressions[name], position = f"args[{position}]", position + 1
        elif name in keywords and name in named:
            expressions[name] = f"kwargs[{name!r}]"
        else:
            expressions[name] = f"parameters[{name!r}].default"
    return expressions


def _write(
    writer: _Writer, expression: str, value: Any, by_reference: bool, taker: str | None
) -> None:
    """Generate the lines that check and unpack one subtree."""
    name = writer.name_of(expression)
    if _is_leaf(value):
        _write_leaf(writer, name, value, by_reference, taker)
    elif (
        by_reference
        and taker is None
        and is_frozen_tree(value)
        and _occurs_only_here(writer, value)
    ):
        _write_cached(writer, name, value)
    else:
        _write_node(writer, name, value, by_reference, taker)


def _occurs_only_here(writer: _Writer, value: Any) -> bool:
    """Whether no tensor of a subtree occurs anywhere else in the call."""
    return all(writer.occurrences[tensor] == count for tensor, count in _tensors_in(value).items())


def _tensors_in(value: Any) -> Counter[int]:
    """The tensors of a tree by `id`, and how often each occurs in it."""
    return Counter(id(x) for x in tree_leaves(value) if isinstance(x, Tensor))


def _write_cached(writer: _Writer, name: str, value: Any) -> None:
    """Generate a separate reader for an immutable subtree, with a cache that recognizes it by
    identity."""
    inner = _Writer()
    _write_node(inner, "value", value, True, None)
    lines = (
        *inner.lines,
        f"return {', '.join(map(as_tuple, (inner.key, inner.leaves, inner.tensors)))}",
    )
    source = "def generated(value):\n    " + "\n    ".join(lines) + "\n"
    cache = writer.constant(SubtreeCache(compiled(source, {**inner.constants, **_NAMES})))
    writer.lines.append(f"{name} = {cache}.read({name})")
    writer.require(f"{name} is not None")
    writer.key.append(f"{name}[0]")
    writer.leaves.append(f"*{name}[1]")
    writer.tensors.append(f"*{name}[2]")
    writer.num_leaves += inner.num_leaves
    writer.num_tensors += inner.num_tensors


def _write_node(
    writer: _Writer, name: str, value: Any, by_reference: bool, taker: str | None
) -> None:
    writer.require(f"{name}.__class__ is {writer.constant(type(value))}")
    if taker is not None and is_donatable(value):
        writer.nodes.append((name, taker))
        taker = None
    if (fields := node_fields(type(value))) is not None:
        for field in fields.statics:
            _write_value(writer, f"{name}.{field}", getattr(value, field))
        for field in fields.children:
            child = getattr(value, field)
            if child is None and field in fields.optional:
                writer.require(f"{name}.{field} is None")
            else:
                _write(writer, f"{name}.{field}", child, by_reference, taker)
        return
    children = child_nodes(value)
    items = name
    if type(value) is dict:
        writer.require(f"[*{name}] == {writer.constant([*value])}")
        # `==` does not tell the keys 1, 1.0 and True apart.
        if any(type(key) is not str for key in value):
            writer.require(
                f"value_key(tuple({name})) == {writer.constant(value_key(tuple(value)))}"
            )
        items = f"{name}.values()"
    else:
        writer.require(f"len({name}) == {len(children)}")
    names = [writer.new_name() for _ in children]
    if names:
        writer.lines.append(f"{', '.join(names)}, = {items}")
    for child_name, child in zip(names, children, strict=True):
        _write(writer, child_name, child, by_reference, taker)


def _write_leaf(
    writer: _Writer, name: str, value: Any, by_reference: bool, taker: str | None
) -> None:
    writer.leaves.append(name)
    writer.num_leaves += 1
    if not isinstance(value, Tensor):
        _write_value(writer, name, value)
        return
    if type(value) not in (Tensor, torch.nn.Parameter):
        raise ForeignError
    if (
        taker is None and (first := writer.first_names.setdefault(id(value), name)) != name
    ):  # such as tied weights
        writer.require(f"{name} is {first}")
        return
    if type(value) is Tensor:
        kind = "Tensor"
    else:
        kind = writer.constant(type(value))
    unmarked = f"not vars({name})"
    if by_reference and vars(value):  # such as those that transformers sets on parameters
        unmarked = f"{writer.constant(Attributes.of(value))}.are_those_of({name})"
    writer.require(f"{name}.__class__ is {kind} and {unmarked}")
    writer.key.append(f"{name}.data_ptr()" if by_reference else f"{name}.shape")
    if not by_reference and id(value) not in writer.padded:
        writer.addresses.append(f"{name}.data_ptr()")
    if taker is not None:
        writer.aliased.append((writer.num_leaves - 1, taker))
    writer.tensors.append(name)
    writer.num_tensors += 1


@attrs.frozen(eq=False)
class Attributes:
    """The attributes that Python code had set on a tensor by reference when its call was recorded.

    Args:
        names, values: the names and values of all attributes.
        key: `attributes_of` the tensor.
    """

    names: tuple[str, ...]
    values: tuple[Any, ...]
    key: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Attributes":
        """The attributes of a tensor."""
        return cls(tuple(vars(tensor)), tuple(vars(tensor).values()), attributes_of(tensor))

    def are_those_of(self, tensor: Tensor) -> bool:
        """Whether a tensor has equal attributes, and was not donated."""
        attributes = vars(tensor)
        if tuple(attributes) == self.names and all(
            map(operator.is_, attributes.values(), self.values)
        ):
            return True
        return TAKEN not in attributes and attributes_of(tensor) == self.key


def _write_value(writer: _Writer, expression: str, value: Any, weakly: bool = False) -> None:
    """Check the type of a value that is not a tensor, and add it to the key as `value_key` compares
    it. If the value is held `weakly`, its `id` is added instead: the plan is dropped when the value
    dies, before another object can have that `id`."""
    name = writer.name_of(expression)
    writer.require(f"{name}.__class__ is {writer.constant(type(value))}")
    if weakly:
        writer.key.append(f"id({name})")
    elif isinstance(value, float):  # `hex` tells 0.0 from -0.0, and nan equals itself
        writer.key.append(f"{name}.hex()")
    elif type(value) not in EXACT and not by_identity(type(value)):
        writer.key.append(f"value_key({name})")
    elif value is not None:
        writer.key.append(name)


def _is_leaf(value: Any) -> bool:
    leaves = tree_leaves(value)
    return len(leaves) == 1 and leaves[0] is value


def child_nodes(node: Any) -> list[Any]:
    if type(node) is dict:
        return [*node.values()]
    if type(node) in (list, tuple) or (isinstance(node, tuple) and hasattr(node, "_fields")):
        return [*node]
    raise ForeignError


def as_tuple(expressions: Any) -> str:
    return "(" + "".join(f"{e}, " for e in expressions) + ")"


def compiled(source: str, names: dict[str, Any]) -> Any:
    """Run `source`, and return the function `generated` that it defines."""
    exec(_code(source), names)
    return names["generated"]


@lru_cache(maxsize=64)
def _code(source: str) -> CodeType:
    """Compile `source`, with a cache: batches of different sizes generate the same lines with other
    constants."""
    return compile(source, "<weft.transforms.graphs.calls.reader>", "exec")
