"""Ranks in separate processes: a faulty request ends in the same way on every rank, and parameters
change on all."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from weft.batches.sampling import SamplingParams
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.launch import launch

sys.path.insert(0, str(Path(__file__).parent))  # so that a rank finds this module by its name

GREEDY = SamplingParams(temperature=0.0)
LIMITS = EngineLimits(max_num_reqs=4, max_model_len=64)


class Mute:
    """The demo's tokenizer, changed so that it cannot decode one token."""

    def __init__(self, tokenizer: Any, token: int) -> None:
        self.tokenizer = tokenizer
        self.token = token

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def id_to_token(self, token: int) -> Any:
        if self.token == token:
            raise OverflowError(f"token {self.token}")
        return self.tokenizer.id_to_token(token)


def raises(said: Sequence[int]) -> list[int]:
    if said:
        raise KeyError("no such state")
    return [5]


def serve(model: Model, transport: Transport | None) -> dict[str, tuple[str, list[int], str]]:
    """The reason, tokens and error of each request."""
    mute: Any = attrs.evolve(model, tokenizer=Mute(model.tokenizer, 20))  # type: ignore[arg-type]
    engine = Engine(mute, LIMITS, pipeline=2, graph="none", seed=3, transport=transport)
    engine.add([5, 6, 7, 8], GREEDY, max_tokens=20, id="good")
    engine.add([5, 6], GREEDY, max_tokens=6, id="raises", mask=raises)
    engine.add(
        [5, 9],
        attrs.evolve(GREEDY, bad_token_ids=[5]),
        max_tokens=6,
        id="barred",
        mask=lambda said: [5],
    )
    engine.add([5, 10], attrs.evolve(GREEDY, allowed_token_ids=[20]), max_tokens=6, id="mute")
    outputs = [output for _ in range(4) for output in engine.step()]
    names = load(DEMO, "cpu").params  # of the whole model: the parts of other stages are skipped
    engine.update(
        {
            "model.layers.0.self_attn.q_proj.weight": names.layers[0].qkv_proj[
                : names.layers[0].o_proj.shape[1]
            ]
            * 0.5,
            "model.norm.weight": -1 * names.norm,  # type: ignore[operator]
        }
    )
    engine.add([5, 6, 7, 8], GREEDY, max_tokens=6, id="later")
    outputs += engine
    return {
        o.id: (o.finish_reason, o.track.token_ids, "" if o.error is None else o.error.problem)
        for o in outputs
        if o.finish_reason is not None
    }


def serve_here() -> dict[str, tuple[str, list[int], str]]:
    torch.set_num_threads(1)
    transport = Distributed(timeout=60)
    try:
        return serve(load(DEMO, "cpu", stage=(transport.rank, 2)), transport)
    finally:
        transport.close()


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[str, list[int], str]]:
    return serve(load(DEMO, "cpu"), None)


@pytest.mark.slow
def test_every_rank_ends_them_as_one_process_does(alone: dict[str, Any]) -> None:
    assert list(launch(serve_here, 2, timeout=120)) == [alone, alone]


def test_what_they_end_with(alone: dict[str, Any]) -> None:
    assert alone["raises"] == ("error", [5], "KeyError: 'no such state'")
    assert alone["barred"][:2] == ("error", [])
    assert alone["mute"] == ("error", [20], "OverflowError: token 20")
    assert (alone["good"][0], len(alone["good"][1])) == ("length", 20)
    engine = Engine(load(DEMO, "cpu"), LIMITS, graph="none")
    engine.add([5, 6, 7, 8], GREEDY, max_tokens=6, id="before")
    [before] = [output.track.token_ids for output in engine if output.finish_reason]
    assert alone["good"][1][:4] == before[:4]
    assert alone["later"][1] != before, "the parameters changed"
