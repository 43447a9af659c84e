"""The record of mutants: the law that catches each planted bug, and the smallest case.

`python -m weft.proofs.evidence.mutants --out FOLDER` writes it; with `--missing`, cases that FOLDER
has are replayed, and only mutants that it lacks, or whose case no longer breaks the law, are
searched.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hypothesis
import torch
from tqdm import tqdm

from weft.proofs.evidence.mutants import MUTANTS
from weft.proofs.evidence.mutants.catch import catch, replay
from weft.proofs.evidence.mutants.mutant import Mutant

HEADER = ("law", "planted bug", "example", "smallest case", "what was different")
# The most cases to search for one that breaks a law; some bugs show in one of a hundred.
MOST_EXAMPLES = 1000
# The most characters of a cell of the page. `mutants.json` has every case whole.
LONGEST = 160


def row(
    mutant: Mutant, device: str, shrinks: int, stored_row: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One planted bug, and the result of its law: on the case of a known row, if that still breaks
    it."""
    # The replay, too, runs with the bug planted: a case that broke the law once may have lost its
    # effect when the code around the bug changed.
    with mutant.plant():
        again = None if stored_row is None else replay(mutant.law, stored_row["choices"])
        if (
            stored_row is not None and again is not None and again.choices == stored_row["choices"]
        ):  # its texts may be others now
            return {
                **stored_row,
                "case": list(again.case),
                "violation": again.violation.splitlines()[0],
            }
        caught = catch(mutant.law, device, max_examples=MOST_EXAMPLES, shrinks=shrinks)
    outcome = (
        {"examples": None, "case": [], "violation": "survived", "choices": ""}
        if caught is None
        else {
            "examples": caught.examples,
            "case": list(caught.case),
            "violation": caught.violation.splitlines()[0],
            "choices": caught.choices,
        }
    )
    return {"law": str(mutant.law), "mutant": mutant.name, **outcome}


def _beginning(text: str) -> str:
    text = " ".join(text.split())
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}…"


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The rows as Markdown, with the beginnings of long cells."""
    lines = [" | ".join(HEADER), " | ".join("---" for _ in HEADER)]
    for r in rows:
        cells = (
            r["law"],
            r["mutant"],
            str(r["examples"]),
            _beginning("; ".join(r["case"])),
            _beginning(r["violation"]),
        )
        lines.append(" | ".join(cell.replace("|", "\\|") for cell in cells))
    return "\n".join(f"| {line} |" for line in lines)


def _stored(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of a record that have a case to replay, by law and bug."""
    rows = json.loads((folder / "mutants.json").read_text(encoding="utf-8"))["mutants"]
    return {(r["law"], r["mutant"]): r for r in rows if r.get("choices")}


def main() -> None:
    """Plant every bug, write `mutants.json` and `mutants.md`, and exit with 1 if a bug survived."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--shrinks", type=int, default=300, help="how many smaller cases to try for each"
    )
    parser.add_argument(
        "--missing", action="store_true", help="search for those alone that have no case in FOLDER"
    )
    arguments = parser.parse_args()
    # The number of threads may change the order of a sum, and so which case first breaks a law of
    # bits.
    torch.set_num_threads(1)
    if arguments.missing:
        stored_rows = _stored(arguments.out)
    else:
        stored_rows = {}
    options = arguments.device, arguments.shrinks
    rows = [
        row(each, *options, stored_rows.get((str(each.law), each.name)))
        for each in tqdm(MUTANTS, unit="mutant")
    ]
    survived = [r["mutant"] for r in rows if r["examples"] is None]
    report = {
        "device": arguments.device,
        "torch": torch.__version__,
        "hypothesis": hypothesis.__version__,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "mutants.json").write_text(
        json.dumps({**report, "mutants": rows}, indent=1) + "\n"
    )
    title = (
        f"# {len(rows)} planted bugs, and the laws that caught {len(rows) - len(survived)} of them"
    )
    said = (
        "Each law ran on random cases with the bug planted, until one broke it (the column"
        " *example* counts them), and then on smaller ones. Long cells are cut; `mutants.json` has"
        " them whole. Written by `python -m weft.proofs.evidence.mutants --out FOLDER`."
    )
    (arguments.out / "mutants.md").write_text(f"{title}\n\n{said}\n\n{table(rows)}\n")
    print(table(rows))
    # A mutant that survives is a failure of the law and not of the mutant: the law promises too
    # little, or its strategy never draws the case.
    raise SystemExit(f"survived: {', '.join(survived)}" if survived else 0)


if __name__ == "__main__":
    main()
