"""Kernels compiled ahead of captures: a run that launches none of them requests each kernel that a
capture launches, and leaves no trace."""

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import weft
from weft.batches.batch import Batch
from weft.batches.descriptor import BatchDescriptor
from weft.errors import CaptureError
from weft.meshes.mesh import Mesh
from weft.ops.constants import constant
from weft.ops.transfers.collective import Place, placed
from weft.proofs import assert_equal
from weft.proofs.strategies import Rows
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.torchapi.private import storage_id
from weft.torchapi.watching import OperatorWatch
from weft.transforms.engine.setup import make_runner, make_state
from weft.transforms.graphs.graphified import Graphified, rehearse_call
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.ladder import Limits
from weft.transforms.graphs.lower import _are_own, _kind, _Zeros, compile_ahead, compiling_at_once
from weft.values.donation import clone


class Jit:
    """A stand-in for a Triton kernel that records requests for it."""

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.compiled: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launched.append((grid, args, options))

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.compiled.append((grid, args, options))


def test_a_kernel_is_launched_or_compiled() -> None:
    pytest.importorskip("triton")
    from weft.ops.kernel_triton import Kernel, compiling

    jit = Jit()
    kernel = Kernel(jit)
    kernel[(2,)](1, BLOCK=4)
    with compiling():
        for size in (5, 5, 5.0):
            kernel[(3,)](size, BLOCK=8)
    with pytest.raises(ZeroDivisionError), compiling():
        raise ZeroDivisionError
    kernel[(6,)](7)
    assert jit.launched == [((2,), (1,), {"BLOCK": 4}), ((6,), (7,), {})]
    assert jit.compiled == [((3,), (5,), {"BLOCK": 8}), ((3,), (5.0,), {"BLOCK": 8})], (
        "once for each kind"
    )


def test_where_there_is_no_gpu_no_kernel_waits_for_others_to_be_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    from weft.ops.kernel_triton import Kernel

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    jit = Jit()
    with compiling_at_once():
        Kernel(jit)[(2,)](1)
    assert (len(jit.compiled), len(jit.launched)) == (0, 1)


@pytest.mark.parametrize(("size", "has_graph"), [(2, True), (5, False)])
def test_it_runs_where_graphs_allocate_if_the_call_has_a_graph(
    size: int, has_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    ran: list[bool] = []
    inside: list[bool] = []

    @contextlib.contextmanager
    def allocating(self: Any) -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    def step(rows: Rows) -> Rows:
        ran.append(bool(inside))
        return Rows(rows.descriptor, rows.x + 1)

    graph = graphify(step, ladder=[BatchDescriptor(2, 2)])
    call = graph._example((Rows(BatchDescriptor(size, size), torch.ones(size, 3)),), {})
    monkeypatch.setattr(type(graph._cache.backend_for(call)), "allocating", allocating)
    compile_ahead(graph._graphable, call, graph._cache)
    assert set(ran) == {has_graph}


def test_results_of_our_operators_are_zeros_and_their_arguments_stay() -> None:
    x = torch.ones(2, 4)
    weight = torch.ones(3, 4)
    with _Zeros():
        assert not torch.ops.weft.linear(x, weight, None, 0).any()
        assert (x @ weight.T == 4).all()
    assert bool(x.all())
    assert bool(weight.all())


class Seen(OperatorWatch):
    """The calls of weft's operators that an inner watch passes on."""

    def __init__(self) -> None:
        self.calls = 0

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls += func.namespace == "weft"
        return self.pass_on(func, args, kwargs)


def test_only_calls_of_a_new_kind_ask_for_kernels() -> None:
    linear = torch.ops.weft.linear
    norm = torch.ops.weft.add_rms_norm
    x = torch.ones(2, 8)
    weight = torch.ones(3, 8)
    gain = torch.ones(8)
    with Seen() as counter, _Zeros():
        first = linear(x, weight, None, 0)
        again = linear(x, weight, None, 0)
        assert counter.calls == 1
        first += 1
        assert not again.any(), "each call has its own result"
        assert (again.shape, again.stride(), again.dtype) == (
            first.shape,
            first.stride(),
            first.dtype,
        )
        places = torch.empty(17)
        other_args = (
            (x, weight[:2]),
            (x, weight.T.contiguous().T),
            (x, places[1:].view(2, 8)),
            (x.double(), weight.double()),
        )
        for number, (one, other) in enumerate(other_args, 2):
            linear(one, other, None, 0)
            assert counter.calls == number, "other kernels are possible"
        with constant([weight]):
            linear(x, weight, None, 0)
        assert counter.calls == 6
        for _ in range(2):
            normed, total = norm(x, x, gain, 1e-6)
            assert not normed.any()
            assert not total.any()
        assert counter.calls == 7
    kinds = [_kind(value) for value in (1, True, 1.0, None, [1], [True])]
    assert len(set(kinds)) == len(kinds)


def test_what_other_ranks_take_part_in_is_passed_on_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = importlib.import_module("weft.transforms.graphs.lower")
    monkeypatch.setattr(
        module, "effect_of", lambda func, args: func is torch.ops.weft.linear.default or None
    )
    x = torch.ones(2, 4)
    weight = torch.ones(3, 4)
    with Seen() as counter, _Zeros():
        assert not any(torch.ops.weft.linear(x, weight, None, 0).any() for _ in range(2))
    assert counter.calls == 2


def test_results_that_share_memory_are_not_made_apart() -> None:
    x = torch.zeros(2, 3)
    assert _are_own((x, torch.zeros(2)), {storage_id(torch.zeros(1))})
    for outputs in (
        (x, x.view(-1)),
        (x[:1],),
        (torch.zeros(1, 3).expand(2, 3),),
        (x, None),
        ([x],),
    ):
        assert not _are_own(outputs, set())
    assert not _are_own((x,), {storage_id(x)})


def test_a_call_without_a_result_is_always_passed_on() -> None:
    positions = torch.zeros(3, dtype=torch.int64)
    rows = torch.tensor([0])
    starts = torch.tensor([0, 1])
    with Seen() as counter, _Zeros():
        for _ in range(2):
            torch.ops.weft.move_on(
                positions, torch.zeros_like(positions), rows, starts, torch.tensor([5]), None
            )
    assert counter.calls == 2


def test_it_leaves_no_trace() -> None:
    model = load(DEMO)
    runner = make_runner(model, Limits(4, 32), mode="full_and_piecewise")
    state, (graph,) = make_state(model, runner.layouts, [32] * 4), runner.graphs
    state, _ = runner.step(runner.params, state, Batch.ragged([0, 1], [[1, 2, 3], [4]]))
    before = clone(state)
    captures = graph.cache_info().captures
    call = graph._example((runner.params, state, Batch.decode([0])), {})
    compile_ahead(graph._graphable, call, graph._cache)
    assert_equal("no trace", state, before)
    assert graph.cache_info().captures == captures
    graph.cache_clear()
    example = runner.params, state, Batch.decode([0])
    call = graph._example(example, {})
    compile_ahead(graph._graphable, call, graph._cache)
    graph.capture(*example)
    assert graph.memory_analysis().buffer_bytes == graph.memory_estimate(*example).buffer_bytes


def test_a_call_without_a_graph_is_rehearsed_on_padding() -> None:
    ran: list[Tensor] = []

    def step(total: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        ran.append(rows.x.clone())
        if len(rows.x) > 8:
            raise torch.OutOfMemoryError("full")
        return total.add_(rows.x.sum()), rows

    graph = graphify(step, ladder=[BatchDescriptor(2, 2)], donate_argnames=("total",))
    total = torch.ones(())
    for size in (5, 9):
        rehearse_call(graph, total, Rows(BatchDescriptor(size, size), torch.ones(size, 3)))
    assert [x.tolist() for x in ran] == [[[0.0] * 3] * size for size in (5, 9)]
    assert float(total) == 1
    assert graph.cache_info().currsize == 0
    new_total, _ = graph(total, Rows(BatchDescriptor(5, 5), torch.ones(5, 3)))
    assert float(new_total) == 16


def test_a_call_with_a_graph_is_planned_and_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def step(total: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        ran.append(len(rows.x))
        return total.add_(rows.x.sum()), rows

    graph = graphify(
        step, ladder=[BatchDescriptor(2, 2), BatchDescriptor(4, 4)], donate_argnames=("total",)
    )
    total, few, many = (
        torch.ones(()),
        *(Rows(BatchDescriptor(n, n), torch.ones(n, 3)) for n in (2, 4)),
    )
    rehearse_call(graph, total, few)
    assert not ran, "it has no graph yet"
    graph.capture(total, few)
    count = len(ran)
    for rows in (few, many):
        rehearse_call(graph, total, rows)
    assert (len(ran), float(total)) == (count, 1)
    monkeypatch.setattr(type(graph), "_call", None)  # where no fast path is found
    total, _ = graph(total, few)
    total, _ = graph(total, many)
    assert (len(ran), float(total)) == (count, 19)


def test_a_rehearsal_refuses_what_a_capture_refuses() -> None:
    graph = graphify(lambda rows, other: rows, ladder=[BatchDescriptor(2, 2)])
    unhashable = type("Other", (), {"__hash__": None})()
    for size in (2, 5):
        with pytest.raises(CaptureError, match="other is not a tensor and cannot be hashed"):
            rehearse_call(graph, Rows(BatchDescriptor(size, size), torch.ones(size, 3)), unhashable)


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "around",
    [
        weft.batch_invariant,
        Mode,
        lambda: torch.device("cpu"),
        lambda: placed(Place(Mesh(tensor=1), 0)),
    ],
    ids=["batch invariant", "function mode", "default device", "rank of a mesh"],
)
def test_a_call_in_other_surroundings_is_planned_too(
    around: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graphify(lambda x: x + 1)
    x = torch.ones(3)
    with around():
        graph.capture(x)
        rehearse_call(graph, x)
        monkeypatch.setattr(type(graph), "_call", None)
        assert graph(x).tolist() == [2.0] * 3


def test_a_rehearsal_takes_nothing_from_the_generator_of_its_caller() -> None:
    graph = graphify(lambda rows: torch.rand_like(rows.x), ladder=[BatchDescriptor(2, 2)])
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    rehearse_call(graph, Rows(BatchDescriptor(5, 5), torch.ones(5, 3)))
    assert torch.rand(3).equal(expected)


def test_a_class_that_finds_no_memory_is_left_to_the_capture() -> None:
    pytest.importorskip("triton")
    ran: list[int] = []

    def step(rows: Rows) -> Rows:
        ran.append(len(rows.x))
        if len(rows.x) > 2:
            raise torch.OutOfMemoryError("full")
        return Rows(rows.descriptor, rows.x + 1)

    graph = graphify(step, ladder=[BatchDescriptor(n, n) for n in (4, 2)])
    call = graph._example((Rows(BatchDescriptor(1, 1), torch.ones(1, 3)),), {})
    compile_ahead(graph._graphable, call, graph._cache)
    assert ran == [4, 2]


@pytest.mark.filterwarnings("ignore:full. the device's memory was full")
@pytest.mark.parametrize("how", [Graphified.capture, rehearse_call, Graphified.__call__])
def test_where_the_memory_is_full_a_rank_of_a_mesh_raises(how: Any) -> None:
    """It cannot go on by itself: the others wait for its collectives."""

    def full(rows: Rows) -> Rows:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    graph = graphify(full, ladder=[BatchDescriptor(2, 2)])
    size = 3 if how is rehearse_call else 2
    rows = Rows(BatchDescriptor(size, size), torch.ones(size, 3))
    with placed(Place(Mesh(tensor=2), 1)), pytest.raises(torch.OutOfMemoryError):
        how(graph, rows)
    if how is not Graphified.__call__:
        with placed(Place(Mesh(tensor=1), 0)):  # no other rank waits
            how(graph, rows)


def test_it_neither_writes_what_graphs_read_nor_fails_where_the_memory_is_full() -> None:
    def full(x: Tensor) -> Tensor:
        if x.numel() > 2:
            raise torch.OutOfMemoryError
        return x + 1

    graph = graphify(full)
    graph(torch.ones(2))
    for size in (1, 9):
        call = graph._example((torch.zeros(size),), {})
        backend = graph._cache.backend_for(call)
        compile_ahead(graph._graphable, call, graph._cache)
    assert backend.input_buffers.nbytes == 8
    (captured,) = graph._cache.graphs()
    assert captured.buffers[0].tolist() == [1, 1]


_COUNTS = """
import triton, weft
from triton import knobs
from weft.batches.batch import Batch
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.transforms.graphs.ladder import Limits
from weft.transforms.engine.setup import make_runner, make_state
compiled = []
def listen(*, src, metadata, metadata_group, times, cache_hit):
    compiled.append(cache_hit)
knobs.compilation.listener = listen
model = load(DEMO, "cuda")
runner = make_runner(model, Limits(8, 64), mode="full_and_piecewise")
state, (graph,) = make_state(model, runner.layouts, [64] * 8), runner.graphs
example = runner.params, state, Batch.decode([0], device="cuda")
graph.compile_ahead(*example)
ahead = len(compiled)
graph.capture(*example)
print(ahead, len(compiled) - ahead, any(compiled))
"""


_LIBRARY = """
import sys, torch
from weft.batches.descriptor import BatchDescriptor
from weft.proofs.strategies import Rows
from weft.transforms.graphs.graphify import graphify
weight = torch.eye(64, device="cuda")
def step(rows):
    return Rows(rows.descriptor, rows.x @ weight if len(rows.x) == 2 else rows.x + 1)
graph = graphify(step, ladder=[BatchDescriptor(n, n) for n in (4, 2)])
example = Rows(BatchDescriptor(1, 1), torch.ones(1, 64, device="cuda"))
if sys.argv[1] == "ahead":
    graph.compile_ahead(example)
graph.capture(example)
print(graph.memory_analysis().graph_bytes)
"""


@pytest.mark.gpu
def test_what_a_library_keeps_is_not_in_the_graphs_pool() -> None:
    graph_bytes = [int(_output("-c", _LIBRARY, way)) for way in ("ahead", "alone")]
    assert graph_bytes[0] < graph_bytes[1], graph_bytes  # by 2 MiB with an H100


def _output(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.gpu
def test_a_capture_finds_all_that_it_launches_compiled(tmp_path: Path) -> None:
    shown = _output("-c", _COUNTS, TRITON_CACHE_DIR=str(tmp_path))
    ahead, later, any_cache_hit = shown.split()
    assert int(ahead) > 10, shown
    assert (later, any_cache_hit) == ("0", "False"), shown
