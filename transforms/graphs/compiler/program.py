"""A trace as a program: compiled graphs, and operators that are called as they are."""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, fx

from weft.torchapi.inductor import Compiler, Symbols, compile_graph, noting_kernels
from weft.torchapi.private import BelowAutograd, WithoutAutocast, WithoutFunctionModes
from weft.transforms.graphs.backends.loops import current_looper
from weft.transforms.graphs.compiler.parts import Part, Parts, Repeat
from weft.transforms.graphs.compiler.sizes import NotShared, Size, Sizes
from weft.transforms.graphs.compiler.trace import (
    Operation,
    Ref,
    Trace,
    Untraceable,
    derivation,
    is_derivable,
)

# The values of a run, by their numbers in the trace.
Values = dict[int, Tensor]


@attrs.frozen(eq=False)
class Call:
    """A call of a compiled graph.

    Args:
        run: takes the sizes that are symbols, then tensors; returns tensors.
        takes: the numbers of the values that it takes.
        gives: the numbers of those that it returns.
        lines: the calls in its code, as text: of kernels, with the operators that each computes;
            for a compiler that does not show its code, the operators that it compiled.
        drops: the numbers of the values that nothing needs after it.
    """

    run: Callable[..., Sequence[Tensor]]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    lines: tuple[str, ...]
    drops: tuple[int, ...] = ()

    def __call__(self, values: Values, sizes: Sizes) -> None:
        """Run it on values, and add its results to them."""
        results = self.run(*sizes.values(), *[values[number] for number in self.takes])
        values.update(zip(self.gives, results, strict=True))


@attrs.frozen(eq=False)
class OperatorCall:
    """A call of an operator as it is.

    Args:
        operations: the operators that derive its arguments from values of the run, and itself.
        takes: the numbers of the values that it takes.
        gives: the numbers of those that it returns.
        drops: the numbers of the values that nothing needs after it.
    """

    operations: tuple[Operation, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    drops: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The operator's name."""
        name: str = self.operations[-1].func._schema.name
        return name

    @property
    def lines(self) -> tuple[str, ...]:
        """The call as text."""
        return (f"{self.name}, as it is",)

    def __call__(self, values: Values, sizes: Sizes) -> None:
        """Run it on values, and add its results to them."""
        mine = {number: values[number] for number in self.takes}
        for operation in self.operations:
            args = _resolved(operation.args, mine, sizes)
            kwargs = _resolved(operation.kwargs, mine, sizes)
            result = operation.func(*args, **kwargs)
            for path, number in operation.results:
                value = result
                for index in path:
                    value = value[index]
                mine[number] = value
        values.update((number, mine[number]) for number in self.gives)


@attrs.frozen(eq=False)
class LoopCall:
    """Calls that are repeated while a flag holds.

    Args:
        flag: the number of the flag.
        carry: the numbers of the values that they change.
        calls: the calls.
        takes: the numbers of the values that they take.
        drops: the numbers of the values that nothing needs after it.
    """

    flag: int
    carry: tuple[int, ...]
    calls: "tuple[AnyCall, ...]"
    takes: tuple[int, ...]
    drops: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """The loop as text."""
        return ("in a loop:", *(f"  {line}" for call in self.calls for line in call.lines))

    def __call__(self, values: Values, sizes: Sizes) -> None:
        """Repeat them; in a capture, record how to."""
        flag = values[self.flag]
        looper = current_looper()
        if looper is not None:
            carry = [values[number] for number in self.carry]
            looper.loop(flag, carry, lambda: _run(self.calls, values, sizes))
        else:
            while bool(flag):
                _run(self.calls, values, sizes)


AnyCall = Call | OperatorCall | LoopCall


def _run(calls: Iterable[AnyCall], values: Values, sizes: Sizes) -> None:
    """Run calls on values, and drop those that nothing needs any more."""
    for call in calls:
        call(values, sizes)
        for number in call.drops:
            del values[number]


def _resolved(value: Any, values: Values, sizes: Sizes) -> Any:
    """An argument with tensors and numbers in place of `Ref` and `Size`."""
    if isinstance(value, Ref):
        return values[value.number]
    if isinstance(value, Size):
        return value.of(sizes)
    if isinstance(value, tuple | list):
        return type(value)([_resolved(x, values, sizes) for x in value])
    if isinstance(value, dict):
        return {name: _resolved(x, values, sizes) for name, x in value.items()}
    return value


@attrs.frozen(eq=False)
class Program:
    """A compiled trace.

    Args:
        calls: what to call, in order.
        inputs: the numbers of the trace's inputs.
        outputs: the numbers of the values that it returns.
        symbols: the sizes that are symbols in it; None if it is for one class.
    """

    calls: tuple[AnyCall, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    symbols: Symbols | None

    @property
    def operators(self) -> list[str]:
        """The names of the operators that it calls as they are."""
        return [call.name for call in _flat(self.calls) if isinstance(call, OperatorCall)]

    @property
    def lines(self) -> list[str]:
        """Its calls as text, in order."""
        return [line for call in self.calls for line in call.lines]

    @property
    def crossing(self) -> set[int]:
        """The numbers of the values that one call returns and another one takes."""
        return {number for call in _flat(self.calls) for number in call.takes}

    def bind(self, inputs: Sequence[Tensor], sizes: Sizes) -> Callable[[], list[Tensor]]:
        """A function that runs it.

        Args:
            inputs: the inputs of the trace.
            sizes: the sizes of the class.
        """
        names = [] if self.symbols is None else [*self.symbols.by_name]
        numbers = {name: sizes[name] for name in names}
        start = dict(zip(self.inputs, inputs, strict=True))

        def run() -> list[Tensor]:
            values = start.copy()
            with BelowAutograd(), WithoutAutocast(), WithoutFunctionModes(), torch.no_grad():
                _run(self.calls, values, numbers)
            return [values[number] for number in self.outputs]

        return run

    def is_for(self, sizes: Sizes) -> bool:
        """Whether the compiler assumed nothing that these sizes contradict."""
        return self.symbols is not None and self.symbols.hold(sizes)


def _flat(calls: Iterable[AnyCall]) -> Iterator[AnyCall]:
    """The calls, those of loops included."""
    for call in calls:
        yield call
        if isinstance(call, LoopCall):
            yield from _flat(call.calls)


def compile_trace(
    trace: Trace,
    parts: Parts,
    outputs: Sequence[int],
    compiler: Compiler,
    sizes: Sizes | None = None,
) -> Program:
    """Compile a trace.

    Args:
        trace: the trace; with `sizes`, its numbers may be `Size`.
        parts: its parts; those that are operators are called as they are.
        outputs: the numbers of the values that it returns.
        compiler: the compiler.
        sizes: the sizes of a class, for whose numbers the compiler chooses if it has to.
    """
    flow = _Flow(trace)
    symbols = None if sizes is None else Symbols(trace.mode, sizes)
    inputs = tuple(x.number for x in trace.inputs)
    calls = [*_compiled(parts, outputs, flow, trace, symbols, compiler)]
    return Program(_with_drops(calls, (*inputs, *outputs)), inputs, tuple(outputs), symbols)


def _compiled(
    parts: Parts,
    outputs: Iterable[int],
    flow: "_Flow",
    trace: Trace,
    symbols: Symbols | None,
    compiler: Compiler,
) -> Iterator[AnyCall]:
    """The calls for parts, after which the values with these numbers are needed."""
    for part, gives in zip(parts, flow.returned(parts, outputs), strict=True):
        if isinstance(part, Repeat):
            takes = tuple(flow.takes(part))
            calls = [*_compiled(part.parts, (), flow, trace, symbols, compiler)]
            yield LoopCall(part.loop.flag, part.loop.carry, _with_drops(calls, takes), takes)
        elif isinstance(part, Operation):
            operations, numbers = flow.complete([part])
            yield OperatorCall(tuple(operations), tuple(numbers), tuple(gives))
        else:
            operations, numbers = flow.complete(part.operations)
            graph = _Graph(trace, symbols, numbers)
            for operation in operations:
                graph.add(operation)
            with noting_kernels(compiler) as kernels:
                run = graph.compile(gives, compiler, combine=part.is_combined)
            lines = tuple(kernels or [x.func._schema.name for x in operations])
            for names in part.calls:
                yield Call(run, _renamed(graph.takes, names), _renamed(gives, names), lines)


def _renamed(numbers: Iterable[int], names: dict[int, int]) -> tuple[int, ...]:
    return tuple(names.get(number, number) for number in numbers)


def _with_drops(calls: Sequence[AnyCall], needed: Iterable[int]) -> tuple[AnyCall, ...]:
    """The calls; each drops the values that nothing needs after it."""
    done = set(needed)
    result: list[AnyCall] = []
    for call in reversed(calls):
        drops = {*call.takes, *call.gives} - done
        done |= drops
        result.append(attrs.evolve(call, drops=tuple(sorted(drops))))
    return tuple(reversed(result))


class _Flow:
    """Which values pass between the parts of a trace.

    A part derives a view of memory that an earlier part has allocated from the first value there:
    compiled as two inputs, they would be in memory of their own.
    """

    def __init__(self, trace: Trace) -> None:
        self._values = trace.values
        self._inputs = {x.number for x in trace.inputs}
        self._written = {trace.values[number].base for x in trace.operations for number in x.writes}

    def complete(self, operations: Sequence[Operation]) -> tuple[list[Operation], list[int]]:
        """The operators of a part, with those that derive the views that it starts from; and the
        numbers of the values that it takes."""
        there = set[int]()
        takes: list[int] = []
        result: list[Operation] = []
        for operation in operations:
            for number in operation.reads:
                if number not in there and self._is_derived(number):
                    self._take(self._values[number].base, takes, there)
                    result.append(derivation(self._values, number))
                    there.add(number)
                self._take(number, takes, there)
            result.append(operation)
            there.update(operation.makes)
        return result, takes

    def _take(self, number: int, takes: list[int], there: set[int]) -> None:
        if number in there:
            return
        value = self._values[number]
        if number not in self._inputs and number != value.base and value.base in self._written:
            raise Untraceable("a view of another dtype that one compiled part makes for another")
        there.add(number)
        takes.append(number)

    def _is_derived(self, number: int) -> bool:
        """Whether parts that did not make a value derive it."""
        if number in self._inputs or not is_derivable(self._values, number):
            return False
        base = self._values[self._values[number].base]
        return base.geometry is not None and base.geometry[2] == 0

    def takes(self, part: Part | Operation | Repeat) -> Iterator[int]:
        """The numbers of the values that a part takes."""
        if isinstance(part, Repeat):
            of_body = {*part.loop.makes}
            numbers = [x for inner in part.parts for x in self.takes(inner)]
            numbers = [part.loop.flag, *part.loop.carry, *numbers]
            yield from (x for x in numbers if x not in of_body)
        else:
            _, numbers = self.complete(_operations(part))
            for names in _names(part):
                yield from _renamed(numbers, names)

    def returned(self, parts: Parts, outputs: Iterable[int]) -> list[list[int]]:
        """For each part, the numbers of the values that it returns."""
        needed = set(outputs)
        result: list[list[int]] = []
        for part in reversed(parts):
            makes = [number for x in _operations(part) for number in x.makes]
            names = _names(part)
            result.append([x for x in makes if any(of.get(x, x) in needed for of in names)])
            for of in names:
                needed.difference_update(_renamed(makes, of))
            needed.update(self.takes(part))
        return result[::-1]


def _operations(part: Part | Operation | Repeat) -> Sequence[Any]:
    """The operators of a part, and its loops."""
    if isinstance(part, Repeat):
        return (part.loop,)
    return (part,) if isinstance(part, Operation) else part.operations


def _names(part: Part | Operation | Repeat) -> Sequence[dict[int, int]]:
    """For each call of a part, which value is in place of which of those in its operators."""
    return part.calls if isinstance(part, Part) else ({},)


class _Graph:
    """Builds the graph of a part.

    Attributes:
        takes: the numbers of the values that are its inputs.
    """

    def __init__(self, trace: Trace, symbols: Symbols | None, takes: Iterable[int]) -> None:
        self._graph = fx.Graph()
        self._trace = trace
        self._symbols = symbols
        self._nodes: dict[int, Any] = {}
        self._examples: list[Any] = []
        self._sizes: dict[str, fx.Node] = {}
        self.takes: list[int] = []
        # As arguments of their own: torch's cache keeps what the compiler assumed of these only.
        for name, symbol in ({} if symbols is None else symbols.by_name).items():
            self._sizes[name] = self._placeholder(f"size_{name}", symbol)
        inputs = {x.number: x for x in trace.inputs}
        for number in takes:
            source = inputs.get(number)
            if source is not None and source.is_literal and _is_number(source.tensor):
                self._nodes[number] = self._number(source.tensor)
            else:
                example = None if source is None else source.fake
                self._nodes[number] = self._placeholder(
                    f"value_{number}", self._example(number, example)
                )
                self.takes.append(number)

    def _number(self, tensor: Tensor) -> fx.Node:
        options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
        return self._graph.call_function(torch.ops.aten.full.default, ([], tensor.item()), options)

    def _example(self, number: int, fake: Tensor | None) -> Tensor:
        """A fake tensor for a value; `fake` if it is an input and has no `Size`."""
        value = self._trace.values[number]
        if value.geometry is None:
            raise NotShared("a tensor between two compiled parts whose size follows no size")
        if fake is not None and not _has_size(value.geometry):
            return fake
        shape, stride, offset = value.geometry
        if offset != 0 and _has_size(value.geometry):
            raise NotShared("a part of a tensor whose size differs between classes")
        if not value.is_plain:
            raise Untraceable("a lazy conjugate between two compiled parts")
        options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        with self._trace.mode:
            return torch.empty_strided(self._numbers(shape), self._numbers(stride), **options)

    def _placeholder(self, name: str, example: Any) -> fx.Node:
        node = self._graph.placeholder(name)
        node.meta["val"] = node.meta["example_value"] = example
        self._examples.append(example)
        return node

    def _numbers(self, numbers: Sequence[Any]) -> list[Any]:
        symbols = {} if self._symbols is None else self._symbols.by_name
        return [x.of(symbols) if isinstance(x, Size) else x for x in numbers]

    def add(self, operation: Operation) -> None:
        """Add an operator."""
        args = self._argument(operation.args)
        kwargs = self._argument(operation.kwargs)
        node = self._graph.call_function(operation.func, args, kwargs)
        for path, number in operation.results:
            result = node
            for index in path:
                result = self._graph.call_function(operator.getitem, (result, index))
            self._nodes[number] = result

    def compile(
        self, gives: Iterable[int], compiler: Compiler, *, combine: bool
    ) -> Callable[..., Sequence[Tensor]]:
        """Compile the graph, which returns the values with these numbers."""
        self._graph.output([self._nodes[number] for number in gives])
        module = fx.GraphModule(torch.nn.Module(), self._graph)
        return compile_graph(module, self._examples, self._trace.mode, compiler, combine=combine)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self._nodes[value.number]
        if isinstance(value, Size):
            return value.node(self._graph, self._sizes)
        if isinstance(value, torch.Size):
            return list(value)
        if isinstance(value, tuple | list):
            return type(value)([self._argument(x) for x in value])
        if isinstance(value, dict):
            return {name: self._argument(x) for name, x in value.items()}
        return value


def _is_number(tensor: Tensor) -> bool:
    return tensor.dim() == 0 and tensor.is_cpu


def _has_size(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_has_size, value))
    return isinstance(value, Size)
