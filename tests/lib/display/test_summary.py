"""Objects full of tensors print in one line without reading a value, and are tables in a notebook."""

import sys
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import weft
from weft import Limits
from weft.batches.state import resolve
from weft.display.summary import Summarized
from weft.stages.params import DecoderParams, LayerLora, LoraWeights
from weft.torchapi.private import pytree
from weft.transforms import make_runner, make_state
from weft.transforms.transform import Carried
from weft.values.trees import tree_flatten, tree_unflatten

# Pytrees without it: a user transform's state, two internal ones with attrs' own repr, and one with
# a short repr.
WITHOUT = {Carried.__name__, "Quantized", "DeviceWork", "Adapter"}


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    """One object of each class, from a model with random weights: the demo has nothing larger."""
    model = weft.load(weft.stages.DEMO, "cpu")
    runner = make_runner(model, Limits(2, 64), num_stages=2, mode="none", keep_logits=True)
    state = make_state(model, runner.layouts, [64, 64])
    batch = weft.Batch.ragged([0, 1], [model.encode("A list is"), model.encode("The function")])
    resolved = resolve(state[0], batch)
    _, x = runner.stages[0](runner.params[0], weft.clone(state[0]), batch, None)
    state, out = runner.step(runner.params, state, batch)
    module = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(20)))
    named = {
        "batch": batch,
        "resolved": resolved,
        "x": x,
        "out": out,
        "state": state[0],
        "table": state[0].sampling,
    }
    params = {
        "params": model.params,
        "layer": model.params.layers[0],
        "runner": runner,
        "model": model,
    }
    embeds = weft.EmbedsPrompt([weft.EMBEDDED] * 200, torch.zeros(200, model.config.hidden_size))
    return {**named, **params, "stage": weft.stages.from_module(module), "embeds": embeds}


def test_they_print_in_one_line(values: dict[str, Any]) -> None:
    for name, value in values.items():
        assert "\n" not in repr(value), name
        assert "tensor(" not in repr(value), name
        assert len(repr(value)) < 400, name
    assert repr(values["x"]) == "IntermediateTensors(hidden_states=bfloat16[21, 128])"
    assert (
        repr(values["params"])
        == "DecoderParams(embed_tokens=bfloat16[257, 128], layers=<48 tensors>, norm=bfloat16[128])"
    )
    assert (
        repr(values["stage"])
        == "ModuleStage(stage=stage Sequential, params=<40 tensors>, state={})"
    )
    assert repr(values["state"]).endswith(
        "mrope_position_deltas=int64[3], sampling=SamplingTable(...))"
    )
    assert repr(values["embeds"]).endswith("-2…, inputs_embeds=float32[200, 128])")


def test_they_are_tables_in_a_notebook(values: dict[str, Any]) -> None:
    for name, value in values.items():
        html = value._repr_html_()
        HTMLParser().feed(html)
        assert "<table" in html, name
        assert len(html) < 8000, name
    assert str(values["params"].table()).splitlines()[:4] == [
        "DecoderParams: 50 tensors, 1.9 MiB",  # the head is the embedding
        "name                                tensors  each                device",
        "embed_tokens                              1  bfloat16[257, 128]  cpu",
        "layers[*].input_layernorm                 6  bfloat16[128]       cpu",
    ]
    assert "Qwen3ForCausalLM, 6 layers, 1.9 MiB on cpu" in values["model"]._repr_html_()


def test_a_donated_state_says_so(values: dict[str, Any]) -> None:
    state = weft.clone(values["state"])
    weft.donate(state, to="step(state)")
    assert repr(state) == "<State, donated to step(state)>"
    assert state._repr_html_() is None


def test_they_are_pytrees_as_before_and_print_where_there_are_no_values(
    values: dict[str, Any],
) -> None:
    leaves, structure = tree_flatten(values["params"])
    with FakeTensorMode() as mode:
        fake = tree_unflatten(
            [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in leaves], structure
        )
        assert isinstance(fake, DecoderParams)
        assert repr(fake) == repr(values["params"])
    lora = LayerLora(qkv=LoraWeights(torch.ones(1, 1, 2, 4), torch.ones(1, 4, 2), (0, 4)))
    assert repr(lora) == "LayerLora(qkv=LoraWeights(...))"
    assert repr(lora.qkv) == "LoraWeights(a=float32[1, 1, 2, 4], b=float32[1, 4, 2], starts=(0, 4))"


def test_no_class_of_tensors_is_forgotten() -> None:
    named = [
        cls for cls in pytree.SUPPORTED_NODES if getattr(cls, "__module__", "").startswith("weft.")
    ]
    # Not doctests'
    classes = [
        cls for cls in named if getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
    ]
    floods = {
        cls.__name__
        for cls in classes
        if not issubclass(cls, Summarized) and "proofs" not in cls.__module__
    }
    assert floods == WITHOUT
