"""The parts of a trace: what is compiled as one, and what is called as it is.

A training step ends in the same few operators on each of its parameters. A compiler that gets all
of them spends most of its time on them, so each distinct group is compiled once, and called for
every parameter.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import attrs
import torch

from weft.transforms.graphs.compiler.trace import Loop, Operation, Ref, Trace, Value

# The number of times that a group of operators occurs before it is compiled apart from the rest.
_LEAST_REPEATED = 4
# On a GPU, so many groups on small tensors are one kernel (Inductor combines eight at most): a
# launch takes longer than their work.
_COMBINED = range(4, 9)
_SMALL_BYTES = 2**18
_aten = torch.ops.aten
# The operators besides those with torch's tag that compute each element from the same element of
# their arguments.
_ELEMENTWISE = {_aten.copy_.default, _aten._to_copy.default}


@attrs.frozen(eq=False)
class Part:
    """Operators that are compiled together.

    Args:
        operations: the operators, in order.
        calls: for each call of what was compiled, which value is in place of which of those in the
            operators; the first call has the values themselves.
        is_combined: whether the operators are independent groups, to become one kernel.
    """

    operations: tuple[Operation, ...]
    calls: tuple[dict[int, int], ...] = ({},)
    is_combined: bool = False


@attrs.frozen(eq=False)
class Repeat:
    """Parts that are repeated while a flag holds.

    Args:
        loop: the loop.
        parts: those of its body.
    """

    loop: Loop
    parts: "tuple[Part | Operation | Repeat, ...]"


Parts = Sequence[Part | Operation | Repeat]


def split(trace: Trace, is_whole: Callable[[Operation], bool]) -> Parts:
    """The parts of a trace in the order in which they run.

    Args:
        trace: the trace.
        is_whole: whether an operator is called as it is, between compiled parts.
    """
    return _split(trace.operations, trace, is_whole)


def _split(
    operations: Sequence[Operation | Loop], trace: Trace, is_whole: Callable[[Operation], bool]
) -> Parts:
    parts: list[Part | Operation | Repeat] = []
    together: list[Operation] = []

    def end() -> None:
        if together:
            rest, repeated = _apart(together, trace)
            parts.extend([Part(tuple(rest)), *repeated] if rest else repeated)
            together.clear()

    for operation in operations:
        if isinstance(operation, Loop):
            end()
            body = _split(operation.body, trace, is_whole)
            parts.append(Repeat(operation, tuple(body)))
        elif is_whole(operation):
            end()
            parts.append(operation)
        else:
            together.append(operation)
    end()
    return parts


def _apart(operations: Sequence[Operation], trace: Trace) -> tuple[list[Operation], list[Part]]:
    """The operators without the repeated groups that may run after them, and these groups."""
    candidates = _Candidates(operations, trace)
    while candidates.exclude_shared():
        pass
    literals = {x.number for x in trace.inputs if x.is_literal}
    groups = defaultdict(list)
    for group in candidates.groups():
        form = _Form(trace.values, literals)
        groups[form.of(group)].append((group, form.numbers))
    repeated = [alike for alike in groups.values() if len(alike) >= _LEAST_REPEATED]
    parts = [part for alike in repeated for part in _combined(alike, trace.values)]
    apart = {id(operation) for alike in repeated for group, _ in alike for operation in group}
    return [x for x in operations if id(x) not in apart], parts


# A group of operators, and its values.
_Group = tuple[list[Operation], list[int]]


def _combined(alike: Sequence[_Group], values: Sequence[Value]) -> list[Part]:
    """The parts for groups that differ only in their values."""
    count = 1
    if _is_small([values[number] for number in alike[0][1]]):
        # As few calls as possible, those for the groups that are left over included.
        count = min(_COMBINED, key=lambda n: len(alike) // n + len(alike) % n)
    whole = len(alike) - len(alike) % count
    sets = [alike[i : i + count] for i in range(0, whole, count)]
    return [
        _part(together) for together in (sets, [[group] for group in alike[whole:]]) if together
    ]


def _part(sets: Sequence[Sequence[_Group]]) -> Part:
    """The part for sets of groups, each of which is one call."""
    operations = tuple(x for group, _ in sets[0] for x in group)
    numbers = [[number for _, mine in groups for number in mine] for groups in sets]
    calls = tuple(dict(zip(numbers[0], mine, strict=True)) for mine in numbers)
    return Part(operations, calls, is_combined=len(sets[0]) > 1)


def _is_small(values: Iterable[Value]) -> bool:
    """Whether all values are on a GPU, and small."""
    for value in values:
        if value.device.type != "cuda" or value.geometry is None:
            return False
        sizes = value.geometry[0]
        if any(type(n) is not int for n in sizes):
            return False
        if math.prod(sizes) * value.dtype.itemsize > _SMALL_BYTES:
            return False
    return True


class _Candidates:
    """The operators on single elements that may run after all others.

    Memory is named by the number of the first value in it.
    """

    def __init__(self, operations: Sequence[Operation], trace: Trace) -> None:
        self._all = operations
        self._values = trace.values
        self._excluded = set[int]()
        self.operations = self._find()

    def _find(self) -> list[Operation]:
        waiting: list[Operation] = []
        # Of the operators further down that are no candidates: the values that they read, the
        # memory that they read or write, and the memory that they write.
        read = set[int]()
        touched = set[int]()
        written = set[int]()
        for operation in reversed(self._all):
            memory = self._memory(operation.reads)
            changed = self._memory((*operation.writes, *operation.makes))
            if _is_view(operation):
                may_wait = read.isdisjoint(operation.makes)
            else:
                may_wait = memory.isdisjoint(written) and changed.isdisjoint(touched)
            if may_wait and id(operation) not in self._excluded and _is_elementwise(operation):
                waiting.append(operation)
            else:
                read.update(operation.reads)
                touched |= memory | changed
                written |= self._memory(operation.writes)
        return waiting[::-1]

    def _memory(self, numbers: Iterable[int]) -> set[int]:
        return {self._values[number].base for number in numbers}

    def _changed(self, operation: Operation) -> set[int]:
        """The memory that an operator writes or allocates."""
        makes = () if _is_view(operation) else operation.makes
        return self._memory((*operation.writes, *makes))

    def groups(self) -> list[list[Operation]]:
        """The candidates, those that depend on each other together."""
        return self._groups(self.operations)

    def _groups(self, operations: Sequence[Operation]) -> list[list[Operation]]:
        changed = set().union(*map(self._changed, operations))
        viewed = {number for x in operations if _is_view(x) for number in x.makes}
        parent: dict[Any, Any] = {}

        def root(link: Any) -> Any:
            while parent.setdefault(link, link) != link:
                link = parent[link]
            return link

        def links(operation: Operation) -> list[Any]:
            numbers = (*operation.reads, *operation.makes)
            memory = self._memory(numbers) & changed
            return [
                *(("memory", x) for x in memory),
                *(("view", x) for x in numbers if x in viewed),
            ]

        for operation in operations:
            first, *rest = links(operation)
            for other in rest:
                parent[root(other)] = root(first)
        groups = defaultdict(list)
        for operation in operations:
            groups[root(links(operation)[0])].append(operation)
        return [*groups.values()]

    def exclude_shared(self) -> bool:
        """Exclude the operators on single numbers whose results several groups need, such as those
        of a learning rate; whether there were any."""
        small = [x for x in self.operations if self._is_on_numbers(x)]
        large = [x for x in self.operations if not self._is_on_numbers(x)]
        users = defaultdict[int, set[int]](set)
        for index, group in enumerate(self._groups(large)):
            for operation in group:
                for memory in self._memory(operation.reads):
                    users[memory].add(index)
        shared = set[int]()
        for operation in reversed(small):
            needed_by = set().union(*(users[x] for x in self._changed(operation)))
            if len(needed_by) > 1:
                shared.add(id(operation))
            for memory in self._memory(operation.reads):
                users[memory] |= needed_by
        self._excluded |= shared
        self.operations = self._find()
        return bool(shared)

    def _is_on_numbers(self, operation: Operation) -> bool:
        values = [self._values[number] for number in (*operation.reads, *operation.makes)]
        return all(x.geometry is not None and x.geometry[0] == () for x in values)


def _is_view(operation: Operation) -> bool:
    return bool(operation.func.is_view) and not operation.writes


def _is_elementwise(operation: Operation) -> bool:
    func = operation.func
    is_elementwise = torch.Tag.pointwise in func.tags or func in _ELEMENTWISE
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    has_value = bool(operation.makes or operation.writes)
    return (
        has_value
        and operation.is_plain
        and not is_random
        and (is_elementwise or _is_view(operation))
    )


class _Form:
    """The form of a group of operators, which is the same for groups that differ only in the values
    that they start from.

    Attributes:
        numbers: the values of the group, in an order that such groups share.
    """

    def __init__(self, values: Sequence[Value], literals: Set[int]) -> None:
        self._values = values
        self._literals = literals
        self.numbers: list[int] = []
        self._positions: dict[int, int] = {}

    def of(self, operations: Sequence[Operation]) -> tuple[Any, ...]:
        """The form of a group."""
        described = [
            (
                x.func,
                self._described((x.args, x.kwargs)),
                tuple((path, self._position(number)) for path, number in x.results),
            )
            for x in operations
        ]
        results = {number for x in operations for number in x.makes}
        return tuple(described), tuple(self._kind(number, results) for number in self.numbers)

    def _described(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref, self._position(value.number)
        if isinstance(value, tuple | list):
            return tuple(map(self._described, value))
        if isinstance(value, dict):
            return tuple((name, self._described(x)) for name, x in value.items())
        return type(value), repr(value)

    def _position(self, number: int) -> int:
        if number not in self._positions:
            if (base := self._values[number].base) != number:
                self._position(base)
            self._positions[number] = len(self.numbers)
            self.numbers.append(number)
        return self._positions[number]

    def _kind(self, number: int, results: Set[int]) -> tuple[Any, ...]:
        value = self._values[number]
        base = self._positions[value.base]
        literal = number if number in self._literals else None
        kind = (value.geometry, value.dtype, value.device, value.is_plain)
        return base, *kind, number in results, literal
