"""`weft.logprobs`: equal to transformers with its gradients, and to the sampler's bits in a
batch-invariant model."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from gradients import (
    LENGTHS,
    MODELS,
    SIZES,
    build,
    gradients_of,
    next_token_loss,
    prompts_of,
    recorded,
    saved,
    their_gradients,
    worst,
)
from refusal import refused

import weft
from weft.errors import DerivativeError, RequestError
from weft.proofs._strategies.engine.invariant import INVARIANT_MODELS, invariant_model
from weft.stages.model import Model
from weft.stages.random_weights import random_adapter
from weft.values.trees import tree_leaves, tree_map

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SEQUENCES = prompts_of([max(length, 2) for length in LENGTHS])
TOLERANCE = 2e-5
Q = "self_attn.q_proj"


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """The gradients are those of parameters that require grad, and those that torch.func follows;
    tied weights too."""
    architecture, fields = MODELS[name]
    theirs = build(architecture, {**SIZES, **fields})
    model = saved(theirs, tmp_path / "model")
    with torch.no_grad():
        losses = [
            float(next_token_loss(theirs(input_ids=torch.tensor([ids])).logits[0], ids))
            for ids in SEQUENCES
        ]
    expected = their_gradients(theirs, SEQUENCES, tmp_path / "gradients")

    def loss(params: Any) -> torch.Tensor:
        return -torch.cat(weft.logprobs(attrs.evolve(model, params=params), SEQUENCES)).sum()

    logprobs = weft.logprobs(model, SEQUENCES)
    assert [x.shape for x in logprobs] == [(len(ids) - 1,) for ids in SEQUENCES]
    assert not any(x.requires_grad for x in logprobs)
    assert [-float(x.sum()) for x in logprobs] == pytest.approx(losses, rel=1e-5)
    trainable_params = recorded(model.params)
    loss(trainable_params).backward()
    for gradients in (gradients_of(trainable_params), torch.func.grad(loss)(model.params)):
        assert worst(gradients, expected)[0] < TOLERANCE


@pytest.mark.one_of(20, 4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", INVARIANT_MODELS)
def test_a_batch_invariant_sampler_s_bits(kind: str, device: str) -> None:
    """All sequences at once, or each alone; with a record for autograd, and without one."""
    model = invariant_model(kind)
    model = attrs.evolve(
        model, params=tree_map(lambda x: x.to(device) if torch.is_tensor(x) else x, model.params)
    )
    prompts = prompts_of((19, 1, 7, 2), vocab_size=7)
    ways: tuple[dict[str, Any], ...] = ({"graph": "full"}, {"graph": "piecewise", "pipeline": 2})
    for way in ways:
        said = weft.generate(model, prompts, max_tokens=12, temperature=1.0, seed=5, **way)
        sequences = [ids + one.token_ids for ids, one in zip(prompts, said, strict=True)]
        models = [model]
        is_fp8 = model.config.fp8 is not None or model.kv_dtype is not None
        if not is_fp8:
            models.append(attrs.evolve(model, params=recorded(model.params)))
        for scored_model in models:
            alone = [weft.logprobs(scored_model, [ids])[0] for ids in sequences]
            many = weft.logprobs(scored_model, sequences * 8)  # in several steps
            assert len(many) == 8 * len(sequences)
            for logprobs in (
                weft.logprobs(scored_model, sequences),
                alone,
                many[: len(sequences)],
                many[-len(sequences) :],
            ):
                assert all(x.requires_grad == (scored_model is not model) for x in logprobs)
                pairs = zip(logprobs, prompts, said, strict=True)
                assert all(x[len(ids) - 1 :].tolist() == one.logprobs for x, ids, one in pairs)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("device", DEVICES)
def test_an_adapter_per_sequence_gives_the_engine_s_bits(device: str) -> None:
    """In one step, in several, and each alone; by `generate` and by an engine in another split and
    mode."""
    model = invariant_model("Qwen3")
    model = attrs.evolve(
        model, params=tree_map(lambda x: x.to(device) if torch.is_tensor(x) else x, model.params)
    )
    layers = [
        f"model.layers.{i}.{name}"
        for i in range(model.config.num_layers)
        for name in ("mlp.down_proj", Q)
    ]
    one, two = (random_adapter(model.config, layers, rank=2, seed=seed, std=0.5) for seed in (1, 2))
    adapters = [one, None, two, one]
    prompts = prompts_of((19, 1, 7, 2), vocab_size=7)
    said = weft.generate(model, prompts, max_tokens=12, temperature=1.0, seed=5, adapter=adapters)
    sequences = [ids + completion.token_ids for ids, completion in zip(prompts, said, strict=True)]
    engine = weft.Engine(model, pipeline=2, graph="piecewise", adapters={"one": one, "two": two})
    for index, (ids, adapter_name) in enumerate(
        zip(sequences, ("one", None, "two", "one"), strict=True)
    ):
        sampling = weft.SamplingParams(prompt_logprobs=0)
        engine.add(ids, sampling, max_tokens=1, id=str(index), adapter=adapter_name)
    forced = {
        int(output.id): output.track.prompt_logprobs for output in engine if output.finish_reason
    }
    many = weft.logprobs(model, sequences * 8, adapter=adapters * 8)
    alone = [
        weft.logprobs(model, [ids], adapter=adapter)[0]
        for ids, adapter in zip(sequences, adapters, strict=True)
    ]
    for logprobs in (weft.logprobs(model, sequences, adapter=adapters), many[:4], many[-4:], alone):
        assert [x.tolist() for x in logprobs] == [forced[index] for index in range(4)]
        pairs = zip(logprobs, prompts, said, strict=True)
        assert all(
            x[len(ids) - 1 :].tolist() == completion.logprobs for x, ids, completion in pairs
        )
    assert not torch.equal(alone[0], weft.logprobs(model, sequences[:1])[0])


def test_gradients_of_an_adapter_are_those_of_the_merged_weights() -> None:
    model = weft.load("demo", "cpu", "float32")
    name = "model.layers.1.mlp.down_proj"
    adapter = random_adapter(model.config, [name], rank=2, seed=1, std=0.1)
    a, b = (x.requires_grad_() for x in adapter.deltas[name])
    logprobs = weft.logprobs(model, ["A list is", "The function"], adapter=[adapter, None])
    grads = torch.autograd.grad(logprobs[0].sum(), (a, b), retain_graph=True)
    layer = model.params.layers[1]
    merged = attrs.evolve(layer, down_proj=layer.down_proj + b @ a)
    params = attrs.evolve(
        model.params, layers=(model.params.layers[0], merged, *model.params.layers[2:])
    )
    [expected] = weft.logprobs(attrs.evolve(model, params=params), ["A list is"])
    torch.testing.assert_close(logprobs[0], expected, rtol=1e-4, atol=1e-4)
    for x, other in zip(grads, torch.autograd.grad(expected.sum(), (a, b)), strict=True):
        torch.testing.assert_close(x, other, rtol=1e-3, atol=1e-4)
    assert not any(x.any() for x in torch.autograd.grad(logprobs[1].sum(), (a, b)))


def test_torch_func_follows_the_sampler_s_bits() -> None:
    model = invariant_model("Qwen3")
    sequences = prompts_of((19, 2, 7), vocab_size=7)

    def loss(params: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        logprobs = weft.logprobs(attrs.evolve(model, params=params), sequences)
        return torch.cat(logprobs).sum(), logprobs

    _, logprobs = torch.func.grad(loss, has_aux=True)(model.params)
    assert all(map(torch.equal, logprobs, weft.logprobs(model, sequences)))


def test_gradients_of_a_batch_invariant_model_are_those_of_the_fast_one() -> None:
    """Up to rounding, for every parameter."""
    exact = invariant_model("experts")
    fast = attrs.evolve(exact, functions=attrs.evolve(exact.functions, batch_invariant=False))
    grads = []
    for model in (exact, fast):
        params = recorded(model.params)
        sequences = prompts_of((20, 9), vocab_size=7)
        torch.cat(weft.logprobs(attrs.evolve(model, params=params), sequences)).sum().backward()
        grads.append(
            [x.grad for x in tree_leaves(params) if torch.is_tensor(x) and x.grad is not None]
        )
    assert len(grads[0]) == len(grads[1]) > 20
    for grad, other in zip(*grads, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def test_a_text_and_the_model_s_limit(demo: Model) -> None:
    text = "A list of the lines"
    ids = demo.encode("A list of the lines")
    [by_text], [by_ids] = weft.logprobs(demo, [text]), weft.logprobs(demo, [tuple(ids)])
    assert torch.equal(by_text, by_ids)
    most = demo.config.max_position_embeddings
    assert [len(x) for x in weft.logprobs(demo, [[65] * most, [65, 66]])] == [most - 1, 1]


CALL = "weft.logprobs(model, sequences)"
LISTS = "a list of sequences, each a string or a list of token ids"
SIZE = "2 to 512 tokens, the model's limit"
IDS = "token ids are ints from 0 to 256"
REFUSED: dict[str, tuple[Any, str, str]] = {
    "a text": ("An", "sequences='An'", LISTS),
    "one sequence": ([65, 66], "sequences=[65, 66]", LISTS),
    "none": ([], "sequences=[]", LISTS),
    "one token": (["An", "A"], "sequences[1] has 1 token; the first one has no logprob", SIZE),
    "no token": ([[]], "sequences[0] has 0 tokens; the first one has no logprob", SIZE),
    "beyond the limit": (
        [[65] * 513],
        "sequences[0] has 513 tokens; the first one has no logprob",
        SIZE,
    ),
    "not a token": ([[65, 257]], "sequences[0] holds 257", IDS),
    "a float": ([[65, 1.0]], "sequences[0] holds 1.0", IDS),
    "a tensor": (
        [torch.tensor([65, 66])],
        "sequences[0] is a Tensor",
        "a string or a list of token ids; of a tensor, its .tolist()",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_sequence_is_refused(demo: Model, case: str) -> None:
    sequences, problem, instead = REFUSED[case]
    with refused(RequestError, CALL, problem, instead):
        weft.logprobs(demo, sequences)


def test_adapters_that_are_not_one_per_sequence_are_refused(demo: Model) -> None:
    wrong: Any
    for wrong in ([None], "folder"):
        instead = "weft.load_adapter(model, folder), or a list of 2 of them and None"
        with refused(RequestError, CALL, f"adapter={wrong!r}", instead):
            weft.logprobs(demo, ["An", "As"], adapter=wrong)


def test_a_stage_of_a_model_and_derivatives_in_fp8_are_refused() -> None:
    stage = weft.load("demo", "cpu", stage=(0, 2))
    with refused(RequestError, CALL, f"model={stage!r}", "a whole model: weft.load(path)"):
        weft.logprobs(stage, ["An"])
    model = invariant_model("FP8")
    norm = model.params.norm
    embedding = model.params.embed_tokens
    assert norm is not None
    assert embedding is not None
    trained = attrs.evolve(
        model, params=attrs.evolve(model.params, norm=norm.clone().requires_grad_())
    )
    weft.logprobs(trained, [[1, 2]])[
        0
    ].sum().backward()  # the last norm: nothing after it is rounded
    trained = attrs.evolve(
        model, params=attrs.evolve(model.params, embed_tokens=embedding.clone().requires_grad_())
    )
    with pytest.raises(DerivativeError, match="values that are rounded to FP8"):
        weft.logprobs(trained, [[1, 2]])
