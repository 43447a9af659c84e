"""Threads: the results equal those of Local; refusals; and failures, whose errors name the rank and
which leave nothing running."""

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from ranks import SCENARIOS, advance, scale
from torch.overrides import TorchFunctionMode

from weft.effects import Effect
from weft.errors import CaptureError, ProgramError, RankError
from weft.proofs import assert_equal
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.checker import CheckedPrograms
from weft.transforms.pipelines.pipeline import Pipelined, pipeline
from weft.transforms.pipelines.schedule import Job
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.local import Local
from weft.transforms.pipelines.transports.threads import Threads
from weft.transforms.pipelines.worker import Link, Worker

LAW = "threads are local"


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", SCENARIOS)
def test_it_gives_what_local_gives(name: str, num_ranks: int) -> None:
    threads = Threads()
    expected = SCENARIOS[name](num_ranks, Local())
    result = SCENARIOS[name](num_ranks, threads)
    threads.close()
    assert_equal(LAW, result, expected)


def test_one_transport_runs_many_pipelines() -> None:
    threads = Threads(devices=["cpu"] * 3)
    for scenario in SCENARIOS.values():
        assert_equal(LAW, scenario(3, threads), scenario(3, Local()))


def test_grad_mode_is_the_callers() -> None:
    step = pipeline([scale] * 2, transport=Threads())
    params = [torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)]
    step(params, [torch.zeros(())] * 2, torch.ones(2))[1].sum().backward()
    assert [p.grad.item() for p in params if p.grad is not None] == [6.0, 4.0]
    with torch.no_grad():
        assert not step(params, [torch.zeros(())] * 2, torch.ones(2))[1].requires_grad


def test_devices_are_counted() -> None:
    with pytest.raises(ProgramError) as error:
        pipeline([scale] * 3, transport=Threads(devices=["cpu", "cpu"]))
    assert str(error.value) == (
        "pipeline(..., transport=Threads(devices=['cpu', 'cpu']))\n  saw: 2 devices for 3 ranks\n"
        "  instead: a device for each rank"
    )


def test_inside_a_graph_they_are_refused() -> None:
    step = graphify(pipeline([scale] * 2, transport=Threads()))
    with pytest.raises(
        CaptureError,
        match=r"runs stages in other threads, which this thread's capture cannot record",
    ):
        step((torch.ones(()),) * 2, (torch.ones(()),) * 2, torch.ones(2))


def test_autocast_and_the_default_device_are_the_callers() -> None:
    makes = pipeline(
        [lambda p, s, batch, x: (s, batch @ p), lambda p, s, batch, x: (s, (x, torch.empty(2)))],
        transport=Threads(),
    )
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        _, (product, empty) = makes(
            [torch.eye(2, device="cpu"), None], [None] * 2, torch.eye(2, device="cpu")
        )
    assert (product.dtype, empty.device.type) == (torch.bfloat16, "meta")
    _, (product, empty) = makes([torch.eye(2), None], [None] * 2, torch.eye(2))
    assert (product.dtype, empty.device.type) == (torch.float32, "cpu")


class Doubling(TorchFunctionMode):
    """Changes what functions compute."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_under_a_function_mode_they_are_refused() -> None:
    step = pipeline([scale] * 2, transport=Threads())
    with (
        Doubling(),
        pytest.raises(
            CaptureError,
            match=r"runs stages in other threads, which this thread's Doubling cannot see",
        ),
    ):
        step([torch.ones(())] * 2, [torch.zeros(())] * 2, torch.ones(2))


def test_in_a_stage_of_their_own_they_are_refused_at_once() -> None:
    threads = Threads(timeout=20)
    inner = pipeline([scale] * 2, transport=threads)

    def stage(p: Any, s: Any, batch: torch.Tensor, x: Any) -> Any:
        return s, inner([torch.ones(())] * 2, [torch.zeros(())] * 2, batch if x is None else x)[1]

    began = time.monotonic()
    with pytest.raises(
        ProgramError,
        match="a call in a thread of this transport, which would have to run the inner stages",
    ):
        pipeline([stage, stage], transport=threads)([None] * 2, [None] * 2, torch.ones(2))
    assert time.monotonic() - began < 10
    outer = pipeline([stage, stage], transport=Threads())
    assert outer([None] * 2, [None] * 2, torch.ones(2))[1].tolist() == [1.0, 1.0]


class Wordless(Exception):
    """An error that cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_that_cannot_be_printed_is_raised_and_ends_no_thread() -> None:
    def fails(p: Any, s: Any, batch: Any, x: Any) -> Any:
        raise Wordless

    threads = Threads(timeout=5)
    values = [torch.ones(())] * 2
    with pytest.raises(Wordless):
        pipeline([scale, fails], transport=threads)(values, values, torch.ones(2))
    assert pipeline([scale] * 2, transport=threads)(values, values, torch.ones(2))[1].tolist() == [
        1.0,
        1.0,
    ]


class Planted(Exception):
    """The error of a rank that raises."""


# Seconds: longer than any time-out plus the delays of a busy machine
_STALL = 8.0


@attrs.define(eq=False)
class FailingWorker(Worker):
    """Fails at one of its effects; it sleeps, or raises."""

    at: int = attrs.field(kw_only=True)
    stalls: bool = attrs.field(kw_only=True)
    count: int = 0

    def perform(self, effect: Effect, link: Link) -> None:
        if self.count == self.at:
            if not self.stalls:
                raise Planted("planted")
            time.sleep(_STALL)
        self.count += 1
        super().perform(effect, link)


def lending(num_ranks: int, transport: Any = None) -> Pipelined:
    """A pipeline with every kind of effect in its programs."""
    stages = [graphify(scale, outputs="borrow") for _ in range(num_ranks)]
    return pipeline(stages, microbatches=2, advance=advance, transport=transport)


@attrs.define(eq=False)
class FailingThreads:
    """Threads, one of which fails once."""

    threads: Threads
    rank: int
    at: int
    stalls: bool = False
    failed: bool = False

    def ranks(self, num_ranks: int) -> Any:
        return self.threads.ranks(num_ranks)

    def check(self) -> None: ...

    def mail(self, num_ranks: int, /) -> Any:
        return self.threads.mail(num_ranks)

    def run(self, checked: CheckedPrograms, workers: Any, mail: Any, /) -> None:
        if self.failed:
            self.threads.run(checked, workers, mail)
            return
        self.failed = True
        used = [
            FailingWorker(**attrs.asdict(worker, recurse=False), at=self.at, stalls=self.stalls)
            if worker.rank == self.rank
            else worker
            for worker in workers
        ]
        self.threads.run(checked, used, mail)


PLACES = [
    (num_ranks, program.rank, index, str(effect))
    for num_ranks in (2, 3)
    for program in lending(num_ranks).programs(2)
    for index, effect in enumerate(program.effects)
]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_rank_that_raises_at_any_instruction_is_named_and_leaves_nothing(
    place: tuple[int, int, int, str],
) -> None:
    num_ranks, rank, at, instruction = place
    before = threading.active_count()
    transport = FailingThreads(Threads(timeout=10), rank, at)
    step = lending(num_ranks, transport)
    params = [torch.tensor(2.0)] * num_ranks
    state = [torch.tensor(1.0)] * num_ranks
    batch = torch.arange(4.0)
    with pytest.raises(Planted) as error:
        step(params, state, batch)
    assert error.value.__notes__ == [f"on rank {rank}, at '{instruction}'"]
    plain = pipeline([scale] * num_ranks, microbatches=2, advance=advance)
    assert_equal(LAW, step(params, state, batch), plain(params, state, batch))
    transport.threads.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


@pytest.mark.parametrize("place", PLACES[::3], ids=str)
def test_a_rank_that_stalls_is_named_in_time(place: tuple[int, int, int, str]) -> None:
    num_ranks, rank, at, instruction = place
    timeout = 1.0  # on a busy machine, a running rank may make no progress for a third of this time
    # Imports
    lending(num_ranks)(
        [torch.tensor(2.0)] * num_ranks, [torch.tensor(1.0)] * num_ranks, torch.arange(4.0)
    )
    transport = FailingThreads(Threads(timeout=timeout), rank, at, stalls=True)
    step = lending(num_ranks, transport)
    values = [torch.tensor(2.0)] * num_ranks
    batch = torch.arange(4.0)
    began = time.monotonic()
    with pytest.raises(RankError) as error:
        step(values, values, batch)
    assert time.monotonic() - began < _STALL
    assert (error.value.rank, error.value.instruction) == (rank, instruction)
    assert error.value.cause == f"no progress for {timeout:g} s"
    with pytest.raises(RankError, match=f"rank 0: 'the next step'\n  saw: rank {rank} failed at"):
        step(values, values, batch)


def test_a_stall_that_nobody_waits_for_is_named_too() -> None:
    def sleeps(p: Any, s: Any, batch: Any, x: Any) -> Any:
        time.sleep(1)
        return s, x

    step = pipeline([scale, sleeps], transport=Threads(timeout=0.2))
    with pytest.raises(RankError) as error:
        step([torch.ones(())] * 2, [torch.ones(())] * 2, torch.ones(2))
    assert (error.value.rank, error.value.instruction) == (1, "run stage 1 [mb 0]")


def test_a_rank_that_exits_raises_its_exit() -> None:
    def leaves(p: Any, s: Any, batch: Any, x: Any) -> Any:
        raise SystemExit(4)

    step = pipeline([scale, leaves], transport=Threads(timeout=5))
    with pytest.raises(SystemExit) as error:
        step([torch.ones(())] * 2, [torch.ones(())] * 2, torch.ones(2))
    assert error.value.__notes__ == ["on rank 1, at 'run stage 1 [mb 0]'"]


@pytest.mark.parametrize("devices", ["cpu", torch.device("cpu")])
def test_one_device_is_no_list_of_them(devices: Any) -> None:
    with pytest.raises(ProgramError, match="a list of them, one for each stage"):
        Threads(devices=devices)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("make", [Threads, Distributed])
@pytest.mark.parametrize("timeout", ["5", -1, 0, True, float("nan"), float("inf"), 10**18, None])
def test_a_timeout_that_is_none_is_refused(make: Any, timeout: Any) -> None:
    with pytest.raises(
        ProgramError, match=rf"{make.__name__}\(timeout={timeout!r}\)\n  saw: timeout={timeout!r}\n"
    ):
        make(timeout=timeout)


def test_threads_that_were_never_made_end_quietly() -> None:
    with pytest.raises(TypeError):
        Threads(2)  # type: ignore[arg-type, call-arg]
    gc.collect()


def _fails(p: Any, s: Any, batch: Any, x: Any) -> Any:
    raise ValueError("no")


def _ranks() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("weft rank")]


def _await_no_more_ranks_than(count: int) -> None:
    """Wait until the threads of dropped transports, which were told to end, have done so."""
    deadline = time.monotonic() + 10
    while len(_ranks()) > count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(_ranks()) <= count


@pytest.fixture
def without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize(
    "stages", [[scale, scale], [scale, _fails], [_fails, scale]], ids=["well", "late", "early"]
)
def test_a_dropped_pipeline_leaves_no_thread_and_no_tensor(stages: Any) -> None:
    ranks = len(_ranks())
    alive: list[weakref.ref[torch.Tensor]] = []
    for _ in range(5):
        step = pipeline(stages, microbatches=2, transport=Threads(timeout=10))
        batch = torch.ones(4)
        alive.append(weakref.ref(batch))
        with contextlib.suppress(ValueError):
            alive.append(weakref.ref(step([torch.ones(())] * 2, [torch.zeros(())] * 2, batch)[1]))
        del step, batch
    _await_no_more_ranks_than(ranks)
    assert [reference() for reference in alive] == [None] * len(alive)


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("stages", [[scale, scale], [scale, _fails]], ids=["well", "fails"])
@pytest.mark.parametrize("transport", [Threads(timeout=10), Local()], ids=["threads", "local"])
def test_after_a_call_nothing_holds_the_batch_or_the_result(stages: Any, transport: Any) -> None:
    step = pipeline(stages, microbatches=2, transport=transport)
    batch = torch.ones(4)
    alive = [weakref.ref(batch)]
    with contextlib.suppress(ValueError):
        alive.append(weakref.ref(step([torch.ones(())] * 2, [torch.zeros(())] * 2, batch)[1]))
    del batch
    deadline = time.monotonic() + 10
    while any(reference() is not None for reference in alive) and time.monotonic() < deadline:
        time.sleep(0.01)  # a rank's thread drops its task after the call has its result
    assert [reference() for reference in alive] == [None] * len(alive)


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("transport", [Threads(timeout=10), Local()], ids=["threads", "local"])
def test_a_session_holds_no_batch_whose_output_has_returned(transport: Any) -> None:
    step = pipeline([scale] * 2, transport=transport, advance=lambda s, batch, out: s)
    session = step.session([torch.ones(())] * 2, [torch.zeros(())] * 2)
    batch = torch.ones(4)
    alive = weakref.ref(batch)
    session.submit([batch], [Job()])
    session.close()
    del batch
    deadline = time.monotonic() + 10
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive() is None


def test_the_error_of_a_stage_keeps_its_traceback_and_its_note() -> None:
    with pytest.raises(ValueError, match="no") as error:
        pipeline([scale, _fails], transport=Threads(timeout=10))(
            [torch.ones(())] * 2, [torch.zeros(())] * 2, torch.ones(2)
        )
    assert error.traceback[-1].name == "_fails"
    assert error.value.__notes__ == ["in stage 1 (_fails)", "on rank 1, at 'run stage 1 [mb 0]'"]


def test_the_tests_above_find_a_thread_that_keeps_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeping(tasks: Any) -> None:
        while (task := tasks.get()) is not None:
            task()

    monkeypatch.setattr("weft.transforms.pipelines.transports.threads._run_tasks", keeping)
    step = pipeline([scale] * 2, transport=Threads(timeout=10))
    batch = torch.ones(4)
    alive = weakref.ref(batch)
    step([torch.ones(())] * 2, [torch.zeros(())] * 2, batch)
    del batch
    time.sleep(0.1)
    assert alive() is not None
