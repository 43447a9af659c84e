"""`weft.stages.attention.rope` against transformers' own rotary embeddings."""

import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import assume, example, given, settings, strategies as st
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, Qwen2VLTextConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from weft.arguments.json_text import Fields
from weft.errors import ConfigError
from weft.ops.rotary import rotate_and_keep
from weft.stages.attention.rope import (
    Rope,
    inverse_frequencies,
    parse_rope,
    rope_tables,
    unknown_rope_keys,
)

MODULES = [
    (LlamaConfig, LlamaRotaryEmbedding),
    (Qwen2Config, Qwen2RotaryEmbedding),
    (Qwen3Config, Qwen3RotaryEmbedding),
]
HEAD_DIMS = st.sampled_from([2, 4, 8, 10, 64, 80, 128])
THETAS = st.one_of(st.sampled_from([10_000, 500_000.0, 1_000_000]), st.floats(2.0, 1e7))
FACTORS = st.one_of(st.sampled_from([1.0, 2, 4.0, 32.0]), st.floats(1.0, 64.0))
LENGTHS = st.sampled_from([64, 2048, 8192, 32_768])


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries `[T, H, D]` rotated by the operator, with keys and values that are not kept."""
    tokens, heads, dim = x.shape
    qkv = torch.cat((x.flatten(1), x.new_zeros(tokens, 2 * dim)), 1)
    nowhere = torch.full((tokens,), -1)
    pages = x.new_zeros(2, 1, 1, 1, dim)
    starts = heads * dim, heads * dim + dim
    return rotate_and_keep(qkv, None, None, 1.0, cos, sin, nowhere, pages, heads, starts)[0]


def parse(raw: dict[str, Any]) -> Rope:
    return parse_rope(Fields(raw, "load_config('m')", "config.json"), Rope())


@st.composite
def rope_parameters(draw: st.DrawFn) -> dict[str, Any]:
    """A `rope_parameters` object as transformers 5 writes it, of any kind that weft supports."""
    kind = draw(st.sampled_from(["default", "linear", "llama3", "yarn"]))
    raw: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(THETAS)}
    if kind != "default":
        raw["factor"] = draw(FACTORS)
    if kind == "llama3":
        low = draw(st.floats(0.5, 4.0))
        raw |= {"low_freq_factor": low, "high_freq_factor": low + draw(st.floats(0.5, 8.0))}
    if kind == "yarn":
        optional = {
            "attention_factor": st.floats(0.1, 2.0),
            "beta_fast": st.floats(8.0, 64.0),
            "beta_slow": st.floats(0.25, 4.0),
            "mscale": st.floats(0.1, 2.0),
            "mscale_all_dim": st.floats(0.1, 2.0),
            "truncate": st.booleans(),
        }
        raw |= draw(st.fixed_dictionaries({}, optional=optional))
    if kind in ("llama3", "yarn") and draw(st.booleans()):
        raw["original_max_position_embeddings"] = draw(LENGTHS)
    return raw


def in_transformers(config_class: type, raw: dict[str, Any], head_dim: int, length: int) -> Any:
    sizes = {
        "hidden_size": 2 * head_dim,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
    }
    return config_class(**sizes, max_position_embeddings=length, rope_parameters=dict(raw))


@pytest.mark.parametrize(("config_class", "module_class"), MODULES)
@given(raw=rope_parameters(), head_dim=HEAD_DIMS, length=LENGTHS)
@settings(max_examples=120, deadline=None)
def test_frequencies_are_those_of_transformers(
    config_class: type, module_class: type, raw: dict[str, Any], head_dim: int, length: int
) -> None:
    config = in_transformers(config_class, raw, head_dim, length)
    theirs = module_class(config)
    inv_freq, attention_factor = inverse_frequencies(
        parse({"rope_parameters": raw}), head_dim, length
    )
    assert inv_freq.dtype == torch.float32
    assert inv_freq.shape == (head_dim // 2,)
    torch.testing.assert_close(inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    assert attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize(
    ("raw", "head_dim", "length"),
    [
        # Llama 3.2 1B, and Qwen3 stretched as its card says.
        (
            {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            64,
            131_072,
        ),
        (
            {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32_768,
            },
            128,
            131_072,
        ),
        # A null factor is the ratio of the two lengths.
        (
            {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": None,
                "original_max_position_embeddings": 2048,
            },
            64,
            8192,
        ),
        ({"rope_type": "linear", "rope_theta": 10_000, "factor": 2.0}, 128, 4096),
    ],
)
def test_released_models_to_the_last_bit(raw: dict[str, Any], head_dim: int, length: int) -> None:
    config = in_transformers(LlamaConfig, raw, head_dim, length)
    expected, expected_factor = ROPE_INIT_FUNCTIONS[raw["rope_type"]](config)
    inv_freq, attention_factor = inverse_frequencies(
        parse({"rope_parameters": raw}), head_dim, length
    )
    assert torch.equal(inv_freq, expected)
    assert attention_factor == expected_factor


@given(raw=rope_parameters(), old_type=st.booleans(), outer_length=st.booleans())
@settings(max_examples=100, deadline=None)
def test_old_and_new_style_say_the_same(
    raw: dict[str, Any], old_type: bool, outer_length: bool
) -> None:
    scaling = {name: value for name, value in raw.items() if name != "rope_theta"}
    if old_type:
        scaling["type"] = scaling.pop("rope_type")
    old: dict[str, Any] = {"rope_theta": raw["rope_theta"], "rope_scaling": scaling}
    if outer_length and "original_max_position_embeddings" in scaling:
        old["original_max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
    assert parse(old) == parse({"rope_parameters": raw})


def test_missing_means_no_scaling() -> None:
    assert parse({}) == parse({"rope_scaling": None}) == Rope(theta=10_000.0, kind="default")
    assert parse({"rope_theta": 5e5, "rope_scaling": None}) == Rope(theta=5e5)


POSITIONS = st.lists(st.integers(0, 40_000), min_size=1, max_size=20)


@given(
    raw=rope_parameters(),
    positions=POSITIONS,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@example(raw={"rope_type": "default", "rope_theta": 1e4}, positions=[0], dtype=torch.float32)
@settings(max_examples=80, deadline=None)
def test_tables_and_rotation_are_those_of_transformers(
    raw: dict[str, Any], positions: list[int], dtype: torch.dtype
) -> None:
    head_dim = 16
    heads = 3
    module = LlamaRotaryEmbedding(in_transformers(LlamaConfig, raw, head_dim, 4096))
    x = torch.randn(
        len(positions), heads, head_dim, generator=torch.Generator().manual_seed(len(positions))
    ).to(dtype)
    where = torch.tensor(positions)
    their_cos, their_sin = module(x, where[None])
    expected, _ = apply_rotary_pos_emb(x[None], x[None], their_cos, their_sin, unsqueeze_dim=2)
    # Their own frequencies, so that a difference in the last bit of one is not taken for one in the
    # tables.
    cos, sin = rope_tables(module.inv_freq, where, module.attention_scaling, dtype)
    assert cos.dtype == sin.dtype == dtype
    assert torch.equal(torch.cat((cos, cos), dim=-1), their_cos[0])
    assert torch.equal(torch.cat((sin, sin), dim=-1), their_sin[0])
    # weft rounds once, transformers after each product and sum.
    assert torch.allclose(
        rotated(x, cos, sin), expected[0], rtol=0, atol=8 * torch.finfo(dtype).eps
    )


@given(position=st.integers(0, 10_000), shift=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_scores_depend_on_the_distance_alone(position: int, shift: int) -> None:
    inv_freq, factor = inverse_frequencies(Rope(), 32, 2048)
    x = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(0))

    def score(first: int) -> float:
        cos, sin = rope_tables(inv_freq, torch.tensor([first, first + 7]), factor, torch.float32)
        query, key = rotated(x, cos, sin)[:, 0]
        return float(query @ key)

    assert score(position) == pytest.approx(score(position + shift), abs=2e-2)


YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("raw", "problem", "instead"),
    [
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "config.json has rope_scaling.type='dynamic'",
            "weft supports the rope types default, linear, llama3, yarn, mrope",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "config.json has rope_parameters.rope_type='longrope'",
            "weft supports the rope types default, linear, llama3, yarn, mrope",
        ),
        (
            {"rope_scaling": {**YARN, "low_freq_factor": 1.0}},
            "config.json has rope_scaling.low_freq_factor=1.0",
            "rope type 'yarn' takes attention_factor, beta_fast",
        ),
        (
            {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24]}},
            "config.json has rope_scaling.mrope_section=[16, 24]",
            "mrope_section is three whole numbers: pairs for time, height and width",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24.0, 24]}},
            "config.json has rope_parameters.mrope_section=[16, 24.0, 24]",
            "mrope_section is three whole numbers",
        ),
        (
            {"rope_scaling": {"type": "mrope"}},
            "config.json has no rope_scaling.mrope_section",
            "add mrope_section to rope_scaling: rope type 'mrope' needs it",
        ),
        (
            {"rope_scaling": {"type": "mrope", "rope_type": "yarn", "mrope_section": [16, 24, 24]}},
            "config.json has rope_scaling.rope_type='yarn' and rope_scaling.type='mrope'",
            "keep rope_type alone",
        ),
        (
            {"rope_scaling": {"type": "default", "mrope_interleaved": True}},
            "config.json has rope_scaling.mrope_interleaved=True",
            "weft has the sections of mrope_section one after the other",
        ),
        (
            {"rope_scaling": {"factor": 2.0}},
            "config.json has rope_scaling.factor=2.0",
            "rope type 'default' takes",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            "config.json has no rope_scaling.factor",
            "add factor to rope_scaling: rope type 'linear' needs it",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            "config.json has no rope_parameters.high_freq_factor",
            "add high_freq_factor to rope_parameters: rope type 'llama3' needs it",
        ),
        (
            {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
            (
                "config.json has rope_scaling.low_freq_factor=1.0 and"
                " rope_scaling.high_freq_factor=1.0"
            ),
            "low_freq_factor is less than high_freq_factor",
        ),
        (
            {"rope_scaling": {**YARN, "beta_fast": 0.5}},
            "config.json has rope_scaling.beta_slow=1.0 and rope_scaling.beta_fast=0.5",
            "beta_slow is less than beta_fast",
        ),
        (
            {"rope_scaling": {**YARN, "factor": "4"}},
            "config.json has rope_scaling.factor='4'",
            "factor is a finite number greater than 0",
        ),
        (
            {"rope_scaling": {**YARN, "factor": math.inf}},
            "config.json has rope_scaling.factor=inf",
            "factor is a finite number greater than 0",
        ),
        (
            {"rope_scaling": {**YARN, "truncate": None}},
            "config.json has rope_scaling.truncate=None",
            "truncate is true or false",
        ),
        (
            {"rope_scaling": {**YARN, "original_max_position_embeddings": 2048.0}},
            "config.json has rope_scaling.original_max_position_embeddings=2048.0",
            "original_max_position_embeddings is a whole number, 1 or more",
        ),
        (
            {"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}},
            "config.json has rope_scaling.partial_rotary_factor=0.5",
            "weft rotates whole heads",
        ),
        (
            {"rope_scaling": "yarn"},
            "config.json has rope_scaling='yarn'",
            "rope_scaling is an object, or null",
        ),
        (
            {"rope_theta": 0},
            "config.json has rope_theta=0",
            "rope_theta is a finite number greater than 0",
        ),
        ({"rope_theta": 1.0}, "config.json has rope_theta=1.0", "rope_theta is greater than 1"),
        (
            {"rope_theta": True},
            "config.json has rope_theta=True",
            "rope_theta is a finite number greater than 0",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            "config.json has rope_theta=10000.0 and rope_parameters.rope_theta=500000.0",
            "write rope_theta in one place, or the same value in both",
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
            "config.json has rope_scaling.rope_type='yarn' and rope_scaling.type='linear'",
            "keep rope_type alone",
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}},
            "config.json has rope_parameters={'rope_type': 'default'} and rope_scaling=",
            "say it once: rope_parameters, or rope_scaling beside rope_theta",
        ),
    ],
)
def test_what_is_refused(raw: dict[str, Any], problem: str, instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(raw)
    assert caught.value.call == "load_config('m')"
    assert caught.value.problem.startswith(problem)
    assert caught.value.instead.startswith(instead)


@given(raw=rope_parameters(), name=st.text(min_size=1, max_size=12))
@settings(max_examples=50, deadline=None)
def test_no_key_is_overlooked(raw: dict[str, Any], name: str) -> None:
    assume(name not in raw and name != "type")
    fields = Fields({"rope_scaling": {**raw, name: 1.5}}, "load_config('m')", "config.json")
    assert unknown_rope_keys(fields) == {f"rope_scaling.{name}": 1.5}
    assert parse({**fields.raw}) == parse({"rope_scaling": raw})


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        {
            "rope_theta": 1e6,
            "rope_scaling": {
                "rope_type": "default",
                "type": "default",
                "mrope_section": [16, 24, 24],
            },
        },
        {
            "rope_parameters": {
                "rope_type": "default",
                "type": "mrope",
                "rope_theta": 1e6,
                "mrope_section": [16, 24, 24],
            }
        },
    ],
)
def test_mrope_is_read_in_each_style(raw: dict[str, Any]) -> None:
    assert parse(raw) == Rope(theta=1e6, mrope_section=(16, 24, 24))


def test_mrope_stretches_as_the_others_do() -> None:
    raw = {**YARN, "original_max_position_embeddings": 32, "mrope_section": [1, 1, 2]}
    assert parse({"rope_scaling": raw}) == attrs.evolve(
        parse(
            {
                "rope_scaling": {
                    name: value for name, value in raw.items() if name != "mrope_section"
                }
            }
        ),
        mrope_section=(1, 1, 2),
    )


@given(st.lists(st.tuples(*[st.integers(0, 10_000)] * 3), min_size=1, max_size=9))
@settings(max_examples=50, deadline=None)
def test_each_pair_turns_with_its_own_position(rows: list[tuple[int, int, int]]) -> None:
    """The same as transformers' Qwen2VLRotaryEmbedding; three equal positions give bitwise what one
    gives."""
    inv_freq, _ = inverse_frequencies(Rope(), 16, 4096)
    config = Qwen2VLTextConfig(
        hidden_size=32,
        num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    )
    positions = torch.tensor(rows)
    cos, sin = rope_tables(inv_freq, positions, 1.0, torch.float32, (2, 3, 3))
    theirs = Qwen2VLRotaryEmbedding(config)(torch.zeros(1), positions.T[:, None])
    assert torch.equal(cos, theirs[0][0, :, :8])
    assert torch.equal(sin, theirs[1][0, :, :8])
    equal = rope_tables(inv_freq, positions[:, :1].repeat(1, 3), 1.0, torch.float32, (2, 3, 3))
    plain = rope_tables(inv_freq, positions[:, 0], 1.0, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(equal, plain, strict=True))
