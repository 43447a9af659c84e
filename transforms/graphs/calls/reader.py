"""Readers: generated code that takes calls of one structure apart, and builders, that put results of one together.

torch's pytree visits a tree node by node, in Python. A tree's structure is known once it has been seen, and so are the
few lines that unpack the next one like it: those are written out here, with each type, length and key checked. They say
no more than `tree_flatten` and `value_key` do: whatever they do not expect, they leave to them.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.donation import TAKEN, is_donatable
from weft.transforms.graphs.calls.held import Held, is_fixed
from weft.trees import TreeSpec, node_fields, tree_leaves, tree_unflatten
from weft.value_keys import EXACT, by_identity, value_key


class ForeignError(Exception):
    """A node of a class that generated code does not know: a user's own, registered with torch's pytree."""


Seen = tuple[tuple[tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...], tuple[Tensor, ...], tuple[Any, ...]]
"""One call, taken apart: its key in two parts (static values, and of arguments by reference the values that are no
tensors and the addresses of tensors; of the copied ones values and shapes), its leaves in flattening order (those by
reference first), those of them that are tensors, each once, and the donatable nodes among the donated arguments."""


@attrs.frozen
class Argument:
    """One argument of an example call: the expression that reads it from `args` and `kwargs` (see `places`), its value,
    and who takes it if it is donated."""

    place: str
    value: Any
    taker: str | None = None


Read = Callable[[Sequence[Any], dict[str, Any]], Seen | None]


@attrs.frozen(eq=False)
class CallLayout:
    """A reader, and what it found out about the arguments that it reads.

    Args:
        read: takes a call's arguments apart; None if they have another structure, or a donated tensor among them.
        nodes: for each donatable node among the donated arguments, who takes it.
        aliased: the leaves (by index) that are donated tensors of their own, and who takes each.
        num_references: of the leaves, and of the tensors, how many are of the arguments by reference. They stand first.
    """

    read: Read
    nodes: tuple[str, ...]
    aliased: tuple[tuple[int, str], ...]
    num_references: tuple[int, int]


@attrs.define
class _Writer:
    """The lines of a reader while it is written, and the constants that they name."""

    lines: list[str] = attrs.field(factory=list)
    constants: dict[str, Any] = attrs.field(factory=dict)
    key: list[str] = attrs.field(factory=list)
    leaves: list[str] = attrs.field(factory=list)
    tensors: list[str] = attrs.field(factory=list)
    nodes: list[tuple[str, str]] = attrs.field(factory=list)
    aliased: list[tuple[int, str]] = attrs.field(factory=list)
    first: dict[int, str] = attrs.field(factory=dict)
    stands: Counter[int] = attrs.field(factory=Counter)
    num_leaves: int = 0
    num_tensors: int = 0
    count: int = 0

    def name(self) -> str:
        self.count += 1
        return f"v{self.count}"

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
) -> CallLayout:
    """Write the reader for calls like one call.

    Raises:
        ForeignError: a node in an argument is of a class of the user's own.
    """
    writer = _Writer(stands=sum((_tensors_in(a.value) for a in (*references, *copied)), Counter()))
    for argument in statics:
        _write_value(writer, argument.place, argument.value)
    for argument in references:
        _write(writer, argument.place, argument.value, True, argument.taker)
    own, num_references = len(writer.key), (writer.num_leaves, writer.num_tensors)
    for argument in copied:
        _write(writer, argument.place, argument.value, False, None)
    key = f"({_tuple(writer.key[:own])}, {_tuple(writer.key[own:])})"
    found = (key, _tuple(writer.leaves), _tuple(writer.tensors), _tuple(n for n, _ in writer.nodes))
    body = "\n    ".join((*writer.lines, f"return {', '.join(found)}"))
    names = {**writer.constants, "Tensor": Tensor, "value_key": value_key, "parameters": signature.parameters}
    read = _compiled(f"def made(args, kwargs):\n    {body}\n", names)
    return CallLayout(read, tuple(taker for _, taker in writer.nodes), tuple(writer.aliased), num_references)


def places(signature: inspect.Signature, num_args: int, keywords: Sequence[str]) -> dict[str, str]:
    """For each parameter, the expression that reads it from the `args` and `kwargs` of a call of this form."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {name for name, parameter in signature.parameters.items() if parameter.kind in kinds}
    places, position = {}, 0
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            places[name], position = f"args[{position}:]", num_args
        elif parameter.kind is parameter.VAR_KEYWORD:
            rest = [k for k in keywords if k not in named]
            places[name] = "{" + ", ".join(f"{k!r}: kwargs[{k!r}]" for k in rest) + "}"
        elif position < num_args and parameter.kind is not parameter.KEYWORD_ONLY:
            places[name], position = f"args[{position}]", position + 1
        elif name in keywords and name in named:
            places[name] = f"kwargs[{name!r}]"
        else:
            places[name] = f"parameters[{name!r}].default"
    return places


def _write(writer: _Writer, expression: str, value: Any, by_reference: bool, taker: str | None) -> None:
    """Check and unpack one subtree."""
    name = writer.name()
    writer.lines.append(f"{name} = {expression}")
    if _is_leaf(value):
        _write_leaf(writer, name, value, by_reference, taker)
    elif by_reference and taker is None and is_fixed(value) and _stands_alone(writer, value):
        _write_held(writer, name, value)
    else:
        _write_node(writer, name, value, by_reference, taker)


def _stands_alone(writer: _Writer, value: Any) -> bool:
    """Whether no tensor in a subtree stands anywhere else in the call."""
    return all(writer.stands[one] == count for one, count in _tensors_in(value).items())


def _tensors_in(value: Any) -> Counter[int]:
    """The tensors of a tree by identity, and how often each stands in it."""
    return Counter(id(x) for x in tree_leaves(value) if isinstance(x, Tensor))


def _write_held(writer: _Writer, name: str, value: Any) -> None:
    """Let a subtree that cannot change be read by a reader of its own, which knows it again."""
    own = _Writer()
    _write_node(own, "value", value, True, None)
    lines = (*own.lines, f"return {', '.join(map(_tuple, (own.key, own.leaves, own.tensors)))}")
    source = "def made(value):\n    " + "\n    ".join(lines) + "\n"
    held = writer.constant(Held(_compiled(source, {**own.constants, "Tensor": Tensor, "value_key": value_key})))
    writer.lines.append(f"{name} = {held}.read({name})")
    writer.require(f"{name} is not None")
    writer.key.append(f"{name}[0]")
    writer.leaves.append(f"*{name}[1]")
    writer.tensors.append(f"*{name}[2]")
    writer.num_leaves += own.num_leaves
    writer.num_tensors += own.num_tensors


def _write_node(writer: _Writer, name: str, value: Any, by_reference: bool, taker: str | None) -> None:
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
    children, items = _children(value), name
    if type(value) is dict:
        writer.require(f"[*{name}] == {writer.constant([*value])}")
        if any(type(key) is not str for key in value):
            writer.require(f"value_key(tuple({name})) == {writer.constant(value_key(tuple(value)))}")
        items = f"{name}.values()"
    else:
        writer.require(f"len({name}) == {len(children)}")
    names = [writer.name() for _ in children]
    if names:
        writer.lines.append(f"{', '.join(names)}, = {items}")
    for child, inner in zip(names, children, strict=True):
        _write(writer, child, inner, by_reference, taker)


def _write_leaf(writer: _Writer, name: str, value: Any, by_reference: bool, taker: str | None) -> None:
    writer.leaves.append(name)
    writer.num_leaves += 1
    if not isinstance(value, Tensor):
        _write_value(writer, name, value)
        return
    if type(value) not in (Tensor, torch.nn.Parameter):
        raise ForeignError
    if taker is None and (first := writer.first.setdefault(id(value), name)) != name:  # such as tied weights
        writer.require(f"{name} is {first}")
        return
    kind = "Tensor" if type(value) is Tensor else writer.constant(type(value))
    writer.require(f"{name}.__class__ is {kind} and getattr({name}, {TAKEN!r}, None) is None")
    writer.key.append(f"{name}.data_ptr()" if by_reference else f"{name}.shape")
    if taker is not None:
        writer.aliased.append((writer.num_leaves - 1, taker))
    writer.tensors.append(name)
    writer.num_tensors += 1


def _write_value(writer: _Writer, expression: str, value: Any) -> None:
    """Check the type of a value that is no tensor, and let the key tell it apart as `value_key` does."""
    name = writer.name()
    writer.lines.append(f"{name} = {expression}")
    writer.require(f"{name}.__class__ is {writer.constant(type(value))}")
    if isinstance(value, float):
        writer.key.append(f"{name}.hex()")
    elif type(value) not in EXACT and not by_identity(type(value)):
        writer.key.append(f"value_key({name})")
    elif value is not None:
        writer.key.append(name)


def _is_leaf(value: Any) -> bool:
    leaves = tree_leaves(value)
    return len(leaves) == 1 and leaves[0] is value


def _children(node: Any) -> list[Any]:
    if type(node) is dict:
        return [*node.values()]
    if type(node) in (list, tuple) or (isinstance(node, tuple) and hasattr(node, "_fields")):
        return [*node]
    raise ForeignError


def _tuple(expressions: Any) -> str:
    return "(" + "".join(f"{e}, " for e in expressions) + ")"


def _compiled(source: str, names: dict[str, Any]) -> Any:
    """The function `made` that `source` defines."""
    exec(_code(source), names)
    return names["made"]


@lru_cache(maxsize=64)
def _code(source: str) -> CodeType:
    """The same lines are written for each size of a batch: what differs are the constants."""
    return compile(source, "<weft.transforms.graphs.calls.reader>", "exec")


class _Slot:
    """A leaf of a tree that stands for what a builder puts there."""

    def __init__(self, expression: str) -> None:
        self.expression = expression


def write_builder(structure: TreeSpec, expressions: Sequence[str], names: dict[str, Any]) -> Callable[..., Any]:
    """Write the function `(made, references) -> tree` for a structure, and an expression in these for each leaf."""
    names = dict(names)

    def build(node: Any) -> str:
        if isinstance(node, _Slot):
            return node.expression
        kind = f"T{len(names)}"
        names[kind] = type(node)
        if (fields := node_fields(type(node))) is not None:
            own = {name: getattr(node, name) for name in fields.children}
            given = [f"{name}={None if child is None else build(child)}" for name, child in own.items()]
            for name in fields.statics:
                constant = f"S{len(names)}"
                names[constant] = getattr(node, name)
                given.append(f"{name}={constant}")
            return f"{kind}({', '.join(given)})"
        parts = [build(child) for child in _children(node)]
        if type(node) is dict:
            keys = f"D{len(names)}"
            names[keys] = [*node]
            return "{" + ", ".join(f"{keys}[{i}]: {part}" for i, part in enumerate(parts)) + "}"
        if type(node) is list:
            return f"[{', '.join(parts)}]"
        return _tuple(parts) if type(node) is tuple else f"{kind}({', '.join(parts)})"

    try:
        source = build(tree_unflatten([_Slot(e) for e in expressions], structure))
    except Exception:  # a class of the user's own, which may be foreign here or check what its fields hold
        leaves = _compiled(f"def made(made, references):\n    return [{', '.join(expressions)}]\n", names)
        return lambda made, references: tree_unflatten(leaves(made, references), structure)
    built: Callable[..., Any] = _compiled(f"def made(made, references):\n    return {source}\n", names)
    return built
