"""The end of NCCL's communicators, without NCCL: one that waits for a graph to go."""

import atexit
import threading

import pytest
import torch

from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.transports import nccl


def test_what_waits_for_graphs_ends_before_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_CLOSING", 0.2)
    at_exit: list[tuple[object, ...]] = []
    monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(call))
    g, gone = graphify(lambda x: x + 1), threading.Event()
    g(torch.ones(2))

    def end() -> None:
        while g.cache_info().currsize:
            gone.wait(0.01)
        gone.set()

    nccl._end_all([end, lambda: None])
    assert not gone.is_set()
    ((call, threads),) = at_exit
    assert callable(call)
    call(threads)
    assert gone.wait(5)
    at_exit.clear()
    nccl._end_all([lambda: None])
    assert not at_exit
