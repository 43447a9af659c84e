"""Masks: a request generates only tokens that its function allows, like transformers'
`prefix_allowed_tokens_fn`; other requests do not notice."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import weft
from weft.batches.sampling import SamplingParams
from weft.errors import RequestError
from weft.ops.sampling.logits import pack_bits
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.engine.outputs import RequestOutput
from weft.transforms.engine.requests.masks import RequestMask, compute_mask

VOCABULARY = 67  # no multiple of 32
PROMPTS = [[5, 6, 7, 5, 6], [9, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 6, 7, 5, 6, 8]]
LIMITS = EngineLimits(
    max_num_reqs=4, max_num_tokens=16, max_model_len=40, page_size=4, num_pages=20
)


def allowed(said: Sequence[int]) -> list[int]:
    """A few tokens, different ones after each prefix."""
    return sorted(random.Random(str(list(said))).sample(range(3, VOCABULARY), 5))


def as_bits(said: Sequence[int]) -> torch.Tensor | None:
    """The same as bits; and any token after seven tokens."""
    return None if len(said) == 7 else pack_bits(allowed(said), VOCABULARY)


@pytest.fixture(scope="module")
def theirs() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=64,
        initializer_range=0.5,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=1,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("masked")
    theirs.save_pretrained(folder)
    return weft.load(folder, "cpu")


def by_transformers(theirs: Any, prompt: list[int], masked: bool) -> list[int]:
    def rule(_: int, ids: torch.Tensor) -> list[int]:
        said = ids[len(prompt) :].tolist()
        return [*range(VOCABULARY)] if len(said) == 7 else allowed(said)

    options: Any = {"prefix_allowed_tokens_fn": rule} if masked else {}
    ids = torch.tensor([prompt])
    out = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    said: list[int] = out[0, len(prompt) :].tolist()
    return said


def ended(engine: Engine) -> dict[tuple[str, int], RequestOutput]:
    return {
        (output.id, output.index): output for output in engine if output.finish_reason is not None
    }


@pytest.mark.one_of(5, 2)
@pytest.mark.parametrize(
    ("pipeline", "graph", "run_ahead", "speculation"),
    [
        (1, "none", 0, None),
        (1, "full", 1, None),
        (1, "full_and_piecewise", 3, Speculation(3)),
        (2, "piecewise", 1, None),
        (3, "full_decode_only", 2, Speculation(2)),
    ],
)
def test_tokens_are_those_of_transformers(
    model: Model,
    theirs: Any,
    pipeline: int,
    graph: str,
    run_ahead: int,
    speculation: Speculation | None,
) -> None:
    engine = Engine(
        model, LIMITS, pipeline=pipeline, graph=graph, run_ahead=run_ahead, speculation=speculation
    )
    for index, prompt in enumerate(PROMPTS * 2):
        engine.add(prompt, max_tokens=12, id=str(index), mask=as_bits if index % 3 else None)
    outputs = ended(engine)
    for index, prompt in enumerate(PROMPTS * 2):
        said = outputs[str(index), 0].track.token_ids
        assert said == by_transformers(theirs, prompt, masked=bool(index % 3)), index
        assert all(
            token in allowed(said[:i]) for i, token in enumerate(said) if i != 7 and index % 3
        )
    assert engine.stats().pages_held == 0


def test_completions_of_one_request_are_asked_for_each(model: Model) -> None:
    engine = Engine(model, LIMITS, graph="full", seed=3)
    engine.add(PROMPTS[0], SamplingParams(temperature=1.0, n=3), max_tokens=6, mask=allowed)
    told = [output.track.token_ids for output in ended(engine).values()]
    assert len({tuple(said) for said in told}) > 1
    assert all(token in allowed(said[:i]) for said in told for i, token in enumerate(said))


def raises(said: Sequence[int]) -> list[int]:
    if len(said) == 2:
        raise KeyError("no such rule")
    return [5]


WRONG: dict[str, tuple[Any, int, str]] = {
    "it raises": (raises, 2, "KeyError: 'no such rule'"),
    "it allows nothing": (lambda said: [], 0, "no token that is allowed"),
    "only bits past the vocabulary": (
        lambda said: torch.tensor([0, 0, -8], dtype=torch.int32),
        0,
        "no token that is allowed",
    ),
    "no token of the model's": (
        lambda said: [VOCABULARY],
        0,
        f"ValueError: {VOCABULARY} is not a token id from 0 to 66",
    ),
    "another shape": (
        lambda said: torch.zeros(2, dtype=torch.int32),
        0,
        "a tensor torch.int32 [2]",
    ),
    "another dtype": (lambda said: torch.zeros(3), 0, "a tensor torch.float32 [3]"),
    "ids without an end": (
        lambda said: itertools.cycle([5]),
        0,
        "ValueError: more than 1072 ids, where there are 67",
    ),
    "a number": (lambda said: 3, 0, "TypeError: 'int' object is not iterable"),
}


@pytest.mark.one_of(8, 2)
@pytest.mark.parametrize(
    ("case", "pipeline"),
    [
        pytest.param(case, pipeline, marks=[] if place % 2 + 1 == pipeline else pytest.mark.slow)
        for place, case in enumerate(WRONG)
        for pipeline in (1, 2)
    ],
)
def test_a_mask_that_fails_ends_its_request_alone(
    model: Model, theirs: Any, case: str, pipeline: int
) -> None:
    mask, count, problem = WRONG[case]
    engine = Engine(model, LIMITS, pipeline=pipeline, graph="full")
    engine.add(PROMPTS[0], max_tokens=12, id="wrong", mask=mask)
    engine.add(PROMPTS[1], max_tokens=12, id="other")
    engine.add(PROMPTS[2], max_tokens=12, id="masked", mask=as_bits)
    outputs = ended(engine)
    wrong = outputs["wrong", 0]
    assert (wrong.finish_reason, len(wrong.track.token_ids)) == ("error", count)
    assert isinstance(wrong.error, RequestError)
    assert wrong.error.call == f"mask of request 'wrong', after {count} tokens"
    assert wrong.error.problem == problem
    assert outputs["other", 0].track.token_ids == by_transformers(theirs, PROMPTS[1], masked=False)
    assert outputs["masked", 0].track.token_ids == by_transformers(theirs, PROMPTS[2], masked=True)
    assert engine.stats().pages_held == 0


def test_what_is_no_function_is_refused(model: Model) -> None:
    engine = Engine(model, LIMITS, graph="none")
    with pytest.raises(RequestError, match=r"mask=\[1, 2\]") as error:
        engine.add(PROMPTS[0], max_tokens=1, mask=[1, 2])  # type: ignore[arg-type]
    assert "a function from the tokens said so far" in error.value.instead
    assert engine.is_idle


def test_nothing_is_asked_where_nothing_is_to_be_said() -> None:
    for allowed, bits in ((None, None), ((0, 33), bytes([1, 0, 0, 0, 2, 0, 0, 0]))):
        masked = RequestMask.of(lambda said, allowed=allowed: allowed, SamplingParams(), 40)  # type: ignore[misc]
        assert compute_mask("a", masked, [], 40) == bits


def test_an_iterator_without_an_end_is_read_up_to_what_is_no_token() -> None:
    with pytest.raises(RequestError, match="saw: ValueError: 40 is not a token id from 0 to 39"):
        compute_mask(
            "a", RequestMask.of(lambda said: itertools.count(), SamplingParams(), 40), [], 40
        )
