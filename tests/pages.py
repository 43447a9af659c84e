"""Pages of Markdown as what can be checked of them: their blocks of code, run, and the tests and
files they name."""

import ast
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


def broken_anchors(page: Path) -> list[str]:
    """The links of a page to headings that are not there, with GitHub's rule for their names."""
    text = page.read_text(encoding="utf-8")
    broken = []
    for link, anchor in re.findall(r"\]\(([^)#\s:]*\.md)?#([\w-]+)\)", text):
        target = page.parent / link if link else page
        headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        names = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        if anchor not in names:
            broken.append(f"{link}#{anchor}")
    return broken


def paths(page: Path) -> list[str]:
    """The files, folders and patterns of the repository that a page names as code, or in a command."""
    rooms = r"lib|stages|transforms|proofs|tests|\.ci|\.github|\.src"
    matches = re.findall(rf"(?<![\w/.-])((?:{rooms})/[\w./*-]*)", page.read_text(encoding="utf-8"))
    return [path.rstrip(".") for path in matches]


def modules(page: Path) -> list[str]:
    """The modules that a page runs: `python -m NAME`."""
    return re.findall(r"python -m (weft[\w.]*)", page.read_text(encoding="utf-8"))


def ways(page: Path) -> list[tuple[Path, str]]:
    """The files, and the functions in them, that the diagrams of a page name at the ends of their
    lines; a file without a function has an empty one.

    A diagram's paths begin at the root, or at the folder that its text names before it.
    """
    text = page.read_text(encoding="utf-8")
    steps = []
    for diagram in re.finditer(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        above = text[: diagram.start()].rstrip().rpartition("\n\n")[2]
        folder = re.search(r"\(`([\w/]+/)`", above)
        base = ROOT / (folder[1] if folder else "")
        file = base
        for line in diagram[1].splitlines():
            *_, where = re.split(r" {2,}", line.rstrip(" ┐┤◄┘│─"))
            if ".py" not in where:
                continue
            for name in where.split(", "):
                if name.endswith(".py"):
                    beside = file.parent / name
                    file = base / name
                    if not file.is_file():
                        file = beside
                    steps.append((file, ""))
                else:
                    steps[-1] = (file, name)
    return steps


def defines(file: Path, name: str) -> bool:
    """Whether a file exists and defines a function or a class of this name, which may be dotted; a
    method without its class is enough."""
    if not file.is_file():
        return False
    nodes: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for part in filter(None, name.split(".")):
        nodes = [
            inner
            for node in nodes
            for inner in ast.walk(node)
            if isinstance(inner, kinds) and inner.name == part
        ]
    return bool(nodes)


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
