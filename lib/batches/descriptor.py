"""`BatchDescriptor`: the shape class of a batch, with the partial order `covers`; and `Descriptor`,
the protocol of such classes."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import attrs

from weft.arguments.checks import is_int
from weft.display.tables import strip, text, titled
from weft.errors import DescriptorError

F = TypeVar("F", bound=Callable[..., Any])
_CHECK = "__weft_check_descriptor__"


def declare_check(fn: F, check: Callable[[Any], None]) -> F:
    """Declare `check`, which raises for a class of batches that `fn` cannot take, and return `fn`.

    `graphify` calls the check for each new class of batches, because a replay runs no Python and
    the graph that answers may be of a wider class.
    """
    vars(fn)[_CHECK] = check
    return fn


def check_accepted(fn: Callable[..., Any], descriptor: Any) -> None:
    """Call the check that `fn` declares, if any, on this class of batches."""
    check: Callable[[Any], None] | None = getattr(fn, _CHECK, None)
    if check is not None:
        check(descriptor)


@runtime_checkable
class Descriptor(Protocol):
    """The protocol of a shape class: hashable, ordered by `covers`, with the size of each named
    axis of its batches as an int attribute.

    An `@attrs.frozen` class of ints with a method `covers` satisfies it. A class that inherits from
    it gets a `covers` that compares each size. A batch class holds its descriptor in a field
    `weft.descriptor_field()`; the example of `weft.axes` shows both classes.

    >>> @attrs.frozen
    ... class Resolution(Descriptor):
    ...     height: int
    ...     width: int
    >>> Resolution(64, 64).covers(Resolution(50, 64)), Resolution(64, 64).covers(Resolution(32, 128))
    (True, False)
    """

    # No `__dict__`, so that a class with slots may inherit from this one.
    __slots__ = ()

    def covers(self, other: Self, /) -> bool:
        """Whether a batch of class `other`, padded, may run under this one. A partial order.

        Raises:
            DescriptorError: (if inherited) the two have different classes, or an argument is not an
                int.
        """
        sizes = _sizes_alone(self)
        if type(other) is not type(self):
            problem = "descriptors of two classes"
            instead = "descriptors of one class in one ladder"
            raise DescriptorError(f"{self!r:.60}.covers({other!r:.60})", problem, instead)
        return all(size >= getattr(other, name) for name, size in sizes.items())

    # Members of the protocol, so that `isinstance` refuses classes that cannot be hashed.
    def __hash__(self) -> int:
        return object.__hash__(self)

    def __eq__(self, other: Any, /) -> bool:
        return self is other


def _sizes_alone(descriptor: Any) -> dict[str, int]:
    """The sizes of a descriptor. Raises DescriptorError if it has none, or if an argument is not an
    int."""
    arguments = arguments_of(descriptor)
    strange = [
        f"{name}={value!r:.40}, not a size"
        for name, value in arguments.items()
        if not is_int(value)
    ]
    if strange or not arguments:
        if strange:
            problem = strange[0]
        else:
            problem = "no sizes"
        instead = (
            f"in class {type(descriptor).__name__} arguments that are ints, or a method"
            " covers(self, other)"
        )
        raise DescriptorError(f"{descriptor!r:.60}.covers(...)", problem, instead)
    return arguments


def arguments_of(descriptor: Any) -> dict[str, Any]:
    """The arguments that made a descriptor, by name and in order; for a class that is no attrs
    class, dataclass or named tuple, its public attributes."""
    names = argument_names(type(descriptor)) or [
        name for name in getattr(descriptor, "__dict__", ()) if not name.startswith("_")
    ]
    return {name: getattr(descriptor, name) for name in names}


def argument_names(kind: Any) -> tuple[str, ...]:
    """The names of the arguments of an attrs class, a dataclass or a named tuple; empty for any
    other class."""
    if attrs.has(kind):
        return tuple(field.name for field in attrs.fields(kind) if field.init)
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind) if field.init)
    return tuple(getattr(kind, "_fields", ()))


def check_descriptor(value: Any, call: str) -> None:
    """Raise DescriptorError for a value that is not a descriptor."""
    if not isinstance(value, Descriptor):
        instead = (
            "a hashable value with a method covers(other): a weft.BatchDescriptor, or an"
            " @attrs.frozen class"
        )
        if isinstance(getattr(value, "descriptor", None), Descriptor):
            instead = "its .descriptor"
        raise DescriptorError(call, f"{value!r:.60} where a descriptor should be", instead)


@attrs.frozen
class BatchDescriptor:
    """The immutable shape class of a batch of requests, and the memo key of its graph.

    Args:
        num_tokens: the number of tokens in the batch, over all requests.
        num_reqs: the number of requests in the batch.
        query_len: the number of tokens of *each* request in a uniform decode batch, so that
            `num_tokens == num_reqs * query_len`; None for a ragged batch (prefill, or prefill and
            decode mixed). Batches of equal shape may differ in class: a prefill of one token per
            request is ragged, because its requests are not past their prefill.
        num_active_loras: an upper bound of the number of LoRA adapters that the batch uses. Each
            number has its own graphs; graphs for 0 have no LoRA operators. Whoever makes the batch
            sets it, like `query_len`; if it is too small, adapters are left out.

    Raises:
        DescriptorError: the arguments contradict each other.

    >>> BatchDescriptor(num_tokens=8, num_reqs=8, query_len=1).covers(BatchDescriptor(5, 5, 1))
    True
    >>> BatchDescriptor(8, 8, query_len=1).covers(BatchDescriptor(5, 5, query_len=None))  # that one is still prefilling
    False
    """

    num_tokens: int
    num_reqs: int
    query_len: int | None = None
    num_active_loras: int = 0

    def __attrs_post_init__(self) -> None:
        if fault := self._fault():
            call = (
                f"BatchDescriptor({self.num_tokens!r}, {self.num_reqs!r},"
                f" query_len={self.query_len!r})"
            )
            raise DescriptorError(call, *fault)

    def _fault(self) -> tuple[str, str] | None:
        """The first contradiction between the fields, and what to write instead."""
        num_tokens = self.num_tokens
        num_reqs = self.num_reqs
        query_len = self.query_len
        for field in ("num_tokens", "num_reqs", "num_active_loras"):
            if not is_int(value := getattr(self, field), 0):
                return (
                    f"{field}={value!r} is not an int >= 0",
                    "pass whole numbers of tokens and requests",
                )
        if query_len is None:
            return None
        if not is_int(query_len, 1):
            return (
                f"query_len={query_len!r} is neither None nor an int >= 1",
                "pass None for a ragged batch",
            )
        if num_tokens != num_reqs * query_len:
            uniform = f"BatchDescriptor.uniform(num_reqs={num_reqs}, query_len={query_len})"
            return (
                f"{num_tokens=} is not num_reqs*query_len={num_reqs}*{query_len}",
                f"{uniform}, or query_len=None",
            )
        return None

    @classmethod
    def uniform(cls, num_reqs: int, query_len: int = 1, num_active_loras: int = 0) -> Self:
        """The class of a decode batch: `query_len` tokens for each of `num_reqs` requests, all past
        their prefill."""
        return cls(num_reqs * query_len, num_reqs, query_len, num_active_loras)

    @property
    def is_uniform(self) -> bool:
        """Whether this is the class of uniform decode batches."""
        return self.query_len is not None

    def covers(self, other: "BatchDescriptor") -> bool:
        """Whether a batch of class `other`, padded, may run under this one.

        A ragged class takes any batch that fits; a uniform class takes only uniform batches of its
        query length, because padding adds whole requests and cannot add tokens to a request.
        """
        fits = (
            self.num_tokens >= other.num_tokens
            and self.num_reqs >= other.num_reqs
            and self.num_active_loras >= other.num_active_loras
        )
        return fits and self.query_len in (None, other.query_len)

    def _repr_html_(self) -> str:
        uniform = [(self.query_len or 0, request) for request in range(self.num_reqs)]
        tokens = strip(
            uniform if self.is_uniform else [(self.num_tokens, -1)], joined=not self.is_uniform
        )
        return titled(text(self), tokens)

    def __str__(self) -> str:
        if self.query_len is None:
            shape = f"ragged {self.num_tokens} tokens"
        else:
            shape = f"uniform x{self.query_len}"
        if self.num_active_loras:
            loras = f", {self.num_active_loras} LoRAs"
        else:
            loras = ""
        return f"{shape}, {self.num_reqs} reqs{loras}"
