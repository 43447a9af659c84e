"""Pages of Markdown as what can be checked of them: their blocks of code, run, and the tests and
files they name."""

import re
from pathlib import Path
from typing import Any

import attrs

ROOT = Path(__file__).parent.parent


@attrs.frozen
class Block:
    """A fenced block, and the line of its first line of code."""

    language: str
    line: int
    code: str


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The blocks of a page, or those in one language."""
    text = page.read_text(encoding="utf-8")
    fences = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    fenced = [Block(m[1], text.count("\n", 0, m.start(2)) + 1, m[2]) for m in fences]
    return [block for block in fenced if language in (None, block.language)]


def run(page: Path) -> dict[str, Any]:
    """Run the blocks of Python one after the other, in one namespace."""
    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page, "python"):
        # Blank lines before it, so that a traceback has the page's line numbers.
        exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)
    return namespace


def links(page: Path) -> list[str]:
    """The files that a page links to, as it writes them."""
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    return [link for link in targets if "://" not in link]


def paths(page: Path) -> list[str]:
    """The files, folders and patterns of the repository that a page names as code, or in a command."""
    rooms = r"lib|stages|transforms|proofs|tests|\.ci|\.github|\.src"
    matches = re.findall(rf"(?<![\w/.-])((?:{rooms})/[\w./*-]*)", page.read_text(encoding="utf-8"))
    return [path.rstrip(".") for path in matches]


def modules(page: Path) -> list[str]:
    """The modules that a page runs: `python -m NAME`."""
    return re.findall(r"python -m (weft[\w.]*)", page.read_text(encoding="utf-8"))


def node_ids(page: Path) -> list[tuple[str, str, str]]:
    """The tests that a page names: file, function, and the case in brackets, or nothing."""
    return re.findall(
        r"`(tests/[\w/]+\.py)::(\w+)(?:\[([^\]`]+)\])?`", page.read_text(encoding="utf-8")
    )


def missing_test(file: str, function: str, case: str, cases: set[str]) -> str:
    """Why a test that a page names does not exist; empty if it does. `cases` are those of the laws."""
    path = ROOT / file
    if not path.is_file():
        return f"no file {file}"
    if not re.search(
        rf"^(?:async )?def {function}\(", path.read_text(encoding="utf-8"), re.MULTILINE
    ):
        return f"no {function} in {file}"
    return f"no law {case!r}" if case and case not in cases else ""
