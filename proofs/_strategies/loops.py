"""Loops for `while_loop`, of two kinds.

Some run on integers, with the results that Python's integers give. The others have generated bodies
that apply torch's operators, index by the loop's counter and read it; they are compared with the
Python loop."""

import functools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, library
from torch.nn import functional

from weft.torchapi.private import all_schemas, overload_of
from weft.transforms.graphs.backends.host_reads import READS

# The most steps of a generated loop.
STEPS = 12


@attrs.frozen
class Loop:
    """A loop on integers, which ends when their sum is `bound` or more.

    A step puts `3 * values[order[i]] + amounts[i]` at i, or just `values[order[i]]` where the
    amount is 0.

    Args:
        order, amounts: what the body computes, as above.
        bound: the bound of the sum. The loop always ends after `STEPS` steps.
        max_steps: the argument of `while_loop`.
        starts: the initial values of each call of one graph.
        in_place: whether the body writes its result into the storage of its carry.
    """

    order: tuple[int, ...]
    amounts: tuple[int, ...]
    bound: int
    max_steps: int | None
    starts: tuple[tuple[int, ...], ...]
    in_place: bool

    def cond(self, carry: Any) -> Tensor:
        """The loop's condition on a carry of tensors, `(values, steps)`."""
        values, steps = carry
        holds: Tensor = (sum(values) < self.bound) & (steps < STEPS)
        return holds

    def body(self, carry: Any) -> Any:
        """One step on a carry of tensors, `(values, steps)`."""
        values, steps = carry
        return self._moved(values), steps + 1

    def _moved(self, values: Sequence[Any]) -> list[Any]:
        return [
            # Where the amount is 0, the next carry has the same tensor in another slot, so that a
            # slot overwritten before it is read shows.
            3 * values[i] + a if a else values[i]
            for i, a in zip(self.order, self.amounts, strict=True)
        ]

    def expected(self, start: Sequence[int]) -> list[int]:
        """The final values followed by the number of steps, computed on Python's integers."""
        values = list(start)
        steps = 0
        # Integers of Python in a loop of Python: this oracle has nothing of torch.
        while sum(values) < self.bound and steps < STEPS and steps != self.max_steps:
            values = self._moved(values)
            steps = steps + 1
        return [*values, steps]


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    """Loops of up to four values, with two or three calls.

    >>> from hypothesis import find
    >>> find(loops(), lambda loop: loop.expected(loop.starts[0])[-1] == 2).max_steps is None
    True
    """
    count = draw(st.integers(1, 4))

    def numbers(low: int, high: int) -> st.SearchStrategy[tuple[int, ...]]:
        return st.lists(st.integers(low, high), min_size=count, max_size=count).map(tuple)

    # Two calls at least: the first one captures, so only another can show that the graph has the
    # length of the first loop.
    starts = draw(st.lists(numbers(-5, 5), min_size=2, max_size=3))
    order = draw(numbers(0, count - 1))
    amounts = draw(numbers(-3, 3))
    bound = draw(st.integers(-100, 100))
    return Loop(
        order,
        amounts,
        bound,
        # Also beyond STEPS, where the bound ends no loop, and steps past the end must change
        # nothing.
        draw(st.none() | st.integers(1, STEPS + 3)),
        tuple(starts),
        draw(st.booleans()),
    )


# Bodies


@library.custom_op("weft_proofs::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    """A custom operator that draws no random numbers."""
    return x / 2


@library.custom_op("weft_proofs::shaken", mutates_args=())
def shaken(x: Tensor) -> Tensor:
    """A custom operator that draws random numbers but has no tag that says so."""
    return x + torch.rand(x.shape, dtype=torch.float64)


halved.register_fake(torch.empty_like)
shaken.register_fake(torch.empty_like)


@attrs.frozen
class Operator:
    """An operator of torch whose result has the shape and dtype of its single tensor argument.

    Args:
        name: the name of its overload, such as `aten::t`.
        writes: whether it writes its argument.
        draws: whether it may draw random numbers.
        is_view: whether its result is a view of its argument.
    """

    name: str
    writes: bool
    draws: bool
    is_view: bool

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = overload_of(self.name)(x)
        return result


@functools.cache
def operators(dtype: torch.dtype) -> tuple[Operator, ...]:
    """All public operators of torch that fit `Operator`, found by their schemas and a trial call.

    They include views such as `mT` and `conj`, in-place operators such as `abs_`, and operators
    that draw random numbers."""
    by_name = dict[str, Operator]()
    example = torch.tensor([[0.25, 0.5], [0.75, 1.0]], dtype=dtype)
    # `fft_hfft` keeps a shape of [2, 2], but not one of [3, 3].
    odd = torch.arange(1.0, 10.0).reshape(3, 3).div(9).to(dtype)
    for schema in all_schemas():
        first, *rest = schema.arguments or [None]
        is_public = schema.name.startswith("aten::") and not schema.name.startswith("aten::_")
        if not is_public or first is None or len(schema.returns) != 1:
            continue
        is_unary = all(x.has_default_value() for x in rest)
        if not is_unary or {str(first.type), str(schema.returns[0].type)} != {"Tensor"}:
            continue
        if schema.overload_name:
            name = f"{schema.name}.{schema.overload_name}"
        else:
            name = schema.name
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")
                func = overload_of(name)
                result = func(example.clone())
                keeps_odd_shape = func(odd.clone()).shape == odd.shape
        except (
            RuntimeError,
            TypeError,
            AttributeError,
            NotImplementedError,
            IndexError,
            ValueError,
        ):
            continue  # it does not take such a tensor, or this build of torch lacks it
        is_alike = (result.shape, result.dtype, result.layout) == (
            example.shape,
            example.dtype,
            example.layout,
        )
        # A body that sets `requires_grad` on its carry is not a Python loop on values.
        is_alike = is_alike and keeps_odd_shape and not result.requires_grad
        # `empty_like` returns uninitialized memory, which cannot be compared.
        if is_alike and name != "aten::empty_like":
            alias = first.alias_info
            by_name[name] = Operator(
                name=name,
                writes=alias is not None and alias.is_write,
                # The tag says that it may draw, not that it does. A loop with such an operator may
                # be refused; if it is not, it is compared.
                draws=torch.Tag.nondeterministic_seeded in func.tags,
                is_view=alias is not None and not alias.is_write,
            )
    return tuple(sorted(by_name.values(), key=lambda operator: operator.name))


@functools.cache
def operators_with_an_edge(dtype: torch.dtype) -> tuple[Operator, ...]:
    """The operators without side effects that are infinite or NaN somewhere, such as `log` and
    `acos`.

    Under `vmap` the body runs on after a row's loop has ended, where their derivatives may be
    infinite or NaN too."""
    values = torch.tensor([[-2.0, -1.0], [0.0, 1.0]], dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(
            operator
            for operator in operators(dtype)
            if not operator.writes
            and not operator.draws
            and any(not operator(x).isfinite().all() for x in (values, values / 2, values + 1.5))
        )


@attrs.frozen
class Apply:
    """`x = operator(x)`."""

    operator: Operator


@attrs.frozen
class Custom:
    """`x = operator(x)`, for the name of a custom operator."""

    name: str


@attrs.frozen
class Attend:
    """`x = scaled_dot_product_attention(x, x, x)`."""

    dropout_p: float


@attrs.frozen
class Copy:
    """`x` becomes the value that another slot of the carry had before the step."""

    source: int


@attrs.frozen
class Index:
    """`x` is increased by elements of a table, at an index that contains the counter."""

    index: tuple[Any, ...]


@attrs.frozen
class Put:
    """`x` becomes a copy whose elements at an index that contains the counter are written or
    increased."""

    index: tuple[Any, ...]
    adds: bool


@attrs.frozen
class Take:
    """`x` is increased by the element of a list at the counter, through a tensor of indices, which
    `vmap` supports too.

    The list is as long as the longest loop, so a step past the end has no element.
    """


@attrs.frozen
class Peek:
    """`x` is increased by the counter, read on the host by one of its methods."""

    method: str


Instruction = Apply | Custom | Attend | Copy | Index | Put | Peek | Take
# Slots, each [n, n], and the counter, [] int64.
Carry = tuple[tuple[Tensor, ...], Tensor]


def _perform(
    instruction: Instruction, x: Tensor, table: Tensor, most_steps: int, carry: Carry
) -> Tensor:
    slots, counter = carry
    match instruction:
        case Apply(operator):
            return operator(x)
        case Custom(name):
            result: Tensor = overload_of(name)(x)
            return result
        case Attend(dropout_p):
            heads = x.real[None, None]
            attended = functional.scaled_dot_product_attention(
                heads, heads, heads, dropout_p=dropout_p
            )
            return attended[0, 0].to(x.dtype)
        case Copy(source):
            return slots[source % len(slots)]
        case Index(index):
            return x + table[_at(index, counter)].sum()
        case Put(index, adds):
            # A graph may refuse a body that writes its carry, and must run this one.
            x = x.clone()
            # A loop has more steps than a slot has rows.
            place = _at(index, counter % len(x))
            if adds:
                x[place] += 2
            else:
                x[place] = counter.to(x.dtype)
            return x
        case Peek(method):
            return x + _read(counter, method)
        case Take():
            elements = table[: max(most_steps, 1), 0]
            return x + elements.index_select(0, counter[None])


def _read(counter: Tensor, method: str) -> float:
    arguments = [""] if method == "__format__" else []
    value: Any = getattr(counter, method)(*arguments)
    if isinstance(value, str):
        # The text may have words around the number, as `repr` has.
        return int("".join(re.findall("[0-9]", value)))
    if method == "__dlpack__":
        value = torch.utils.dlpack.from_dlpack(value).item()
    return float(np.asarray(value).real)


def _at(parts: Sequence[Any], counter: Tensor) -> tuple[Any, ...]:
    return tuple(counter if part == "counter" else part for part in parts)


WAYS = ("on ranks", "in rows", "in derivatives")
"""The ways to run a loop besides plain calls, each eagerly and in a graph."""


@attrs.frozen
class LoopBody:
    """A loop that counts to a bound, in which each instruction changes one slot of the carry.

    Args:
        size: n, for slots of [n, n].
        dtype: the dtype of the slots.
        num_slots: the number of slots.
        instructions: the instructions, each with the index of its slot.
        bounds: the bound of the counter in each call of one graph.
        max_steps: the argument of `while_loop`.
        way: one of `WAYS`.
    """

    size: int
    dtype: torch.dtype
    num_slots: int
    instructions: tuple[tuple[int, Instruction], ...]
    bounds: tuple[int, ...]
    max_steps: int | None
    way: str

    @property
    def table(self) -> Tensor:
        """The table that `Index` and `Take` read."""
        values = torch.arange((STEPS + 1) ** 2, dtype=torch.float64).view(STEPS + 1, STEPS + 1)
        return values.to(self.dtype) / 8

    def start(self, device: str) -> tuple[Tensor, ...]:
        """The initial slots."""
        count = self.size**2
        values = torch.arange(1, count + 1, dtype=torch.float64, device=device).view(
            self.size, self.size
        )
        if self.dtype.is_complex:
            turned = values.to(self.dtype) * 1j
        else:
            turned = values.to(self.dtype)
        return tuple((turned + slot) / (count + self.num_slots) for slot in range(self.num_slots))

    def body(self, carry: Carry) -> Carry:
        """One step."""
        slots = list(carry[0])
        for slot, instruction in self.instructions:
            place = slot % self.num_slots
            slots[place] = _perform(instruction, slots[place], self.table, max(self.bounds), carry)
        return tuple(slots), carry[1] + 1

    def _has(self, kinds: Any) -> bool:
        return any(isinstance(instruction, kinds) for _, instruction in self.instructions)

    @property
    def must_run(self) -> bool:
        """Whether the loop has nothing that a graph may refuse: a write to the carry, a random
        draw, or a read on the host."""
        operators = [x.operator for _, x in self.instructions if isinstance(x, Apply)]
        draws = any(isinstance(x, Attend) and x.dropout_p for _, x in self.instructions)
        draws = draws or any(
            isinstance(x, Custom) and "shaken" in x.name for _, x in self.instructions
        )
        return not draws and not self._has(Peek) and not any(x.writes or x.draws for x in operators)

    @property
    def has_rows(self) -> bool:
        """Whether torch's `vmap` can run the loop: it supports neither reads on the host nor
        custom operators."""
        return all(_has_rows(instruction) for _, instruction in self.instructions)

    def with_derivatives(self) -> "LoopBody":
        """The loop without instructions that `vmap` cannot run, and with steps past its end."""
        instructions = tuple(each for each in self.instructions if _has_rows(each[1]))
        if self.max_steps is None:
            max_steps = max(self.bounds) + 2
        else:
            max_steps = self.max_steps
        return attrs.evolve(self, instructions=instructions or ((0, Take()),), max_steps=max_steps)


def _has_rows(instruction: Instruction) -> bool:
    """Whether torch's `vmap` can run the instruction."""
    match instruction:
        case Apply(operator):
            return not operator.writes and not operator.draws
        case Attend(dropout_p):
            return dropout_p == 0
        case Copy() | Take():
            return True
        case Custom() | Index() | Put() | Peek():
            return False


@st.composite
def loop_bodies(draw: st.DrawFn) -> LoopBody:
    """Loops of up to three slots and three instructions, with up to four calls.

    >>> from hypothesis import find
    >>> find(loop_bodies(), lambda loop: not loop.must_run and loop.bounds[0] > 2).num_slots
    1
    """
    dtype = draw(st.sampled_from((torch.float64, torch.complex128)))
    all_operators = operators(dtype)
    by_kind = [[operator for operator in all_operators if kind(operator)] for kind in _KINDS]
    instructions: list[st.SearchStrategy[Instruction]] = [
        *[st.sampled_from(alike).map(Apply) for alike in by_kind],
        st.sampled_from(["weft_proofs::halved", "weft_proofs::shaken"]).map(Custom),
        st.sampled_from([0.0, 0.5]).map(Attend),
        st.integers(0, 2).map(Copy),
        _indices().map(Index),
        st.builds(Put, _indices(), st.booleans()),
        st.sampled_from(sorted(READS)).map(Peek),
        st.just(Take()),
        # Among all operators these would come up too seldom. New kinds go last: stored cases of
        # planted bugs replay choices by number.
        st.sampled_from(operators_with_an_edge(dtype)).map(Apply),
    ]
    in_slots = st.tuples(st.integers(0, 2), st.one_of(instructions))
    loop = LoopBody(
        size=draw(st.integers(2, 3)),
        dtype=dtype,
        num_slots=draw(st.integers(1, 3)),
        instructions=tuple(draw(st.lists(in_slots, min_size=1, max_size=3))),
        # 0 too: a capture records the body of a loop that has no step, and must not apply it.
        bounds=tuple(draw(st.lists(st.integers(0, STEPS), min_size=2, max_size=3))),
        max_steps=draw(st.none() | st.integers(1, STEPS + 3)),
        way=draw(st.sampled_from(WAYS)),
    )
    # Of 1,500 loops drawn without this, none had a derivative that a step past the end makes NaN.
    if loop.way == "in derivatives":
        return loop.with_derivatives()
    return loop


@st.composite
def _indices(draw: st.DrawFn) -> tuple[Any, ...]:
    """Indices of a matrix with at least one row and two columns, in which one part or more is the
    counter."""
    other = draw(st.sampled_from([(), (1,), (-1,), (slice(None),), (slice(0, 1),), ("counter",)]))
    parts = draw(st.permutations(["counter", *other]))
    # Both move the dimension that the counter indexes; a planted bug counts no dimensions for
    # `...`.
    for new_part in draw(st.lists(st.sampled_from([None, ...]), max_size=2, unique=True)):
        parts.insert(draw(st.integers(0, len(parts))), new_part)
    return tuple(parts)


# The kinds of operators. Each kind is drawn equally often, however many operators it has.
_KINDS: tuple[Callable[[Operator], bool], ...] = (
    lambda x: not x.writes and not x.draws and not x.is_view,
    lambda x: x.is_view,
    lambda x: x.writes,
    lambda x: x.draws,
)
