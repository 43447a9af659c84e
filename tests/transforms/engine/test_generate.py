"""`weft.generate` on the CPU: equal to transformers in any split and mode."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import pytest
import torch
from completing import (
    PIPELINES,
    SIZES,
    TOLERANCE,
    Case,
    Expected,
    assert_equal_to_theirs,
    complete,
    complete_theirs,
)
from hypothesis import assume, given, settings, strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import weft
from weft.ops.requests import LAST_TOKEN
from weft.proofs._strategies.models import ARCHITECTURES, ROPES, moe_fields, window_fields
from weft.stages.checkpoints.known_models import DEMO
from weft.transforms.graphs.ladder import MODES


@st.composite
def cases(draw: st.DrawFn, architecture: str) -> Case:
    """Any small model of the architecture, and prompts whose ends lie around the borders of pages
    (of 16 tokens)."""
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    group = draw(st.sampled_from((1, 2, 4)))
    head_dim = draw(st.sampled_from((2, 4, 6, 8, 10, 14)))
    vocab_size = draw(st.sampled_from((7, 32, 65)))
    token = st.integers(0, vocab_size - 1)
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": kv_heads * group * head_dim,
        "intermediate_size": draw(st.sampled_from((8, 20))),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 64,
        "rms_norm_eps": draw(st.sampled_from((1e-6, 1e-5, 1e-2))),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": draw(st.sampled_from(ROPES)),
        "eos_token_id": draw(st.one_of(st.none(), token, st.lists(token, min_size=1, max_size=6))),
        "bos_token_id": None,
    }
    if architecture not in ("Qwen2ForCausalLM", "MistralForCausalLM"):
        fields["attention_bias"] = draw(st.booleans())
    if architecture == "LlamaForCausalLM":
        fields["mlp_bias"] = draw(st.booleans())
    else:
        fields |= draw(window_fields(architecture, fields["num_hidden_layers"]))
    if architecture == "Qwen3MoeForCausalLM":
        fields |= draw(moe_fields(fields["num_hidden_layers"]))
    if architecture.startswith("Qwen3"):  # its heads need not fill the hidden size
        fields |= {"head_dim": head_dim, "hidden_size": draw(st.sampled_from((8, 12, 20)))}
    length = st.one_of(st.integers(1, 4), st.integers(11, 17), st.integers(27, 34))
    return Case(
        architecture,
        fields,
        draw(st.integers(0, 2**20)),
        draw(st.lists(length, min_size=1, max_size=4)),
        budget=draw(st.sampled_from((2048, 2048, 21))),
        shift=draw(st.sampled_from(range(len(MODES)))),
        sharded=draw(st.booleans()),
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@given(data=st.data())
@settings(max_examples=26)
def test_any_configuration_is_equal_to_transformers(architecture: str, data: st.DataObject) -> None:
    """A random model, saved and loaded: logits, greedy tokens, logprobs, finish reasons, one mode
    per pipeline size.

    Where transformers' own two best logits lie within twice the tolerance, either may win by right:
    such an example is given up (`assume`), so what this says holds for arg maxes that are no near
    ties.
    """
    case = data.draw(cases(architecture))
    model = case.build()
    expected = complete_theirs(model, case.prompts(), case.max_tokens)
    assume(all(one.gap > 2 * TOLERANCE for one in expected))
    with TemporaryDirectory() as folder:
        case.save(model, folder)
        loaded = weft.load(folder, "cpu")
    for pipeline in PIPELINES[: case.fields["num_hidden_layers"]]:
        options = {"pipeline": pipeline, "graph": MODES[(pipeline + case.shift) % len(MODES)]}
        result = complete(
            loaded, case.prompts(), budget=case.budget, max_tokens=case.max_tokens, **options
        )
        assert_equal_to_theirs(result, expected)


EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "mlp_only_layers": [1],
}
DEFAULT, LINEAR, LLAMA3, YARN = ROPES
LENGTHS = [30, 14, 1, 17]
CHOSEN = [
    Case(
        "LlamaForCausalLM", {**SIZES, "attention_bias": True, "rope_parameters": LLAMA3}, 2, LENGTHS
    ),
    Case(
        "Qwen2ForCausalLM",
        {**SIZES, "tie_word_embeddings": True, "rope_parameters": YARN},
        9,
        LENGTHS,
        sharded=True,
    ),
    Case("Qwen3ForCausalLM", {**SIZES, "head_dim": 10, "rope_parameters": LINEAR}, 22, LENGTHS),
    Case(
        "Qwen3MoeForCausalLM",
        {**SIZES, **EXPERTS, "head_dim": 8, "norm_topk_prob": True},
        3,
        LENGTHS,
    ),
    Case("MistralForCausalLM", {**SIZES, "sliding_window": 7}, 4, LENGTHS),
]


@attrs.frozen(eq=False)
class Pair:
    """A case's model in both libraries, and transformers' completions of its prompts."""

    case: Case
    theirs: Any
    ours: weft.Model
    expected: list[Expected]


@pytest.fixture(scope="module", params=CHOSEN, ids=lambda case: str(case.architecture))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model with an end-of-sequence token that it generates for prompt 1, and not for all
    prompts."""
    case: Case = request.param
    model = case.build()
    folder = tmp_path_factory.mktemp("pair")
    without_end = complete_theirs(model, case.prompts(), case.max_tokens)
    said = [set(one.token_ids) for one in without_end]
    end = next(
        token
        for token in without_end[1].token_ids[1:]
        if not all(token in tokens for tokens in said)
    )
    model.generation_config.eos_token_id = [39, end]
    case.save(model, folder)
    expected = complete_theirs(model, case.prompts(), case.max_tokens)
    assert {one.finish_reason for one in expected} == {"stop", "length"}
    assert min(one.gap for one in expected) > 2 * TOLERANCE
    return Pair(case, model, weft.load(folder, "cpu"), expected)


@pytest.mark.one_of(14, 5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_split_and_mode_is_equal_to_transformers(
    pair: Pair, pipeline: int, mode: str
) -> None:
    """Prompts of four lengths, one of which stops early; decode crosses the borders of pages at 16
    and 32 tokens."""
    result = complete(pair.ours, pair.case.prompts(), max_tokens=6, pipeline=pipeline, graph=mode)
    assert_equal_to_theirs(result, pair.expected)


@pytest.mark.one_of(5, 2)
def test_prompts_alone_are_equal_to_transformers(pair: Pair) -> None:
    """One prompt per call, in both libraries: neither pads."""
    for prompt in pair.case.prompts():
        assert_equal_to_theirs(
            complete(pair.ours, [prompt], max_tokens=6), complete_theirs(pair.theirs, [prompt], 6)
        )


@pytest.mark.one_of(8, 2)
@pytest.mark.parametrize("end", [None, "int", "list"])
def test_the_end_is_the_generation_configs(pair: Pair, end: str | None, tmp_path: Path) -> None:
    """Without an end-of-sequence token all completions are full; with one or several, ours stop
    where theirs do."""
    second = pair.expected[0].token_ids[1]
    model = pair.case.build()
    model.generation_config.eos_token_id = {None: None, "int": second, "list": [second, 39, 0]}[end]
    pair.case.save(model, tmp_path)
    expected = complete_theirs(model, pair.case.prompts(), 6)
    assert (expected[0].finish_reason == "stop") == (end is not None)
    assert_equal_to_theirs(
        complete(weft.load(tmp_path, "cpu"), pair.case.prompts(), max_tokens=6), expected
    )


@pytest.mark.one_of(9, 3)
@pytest.mark.parametrize(
    ("budget", "pipeline", "mode"),
    [(4, 1, "full"), (4, 2, "full"), (7, 3, "none"), (16, 2, "full_decode_only"), (17, 1, "full")],
)
def test_prompts_longer_than_the_budget_go_in_chunks(
    pair: Pair, budget: int, pipeline: int, mode: str
) -> None:
    """The same completions; a budget of 4 tokens makes prefill batches that graphs of mixed classes
    replay."""
    prompts = pair.case.prompts()
    result = complete(
        pair.ours, prompts, budget=budget, max_tokens=6, pipeline=pipeline, graph=mode
    )
    assert_equal_to_theirs(result, pair.expected)
    read = [
        sum(len(ids) for ids in work.token_ids if ids != (LAST_TOKEN,)) for work in result.works
    ]
    assert sum(read) == sum(map(len, prompts))
    assert max(read) == budget == max(work.num_tokens for work in result.works if work.token_ids)


def test_the_models_limit_ends_a_request(tmp_path: Path) -> None:
    """A request ends with `length` when prompt and completion fill max_position_embeddings; the
    others go on."""
    case = Case(
        "LlamaForCausalLM", {**SIZES, "max_position_embeddings": 24}, 4, [20, 23, 3], max_tokens=8
    )
    model = case.build()
    case.save(model, tmp_path)
    expected = complete_theirs(model, case.prompts(), 8)
    for pipeline, mode in ((1, "full"), (2, "full_decode_only")):
        completions = weft.generate(
            weft.load(tmp_path, "cpu"), case.prompts(), max_tokens=8, pipeline=pipeline, graph=mode
        )
        assert [c.token_ids for c in completions] == [
            e.token_ids[:n] for e, n in zip(expected, (4, 1, 8), strict=True)
        ]
        assert [c.finish_reason for c in completions] == ["length"] * 3


def test_the_demo_is_equal_to_transformers_text_included() -> None:
    prompts = ["The function returns", "An", "If the argument is not a string, then"]
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    encoded = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    expected = complete_theirs(
        AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32), encoded, 12
    )
    assert min(one.gap for one in expected) > 2 * TOLERANCE
    result = complete(weft.load(DEMO, "cpu", "float32"), prompts, max_tokens=12)
    assert_equal_to_theirs(result, expected)
    texts = [tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in expected]
    assert [c.text for c in result.completions] == texts
