"""Other libraries' modules through graphify: results are equal, and host reads are refused with a
workaround."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from graphified import LAW, agree, counts, refusal
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
    ViTConfig,
    ViTModel,
)
from transformers.cache_utils import StaticLayer

from weft.proofs import assert_equal
from weft.torchapi.patches import signal_capture
from weft.transforms.graphs.graphify import graphify

PLACES = [("sdpa", "cpu"), ("eager", "cpu"), pytest.param("sdpa", "cuda", marks=pytest.mark.gpu)]
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
DECODERS: dict[str, Callable[..., nn.Module]] = {
    "Llama": lambda **k: LlamaForCausalLM(LlamaConfig(**GROUPED, **k)),
    "Qwen2": lambda **k: Qwen2ForCausalLM(Qwen2Config(**GROUPED, **k)),
    "Qwen3": lambda **k: Qwen3ForCausalLM(Qwen3Config(**GROUPED, **k)),
    "Mistral": lambda **k: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=6, **k)),
    "Mixtral": lambda **k: MixtralForCausalLM(MixtralConfig(**EXPERTS, **k)),
    "Gemma": lambda **k: GemmaForCausalLM(GemmaConfig(**GROUPED, **k)),
    "GPT-2": lambda **k: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=61,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
            **k,
        )
    ),
}
every_decoder = pytest.mark.parametrize("name", DECODERS)
every_attention = pytest.mark.parametrize("attention", ["sdpa", "eager"])
everywhere = pytest.mark.parametrize(("attention", "device"), PLACES)


def decoder(name: str, attention: str, device: str) -> Any:
    torch.manual_seed(0)
    model = DECODERS[name](attn_implementation=attention).eval().requires_grad_(False).to(device)
    if name == "Mixtral" and device == "cuda":
        model.set_experts_implementation("batched_mm")
    return model


def tokens(seed: int, length: int, device: str) -> Tensor:
    return torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(seed)).to(
        device
    )


def assert_alike(result: Tensor, fn: Callable[[], Tensor]) -> None:
    """Bitwise equal to the function when it makes the same mask as in a capture. Nearly equal when
    it leaves the mask to the attention kernel, which then sums in another order."""
    with signal_capture():
        assert_equal(LAW, result, fn())
    torch.testing.assert_close(result, fn(), rtol=1e-4, atol=1e-5)


@pytest.mark.one_of(3)
@everywhere
@every_decoder
def test_a_decoder_is_itself(name: str, attention: str, device: str) -> None:
    model = decoder(name, attention, device)

    def logits(ids: Tensor) -> Tensor:
        output: Tensor = model(input_ids=ids, use_cache=False).logits
        return output

    g = graphify(logits)
    for seed in range(3):
        ids = tokens(seed, 9, device)
        assert_alike(g(ids), lambda ids=ids: logits(ids))
    assert counts(g) == (1, 3, 0)


@pytest.mark.one_of(3)
@everywhere
@every_decoder
def test_a_decoder_is_itself_under_any_mask(name: str, attention: str, device: str) -> None:
    """An eager call leaves out a mask of ones, which depends on data; one graph is right for all
    masks."""
    model = decoder(name, attention, device)

    def logits(ids: Tensor, mask: Tensor) -> Tensor:
        output: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return output * mask[..., None]  # padding may hold anything

    g = graphify(logits)
    for seed, padding in enumerate((0, 3, 0, 1)):
        ids, mask = tokens(seed, 9, device), torch.ones(2, 9, dtype=torch.long, device=device)
        mask[0, :padding] = 0
        assert_alike(g(ids, mask), lambda ids=ids, mask=mask: logits(ids, mask))
    assert counts(g) == (1, 4, 0)


def static_cache(model: Any) -> Any:
    """A cache whose layers count in tensors alone: layers with a sliding window count in Python,
    which is frozen."""
    cache = StaticCache(config=model.config, max_cache_len=16)
    cache.layers = [StaticLayer(max_cache_len=16) for _ in cache.layers]
    return cache


def tensors(cache: Any) -> list[tuple[Tensor, ...]]:
    return [(layer.keys, layer.values, layer.cumulative_length) for layer in cache.layers]


@pytest.mark.one_of(3)
@everywhere
@every_decoder
def test_decode_steps_over_a_static_cache_are_themselves(
    name: str, attention: str, device: str
) -> None:
    model = decoder(name, attention, device)
    eager_cache = StaticCache(config=model.config, max_cache_len=16)
    cache = static_cache(model)

    def step(
        state: list[tuple[Tensor, ...]], ids: Tensor
    ) -> tuple[list[tuple[Tensor, ...]], Tensor]:
        for layer, (keys, values, length) in zip(cache.layers, state, strict=True):
            layer.keys = keys
            layer.values = values
            layer.cumulative_length = length
        return state, model(input_ids=ids, past_key_values=cache).logits

    prompt = tokens(0, 5, device)
    for either in (eager_cache, cache):
        model(prompt, past_key_values=either)
    g = graphify(step, donate_argnames="state")
    state = tensors(cache)
    for seed in range(1, 9):
        ids = tokens(seed, 1, device)
        state, logits = g(state, ids)
        torch.testing.assert_close(
            logits, model(ids, past_key_values=eager_cache).logits, rtol=1e-4, atol=1e-5
        )
    assert counts(g) == (1, 8, 0)
    assert [int(length) for _, _, length in state] == [13, 13]
    again = static_cache(model)
    model(prompt, past_key_values=again)
    with signal_capture():
        *_, last = [
            model(tokens(seed, 1, device), past_key_values=again).logits for seed in range(1, 9)
        ]
    assert_equal(LAW, (logits, state), (last, tensors(again)))


def test_a_cache_that_is_closed_over_is_to_be_passed_in() -> None:
    model = decoder("Llama", "sdpa", "cpu")
    cache = static_cache(model)
    model(tokens(0, 5, "cpu"), past_key_values=cache)
    said = refusal(lambda ids: model(ids, past_key_values=cache).logits, tokens(1, 1, "cpu"))
    assert "writes to a tensor from outside it of shape ()" in said
    assert (
        "pass it in (a module's: weft.stages.from_module) and donate the argument"
        " (donate_argnames=...)" in said
    )


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_experts_that_no_host_chooses_are_captured(experts: str) -> None:
    model = decoder("Mixtral", "sdpa", "cpu")
    model.set_experts_implementation(experts)
    agree(
        lambda ids: model(input_ids=ids, use_cache=False).logits,
        *((tokens(seed, 9, "cpu"),) for seed in range(3)),
    )


def test_experts_in_a_loop_over_data_name_the_other_way() -> None:
    model = decoder("Mixtral", "sdpa", "cpu")
    model.set_experts_implementation("eager")
    said = refusal(lambda ids: model(input_ids=ids, use_cache=False).logits, tokens(0, 9, "cpu"))
    assert "modeling_mixtral.py" in said
    assert (
        "instead: model.set_experts_implementation('grouped_mm'): 'eager' reads on the host which"
        " tokens" in said
    )


@pytest.mark.gpu
def test_experts_that_wait_for_the_device_name_the_other_way() -> None:
    """In float32, torch multiplies groups of rows whose numbers the host reads."""
    model = decoder("Mixtral", "sdpa", "cuda")
    model.set_experts_implementation("grouped_mm")
    said = refusal(lambda ids: model(input_ids=ids, use_cache=False).logits, tokens(0, 9, "cuda"))
    assert "saw: CUDA refused: " in said
    assert "moe.py" in said
    assert "instead: model.set_experts_implementation('batched_mm')" in said


IMAGES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
ENCODERS: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Tensor, ...]]]] = {
    "BERT": (
        lambda **k: BertModel(BertConfig(**SIZES, **k)),
        lambda seed: (tokens(seed, 9, "cpu"),),
    ),
    "BERT, padded": (
        lambda **k: BertModel(BertConfig(**SIZES, **k)),
        lambda seed: (
            tokens(seed, 9, "cpu"),
            (torch.arange(9) < 9 - torch.tensor([[0], [seed]])).long(),
        ),
    ),
    "ViT": (
        lambda **k: ViTModel(ViTConfig(**IMAGES, image_size=16, patch_size=4, **k)),
        lambda seed: (torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed)),),
    ),
}


@every_attention
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_is_itself(name: str, attention: str) -> None:
    make, arguments = ENCODERS[name]
    model = make(attn_implementation=attention).eval().requires_grad_(False)
    g = graphify(lambda *args: model(*args).last_hidden_state)
    for seed in range(3):
        args = arguments(seed)
        assert_alike(g(*args), lambda args=args: model(*args).last_hidden_state)
    assert counts(g) == (1, 3, 0)


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
OF_TORCH: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "an encoder": (nn.TransformerEncoder(layer(), 2), {}),
    "a causal encoder": (nn.TransformerEncoder(layer(), 2), {"mask": CAUSAL, "is_causal": True}),
    "a padded encoder": (nn.TransformerEncoder(layer(), 2), {"src_key_padding_mask": PADDING}),
    "LSTM": (nn.LSTM(16, 8, 2, batch_first=True), {}),
    "GRU, both ways": (nn.GRU(16, 8, batch_first=True, bidirectional=True), {}),
    "batch norm": (nn.Sequential(nn.Conv1d(5, 4, 3), nn.BatchNorm1d(4)), {}),
}


@contextlib.contextmanager
def no_fast_path() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("name", OF_TORCH)
def test_a_module_of_torch_is_itself(name: str) -> None:
    module, options = OF_TORCH[name]
    module.eval()
    inputs = [
        torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)
    ]
    with no_fast_path(), torch.no_grad():
        assert counts(agree(lambda x: module(x, **options), *((x,) for x in inputs))) == (1, 3, 0)


def test_attention_of_torch_is_itself() -> None:
    module = nn.MultiheadAttention(16, 2, batch_first=True).eval().requires_grad_(False)
    with no_fast_path():
        agree(
            lambda x: module(x, x, x, key_padding_mask=PADDING),
            (torch.randn(2, 5, 16),),
            (torch.ones(2, 5, 16),),
        )


def test_a_mask_that_torch_compares_is_to_be_said_to_be_causal() -> None:
    encoder = nn.TransformerEncoder(layer(), 2).requires_grad_(False)
    said = refusal(lambda x: encoder(x, mask=CAUSAL), torch.randn(2, 5, 16))
    assert "a branch on a tensor's value" in said
    assert "instead: is_causal=True or False with the mask (tgt_is_causal=... in a decoder)" in said


# The modules' questions about captures, and the answers


def is_capturing() -> bool:
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # a torch without CUDA
        return False


def test_code_that_asks_is_told_of_a_capture_in_its_thread_alone() -> None:
    told: list[Any] = []

    def elsewhere() -> None:
        told.append(is_capturing())

    def asks(x: Tensor) -> Tensor:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        told.append((is_capturing(), torch.compiler.is_compiling()))
        return x * 2

    g = graphify(asks)
    g(torch.ones(2))
    assert told == [False, (False, False), False, (True, False)]  # a warm-up, and a capture
    told.clear()
    g.lower(torch.ones(2))
    assert told == [False, (True, False)]
    told.clear()
    asks(torch.ones(2))
    assert told == [False, (False, False)]


def test_a_read_that_is_left_out_of_captures_is_no_reason_to_refuse() -> None:
    runs: list[bool] = []

    def masked(x: Tensor, mask: Tensor) -> Tensor:
        runs.append(is_capturing())
        return x if not is_capturing() and bool(mask.all()) else x * mask

    g = graphify(masked)
    for mask in (torch.ones(3), torch.tensor([1.0, 0.0, 1.0])):
        assert_equal(LAW, g(torch.arange(3.0), mask), masked(torch.arange(3.0), mask))
    assert counts(g) == (1, 2, 0)
    # A refused warm-up, one as in the capture, and the capture
    assert runs[:3] == [
        False,
        True,
        True,
    ]


def test_what_may_not_be_made_in_a_capture_is_made_before() -> None:
    cache: dict[str, Tensor] = {}

    def scaled(x: Tensor) -> Tensor:
        if "table" not in cache:
            assert not is_capturing(), "make it before"
            cache["table"] = torch.full((2,), 3.0)
        return x * cache["table"]

    assert counts(agree(scaled, (torch.ones(2),), (torch.zeros(2),))) == (1, 2, 0)


def test_a_state_is_as_it_was_after_a_warm_up_that_was_refused() -> None:
    def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        state.add_(x)
        if not is_capturing() and float(state.sum()) > 100:
            state.zero_()
        return state, state * 2

    state, out = graphify(step, donate_argnames="state")(torch.zeros(2), torch.ones(2))
    assert_equal(LAW, (state, out), (torch.ones(2), torch.full((2,), 2.0)))
