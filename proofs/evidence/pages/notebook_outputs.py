"""The outputs that the notebooks ship with: `python -m weft.proofs.evidence.pages.notebook_outputs`
runs them all and writes them.

With names (`... 1-first-steps 5-proofs`) it runs these alone. A test runs every notebook and
compares its outputs with those in the file: texts by `shown`, pictures by their presence.
"""

import argparse
import re
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[2] / "notebooks"
# A cell may take so long; all notebooks together take about a minute of two idle cores.
SECONDS = 120
# The tag of a cell whose text differs between runs: only the kinds of its outputs are compared.
VARIES = "varies"
# A unit that goes on, as in `s/it`, is none of these.
_TIME = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)? ?(%|µs|us|ms|s)(?![\w/])")
# The file of a cell has the number of the process in its name.
_CELL = re.compile(r"\S*/ipykernel_\d+/\d+\.py")
_LONG = 200
# The MIME type of a progress bar, which only a slow machine shows.
_BAR = "application/vnd.jupyter.widget-view+json"
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}|/tmp/\S+")


def names() -> list[str]:
    """The notebooks, in their order, without the ending of their files."""
    return sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name: str) -> Any:
    """A notebook as its file has it."""
    nbformat: Any = import_module("nbformat")
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)


def run(notebook: Any, folder: Path) -> Any:
    """Execute a notebook in a folder, in place, and return it with the outputs of this run."""
    from nbclient import NotebookClient

    resources = {"metadata": {"path": str(folder)}}
    # Both would change the file at each run.
    options: dict[str, Any] = {"record_timing": False, "store_widget_state": False}
    NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources=resources, **options
    ).execute()
    # Only what a reader needs: the rest names the kernel and the machine that ran it.
    notebook.metadata = {
        "kernelspec": notebook.metadata.kernelspec,
        "language_info": {"name": "python"},
        # Listings of operators differ between versions, so that a test compares only under this
        # one.
        "weft": {"torch": torch_version()},
    }
    for cell in code_cells(notebook):
        cell.outputs = joined(
            [cleaned(output) for output in cell.outputs if _BAR not in output.get("data", {})]
        )
    return notebook


def joined(outputs: Sequence[Any]) -> list[Any]:
    """The outputs with neighbouring pieces of one stream put together: a slow machine writes a text
    in several."""
    merged: list[Any] = []
    for output in outputs:
        if (
            merged
            and output.output_type == "stream" == merged[-1].output_type
            and output.name == merged[-1].name
        ):
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def cleaned(output: Any) -> Any:
    """An output without the names of temporary files; without the long `repr` of what is shown as
    HTML."""
    if "text" in output:
        output.text = _CELL.sub("(this cell)", output.text)
    data = output.get("data", {})
    for kind in [kind for kind in data if kind.startswith("text/")]:
        data[kind] = _CELL.sub("(this cell)", data[kind])
    # A page shows the HTML. The text is for readers without it, who need its beginning.
    if "text/html" in data and len(data.get("text/plain", "")) > _LONG:
        data["text/plain"] = data["text/plain"][:_LONG] + "…"
    return output


def torch_version() -> str:
    """The major and minor version of torch, which listings and messages depend on."""
    return ".".join(torch.__version__.split(".")[:2])


def code_cells(notebook: Any) -> list[Any]:
    """The cells that have outputs."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> list[tuple[str, ...]]:
    """The kind of each of a cell's outputs: the name of a stream, or the MIME types of a value."""
    return [
        (o.name,) if o.output_type == "stream" else tuple(sorted(o.get("data", {})))
        for o in cell.outputs
    ]


def shown(cell: Any) -> list[str]:
    """The texts of a cell's outputs, without times and addresses, which differ from run to run."""
    texts: list[str] = []
    for output in cell.outputs:
        if output.output_type == "stream":
            data = {"text": output.text}
        else:
            data = output.get("data", {})
        texts += [text for kind, text in sorted(data.items()) if kind.startswith("text")]
    # Replaced and not removed, so that a text in which a time is missing still differs.
    return [_ADDRESS.sub("(address)", _TIME.sub("(time)", text)) for text in texts]


def is_compared(cell: Any) -> bool:
    """Whether a cell says the same in every run."""
    return VARIES not in cell.metadata.get("tags", [])


def main(argv: Sequence[str] | None = None) -> None:
    """Run notebooks, and write their outputs to their files."""
    nbformat: Any = import_module("nbformat")
    parser = argparse.ArgumentParser(
        prog="python -m weft.proofs.evidence.pages.notebook_outputs", description="Rewrite outputs."
    )
    parser.add_argument("names", nargs="*", help="notebooks, without the ending; none: all")
    for name in parser.parse_args(argv).names or names():
        with tempfile.TemporaryDirectory() as folder:
            notebook = run(read(name), Path(folder))
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        print(f"{name}: {(FOLDER / f'{name}.ipynb').stat().st_size / 1024:.0f} KiB", flush=True)


if __name__ == "__main__":
    main()
