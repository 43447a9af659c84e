"""Launching a step waits for nothing that the device does, so that the host is ahead of it."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from weft import load
from weft.batches.sampling import SamplingParams
from weft.stages import DEMO
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.engine.steps import executor
from weft.transforms.engine.steps.step import Work

ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"n": 2, "temperature": 1.0, "seed": 3},
    {"repetition_penalty": 1.2, "logit_bias": {5: 1.0}},
    {"bad_token_ids": [3], "stop_token_ids": [7]},
    {"logprobs": 2, "prompt_logprobs": 1},
)


def scaled(layer: Any) -> Any:
    def run(params: Any, kv_pages: Tensor, batch: Any, tables: Any, hidden: Tensor) -> Any:
        weight = batch.token_extras["weight"].to(hidden.dtype)
        return layer(params, kv_pages, batch, tables, hidden * weight[:, None])

    return run


def with_defaults(device: str) -> Model:
    return load(DEMO, device).with_stages(
        logits=lambda logits, rows, extras: logits * extras["factor"][:, None],
        layers={1: scaled},
        extras={"factor": torch.tensor(1.0)},
        token_extras={"weight": torch.tensor(1.0)},
    )


def make(device: str, **options: Any) -> Engine:
    """An engine with few rows and pages, so that requests wait for rows, and are preempted."""
    limits = EngineLimits(max_num_reqs=4, max_model_len=64, num_pages=13, page_size=8)
    return Engine(with_defaults(device), limits, num_logprobs=2, **options)


def serve(engine: Engine, launch: Callable[[], None]) -> None:
    """Serve requests of all kinds, and check that all of them are admitted while others run."""
    for index in range(10):
        prompt = [*range(4, 14 + index)]
        sampling = SamplingParams(**ASKED[index % len(ASKED)])
        extras = (
            {"factor": torch.tensor(0.5), "weight": torch.rand(len(prompt))} if index % 3 else None
        )
        engine.add(prompt, sampling, max_tokens=20, extras=extras)
    while not engine.is_idle:
        launch()
        engine.step()
    assert engine.stats().preempted


class NoWaits(TorchFunctionMode):
    """Raises where torch would copy a number or a list of indices to a GPU, and wait for it. Other
    waits only show on a GPU: tensors of the host may be read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__setitem__, torch.Tensor.__getitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            numbers = len(args) > 2 and not isinstance(args[2], torch.Tensor)
            tensors = any(isinstance(one, torch.Tensor) and one.ndim for one in index)
            assert not (tensors and numbers), f"{args[2]} at places that a tensor names"
            assert not any(isinstance(one, list) for one in index), "a list of places"
        return func(*args, **(kwargs or {}))


@pytest.mark.one_of(2)
@pytest.mark.parametrize("speculation", [None, Speculation(2)])
def test_edits_and_batches_copy_no_numbers(
    monkeypatch: pytest.MonkeyPatch, speculation: Speculation | None
) -> None:
    def guarded(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(fn)
            with NoWaits():
                return fn(*args, **kwargs)

        return call

    calls: list[Any] = []
    monkeypatch.setattr(executor, "apply_edits", guarded(executor.apply_edits))
    monkeypatch.setattr(Work, "place", guarded(Work.place))
    serve(make("cpu", graph="none", speculation=speculation), lambda: None)
    assert len({*calls}) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("speculation", [None, Speculation(2)])
@pytest.mark.parametrize("graph", ["none", "full_and_piecewise"])
def test_launching_does_not_wait(graph: str, speculation: Speculation | None) -> None:
    engine = make("cuda", graph=graph, speculation=speculation)
    serve(engine, lambda: None)  # what is done once may wait: graphs are captured, kernels compiled

    def launch() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("error")
        try:
            engine.launch()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    serve(engine, launch)
