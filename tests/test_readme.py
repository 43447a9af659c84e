"""The README's code runs as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
LANGUAGES = {"sh", "python", "text"}  # what runs in a shell, what runs here, and what only shows
INSTALLS = ["pip install -e . && weft demo", "pip install -e '.[test]' && pytest"]


@attrs.frozen
class Block:
    """A fenced block, and the line of its first line of code."""

    language: str
    line: int
    code: str


def blocks() -> list[Block]:
    text = README.read_text(encoding="utf-8")
    fences = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(m[1], text.count("\n", 0, m.start(2)) + 1, m[2]) for m in fences]


def of(language: str) -> list[Block]:
    return [block for block in blocks() if block.language == language]


def test_every_block_has_a_language_that_says_what_it_is_for() -> None:
    assert README.read_text(encoding="utf-8").count("```") == 2 * len(blocks())
    assert {block.language for block in blocks()} <= LANGUAGES


def test_it_installs_in_two_commands() -> None:
    # .ci/run runs these two, each as it stands, in a new virtual environment.
    assert [block.code.strip() for block in of("sh")][:2] == INSTALLS


def test_the_shell_blocks_after_those_run() -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    for block in of("sh")[2:]:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.code],
            cwd=ROOT,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"README.md, line {block.line}:\n{done.stdout}\n{done.stderr}"


def test_the_python_blocks_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = of("python")
    assert found, "the README shows no Python"
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "readme"}
    for block in found:
        # Blank lines before it, so that a traceback has the README's line numbers.
        exec(compile("\n" * (block.line - 1) + block.code, str(README), "exec"), namespace)
