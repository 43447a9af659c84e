"""The CUDA back end: graphs that really replay, in a pool that no capture corrupts, and captures that fail cleanly."""

from pathlib import Path

import pytest
import torch

from weft.batch import Batch
from weft.donation import clone
from weft.errors import CaptureError
from weft.stages.model import DEMO, Model, load
from weft.transforms.generate import generate, make_runner, make_state
from weft.transforms.graphify import Graphified, graphify
from weft.transforms.ladder import MODES, Limits

pytestmark = pytest.mark.gpu
PROMPTS = ("The function returns", "A list is", "In Python, ")


@pytest.fixture(scope="module")
def model() -> Model:
    return load(DEMO, "cuda", "float32")


def test_every_mode_and_split_says_the_same(model: Model) -> None:
    expected = [c.token_ids for c in generate(load(DEMO, "cpu", "float32"), PROMPTS, max_tokens=48)]
    for mode in MODES:
        for stages in (1, 2, 3):
            found = generate(model, PROMPTS, max_tokens=48, pipeline=stages, graph=mode)
            assert [c.token_ids for c in found] == expected, (mode, stages)


def test_transformers_says_the_same(model: Model) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(Path(DEMO), dtype=torch.float32).to("cuda")
    for prompt, completion in zip(PROMPTS, generate(model, PROMPTS, max_tokens=32), strict=True):
        ids = torch.tensor([model.encode(prompt)], device="cuda")
        said = reference.generate(ids, max_new_tokens=32, do_sample=False, pad_token_id=0)
        assert said[0, ids.shape[1] :].tolist() == completion.token_ids


def test_decode_steps_replay_one_graph(model: Model) -> None:
    runner = make_runner(model, Limits(4, 64), mode="full_decode_only")
    state = make_state(model, runner.layouts, [32] * 3, temperature=0.0, seeds=range(3))
    for batch in (
        Batch.ragged([0, 1, 2], [[1, 2, 3]] * 3, device="cuda"),
        *[Batch.decode([0, 1, 2], device="cuda")] * 9,
    ):
        state, _ = runner.step(runner.params, state, batch)
    info = runner.graphs[0].cache_info()
    assert (info.captures, info.replays, info.eager) == (1, 9, 1)


def test_replays_run_kernels_of_a_cuda_graph() -> None:
    graph = graphify(lambda x: torch.sin(x) + 1)
    x = torch.zeros(8, device="cuda")
    graph(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph(x)
        torch.cuda.synchronize()
    launched = {event.name for event in profile.events()}
    assert any("GraphLaunch" in name for name in launched), launched


def test_a_later_capture_keeps_earlier_results_and_graphs() -> None:
    graph = graphify(lambda x: (x @ x.t(), x.sum(-1)))
    inputs = [torch.randn(n, 16, device="cuda") for n in (64, 32, 8, 1)]
    held = [(graph(x), (x @ x.t(), x.sum(-1))) for x in inputs]
    again = [(graph(x), (x @ x.t(), x.sum(-1))) for x in reversed(inputs)]
    for seen, expected in (*held, *again):
        torch.testing.assert_close(seen, expected, rtol=0, atol=0)
    assert graph.cache_info().captures == 4


def _check_usable_after(failing: Graphified[..., object]) -> None:
    state = torch.arange(4.0, device="cuda")
    before = clone(state)
    allocated = torch.cuda.memory_allocated()
    with pytest.raises(CaptureError, match=r"test_cuda\.py|CUDA refused"):
        failing(state)
    torch.cuda.synchronize()
    assert torch.equal(state, before)
    assert torch.cuda.memory_allocated() <= allocated + 2**20
    good = graphify(lambda x: x * 2)
    assert torch.equal(good(state), before * 2)
    assert good.cache_info().captures == 1


def test_a_refused_capture_leaves_the_stream_usable() -> None:
    def reads(state: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        return state * state.sum().item()

    _check_usable_after(graphify(reads, donate_argnames=["state"]))


def test_a_capture_that_cuda_refuses_leaves_the_stream_usable() -> None:
    def waits(state: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        torch.cuda.synchronize()
        return state * 2

    _check_usable_after(graphify(waits, donate_argnames=["state"]))


def test_random_numbers_are_fresh_in_each_replay() -> None:
    graph = graphify(lambda x: x + torch.rand_like(x))
    x = torch.zeros(16, device="cuda")
    assert not torch.equal(graph(x), graph(x))


def test_a_copy_from_the_host_is_refused() -> None:
    table = torch.ones(4)
    graph = graphify(lambda x: x + table.to("cuda"))
    with pytest.raises(CaptureError, match="a copy from cpu to cuda"):
        graph(torch.zeros(4, device="cuda"))
