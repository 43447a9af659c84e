"""`ClosedOver`: whether the values that a function closes over have changed since its trace."""

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
from torch import Tensor
from torch.nn import Buffer, Parameter

from weft.torchapi.private import is_functorch_wrapped_tensor
from weft.transforms.graphs.outside import Outside
from weft.values.objects import Change, Snapshot

_PLAIN = (Tensor, Parameter, Buffer)
# The most objects that are searched for a tensor.
_MOST_OBJECTS = 10_000
# The most values that are compared at each call; a function that names more is traced at each call.
_MOST_VALUES = 100_000
_OPAQUE = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
)


@attrs.frozen(eq=False)
class _Link:
    """A place in an object that refers to another object.

    Args:
        read: returns what a place of an object holds; raises LookupError or AttributeError if there
            is no such place.
        holder, key: the object, and the place in it.
        value: what the place held.
    """

    read: Callable[[Any, Any], Any]
    holder: Any
    key: Any
    value: Any

    def holds(self) -> bool:
        """Whether the place still holds the same object."""
        try:
            return self.read(self.holder, self.key) is self.value
        except (LookupError, AttributeError, ValueError):
            return False


class ClosedOver:
    """The tensors that a function reads and that are not arguments, the places where it finds them,
    and the other values that it names.

    Args:
        fn: the function.
        tensors: the tensors that its traces read.
        in_python: the values that it names, as they were after its traces.
    """

    def __init__(
        self, fn: Callable[..., Any], tensors: Sequence[Tensor], in_python: Snapshot
    ) -> None:
        self._in_python = in_python
        self._tensors = tuple({id(x): x for x in tensors}.values())
        self.is_lasting = all(map(_lasts, self._tensors)) and in_python.num_values <= _MOST_VALUES
        """Whether the traces may be used again: a later call can have the same tensors, and a
        change would be noticed."""
        if not self.is_lasting:
            return
        self._outside = Outside(fn, self._tensors, thorough=True)
        self._forms = [_form(x) for x in self._tensors]
        links = _links_to(self._tensors, [fn, *self._outside.named])
        self._links = [] if links is None else links
        self.is_lasting = links is not None

    def has_changed(self) -> bool:
        """Whether a name or a place in an object has another value, or a tensor another form."""
        if self._outside.has_changed() or not all(link.holds() for link in self._links):
            return True
        if not self._in_python.is_unchanged() and any(
            map(_is_of_python, self._in_python.changes())
        ):
            return True
        return [_form(x) for x in self._tensors] != self._forms


def _is_of_python(change: Change) -> bool:
    """Whether a change does not involve a tensor; the places of tensors are compared separately."""
    return not isinstance(change.before, Tensor) and not isinstance(change.after, Tensor)


def _lasts(tensor: Tensor) -> bool:
    """Whether a later call may have the same tensor: it is neither wrapped by a transform nor a
    result that autograd recorded."""
    return (
        type(tensor) in _PLAIN
        and not is_functorch_wrapped_tensor(tensor)
        and tensor.grad_fn is None
    )


def _form(x: Tensor) -> tuple[Any, ...]:
    """The properties of a tensor that a trace depends on."""
    return x.shape, x.stride(), x.dtype, x.device, x.is_conj(), x.is_neg(), x.requires_grad


def wrapped_tensors(fn: Callable[..., Any]) -> list[Tensor]:
    """The tensors that a function may read and that transforms of torch.func have wrapped."""
    roots = [fn, *Outside(fn, (), thorough=True).named]
    values = [*roots, *(link.value for link, _ in _search(roots))]
    return [
        value
        for value in values
        if isinstance(value, Tensor) and is_functorch_wrapped_tensor(value)
    ]


def _links_to(tensors: Sequence[Tensor], roots: Sequence[Any]) -> list[_Link] | None:
    """The places through which the tensors are found from the roots; None if one is not found."""
    missing = {id(x) for x in tensors} - {id(root) for root in roots}
    links = dict[int, _Link]()
    search = _search(roots)
    while missing:
        link, path = next(search, (None, ()))
        if link is None:
            return None
        if id(link.value) in missing:
            missing.discard(id(link.value))
            links |= {id(one): one for one in path}
    return list(links.values())


def _search(roots: Sequence[Any]) -> Iterator[tuple[_Link, tuple[_Link, ...]]]:
    """Search objects breadth first from the roots. Yield the place where each object is first
    found, and the path of places to it, which ends with that place."""
    queue = deque[tuple[Any, tuple[_Link, ...]]]((root, ()) for root in roots)
    visited = {id(root) for root in roots}
    while queue and len(visited) < _MOST_OBJECTS:
        holder, path = queue.popleft()
        for link in _links_of(holder):
            if id(link.value) not in visited:
                visited.add(id(link.value))
                queue.append((link.value, (*path, link)))
                yield link, (*path, link)


def _links_of(holder: Any) -> Iterator[_Link]:
    """The places of an object."""
    if isinstance(holder, (*_OPAQUE, Tensor)):
        return
    if isinstance(holder, dict):
        for key, value in list(holder.items()):
            yield _Link(_item, holder, key, value)
    elif isinstance(holder, list | tuple):
        for index, value in enumerate(holder):
            yield _Link(_item, holder, index, value)
    elif isinstance(holder, functools.partial):
        for name in ("func", "args", "keywords"):
            yield _Link(getattr, holder, name, getattr(holder, name))
    elif isinstance(holder, types.MethodType):
        for name in ("__self__", "__func__"):
            yield _Link(getattr, holder, name, getattr(holder, name))
    elif isinstance(holder, types.CellType):
        try:
            yield _Link(getattr, holder, "cell_contents", holder.cell_contents)
        except ValueError:  # an empty cell
            return
    elif isinstance(holder, types.FunctionType):
        for name in ("__closure__", "__defaults__", "__kwdefaults__"):
            yield _Link(getattr, holder, name, getattr(holder, name))
    else:
        for name in _attributes_of(holder):
            yield _Link(_attribute, holder, name, _attribute(holder, name))


def _item(holder: Any, key: Any) -> Any:
    return holder[key]


def _attribute(holder: Any, name: str) -> Any:
    """A stored attribute, read without running `__getattr__` or a user's `__getattribute__`."""
    fields = getattr(holder, "__dict__", {})
    if name in fields:
        return fields[name]
    return object.__getattribute__(holder, name)


def _attributes_of(holder: Any) -> Iterator[str]:
    """The names of the attributes that an object stores."""
    yield from list(getattr(holder, "__dict__", {}))
    for kind in type(holder).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(holder, name):
                yield name
