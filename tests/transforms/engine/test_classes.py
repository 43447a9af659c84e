"""Steps without a graph run under the classes that graphs would have, so that a GPU's kernels are
chosen alike."""

import random
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from weft.batches.batch import Batch
from weft.batches.descriptor import BatchDescriptor
from weft.batches.sampling import SamplingParams
from weft.ops.attention.backends import BACKENDS
from weft.ops.tiles.linear import gated_many_tile, linear_tile
from weft.ops.tiles.tile import MANY_TOKENS
from weft.proofs.checks.difference import assert_equal
from weft.proofs.evidence.runs.suite import LAWS
from weft.stages.config import parse_config
from weft.stages.model import Model
from weft.stages.random_weights import PRESETS, random_model
from weft.transforms.engine import options, setup
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.engine.stats import Stats
from weft.transforms.engine.steps import classes as module, executor
from weft.transforms.engine.steps.classes import Classes
from weft.transforms.graphs.graphified import Graphified, rehearse_call
from weft.transforms.graphs.ladder import MODES, Ladder, Limits, make_ladder

LADDERS = {mode: make_ladder(mode, Limits(5, 64)) for mode in MODES}


@pytest.mark.parametrize("query_lens", [(1,), (1, 3), (1, 2, 5)])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_runs_under_the_class_of_the_default_mode(
    mode: str, query_lens: tuple[int, ...]
) -> None:
    """With queries of other lengths, `full` and `piecewise` choose between uniform and ragged
    classes by their padding alone; the others have the uniform ones first."""
    limits = Limits(7, 64, query_lens)
    default = make_ladder("full_and_piecewise", limits)
    classes = Classes(make_ladder(mode, limits), default)
    graphs = Classes(default)
    uniform = [BatchDescriptor.uniform(n, q) for n in range(1, 8) for q in query_lens]
    for descriptor in [*uniform, *(BatchDescriptor(t, min(t, 2)) for t in range(1, 70))]:
        if query_lens == (1,) or mode not in ("full", "piecewise") or not descriptor.is_uniform:
            expected = graphs.of(descriptor)
            large = expected.mode == "none"
            assert classes.of(descriptor).descriptor == (
                BatchDescriptor(descriptor.num_tokens, 7) if large else expected.descriptor
            )
        assert mode != "none" or classes.of(descriptor).mode == "none"
        assert mode != "full_decode_only" or classes.of(descriptor).mode == (
            "full" if descriptor.is_uniform else "none"
        )


def test_a_batch_is_padded_once_and_its_results_are_its_own() -> None:
    batch = Batch.ragged(rows=[2, 0], token_ids=[[5, 6], [7]])
    descriptor = BatchDescriptor(3, 2)
    classes = Classes(eager=LADDERS["piecewise"])
    padded = classes.pad(batch)
    assert padded.descriptor == BatchDescriptor(4, 4)
    assert padded.rows.tolist() == [2, 0, -1, -1]
    assert_equal("a batch", classes.unpad(padded, descriptor).rows, batch.rows)
    assert classes.pad(padded) is padded
    assert Classes(LADDERS["piecewise"]).pad(batch).descriptor == BatchDescriptor(4, 4)
    assert Classes().pad(batch) is batch
    large = Batch.ragged(rows=[2, 0], token_ids=[[1] * 64, [2]])
    padded = classes.pad(large)
    assert padded.descriptor == BatchDescriptor(65, 5), "more tokens than any class has"
    assert padded.rows.tolist() == [2, 0, -1, -1, -1]
    assert_equal("a batch", classes.unpad(padded, large.descriptor).rows, large.rows)
    assert classes.pad(uniform := Batch.decode(range(65))) is uniform
    assert classes.unpad(None, descriptor) is None


@pytest.mark.parametrize("most", [2048, 3000, 8192])
@pytest.mark.parametrize("mode", ["full_and_piecewise", "full_decode_only"])
def test_steps_without_a_graph_take_kernels_of_classes_that_are_compiled_ahead(
    mode: str, most: int
) -> None:
    eager = make_ladder("full_and_piecewise", Limits(128, 2048))
    classes = Classes(make_ladder(mode, Limits(128, 2048)), eager, most)
    ahead = {(one.num_tokens, one.num_reqs) for one in classes.without_graph}
    assert {size for size in ahead if size[0] > 2048} == {
        (size, 128) for size in {min(4096, most), most} if size > 2048
    }
    assert (
        ahead >= {(one.num_tokens, one.num_reqs) for one in eager.piecewise}
        or mode == "full_and_piecewise"
    )
    for tokens in range(1, most + 1, 97):
        decision = classes.of(BatchDescriptor(tokens, min(tokens, 3)))
        if decision.mode == "none":
            class_size = decision.descriptor.num_tokens, decision.descriptor.num_reqs
            alike = {
                size
                for size in ahead
                if size == class_size or (size[0] >= 2048 and size[1] == class_size[1])
            }
            choices = [
                linear_tile(class_size[0], 128, 2048, False),
                gated_many_tile(class_size[0], 16384, 2048),
            ]
            assert any(
                choices == [linear_tile(size, 128, 2048, False), gated_many_tile(size, 16384, 2048)]
                for size, _ in alike
            )


def test_beyond_the_largest_class_tiles_are_those_of_powers_of_two() -> None:
    assert module._MOST_CAPTURED == MANY_TOKENS
    adapters = [BatchDescriptor(8, 4, None, number) for number in (0, 1, 4)]
    classes = Classes(eager=Ladder(adapters), max_num_tokens=40)
    large = [(one.num_tokens, one.num_active_loras) for one in classes.large]
    assert sorted(large) == [(size, number) for size in (16, 32, 40) for number in (0, 1, 4)]
    for num_loras, padded_num_loras in ((0, 0), (1, 1), (2, 4), (4, 4), (5, 5)):
        assert classes.of(BatchDescriptor(9, 2, None, num_loras)).descriptor == BatchDescriptor(
            9, 4, None, padded_num_loras
        )


def test_decisions_that_are_kept_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.transforms.engine.steps.classes._MAX_DECISIONS", 3)
    classes = Classes(eager=LADDERS["piecewise"])
    for tokens in range(1, 9):
        classes.of(BatchDescriptor(tokens, 1))
        assert len(classes._decisions) <= 3


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    "options", [{}, {"pipeline": 2}, {"speculation": Speculation(2, ngram=(1, 2))}], ids=str
)
def test_graphs_see_the_sizes_of_classes_alone(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Requests of any lengths, whose steps have other sizes each: all classes are planned when the
    engine warms up."""
    planned = []
    answer = Graphified._answer
    monkeypatch.setattr(Graphified, "_answer", lambda *args: planned.append(args) or answer(*args))
    model = random_model(parse_config(PRESETS["tiny"], source="a test"), seed=0)
    draw = random.Random(0)
    engine = Engine(
        model, EngineLimits(max_num_reqs=6, max_model_len=64, max_num_tokens=32), **options
    )
    engine.warm_up()
    sizes = set[BatchDescriptor]()
    of = Classes.of
    monkeypatch.setattr(
        Classes, "of", lambda classes, descriptor: sizes.add(descriptor) or of(classes, descriptor)
    )
    for _ in range(40):
        engine.add(
            [3] * draw.randint(1, 40),
            SamplingParams(ignore_eos=True),
            max_tokens=draw.randint(1, 8),
        )
        engine.step()
    assert len([*engine]) > 0
    assert not planned
    assert len(sizes) > engine.graphs[0].cache_info().currsize + 4


@pytest.mark.parametrize(
    ("preset", "most"), [("qwen3-0.6b", 4096), ("llama-3.2-1b", 2048), ("qwen3-30b-a3b-fp8", 2048)]
)
def test_small_layers_have_larger_graphs_and_steps(
    monkeypatch: pytest.MonkeyPatch, preset: str, most: int
) -> None:
    config = parse_config(PRESETS[preset], source="a test")
    assert module.captured_tokens(config) == most
    model: Any = SimpleNamespace(device="cuda", config=config)
    for gib, expected in ((24, 2048), (80, 4096 if most == 4096 else 8192)):
        properties = SimpleNamespace(total_memory=gib * 2**30)
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda _, device_properties=properties: device_properties,
        )
        assert options._num_tokens(model) == expected


@pytest.fixture
def padded_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ladder = module.eager_ladder
    monkeypatch.setattr(
        setup, "eager_ladder", lambda *args: ladder(*args[:-1], torch.device("cuda"))
    )


@pytest.mark.usefixtures("padded_as_on_a_gpu")
@pytest.mark.parametrize(
    "name", ["alone", "alone, with inputs of tokens", "alone, with another attention"]
)
def test_own_stages_serve_as_alone_in_padded_steps(name: str, runs_nightly: bool) -> None:
    law = next(law for law in LAWS if law.number == "L21" and law.name.endswith(name))

    @settings(
        max_examples=25 if runs_nightly else 2, deadline=None, suppress_health_check=[*HealthCheck]
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        law.check(data, "cpu")

    run()


Said = dict[str, tuple[list[int], list[float], list[float]]]


def completions(engine: Engine) -> Said:
    """Each request's tokens, their logprobs, and the logprobs of its prompt."""
    tracks = {output.id: output.track for output in engine}
    return {
        id: (track.token_ids, track.logprobs, track.prompt_logprobs) for id, track in tracks.items()
    }


def say(model: Model, graph: str, warm_up: bool = False, **options: Any) -> tuple[Said, Stats]:
    """The completions of requests with prompts of 1 to 19 tokens, in steps of at most 40."""
    limits = EngineLimits(max_num_reqs=8, max_model_len=64, max_num_tokens=40)
    engine = Engine(model, limits, graph=graph, seed=0, num_logprobs=1, **options)
    if warm_up:
        engine.warm_up()
    for index in range(7):
        sampling = SamplingParams(temperature=0.8, ignore_eos=True, logprobs=1, prompt_logprobs=1)
        engine.add([3 + i % 11 for i in range(1 + 3 * index)], sampling, max_tokens=5 + index)
    return completions(engine), engine.stats()


@pytest.mark.one_of(5, 2)
@pytest.mark.usefixtures("padded_as_on_a_gpu")
@pytest.mark.parametrize(
    "options", [{}, {"pipeline": 2}, {"speculation": Speculation(2, ngram=(1, 2))}], ids=str
)
@pytest.mark.parametrize("mode", ["none", "full_decode_only"])
def test_an_engine_says_the_same_in_the_same_classes(mode: str, options: dict[str, Any]) -> None:
    model = random_model(parse_config(PRESETS["tiny"], source="a test"), seed=0)
    completions, counts = say(model, mode, **options)
    expected, graphs = say(model, "full_and_piecewise", **options)
    assert completions == expected
    assert graphs.modes.get("none", 0) == 0
    assert counts.modes["none"] > 0
    assert 0 < counts.padding == graphs.padding


@pytest.mark.one_of(3)
@pytest.mark.usefixtures("padded_as_on_a_gpu")
@pytest.mark.parametrize(
    "options", [{}, {"pipeline": 2}, {"speculation": Speculation(2, ngram=(1, 2))}], ids=str
)
def test_what_has_no_graph_runs_once_when_an_engine_warms_up(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    model = random_model(parse_config(PRESETS["tiny"], source="a test"), seed=0)
    monkeypatch.setattr(module, "_MOST_CAPTURED_IF_SMALL", 8)
    ran = list[str]()
    monkeypatch.setattr(
        executor,
        "rehearse_call",
        lambda graph, *args: ran.append(str(args[2].descriptor)) or rehearse_call(graph, *args),
    )
    expected, _ = say(model, "full_decode_only", **options)
    assert not ran
    completions, _ = say(model, "full_decode_only", warm_up=True, **options)
    assert completions == expected
    count = 4 if "pipeline" in options else 8
    assert {f"ragged {size} tokens, {count} reqs" for size in (32, 40)} <= {*ran}


@pytest.mark.usefixtures("padded_as_on_a_gpu")
def test_a_step_of_more_tokens_than_any_class_has_the_most_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model(parse_config(PRESETS["tiny"], source="a test"), seed=0)
    expected, _ = say(model, "full_and_piecewise")
    monkeypatch.setattr(module, "_MOST_CAPTURED_IF_SMALL", 8)
    padded = list[int]()
    classes = Classes.pad

    def pad(self: Classes, batch: Batch) -> Batch:
        large = batch.descriptor.num_tokens > 8
        batch = classes(self, batch)
        padded.extend([batch.descriptor.num_reqs] * large)
        return batch

    monkeypatch.setattr(Classes, "pad", pad)
    completions, counts = say(model, "full_and_piecewise")
    assert {id: tokens for id, (tokens, _, _) in completions.items()} == {
        id: tokens for id, (tokens, _, _) in expected.items()
    }
    assert set(padded) == {8}
    assert counts.modes["none"] == len(padded)
    assert counts.padding < 40


def test_on_a_cpu_no_step_without_a_graph_is_padded() -> None:
    model = random_model(parse_config(PRESETS["tiny"], source="a test"), seed=0)
    assert say(model, "none")[1].padding == 0


@pytest.mark.usefixtures("padded_as_on_a_gpu")
def test_a_model_that_runs_in_no_graph_is_not_padded() -> None:
    model = random_model(parse_config(PRESETS["tiny"], source="a test"), seed=0)
    eager = model.with_stages(attend=attrs.evolve(BACKENDS["reference"], capability="none"))
    assert say(eager, "none")[1].padding == 0


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["qwen3-0.6b", "llama-3.2-1b"])
@pytest.mark.parametrize("mode", ["full_and_piecewise", "full_decode_only"])
def test_on_a_gpu_the_bits_of_a_model_are_those_without_graphs(preset: str, mode: str) -> None:
    """Whole layers of models whose products torch makes in several ways, as the number of tokens
    has it."""
    config = parse_config({**PRESETS[preset], "num_hidden_layers": 4}, source=preset)
    model = random_model(config, seed=0, device="cuda")
    said = []
    for graph in ("none", mode):
        limits = EngineLimits(max_num_reqs=64, max_model_len=640, max_num_tokens=2048)
        engine = Engine(model, limits, graph=graph, seed=0, num_logprobs=1)
        for index in range(64):
            prompt = [(7 * index + i * i) % 1000 for i in range(500 + index % 13)]
            sampling = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=1)
            engine.add(prompt, sampling, max_tokens=20 + index % 30)
        said.append(completions(engine))
    assert said[0] == said[1]
