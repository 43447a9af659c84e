"""`trace`: the operators of one run of a function on fake tensors, for a compiler.

The run is watched by the same audit as a capture. The values of a trace are views of memory, not
tensor objects: a tensor object may be replaced by another one over the same memory without an
operator (`x.data`, autograd's views), and operators write to memory.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from weft.settings import is_batch_invariant
from weft.torchapi.faking import (
    FakeTensorMode,
    fake_tensors,
    forget_real_tensors,
    is_fake_of,
    without_data_pointers,
)
from weft.torchapi.patches import signal_capture
from weft.torchapi.private import WithoutFunctionModes, is_fake, storage_id, without_modes
from weft.torchapi.watching import OperatorWatch, mode_of_watches, watching_by_mode
from weft.transforms.graphs.backends.audit import Audit
from weft.transforms.graphs.backends.loops import looping
from weft.transforms.graphs.backends.operators import (
    TRANSFERS,
    flat_tensors,
    map_tensors,
    tensors_in,
    written,
)
from weft.transforms.graphs.backends.randomness import may_draw

# The most elements of a tensor that a trace computes for real too.
_MOST_REAL = 2**20
_as_strided = torch.ops.aten.as_strided.default


class Untraceable(Exception):
    """The reason why a trace cannot hold a function that a capture may still hold."""


@attrs.frozen
class Ref:
    """A value of a trace, by its number."""

    number: int


# The shape, the strides and the offset of a tensor. A trace for several classes may have `Size` in
# place of numbers, or None.
Geometry = tuple[Any, Any, Any] | None


@attrs.frozen(eq=False)
class Value:
    """A view of memory.

    Args:
        base: the number of the first value in this memory.
        geometry: where in the memory it lies.
        dtype: its dtype.
        device: its device.
        is_plain: whether it is neither a lazy conjugate nor a lazy negative.
    """

    base: int
    geometry: Geometry
    dtype: torch.dtype
    device: torch.device
    is_plain: bool

    @classmethod
    def of(cls, fake: Tensor, base: int) -> "Value":
        """The value of a fake tensor."""
        is_plain = not (fake.is_conj() or fake.is_neg())
        return cls(base, _geometry(fake), fake.dtype, fake.device, is_plain)


def _geometry(fake: Tensor) -> Geometry:
    return tuple(fake.shape), fake.stride(), int(fake.storage_offset())


@attrs.frozen(eq=False)
class Operation:
    """One operator of a trace.

    Args:
        func: its overload.
        args: its arguments, with a `Ref` in place of each tensor.
        kwargs: its keyword arguments, likewise.
        results: (path in the result, number of the value) of the tensors that it returns and that
            are no values yet.
        writes: the numbers of the values that it writes to.
        is_plain: whether its arguments are such that a graph may have.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[tuple[tuple[int, ...], int], ...]
    writes: tuple[int, ...] = ()
    is_plain: bool = True

    @property
    def reads(self) -> list[int]:
        """The numbers of the values among its arguments."""
        return [*_numbers_in((self.args, self.kwargs))]

    @property
    def makes(self) -> list[int]:
        """The numbers of the values that are its results."""
        return [number for _, number in self.results]


@attrs.frozen(eq=False)
class Loop:
    """Operators that are repeated while a flag holds.

    Args:
        flag: the number of a value of shape [] and dtype bool, which they write.
        carry: the numbers of the values that they change.
        body: the operators.
    """

    flag: int
    carry: tuple[int, ...]
    body: "tuple[Operation | Loop, ...]"

    @property
    def reads(self) -> list[int]:
        """The numbers of the values that it starts from."""
        inner = {number for x in self.body for number in x.makes}
        numbers = [self.flag, *self.carry, *(number for x in self.body for number in x.reads)]
        return [number for number in numbers if number not in inner]

    @property
    def writes(self) -> tuple[int, ...]:
        """The numbers of the values that it writes to."""
        return tuple(number for x in self.body for number in x.writes)

    @property
    def makes(self) -> list[int]:
        """The numbers of the values of its last repetition, which nothing else reads."""
        return [number for x in self.body for number in x.makes]


def _numbers_in(value: Any) -> Iterator[int]:
    if isinstance(value, Ref):
        yield value.number
    elif isinstance(value, tuple | list):
        for x in value:
            yield from _numbers_in(x)
    elif isinstance(value, dict):
        yield from _numbers_in([*value.values()])


@attrs.frozen(eq=False)
class Input:
    """A value that the run starts from: an argument, a tensor from outside, or a constant.

    Args:
        number: the number of the value.
        tensor: the real tensor.
        fake: the fake tensor that the run had in its place.
        is_literal: whether its values are numbers in the function's source.
    """

    number: int
    tensor: Tensor
    fake: Tensor
    is_literal: bool


@attrs.frozen(eq=False)
class Trace:
    """The operators of a run, in order, and the values that it starts from.

    Args:
        inputs: the values that it starts from.
        operations: the operators.
        values: all values, by their numbers.
        mode: the mode of the fake tensors.
    """

    inputs: tuple[Input, ...]
    operations: tuple[Operation | Loop, ...]
    values: tuple[Value, ...]
    mode: FakeTensorMode

    def without_tensors(self) -> "Trace":
        """The trace without the caller's tensors, which nothing may keep alive."""
        none = torch.empty(0)
        inputs = [x if x.is_literal else attrs.evolve(x, tensor=none) for x in self.inputs]
        return attrs.evolve(self, inputs=tuple(inputs))


class Tracer(OperatorWatch):
    """A watch that runs operators on fake tensors, and records them.

    A small tensor that depends on no argument is computed for real too. The function receives the
    real one: it may read its values if they come from numbers alone, and may keep it in a cache.
    The fake one stands for it in the trace.
    """

    def __init__(self) -> None:
        self.mode = fake_tensors()
        self.operations: list[Operation | Loop] = []
        self.inputs: list[Input] = []
        self.stale = set[int]()
        """The storages of real tensors, as `storage_id` gives them, over whose values the run has
        written something that depends on arguments."""
        self._values: list[Value] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        # The first number of each storage. The storages are kept, and not the tensors: no new
        # storage gets the address of an old one, and no tensor counts as kept.
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        # The fake tensors of constants, by tensor object, and one for each storage.
        self._fakes = WeakIdKeyDictionary()
        self._twins: dict[int, Tensor] = {}
        # The storages of the real tensors that the run made: no new storage gets the address of one.
        self._kept: list[torch.UntypedStorage] = []
        # (tensor from before the run, its fake tensor), by the storage of the fake tensor.
        self._outside: dict[int, tuple[Tensor, Tensor]] = {}
        self._literals = set[int]()
        self._default_dtype = torch.get_default_dtype()
        self._gradients: list[tuple[Tensor, Tensor | None]] = []

    def fake(self, tensor: Tensor) -> Tensor:
        """The fake tensor that stands for a tensor."""
        if is_fake_of(tensor, self.mode):
            return tensor
        if (fake := self._fakes.get(tensor)) is not None:
            with without_modes():  # a new tensor object, which does not count as kept
                new: Tensor = fake.detach()
            return new
        if (twin := self._twins.get(storage_id(tensor))) is not None:
            if _kind(tensor) != _kind(twin):
                raise Untraceable("a view of another dtype of a constant")
            with without_modes():
                return twin.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise Untraceable(f"a tensor of class {type(tensor).__name__}, {tensor.layout}")
        if tensor.is_quantized:
            raise Untraceable("a quantized tensor")
        if tensor.requires_grad and tensor.is_leaf:
            with WithoutFunctionModes():
                self._gradients.append((tensor, tensor.grad))
        with without_modes():
            fake = self.mode.from_tensor(tensor, static_shapes=True)
        self._outside.setdefault(storage_id(fake), (tensor, fake))
        return fake

    def real(self, fake: Tensor) -> Tensor:
        """The real tensor that a fake one stands for; itself if an operator of the run made it."""
        if is_fake_of(fake, self.mode) and storage_id(fake) in self._outside:
            return self._outside[storage_id(fake)][0]
        return fake

    def restore_gradients(self) -> None:
        """Undo the changes of a refused `backward()` to the gradients of tensors from outside."""
        with WithoutFunctionModes():
            for tensor, gradient in self._gradients:
                if tensor.grad is not gradient:
                    tensor.grad = gradient

    def forget(self) -> None:
        """Forget a run, but not which fake tensors stand for tensors from before the run."""
        self.operations.clear()
        self.inputs.clear()
        self.stale.clear()
        self._numbers.clear()
        self._storages.clear()
        self._fakes.clear()
        self._twins.clear()
        self._kept.clear()
        self._values.clear()

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.get_default_dtype() != self._default_dtype:
            raise Untraceable("torch.set_default_dtype in the function")
        if _reads_data(func) and not self._any_fake(args, kwargs):
            return self._read(func, args, kwargs)
        fake_args = map_tensors(self.fake, args)
        fake_kwargs = map_tensors(self.fake, kwargs)
        # Before the operator, which may change the geometry of a tensor object (`t_`).
        refs = map_tensors(self._ref, fake_args)
        named_refs = map_tensors(self._ref, fake_kwargs)
        with self.mode:
            result = self.pass_on(func, fake_args, fake_kwargs)
        if any(x.is_quantized for x in tensors_in(result)):
            raise Untraceable(f"{func}, which makes a quantized tensor")
        self._record(func, refs, named_refs, result, fake_args, fake_kwargs)
        if self._is_constant(func, args, kwargs, result):
            return self._compute(func, args, kwargs, result)
        return result

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Read constants on the host; the audit allows no other reads."""
        result = func(*args, **kwargs)
        for x in tensors_in(result):
            self.add_literal(x)
        return result

    def add_literal(self, real: Tensor) -> None:
        """Note a tensor of numbers in the function's source."""
        # A copy, because a tensor of the run that is alive after it counts as kept.
        literal = real.detach().clone()
        fake = self.fake(literal)
        self._literals.add(storage_id(fake))
        self._fakes[real] = fake
        self._twins[storage_id(real)] = fake
        self._kept.append(real.untyped_storage())

    def _any_fake(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return any(is_fake_of(x, self.mode) for x in flat_tensors(args, kwargs))

    def _record(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        fake_args: tuple[Any, ...],
        fake_kwargs: dict[str, Any],
    ) -> None:
        if is_batch_invariant():
            raise Untraceable("batch_invariant(): a compiler sums in an order of its own")
        if torch.Tag.inplace_view not in func.tags and any(
            _key(x) not in self._numbers for x in written(func, fake_args, fake_kwargs)
        ):
            raise Untraceable(f"{func}, which resizes a tensor")
        results = [
            (path, self._new(x)) for path, x in _paths(result) if _key(x) not in self._numbers
        ]
        writes: tuple[int, ...] = ()
        if torch.Tag.inplace_view in func.tags:
            func = _out_of_place(func)
        else:
            writes = tuple(self.number(x) for x in written(func, fake_args, fake_kwargs))
        is_needed = (
            results
            or writes
            or func.namespace != "aten"
            or not func._schema.returns
            or func._schema.name in TRANSFERS
        )
        if is_needed:
            is_plain = _is_plain((args, kwargs))
            self.operations.append(Operation(func, args, kwargs, tuple(results), writes, is_plain))

    def _is_constant(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> bool:
        """Whether the function is to receive a real result."""
        if may_draw(func) or func.namespace != "aten":
            return False
        if self._any_fake(args, kwargs):
            return False
        return all(x.numel() <= _MOST_REAL for x in tensors_in(result))

    def _compute(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        real = func(*args, **kwargs)
        for x, fake in zip(tensors_in(real), tensors_in(result), strict=True):
            self._fakes[x] = fake
            self._twins.setdefault(storage_id(x), fake)
            self._kept.append(x.untyped_storage())
        return real

    def _ref(self, fake: Tensor) -> Ref:
        return Ref(self.number(fake))

    def number(self, fake: Tensor) -> int:
        """The number of the value that lies where a fake tensor does."""
        if (number := self._numbers.get(_key(fake))) is not None:
            return number
        storage = storage_id(fake)
        if storage in self._outside:
            real, first = self._outside[storage]
            number = self._new(fake)
            if _key(first) != _key(fake):
                with without_modes():
                    real = _at(real, fake)
            with without_modes():  # a new tensor object: one that the run has counts as kept
                like = fake.detach()
            self.inputs.append(Input(number, real, like, storage in self._literals))
            return number
        if storage not in self._storages:
            raise Untraceable(f"a tensor {list(fake.shape)} that no operator made")
        number = self._new(fake)
        if not is_derivable(self._values, number):
            raise Untraceable("a view of another dtype that no operator made")
        self.operations.append(derivation(self._values, number))
        return number

    def _new(self, fake: Tensor) -> int:
        number = len(self._values)
        self._numbers[_key(fake)] = number
        storage = storage_id(fake)
        base, _ = self._storages.setdefault(storage, (number, fake.untyped_storage()))
        self._values.append(Value.of(fake, base))
        return number

    def trace(self) -> Trace:
        """What was recorded."""
        return Trace(tuple(self.inputs), tuple(self.operations), tuple(self._values), self.mode)


def is_derivable(values: Sequence[Value], number: int) -> bool:
    """Whether `derivation` can make a value: it has the dtype of the first one in its memory."""
    value = values[number]
    base = values[value.base]
    is_view = number != value.base and value.geometry is not None
    return is_view and value.dtype == base.dtype and value.is_plain and base.is_plain


def derivation(values: Sequence[Value], number: int) -> Operation:
    """The operator that makes a value from the first one in its memory."""
    value = values[number]
    assert value.geometry is not None
    shape, stride, offset = value.geometry
    args = (Ref(value.base), list(shape), list(stride), offset)
    return Operation(_as_strided, args, {}, (((), number),))


@functools.cache
def _reads_data(func: Any) -> bool:
    """Whether an operator returns a value, or a shape, that depends on data."""
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    name = func._schema.name
    return name == "aten::_local_scalar_dense" or any(tag in func.tags for tag in tags)


def _key(x: Tensor) -> tuple[Any, ...]:
    """Which memory a tensor is a view of, and how."""
    return (
        storage_id(x),
        x.storage_offset(),
        tuple(x.shape),
        x.stride(),
        x.dtype,
        x.is_conj(),
        x.is_neg(),
    )


def _kind(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.is_conj(), x.is_neg()


def _at(real: Tensor, fake: Tensor) -> Tensor:
    """The view of a real tensor's memory that lies where a fake tensor does in its own."""
    if fake.dtype != real.dtype or fake.is_conj() or fake.is_neg():
        raise Untraceable("a view of another dtype of a tensor from outside")
    return real.detach().as_strided(fake.shape, fake.stride(), fake.storage_offset())


def _paths(result: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The tensors of a result, with their paths in it."""
    if isinstance(result, Tensor):
        yield path, result
    elif isinstance(result, tuple | list):
        for i, x in enumerate(result):
            yield from _paths(x, (*path, i))


def _out_of_place(func: Any) -> Any:
    """The operator that returns the view to which this one changes its argument."""
    name = func._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if name.endswith("_") and packet is not None and name not in ("set_", "resize_"):
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        if alike := [x for x in overloads if _parameters(x) == _parameters(func)]:
            return alike[0]
    raise Untraceable(f"{func}, which gives a tensor other memory")


def _parameters(func: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in func._schema.arguments]


# What an argument of an operator in a graph may be, besides tensors and lists.
_PLAIN = (
    *(int, float, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def _is_plain(value: Any) -> bool:
    """Whether an argument may be part of a graph, as a generator may not."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, (Ref, *_PLAIN))


class _Looper:
    """Records the steps of loops in a trace.

    Args:
        tracer: records them.
        audit: the audit of the run.
        unable: why the device cannot repeat a part of a graph; None if it can.
    """

    def __init__(self, tracer: Tracer, audit: Audit, unable: str | None) -> None:
        self.unable = unable
        self._tracer = tracer
        self._audit = audit

    def loop(self, flag: Tensor, carry: Sequence[Tensor], step: Callable[[], None]) -> None:
        tracer = self._tracer
        flag_number, *numbers = (tracer.number(tracer.fake(x)) for x in (flag, *carry))
        for x in (flag, *carry):
            if not is_fake(x):  # its value is that of the first step alone
                tracer.stale.add(storage_id(x))
                self._audit.becomes_data(storage_id(x))
        before = len(tracer.operations)
        with self._audit.steps.step(carry):
            step()
        body = tuple(tracer.operations[before:])
        if any(isinstance(x, Operation) and may_draw(x.func) for x in body):
            raise Untraceable("a step of while_loop that may draw random numbers")
        tracer.operations[before:] = [Loop(flag_number, tuple(numbers), body)]


class _Faking(OperatorWatch):
    """Passes fake tensors on in place of real ones, unless an operator depends on no argument. It
    is the innermost watch, so that the audit sees the tensors of the trace."""

    def __init__(self, tracer: Tracer, audit: Audit) -> None:
        self.tracer = tracer
        self.audit = audit

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten.lift_fresh.default:
            self.tracer.add_literal(args[0])
            return self.pass_on(func, args, kwargs)
        if self._depends(args, kwargs):
            for x in written(func, args, kwargs):
                if not is_fake(x):
                    self.tracer.stale.add(storage_id(x))
                    self.audit.becomes_data(storage_id(x))
            args = map_tensors(self._fake, args)
            kwargs = map_tensors(self._fake, kwargs)
        return self.pass_on(func, args, kwargs)

    def _depends(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operator's arguments depend on the function's."""
        stale = self.tracer.stale
        return any(is_fake(x) or storage_id(x) in stale for x in flat_tensors(args, kwargs))

    def _fake(self, tensor: Tensor) -> Tensor:
        fake = self.tracer.fake(tensor)
        if fake is not tensor and storage_id(tensor) in self.audit.owned_storages:
            self.audit.owned_storages.add(storage_id(fake))
        return fake


@attrs.frozen(eq=False)
class Traced:
    """A run on fake tensors, and what it returned."""

    outputs: Any
    tracer: Tracer

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the values that the run returned."""
        tensors = [x for x in self.outputs.leaves if isinstance(x, Tensor)]
        return tuple(self.tracer.number(self.tracer.fake(x)) for x in tensors)

    def trace(self) -> Trace:
        """The operators of the run."""
        _ = self.numbers  # a value that the run returned may need an operator of its own
        return self.tracer.trace()


def trace(
    run: Callable[[], Any],
    audit: Audit,
    tracer: Tracer,
    *,
    unable_to_loop: str | None = None,
    rehearse: bool = False,
) -> Traced:
    """Run a function on fake tensors under an audit.

    Args:
        run: runs the function.
        audit: the audit.
        tracer: records the run.
        unable_to_loop: why the device cannot repeat a part of a graph; None if it can.
        rehearse: whether to run the function once more before that.

    Raises:
        CaptureError: the audit refused something.
        Untraceable: the run cannot be traced.
    """

    def faked() -> Any:
        tracer.forget()
        tracer.restore_gradients()
        with _Faking(tracer, audit), mode_of_watches():
            return run()

    audit.random.draws = False
    audit.real = tracer.real
    try:
        with (
            torch.no_grad(),
            watching_by_mode(),
            without_data_pointers(),
            audit.random.private_draws(),
            tracer,
            looping(_Looper(tracer, audit, unable_to_loop)),
        ):
            if rehearse:
                audit.rehearse(faked)
            audit.restart()
            with signal_capture(), audit:
                outputs = faked()
            if audit.has_unknown:
                del outputs
                audit.rehearse(faked)
                audit.restart()
                with signal_capture(), audit:
                    outputs = faked()
    finally:
        tracer.restore_gradients()
        forget_real_tensors(tracer.mode)
    outside = [tracer.real(x) for x in audit.external.values()]
    audit.external = {storage_id(x): x for x in outside}
    return Traced(outputs, tracer)
