"""The command line in this process, and a small model, for the tests of its commands."""

import json
from pathlib import Path
from typing import Any

import pytest
from cli_calls import Weft

from weft.transforms.cli.main import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Weft:
    """`weft ARGS` in this process, 80 columns wide: its exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()  # the output of other code, before the call
        try:
            code: Any = main(argv)
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A model whose head is as large as 4 layers, without weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 8,
        "vocab_size": 2304,
        "max_position_embeddings": 4096,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)
