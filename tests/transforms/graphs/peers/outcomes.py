"""A table of the scenarios of JAX's and torch's tests, and of their outcomes, from the docstrings
of the tests here.

`python tests/transforms/graphs/peers/outcomes.py` rewrites `proofs/results/peers.md`;
`test_outcomes.py` compares them.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import attrs

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[3]
PAGE = ROOT / "proofs" / "results" / "peers.md"
MEANING = {
    "SAME": "weft does what the peer does",
    "REFUSED": "weft raises an error that names the cause, by design",
    "DIFFERS": "weft answers otherwise, by design",
    "FAULT": "weft is wrong: a test that is expected to fail",
}
_DOCSTRING = re.compile(r"(jax|torch): (.*?)(?:; (refused|differs): (.*))?")


@attrs.frozen
class Scenario:
    """One test, the tests of a peer that it translates, and its outcome."""

    peer: str
    theirs: tuple[str, ...]
    ours: str
    outcome: str
    reason: str


def scenarios() -> list[Scenario]:
    """Every test of the folder, in order.

    Raises:
        ValueError: a test's docstring names no test of a peer.
    """
    return [
        scenario for file in sorted(FOLDER.glob("test_*_*.py")) for scenario in _scenarios_of(file)
    ]


def _scenarios_of(file: Path) -> Iterator[Scenario]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        text = " ".join((ast.get_docstring(node) or "").split())
        if (match := _DOCSTRING.fullmatch(text)) is None:
            raise ValueError(
                f"{file.name}::{node.name}: no test of a peer in its docstring: {text!r}"
            )
        fault = any("xfail" in ast.unparse(decorator) for decorator in node.decorator_list)
        outcome = "FAULT" if fault else (match[3] or "same").upper()
        yield Scenario(
            match[1], tuple(_names(match[2])), f"{file.stem}::{node.name}", outcome, match[4] or ""
        )


def _names(text: str) -> Iterator[str]:
    """The names of a list in which a class stands before the first of its tests, without notes in
    parentheses."""
    owner = ""
    for name in re.sub(r" \([^)]*\)", "", text).split(", "):
        owner = name.partition(".")[0] if "." in name else owner
        yield name if "." in name else f"{owner}.{name}"


def page(scenarios: list[Scenario]) -> str:
    """The table, in Markdown."""
    counts = Counter(scenario.outcome for scenario in scenarios)
    names = {(scenario.peer, name) for scenario in scenarios for name in scenario.theirs}
    lines = [
        "# The tests of peers, as scenarios",
        "",
        (
            f"{len(scenarios)} tests of `tests/transforms/graphs/peers` translate {len(names)} tests of"
            " `jax.jit` and of"
        ),
        "torch's CUDA graphs. `outcomes.py` in that folder writes this page.",
        "",
        "| outcome | tests | |",
        "|---|---|---|",
        *(f"| {name} | {counts[name]} | {MEANING[name]} |" for name in MEANING),
        "",
        "| peer | its tests | test | outcome | reason |",
        "|---|---|---|---|---|",
        *(
            f"| {s.peer} | {', '.join(s.theirs)} | {s.ours} | {s.outcome} | {s.reason} |"
            for s in scenarios
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(scenarios()), encoding="utf-8")
