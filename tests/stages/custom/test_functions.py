"""Custom stages in an engine: what transformers computes with hooks, and errors that name
what is wrong."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from weft.batches.batch import ResolvedBatch
from weft.batches.sampling import SamplingParams
from weft.errors import ProgramError
from weft.stages import StageFunctions
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.custom.functions import caching_policy
from weft.stages.custom.sown import sow
from weft.stages.decoder import attention, feed_forward, norm
from weft.stages.model import Model, model_facts
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.generate import generate
from weft.transforms.engine.options import Speculation
from weft.transforms.graphs.ladder import MODES
from weft.values.trees import tree_leaves

PROMPTS = ["The function returns", "A list is", "In Python, "]
STEERED = 1


@pytest.fixture(scope="module")
def model() -> Model:
    return load(DEMO, "cpu", "float32")


@pytest.fixture
def reference() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(Path(DEMO), dtype=torch.float32)


def said(reference: Any, model: Model, count: int = 24) -> list[list[int]]:
    """The greedy tokens of transformers."""
    token_ids = []
    for prompt in PROMPTS:
        ids = torch.tensor([model.encode(prompt)])
        out = reference.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
        token_ids.append(out[0, ids.shape[1] :].tolist())
    return token_ids


def tokens(model: Model, **options: Any) -> list[list[int]]:
    return [c.token_ids for c in generate(model, PROMPTS, max_tokens=24, **options)]


def ways() -> Iterator[dict[str, Any]]:
    """The ways to run a model: modes, splits, speculation."""
    for mode in MODES:
        yield {"graph": mode}
    for stages in (2, 3):
        yield {"pipeline": stages}
    yield {"speculation": Speculation(num_tokens=3)}


def plus(vector: Tensor) -> Callable[[Any], Any]:
    """The change of a layer that adds a vector to its result."""

    def change(layer: Any) -> Any:
        def run(
            params: Any, kv_pages: Tensor, batch: ResolvedBatch, tables: Any, hidden: Tensor
        ) -> Any:
            hidden, kv_pages = layer(params, kv_pages, batch, tables, hidden)
            return hidden + vector, kv_pages

        return run

    return change


def test_a_steered_layer_is_transformers_with_a_hook(model: Model, reference: Any) -> None:
    vector = torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    reference.model.layers[STEERED].register_forward_hook(
        lambda module, args, out: (
            (out[0] + vector, *out[1:]) if isinstance(out, tuple) else out + vector
        )
    )
    expected = said(reference, model)
    assert expected != tokens(model)
    steered = model.with_stages(layers={STEERED: plus(vector)})
    for way in ways():
        assert tokens(steered, **way) == expected, way


@pytest.mark.slow
def test_a_feed_forward_of_ones_own_is_transformers_with_a_hook(
    model: Model, reference: Any
) -> None:
    for layer in reference.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, out: 0.5 * out)

    def halved(config: Any, layer: Any, batch: ResolvedBatch, x: Any) -> Tensor:
        return 0.5 * feed_forward(config, layer, batch, x)

    expected = said(reference, model)
    halved_model = model.with_stages(feed_forward=halved)
    for way in ways():
        assert tokens(halved_model, **way) == expected, way


@pytest.mark.slow
def test_an_attention_of_ones_own_is_transformers_with_a_hook(model: Model, reference: Any) -> None:
    for layer in reference.model.layers:
        layer.self_attn.register_forward_hook(lambda module, args, out: (-out[0], *out[1:]))

    def negated(*args: Any) -> tuple[Tensor, Tensor]:
        added, pages = attention(*args)
        return -added, pages

    expected = said(reference, model)
    negated_model = model.with_stages(attention=negated)
    for way in ways():
        assert tokens(negated_model, **way) == expected, way


@pytest.mark.slow
def test_a_norm_of_ones_own_is_transformers_with_a_hook(model: Model, reference: Any) -> None:
    for layer in reference.model.layers:
        for part in (layer.input_layernorm, layer.post_attention_layernorm):
            part.register_forward_hook(lambda module, args, out: 2 * out)

    def doubled(*args: Any, quantized: bool) -> Any:
        normed, hidden = norm(*args, quantized=quantized)
        return attrs.evolve(normed, plain=2 * normed.plain), hidden

    expected = said(reference, model)
    doubled_model = model.with_stages(norm=doubled)
    for way in ways():
        assert tokens(doubled_model, **way) == expected, way


@pytest.mark.slow
def test_logits_of_ones_own(model: Model) -> None:
    """Logits of the opposite sign, and logprobs of the changed distribution, of the prompt too."""
    negated_model = model.with_stages(logits=lambda logits, rows, extras: -logits)
    params = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=0)
    for way in ways():
        options = {"speculation": None, **way}
        [changed] = generate(negated_model, PROMPTS[:1], max_tokens=4, sampling=params, **options)
        scores = -all_logits(model, [*model.encode(PROMPTS[0]), *changed.token_ids])
        first = len(model.encode(PROMPTS[0]))
        assert changed.token_ids == scores[first - 1 : -1].argmax(-1).tolist()
        expected = scores.log_softmax(-1).gather(
            1, torch.tensor([*model.encode(PROMPTS[0])[1:], *changed.token_ids])[:, None]
        )
        logprobs = [*(changed.prompt_logprobs or []), *changed.logprobs]
        torch.testing.assert_close(
            torch.tensor(logprobs), expected[: len(logprobs), 0], atol=1e-4, rtol=1e-4
        )


def all_logits(model: Model, ids: list[int]) -> Tensor:
    """transformers' logits after each token."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(Path(DEMO), dtype=torch.float32)
    with torch.no_grad():
        logits: Tensor = reference(torch.tensor([ids])).logits[0]
    return logits


def test_changes_follow_one_another(model: Model) -> None:
    ones = torch.ones(model.config.hidden_size)

    def doubled(layer: Any) -> Any:
        def run(
            params: Any, kv_pages: Tensor, batch: ResolvedBatch, tables: Any, hidden: Tensor
        ) -> Any:
            hidden, kv_pages = layer(params, kv_pages, batch, tables, hidden)
            return 2 * hidden, kv_pages

        return run

    both = model.with_stages(layers={0: plus(ones)}).with_stages(layers={0: doubled})
    at_once = model.with_stages(layers={0: lambda layer: doubled(plus(ones)(layer))})
    assert tokens(both) == tokens(at_once) != tokens(model.with_stages(layers={0: doubled}))


@pytest.mark.slow
def test_a_transformed_stage_runs_in_every_way(model: Model) -> None:
    """A transform of whole stages, which sees the state and the batch: here it changes nothing but
    a count."""
    descriptors = []

    def counted(stage: Any) -> Any:
        def run(params: Any, state: Any, batch: Any, x: Any) -> Any:
            descriptors.append(batch.descriptor)
            return stage(params, state, batch, x)

        return run

    counted_model = model.with_stages(counted)
    expected = tokens(model)
    for way in ways():
        descriptors.clear()
        assert tokens(counted_model, **way) == expected, way
        assert descriptors


@pytest.mark.slow
def test_a_stage_without_attention_is_one_piece(model: Model) -> None:
    def alone(layer: Any) -> Any:
        return lambda params, kv_pages, batch, tables, hidden: (
            hidden + torch.tanh(hidden),
            kv_pages,
        )

    count = model.config.num_layers
    half = model.with_stages(layers=dict.fromkeys(range(count // 2, count), alone))
    expected = tokens(half, graph="none")
    for mode in ("piecewise", "full_and_piecewise"):
        assert tokens(half, graph=mode, pipeline=2) == expected


def test_functions_print_as_what_they_are_and_name_their_policy() -> None:
    value = {"a": torch.zeros(2)}
    assert (
        str(StageFunctions(batch_invariant=True, reduction_leaves=4))
        == "batch invariant, 4 reduction leaves"
    )
    assert str(StageFunctions(extras=value)) == "extra a: [2] torch.float32"
    assert str(StageFunctions(carries=value)) == "carried a: [2] torch.float32"
    policies = [
        caching_policy(StageFunctions(**names))
        for names in ({}, {"captures": value}, {"carries": value})
    ]
    assert policies == ["full", "none", "none"]
    assert caching_policy(StageFunctions(captures=value, prefix_caching="recompute")) == "recompute"


def test_an_engine_of_a_model_with_own_stages_says_what_it_has(model: Model) -> None:
    steered_model = model.with_stages(layers={STEERED: plus(torch.zeros(model.config.hidden_size))})
    assert "layer 1=" in model_facts(steered_model)["stages"]
    assert model_facts(model)["stages"] == f"{StageFunctions()}" == "the decoder's own"
    engine = Engine(steered_model)
    engine.add(PROMPTS[0], max_tokens=3)
    assert sum(len(output.token_ids) for output in engine) == 3


def said_by(model: Model) -> list[list[int]]:
    return [c.token_ids for c in generate(model, PROMPTS, max_tokens=2)]


def sowing(model: Model) -> Model:
    return model.with_stages(logits=sowing_logits, captures={"a": torch.zeros(())})


def sowing_logits(logits: Tensor, rows: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
    sow("a", logits[:, 0])
    return logits


def test_an_error_says_in_which_function_it_was_raised(model: Model) -> None:
    def change(layer: Any) -> Any:
        return lambda params, pages, batch, *rest: (
            layer(params, pages, batch, *rest) + batch.extras["vctor"]
        )

    custom_model = model.with_stages(layers={1: change}, extras={"vector": torch.zeros(2)})
    with pytest.raises(KeyError, match="vctor") as caught:
        said_by(custom_model)
    assert "in layer 1 of with_stages(...); batch.extras has 'vector'" in caught.value.__notes__


READ: list[tuple[Callable[[Any], Any], str]] = [
    (
        lambda batch: batch.extras["a"],
        "; batch.extras has 'vector', batch.token_extras has 'patch'",
    ),
    (
        lambda batch: batch.token_extras["vector"],
        "; batch.extras has 'vector', batch.token_extras has 'patch'",
    ),
]


@pytest.mark.parametrize(("read", "hint"), READ)
def test_an_unknown_name_is_answered_with_the_known_ones(
    model: Model, read: Callable[[Any], Any], hint: str
) -> None:
    def reader(config: Any, layer: Any, batch: ResolvedBatch, x: Any) -> Any:
        return read(batch)

    zero = {"extras": {"vector": torch.zeros(2)}, "token_extras": {"patch": torch.zeros(2)}}
    with pytest.raises(KeyError) as caught:
        said_by(model.with_stages(feed_forward=reader, **zero))
    assert f"in feed_forward of with_stages(...){hint}" in caught.value.__notes__
    with pytest.raises(KeyError) as caught:
        said_by(model.with_stages(feed_forward=reader))
    none = (
        "batch.extras, batch.carried, batch.token_extras are empty: declare names with"
        " model.with_stages(...)"
    )
    assert f"in feed_forward of with_stages(...); {none}" in caught.value.__notes__
    with pytest.raises(KeyError) as caught:
        said_by(model.with_stages(logits=lambda logits, rows, extras: extras["vctor"], **zero))
    assert "in logits of with_stages(...); extras has 'vector'" in caught.value.__notes__


def test_tensors_that_require_grad_may_be_read(model: Model) -> None:
    """Nothing of the steps is recorded, and captured values need no detach()."""
    probe = torch.nn.Linear(model.config.hidden_size, 1)

    def change(layer: Any) -> Any:
        def run(*args: Any) -> Any:
            hidden, pages = layer(*args)
            sow("probe", probe(hidden)[:, 0])
            return hidden + 0.01 * probe(hidden), pages

        return run

    probed_model = model.with_stages(layers={1: change}, captures={"probe": torch.zeros(())})
    for graph, stages in (("none", 1), ("full", 1), ("full", 2)):
        engine = Engine(probed_model, graph=graph, pipeline=stages)
        engine.add(PROMPTS[0], max_tokens=4)
        outputs = [*engine]
        assert len(engine.graphs) == (0 if graph == "none" else stages)
        assert all(step.cache_info().replays for step in engine.graphs)
        assert not any(output.captured["probe"].requires_grad for output in outputs)
        assert not any(
            leaf.requires_grad
            for leaf in tree_leaves(engine._executor.state)
            if isinstance(leaf, Tensor)
        )


def halved(x: Any) -> Any:
    return x / 2


WRONG: list[tuple[Callable[[Model], Any], str]] = [
    (lambda model: model.with_stages(3), "transform"),
    (lambda model: model.with_stages(attention=3), "attention"),
    (lambda model: model.with_stages(layers=lambda layer: layer), "a dict from a layer's index"),
    (lambda model: model.with_stages(layers={99: lambda layer: layer}), "0 to 5, to a function"),
    (lambda model: model.with_stages(layers={6: lambda layer: layer}), "0 to 5, to a function"),
    (lambda model: model.with_stages(layers={0: 3}), "a dict from a layer's index"),
    (lambda model: model.with_stages(prefix_caching="all"), "prefix_caching"),
    (
        lambda model: said_by(
            model.with_stages(layers={1: plus(torch.zeros(1, dtype=torch.float64))})
        ),
        "layer 1 of with_stages.*\n.*float64",
    ),
    (
        lambda model: said_by(model.with_stages(layers={1: lambda layer: lambda *args: args[-1]})),
        "layer 1 of with_stages",
    ),
    (
        lambda model: said_by(model.with_stages(layers={1: lambda layer: None})),
        "layers={1: ...}.layer.",
    ),
    (
        lambda model: said_by(model.with_stages(feed_forward=lambda *args: args[-1].plain[:1])),
        "feed_forward of with",
    ),
    (
        lambda model: said_by(model.with_stages(feed_forward=lambda *args: args[-1])),
        "it returned a Normed",
    ),
    (
        lambda model: said_by(
            model.with_stages(logits=lambda logits, rows, extras: logits[:, :10])
        ),
        "logits of with",
    ),
    (lambda model: generate(sowing(model), PROMPTS, max_tokens=2, pipeline=2), "from logits"),
    (
        lambda model: said_by(model.with_stages(captures={"a": torch.zeros(())})),
        "no function that calls",
    ),
    (lambda model: said_by(model.with_stages(lambda stage: 3)), "a stage: a function"),
    (
        lambda model: said_by(model.with_stages(lambda stage: lambda x: x)),
        r"returned <lambda>\(x\)[\s\S]*a stage: a fun",
    ),
    (lambda model: model.with_stages(lambda: 3), "a function of a stage, which returns a stage"),
    (
        lambda model: model.with_stages(feed_forward=halved),
        (
            r"with feed_forward=halved\n  saw: halved\(x.*\n  instead: a function \(config, layer,"
            r" batch, x\) -> added"
        ),
    ),
    (
        lambda model: model.with_stages(feed_forward=torch.nn.Linear(2, 2)),
        r"Linear\(input: .*\n.*a function \(config, layer, batch, x\) -> added",
    ),
    (
        lambda model: model.with_stages(attention=halved),
        r"halved\(x.*\n.*\(config, layer, kv_pages, batch, tables, x\)",
    ),
    (
        lambda model: model.with_stages(attend=halved),
        r"halved\(x.*\n.*\(config, layer, q, kv_pages, batch\) -> mixed",
    ),
    (
        lambda model: model.with_stages(logits=halved),
        r"halved\(x.*\n.*\(logits, rows, extras\) -> logits",
    ),
    (
        lambda model: model.with_stages(norm=lambda weight, eps, added, hidden: None),
        r"\(weight, eps, added, hidden\)\n.*\(weight, eps, added, hidden, \*, quantized\)",
    ),
    (
        lambda model: model.with_stages(layers={2: lambda: None}),
        r"with layers\[2\]=.*\n.*\n.*a function \(layer\) -> layer",
    ),
    (
        lambda model: said_by(model.with_stages(layers={1: lambda layer: halved})),
        (
            r"it returned halved\(x.*\n.*a layer \(params, kv_pages, batch, tables, hidden\) ->"
            r" \(hidden, kv_pages\)"
        ),
    ),
    (
        lambda model: said_by(model.with_stages(lambda stage: lambda *args: args[1])),
        "it returned a State",
    ),
    (
        lambda model: said_by(
            model.with_stages(lambda stage: lambda *args: (None, stage(*args)[1]))
        ),
        "a state of another structure",
    ),
]


@pytest.mark.parametrize(("call", "text"), WRONG)
def test_a_wrong_stage_is_named(model: Model, call: Callable[[Model], Any], text: str) -> None:
    with pytest.raises(ProgramError, match=text) as caught:
        call(model)
    assert "instead" in str(caught.value)
