"""The page's recipe of a decoder and its cache, over architectures drawn from transformers' own
mapping: the logits of a graph are those of the module without one, or weft refuses it by name."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from pages import ROOT, blocks
from torch import Tensor, nn

from weft.errors import CaptureError, WeftError
from weft.stages.custom.module import from_module
from weft.transforms.graphs.graphify import graphify
from weft.values.donation import clone
from weft.values.objects import Snapshot

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
KINDS = sorted(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
# Parameters of the largest model that is built: some configurations name their sizes otherwise.
MOST = 2_000_000
LENGTH = 24


def recipe() -> type[nn.Module]:
    """The page's class, which returns logits."""
    page = ROOT / "proofs" / "pages" / "your_modules.md"
    code = next(block.code for block in blocks(page, "python") if "class Decoder" in block.code)
    definitions = code[: code.index("\nconfig = ")].replace(".argmax(-1)", "")
    names: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(compile(definitions, str(page), "exec"), names)
    decoder_class: type[nn.Module] = names["Decoder"]
    return decoder_class


def built(kind: str, **more: Any) -> Any:
    """A small random model; None if it is none with these sizes, or cannot run with the recipe's
    cache."""
    try:
        config = transformers.AutoConfig.for_model(kind, **SIZES, **more)
        with torch.device("meta"):
            shape = transformers.AutoModelForCausalLM.from_config(config)
        if sum(p.numel() for p in shape.parameters()) > MOST:
            return None
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        return recipe()(model, 1, LENGTH)
    except Exception:  # each architecture has its own reasons
        return None


def logits(decoder: nn.Module, graph: bool) -> Tensor:
    """The logits after a prompt, and after each of some tokens, beyond a window of 5."""
    module_stage = from_module(decoder)
    for name, tensor in module_stage.state.items():
        if name.startswith("cache."):
            tensor.zero_()
    step = graphify(module_stage.stage) if graph else module_stage.stage
    state = clone(module_stage.state)
    outputs = []
    for ids in ([[3, 4, 5, 6, 7, 8]], [[9]], [[10]], [[11]], [[12]]):
        state, out = step(module_stage.params, state, torch.tensor(ids), None)
        outputs.append(out)
    return torch.cat(outputs)


def outcome(kind: str, **more: Any) -> str:
    """`equal`, the name of weft's error, or `none`. Raises AssertionError for other logits."""
    if (eager := built(kind, **more)) is None:
        return "none"
    try:
        expected = logits(eager, graph=False)
    except WeftError as error:
        return type(error).__name__
    except Exception:  # transformers refuses this cache
        return "none"
    try:
        actual = logits(built(kind, **more), graph=True)
    except WeftError as error:
        return type(error).__name__
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    return "equal"


@settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(KINDS), st.sampled_from(({}, {"sliding_window": 5})))
def test_any_decoder_with_a_cache_is_itself_or_refused(kind: str, more: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assume(outcome(kind, **more) != "none")


@pytest.mark.one_of(4)
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 5}),
        (
            "gemma3_text",
            {
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"],
                "query_pre_attn_scalar": 8,
            },
        ),
        ("lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    ],
)
def test_these_are_equal(kind: str, more: dict[str, Any]) -> None:
    assert outcome(kind, **more) == "equal"


def test_a_cache_that_counts_in_python_is_refused_by_the_path_of_its_counter() -> None:
    """Without the layers that the recipe puts in its place: graphs of such a cache gave other
    logits."""

    class Plain(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model
            self.cache = transformers.StaticCache(model.config, max_cache_len=LENGTH)
            with torch.no_grad():
                model(torch.zeros(1, 2, dtype=torch.long), past_key_values=self.cache)

        def forward(self, ids: Tensor) -> Tensor:
            next_logits: Tensor = self.model(ids, past_key_values=self.cache).logits
            return next_logits

    config = transformers.MistralConfig(**SIZES, sliding_window=5)
    module_stage = from_module(
        Plain(transformers.MistralForCausalLM(config).eval().requires_grad_(False))
    )
    assert {"cache.layers[0].keys", "cache.layers[1].values"} <= module_stage.state.keys()
    with pytest.raises(CaptureError) as error:
        graphify(module_stage.stage)(
            module_stage.params, module_stage.state, torch.tensor([[3, 4]]), None
        )
    assert (
        error.value.problem
        == "cache.layers[0].cumulative_length_int of the module changes from 2 to 4 while it runs,"
        " and a replay does not repeat that"
    )
    assert (
        error.value.instead
        == "a tensor in its place, torch.tensor(2), which is then part of the state; if it is set"
        " only once, run the module before"
    )


class Counting(nn.Module):
    """A decoder with a cache of transformers as it is, whose layers with a window count tokens in
    Python."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = model.config
        self.model = model
        self.cache = transformers.StaticCache(config, max_cache_len=LENGTH)
        self.cache.early_initialization(
            1, config.num_key_value_heads, config.head_dim, model.dtype, model.device
        )

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, past_key_values=self.cache).logits[:, -1:]
        return logits


_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
# Architectures of `KINDS` with layers that count, and what their configurations need besides.
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "gemma3_text": {**_LAYERS, "query_pre_attn_scalar": 8},
    "gpt_oss": {**_LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo3": _LAYERS,
}


def counting(kind: str) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, **SIZES, **WINDOWS[kind], sliding_window=5)
    torch.manual_seed(0)
    return Counting(
        transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", WINDOWS)
def test_a_planted_counter_that_nobody_sees_gives_other_logits(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kind in KINDS, "it is drawn"
    expected = logits(counting(kind), graph=False)
    with pytest.raises(
        CaptureError, match=r"cumulative_length_int of the module changes from 0 to 6"
    ):
        logits(counting(kind), graph=True)
    monkeypatch.setattr(Snapshot, "changes", lambda self, state=frozenset(): iter(()))
    difference = logits(counting(kind), graph=True) - expected
    assert float(difference.abs().max()) > 1e-3 * float(expected.abs().max())
