"""Copies between graphs and their callers: the table, copies as bytes, and the fallback."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from copy_cases import Pair, copied, make, moved, pairs
from hypothesis import given, settings, strategies as st
from torch import Tensor

from weft.ops.backends import backends
from weft.ops.copying import copies as module
from weft.ops.copying.byte_copies import Copies, is_dense, same_bytes
from weft.ops.copying.copies_triton import table_rows

# The table, and copies as bytes


@settings(deadline=None)
@given(st.lists(pairs, min_size=1, max_size=8), st.booleans(), st.integers(0, 9))
def test_the_table_says_what_copies_do(
    drawn_pairs: list[Pair], into_fixed: bool, seed: int
) -> None:
    for result, expected in zip(
        moved(make(drawn_pairs, into_fixed, seed)),
        copied(make(drawn_pairs, into_fixed, seed)),
        strict=True,
    ):
        assert torch.equal(result, expected)


def test_large_copies_are_shared_evenly_and_many_small_ones_are_a_program_each() -> None:
    sizes = [2**28, 2**20, 1, 0]
    tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    rows = table_rows(Copies(tuple(tensors), True))
    assert len(rows) < 5000
    assert [sum(row[3] for row in rows if row[0] == i) for i in range(4)] == sizes
    assert max(row[3] for row in rows) % 2**14 == 0
    assert all((row[1] - tensors[row[0]].data_ptr()) % 2**14 == 0 for row in rows)


LAYOUTS = {
    "contiguous": (torch.zeros(2, 3), True),
    "transposed": (torch.zeros(2, 3).t(), True),
    "a row": (torch.zeros(4, 3)[1], True),
    "a column": (torch.zeros(4, 3)[:, 1], False),
    "a column of one": (torch.zeros(1, 3)[:, 1], True),
    "expanded": (torch.zeros(3, 1).expand(3, 2), False),
    "overlapping": (torch.zeros(9).as_strided((2, 2), (1, 1)), False),
    "0-dim": (torch.zeros(()), True),
    "empty": (torch.zeros(4, 6)[:, :0:2], True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_dense(name: str) -> None:
    x, dense = LAYOUTS[name]
    assert is_dense(x) is dense


@given(
    st.permutations(range(3)),
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
    st.integers(1, 2),
)
def test_dense_tensors_touch_each_of_their_bytes_once(
    order: list[int], shape: list[int], step: int
) -> None:
    x = torch.arange(27 * step).as_strided(shape, (9 * step, 3 * step, step)).permute(order)
    places = {i.item() for i in x.flatten()}
    assert is_dense(x) == (not places or max(places) - min(places) + 1 == x.numel() == len(places))


def test_same_bytes_asks_for_all_that_bytes_do_not_say() -> None:
    x = torch.zeros(2, 3)
    c = torch.zeros(2, 3, dtype=torch.complex64)
    assert same_bytes(x, torch.ones(2, 3))
    assert same_bytes(torch.zeros(1, 3), torch.zeros(2, 3)[:1].as_strided((1, 3), (7, 1)))
    for other in (
        x.double(),
        x.int(),
        x.t(),
        torch.zeros(3, 2).t(),
        x[:1],
        torch.zeros(2, 4)[:, :3],
        x.to("meta"),
    ):
        assert not same_bytes(x, other)
    assert not same_bytes(c, c.conj())
    assert not same_bytes(c.imag, c.conj().imag)
    assert not same_bytes(x, torch._efficientzerotensor((2, 3)))


# How launches are planned, with a launch in plain torch in place of the kernel


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tensors of the launches, of four at most."""
    sizes: list[int] = []

    def plan(copies: Copies) -> Callable[[Sequence[Tensor]], None]:
        def launch(call_tensors: Sequence[Tensor]) -> None:
            sizes.append(len(copies.fixed))
            for fixed, other in zip(copies.fixed, call_tensors, strict=True):
                target, source = (fixed, other) if copies.into_fixed else (other, fixed)
                target.copy_(source)
            for target, source in copies.constants:
                target.copy_(source)

        return launch

    monkeypatch.setattr("weft.ops.copying.copies_triton.ARITIES", (2, 4))
    monkeypatch.setattr("weft.ops.copying.copies_triton.plan_launch", plan)
    return sizes


@pytest.mark.parametrize("into_fixed", [False, True])
@pytest.mark.parametrize(("count", "sizes"), [(1, [1]), (4, [4]), (5, [4, 1]), (9, [4, 4, 1])])
def test_more_tensors_than_a_launch_takes(
    count: int, sizes: list[int], into_fixed: bool, launches: list[int]
) -> None:
    fixed = tuple(torch.full((2,), float(i)) for i in range(count))
    call_tensors = [torch.full((2,), 100.0 + i) for i in range(count)]
    constant = torch.zeros(3), torch.ones(3)
    module.plan_copies_of_bytes(Copies(fixed, into_fixed, (constant,)))(call_tensors)
    expected = [100.0 + i if into_fixed else float(i) for i in range(count)]
    assert [x.tolist() for x in fixed if into_fixed] == [
        [value] * 2 for value in expected if into_fixed
    ]
    assert [x.tolist() for x in call_tensors] == [[value] * 2 for value in expected]
    assert constant[0].tolist() == [1, 1, 1]
    assert launches == sizes


@pytest.mark.parametrize("count", [1, 5])
def test_clones_are_new_storages_each_time(count: int, launches: list[int]) -> None:
    originals = [
        torch.arange(6, dtype=dtype).view(2, 3).t() for dtype in (torch.float32, torch.int64) * 3
    ][:count]
    clone = module.plan_clones(originals)
    first = clone(())
    second = clone(())
    for original, *copies in zip(originals, first, second, strict=True):
        for copy in copies:
            assert torch.equal(copy, original)
            assert (copy.dtype, copy.stride()) == (original.dtype, original.stride())
    assert len({x.untyped_storage().data_ptr() for x in (*originals, *first, *second)}) == 3 * count


# The implementation for each device


def test_the_kernel_is_not_tried_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "no_kernel", lambda _: None)
    assert not module.uses_kernel(torch.device("cpu"))
    assert module.uses_kernel(torch.device("cuda", 0))


def test_the_table_of_ops_says_what_copies() -> None:
    *_, cpu = backends("cpu")
    assert (cpu.op, cpu.implementation) == ("copies", "torch")
    *_, cuda = backends("cuda")
    assert cuda.op == "copies"
    assert cuda.implementation.startswith("triton ")
    assert "one launch for all tensors" in cuda.reason


@contextmanager
def without(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> Iterator[None]:
    """Clears the cached trial of the kernel, before and after a test."""
    module._tried.cache_clear()
    monkeypatch.setattr(name, value)
    yield
    monkeypatch.undo()
    module._tried.cache_clear()


def test_without_triton_the_fallback_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with without(monkeypatch, "weft.ops.copying.copies.triton_version", lambda: None):
        *_, row = backends("cuda")
        assert not module.uses_kernel(torch.device("cuda", 0))
    assert row.implementation == "torch._foreach_copy_"
    assert row.reason == "one launch for each dtype: triton cannot be imported"


def test_a_triton_that_cannot_compile_is_a_warning_and_a_named_fallback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(device: torch.device, arity: int) -> int:
        raise RuntimeError("Failed to find C compiler.\nMore.")

    with without(monkeypatch, "weft.ops.copying.copies_triton.kernel_handle", broken):
        with pytest.warns(UserWarning, match=r"weft copies with torch\._foreach_copy_ on cuda:0"):
            assert not module.uses_kernel(torch.device("cuda", 0))
        reason = module.no_kernel(torch.device("cuda", 0))
    assert reason == "triton cannot run it: RuntimeError: ['Failed to find C compiler.']"


def test_what_is_said_of_the_launch_is_of_the_kernel_that_was_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that no other kernel is compiled for it."""
    arities: list[int] = []

    def handle(device: torch.device, arity: int) -> int:
        arities.append(arity)
        return 1

    with without(monkeypatch, "weft.ops.copying.copies_triton.kernel_handle", handle):
        assert module.uses_kernel(torch.device("cuda", 0))
        assert module.how_launched(torch.device("cuda", 0)) == "launched by the driver"
    assert len(arities) == 2
    assert len(set(arities)) == 1


def test_a_triton_without_a_handle_launches_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.ops.copying.copies_triton.kernel_handle", lambda device, arity: None)
    assert module.how_launched(torch.device("cuda", 0)).startswith(
        "launched by triton, which takes longer"
    )
