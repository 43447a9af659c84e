"""The copying kernel, interpreted and on a GPU, by itself and in graphify."""

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from copy_cases import copied, make, some_cases
from interpreting import interpret, run_interpreted
from torch import Tensor

from weft.ops.copying import copies as module
from weft.ops.copying.byte_copies import Copies
from weft.ops.copying.copies import plan_clones, plan_copies_of_bytes
from weft.ops.copying.copies_triton import ARITIES
from weft.transforms.graphs.graphify import graphify

_INTERPRETED = """
import sys, torch
from weft.ops.copying.copies_triton import plan_launch
cases = torch.load(sys.argv[1], weights_only=False)
for case in cases:
    plan_launch(case.copies)(case.call_tensors)
torch.save([case.storages() for case in cases], sys.argv[2])
"""


@pytest.mark.slow
def test_the_kernel_interpreted_copies_what_torch_copies(tmp_path: Path) -> None:
    drawn = list(some_cases())
    results = interpret(
        _INTERPRETED, [make(*case, seed=i) for i, case in enumerate(drawn)], tmp_path
    )
    for i, result in enumerate(results):
        expected = copied(make(*drawn[i], seed=i))
        for a, b in zip(result, expected, strict=True):
            assert torch.equal(a, b), drawn[i]


_GRAPHIFIED = """
from weft.ops.copying import copies
import weft.transforms.graphs.calls.results, weft.transforms.graphs.calls.buffers
for home in (copies, weft.transforms.graphs.calls.results, weft.transforms.graphs.calls.buffers):
    home.uses_kernel = lambda device: True
launches = []
plan = copies._plan
def counted(copies):
    launch = plan(copies)
    return lambda call_tensors: (launches.append(len(call_tensors)), launch(call_tensors))[1]
copies._plan = counted
import test_copies_triton
test_copies_triton.check_graphified("cpu", launches)
test_copies_triton.check_padded("cpu", launches)
print("done")
"""


def mixed(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> tuple[Tensor, ...]:
    """Clones of many dtypes and layouts, and of two results in one storage."""
    both = a * 2
    return (
        both,
        both[1:],
        b + 1,
        ~c,
        d.t() * 2,
        e,
        torch.empty(0, device=a.device),
        both[:1].expand(3),
    )


def check_graphified(device: str, launches: list[int]) -> None:
    """Fresh inputs and safe results, one launch each way; results live apart."""
    g = graphify(mixed)
    kept = []
    for turn in range(4):
        x = torch.arange(12.0, device=device) + turn
        args = (x[1:8], x.long(), x.int() % 2 == 0, x.view(3, 4).t(), x.double()[::2])
        launches.clear()
        result = g(*args)
        expected = mixed(*args)
        # Of 5 and 8 tensors: the others are not dense
        assert not turn or launches == [4, 6], launches
        kept.append((result, expected))
    for result, expected in kept:
        for a, b in zip(result, expected, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert torch.equal(a, b)
        storages = {a.untyped_storage()._cdata for a in result}
        assert len(storages) == len(result)
        assert all(a.untyped_storage().nbytes() == a.nbytes for a in result)
        result[0].resize_(100).fill_(7)
        assert torch.equal(result[1], expected[1])


def check_padded(device: str, launches: list[int]) -> None:
    """A batch under a ladder: values, padding and repeated entries in one launch."""
    from weft.batches.batch import Batch
    from weft.batches.descriptor import BatchDescriptor
    from weft.batches.outputs import Output
    from weft.batches.padding import pad

    rung = BatchDescriptor.uniform(8)
    g = graphify(lambda b: Output(b.rows * 2, b.rows * 1.0), ladder=[rung])
    for rows in ([0, 1, 2], [5], [3, 2, 1, 0, 4, 5, 6, 7], [9, 8]):
        batch = Batch.decode(rows, device=device)
        g(batch)
        launches.clear()
        g(batch)
        assert launches[0] == 4
        (graph,) = g._cache.graphs()
        padded = pad(batch, rung)
        expected = (padded.rows, padded.input_ids, padded.query_start_loc, padded.samples)
        for buffer, one in zip(
            (x for x in graph.buffers if isinstance(x, Tensor)), expected, strict=True
        ):
            assert torch.equal(buffer, one)


def test_graphify_with_the_kernel_interpreted(tmp_path: Path) -> None:
    assert run_interpreted(_GRAPHIFIED, tmp_path) == "done\n"


@pytest.mark.parametrize(
    ("count", "arities"), [(0, 1), (1, 1), (ARITIES[0] + 1, 2), (10_000, len(ARITIES))]
)
def test_the_kernels_that_copies_of_so_many_need_are_asked_for(
    count: int, arities: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from weft.ops.copying import copies_triton
    from weft.ops.kernel_triton import Kernel, compiling

    warmups: list[Any] = []

    class Jit:
        fn = staticmethod(copies_triton._copy_kernel.jit.fn)

        def warmup(self, *args: Any, **options: Any) -> None:
            warmups.append((len(args[0]), options["BLOCK"]))

    monkeypatch.setattr(copies_triton, "_copy_kernel", Kernel(Jit()))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with compiling():
        copies_triton.ask_for_kernels(torch.device("cpu"), count)
    assert warmups == [(arity, 1024) for arity in ARITIES[:arities]]


# On a GPU


@pytest.mark.gpu
def test_the_kernel_on_a_gpu_copies_what_torch_copies() -> None:
    for i, drawn in enumerate(some_cases()):
        case = make(*drawn, seed=i, device="cuda")
        plan_copies_of_bytes(case.copies)(case.call_tensors)
        expected = copied(make(*drawn, seed=i, device="cuda"))
        for storage, one in zip(case.storages(), expected, strict=True):
            assert torch.equal(storage, one), drawn


@pytest.mark.gpu
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
def test_graphify_with_the_kernel_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    plan = module._plan

    def counted(copies: Copies) -> Any:
        launch = plan(copies)
        return lambda call_tensors: (launches.append(len(call_tensors)), launch(call_tensors))[1]

    monkeypatch.setattr(module, "_plan", counted)
    check_graphified("cuda", launches)
    check_padded("cuda", launches)


@pytest.mark.gpu
def test_a_copy_waits_for_its_own_stream_and_for_no_other() -> None:
    target = torch.zeros(100, device="cuda")
    source = torch.zeros(100, device="cuda")
    copy = plan_copies_of_bytes(Copies((target,), True))
    side = torch.cuda.Stream()
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
def test_a_thread_that_has_used_no_cuda_yet_may_call() -> None:
    g = graphify(lambda x: x + 1)
    x = torch.ones(4, device="cuda")
    results = []
    g(x)
    thread = threading.Thread(target=lambda: results.append(g(x)))
    thread.start()
    thread.join()
    assert results[0].tolist() == [2.0] * 4


@pytest.mark.gpu
def test_the_device_is_made_current_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    class Guard(torch.cuda.device):
        def __init__(self, device: torch.device) -> None:
            entered.append(device)
            super().__init__(device)

    x = torch.ones(4, device="cuda")
    y = torch.zeros_like(x)
    monkeypatch.setattr(module, "current_device", lambda: lambda: 7)
    copy = plan_copies_of_bytes(Copies((y,), True))
    clone = plan_clones([x])
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
        assert (floats.device, floats.tolist(), integers.tolist()) == (
            x.device,
            [turn + 1.0] * 4,
            [turn] * 4,
        )
        assert torch.cuda.current_device() == 0
