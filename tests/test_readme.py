"""The README's code runs as it stands there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, blocks, run

README = ROOT / "README.md"
LANGUAGES = {"sh", "python", "text"}  # what runs in a shell, what runs here, and what only shows
INSTALLS = ["pip install -e . && weft demo", "pip install -e '.[test]' && pytest"]


def test_every_block_has_a_language_that_says_what_it_is_for() -> None:
    assert README.read_text(encoding="utf-8").count("```") == 2 * len(blocks(README))
    assert {block.language for block in blocks(README)} <= LANGUAGES


def test_it_installs_in_two_commands() -> None:
    # .ci/run runs these two, each as it stands, in a new virtual environment.
    assert [block.code.strip() for block in blocks(README, "sh")][:2] == INSTALLS


@pytest.mark.slow
def test_the_shell_blocks_after_those_run() -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    for block in blocks(README, "sh")[2:]:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.code],
            cwd=ROOT,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"README.md, line {block.line}:\n{done.stdout}\n{done.stderr}"


def test_the_python_blocks_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert blocks(README, "python"), "the README shows no Python"
    monkeypatch.chdir(tmp_path)
    run(README)
