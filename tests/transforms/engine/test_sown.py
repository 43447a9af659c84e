"""Captures of custom functions: transformers' values, once for each token, in every way to
run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.batches.batch import ResolvedBatch
from weft.batches.sampling import SamplingParams
from weft.errors import ProgramError
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.custom.sown import sow
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.generate import Completion, generate
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.graphs.ladder import MODES

PROMPTS = ["The function returns a list of", "A list is", "In Python, a for loop"]
LAYERS = (0, 2)
WAYS: tuple[dict[str, Any], ...] = (
    *({"graph": mode} for mode in MODES),
    {"pipeline": 2},
    {"pipeline": 3, "graph": "full_and_piecewise"},
    {"speculation": Speculation(num_tokens=3)},
    {"pipeline": 2, "speculation": Speculation(num_tokens=2)},
)


def sowing(name: str) -> Any:
    """The change of a layer that captures its result, and the greatest of each token's values."""

    def change(layer: Any) -> Any:
        def run(
            params: Any, kv_pages: Tensor, batch: ResolvedBatch, tables: Any, hidden: Tensor
        ) -> Any:
            hidden, kv_pages = layer(params, kv_pages, batch, tables, hidden)
            sow(name, hidden)
            sow(f"{name} top", hidden.topk(2).indices)
            return hidden, kv_pages

        return run

    return change


@pytest.fixture(scope="module")
def model() -> Model:
    return load(DEMO, "cpu", "float32")


@pytest.fixture(scope="module")
def watched(model: Model) -> Model:
    hidden = torch.zeros(model.config.hidden_size)
    ids = torch.zeros(2, dtype=torch.int64)
    captures = {f"layer {i}": hidden for i in LAYERS} | {f"layer {i} top": ids for i in LAYERS}
    return model.with_stages(layers={i: sowing(f"layer {i}") for i in LAYERS}, captures=captures)


@pytest.fixture(scope="module")
def reference() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(Path(DEMO), dtype=torch.float32)


def check(reference: Any, model: Model, prompt: str, completion: Completion) -> None:
    """Compare with the hidden states of transformers for all tokens but the last."""
    ids = [*model.encode(prompt), *completion.token_ids]
    with torch.no_grad():
        states = reference(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
    for i in LAYERS:
        torch.testing.assert_close(
            completion.captured[f"layer {i}"], states[i + 1][0], atol=1e-4, rtol=1e-4
        )
        assert torch.equal(
            completion.captured[f"layer {i} top"], completion.captured[f"layer {i}"].topk(2).indices
        )


@pytest.mark.one_of(5, 2)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_captured_values_are_those_of_transformers(
    watched: Model, reference: Any, way: dict[str, Any]
) -> None:
    completions = generate(watched, PROMPTS, max_tokens=12, **way)
    plain = generate(load(DEMO, "cpu", "float32"), PROMPTS, max_tokens=12, graph="none")
    assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        check(reference, watched, prompt, completion)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("most_lent", [1, 3, 1024])
def test_outputs_have_each_value_once(
    watched: Model, reference: Any, most_lent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of prompts, preemption, equal prompts one after the other; outputs, put together, are
    the completion's."""
    monkeypatch.setattr("weft.transforms.engine.completion._MAX_LENT", most_lent)
    limits = EngineLimits(max_num_reqs=3, max_num_tokens=5, num_pages=6, max_model_len=64)
    engine = Engine(watched, limits)
    parts: dict[str, list[Tensor]] = {}
    last: dict[str, Any] = {}
    prompts = [*PROMPTS, PROMPTS[0]]
    names = [engine.add(prompt, max_tokens=24, id=str(i)) for i, prompt in enumerate(prompts)]
    for output in engine:
        if output.token_ids or output.captured:
            parts.setdefault(output.id, []).append(output.captured["layer 2"])
        last[output.id] = output
    assert engine.stats().preempted > 0
    for name, prompt in zip(names, prompts, strict=True):
        state = last[name].track
        ids = [*watched.encode(prompt), *state.token_ids]
        assert len(torch.cat(parts[name])) == len(ids) - 1
        assert torch.equal(torch.cat(parts[name]), state.captured["layer 2"])
        with torch.no_grad():
            states = reference(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        torch.testing.assert_close(torch.cat(parts[name]), states[3][0], atol=1e-4, rtol=1e-4)


def test_a_stop_ends_what_is_captured(watched: Model) -> None:
    [whole] = generate(watched, PROMPTS[:1], max_tokens=12)
    params = SamplingParams(temperature=0.0, stop_token_ids=(whole.token_ids[5],))
    for way in ({}, {"speculation": Speculation(num_tokens=4)}):
        [cut] = generate(watched, PROMPTS[:1], max_tokens=12, sampling=params, **way)
        length = len(watched.encode(PROMPTS[0])) + len(cut.token_ids) - 1
        assert len(cut.captured["layer 0"]) == length < len(whole.captured["layer 0"])


def test_each_completion_of_a_request_has_its_own(watched: Model, reference: Any) -> None:
    params = SamplingParams(temperature=1.0, seed=1, n=3)
    for completion in generate(watched, PROMPTS[:1], max_tokens=8, sampling=params):
        check(reference, watched, PROMPTS[0], completion)


def test_models_without_captures_have_none(model: Model) -> None:
    [completion] = generate(model, PROMPTS[:1], max_tokens=3)
    assert completion.captured == {}


def test_a_wrong_value_is_named(model: Model) -> None:
    captures = {"layer 0": torch.zeros(model.config.hidden_size)}
    sowing_model = model.with_stages(layers={0: sowing("layer 0")}, captures=captures)
    with pytest.raises(ProgramError, match=r"do not declare; they declare 'layer 0'"):
        generate(sowing_model, PROMPTS[:1], max_tokens=1)
    short = model.with_stages(layers={0: sowing("layer 0")}, captures={"layer 0": torch.zeros(3)})
    with pytest.raises(ProgramError, match=r"a tensor \[\d+, 3\]"):
        generate(short, PROMPTS[:1], max_tokens=1)


def test_a_value_is_copied_when_it_is_sown(model: Model) -> None:
    def change(layer: Any) -> Any:
        def run(*args: Any) -> Any:
            hidden, pages = layer(*args)
            sow("hidden", hidden)
            return hidden, pages

        return run

    def writing(layer: Any) -> Any:
        def run(*args: Any) -> Any:
            hidden, pages = layer(*args)
            kept = hidden.clone()
            sow("hidden", hidden)
            hidden.add_(100)
            return kept, pages

        return run

    captures = {"hidden": torch.zeros(model.config.hidden_size)}
    captured = [
        generate(
            model.with_stages(layers={0: wrapper}, captures=captures), PROMPTS[:1], max_tokens=3
        )[0].captured["hidden"]
        for wrapper in (change, writing)
    ]
    assert torch.equal(*captured)
