"""The CUDA back end: graphs that really replay, in a pool that no capture corrupts, and captures
that fail cleanly."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.batches.batch import Batch
from weft.batches.descriptor import BatchDescriptor
from weft.batches.sampling import SamplingParams
from weft.errors import CaptureError
from weft.proofs.strategies import Rows
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.model import Model
from weft.transforms.engine.generate import generate
from weft.transforms.engine.setup import make_runner, make_state
from weft.transforms.graphs.graphified import Graphified
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.ladder import MODES, Limits
from weft.values.donation import clone
from weft.values.trees import tree_leaves

pytestmark = pytest.mark.gpu
PROMPTS = ("The function returns", "A list is", "In Python, ")


@pytest.fixture(scope="module")
def model() -> Model:
    return load(DEMO, "cuda", "float32")


def test_every_mode_and_split_says_the_same(model: Model) -> None:
    expected = [c.token_ids for c in generate(load(DEMO, "cpu", "float32"), PROMPTS, max_tokens=48)]
    for mode in MODES:
        for stages in (1, 2, 3):
            completions = generate(model, PROMPTS, max_tokens=48, pipeline=stages, graph=mode)
            assert [c.token_ids for c in completions] == expected, (mode, stages)


def test_transformers_says_the_same(model: Model) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(Path(DEMO), dtype=torch.float32).to("cuda")
    for prompt, completion in zip(PROMPTS, generate(model, PROMPTS, max_tokens=32), strict=True):
        ids = torch.tensor([model.encode(prompt)], device="cuda")
        said = reference.generate(ids, max_new_tokens=32, do_sample=False, pad_token_id=0)
        assert said[0, ids.shape[1] :].tolist() == completion.token_ids


def test_decode_steps_replay_one_graph(model: Model) -> None:
    runner = make_runner(model, Limits(4, 64), mode="full_decode_only")
    state = make_state(model, runner.layouts, [32] * 3)
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
    earlier = [(graph(x), (x @ x.t(), x.sum(-1))) for x in inputs]
    again = [(graph(x), (x @ x.t(), x.sum(-1))) for x in reversed(inputs)]
    for result, expected in (*earlier, *again):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert graph.cache_info().captures == 4


@pytest.mark.parametrize("outputs", ["safe", "borrow"])
def test_results_that_are_copied_share_their_memory(outputs: Any) -> None:
    graph = graphify(lambda x: x.repeat(1, 256) + x[:, :1], outputs=outputs)
    inputs = [torch.randn(n, 16, device="cuda") for n in (4096, 3072, 2048)]
    for x in (*inputs, *reversed(inputs)):
        assert torch.equal(graph(x), x.repeat(1, 256) + x[:, :1])
    used = graph.memory_analysis()
    shared = used.graph_bytes < used.output_bytes
    assert shared is (outputs == "safe"), used


def test_a_lazy_result_keeps_its_bits() -> None:
    graph = graphify(lambda x: ((x * 2).conj(), (x * 3).conj().imag))
    for seed in range(2):
        x = torch.randn(5, dtype=torch.complex64, device="cuda") + seed
        for result, expected in zip(graph(x), ((x * 2).conj(), (x * 3).conj().imag), strict=True):
            assert torch.equal(result, expected)


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


def test_a_generator_is_registered_wherever_it_comes_from() -> None:
    outside, eager = (torch.Generator("cuda").manual_seed(3) for _ in range(2))
    x = torch.zeros(4, device="cuda")
    graph = graphify(lambda x: x + torch.rand(4, device="cuda", generator=outside))
    results = [graph(x) for _ in range(3)]
    assert [s.tolist() for s in results] == [
        torch.rand(4, device="cuda", generator=eager).tolist() for _ in range(3)
    ]
    generator, other = (torch.Generator("cuda").manual_seed(7) for _ in range(2))
    graph = graphify(lambda x, g: x + torch.rand(x.shape, device="cuda", generator=g))
    for n in (4, 4, 5, 4, 5):
        expected = torch.rand(n, device="cuda", generator=other)
        assert torch.equal(graph(torch.zeros(n, device="cuda"), generator), expected)
    torch.manual_seed(3)
    expected = torch.rand(4, device="cuda") + torch.rand(4, device="cuda")
    graph = graphify(lambda x: x + torch.rand(4, device="cuda") + torch.rand(4, device="cuda"))
    torch.manual_seed(3)
    assert torch.equal(graph(x), expected)
    torch.manual_seed(3)
    assert torch.equal(graph(x), expected)


def test_calls_from_other_streams_wait_for_each_other() -> None:
    def slow(x: torch.Tensor) -> torch.Tensor:
        for _ in range(200):
            x = x @ x
            x = x / x.norm()
        return x

    graph = graphify(slow)
    inputs = [torch.randn(512, 512, device="cuda") for _ in range(8)]
    expected = [slow(x) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    results = []
    for stream, x in zip(streams, inputs, strict=True):
        with torch.cuda.stream(stream):
            results.append(graph(x))
    torch.cuda.synchronize()
    for got, eager_result in zip(results, expected, strict=True):
        torch.testing.assert_close(got, eager_result)


def test_threads_with_streams_of_their_own_get_right_answers() -> None:
    graph = graphify(lambda x: torch.sin(x @ x.t()) + 1, max_captures=3)
    faults: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(40):
                x = torch.randn(
                    16 * (1 + (seed + turn) % 4), 32, device="cuda", generator=generator
                )
                result = graph(x)
                torch.cuda.current_stream().synchronize()
                if not torch.allclose(result, torch.sin(x @ x.t()) + 1, atol=1e-4):
                    faults.append(f"thread {seed}, call {turn}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert graph.cache_info().replays == 160


def test_the_memory_of_a_dropped_graph_is_not_used_again_while_it_replays() -> None:
    graph = graphify(lambda x: x * 2, max_captures=1)
    small = torch.ones(1024, device="cuda")
    large = torch.ones(4096, device="cuda")
    first, second, third = (torch.cuda.Stream() for _ in range(3))
    with torch.cuda.stream(first):
        graph(small)
        graph(large)  # so that the next capture needs no warm-up, which would wait for the device
        graph(small)
    torch.cuda.synchronize()
    with torch.cuda.stream(second):
        torch.cuda._sleep(400_000_000)
        result = graph(small)
    with torch.cuda.stream(third):
        graph(large)
    with torch.cuda.stream(first):
        zeros = [
            torch.zeros(size, device="cuda") for size in (12, 128, 1024, 4096) for _ in range(64)
        ]
    in_flight = not second.query()
    torch.cuda.synchronize()
    assert in_flight, "the replay had ended before its graph was dropped"
    assert (result == 2).all()
    assert len(zeros) == 256


def test_a_full_memory_falls_back_to_the_graphs_at_hand() -> None:
    def wide(batch: Rows) -> Rows:
        return Rows(
            batch.descriptor, (batch.x[:, :, None] * torch.ones(2**20, device="cuda")).sum(-1)
        )

    def rows(n: int) -> Rows:
        return Rows(BatchDescriptor(n, n), torch.ones(n, 2, device="cuda"))

    graph = graphify(wide, ladder=[BatchDescriptor(n, n) for n in (64, 8)])
    graph(rows(8))
    used = torch.cuda.memory_reserved()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((used + 2**28) / total)
    try:
        with pytest.warns(
            RuntimeWarning,
            match="memory was full when 'ragged 64 tokens, 64 reqs' was to be captured",
        ):
            graph.capture(rows(1))
        assert graph(rows(3)).x.tolist() == [[2.0**20] * 2] * 3
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    graph.cache_clear()
    torch.cuda.empty_cache()
    assert graph(rows(33)).x.tolist() == [[2.0**20] * 2] * 33
    assert graph.cache_info().captures == 1


def test_a_dropped_graph_gives_its_memory_back() -> None:
    graph = graphify(
        lambda x: (x * 2, (x[:, None] * torch.ones(64, device="cuda")).sum(1)), max_captures=1
    )
    for n in (2**20, 2**20 + 1, 2**20 + 2):
        x = torch.ones(n, device="cuda")
        for result, factor in zip(graph(x), (2, 64), strict=True):
            assert bool((result == factor).all())
    del x, result
    allocated = torch.cuda.memory_allocated()
    graph.cache_clear()
    assert torch.cuda.memory_allocated() < allocated
    assert graph.memory_analysis().total_bytes == 0


def test_an_estimate_is_near_what_the_ladder_of_a_model_takes(model: Model) -> None:
    runner = make_runner(model, Limits(64, 256), mode="full_and_piecewise")
    state = make_state(
        model,
        runner.layouts,
        [32] * 64,
        [SamplingParams(temperature=1.0, seed=row) for row in range(64)],
    )
    before = clone(state)
    batch = Batch.decode([0, 1, 2], device="cuda")
    (graph,) = runner.graphs
    estimate = graph.memory_estimate(runner.params, state, batch)
    pairs = zip(tree_leaves(state), tree_leaves(before), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs if a is not None)
    graph.capture(runner.params, state, batch)
    used = graph.memory_analysis()
    assert estimate.buffer_bytes == used.buffer_bytes
    assert used.graph_bytes <= estimate.graph_bytes <= 1.1 * used.graph_bytes


def test_nothing_on_the_cpu_is_frozen_in_a_graph() -> None:
    g = graphify(lambda x: x + 1)
    assert g(torch.ones(2, device="cuda")).tolist() == [2, 2]
    for value in (1.0, 5.0):  # these are captured on a tape
        assert g(torch.full((2,), value)).tolist() == [value + 1] * 2
    h = graphify(lambda x, y: (x + 1, y * 2))
    with pytest.raises(CaptureError, match="y is on the CPU, in a call with tensors on a GPU"):
        h(torch.ones(2, device="cuda"), torch.ones(2))
    outside = torch.ones(2)
    with pytest.raises(CaptureError, match="a tensor from outside it is on the CPU"):
        graphify(lambda x: (x + 1, outside * 2))(torch.ones(2, device="cuda"))


def test_a_constant_on_the_cpu_is_the_functions_own() -> None:
    g = graphify(lambda x: x * torch.tensor(3.0))
    for value in (1.0, 5.0):
        assert g(torch.full((2,), value, device="cuda")).tolist() == [3 * value] * 2


def test_a_generator_of_the_gpu_is_not_seeded_inside() -> None:
    def draw(x: torch.Tensor, seeds: bool) -> torch.Tensor:
        x = x + torch.rand(2, device="cuda")
        if seeds:
            torch.cuda.manual_seed(7)
        return x

    g = graphify(draw)
    torch.cuda.manual_seed(7)
    x = torch.zeros(2, device="cuda")
    first = g(x, False)
    expected = torch.rand(2, device="cuda", generator=torch.Generator("cuda").manual_seed(7))
    assert torch.equal(first, expected)
    state = torch.cuda.get_rng_state()
    with pytest.raises(CaptureError, match="it seeds a random generator, or sets its state"):
        g(x, True)  # to the same seed
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_a_capture_that_cuda_refuses_leaves_the_generators_as_they_were() -> None:
    def draw(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(2, device="cuda")

    def wait(x: torch.Tensor) -> torch.Tensor:
        x = draw(x)
        torch.cuda.current_stream().synchronize()
        return x

    graph = graphify(draw)
    x = torch.zeros(2, device="cuda")
    torch.cuda.manual_seed(7)
    expected = [draw(x) for _ in range(4)]
    torch.cuda.manual_seed(7)
    results = [graph(x)]
    with pytest.raises(CaptureError, match="CUDA refused"):
        graphify(wait)(x)
    results += [draw(x), graph(x), draw(x)]
    assert [y.tolist() for y in results] == [y.tolist() for y in expected]


def test_random_numbers_of_the_cpu_are_refused_in_a_graph_of_the_gpu() -> None:
    graph = graphify(lambda x: (x + 1, torch.rand(2)))
    before = torch.get_rng_state()
    with pytest.raises(
        CaptureError, match="draws random numbers on the CPU, in a call with tensors on a GPU"
    ):
        graph(torch.zeros(2, device="cuda"))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_function_without_tensor_arguments_draws_on_the_gpu() -> None:
    def draw() -> torch.Tensor:
        return torch.rand(2, device="cuda") * 2

    graph = graphify(draw)
    torch.cuda.manual_seed(7)
    expected = [draw().tolist() for _ in range(3)]
    torch.cuda.manual_seed(7)
    assert [graph().tolist() for _ in range(3)] == expected
    assert graph.cache_info().replays == 3


def test_a_result_without_memory() -> None:
    graph = graphify(lambda x: (x + 1, torch._efficientzerotensor((2,), device="cuda")))
    for value in (1.0, 2.0):
        assert [y.tolist() for y in graph(torch.full((2,), value, device="cuda"))] == [
            [value + 1] * 2,
            [0.0, 0.0],
        ]


def test_a_number_on_the_gpu_that_torch_passes_on_is_refused() -> None:
    graph = graphify(torch.vmap(lambda start: torch.linspace(start, -3, 0, device="cuda")))
    with pytest.raises(CaptureError):
        graph(torch.ones(2, device="cuda"))


def test_a_capture_warms_up_on_the_state_as_it_was() -> None:
    """A state that counts, with one free row: a second run on the first one's state would go beyond
    it."""

    def write(
        state: dict[str, torch.Tensor], x: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        state["rows"].index_copy_(0, state["n"], x)
        return {"n": state["n"] + 1, "rows": state["rows"]}, state["rows"].sum(0)

    graph = graphify(write, donate_argnames="state")
    state = {"n": torch.tensor([2], device="cuda"), "rows": torch.zeros(3, 2, device="cuda")}
    state, out = graph(state, torch.ones(1, 2, device="cuda"))
    assert (state["n"].tolist(), out.tolist()) == ([3], [1.0, 1.0])
    [told] = graph.graphs().graphs
    assert (told.operators, told.pieces) == (4, 1)
    assert told.seconds > 0
