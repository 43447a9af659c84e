"""Bad input to `weft.generate`: the text of each error, and that the model is unharmed."""

from collections import UserDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from refusal import refused

import weft
from weft.errors import RequestError, WeftError
from weft.proofs import assert_equal
from weft.stages.model import Model
from weft.values.donation import clone


@pytest.fixture(scope="module")
def demo(demo: Model) -> Iterator[Model]:
    """The demo, which says the same after all errors of these tests."""
    completions = weft.generate(demo, ["The function"], max_tokens=2)
    params = clone(demo.params)
    yield demo
    assert_equal("the weights after the errors", demo.params, params)
    assert weft.generate(demo, ["The function"], max_tokens=2) == completions
    assert torch.is_grad_enabled()


LISTS = "pass a list of prompts, each a string or a list of token ids"
IDS = "token ids are ints from 0 to 256"
LIMIT = "tokens; the model's limit is 512, one of them to be generated"
SIZE = "a prompt of 1 to 511 tokens"
FINITE = "a finite number >= 0; 0 is greedy"
MODES = "one of none, piecewise, full_decode_only, full, full_and_piecewise"
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an empty text": ({"prompts": ["An", ""]}, f"prompt 1 has 0 {LIMIT}", SIZE),
    "an empty list of ids": ({"prompts": [[65], [66], []]}, f"prompt 2 has 0 {LIMIT}", SIZE),
    "no prompts": ({"prompts": []}, "prompts=[]", LISTS),
    "a text, not a list": ({"prompts": "An"}, "prompts='An'", LISTS),
    "ids, not a list of them": ({"prompts": [65, 66]}, "prompts=[65, 66]", LISTS),
    "an id beyond the vocabulary": ({"prompts": [[65, 257]]}, "prompt 0 holds 257", IDS),
    "a negative id": ({"prompts": [[65], [-1]]}, "prompt 1 holds -1", IDS),
    "a float for an id": ({"prompts": [[65.0]]}, "prompt 0 holds 65.0", IDS),
    "a bool for an id": ({"prompts": [[True]]}, "prompt 0 holds True", IDS),
    "too many ids": ({"prompts": [[65], [65] * 512]}, f"prompt 1 has 512 {LIMIT}", SIZE),
    "too long a text": ({"prompts": ["x" * 600]}, f"prompt 0 has 600 {LIMIT}", SIZE),
    "what a tokenizer of transformers returns": (
        {"prompts": [UserDict(input_ids=[65], attention_mask=[1])]},
        "prompt 0 is {'input_ids': [65], 'attention_mask': [1]}, a UserDict",
        'its ["input_ids"]',
    ),
    "no tokens": ({"max_tokens": 0}, "max_tokens=0", "a whole number >= 1"),
    "a fraction of tokens": ({"max_tokens": 1.5}, "max_tokens=1.5", "a whole number >= 1"),
    "a negative temperature": ({"temperature": -0.5}, "temperature=-0.5", FINITE),
    "an infinite temperature": ({"temperature": float("inf")}, "temperature=inf", FINITE),
    "no number for a temperature": ({"temperature": float("nan")}, "temperature=nan", FINITE),
    "the name of a transport": (
        {"transport": "threads"},
        "transport='threads'",
        "Local(), Threads() or Distributed(), of weft.transforms",
    ),
    "an unknown mode": ({"graph": "fast"}, "graph='fast'", MODES),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_generate_refuses(case: str, demo: Model) -> None:
    changes, problem, instead = REFUSED[case]
    options: dict[str, Any] = {"prompts": ["An"], "max_tokens": 3, "temperature": 0.0, **changes}
    numbers = f"max_tokens={options['max_tokens']}, temperature={options['temperature']}"
    call = f"weft.generate(model, prompts, {numbers}, pipeline=1)"
    with refused(RequestError, call, problem, instead):
        weft.generate(demo, **options)


@pytest.mark.parametrize("stages", [7, 0, -1])
def test_more_pipeline_stages_than_layers(stages: int, demo: Model) -> None:
    call = f"weft.generate(model, prompts, max_tokens=3, temperature=0.0, pipeline={stages})"
    with refused(
        RequestError, call, f"pipeline={stages}", "a whole number from 1 to 6, the model's layers"
    ):
        weft.generate(demo, ["An"], max_tokens=3, pipeline=stages)


WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "1"}, "temperature='1'"),
    ({"temperature": None}, "temperature=None"),
    ({"temperature": 1e39}, "temperature=1e\\+39"),
    ({"seed": 1.5}, "1\\.5"),
    ({"seed": "3"}, "'3'"),
    ({"pipeline": 1.5}, "1\\.5"),
    ({"pipeline": "2"}, "'2'"),
    ({"prompts": None}, "None"),
    ({"prompts": [None]}, "None"),
    ({"prompts": ["An", 65]}, "65"),
    ({"prompts": [b"An"]}, "b'An'"),
    ({"prompts": torch.tensor([[65, 66]])}, "prompt"),
]


@pytest.mark.parametrize(
    ("changes", "text"), WRONG_TYPES, ids=[str(changes) for changes, _ in WRONG_TYPES]
)
def test_arguments_of_a_wrong_type_or_size_are_named(
    changes: dict[str, Any], text: str, demo: Model
) -> None:
    """A prompt that is too long is neither cut nor left to fail further down."""
    options: dict[str, Any] = {
        "prompts": ["An"],
        "max_tokens": 1,
        "temperature": 1.0,
        "graph": "none",
        **changes,
    }
    with pytest.raises(WeftError, match=text):
        weft.generate(demo, **options)
