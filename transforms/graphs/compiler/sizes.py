"""Which numbers of a trace follow the sizes of a ladder's classes.

A function is traced for a few classes, with the sizes as numbers. A number that differs between
the traces becomes an expression in the sizes (`Size`), if one fits all of them. The trace of any
other class is compared with these expressions before it shares the compilation, so a number that an
expression gets wrong costs a compilation of its own, and never a wrong result.
"""

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, fx

from weft.transforms.graphs.compiler.trace import Loop, Operation, Trace, Value

# The sizes of a class, by the names that `weft.axes` gives them.
Sizes = Mapping[str, int]


@attrs.frozen
class Size:
    """`(product of the factors * numerator + rounding) // denominator + constant`, in a class's
    sizes. A rounding of `denominator - 1` rounds up."""

    factors: tuple[str, ...]
    numerator: int = 1
    denominator: int = 1
    constant: int = 0
    rounding: int = 0

    def of(self, sizes: Mapping[str, Any]) -> Any:
        """The number for a class, or for symbols."""
        product: Any = self.numerator
        for name in self.factors:
            product = product * sizes[name]
        return (product + self.rounding) // self.denominator + self.constant

    def node(self, graph: fx.Graph, sizes: Mapping[str, fx.Node]) -> fx.Node:
        """The same computation in a graph."""
        result = sizes[self.factors[0]]
        for name in self.factors[1:]:
            result = graph.call_function(operator.mul, (result, sizes[name]))
        if self.numerator != 1:
            result = graph.call_function(operator.mul, (result, self.numerator))
        if self.rounding:
            result = graph.call_function(operator.add, (result, self.rounding))
        if self.denominator != 1:
            result = graph.call_function(operator.floordiv, (result, self.denominator))
        if self.constant:
            result = graph.call_function(operator.add, (result, self.constant))
        return result


class NotShared(Exception):
    """Why classes cannot share a compilation, in words."""


def independent(sizes: Sequence[Sizes]) -> list[str]:
    """The sizes that differ between classes; of those that agree in all of them, the first."""
    values = {name: tuple(of_class[name] for of_class in sizes) for name in sizes[0]}
    first: dict[tuple[int, ...], str] = {}
    for name, numbers in values.items():
        if len({*numbers}) > 1:
            first.setdefault(numbers, name)
    return [*first.values()]


def generalize(traces: Sequence[Trace], sizes: Sequence[Sizes]) -> Trace:
    """The first trace, with a `Size` in place of each number that differs between the traces. The
    geometry of a value is None if no expression fits it, and nothing but its operator needs it.

    Raises:
        NotShared: the traces differ in more than numbers, or no expression fits.
    """
    names = independent(sizes)
    first, *rest = traces
    _compare_forms(first, rest)

    inputs = {x.number for x in first.inputs}
    values = []
    for number, mine in enumerate(first.values):
        geometries = [t.values[number].geometry for t in traces]
        try:
            geometry = _generalized(geometries, names, sizes)
        except NotShared:
            if number in inputs:
                raise
            geometry = None
        values.append(attrs.evolve(mine, geometry=geometry))
    operations = _general_operations([t.operations for t in traces], names, sizes)
    return attrs.evolve(first, operations=operations, values=tuple(values))


def _general_operations(
    runs: Sequence[Sequence[Operation | Loop]], names: Sequence[str], sizes: Sequence[Sizes]
) -> tuple[Operation | Loop, ...]:
    """The operators of several classes, which have the same form, as those of the first one."""
    result: list[Operation | Loop] = []
    for alike in zip(*runs, strict=True):
        first = alike[0]
        if isinstance(first, Loop):
            bodies = [x.body for x in alike if isinstance(x, Loop)]
            body = _general_operations(bodies, names, sizes)
            result.append(attrs.evolve(first, body=body))
        else:
            arguments = [(x.args, x.kwargs) for x in alike if isinstance(x, Operation)]
            args, kwargs = _generalized(arguments, names, sizes)
            result.append(attrs.evolve(first, args=args, kwargs=kwargs))
    return tuple(result)


def check_instance(trace: Trace, general: Trace, sizes: Sizes, numbers: Iterable[int]) -> None:
    """Raise NotShared if a class's trace is not the general one with this class's sizes.

    Args:
        trace: the trace of the class.
        general: the general one.
        sizes: the sizes of the class.
        numbers: the values, besides the inputs, whose geometry counts.
    """
    _compare_forms(general, [trace])
    for number in {x.number for x in general.inputs}.union(numbers):
        _check_value(general.values[number].geometry, trace.values[number].geometry, sizes)
    operators = (operators_in(general.operations), operators_in(trace.operations))
    for mine, yours in zip(*operators, strict=True):
        _check_value((mine.args, mine.kwargs), (yours.args, yours.kwargs), sizes)


def _compare_forms(first: Trace, rest: Sequence[Trace]) -> None:
    """Raise NotShared if traces differ in operators, inputs or aliasing."""
    for other in rest:
        if len(first.inputs) != len(other.inputs):
            raise NotShared("another number of inputs")
        _compare_operations(first.operations, other.operations)
        for one, two in zip(first.inputs, other.inputs, strict=True):
            if one.number != two.number:
                raise NotShared("another input")
            if _kind(first.values[one.number]) != _kind(other.values[two.number]):
                raise NotShared("an input of another kind")
            if one.is_literal and not _same_literal(one.tensor, two.tensor):
                raise NotShared("other numbers in the function")


def _compare_operations(
    first: Sequence[Operation | Loop], other: Sequence[Operation | Loop]
) -> None:
    if len(first) != len(other):
        raise NotShared("another number of operators")
    for mine, yours in zip(first, other, strict=True):
        if isinstance(mine, Loop) and isinstance(yours, Loop):
            if (mine.flag, mine.carry) != (yours.flag, yours.carry):
                raise NotShared("a loop over other values")
            _compare_operations(mine.body, yours.body)
        elif isinstance(mine, Loop) or isinstance(yours, Loop):
            raise NotShared("a loop, which another class has not")
        elif mine.func is not yours.func or mine.results != yours.results:
            raise NotShared(f"{yours.func} where another class has {mine.func}")


def operators_in(operations: Sequence[Operation | Loop]) -> Iterator[Operation]:
    """The operators, those of loops included."""
    for operation in operations:
        if isinstance(operation, Loop):
            yield from operators_in(operation.body)
        else:
            yield operation


def _kind(value: Value) -> tuple[Any, ...]:
    """The properties of a value, besides its geometry, that a compiled function depends on."""
    return value.base, value.dtype, value.device, value.is_plain


def _same_literal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _generalized(values: Sequence[Any], names: Sequence[str], sizes: Sequence[Sizes]) -> Any:
    mine = values[0]
    if isinstance(mine, tuple | list):
        if any(type(x) is not type(mine) or len(x) != len(mine) for x in values):
            raise NotShared("arguments of other lengths")
        kind = list if isinstance(mine, list) else tuple
        return kind([_generalized(x, names, sizes) for x in zip(*values, strict=True)])
    if isinstance(mine, dict):
        if any(x.keys() != mine.keys() for x in values):
            raise NotShared("other keyword arguments")
        return {name: _generalized([x[name] for x in values], names, sizes) for name in mine}
    if all(_is_same(x, mine) for x in values):
        return mine
    if any(type(x) is not int for x in values):
        raise NotShared(f"{values[1]!r} where another class has {mine!r}")
    return _size_for(values, names, sizes)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two arguments are the same; for floats, whether they have the same digits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float | complex):
        return repr(one) == repr(other)
    return bool(one == other)


def _size_for(values: Sequence[int], names: Sequence[str], sizes: Sequence[Sizes]) -> Size:
    """The simplest expression that has these values for these classes."""
    for size in _candidates(values, names, sizes):
        if all(size.of(s) == value for s, value in zip(sizes, values, strict=True)):
            return size
    raise NotShared(f"numbers that follow no size: {', '.join(map(str, values))}")


# The divisors that code rounds by: halves, thirds, blocks of a kernel.
DIVISORS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)


def _candidates(
    values: Sequence[int], names: Sequence[str], sizes: Sequence[Sizes]
) -> Iterator[Size]:
    products: list[tuple[str, ...]] = [(name,) for name in names]
    products += [(one, two) for i, one in enumerate(names) for two in names[i:]]
    candidates = [
        size
        for factors in products
        for divisor in DIVISORS
        for size in _through_two_points(factors, divisor, values, sizes)
    ]
    # A multiple of a size before a size and a constant.
    yield from sorted(
        candidates, key=lambda x: (x.constant != 0, len(x.factors), x.denominator, x.rounding)
    )


def _through_two_points(
    factors: tuple[str, ...], divisor: int, values: Sequence[int], sizes: Sequence[Sizes]
) -> Iterator[Size]:
    """Expressions with this divisor that may have these values, rounded down or up."""
    product = [Size(factors).of(s) for s in sizes]
    low = min(range(len(product)), key=product.__getitem__)
    high = max(range(len(product)), key=product.__getitem__)
    if product[low] == product[high]:
        return
    slope = (values[high] - values[low]) / (product[high] - product[low])
    numerator = round(slope * divisor)
    if numerator == 0 or math.gcd(numerator, divisor) != 1:
        return
    for rounding in {0, divisor - 1}:
        rounded = (product[high] * numerator + rounding) // divisor
        yield Size(factors, numerator, divisor, values[high] - rounded, rounding)


def _check_value(general: Any, value: Any, sizes: Sizes) -> None:
    if isinstance(general, Size):
        if type(value) is not int or general.of(sizes) != value:
            raise NotShared(f"{value!r} where the sizes give {general.of(sizes)}")
    elif isinstance(general, tuple | list):
        if not isinstance(value, tuple | list) or len(general) != len(value):
            raise NotShared("arguments of other lengths")
        for one, other in zip(general, value, strict=True):
            _check_value(one, other, sizes)
    elif isinstance(general, dict):
        if general.keys() != value.keys():
            raise NotShared("other keyword arguments")
        for name, one in general.items():
            _check_value(one, value[name], sizes)
    elif not _is_same(general, value):
        raise NotShared(f"{value!r} where another class has {general!r}")
