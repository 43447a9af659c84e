"""Certificates hold what fixes a completion's bits, survive a file, and any split and mode computes
them again."""

import copy
import gc
import json
import pickle
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from tokenizers import Tokenizer
from torch import Tensor

import weft
from weft.errors import ConfigError, RequestError
from weft.proofs._strategies.engine.invariant import INVARIANT_MODELS, invariant_model
from weft.proofs.strategies import sampling_params
from weft.stages.layout import split_layers
from weft.stages.model import Model
from weft.stages.params import slice_params
from weft.stages.random_weights import random_adapter
from weft.transforms.engine.evaluation.certificates import as_json, from_json
from weft.transforms.engine.evaluation.facts import digest_program, digest_weights
from weft.transforms.engine.evaluation.verification import Verification
from weft.transforms.engine.generate import generate
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.engine.outputs import OutputProcessor, RequestOutput
from weft.transforms.pipelines.transports.local import Local
from weft.transforms.pipelines.transports.threads import Threads

PROMPTS = ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 9], [11])
SAMPLED = weft.SamplingParams(temperature=1.0, top_k=9, n=2, logprobs=2, seed=5, stop_token_ids=[3])
WAYS: dict[str, dict[str, Any]] = {
    "as before": {},
    "two stages": {"pipeline": 2, "graph": "none"},
    "threads": {"pipeline": 3, "transport": Threads()},
    "in chunks, with drafts": {
        "graph": "piecewise",
        "speculation": Speculation(2),
        "limits": EngineLimits(max_num_reqs=2, max_num_tokens=3, max_model_len=20),
    },
}


@pytest.fixture(scope="module")
def model() -> Model:
    return invariant_model("Qwen3")


@pytest.fixture(scope="module")
def completions(model: Model) -> list[weft.Completion]:
    return generate(model, PROMPTS, max_tokens=6, sampling=SAMPLED)


@pytest.fixture
def certificate(completions: list[weft.Completion]) -> weft.Certificate:
    return completions[1].certificate()


@pytest.mark.one_of(42, 8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", INVARIANT_MODELS)
def test_any_split_and_mode_computes_it_again(kind: str, way: str) -> None:
    model = invariant_model(kind)
    certificates = [
        one.certificate() for one in generate(model, PROMPTS, max_tokens=6, sampling=SAMPLED)
    ]
    verifications = weft.verify(certificates, model, **WAYS[way])
    assert [one.result for one in verifications] == ["equal"] * 6
    assert all(one.equal and not one.other_facts for one in verifications)
    [alone] = weft.verify(certificates[3], model, **WAYS[way])
    assert isinstance(alone, Verification)
    assert alone.equal


@given(sampling_params(12))
def test_a_file_keeps_every_bit(sampling: weft.SamplingParams) -> None:
    model = invariant_model("Qwen3")
    [one] = [
        c.certificate()
        for c in generate(model, [[1, 2]], max_tokens=2, sampling=attrs.evolve(sampling, n=1))
    ]
    assert from_json(json.loads(as_json(one)), "", "") == one
    assert one.sampling.seed == sampling.seed


def test_it_is_saved_and_shown(certificate: weft.Certificate, tmp_path: Path) -> None:
    weft.Certificate.save_all([certificate], tmp_path / "one.json")
    assert weft.Certificate.load_all(tmp_path / "one.json") == [certificate]
    shown = str(certificate)
    for text in (
        "7 tokens",
        certificate.weights,
        certificate.program,
        torch.__version__,
        weft.__version__,
    ):
        assert text in shown


def test_several_are_lines_of_a_file(completions: list[weft.Completion], tmp_path: Path) -> None:
    several = [one.certificate() for one in completions]
    weft.Certificate.save_all(several, tmp_path / "several.jsonl")
    assert weft.Certificate.load_all(tmp_path / "several.jsonl") == several
    with pytest.raises(RequestError, match="a file that can be written, in a folder that exists"):
        weft.Certificate.save_all(several, tmp_path / "no" / "folder")


def tampered(one: weft.Certificate) -> dict[str, tuple[weft.Certificate, str]]:
    ids = one.token_ids
    logprobs = one.logprobs
    other = (ids[1] + 1) % 12
    above = torch.tensor(logprobs[2]).nextafter(torch.tensor(0.0)).item()
    return {
        "a token": (
            attrs.evolve(one, token_ids=(ids[0], other, *ids[2:])),
            f"token 1: {ids[1]}, certified {other}",
        ),
        "a bit of a logprob": (
            attrs.evolve(one, logprobs=(*logprobs[:2], above, *logprobs[3:])),
            f"token 2: logprob {logprobs[2]!r}, certified {above!r}",
        ),
        "its end": (
            attrs.evolve(one, token_ids=ids[:-1], logprobs=logprobs[:-1]),
            f"token {len(ids) - 1}: {ids[-1]}, certified none",
        ),
        "more than there is": (
            attrs.evolve(one, token_ids=(*ids, 1), logprobs=(*logprobs, -1.0)),
            f"token {len(ids)}: none, certified 1",
        ),
        "the reason": (
            attrs.evolve(one, finish_reason="abort"),
            "ends with 'length', certified 'abort'",
        ),
    }


@pytest.mark.one_of(5)
@pytest.mark.parametrize(
    "what", ["a token", "a bit of a logprob", "its end", "more than there is", "the reason"]
)
def test_the_first_difference_is_named(model: Model, what: str) -> None:
    [one] = generate(model, [PROMPTS[0]], max_tokens=6, temperature=1.0, seed=1)
    changed, expected = tampered(one.certificate())[what]
    [verification] = weft.verify(changed, model)
    assert (verification.result, verification.equal) == (expected, False)
    assert expected in str(verification)


def counted_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of what completions of engines got, as they run."""
    lengths = list[int]()

    def append(self: Any, *args: Any) -> RequestOutput:
        output = before(self, *args)
        lengths.append(len(output.token_ids))
        return output

    before = OutputProcessor.append
    monkeypatch.setattr(OutputProcessor, "append", append)
    return lengths


@pytest.mark.one_of(3, 3)
@pytest.mark.parametrize("way", ["as before", "two stages", "in chunks, with drafts"])
def test_no_more_is_computed_than_is_compared(
    model: Model, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token after those that were certified, and up to one step after a difference."""
    [one] = generate(
        model, [[1, 2]], max_tokens=62, sampling=weft.SamplingParams(temperature=1.0, seed=1)
    )
    whole = one.certificate()
    lengths = counted_tokens(monkeypatch)
    assert len(whole.token_ids) == 62
    cut = attrs.evolve(
        whole, token_ids=whole.token_ids[:3], logprobs=whole.logprobs[:3], finish_reason="stop"
    )
    other = attrs.evolve(
        whole, token_ids=(whole.token_ids[0], 1 - min(whole.token_ids[1], 1), *whole.token_ids[2:])
    )
    options = {name: x for name, x in WAYS[way].items() if name != "limits"}
    [verification] = weft.verify(cut, model, **options)
    assert verification.result == f"token 3: {whole.token_ids[3]}, certified none"
    assert sum(lengths) <= 4
    lengths.clear()
    [verification] = weft.verify(other, model, **options)
    assert verification.result.startswith("token 1: ")
    assert verification.finish_reason == "abort"
    assert sum(lengths) <= 8
    huge = [attrs.evolve(cut, max_tokens=2**31 - 1)] * 70
    wide = attrs.evolve(model, config=attrs.evolve(model.config, max_position_embeddings=2**31 - 1))
    assert {one.first_difference for one in weft.verify(huge, wide, **options)} == {3}


@pytest.mark.slow
def test_the_tokenizer_counts_where_texts_do(tmp_path: Path) -> None:
    model = weft.load("demo", "cpu", batch_invariant=True)
    assert model.tokenizer is not None
    raw = json.loads(model.tokenizer.to_str())
    ids = raw["model"]["vocab"]
    ids["e"], ids["o"] = ids["o"], ids["e"]
    other = attrs.evolve(model, tokenizer=Tokenizer.from_str(json.dumps(raw)))
    sampling = [
        weft.SamplingParams(),
        weft.SamplingParams(stop="e"),
        weft.SamplingParams(bad_words=["e"]),
    ]
    certificates = [
        one.certificate()
        for one in generate(model, [[65, 66]] * 3, max_tokens=12, sampling=sampling)
    ]
    assert [one.tokenizer is None for one in certificates] == [True, False, False]
    weft.Certificate.save_all(certificates, tmp_path / "several.jsonl")
    assert weft.Certificate.load_all(tmp_path / "several.jsonl") == certificates
    assert all(not one.other_facts and one.equal for one in weft.verify(certificates, model))
    verifications = weft.verify(certificates, other)
    assert [[*one.other_facts] for one in verifications] == [[], ["tokenizer"], ["tokenizer"]]
    without = attrs.evolve(model, tokenizer=None)
    assert weft.verify(certificates[0], without)[0].equal


def test_other_weights_are_not_equal_even_where_the_tokens_are(model: Model) -> None:
    [one] = generate(model, [[1]], max_tokens=2)
    assert model.params.embed_tokens is not None
    changed = model.params.embed_tokens.clone()
    changed[next(token for token in range(12) if token not in (1, *one.token_ids))] += 1e-3
    other = attrs.evolve(model, params=attrs.evolve(model.params, embed_tokens=changed))
    [verification] = weft.verify(one.certificate(), other)
    assert (verification.result, verification.equal, [*verification.other_facts]) == (
        "equal, with other weights",
        False,
        ["weights"],
    )


def test_versions_do_not_stand_for_the_weights(model: Model, certificate: weft.Certificate) -> None:
    versions = {**certificate.versions, "weights": certificate.weights}
    [verification] = weft.verify(
        attrs.evolve(certificate, weights="sha256:0", versions=versions), model
    )
    assert not verification.equal


def test_sums_in_other_leaves_are_named(model: Model) -> None:
    cut = model.with_stages(batch_invariant=True, reduction_leaves=2)
    [completion] = generate(cut, PROMPTS[:1], max_tokens=2)
    certificate = completion.certificate()
    [verification] = weft.verify(certificate, cut)
    assert verification.equal
    [verification] = weft.verify(certificate, model)
    assert verification.other_facts["sums"] == ("none", "cut into 2 leaves")


def test_the_facts_do_not_depend_on_the_split(model: Model) -> None:
    class TwoRanks(Local):
        def collect(self, value: Any) -> list[Any]:
            parts.append(value)
            return parts

    parts: list[Any] = []
    for layout in split_layers(model.config.num_layers, 2):
        rank = attrs.evolve(model, params=slice_params(model.params, layout), layout=layout)
        digests = digest_weights(rank, TwoRanks()), digest_program(rank)
    assert digests == (digest_weights(model, Local()), digest_program(model))


def louder(logits: Tensor, rows: Any, extras: Any) -> Tensor:
    return 2 * logits


def quieter(logits: Tensor, rows: Any, extras: Any) -> Tensor:
    return logits / 2


def test_the_program_is_that_of_the_stages_with_one_s_own_functions(model: Model) -> None:
    digests = [
        digest_program(one)
        for one in (model, model.with_stages(logits=louder), model.with_stages(logits=quieter))
    ]
    digests.append(digest_program(model.with_stages(batch_invariant=True)))
    digests.append(digest_program(invariant_model("Llama with a scaled rope")))
    assert digests[3] == digests[0]
    assert len({*digests}) == 4
    louder_model = model.with_stages(logits=louder)
    [one] = generate(louder_model, [[1, 2]], max_tokens=3, temperature=1.0, seed=0)
    assert weft.verify(one.certificate(), louder_model, pipeline=2)[0].equal
    [verification] = weft.verify(one.certificate(), model.with_stages(logits=quieter))
    assert not verification.equal
    assert "program" in verification.other_facts


def test_an_adapter_is_part_of_it(model: Model) -> None:
    layers = [f"model.layers.{layer}.mlp.down_proj" for layer in range(model.config.num_layers)]
    first, second = (
        random_adapter(model.config, layers, rank=2, seed=seed, std=0.5) for seed in (1, 2)
    )
    adapted = generate(model, [[1, 2], [3]], max_tokens=4, adapter=[first, None])
    certificates = [one.certificate() for one in adapted]
    verifications = weft.verify(certificates, model, pipeline=2, adapters=[second, first])
    assert [one.result for one in verifications] == ["equal", "equal"]
    text = f"a completion of the adapter {certificates[0].adapter}, and adapters none"
    with pytest.raises(RequestError, match=re.escape(text)):
        weft.verify(certificates, model)


def doubled(hidden: Tensor, batch: Any) -> Tensor:
    return hidden


@pytest.mark.slow
def test_what_cannot_be_certified(model: Model) -> None:
    def refused(completion: weft.Completion) -> str:
        with pytest.raises(RequestError) as error:
            completion.certificate()
        return error.value.problem

    fast = weft.load("demo", "cpu")
    [one] = generate(fast, [[1]], max_tokens=1)
    assert refused(one).startswith("a model that is not batch invariant")
    [one] = generate(model, [[1]], max_tokens=1)
    for moved in (
        pickle.loads(pickle.dumps(one)),
        copy.deepcopy(one),
        weft.Completion(None, [1], [-1.0], "length"),
    ):
        assert refused(moved) == "a completion that no model of this process made"
    failed = attrs.evolve(one, error=RequestError("a", "b", "c"))
    assert refused(failed) == "a completion that ended with an error: b"
    embeds = torch.zeros(2, model.config.hidden_size)
    [generated] = generate(
        model, [weft.EmbedsPrompt([weft.EMBEDDED, weft.EMBEDDED], embeds)], max_tokens=1
    )
    assert (
        refused(generated)
        == "a request with embeddings or positions of its own, which no certificate holds"
    )
    steered = model.with_stages(
        logits=lambda x, rows, extras: x * extras["by"], extras={"by": torch.ones(())}
    )
    [generated] = generate(steered, [[1]], max_tokens=1, extras={"by": torch.tensor(2.0)})
    assert (
        refused(generated)
        == "a request with inputs of its own for the model's stages, which no certificate holds"
    )
    changed = attrs.evolve(model, params=copy.deepcopy(model.params))
    [generated] = generate(changed, [[1]], max_tokens=1)
    generated.certificate()
    assert changed.params.norm is not None
    for weights in (
        changed.params.norm,
        changed.params.norm.data,
    ):  # torch counts changes of the first alone
        weights.mul_(2)
        assert refused(generated) == "weights that were changed since"
        weights.div_(2)
        [generated] = generate(changed, [[1]], max_tokens=1)
    del changed, steered
    gc.collect()
    assert refused(generated) == "its model is gone"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": "weft certificate 9"}, "format='weft certificate 9'"),
        ({"token_ids": [1, -2]}, "token_ids=[1, -2]"),
        ({"logprobs": [0.5]}, "logprobs=[0.5]"),
        ({"logprobs": None}, "logprobs=None"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"sampling": {"seed": 1, "n": 2}}, "sampling.n"),
        ({"sampling": {"seed": 1, "temperature": -1}}, "temperature=-1"),
        ({"sampling": {"temperature": 1}}, "sampling={'temperature': 1}"),
        ({"sampling": {"seed": 1, "logit_bias": {"x": 1}}}, "sampling with logit_bias of 'x'"),
        (
            {"sampling": {"seed": 1, "logit_bias": {" 1_0": 1}}},
            "sampling with logit_bias of ' 1_0'",
        ),
        ({"versions": {"torch": 2}}, "versions={'torch': 2}"),
        ({"weights": ""}, "weights=''"),
        ({"more": 1}, "'more'"),
    ],
)
def test_a_file_of_something_else(
    certificate: weft.Certificate, tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(json.loads(as_json(certificate)) | change))
    with pytest.raises(ConfigError, match=re.escape(problem)) as error:
        weft.Certificate.load_all(path)
    assert "one.json, line 1," in error.value.problem
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="no format"):
        weft.Certificate.load_all(path)
    with pytest.raises(RequestError, match="there is no file"):
        weft.Certificate.load_all(tmp_path / "none")
    with pytest.raises(RequestError, match="cannot be read"):
        weft.Certificate.load_all(tmp_path)


def test_a_certificate_that_this_model_cannot_run(
    model: Model, certificate: weft.Certificate
) -> None:
    with pytest.raises(RequestError, match="holds 400"):
        weft.verify(attrs.evolve(certificate, prompt=(400,)), model)
    with pytest.raises(
        RequestError,
        match=re.escape("a certificate, or a list of them: weft.Certificate.load_all(path)"),
    ):
        weft.verify([], model)
    adapters: Any = ["folder"]
    with pytest.raises(RequestError, match=re.escape("a list of weft.load_adapter(model, folder)")):
        weft.verify(certificate, model, adapters=adapters)
