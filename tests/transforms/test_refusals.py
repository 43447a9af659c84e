"""What a replay could not repeat beside the host's reads: pinned memory, and collective operations not asked for."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from weft.errors import CaptureError
from weft.transforms.graphify import graphify

PINNING: dict[str, Callable[[Tensor], Any]] = {
    "a factory": lambda x: x + torch.empty(2, pin_memory=True).zero_(),
    "like": lambda x: torch.zeros_like(x, pin_memory=True) + x,
    "a method": lambda x: x.pin_memory(),
}


@pytest.mark.parametrize("way", PINNING)
def test_pinned_memory_is_refused(way: str) -> None:
    with pytest.raises(CaptureError, match=r"makes pinned memory of the host\n\s+at .*test_refusals.py"):
        graphify(PINNING[way])(torch.ones(2))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process alone."""
    file = Path(tmp_path_factory.mktemp("group")) / "store"
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{file}")
    yield
    dist.destroy_process_group()


def _in_place(x: Tensor) -> Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y


def _functional(x: Tensor) -> Tensor:
    return functional.wait_tensor(functional.all_reduce(x * 2, "sum", dist.group.WORLD))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("step", [_in_place, _functional])
def test_collectives_are_captured_if_asked_for(step: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"is a collective operation, which waits for other ranks"):
        graphify(step)(torch.ones(2))
    with pytest.raises(CaptureError, match=r"graphify\(\.\.\., collectives=True\) on every rank"):
        graphify(step).lower(torch.ones(2))
    g = graphify(step, collectives=True)
    for value in (1.0, 3.0):
        assert g(torch.full((2,), value)).tolist() == [2 * value] * 2
    assert g.cache_info().captures == 1
