"""`--stages`: custom stages in the commands that run a model, and what is said of a function
that gives none."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import Weft, assert_refused

from weft.stages import sow
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.model import Model
from weft.transforms.engine.generate import generate

MODEL = (
    "--model",
    str(DEMO),
    "--device",
    "cpu",
    "--prompt",
    "A list is",
    "--max-tokens",
    "4",
    "--json",
)
MODULE = """
import torch
from weft.stages import sow

def negated(model):
    zero = torch.zeros(model.config.vocab_size, dtype=model.dtype)
    return model.with_stages(layers={1: sown}, captures={"top": torch.zeros(1, dtype=torch.int64)}, logits=minus)

def minus(logits, rows, extras):
    return -logits

def sown(layer):
    def run(params, kv_pages, batch, tables, hidden):
        hidden, kv_pages = layer(params, kv_pages, batch, tables, hidden)
        sow("top", hidden.argmax(-1, keepdim=True))
        return hidden, kv_pages
    return run

def three(model):
    return 3

def loud(model):
    raise ValueError("not today")
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_stages_of_a_test.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def expected() -> Model:
    """The same stages, made here."""

    def change(layer: Any) -> Any:
        def run(*args: Any) -> Any:
            hidden, kv_pages = layer(*args)
            sow("top", hidden.argmax(-1, keepdim=True))
            return hidden, kv_pages

        return run

    captures = {"top": torch.zeros(1, dtype=torch.int64)}
    model = load(DEMO, "cpu")
    return model.with_stages(
        layers={1: change}, captures=captures, logits=lambda logits, rows, extras: -logits
    )


@pytest.mark.parametrize("more", [(), ("--pp", "2", "--transport", "local")])
def test_generate_runs_them(run: Weft, more: tuple[str, ...]) -> None:
    code, out, _ = run("generate", *MODEL, "--stages", "own_stages_of_a_test:negated", *more)
    [completion] = generate(expected(), ["A list is"], max_tokens=4)
    result = json.loads(out)
    assert code == 0
    assert result["token_ids"] == completion.token_ids
    assert result["captured"] == {"top": completion.captured["top"].tolist()}


@pytest.mark.slow
def test_each_rank_imports_them(run: Weft) -> None:
    code, out, _ = run("generate", *MODEL, "--stages", "own_stages_of_a_test:negated", "--pp", "2")
    [completion] = generate(expected(), ["A list is"], max_tokens=4)
    assert (code, json.loads(out)["token_ids"]) == (0, completion.token_ids)


@pytest.mark.slow
def test_bench_runs_them(run: Weft) -> None:
    lengths = ("--input-len", "4", "--output-len", "4", "--num-prompts", "3")
    flags = ("--stages", "own_stages_of_a_test:negated")
    code, out, _ = run("bench", "--preset", "tiny", "--device", "cpu", *lengths, *flags, "--json")
    assert (code, json.loads(out)["wanted"]["own_stages"]) == (0, flags[1])


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("own_stages_of_a_test:three", "it returned an int"),
        ("own_stages_of_a_test:loud", "ValueError: not today"),
        ("own_stages_of_a_test:none", "AttributeError"),
        ("no_such_module_of_a_test:f", "ModuleNotFoundError"),
    ],
)
def test_what_gives_no_stages_is_named(run: Weft, name: str, problem: str) -> None:
    assert_refused(run("generate", *MODEL, "--stages", name), f"--stages {name}", problem)


def test_another_attention(run: Weft) -> None:
    def ids(*more: str) -> list[int]:
        return list(json.loads(run("generate", *MODEL, *more)[1])["token_ids"])

    assert ids("--attention", "torch") == ids()
    refused = run("generate", *MODEL, "--attention", "triton")
    assert_refused(
        refused, "--attention triton", "attention back end 'triton', which runs on cuda, not on cpu"
    )
