"""Gradients of the decoders' steps equal those of transformers, for parameters, embeddings and
adapters, by each of torch's interfaces."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import pytest
import torch
from gradients import (
    LENGTHS,
    MODELS,
    SIZES,
    build,
    chunked,
    gradients_of,
    joined,
    loss_by,
    loss_of,
    next_token_loss,
    prompts_of,
    recorded,
    relative,
    saved,
    scrambled,
    their_gradients,
    worst,
)
from hypothesis import given, settings, strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import weft
from weft.batches.batch import Batch
from weft.batches.state import Drafting
from weft.errors import DerivativeError
from weft.proofs._strategies.models import ARCHITECTURES, ROPES, moe_fields, window_fields
from weft.stages.adapters.slots import stage_params
from weft.stages.config import parse_config
from weft.stages.drafters.drafting import model_drafter
from weft.stages.layout import split_layers
from weft.stages.model import Model
from weft.stages.random_weights import PRESETS, random_adapter, random_params
from weft.transforms.engine.generate import generate
from weft.transforms.engine.setup import make_runner, make_state
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.ladder import Limits
from weft.values.trees import tree_leaves, tree_map

# The tolerance for a leaf's greatest error, relative to its greatest element, in float32.
TOLERANCE = 2e-5
PROMPTS = prompts_of(LENGTHS)
CHUNKS = (5, 1, 20, 38)
FP8 = {
    "hidden_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "vocab_size": 64,
    "num_hidden_layers": 1,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 128,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Model, Any]]:
    """For each architecture a model, and transformers' gradients of its loss on the prompts."""
    models_by_name = {}
    for name, (architecture, fields) in MODELS.items():
        theirs = build(architecture, {**SIZES, **fields})
        folder = tmp_path_factory.mktemp(name)
        model = saved(theirs, folder / "model")
        models_by_name[name] = model, their_gradients(theirs, PROMPTS, folder / "gradients")
    return models_by_name


@st.composite
def cases(draw: st.DrawFn, architecture: str) -> dict[str, Any]:
    """Fields of a small model of the architecture."""
    kv_heads = draw(st.sampled_from((1, 2)))
    group = draw(st.sampled_from((1, 3)))
    head_dim = draw(st.sampled_from((4, 6)))
    fields: dict[str, Any] = {
        **SIZES,
        "hidden_size": kv_heads * group * head_dim,
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": draw(st.sampled_from((1e-6, 1e-2))),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": draw(st.sampled_from(ROPES)),
    }
    if architecture not in ("Qwen2ForCausalLM", "MistralForCausalLM"):
        fields["attention_bias"] = draw(st.booleans())
    if architecture == "MistralForCausalLM":
        fields |= draw(window_fields(architecture, fields["num_hidden_layers"]))
    if architecture == "Qwen3MoeForCausalLM":
        fields |= draw(moe_fields(fields["num_hidden_layers"]))
        fields["num_experts_per_tok"] = min(
            fields["num_experts"], max(2, fields["num_experts_per_tok"])
        )
    if architecture.startswith("Qwen3"):
        fields["head_dim"] = head_dim
    return fields


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_of_any_configuration_are_those_of_transformers(
    architecture: str, runs_nightly: bool
) -> None:
    """Gradients of all parameters by torch.func, for whole prompts, or for chunks with gradients
    through the pages."""
    errors = []

    @given(cases(architecture), st.sampled_from([(64,), CHUNKS]))
    @settings(max_examples=10 if runs_nightly else 3, deadline=None)
    def check(fields: dict[str, Any], sizes: tuple[int, ...]) -> None:
        theirs = build(architecture, fields)
        with TemporaryDirectory() as folder:
            model = saved(theirs, Path(folder) / "model")
            expected = their_gradients(theirs, PROMPTS[:2], Path(folder) / "gradients")
        params, loss = loss_by(model, PROMPTS[:2], sizes)
        (gradients,) = torch.func.grad(loss)(params)
        pairs = zip(tree_leaves(gradients), tree_leaves(expected), strict=True)
        # An expert that no token chose has a gradient of 0 in both.
        near = [float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs]
        errors.append(max(near))
        assert errors[-1] < TOLERANCE

    check()
    print(
        f"{architecture}: greatest relative error {max(errors):.1e} in {len(errors)} configurations"
    )


@pytest.mark.one_of(9, 3)
@pytest.mark.parametrize("sizes", [(64,), CHUNKS], ids=["whole", "chunks"])
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_backward_through_a_step_and_a_pipeline(
    models: dict[str, tuple[Model, Any]], name: str, num_stages: int, sizes: tuple[int, ...]
) -> None:
    """`.backward()`, and torch.func's `grad`, of one stage and of two; tied weights are two tensors
    to two stages."""
    model, expected = models[name]
    params, loss = loss_by(model, PROMPTS, sizes, num_stages, mode="full")
    leaf_params = recorded(params)
    loss(leaf_params).backward()
    ways = [gradients_of(leaf_params), torch.func.grad(loss)(params)]
    for stages in ways:
        assert worst(joined(stages, model.config.tie_word_embeddings), expected)[0] < TOLERANCE


@pytest.mark.one_of(4, 2)
@pytest.mark.parametrize("name", MODELS)
def test_other_derivatives_agree(models: dict[str, tuple[Model, Any]], name: str) -> None:
    """`jvp` with `grad`; `vmap` of the loss and of its gradient with a loop; a Hessian is
    symmetric."""
    model, _ = models[name]
    (params,), loss = loss_by(model, PROMPTS[:2])
    slopes = torch.func.grad(loss)((params,))
    direction = tree_map(
        lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(1)), (params,)
    )
    _, slope = torch.func.jvp(loss, ((params,),), (direction,))
    expected = sum(
        (a * b).sum() for a, b in zip(tree_leaves(slopes), tree_leaves(direction), strict=True)
    )
    torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-4)

    def of_norm(norm: Tensor) -> Tensor:
        return loss((attrs.evolve(params, norm=norm),))

    norms = torch.stack([params.norm, 1.5 * params.norm])
    for function in (of_norm, torch.func.grad(of_norm)):
        looped = torch.stack([function(norm) for norm in norms])
        torch.testing.assert_close(torch.func.vmap(function)(norms), looped, rtol=1e-4, atol=1e-4)
    every = tree_map(lambda x: torch.stack([x, 1.1 * x]), (params,))
    looped = torch.stack([loss((params,)), loss(tree_map(lambda x: 1.1 * x, (params,)))])
    torch.testing.assert_close(torch.func.vmap(loss)(every), looped, rtol=1e-4, atol=1e-4)
    hessian = torch.func.hessian(of_norm)(params.norm)
    torch.testing.assert_close(hessian, hessian.T, rtol=1e-3, atol=1e-4)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_is_captured_and_replays(
    models: dict[str, tuple[Model, Any]], name: str, device: str
) -> None:
    """`graphify` of a loss, its gradient and an update equals the eager step bitwise, and the loss
    falls."""
    model = weft.load(models[name][0].path, device)
    runner = make_runner(model, Limits(4, 64), mode="none")
    [batch], params = chunked(PROMPTS[:2], (64,), device=device), runner.params

    def loss(params: Any, state: Any) -> Tensor:
        _, out = runner.step(params, state, batch)
        nll: Tensor = -out.prompt_logprobs.mean()
        return nll

    def update(params: Any, state: Any, rate: Tensor) -> Any:
        slopes, value = torch.func.grad_and_value(loss)(params, state)
        return tree_map(lambda p, slope: p - rate * slope, params, slopes), value

    state, train, losses = (
        make_state(model, runner.layouts, [48, 48]),
        graphify(update, donate_argnames="params"),
        [],
    )
    ours = weft.clone(params)
    other = weft.clone(params)
    rate = torch.tensor(0.05, device=device)
    for _ in range(4):
        ours, value = train(ours, state, rate)
        other, expected = update(other, weft.clone(state), rate)
        assert torch.equal(value, expected)
        assert all(map(torch.equal, tree_leaves(ours), tree_leaves(other)))
        losses.append(float(value))
    assert (train.cache_info().captures, train.cache_info().replays) == (1, 4)
    assert losses[-1] < losses[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_gradients_on_a_gpu_are_those_of_the_cpu(
    models: dict[str, tuple[Model, Any]], name: str
) -> None:
    """Gradients by the functional forms, over chunks, by torch.func and by backward."""
    model, expected = models[name]
    there = weft.load(model.path, "cuda")
    (params,), loss = loss_by(there, PROMPTS, CHUNKS)
    leaf_params = recorded(params)
    loss((leaf_params,)).backward()
    for gradients in (gradients_of(leaf_params), *torch.func.grad(loss)((params,))):
        on_host = tree_map(lambda x: x.cpu(), gradients)
        error, where = worst(on_host, expected)
        print(f"{name} on {there.device}: greatest relative error {error:.1e}, at {where}")
        assert error < 2e-4


@pytest.mark.gpu
def test_gradients_on_a_gpu_in_bfloat16() -> None:
    """The demo's gradients are near those in float32."""
    losses = [
        loss_by(weft.load(weft.stages.DEMO, "cuda", dtype), prompts_of(LENGTHS))
        for dtype in ("float32", "bfloat16")
    ]
    (fine,), (coarse,) = (torch.func.grad(loss)(params) for params, loss in losses)
    for one, other in zip(tree_leaves(coarse), tree_leaves(fine), strict=True):
        assert float((one.float() - other).norm() / other.norm()) < 0.1


def test_one_leaf_of_one_layer(models: dict[str, tuple[Model, Any]]) -> None:
    """Layers before it run as operators, which write the pages in place; it and the later layers do
    not."""
    model, expected = models["qwen3"]
    (params,), loss = loss_by(model, PROMPTS, CHUNKS)
    leaf = params.layers[1].k_norm.clone().requires_grad_()
    layers = (params.layers[0], attrs.evolve(params.layers[1], k_norm=leaf), params.layers[2])
    loss((attrs.evolve(params, layers=layers),)).backward()
    assert relative(leaf.grad, expected.layers[1].k_norm) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_embeddings_are_those_of_transformers(name: str) -> None:
    """Gradients of the embeddings that replace some tokens of a prompt."""
    architecture, fields = MODELS[name]
    theirs = build(architecture, {**SIZES, **fields})
    ids = PROMPTS[0]
    embeds = torch.randn(len(ids), SIZES["hidden_size"], generator=torch.Generator().manual_seed(4))
    is_embedded = torch.arange(len(ids)) % 3 == 0

    def their_loss(embeds: Tensor) -> Tensor:
        token_embeds = theirs.get_input_embeddings()(torch.tensor(ids))
        inputs = torch.where(is_embedded[:, None], embeds, token_embeds)[None]
        return next_token_loss(theirs(inputs_embeds=inputs, use_cache=False).logits[0], ids)

    (expected,) = torch.autograd.grad(their_loss(x := embeds.clone().requires_grad_()), x)
    with TemporaryDirectory() as folder:
        model = saved(theirs, Path(folder))
    runner = make_runner(model, Limits(1, 64), mode="none")
    tokens = torch.where(is_embedded, weft.EMBEDDED, torch.tensor(ids)).tolist()

    def loss(embeds: Tensor) -> Tensor:
        batch = Batch.ragged([0], [tokens], inputs_embeds=embeds)
        batch = attrs.evolve(batch, targets=torch.tensor([*ids[1:], 0]))
        _, out = runner.step(runner.params, make_state(model, runner.layouts, [48]), batch)
        nll: Tensor = -out.prompt_logprobs[:-1].sum()
        return nll

    assert relative(torch.func.grad(loss)(embeds), expected) < TOLERANCE
    assert not expected[~is_embedded].any()
    loss(x := embeds.clone().requires_grad_()).backward()
    assert relative(x.grad, expected) < TOLERANCE


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_gradients_of_an_adapter_are_those_of_peft(name: str, tmp_path: Path) -> None:
    """Gradients of a LoRA of all linear layers, in the second slot of three; another request has no
    adapter."""
    architecture, fields = MODELS[name]
    base = build(architecture, {**SIZES, **fields})
    model = saved(base, tmp_path / "model")
    prompts = PROMPTS[:2]
    peft_model = get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules="all-linear")
    )
    lora_params = scrambled(
        nn.ParameterDict(
            {n.replace(".", "-"): p for n, p in peft_model.named_parameters() if "lora_" in n}
        )
    )
    peft_model.save_pretrained(tmp_path / "adapter")
    next_token_loss(
        peft_model(input_ids=torch.tensor([prompts[0]])).logits[0], prompts[0]
    ).backward()
    with torch.no_grad():
        for parameter in lora_params.values():
            parameter.copy_(parameter.grad)
    peft_model.save_pretrained(tmp_path / "gradients")

    runner = make_runner(model, Limits(2, 64), mode="none")
    other = random_adapter(
        model.config, ["model.layers.0.self_attn.q_proj"], rank=2, seed=0, std=0.3
    )
    adapter, slopes = (
        weft.load_adapter(model, tmp_path / folder) for folder in ("adapter", "gradients")
    )
    (params,) = stage_params(model, runner.layouts, [other, adapter])
    (expected_gradients,) = stage_params(model, runner.layouts, [other, slopes])

    def loss(layers: Any) -> Tensor:
        (state,) = make_state(model, runner.layouts, [48, 48])
        state = attrs.evolve(state, adapters=torch.tensor([1, -1, -1], dtype=torch.int32))
        [batch] = chunked(prompts, (64,), num_active_loras=1)
        _, out = runner.step((attrs.evolve(params, layers=layers),), (state,), batch)
        return loss_of(out, batch, prompts, {})

    for layer_gradients, theirs in zip(
        torch.func.grad(loss)(params.layers), expected_gradients.layers, strict=True
    ):
        for product in ("qkv", "o", "gate_up", "down"):
            mine = getattr(layer_gradients.lora, product)
            expected = getattr(theirs.lora, product)
            assert relative(mine.a[1], expected.a[1]) < TOLERANCE
            # Loaded with the scaling, 6 / 4, in it
            assert relative(mine.b[1], expected.b[1] / 1.5**2) < TOLERANCE
            assert not mine.a[0].any()
            assert not mine.b[0].any()


def test_gradients_reach_the_pages_that_a_step_reads(models: dict[str, tuple[Model, Any]]) -> None:
    """A decode step has gradients for earlier steps' keys and values, and so has its sampled
    token's logprob."""
    model, _ = models["llama"]
    runner = make_runner(model, Limits(1, 64), mode="none", keep_logits=True)
    (state,), _ = runner.step(
        runner.params, make_state(model, runner.layouts, [48]), Batch.ragged([0], [PROMPTS[0]])
    )
    pages = state.kv_pages.clone().requires_grad_()
    length = len(PROMPTS[0])
    (after,), out = runner.step(
        runner.params, (attrs.evolve(state, kv_pages=pages),), Batch.decode([0])
    )
    (slope,) = torch.autograd.grad(out.logprobs.sum(), pages, retain_graph=True)
    read = slope.flatten(2, 3).abs().sum((0, 1, 3, 4)) > 0
    assert read.tolist() == [i < length for i in range(read.numel())]
    (other,) = torch.autograd.grad(out.logits.log_softmax(-1)[0, out.token_ids[0]], pages)
    torch.testing.assert_close(slope, other)
    assert not torch.equal(after.kv_pages, pages)


def test_an_engine_keeps_no_record(models: dict[str, tuple[Model, Any]]) -> None:
    """Parameters in training can serve like any others: graphs replay, and nothing is kept for
    backward()."""
    model, _ = models["qwen3"]
    expected = generate(model, PROMPTS, max_tokens=4)
    trained = attrs.evolve(model, params=recorded(model.params))
    assert [c.token_ids for c in generate(trained, PROMPTS, max_tokens=4)] == [
        c.token_ids for c in expected
    ]
    engine = weft.Engine(trained, graph="full")
    engine.add(PROMPTS[0], max_tokens=4)
    list(engine)
    assert engine.graphs[0].cache_info().replays
    assert not any(x.requires_grad for x in tree_leaves(engine._executor.state))


def test_what_has_no_gradient_says_so(models: dict[str, tuple[Model, Any]]) -> None:
    """No gradients for a model in FP8, nor for one with a draft model, whose writes would be lost."""
    config = parse_config({**PRESETS["qwen3-30b-a3b-fp8"], **FP8}, source="a dict")
    (layout,) = split_layers(config.num_layers, 1)
    params = random_params(config, layout, seed=0, dtype=torch.float32)
    model = Model(config, params, None, Path(), layout=layout)
    runner = make_runner(model, Limits(1, 16), mode="none")

    def loss(embed_tokens: Tensor) -> Tensor:
        changed_params = (attrs.evolve(params, embed_tokens=embed_tokens),)
        logprobs: Tensor = runner.step(
            changed_params, make_state(model, runner.layouts, [16]), Batch.ragged([0], [[1, 2]])
        )[1].logprobs
        return logprobs.sum()

    with pytest.raises(
        DerivativeError, match="values that are rounded to FP8, and change in steps"
    ):
        torch.func.grad(loss)(params.embed_tokens)

    small, _ = models["llama"]
    (state,) = make_state(small, split_layers(3, 1), [48])
    pages = torch.zeros_like(state.kv_pages)
    state = attrs.evolve(state, drafting=Drafting.zeros(2, kv_pages=pages))
    with pytest.raises(DerivativeError) as caught:
        model_drafter(1, small.config)(
            recorded(small.params), state, Batch.decode([0], query_len=2)
        )
    assert (
        str(caught.value) == "a derivative, or a transform of torch.func\n"
        "  saw: a stage that drafts with a model\n"
        "  instead: the same without speculation, which samples the same"
    )
