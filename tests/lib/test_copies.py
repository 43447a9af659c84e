"""Copies between graphs and their callers: the table, the kernel interpreted and on a GPU, and what falls back."""

import ctypes
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.ops import copies as module
from weft.ops.byte_copies import Copies, is_dense, same_bytes
from weft.ops.copies import plan_clones, plan_copies_of_bytes
from weft.ops.table import backends
from weft.transforms.graphify import graphify

pytest.importorskip("triton")
from weft.ops.copies_triton import ARITIES, table_rows

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = (torch.bool, torch.uint8, torch.bfloat16, torch.int32, torch.float32, torch.int64, torch.complex128)
MARGIN = 24


@attrs.frozen
class Pair:
    """A tensor of one side and its like on the other, each so many elements into its storage."""

    dtype: torch.dtype
    size: int
    fixed_offset: int
    other_offset: int


pairs = st.builds(
    Pair,
    st.sampled_from(DTYPES),
    st.sampled_from([0, 1, 2, 3, 7, 17, 1023, 1024, 1025, 20_000]),
    st.integers(0, 9),
    st.integers(0, 9),
)


@attrs.frozen(eq=False)
class Case:
    """Copies, and what a call gives; all of it views in larger storages that hold random bytes."""

    copies: Copies
    others: list[Tensor]

    def storages(self) -> list[Tensor]:
        """The bytes of every storage that is written, margins and all."""
        copies = self.copies
        written = copies.fixed if copies.into_fixed else self.others
        targets = (*written, *(t for t, _ in copies.constants), *(t for t, *_ in copies.repeats))
        return [_bytes(x).cpu().clone() for x in targets]


def _bytes(x: Tensor) -> Tensor:
    """All bytes of the storage."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def draw(pair: Pair, offset: int, random: torch.Generator, device: str) -> Tensor:
    nbytes = (pair.size + MARGIN) * torch.empty(0, dtype=pair.dtype).element_size()
    drawn = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=random).to(device)
    if pair.dtype is torch.bool:
        drawn &= 1
    return drawn.view(pair.dtype)[offset : offset + pair.size]


def make(given: list[Pair], into_fixed: bool, seed: int, device: str = "cpu") -> Case:
    """Copies of these pairs; into fixed tensors, also a constant and a tail that repeats for some."""
    random = torch.Generator().manual_seed(seed)
    fixed = tuple(draw(pair, pair.fixed_offset, random, device) for pair in given)
    others = [draw(pair, pair.other_offset, random, device) for pair in given]
    constants, repeats = [], []
    if into_fixed:
        for i, pair in enumerate(given):
            if i % 3 == 0:
                drawn = [draw(pair, o, random, device) for o in (pair.fixed_offset, pair.other_offset)]
                constants.append((drawn[0], drawn[1]))
            if i % 3 == 1 and pair.size:
                tail = draw(attrs.evolve(pair, size=5), pair.fixed_offset, random, device)
                repeats.append((tail, i, tail.element_size()))
    return Case(Copies(fixed, into_fixed, tuple(constants), tuple(repeats)), others)


def copied(case: Case) -> list[Tensor]:
    """The storages that torch's own copies leave."""
    for fixed, other in zip(case.copies.fixed, case.others, strict=True):
        (fixed if case.copies.into_fixed else other).copy_(other if case.copies.into_fixed else fixed)
    for target, source in case.copies.constants:
        target.copy_(source)
    for tail, index, _ in case.copies.repeats:
        tail.copy_(case.others[index][-1:])
    return case.storages()


def moved(case: Case) -> list[Tensor]:
    """The storages that the rows of the table leave, each carried out by the C library."""
    for index, fixed, other, size, into, period in table_rows(case.copies):
        other += case.others[index].data_ptr() if index >= 0 else 0
        for start in range(0, size, period or size):
            target, source = (fixed, other) if into else (other, fixed)
            ctypes.memmove(target + start, source, period or size)
    return case.storages()


FIXED: list[tuple[list[Pair], bool]] = [
    ([Pair(torch.float32, 8, 0, 0)], True),
    ([Pair(torch.float32, 8, 0, 0), Pair(torch.int64, 0, 0, 0), Pair(torch.bool, 13, 1, 2)], False),
    ([Pair(torch.int64, 4100, 1, 0), Pair(torch.bfloat16, 40_001, 1, 3)], True),
]


def some_cases(device: str = "cpu") -> Iterator[tuple[list[Pair], bool]]:
    """The fixed ones, and random ones of few tensors and of more than the smaller kernels take."""
    yield from FIXED
    random.seed(0)
    for count in (2, 5, ARITIES[0] + 1, ARITIES[1] + 1):
        for into_fixed in (True, False):
            sizes = [0, 1, 3, 17, 700, 9000] if count < 10 else [0, 1, 5]
            yield (
                [
                    Pair(random.choice(DTYPES), random.choice(sizes), random.randrange(9), random.randrange(9))
                    for _ in range(count)
                ],
                into_fixed,
            )


# The table, and what may be copied as bytes


@settings(deadline=None)
@given(st.lists(pairs, min_size=1, max_size=8), st.booleans(), st.integers(0, 9))
def test_the_table_says_what_copies_do(given: list[Pair], into_fixed: bool, seed: int) -> None:
    for seen, wanted in zip(moved(make(given, into_fixed, seed)), copied(make(given, into_fixed, seed)), strict=True):
        assert torch.equal(seen, wanted)


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


@given(st.permutations(range(3)), st.lists(st.integers(0, 3), min_size=3, max_size=3), st.integers(1, 2))
def test_dense_tensors_touch_each_of_their_bytes_once(order: list[int], shape: list[int], step: int) -> None:
    x = torch.arange(27 * step).as_strided(shape, (9 * step, 3 * step, step)).permute(order)
    places = {i.item() for i in x.flatten()}
    assert is_dense(x) == (not places or max(places) - min(places) + 1 == x.numel() == len(places))


def test_same_bytes_asks_for_all_that_bytes_do_not_say() -> None:
    x = torch.zeros(2, 3)
    c = torch.zeros(2, 3, dtype=torch.complex64)
    assert same_bytes(x, torch.ones(2, 3))
    assert same_bytes(torch.zeros(1, 3), torch.zeros(2, 3)[:1].as_strided((1, 3), (7, 1)))
    for other in (x.double(), x.int(), x.t(), torch.zeros(3, 2).t(), x[:1], torch.zeros(2, 4)[:, :3], x.to("meta")):
        assert not same_bytes(x, other)
    assert not same_bytes(c, c.conj())
    assert not same_bytes(c.imag, c.conj().imag)
    assert not same_bytes(x, torch._efficientzerotensor((2, 3)))


# The kernel, interpreted on the CPU

_INTERPRETED = """
import sys, torch
from weft.ops.copies_triton import plan_launch
cases = torch.load(sys.argv[1], weights_only=False)
for case in cases:
    plan_launch(case.copies)(case.others)
torch.save([case.storages() for case in cases], sys.argv[2])
"""


def interpret(code: str, *arguments: object) -> str:
    """Run code in a process where triton interprets: it reads its flag where the kernels are defined."""
    tests = str(Path(__file__).parent)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout


def test_the_kernel_interpreted_copies_what_torch_copies(tmp_path: Path) -> None:
    drawn = list(some_cases())
    code = f"import {__name__.rpartition('.')[2]}\n{_INTERPRETED}"
    torch.save([make(*case, seed=i) for i, case in enumerate(drawn)], tmp_path / "in.pt")
    interpret(code, tmp_path / "in.pt", tmp_path / "out.pt")
    for i, seen in enumerate(torch.load(tmp_path / "out.pt")):
        wanted = copied(make(*drawn[i], seed=i))
        for a, b in zip(seen, wanted, strict=True):
            assert torch.equal(a, b), drawn[i]


_GRAPHIFIED = """
from weft.ops import copies
import weft.transforms.clones, weft.transforms.transfer
for home in (copies, weft.transforms.clones, weft.transforms.transfer):
    home.uses_kernel = lambda device: True
launches = []
plan = copies._plan
def counted(given):
    launch = plan(given)
    return lambda others: (launches.append(len(others)), launch(others))[1]
copies._plan = counted
import test_copies
test_copies.check_graphified("cpu", launches)
test_copies.check_padded("cpu", launches)
print("done")
"""


def mixed(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> tuple[Tensor, ...]:
    """Of many dtypes and layouts, and two results in one storage."""
    both = a * 2
    return both, both[1:], b + 1, ~c, d.t() * 2, e, torch.empty(0, device=a.device), both[:1].expand(3)


def check_graphified(device: str, launches: list[int]) -> None:
    """Fresh inputs and safe results, one launch each way; results live apart."""
    g = graphify(mixed)
    kept = []
    for turn in range(4):
        x = torch.arange(12.0, device=device) + turn
        args = (x[1:8], x.long(), x.int() % 2 == 0, x.view(3, 4).t(), x.double()[::2])
        launches.clear()
        seen, wanted = g(*args), mixed(*args)
        assert not turn or launches == [4, 6], launches  # of 5 and 8: what is not dense goes by itself
        kept.append((seen, wanted))
    for seen, wanted in kept:
        for a, b in zip(seen, wanted, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert torch.equal(a, b)
        storages = {a.untyped_storage()._cdata for a in seen}
        assert len(storages) == len(seen)
        assert all(a.untyped_storage().nbytes() == a.nbytes for a in seen)
        seen[0].resize_(100).fill_(7)
        assert torch.equal(seen[1], wanted[1])


def check_padded(device: str, launches: list[int]) -> None:
    """A batch under a ladder: values, blanks and repeated entries in one launch."""
    from weft.batch import Batch
    from weft.descriptor import BatchDescriptor
    from weft.outputs import Output
    from weft.padding import pad

    rung = BatchDescriptor.uniform(8)
    g = graphify(lambda b: Output(b.rows * 2, b.rows * 1.0), ladder=[rung])
    for rows in ([0, 1, 2], [5], [3, 2, 1, 0, 4, 5, 6, 7], [9, 8]):
        batch = Batch.decode(rows, device=device)
        g(batch)
        launches.clear()
        g(batch)
        assert launches[0] == 4
        (entry,) = g._graphs.memo.values()
        padded = pad(batch, rung)
        wanted = (padded.rows, padded.input_ids, padded.query_start_loc, padded.samples)
        for seen, one in zip((x for x in entry.buffers if isinstance(x, Tensor)), wanted, strict=True):
            assert torch.equal(seen, one)


def test_graphify_with_the_kernel_interpreted() -> None:
    assert interpret(_GRAPHIFIED) == "done\n"


# What runs where


def test_the_table_of_ops_says_what_copies() -> None:
    *_, cpu = backends("cpu")
    assert (cpu.op, cpu.implementation) == ("copies", "torch")
    *_, cuda = backends("cuda")
    assert cuda.op == "copies"
    assert cuda.implementation.startswith("triton ")
    assert "one launch for all tensors" in cuda.reason


@contextmanager
def without(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> Iterator[None]:
    """The kernel's trial, made anew before and after."""
    module._tried.cache_clear()
    monkeypatch.setattr(name, value)
    yield
    monkeypatch.undo()
    module._tried.cache_clear()


def test_without_triton_the_fallback_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with without(monkeypatch, "weft.ops.copies.triton_version", lambda: None):
        *_, row = backends("cuda")
        assert not module.uses_kernel(torch.device("cuda", 0))
    assert row.implementation == "torch._foreach_copy_"
    assert row.reason == "one launch for each dtype: triton cannot be imported"


def test_a_triton_that_cannot_compile_is_a_warning_and_a_named_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device, arity: int) -> int:
        raise RuntimeError("Failed to find C compiler.\nMore.")

    with without(monkeypatch, "weft.ops.copies_triton.kernel_handle", broken):
        with pytest.warns(UserWarning, match=r"weft copies with torch\._foreach_copy_ on cuda:0"):
            assert not module.uses_kernel(torch.device("cuda", 0))
        reason = module.no_kernel(torch.device("cuda", 0))
    assert reason == "triton cannot run it: RuntimeError: ['Failed to find C compiler.']"


def test_a_triton_without_a_handle_launches_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.ops.copies_triton.kernel_handle", lambda device, arity: None)
    assert module.how_launched(torch.device("cuda", 0)).startswith("launched by triton, which takes longer")


# On a GPU


@pytest.mark.gpu
@needs_gpu
def test_the_kernel_on_a_gpu_copies_what_torch_copies() -> None:
    for i, drawn in enumerate(some_cases()):
        case = make(*drawn, seed=i, device="cuda")
        plan_copies_of_bytes(case.copies)(case.others)
        wanted = copied(make(*drawn, seed=i, device="cuda"))
        for seen, one in zip(case.storages(), wanted, strict=True):
            assert torch.equal(seen, one), drawn


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("count", [1, ARITIES[-1], ARITIES[-1] + 1, 1000])
def test_as_many_tensors_as_there_are(count: int) -> None:
    sources = [torch.full((1 + i % 5,), i, device="cuda") for i in range(count)]
    clones = plan_clones(sources)(sources)
    targets = tuple(torch.zeros_like(x) for x in sources)
    plan_copies_of_bytes(Copies(targets, True))(sources)
    for a, b, c in zip(sources, clones, targets, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.gpu
@needs_gpu
def test_graphify_with_the_kernel_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    plan = module._plan

    def counted(given: Copies) -> Any:
        launch = plan(given)
        return lambda others: (launches.append(len(others)), launch(others))[1]

    monkeypatch.setattr(module, "_plan", counted)
    check_graphified("cuda", launches)
    check_padded("cuda", launches)


@pytest.mark.gpu
@needs_gpu
def test_a_copy_waits_for_its_own_stream_and_for_no_other() -> None:
    target, source = torch.zeros(100, device="cuda"), torch.zeros(100, device="cuda")
    copy, side = plan_copies_of_bytes(Copies((target,), True)), torch.cuda.Stream()
    copy([source])
    source.fill_(3)
    float(target.sum())  # kernels are loaded, which may wait for the device
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(2**28)
        source.fill_(5)
        copy([source])
    assert target.sum().item() == 0
    side.synchronize()
    assert target.sum().item() == 500


@pytest.mark.gpu
@needs_gpu
def test_a_thread_that_has_used_no_cuda_yet_may_call() -> None:
    g = graphify(lambda x: x + 1)
    x, seen = torch.ones(4, device="cuda"), []
    g(x)
    thread = threading.Thread(target=lambda: seen.append(g(x)))
    thread.start()
    thread.join()
    assert seen[0].tolist() == [2.0] * 4


@pytest.mark.gpu
@needs_gpu
def test_the_device_is_made_current_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    class Guard(torch.cuda.device):
        def __init__(self, device: torch.device) -> None:
            entered.append(device)
            super().__init__(device)

    x = torch.ones(4, device="cuda")
    y = torch.zeros_like(x)
    copy, clone = plan_copies_of_bytes(Copies((y,), True)), plan_clones([x])
    monkeypatch.setattr(module, "current_device", lambda: 7)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    copy([x])
    assert (y.tolist(), clone([x])[0].tolist()) == ([1.0] * 4, [1.0] * 4)
    assert entered == [x.device] * 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_than_the_current_one() -> None:
    g = graphify(lambda x: (x + 1, x.long()))
    for turn in range(3):
        x = torch.full((4,), float(turn), device="cuda:1")
        floats, integers = g(x)
        assert (floats.device, floats.tolist(), integers.tolist()) == (x.device, [turn + 1.0] * 4, [turn] * 4)
        assert torch.cuda.current_device() == 0
