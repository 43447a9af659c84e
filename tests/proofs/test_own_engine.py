"""`engine_machine` on models of a user's own: it finds planted bugs and wrong oracles, and needs no
oracle."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings

import weft
from weft.errors import CheckError, RequestError
from weft.proofs import CompletionRequest, LawViolation, engine_machine
from weft.proofs._strategies.engine.engines import small_adapters, small_model
from weft.proofs.checks.engine_machine import EngineMachine
from weft.proofs.evidence.mutants import MUTANTS
from weft.stages.config import parse_config
from weft.stages.layout import split_layers
from weft.stages.model import Model
from weft.stages.random_weights import random_params

FEW = settings(max_examples=2, stateful_step_count=4)
FINDS = settings(max_examples=60, stateful_step_count=8, database=None, phases=[Phase.generate])


def run(machine: type[EngineMachine], how: settings = FEW) -> None:
    case = machine.TestCase
    case.settings = how
    case("runTest").runTest()


@functools.cache
def model_of(architecture: str, vocab_size: int, **fields: Any) -> Model:
    raw = {
        "architectures": [architecture],
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 24,
    }
    config = parse_config(raw | fields, source="a test")
    (whole,) = split_layers(config.num_layers, 1)
    params = random_params(config, whole, seed=0, dtype=torch.float32, std=0.5)
    return Model(config, params, None, Path("own"))


@functools.cache
def with_text() -> Model:
    return weft.load(weft.stages.DEMO, "cpu", torch.float32)


EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("architecture", "graph"),
    [("LlamaForCausalLM", "none"), ("Qwen2ForCausalLM", "full"), ("Qwen3MoeForCausalLM", "none")],
)
def test_without_an_oracle_the_model_alone_is_one(architecture: str, graph: str) -> None:
    fields = EXPERTS if "Moe" in architecture else {}
    run(
        engine_machine(
            model_of(architecture, 40, eos_token_id=3, **fields), graph=graph, pipeline=2
        )
    )


def test_prompts_may_be_texts_and_texts_may_end_requests() -> None:
    sampling = [
        weft.SamplingParams(temperature=0.0, stop=["e", " "], logprobs=2),
        weft.SamplingParams(temperature=1.0, n=2),
    ]
    prompts: list[str | list[int]] = ["The function", "The function returns", [1, 2]]
    run(engine_machine(with_text(), prompts=prompts, sampling=sampling, graph="none"))


FOUND = [
    "all completions of a prompt have one seed",
    "a request has the mask of the one before it",
    "a page is known without its adapter",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_a_planted_bug_is_found(name: str) -> None:
    (mutant,) = [each for each in MUTANTS if each.name == name]
    machine = engine_machine(small_model(), adapters=small_adapters(), graph="none")
    with (
        mutant.plant(),
        pytest.raises(LawViolation, match="L11 an engine serves as alone: completion") as caught,
    ):
        run(machine, FINDS)
    notes = "\n".join(caught.value.__notes__)
    assert "engine = weft.Engine(model, EngineLimits(max_num_reqs=" in notes
    assert "engine.add((1, 2, 3, 4" in notes


def test_a_wrong_oracle_is_found() -> None:
    def longest(request: CompletionRequest) -> list[int] | None:
        return [0] * request.max_tokens if request.sampling.temperature == 0 else None

    machine = engine_machine(small_model(), longest, graph="none", max_tokens=4)
    with pytest.raises(LawViolation, match=r"expected \[0(, 0)*\], (length|stop|abort)"):
        run(machine, FINDS)


def test_the_oracle_is_asked_once_for_each_request_and_gets_its_own_seed() -> None:
    requests: list[CompletionRequest] = []
    machine = engine_machine(
        small_model(),
        requests.append,  # which returns None: the model alone is the oracle
        prompts=[[1, 2]],
        sampling=[weft.SamplingParams(temperature=1.0, n=2)],
        graph="none",
        max_tokens=3,
    )
    run(machine)
    assert [(each.prompt, each.sampling.n, each.max_tokens) for each in requests] == [
        ((1, 2), 1, 3)
    ] * 2
    assert len({each.sampling.seed for each in requests}) == 2
    assert {(each.adapter, each.mask) for each in requests} == {(None, None)}


def test_an_error_of_a_mask_is_raised() -> None:
    def fails(said: Any) -> list[int]:
        raise KeyError("no such state")

    with pytest.raises(RequestError, match=r"mask of request 'request .', after 0 tokens"):
        run(engine_machine(small_model(), masks=[fails], graph="none"), FINDS)


def test_an_error_of_a_step_is_the_one_that_is_raised() -> None:
    machine = engine_machine(small_model(), graph="none")()
    machine.start(seed=0)
    machine.engine._read = None
    with pytest.raises(TypeError, match="not callable"):
        machine.step(count=3)
    machine.teardown()


def test_settings_are_the_users() -> None:
    machine_settings = engine_machine(small_model()).TestCase.settings
    assert (machine_settings.max_examples, machine_settings.derandomize) == (
        settings().max_examples,
        settings().derandomize,
    )
    assert machine_settings.stateful_step_count == settings().stateful_step_count


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no prompts": ({"prompts": []}, CheckError, "0 prompts, 9 sampling parameters"),
    "no parameters": ({"sampling": []}, CheckError, "6 prompts, 0 sampling parameters"),
    "a long prompt": (
        {"prompts": [[1] * 20]},
        CheckError,
        "a prompt and tokens of 27, where the model has 24 positions",
    ),
    "no tokens": ({"max_tokens": 0}, CheckError, "max_tokens=0"),
    "no oracle": ({"expected": [1, 2]}, CheckError, "expected is a list"),
    "an unknown mode": ({"graph": "all"}, RequestError, "graph='all'"),
    "many stages": ({"pipeline": 9}, RequestError, "pipeline=9"),
    "no speculation": ({"speculation": [4]}, RequestError, "speculation is an int"),
    "no adapters": ({"adapters": ["a"]}, RequestError, r"adapters=\['a'\]"),
}


@pytest.mark.parametrize(("options", "error", "text"), REFUSED.values(), ids=list(REFUSED))
def test_what_would_test_nothing_is_refused(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        engine_machine(small_model(), **options)


def test_a_small_vocabulary_needs_requests_of_its_own() -> None:
    model = model_of("LlamaForCausalLM", 10)
    with pytest.raises(CheckError, match="a model of 10 tokens, 9 of which do not end a request"):
        engine_machine(model)
    run(
        engine_machine(model, prompts=[[1, 2], [1]], sampling=[weft.SamplingParams()], graph="none")
    )
