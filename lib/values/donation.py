"""Donation: the callee takes an argument's storage, and weft refuses the old value from then on.

Donation empties an object whose class is marked `donatable`: any later use of its fields raises an
error that names the taker, and live objects pay nothing. A plain tensor cannot be emptied while its
storage lives on. It is marked instead, and every weft transform refuses a marked tensor.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import attrs
import torch
from torch import Tensor

from weft.errors import ArgumentError, DonatedError
from weft.torchapi.private import (
    in_functorch_transform,
    innermost,
    is_differentiated,
    is_functorch_wrapped_tensor,
    seen_as,
    storage_id,
)
from weft.values.containers import changed_container, containers_in
from weft.values.trees import (
    built,
    class_fields,
    leaves_with_names,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

# The attribute that marks a donated tensor.
TAKEN = "_weft_taken_by"

_ONCE = (
    "donate it once, and use it in both places inside the function (a copy would become a second"
    " value)"
)
_INSTEAD = "use the value that it returned, or pass a copy (weft.clone) to keep the old one"


def donatable(cls: C) -> C:
    """Let `donate` empty the instances of a frozen attrs class.

    The class has slots, and a field `_taken_by: str = attrs.field(default="", init=False,
    metadata=OF_THIS_VALUE)`.
    """

    def missing(self: Any, name: str) -> NoReturn:
        taker = object.__getattribute__(self, "_taken_by")
        if taker and name in {f.name for f in attrs.fields(cls)}:
            raise DonatedError(
                f"{cls.__name__}.{name}", f"this {cls.__name__} was donated to {taker}", _INSTEAD
            )
        raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")

    alive: Callable[[Any], str] = type.__getattribute__(cls, "__repr__")

    def described(self: Any) -> str:
        taker = object.__getattribute__(self, "_taken_by")
        if taker:
            return f"<{cls.__name__}, donated to {taker}>"
        return alive(self)

    type.__setattr__(cls, "__repr__", described)
    # Python calls __getattr__ only when normal look-up fails, that is for an emptied slot or an
    # unknown name. So live objects pay nothing.
    type.__setattr__(cls, "__getattr__", missing)
    type.__setattr__(cls, "_weft_donatable", True)
    return cls


def is_donatable(node: Any) -> bool:
    """Whether donation moves `node` as a whole: its class was marked by `donatable`."""
    return getattr(type(node), "_weft_donatable", False)


def donate(tree: T, *, to: str) -> T:
    """Move `tree`: the result holds the same storage, and weft refuses the old value.

    Torch does not know about donation. It still reads a plain tensor that was donated, which now
    holds whatever the taker wrote. A value of a `donatable` class, such as `weft.State`, is
    emptied, so that reading its fields raises.

    Only the donated tensor object is marked, and only arguments are checked. Other ways to its
    storage are not refused: views of it (`jvp` passes one), its `detach()`, and the tensor itself
    where a function closes over it. So donate only what nothing else refers to.

    Args:
        tree: any pytree; `donatable` nodes are emptied, plain tensors are marked.
        to: the taker, for the error message.

    Raises:
        DonatedError: a value in the tree was donated before, or a tensor occurs in it twice. Then
            nothing is moved.
    """

    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    for leaf in tensors:
        if hasattr(leaf, TAKEN):
            refuse_donated(leaf, call=to)
    if len({id(leaf) for leaf in tensors}) != len(tensors):
        raise DonatedError(to, _named_twice(tree), _ONCE)

    if is_donatable(tree):
        return cast(T, _move_node(tree, to))

    def move(node: Any) -> Any:
        if is_donatable(node):
            return _move_node(node, to)
        if isinstance(node, Tensor):
            return take_tensor(node, to)
        return node

    moved: T = tree_map(move, tree, is_leaf=is_donatable)
    return moved


def _named_twice(tree: Any) -> str:
    """The problem of a tree in which a tensor occurs twice, with the first two places."""
    places: dict[int, str] = {}
    for name, leaf in leaves_with_names(tree):
        if isinstance(leaf, Tensor) and places.setdefault(id(leaf), name) != name:
            return (
                f"the same tensor at {places[id(leaf)]} and {name}: after the donation the two"
                " places cannot have different values"
            )
    return "the same tensor at two places: after the donation they cannot have different values"


def _move_node(node: Any, to: str) -> Any:
    kind: Any = type(node)
    moved = built(kind, [(name, getattr(node, name)) for name in class_fields(kind).names])
    take_node(node, to)
    return moved


def take_tensor(tensor: Tensor, to: str) -> Tensor:
    """Mark a plain tensor as donated; the result holds its storage from now on."""
    alias = tensor.view_as(tensor)  # unlike detach, it keeps autograd and jvp
    setattr(tensor, TAKEN, to)
    return alias


def take_node(node: Any, to: str) -> None:
    """Empty a donatable node, after its fields have been moved.

    Raises:
        DonatedError: it was emptied before.
    """
    kind: Any = type(node)
    for name in class_fields(kind).names:
        # Raises DonatedError if the node is empty already, where `__delattr__` would not say why.
        getattr(node, name)
        object.__delattr__(node, name)
    object.__setattr__(node, "_taken_by", to)


def refuse_donated(value: Any, *, call: str) -> None:
    """Raise if `value` is a tensor that was donated before, even if a transform of torch.func wraps
    it."""
    if isinstance(value, Tensor):
        taker = getattr(innermost(value), TAKEN, None)
    else:
        taker = None
    if taker is not None:
        shape = tuple(value.shape)
        raise DonatedError(call, f"a tensor of shape {shape} that was donated to {taker}", _INSTEAD)


def refuse_donated_in(call: str, **arguments: Any) -> None:
    """Raise if a tensor in one of these trees was donated before.

    Every transform that takes trees of tensors calls it. In torch.compile, which sees no marks, it
    does nothing.

    Args:
        call: the call of the transform, for the error message.
        arguments: the trees, by the names of the arguments.
    """
    if torch.compiler.is_compiling():
        return
    is_transformed = in_functorch_transform()
    for name, tree in arguments.items():
        for index, leaf in enumerate(tree_leaves(tree)):
            if not isinstance(leaf, Tensor) or not (is_transformed or hasattr(leaf, TAKEN)):
                continue  # nearly every leaf, in a fifth of the time of the call below
            try:
                refuse_donated(leaf, call=call)
            except DonatedError as error:
                path = name + leaves_with_names(tree)[index][0]
                raise DonatedError(call, f"{path}, {error.problem}", error.instead) from None


def clone(tree: T) -> T:
    """Copy every tensor in `tree` into new storage. Donate the copy if you still need the old
    value.

    Leaves that are the same tensor, such as tied weights, are the same tensor in the copy too.
    Leaves that share a storage share a new one, as in `copy.deepcopy`, except where derivatives are
    followed and in `torch.compile`.

    >>> import torch
    >>> weight = torch.ones(2, 3)
    >>> copied = clone({"embedding": weight, "head": weight, "first row": weight[0]})
    >>> copied["head"] is copied["embedding"], copied["first row"].data_ptr() == copied["head"].data_ptr()
    (True, True)

    Raises:
        DonatedError: a tensor was donated before, so its values may have been overwritten.
    """
    leaves, structure = tree_flatten(tree)
    refuse_donated_in("weft.clone(tree)", tree=tree)
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    copies: dict[int, Tensor] = {}
    for sharing in _by_storage(tensors.values()):
        for tensor, copied in zip(sharing, _cloned_together(sharing), strict=True):
            copies[id(tensor)] = copied
    cloned: T = tree_unflatten([copies.get(id(leaf), leaf) for leaf in leaves], structure)
    return cloned


def _by_storage(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Different tensors in groups that share a storage. A tensor is a group by itself if its memory
    is not a strided view of a storage, if its derivatives are followed, or if torch.compile, which
    sees no storages, is tracing.
    """
    if torch.compiler.is_compiling():
        return [[tensor] for tensor in tensors]
    groups: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        is_plain = not is_functorch_wrapped_tensor(tensor) and tensor.layout is torch.strided
        has_views = is_plain and not tensor.is_nested and not is_differentiated(tensor)
        groups.setdefault(storage_id(tensor) if has_views else -id(tensor), []).append(tensor)
    return groups.values()


def _cloned_together(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of tensors that share a storage: views of one copy of the bytes from their first
    element to their last."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if len(filled) < 2:
        return [tensor.clone() for tensor in tensors]
    spans = {id(tensor): _span(tensor) for tensor in filled}
    start = min(first for first, _ in spans.values()) // _ALIGNMENT * _ALIGNMENT
    end = max(last for _, last in spans.values())
    # In the smallest dtype the span is a whole number of elements, whatever the other dtypes are.
    narrow = min(filled, key=lambda tensor: tensor.itemsize)
    size = narrow.itemsize
    # Seen with its own flags a second time, a conjugate or negative view is plain again.
    plain = seen_as(narrow, narrow)
    data = plain.as_strided(((end - start) // size,), (1,), start // size).clone().view(torch.uint8)

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in spans:
            return tensor.clone()
        first, last = spans[id(tensor)]
        view = data[first - start : last - start].view(tensor.dtype)
        return seen_as(
            view.as_strided(tensor.shape, tensor.stride(), view.storage_offset()), tensor
        )

    return [copied(tensor) for tensor in tensors]


# The bytes of the widest element (complex128). A copy that starts at a multiple of it keeps every
# element aligned.
_ALIGNMENT = 16


def _span(tensor: Tensor) -> tuple[int, int]:
    """The offset of a tensor's first byte in its storage, and of the byte after its last."""
    last = int(
        sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    )
    first = int(tensor.storage_offset())
    return first * tensor.itemsize, (first + last + 1) * tensor.itemsize


def donates(*argnames: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare that a function takes the storage of the named arguments: each is moved before the
    body runs.

    `graphify` reads the declaration, so that a step declares its donations once.

    Args:
        argnames: arguments of the function, by name.

    Raises:
        ArgumentError: a name is not an argument of the function.
        DonatedError: (at a call) a value was donated before.

    >>> import torch
    >>> @donates("state")
    ... def advance(state, by):
    ...     return state.add_(by)
    >>> old = torch.zeros(())
    >>> new = advance(old, 1)
    >>> advance(old, 1)
    Traceback (most recent call last):
        ...
    weft.errors.DonatedError: advance(state)
      saw: a tensor of shape () that was donated to advance(state)
      instead: use the value that it returned, or pass a copy (weft.clone) to keep the old one
    """

    argument_names: tuple[Any, ...] = argnames
    call = f"donates({', '.join(getattr(name, '__name__', repr(name)) for name in argument_names)})"
    if not all(isinstance(name, str) for name in argument_names):
        raise ArgumentError(
            call, "an argument that is not a string", '@donates("state"), with its parentheses'
        )

    def wrap(fn: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(fn)
        if unknown := [name for name in argnames if name not in signature.parameters]:
            problem = f"{fn.__name__}{signature}, which has no argument {unknown[0]!r}"
            raise ArgumentError(
                call, problem, f"one of {', '.join(signature.parameters) or '(), for it has none'}"
            )
        names, body = tuple(signature.parameters), cast(Callable[..., R], fn)
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        has_plain_names = kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}

        def bind(args: Any, kwargs: Any) -> inspect.BoundArguments:
            try:
                return signature.bind(*args, **kwargs)
            except TypeError as error:
                # `inspect` says which argument is missing, but not of which function.
                raise TypeError(f"{wrapped.__name__}{signature}: {error}") from None

        @functools.wraps(fn)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            # In nearly every call all arguments are positional, which saves the slow `bind`.
            in_order = has_plain_names and len(args) == len(names) and not kwargs
            if in_order:
                bound = None
            else:
                bound = bind(args, kwargs)
            if bound is None:
                values: dict[str, Any] = dict(zip(names, args, strict=True))
            else:
                values = bound.arguments
            for argname in argnames:
                if argname in values:
                    values[argname] = donate(values[argname], to=f"{wrapped.__name__}({argname})")
            # `donate` rebuilds dicts and lists, so what the body puts into them would be lost.
            taken = containers_in({name: values[name] for name in argnames if name in values})
            if bound is None:
                result = body(*values.values())
            else:
                result = body(*bound.args, **bound.kwargs)
            if (changed := changed_container(taken)) is not None:
                problem = (
                    f"the function changed the container {changed} in place; that is a copy, so the"
                    " caller would not see the change"
                )
                raise DonatedError(
                    f"{wrapped.__name__}(...)", problem, "return the next value, and use that"
                )
            return result

        vars(wrapped)["__signature__"] = signature
        return declare_donated(wrapped, (*donated_argnames(fn), *argnames))

    return wrap


def declare_donated(fn: F, argnames: Iterable[str]) -> F:
    """Declare that `fn` donates these arguments, and return `fn`."""
    vars(fn)["__weft_donates__"] = tuple(dict.fromkeys(argnames))
    return fn


def donated_argnames(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The arguments that `fn` was declared to donate."""
    return tuple(getattr(fn, "__weft_donates__", ()))
