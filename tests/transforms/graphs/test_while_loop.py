"""`while_loop`: it is the Python loop, eagerly, in graphs, in nested loops and under transforms."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, get_args
from unittest import mock

import pytest
import torch
from hypothesis import Phase, given, seed, settings
from torch import Tensor, library

import weft
from weft.errors import CaptureError, DonatedError, ProgramError
from weft.proofs import LawViolation
from weft.proofs._laws.loop_bodies import loop_bodies_are_pythons
from weft.proofs._laws.loops import loops_are_python_loops
from weft.proofs._strategies.loops import (
    Apply,
    Instruction,
    Loop,
    LoopBody,
    Take,
    loop_bodies,
    loops,
    operators,
)
from weft.torchapi.conditional_nodes import why_unavailable
from weft.transforms.graphs.backends.loops import Rehearsal
from weft.transforms.graphs.backends.while_nodes import WhileNodes
from weft.transforms.graphs.graphify import graphify, piecewise
from weft.transforms.graphs.while_loop import while_loop

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def collatz(carry: Any) -> Any:
    number, steps = carry
    return torch.where(number % 2 == 0, number // 2, 3 * number + 1), steps + 1


def is_above_1(carry: Any) -> Tensor:
    above: Tensor = carry[0] > 1
    return above


def count_steps(number: Tensor, max_steps: int | None = None) -> Any:
    return while_loop(is_above_1, collatz, (number, torch.zeros_like(number)), max_steps=max_steps)


def python_loop(number: int, most: int | None = None) -> list[int]:
    """The oracle, in Python's integers."""
    steps = 0
    while number > 1 and steps != most:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        steps = steps + 1
    return [number, steps]


def listed(values: Any) -> list[int]:
    return [int(x) for x in values]


@pytest.mark.one_of(1, 3)
@pytest.mark.slow
@pytest.mark.parametrize("value", [1, 0.5, "a", None, (1, 2.0), torch.float32, float("nan")])
def test_python_values_in_the_carry_stay(value: Any) -> None:
    def counted(x: Tensor) -> Any:
        return while_loop(lambda c: c[0].sum() < 9, lambda c: (c[0] + 1, c[1]), (x, value))

    torch.compiler.reset()
    for way in (counted, graphify(counted), torch.compile(counted, backend="eager")):
        total, unchanged = way(torch.ones(2))
        assert (total.tolist(), repr(unchanged)) == ([5, 5], repr(value))


@pytest.mark.one_of(1, 3)
@pytest.mark.slow
@pytest.mark.parametrize("most", [None, 1, 7])
def test_torch_compile_of_it_is_the_python_loop(most: int | None) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda number: count_steps(number, most), backend="eager")
    for number in (6, 1):
        assert listed(compiled(torch.tensor(number))) == python_loop(number, most)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("most", [None, 1, 7, 200])
def test_one_graph_is_the_python_loop_for_any_number_of_steps(
    device: str, most: int | None
) -> None:
    graph = graphify(lambda number: count_steps(number, most))
    for number in (6, 27, 1, 97, 2, 0):
        start = torch.tensor(number, device=device)
        assert listed(count_steps(start, most)) == python_loop(number, most)
        assert listed(graph(start)) == python_loop(number, most)
    assert graph.cache_info().captures == 1


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=40)
@given(loop=loops())
def test_any_loop_is_the_python_loop_and_scan_with_a_done_flag(device: str, loop: Loop) -> None:
    loops_are_python_loops(loop, device)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=25)
@given(loop=loop_bodies())
def test_any_body_runs_as_in_the_python_loop_or_is_refused(device: str, loop: LoopBody) -> None:
    loop_bodies_are_pythons(loop, device)


@pytest.mark.parametrize("device", DEVICES)
def test_loops_nest(device: str) -> None:
    def to_a_multiple(number: Tensor) -> Tensor:
        return while_loop(lambda x: x % 7 != 0, lambda x: x + 1, number)

    def thrice(number: Tensor) -> Any:
        start = torch.zeros_like(number), number
        return while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, to_a_multiple(c[1] + 1)), start)

    graph = graphify(thrice)
    for number in (3, 30, 49):
        expected = number
        for _ in range(3):
            expected = -(-(expected + 1) // 7) * 7
        assert listed(graph(torch.tensor(number, device=device))) == [3, expected]
        assert listed(thrice(torch.tensor(number, device=device))) == [3, expected]


@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_the_carry_change_places(device: str) -> None:
    @graphify
    def swapped(a: Tensor, b: Tensor, n: Tensor) -> Any:
        return while_loop(
            lambda c: c[2] < n, lambda c: (c[1], c[0], c[2] + 1), (a, b, torch.zeros_like(n))
        )

    a, b = torch.tensor([1.0, 2.0], device=device), torch.tensor([3.0, 4.0], device=device)
    for n in (0, 1, 2, 5):
        left, right, _ = swapped(a, b, torch.tensor(n, device=device))
        assert (left.tolist(), right.tolist()) == (
            ([3.0, 4.0], [1.0, 2.0]) if n % 2 else ([1.0, 2.0], [3.0, 4.0])
        )
    assert (a.tolist(), b.tolist()) == ([1.0, 2.0], [3.0, 4.0])


@weft.donates("state")
def count_in_place(state: Any) -> Any:
    histogram, at = state
    histogram.index_add_(0, at, torch.ones_like(histogram[:1]))
    at.add_(1)
    return histogram, at


@pytest.mark.parametrize("device", DEVICES)
def test_a_donated_carry_is_updated_in_place(device: str) -> None:
    loop = graphify(
        lambda s: while_loop(lambda s: s[1].sum() < 4, count_in_place, s), donate_argnames="s"
    )
    state: Any = torch.zeros(5, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    address = state[0].data_ptr()
    for times in (1, 2, 3):
        state[1].zero_()
        state = loop(state)
        assert state[0].tolist() == [times] * 4 + [0]
    assert state[0].data_ptr() == address
    assert loop.cache_info().captures == 1


@pytest.mark.gpu
def test_memory_of_a_body_is_its_own() -> None:
    """Work between two replays takes and frees memory; the body's addresses are not among it."""
    w = torch.randn(256, 256, device="cuda") / 16

    def loop(x: Tensor, n: Tensor) -> Tensor:
        x = torch.relu(x) + 1
        carry = while_loop(
            lambda c: c[1] < n,
            lambda c: ((c[0] @ w).sort(-1).values.tanh() + c[0], c[1] + 1),
            (x, torch.zeros_like(n)),
        )
        return carry[0].softmax(-1)

    graph = graphify(loop)
    x = torch.randn(32, 256, device="cuda")
    for n in (3, 0, 17, 1):
        number = torch.tensor(n, device="cuda")
        output = graph(x, number)
        junk = [torch.full((2**18,), float("nan"), device="cuda") for _ in range(4)]
        torch.testing.assert_close(graph(x, number), output, rtol=0, atol=0)
        torch.testing.assert_close(output, loop(x, number))
        del junk


@pytest.mark.gpu
def test_a_gpu_has_while_nodes() -> None:
    assert why_unavailable(torch.device("cuda", torch.cuda.current_device())) is None


@pytest.mark.gpu
def test_without_nodes_a_gpu_has_max_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "weft.transforms.graphs.backends.while_nodes.why_unavailable",
        lambda device: "an old driver",
    )
    graph = graphify(lambda number: count_steps(number, 9))
    number = torch.tensor(27, device="cuda")
    with caplog.at_level(logging.WARNING, "weft"):
        assert listed(graph(number)) == python_loop(27, 9)
    assert "max_steps steps, since they cannot repeat: an old driver" in caplog.text
    with pytest.raises(CaptureError, match="a graph that cannot repeat: an old driver"):
        graphify(count_steps)(number)


def test_without_a_gpu_the_nodes_say_why() -> None:
    if not torch.cuda.is_available():
        assert why_unavailable(torch.device("cuda", 0)) is not None


def test_a_node_that_gave_up_says_so(caplog: pytest.LogCaptureFixture) -> None:
    nodes = WhileNodes(torch.device("cuda", 0))
    with caplog.at_level(logging.WARNING, "weft"):
        nodes.give_up("no room")
    assert nodes.unable == "no room"
    assert "graphs on cuda:0 have max_steps steps" in caplog.text


def test_a_graph_that_cannot_repeat_has_max_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps after the last one keep the carry; without a bound it is refused."""
    for looper in (
        "weft.transforms.graphs.backends.tape._Recorder",
        "weft.transforms.graphs.backends.loops.Rehearsal",
    ):
        monkeypatch.setattr(f"{looper}.unable", "a reason")
    graph = graphify(lambda number: count_steps(number, 7))
    for number in (27, 3, 1):
        assert listed(graph(torch.tensor(number))) == python_loop(number, 7)
    with pytest.raises(CaptureError) as error:
        graphify(count_steps)(torch.tensor(3))
    assert str(error.value).endswith(
        "saw: a graph that cannot repeat: a reason\n"
        "  instead: while_loop(..., max_steps=...), which the graph then has in full"
    )


def test_transforms_of_torch_func() -> None:
    numbers = torch.tensor([6, 27, 1])
    rows = torch.func.vmap(lambda number: count_steps(number, 20))(numbers)
    assert [[int(x[i]) for x in rows] for i in range(3)] == [
        python_loop(int(n), 20) for n in numbers
    ]
    in_graph = graphify(lambda x: torch.func.vmap(lambda number: count_steps(number, 20))(x))(
        numbers
    )
    assert [x.tolist() for x in in_graph] == [x.tolist() for x in rows]

    def power(x: Tensor) -> Tensor:
        result: Tensor = while_loop(lambda y: y < 100, lambda y: y * x, x)
        return result

    assert torch.func.grad(power)(torch.tensor(3.0)).item() == 5 * 3.0**4
    assert torch.func.grad(graphify(power))(torch.tensor(3.0)).item() == 5 * 3.0**4
    x = torch.tensor(3.0, requires_grad=True)
    graphify(power)(x).backward()
    assert x.grad is not None
    assert x.grad.item() == 5 * 3.0**4


def test_a_listing_has_one_step() -> None:
    listing = (
        graphify(lambda x: while_loop(lambda c: c.sum() < 9, lambda c: c * 2, x))
        .lower(torch.ones(2))
        .as_text()
    )
    assert listing.count("aten::mul") == 1
    assert isinstance(Rehearsal.unable, type(None))


def counted(
    body: Callable[[Any], Any], x: Tensor, bound: Any, max_steps: int | None = None
) -> Tensor:
    """The last `x` of a loop on (x, counter)."""
    start = x, torch.zeros((), dtype=torch.int64)
    last: Tensor = while_loop(
        lambda c: c[1] < bound, lambda c: (body(c), c[1] + 1), start, max_steps=max_steps
    )[0]
    return last


@pytest.mark.parametrize(
    "index", [("i",), (..., "i"), (None, "i", slice(None)), (0, "i"), ("i", "i"), (-1, ..., "i")]
)
def test_an_index_by_the_counter_is_a_gather(index: Any) -> None:
    table = torch.arange(9.0).view(3, 3)

    def read(c: Any) -> Tensor:
        return c[0] + table[tuple(c[1] if part == "i" else part for part in index)].sum()

    def written(c: Any) -> Tensor:
        x = c[0].clone()
        x[tuple(c[1] if part == "i" else part for part in index)] += 1
        return x

    for body, x in ((read, torch.zeros(())), (written, table)):
        graph = graphify(lambda x, bound, body=body: counted(body, x, bound))
        for bound in (0, 3, 1, 2):
            assert graph(x, torch.tensor(bound)).tolist() == counted(body, x, bound).tolist()
        assert graph.cache_info().captures == 1


def test_an_index_beyond_the_end_raises() -> None:
    graph = graphify(lambda x, bound: counted(lambda c: c[0] + x[c[1]], torch.zeros(()), bound))
    assert graph(X, torch.tensor(2)).item() == 2.0
    with pytest.raises(IndexError):
        graph(X, torch.tensor(3))


LAYOUTS: dict[str, Tensor] = {
    "dense": torch.arange(4.0).view(2, 2),
    "transposed": torch.arange(4.0).view(2, 2).t(),
    "with gaps": torch.arange(8.0).view(2, 4)[:, ::2],
    "expanded": torch.arange(2.0).expand(2, 2),
    "conjugate": (torch.arange(4.0).view(2, 2) * 1j).conj(),
    "negative": (torch.arange(4.0).view(2, 2) * 1j).conj().imag,
    "channels last": (
        torch.arange(16.0).view(1, 4, 2, 2).contiguous(memory_format=torch.channels_last)
    ),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "conj": torch.conj,
    "a negative view": lambda x: x.conj().imag + 0 * x if x.is_complex() else torch._neg_view(x),
    "mT": lambda x: x.mT,
    "contiguous": lambda x: x.contiguous(),
    "a flip": lambda x: x.flip(0).mT,
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_carry_keeps_its_layout(layout: str, view: str) -> None:
    """Its values are those of the Python loop, and its strides are the same in every way to run it."""

    def run(x: Tensor, bound: Tensor) -> Tensor:
        return counted(lambda c: VIEWS[view](c[0]).to(c[0].dtype), x, bound, 4)

    graph = graphify(run)
    x = LAYOUTS[layout]
    in_python = x
    for bound in range(4):
        results = {"eager": run(x, torch.tensor(bound)), "graph": graph(x, torch.tensor(bound))}
        for result in results.values():
            assert torch.equal(result, in_python)
        if view != "a negative view":  # of which torch's `vmap` has no rule
            rows = torch.func.vmap(run, in_dims=(None, 0))(x, torch.tensor([bound, 3]))
            assert torch.equal(rows[0], in_python)
        kinds = {
            (result.stride(), result.is_conj(), result.is_neg()) for result in results.values()
        }
        assert len(kinds) == 1
        assert kinds.pop()[1:] == (False, False)
        in_python = VIEWS[view](in_python).to(x.dtype)


def test_a_result_is_new_memory() -> None:
    """It is neither what the loop starts from, nor what the body closes over, nor another part of
    the result."""
    w = torch.ones(2)

    def run(x: Tensor, bound: Tensor) -> Any:
        start = x * 1
        loop = (start, start, x, torch.zeros((), dtype=torch.int64))
        a, b, c, _ = while_loop(lambda c: c[3] < bound, lambda c: (c[1], c[0], w, c[3] + 1), loop)
        start.add_(100)
        a.add_(7)
        return a, b, c

    graph = graphify(run)
    for bound in (0, 1, 2):
        for call in (run, graph):
            assert [y.tolist() for y in call(X, torch.tensor(bound))] == [
                [8.0] * 2,
                [1.0] * 2,
                [1.0] * 2,
            ]
    assert w.tolist() == [1.0, 1.0]


def test_a_constant_in_the_carry_stays() -> None:
    def run(x: Tensor) -> Any:
        return while_loop(
            lambda c: c[0].sum() < 9, lambda c: (c[0] * c[1] + 1, *c[1:]), (x, 3, "a", None)
        )

    for call in (run, graphify(run)):
        last, *constants = call(X)
        assert last.tolist() == [13.0, 13.0]
        assert constants == [3, "a", None]


def test_a_body_that_takes_its_carry_swaps_the_halves_of_a_storage() -> None:
    @weft.donates("carry")
    def swap(carry: Any) -> Any:
        left, right, count = carry
        return right, left, count.add_(1)

    def run(state: Tensor, count: Tensor, bound: Tensor) -> Any:
        left, right, _ = while_loop(lambda c: c[2] < bound, swap, (state[:2], state[2:], count))
        return torch.cat([left, right])

    graph = graphify(run, donate_argnames=("state", "count"))
    for bound in range(4):
        for call in (run, graph):
            halves = call(torch.arange(4.0), torch.tensor(0), torch.tensor(bound))
            assert halves.tolist() == ([2.0, 3.0, 0.0, 1.0] if bound % 2 else [0.0, 1.0, 2.0, 3.0])


def test_a_body_that_lends_its_result() -> None:
    body = graphify(lambda c: (c[0] * 2, c[1] + 1), outputs="borrow")
    start = X, torch.zeros((), dtype=torch.int64)
    with weft.check_borrowed():
        first = while_loop(lambda c: c[1] < 3, body, start)[0]
        second = while_loop(lambda c: c[1] < 3, body, (X * 3, start[1]))[0]
        assert (first.tolist(), second.tolist()) == ([8.0, 8.0], [24.0, 24.0])
    masked = torch.func.vmap(
        lambda bound: while_loop(lambda c: c[1] < bound, body, start, max_steps=5)[0]
    )
    assert masked(torch.tensor([3, 0])).tolist() == [[8.0, 8.0], [1.0, 1.0]]


@library.custom_op("loop_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


def test_an_operator_that_draws_nothing_may_be_in_a_loop() -> None:
    heads = torch.ones(1, 1, 2, 4)
    bodies: list[tuple[Callable[[Any], Tensor], Tensor]] = [
        (lambda c: twice(c[0]), X),
        (
            lambda c: c[0] + torch.nn.functional.scaled_dot_product_attention(c[0], c[0], c[0]),
            heads,
        ),
        (lambda c: torch.nn.functional.dropout(c[0], 0.5, training=False), X),
    ]
    for body, x in bodies:
        graph = graphify(lambda x, bound, body=body: counted(body, x, bound))
        for bound in (0, 3):
            torch.testing.assert_close(graph(x, torch.tensor(bound)), counted(body, x, bound))


def root(c: Tensor, w: Tensor) -> Tensor:
    return torch.sqrt(c - 1) * w


def roots(x: Tensor, w: Tensor, max_steps: int | None = 8) -> Tensor:
    """A loop whose body has no derivative where `cond_fun` does not hold."""
    result: Tensor = while_loop(lambda c: c > 1.5, lambda c: root(c, w), x, max_steps=max_steps)
    return result


@pytest.mark.parametrize("starts", [[8.0, 20.0], [8.0, 0.5], [0.3, 0.5]], ids=str)
@pytest.mark.parametrize("argnum", [0, 1])
def test_steps_past_the_end_have_no_derivative(starts: list[float], argnum: int) -> None:
    w = torch.tensor(1.2)
    xs = torch.tensor(starts)
    derive = torch.func.grad(roots, argnums=argnum)
    expected = [derive(x, w).item() for x in xs]  # the Python loop
    assert all(map(torch.isfinite, torch.tensor(expected)))
    rows = torch.func.vmap(derive, in_dims=(0, None))
    seconds = torch.func.vmap(torch.func.grad(derive, argnums=argnum), in_dims=(0, None))
    for result in (
        rows(xs, w),
        graphify(rows)(xs, w),
        torch.stack([graphify(derive)(x, w) for x in xs]),
    ):
        assert result.tolist() == pytest.approx(expected)
    assert torch.isfinite(seconds(xs, w)).all()


def test_a_row_without_a_step_has_no_derivative_of_another_row() -> None:
    def loop(scale: Tensor, steps: Tensor) -> Tensor:
        start = torch.full((), 0.5) * scale, torch.zeros((), dtype=torch.int64)

        def body(carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return torch.acosh(carry[0] * scale), carry[1] + 1

        last: Tensor = while_loop(lambda carry: carry[1] < steps, body, start, max_steps=4)[0]
        return last

    derivative = torch.func.grad(loop)
    by_row = torch.func.vmap(derivative, in_dims=(None, 0))(torch.ones(()), torch.tensor([2, 0]))
    assert by_row.isnan().tolist() == [True, False]
    assert by_row[1].item() == 0.5


def test_rows_past_the_end_run_the_body_where_it_can_run() -> None:
    table = torch.arange(5.0)

    def run(first: Tensor, bound: Tensor) -> Tensor:
        start = torch.zeros(()), first
        body = lambda c: (c[0] + table.index_select(0, c[1][None])[0], c[1] + 1)  # noqa: E731
        total: Tensor = while_loop(lambda c: c[1] < bound, body, start, max_steps=9)[0]
        return total

    rows = torch.func.vmap(run)
    nested = torch.func.vmap(rows)
    firsts = torch.tensor([0, 9, 3, 5])
    bounds = torch.tensor([5, 2, 5, 5])
    expected = [10.0, 0.0, 7.0, 0.0]
    assert rows(firsts, bounds).tolist() == graphify(rows)(firsts, bounds).tolist() == expected
    assert nested(firsts.view(2, 2), bounds.view(2, 2)).flatten().tolist() == expected


def test_planted_bugs_of_steps_past_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above would notice each of these."""
    with monkeypatch.context() as planted:
        planted.setattr("weft.transforms.graphs.while_loop.safe_next", lambda live, x, last: x)
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            test_rows_past_the_end_run_the_body_where_it_can_run()
    with monkeypatch.context() as planted:
        planted.setattr("weft.transforms.graphs.while_loop.safe_start", lambda live, x: x)
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            test_rows_past_the_end_run_the_body_where_it_can_run()
    with monkeypatch.context() as planted:
        planted.setattr(
            "weft.transforms.graphs.masked_steps.DerivativesWhere._limit", lambda self, x: x
        )
        with pytest.raises(AssertionError):
            test_steps_past_the_end_have_no_derivative([0.3, 0.5], 1)


@pytest.mark.slow
def test_every_instruction_is_drawn() -> None:
    kinds = set[type]()

    @seed(0)
    @settings(max_examples=150, deadline=None, database=None, phases=[Phase.generate])
    @given(loop_bodies())
    def draw(loop: LoopBody) -> None:
        kinds.update(type(instruction) for _, instruction in loop.instructions)

    draw()
    assert kinds == set(get_args(Instruction))


def of_one_slot(instruction: Instruction, bounds: tuple[int, ...], way: str) -> LoopBody:
    return LoopBody(
        size=2,
        dtype=torch.float64,
        num_slots=1,
        instructions=((0, instruction),),
        bounds=bounds,
        max_steps=6,
        way=way,
    )


def applied(name: str, bounds: tuple[int, ...], way: str) -> LoopBody:
    by_name = {operator.name: operator for operator in operators(torch.float64)}
    return of_one_slot(Apply(by_name[name]), bounds, way)


def unwatched(self: Any, function: Any, name: str, carry: Any, *, is_masked: bool = False) -> Any:
    """A body that may write its carry."""
    return function(carry)


def going_on(live: Tensor, x: Tensor, last: Tensor) -> Tensor:
    """The next carry of a row whose loop has ended is what the body made of it."""
    return x


_HOME = "weft.transforms.graphs.while_loop"
PLANTED: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], LoopBody]]] = {
    "a body writes its carry": (
        partial(mock.patch, f"{_HOME}._Loop._call", unwatched),
        partial(applied, "aten::exp2_", (3, 2), "on ranks"),
    ),
    "a row that has ended has an index past the end": (
        partial(mock.patch, f"{_HOME}.safe_next", going_on),
        partial(of_one_slot, Take(), (3, 1), "in rows"),
    ),
    "a row that has ended has a derivative that is nan": (
        partial(mock.patch, f"{_HOME}.safe_next", going_on),
        partial(applied, "aten::acos", (1, 0), "in derivatives"),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_show_in_drawn_bodies(name: str) -> None:
    plant, make = PLANTED[name]
    loop = make()
    loop_bodies_are_pythons(loop)
    with plant(), pytest.raises(LawViolation):
        loop_bodies_are_pythons(loop)


def test_rows_end_with_the_last_of_them() -> None:
    steps = []

    def body(c: Any) -> Tensor:
        steps.append(1)
        return c[0] + 1

    torch.func.vmap(lambda bound: counted(body, torch.zeros(()), bound, 50))(torch.tensor([2, 4]))
    assert len(steps) == 4


def test_autograd_inside_a_graph() -> None:
    def derivative(x: Tensor, max_steps: int | None) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = while_loop(lambda c: c < 100, lambda c: c * c, x, max_steps=max_steps)
        return torch.autograd.grad(y, x)[0]

    three = torch.tensor(3.0)
    assert graphify(lambda x: derivative(x, 9))(three).item() == derivative(three, None).item()
    with pytest.raises(
        CaptureError, match="a derivative of its result in a graph, which repeats the loop"
    ):
        graphify(lambda x: derivative(x, None))(three)


@pytest.mark.parametrize("first", ["the graph", "the listing", "the estimate", "the function"])
def test_a_loop_on_ranks(first: str) -> None:
    mesh = weft.Mesh(d=2)
    rows = weft.Shard(0)
    x = torch.arange(1.0, 9.0)
    ranks = weft.shard(
        lambda x: while_loop(lambda c: c.sum() < 50, lambda c: 2 * c, x, max_steps=10),
        mesh,
        rows,
        rows,
    )
    graph = graphify(ranks)
    if first == "the listing":
        graph.lower(x).as_text()
    elif first == "the estimate":
        graph.memory_estimate(x)
    calls = [graph, ranks] if first != "the function" else [ranks, graph]
    for call in calls:
        assert call(x).tolist() == [8.0, 16.0, 24.0, 32.0, 10.0, 12.0, 14.0, 16.0]


def test_derivatives_of_loops_in_loops_by_what_they_close_over() -> None:
    weight = torch.tensor([1.5, 2.0], requires_grad=True)

    def repeated(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        start = torch.zeros((), dtype=torch.int64)
        return lambda x: while_loop(
            lambda c: c[1] < 3, lambda c: (f(c[0]), c[1] + 1), (x, start), max_steps=5
        )[0]

    loops = repeated(repeated(lambda x: x * weight))

    def derivative(x: Tensor) -> Tensor:
        slope: Tensor = torch.func.vjp(loops, x)[1](torch.ones_like(x))[0]
        return slope

    x = torch.ones(2)
    graph = graphify(derivative)
    graph.lower(x).as_text()
    torch.testing.assert_close(graph(x), weight.detach() ** 9)
    torch.testing.assert_close(derivative(x), weight.detach() ** 9)


def test_checkpoint_of_a_loop() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    kept = torch.utils.checkpoint.checkpoint(
        lambda x: while_loop(lambda c: c < 100, lambda c: c * x, x), x, use_reentrant=False
    )
    kept.backward()
    assert x.grad is not None
    assert x.grad.item() == 5 * 3.0**4


X = torch.ones(2)
Y = torch.zeros(2)


def reading_and_writing(log: Tensor) -> Callable[[Any], Tensor]:
    def body(c: Any) -> Tensor:
        total: Tensor = c[0] + log.tolist()[0]
        log.add_(1)
        return total

    return body


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a Python condition": (
        lambda: graphify(lambda x: while_loop(lambda c: True, lambda c: c, x))(X),
        ProgramError,
        (
            "while_loop(<lambda>, <lambda>, init_val)\n  saw: cond_fun returned a bool\n"
            "  instead: a tensor of shape [] and dtype bool: (carry[0] < 3).any(), ~done.all()"
        ),
    ),
    "a condition of two rows": (
        lambda: while_loop(lambda c: c > 0, lambda c: c, X),
        ProgramError,
        "saw: cond_fun returned bool of shape (2,)",
    ),
    "a condition that counts": (
        lambda: while_loop(lambda c: c.sum(), lambda c: c, X),
        ProgramError,
        "saw: cond_fun returned float32 of shape ()",
    ),
    "another shape": (
        lambda: while_loop(lambda c: c.sum() > 0, lambda c: c[:1], X),
        ProgramError,
        (
            "saw: body_fun returned leaf (the whole) of shape (1,), float32 on 'cpu', which was"
            " shape (2,), float32 on 'cpu'\n  instead: the carry's structure, shapes and dtypes"
        ),
    ),
    "another dtype": (
        lambda: graphify(lambda x: while_loop(lambda c: c.sum() > 0, lambda c: c.double(), x))(X),
        ProgramError,
        "saw: body_fun returned leaf (the whole) of shape (2,), float64 on 'cpu', which was",
    ),
    "another structure": (
        lambda: while_loop(lambda c: c[0].sum() > 0, lambda c: [*c], (X, X)),
        ProgramError,
        "saw: body_fun returned another structure",
    ),
    "a Python number that changes": (
        lambda: while_loop(lambda c: c[0].sum() > 0, lambda c: (c[0], c[1] + 1), (X, 0)),
        ProgramError,
        "saw: body_fun returned leaf [1] as 1, which was 0: what changes must be a tensor",
    ),
    "a Python value of another type": (
        lambda: while_loop(lambda c: c[0].sum() > 0, lambda c: (c[0] - 1, True), (X, 1)),
        ProgramError,
        "saw: body_fun returned leaf [1] as True, which was 1: what changes must be a tensor",
    ),
    "another type, in a graph": (
        lambda: graphify(
            lambda x: while_loop(lambda c: c[0].sum() > 0, lambda c: (c[0] - 1, 0), (x, 0.0))
        )(X),
        ProgramError,
        "saw: body_fun returned leaf [1] as 0, which was 0.0: what changes must be a tensor",
    ),
    "another zero": (
        lambda: while_loop(
            lambda c: c[0].sum() > 0, lambda c: (c[0] - 1, -c[1]), (X, 0.0), max_steps=2
        ),
        ProgramError,
        "saw: body_fun returned leaf [1] as -0.0, which was 0.0",
    ),
    "no bound": (
        lambda: while_loop(is_above_1, collatz, X, max_steps=0),
        ProgramError,
        "saw: max_steps=0",
    ),
    "no function": (lambda: while_loop(X, collatz, X), ProgramError, "saw: cond_fun of shape [2]"),  # type: ignore[arg-type]
    "a draw": (
        lambda: graphify(
            lambda x: while_loop(lambda c: c.sum() < 9, lambda c: c + torch.rand(2), x)
        )(X),
        CaptureError,
        "draws random numbers in while_loop, the same ones in each step of a replay",
    ),
    "a host read": (
        lambda: graphify(
            lambda x: while_loop(lambda c: c.sum() < 9, lambda c: c + c.sum().item(), x)
        )(X),
        CaptureError,
        "saw: Tensor.item reads a tensor on the host",
    ),
    "a split operator": (
        lambda: piecewise(
            lambda x: while_loop(lambda c: c.sum() < 9, lambda c: torch.sort(c).values + 1, x),
            split_at="aten::sort",
        )(X),
        CaptureError,
        "aten.sort.default, at which the graph is split, inside while_loop",
    ),
    "a read of the counter": (
        lambda: graphify(lambda x: counted(lambda c: c[0] + c[1].item(), x, 3))(X),
        CaptureError,
        "saw: Tensor.item reads a tensor on the host",
    ),
    "a read of what the next step finds changed": (
        lambda: graphify(lambda x: counted(reading_and_writing(torch.zeros(2)), x, 3))(X),
        CaptureError,
        "saw: a step of while_loop reads a tensor on the host, and changes it for the next step",
    ),
    "a write to the carry": (
        lambda: while_loop(
            lambda c: c[0].sum() < 9, lambda c: (c[0].add_(1), c[1]), (X.clone(), X)
        ),
        ProgramError,
        (
            "saw: body_fun writes leaf [0] of its carry in place\n  instead: new tensors (x + 1,"
            " not x.add_(1)); or a body marked by @weft.donates, which takes the storage"
        ),
    ),
    "a write to the carry in a graph": (
        lambda: graphify(lambda x: while_loop(lambda c: c.sum() < 9, lambda c: c.add_(1), x))(X),
        ProgramError,
        "saw: body_fun writes leaf (the whole) of its carry in place",
    ),
    "a write in a row": (
        lambda: torch.func.vmap(lambda n: counted(lambda c: c[0] + Y.add_(1), X, n, 4))(
            torch.tensor([1, 2])
        ),
        ProgramError,
        (
            "saw: body_fun writes a tensor that is no part of its carry, and may run after the last"
            " step\n  instead: the tensor in the carry, and its next value in what body_fun returns"
        ),
    ),
    "halves that meet": (
        lambda: graphify(
            lambda s: while_loop(lambda c: c[1].sum() < 4, count_in_place, (s[:3], s[2:])),
            donate_argnames="s",
        )(torch.zeros(4)),
        ProgramError,
        (
            "saw: leaves [0] and [1] of a carry in place, which share memory\n"
            "  instead: weft.clone(...) of one of them, in init_val"
        ),
    ),
    "rows that end at different times": (
        lambda: torch.func.vmap(count_steps)(torch.tensor([3, 1])),
        ProgramError,
        (
            "instead: while_loop(..., max_steps=...), which then runs so many steps; or the loop"
            " outside the transform"
        ),
    ),
    "rows in place": (
        lambda: torch.func.vmap(
            lambda x: while_loop(
                lambda s: s[1].sum() < 4, count_in_place, (X.clone(), x), max_steps=2
            )
        )(torch.tensor([[0], [3]])),
        ProgramError,
        "saw: a body that updates its carry in place, which steps after the last one cannot undo",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_loop_is_refused(case: str) -> None:
    call, kind, said = REFUSED[case]
    with pytest.raises(kind) as error:
        call()
    assert said in str(error.value)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_under_vmap_of_any_size(rows: int) -> None:
    def loop(x: Tensor) -> Tensor:
        last: Tensor = while_loop(lambda c: c.sum() < 3, lambda c: c + 1, x, max_steps=4)
        return last

    result = torch.vmap(loop)(torch.zeros(rows, 3))
    assert result.tolist() == [[1.0] * 3] * rows
    assert graphify(torch.vmap(loop))(torch.zeros(rows, 3)).tolist() == result.tolist()


def test_linearize_of_it_is_its_derivative() -> None:
    """Its trace has tensors whose values the host cannot read."""
    x = torch.tensor([1.0, 2.0])

    def loop(x: Tensor) -> Tensor:
        last: Tensor = while_loop(lambda c: c.sum() < 9, lambda c: c * c + 1, x, max_steps=5)
        return last

    value, slope = torch.func.linearize(loop, x)
    assert torch.equal(value, loop(x))
    assert torch.allclose(slope(torch.ones(2)), torch.func.jvp(loop, (x,), (torch.ones(2),))[1])


def test_a_donated_carry_is_refused() -> None:
    taken = torch.ones(2)
    graphify(lambda state: state * 5, donate_argnames=["state"])(taken)
    for use in (weft.clone, lambda x: while_loop(lambda c: c.sum() < 50, lambda c: c * 2, x)):
        with pytest.raises(DonatedError, match="was donated to"):
            use(taken)
