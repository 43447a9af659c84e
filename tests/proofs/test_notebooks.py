"""The notebooks run from the first cell to the last, their stored outputs are those of the code,
and the extra `notebook` installs what they import."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement

from weft.proofs.evidence.pages.notebook_outputs import (
    FOLDER,
    code_cells,
    is_compared,
    joined,
    kinds,
    names,
    read,
    run,
    shown,
    torch_version,
)

ROOT = Path(__file__).parent.parent.parent
NAMES = (
    "1-first-steps",
    "2-a-pipeline-is-a-program",
    "3-a-real-model",
    "4-research",
    "5-proofs",
    "6-sampler-and-trainer",
)
# torch's own warnings, such as that of 2.15 at the first `torch.func.jvp`; they are ignored
# elsewhere too.
OF_TORCH = re.compile(r"\S*/site-packages/torch/\S+ FutureWarning: ")
MOST_BYTES = 350_000
# The tag of a cell that is an experiment's own code.
EXPERIMENT = "ten lines"
REWRITE = "python -m weft.proofs.evidence.pages.notebook_outputs"


def test_the_list_is_whole() -> None:
    assert sorted(path.name for path in FOLDER.iterdir() if path.is_file()) == [
        f"{name}.ipynb" for name in NAMES
    ]
    assert "proofs/notebooks/" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert tuple(names()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_it_is_valid_and_small_and_has_its_outputs(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)], (
        f"run: {REWRITE}"
    )
    assert set(notebook.metadata) == {"kernelspec", "language_info", "weft"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert any("assert " in cell.source for cell in cells)
    assert sum(map(is_compared, cells)) > 0.6 * len(cells)
    assert any(cell.outputs for cell in cells)
    assert (FOLDER / f"{name}.ipynb").stat().st_size <= MOST_BYTES
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert re.findall(r"/tmp/|/home/|/root/|ipykernel_", text) == []


@pytest.mark.parametrize(("name", "count"), [("3-a-real-model", 9), ("4-research", 8)])
def test_experiments_take_at_most_ten_lines(name: str, count: int) -> None:
    """As the notebooks say; blank lines and comments are not counted."""
    cells = [cell for cell in code_cells(read(name)) if EXPERIMENT in cell.metadata.get("tags", [])]
    assert len(cells) == count
    for cell in cells:
        lines = [
            line
            for line in cell.source.splitlines()
            if line.strip() and not line.strip().startswith("#")
        ]
        assert len(lines) <= 10, cell.source


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_its_outputs_are_those_of_the_code(name: str, tmp_path: Path) -> None:
    stored = code_cells(read(name))
    notebook = run(read(name), tmp_path)
    cells = code_cells(notebook)
    told = [output for cell in cells for output in cell.outputs]
    said = [output.text for output in told if output.get("name") == "stderr"]
    assert [text for text in said if not OF_TORCH.match(text)] == []
    assert {path.name for path in tmp_path.iterdir()} <= {".hypothesis"}
    if read(name).metadata.weft.torch != torch_version():
        return  # listings and messages differ with another torch
    for before, after in zip(stored, cells, strict=True):
        assert kinds(before) == kinds(after), f"run: {REWRITE} {name}"
        if is_compared(after):
            assert shown(before) == shown(after), f"run: {REWRITE} {name}"


def test_times_and_addresses_are_not_compared() -> None:
    cell, other = (nbformat.v4.new_code_cell() for _ in range(2))
    cell.outputs = [
        nbformat.v4.new_output("stream", text="6 graphs in 1.25 ms, at 0x7f12ab34, 12 bytes")
    ]
    other.outputs = [
        nbformat.v4.new_output("stream", text="6 graphs in 40 s, at 0x7f12ab35, 12 bytes")
    ]
    assert shown(cell) == shown(other) == ["6 graphs in (time), at (address), 12 bytes"]
    other.outputs[0].text = "7 graphs in 1.25 ms, at 0x7f12ab34, 12 bytes"
    assert shown(cell) != shown(other)


def test_a_text_that_came_in_pieces_is_one() -> None:
    """Also where a progress bar stood between them, which only a slow machine shows."""
    pieces = [("stdout", "a"), ("stdout", "b\n"), ("stderr", "c"), ("stdout", "d")]
    outputs = [nbformat.v4.new_output("stream", name=name, text=text) for name, text in pieces]
    outputs.insert(0, nbformat.v4.new_output("display_data", {"text/plain": "1"}))
    merged = [(output.output_type, output.get("text")) for output in joined(outputs)]
    assert merged == [("display_data", None), ("stream", "ab\n"), ("stream", "c"), ("stream", "d")]


def requirements(names: list[str]) -> set[str]:
    """The distributions that these requirements install, with their own requirements."""
    distributions: set[str] = set()
    while names:
        requirement = Requirement(names.pop())
        name = canonical(requirement.name)
        extras = ["", *requirement.extras]
        if name in distributions or not (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            continue
        distributions.add(name)
        try:
            inner = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # not for this machine
            continue
        names += [r for r in inner if any(applies(Requirement(r), extra) for extra in extras)]
    return distributions


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def uses(name: str) -> Iterator[str]:
    """A notebook's imports, and the names of weft that it uses (`weft.proofs.check`), as code."""
    code = [cell.source for cell in read(name).cells if cell.cell_type == "code"]
    for node in ast.walk(ast.parse("\n".join(code))):
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        if is_import or (
            isinstance(node, ast.Attribute) and re.fullmatch(r"weft(\.\w+)+", ast.unparse(node))
        ):
            yield ast.unparse(node)


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is not in the extra", name=name)

BLOCKED = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Blocked())
import weft
"""


@pytest.mark.slow
def test_the_extra_brings_what_they_import() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    brought = requirements(
        [*project["dependencies"], *project["optional-dependencies"]["notebook"]]
    )
    assert {"torch", "matplotlib"} <= brought
    assert "pytest" not in brought
    distributions_by_module = metadata.packages_distributions().items()
    blocked_modules = [
        module
        for module, names in distributions_by_module
        if not {"weft", *brought} & {*map(canonical, names)}
    ]
    lines = [line for name in NAMES for line in (f"print({name!r})", *dict.fromkeys(uses(name)))]
    code = "\n".join([BLOCKED, *lines])
    done = subprocess.run(
        [sys.executable, "-c", code, ",".join(blocked_modules)], capture_output=True, text=True
    )
    assert done.returncode == 0, [done.stdout.splitlines()[-1], done.stderr.splitlines()[-1]]
