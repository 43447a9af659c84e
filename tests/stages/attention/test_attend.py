"""Custom attention, and logits that read captures: what transformers computes, in every way
to run."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from paged_cases import Shape, draw_case, shapes
from torch import Tensor

from weft.batches.batch import ResolvedBatch
from weft.batches.descriptor import BatchDescriptor
from weft.errors import ProgramError
from weft.ops.attention.paged import paged_attention
from weft.stages import attend, attention_scores, sow, weighted_values
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.model import Model
from weft.transforms.engine.generate import generate
from weft.transforms.engine.options import Speculation
from weft.transforms.graphs.ladder import MODES

PROMPTS = ["The function returns a list of", "A list is", "In Python, "]
WAYS: list[dict[str, Any]] = [
    *({"graph": mode} for mode in MODES),
    {"pipeline": 2},
    {"pipeline": 3},
    {"speculation": Speculation(num_tokens=3)},
]
MIDDLE = 2


@pytest.fixture(scope="module")
def model() -> Model:
    return load(DEMO, "cpu", "float32")


def theirs(**fields: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(
        Path(DEMO), dtype=torch.float32, **fields
    )


def tokens(model: Model, **options: Any) -> list[list[int]]:
    return [c.token_ids for c in generate(model, PROMPTS, max_tokens=16, **options)]


def said(reference: Any, model: Model) -> list[list[int]]:
    """The greedy tokens of transformers."""
    token_ids = []
    for prompt in PROMPTS:
        ids = torch.tensor([model.encode(prompt)])
        out = reference.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)
        token_ids.append(out[0, ids.shape[1] :].tolist())
    return token_ids


@pytest.mark.one_of(2)
@pytest.mark.parametrize("window", [2, 5])
def test_windows_in_a_loaded_checkpoint_are_transformers_windows(model: Model, window: int) -> None:
    transformers = pytest.importorskip("transformers")
    kinds = ["sliding_attention"] * model.config.num_layers
    fields = {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    config = transformers.AutoConfig.from_pretrained(Path(DEMO), **fields)
    reference = theirs(config=config)
    assert {layer.self_attn.sliding_window for layer in reference.model.layers} == {window}
    expected = said(reference, model)
    slid = model.with_stages(attend=functools.partial(attend, window=window))
    assert expected != tokens(model)
    for way in WAYS:
        assert tokens(slid, **way) == expected, way


def entropic(config: Any, layer: Any, q: Tensor, kv_pages: Tensor, batch: ResolvedBatch) -> Tensor:
    weights = attention_scores(q, kv_pages, batch).softmax(-1)
    if layer.index == MIDDLE:
        sow("entropy", torch.special.entr(weights).sum(-1))
    return weighted_values(weights, kv_pages, batch)


@pytest.mark.slow
def test_entropies_of_attention_are_those_of_transformers(model: Model) -> None:
    entropic_model = model.with_stages(
        attend=entropic, captures={"entropy": torch.zeros(model.config.num_heads)}
    )
    reference = theirs(attn_implementation="eager")
    expected = said(reference, model)
    for way in WAYS:
        for prompt, ids, completion in zip(
            PROMPTS, expected, generate(entropic_model, PROMPTS, max_tokens=16, **way), strict=True
        ):
            assert completion.token_ids == ids, way
            whole = torch.tensor([[*model.encode(prompt), *ids[:-1]]])
            weights = reference(whole, output_attentions=True).attentions[MIDDLE][0]
            entropies = torch.special.entr(weights).sum(-1).T
            torch.testing.assert_close(
                completion.captured["entropy"], entropies, rtol=1e-4, atol=1e-4
            )


@settings(deadline=None, max_examples=40)
@given(shapes)
def test_scores_and_values_are_paged_attention(shape: Shape) -> None:
    case = draw_case(shape)
    q, k, v, pages, slots, table, starts, lens, longest, scale, window = case.args
    out = paged_attention(q, k, v, pages, slots, table, starts, lens, longest, scale, window)
    if not len(lens):
        return
    owners = torch.arange(len(q))[:, None] >= starts[1:]
    owner = owners.sum(1).clamp(max=len(lens) - 1)
    positions = (lens - (starts[1:] - starts[:-1]))[owner] + torch.arange(len(q)) - starts[owner]
    live = (slots >= 0) & (lens[owner] > 0) & (torch.arange(len(q)) < starts[-1])
    batch = ResolvedBatch(
        BatchDescriptor(len(q), len(lens)),
        owner,
        slots * 0,
        torch.where(live, positions, 0).long(),
        starts,
        lens,
        table,
        slots,
        starts[1:].long() - 1,
    )
    scores = attention_scores(q.nan_to_num(), pages, batch)
    if window:
        far = batch.positions[:, None] - torch.arange(scores.shape[2]) >= window
        scores = scores.masked_fill(far[:, None], -torch.inf)
    attended = weighted_values(scores.softmax(-1), pages, batch)
    assert attended.dtype == q.dtype
    tolerance = 1e-5 if q.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(attended[live], out[live], rtol=tolerance, atol=tolerance)


def kept(layer: Any) -> Any:
    def run(*args: Any) -> Any:
        hidden, kv_pages = layer(*args)
        sow("hidden", hidden)
        return hidden, kv_pages

    return run


def test_a_logit_lens_is_that_of_transformers(model: Model) -> None:
    capturing_model = model.with_stages(
        layers={MIDDLE: kept}, captures={"hidden": torch.zeros(model.config.hidden_size)}
    )
    reference = theirs()
    prompt = PROMPTS[0]
    out = reference(torch.tensor([model.encode(prompt)]), output_hidden_states=True)
    expected = reference.lm_head(reference.model.norm(out.hidden_states[MIDDLE + 1][0]))
    for way in WAYS:
        (completion,) = generate(capturing_model, [prompt], max_tokens=1, **way)
        torch.testing.assert_close(
            model.logits(completion.captured["hidden"]), expected, rtol=1e-4, atol=1e-3
        )


@pytest.mark.slow
def test_logits_read_what_a_layer_captured_of_their_token(model: Model) -> None:
    """Contrast with an early layer (DoLa, Chuang et al. 2023): drafts and padding included, from
    another stage."""

    def contrast(logits: Tensor, rows: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
        return logits - 0.5 * model.logits(extras["hidden"])

    captures = {"hidden": torch.zeros(model.config.hidden_size)}
    contrastive_model = model.with_stages(layers={MIDDLE: kept}, captures=captures, logits=contrast)
    reference = theirs()
    expected = []
    for prompt in PROMPTS:
        ids = model.encode(prompt)
        start = len(ids)
        for _ in range(16):
            out = reference(torch.tensor([ids]), output_hidden_states=True)
            early = reference.lm_head(reference.model.norm(out.hidden_states[MIDDLE + 1][0, -1]))
            ids = [*ids, int((out.logits[0, -1] - 0.5 * early).argmax())]
            if ids[-1] in model.config.eos_token_ids:
                break
        expected.append(ids[start:])
    for way in WAYS:
        assert tokens(contrastive_model, **way) == expected, way
    (scored,) = generate(contrastive_model, [PROMPTS[0]], max_tokens=1)
    assert scored.token_ids == expected[0][:1]


def test_wrong_uses_are_named(model: Model) -> None:
    with pytest.raises(
        ProgramError, match=r"attend of with_stages.*\n.*it returned \[4, 2\](.|\n)*as the queries"
    ):
        generate(model.with_stages(attend=lambda *args: torch.zeros(4, 2)), PROMPTS, max_tokens=2)
    with pytest.raises(ProgramError, match=r"both attention=f and attend=g(.|\n)*instead"):
        model.with_stages(attention=lambda *args: None).with_stages(attend=attend)
    with pytest.raises(ProgramError, match=r"hidden states \[3, 2\](.|\n)*a tensor \[\.\.\., "):
        model.logits(torch.zeros(3, 2))
    first = load(DEMO, "cpu", stage=(0, 2))
    with pytest.raises(ProgramError, match=r"a stage without a head(.|\n)*weft.load"):
        first.logits(torch.zeros(1, model.config.hidden_size))
