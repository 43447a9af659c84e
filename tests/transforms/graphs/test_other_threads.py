"""What another thread computes inside a capture: no replay repeats it, so it is refused by name."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from weft.errors import CaptureError
from weft.transforms.graphs import one_at_a_time
from weft.transforms.graphs.graphify import graphify

# Runs a function in another thread, and returns its result.
Through = Callable[[Callable[[], Tensor]], Tensor]

WEIGHT = torch.ones(3)


def through_a_new_thread(function: Callable[[], Tensor]) -> Tensor:
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@pytest.fixture(params=["a new thread", "a worker that waits"])
def through(request: pytest.FixtureRequest) -> Iterator[Through]:
    if request.param == "a new thread":
        yield through_a_new_thread
        return
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # the worker is older than any capture
        yield lambda function: pool.submit(function).result()


REFUSED: dict[str, Callable[[Through, Tensor], Tensor]] = {
    "its result is used": lambda through, x: through(lambda: x * 2) + 1,
    "its result is returned": lambda through, x: through(lambda: x * 2),
    "of a closed-over tensor": lambda through, x: through(lambda: WEIGHT * 2)[:1] + x,
    "a sparse result": lambda through, x: (
        through(lambda: torch.eye(3).to_sparse()).to_dense()[:1, :1] + x
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_result_of_another_thread_is_refused(name: str, through: Through) -> None:
    g = graphify(lambda x: REFUSED[name](through, x))
    for size in (2, 2, 3, 4):  # also in captures that no rehearsal precedes
        with pytest.raises(CaptureError) as caught:
            g(torch.ones(size))
        said = str(caught.value)
        assert (
            "that is new in this call, and that no operator of this thread made: another thread did"
            in said
        )
        assert (
            "instead: compute it in this thread; or graphify the function that the thread runs"
            in said
        )
        assert said.startswith("graphify(<lambda>)")


def test_views_that_another_thread_takes_are_read_again(through: Through) -> None:
    g = graphify(lambda x: through(lambda: x[1:]) * 2)
    for size in (2, 2, 3):
        x = torch.randn(size)
        assert torch.equal(g(x), x[1:] * 2)


def test_a_constant_that_another_thread_made_once_is_no_fault(through: Through) -> None:
    memo: dict[str, Tensor] = {}

    def fn(x: Tensor) -> Tensor:
        if "ones" not in memo:
            memo["ones"] = through(lambda: torch.ones(1))
        return x + memo["ones"]

    g = graphify(fn)
    for size in (2, 2, 3):
        assert torch.equal(g(torch.zeros(size)), torch.ones(size))


def test_new_tensors_from_outside_are_captured_later(through: Through) -> None:
    weights = [torch.ones(1), torch.full((1,), 5.0)]
    g = graphify(lambda x, index: x * weights[index], static_argnames=("index",))
    assert g(torch.ones(2), 0).tolist() == [1.0, 1.0]
    # Read for the first time, without a rehearsal
    assert g(torch.ones(2), 1).tolist() == [
        5.0,
        5.0,
    ]
    assert g(torch.ones(2) * 2, 1).tolist() == [10.0, 10.0]


CONSTANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a list": lambda x: x + torch.tensor([1.0, 2.0]),
    "numpy": lambda x: x + torch.from_numpy(_NUMBERS),
    "a buffer": lambda x: x + torch.frombuffer(_BYTES, dtype=torch.float32),
    "a number that is written": lambda x: _filled(x),
    "a number for a tensor": lambda x: (
        x.sum() + torch.vmap(lambda end: torch.linspace(0, end, 2))(x)
    ),
}
_NUMBERS = torch.ones(2).numpy()
_BYTES = bytearray(8)


def _filled(x: Tensor) -> Tensor:
    y = x.clone()
    y[:1] = 7
    return y


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_the_source_are_no_work_of_a_thread(name: str) -> None:
    g = graphify(CONSTANTS[name])
    for x in (torch.ones(2), torch.tensor([3.0, 4.0])):
        assert torch.equal(g(x), CONSTANTS[name](x))


@pytest.mark.parametrize("capture", ["__call__", "lower"])
def test_a_capture_that_waits_for_a_thread_that_captures_is_refused(
    through: Through, capture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_at_a_time, "STANDSTILL", 0.2)
    inner = graphify(lambda x: x * 2)
    refused: list[str] = []

    def in_a_thread(x: Tensor) -> Tensor:
        with pytest.raises(CaptureError) as caught:
            getattr(inner, capture)(x)
        refused.append(str(caught.value))
        return x

    graphify(lambda x: through(lambda: in_a_thread(x)) + 1)(torch.ones(2))
    assert (
        "has waited for a thread for 0.2 s; if it waits for this one, neither would ever end"
        in refused[0]
    )
    assert "instead: call one graphified function inside another in the same thread" in refused[0]
    assert inner(torch.ones(2)).tolist() == [2, 2]


def test_a_capture_waits_for_another_thread_s_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_at_a_time, "STANDSTILL", 0.2)
    begun = threading.Event()

    def slow(x: Tensor) -> Tensor:
        begun.set()
        end = time.monotonic() + 1
        while time.monotonic() < end:
            time.sleep(0.01)
        return x * 2

    busy = threading.Thread(target=graphify(slow), args=(torch.ones(2),))
    busy.start()
    begun.wait()
    assert graphify(lambda x: x + 1)(torch.ones(2)).tolist() == [2, 2]
    busy.join()
