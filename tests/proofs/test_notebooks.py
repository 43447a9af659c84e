"""The notebooks run from their first cell to their last, and nothing of a run is kept in them."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "proofs" / "notebooks"
NAMES = ("1-first-steps", "2-a-pipeline-is-a-program", "3-a-real-model", "4-research", "5-proofs")
BAR = "application/vnd.jupyter.widget-view+json"
SECONDS = 120
"""For a cell; all notebooks together take about a minute of two idle cores."""


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)


def test_the_list_is_whole() -> None:
    assert sorted(path.name for path in FOLDER.iterdir() if path.is_file()) == [f"{name}.ipynb" for name in NAMES]
    assert "proofs/notebooks/" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_it_is_valid_and_stripped(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell for cell in code if cell.outputs or cell.execution_count is not None or cell.metadata] == []
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert any("assert " in cell.source for cell in code)


@pytest.mark.parametrize("name", NAMES)
def test_it_runs(name: str, tmp_path: Path) -> None:
    notebook = read(name)
    NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    told = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert [output.text for output in told if output.get("name") == "stderr"] == []
    assert [output for output in told if BAR in output.get("data", {})] == []  # what is short has none
    assert {path.name for path in tmp_path.iterdir()} <= {".hypothesis"}
