"""How the code reads, in counts that can be compared with other projects':

python -m weft.proofs.evidence.pages.house [FOLDER ...]

It prints a row for each folder: lines; per 1,000 lines of code, assignments of one tuple to another,
conditional expressions and comprehensions; the share of long lines and of comments; and vague names
per 1,000 names.
"""

import argparse
import ast
import io
import tokenize
from collections.abc import Iterable, Sequence, Set
from pathlib import Path

import attrs

# Names that say how a value was come by, and not what it is.
VAGUE = frozenset({"asked", "found", "given", "held", "known", "made", "others", "own"})
VAGUE |= {"seen", "wanted"}
MOST_COLUMNS = 100
ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("lib", "stages", "transforms", "proofs", "tests")
# What is no code: comments, and the marks of lines.
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@attrs.frozen
class Counts:
    """Counts of Python source.

    Args:
        lines: all of them.
        code: those with more than a comment.
        long: those of more than MOST_COLUMNS.
        comments: those with a comment.
        skips: the marks that keep a formatter away.
        names: the occurrences of names of variables, arguments and attributes.
        vague: those of them that are VAGUE, underscores at their ends aside.
        tuples: assignments of one tuple to another: `a, b = x, y`.
        ternaries: conditional expressions.
        comprehensions: those of lists, sets, dicts and generators.
    """

    lines: int = 0
    code: int = 0
    long: int = 0
    comments: int = 0
    skips: int = 0
    names: int = 0
    vague: int = 0
    tuples: int = 0
    ternaries: int = 0
    comprehensions: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        pairs = zip(attrs.astuple(self), attrs.astuple(other), strict=True)
        return Counts(*(mine + its for mine, its in pairs))

    @property
    def row(self) -> dict[str, float]:
        """The counts of lines and marks, and the others as shares."""
        # By lines of code, since docstrings and comments would thin the counts out.
        per_line = 1000 / max(self.code, 1)
        return {
            "lines": self.lines,
            "tuples": round(self.tuples * per_line, 1),
            "ternaries": round(self.ternaries * per_line, 1),
            "comprehensions": round(self.comprehensions * per_line, 1),
            "long lines, %": round(100 * self.long / max(self.lines, 1), 1),
            "comments, %": round(100 * self.comments / max(self.lines, 1), 1),
            "fmt: skip": self.skips,
            "vague names": round(1000 * self.vague / max(self.names, 1), 1),
        }


def count(text: str) -> Counts:
    """The counts of one file.

    >>> count("a, made = 1, 2 if x else 3  # why\\n").row["vague names"]
    333.3
    """
    tree = ast.parse(text)
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    code = {token.start[0] for token in tokens if token.type not in _NO_CODE}
    # By tokens and not by lines: a `#` in a string is no comment, and one behind code is.
    comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    nodes = list(ast.walk(tree))
    names = [name for node in nodes for name in _names_of(node)]
    vague = _vague_in(text)
    return Counts(
        lines=text.count("\n"),
        code=len(code),
        long=sum(len(line) > MOST_COLUMNS for line in text.splitlines()),
        comments=len(comments),
        skips=sum(
            "# fmt: skip" in token.string for token in tokens if token.type == tokenize.COMMENT
        ),
        names=len(names),
        vague=sum(name.strip("_") in vague for name in names),
        tuples=sum(map(_assigns_tuples, nodes)),
        ternaries=sum(isinstance(node, ast.IfExp) for node in nodes),
        comprehensions=sum(isinstance(node, _COMPREHENSIONS) for node in nodes),
    )


def vague_names(text: str) -> list[tuple[int, str]]:
    """The vague names of a file, each with its line."""
    vague = _vague_in(text)
    return sorted(
        (node.lineno, name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Name | ast.arg | ast.Attribute)
        for name in _names_of(node)
        if name.strip("_") in vague
    )


def _vague_in(text: str) -> Set[str]:
    if "from hypothesis import" in text:  # `@given(...)` is its name
        return VAGUE - {"given"}
    return VAGUE


def _names_of(node: ast.AST) -> Sequence[str]:
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.arg):
        return (node.arg,)
    if isinstance(node, ast.Attribute):
        return (node.attr,)
    return ()


def _assigns_tuples(node: ast.AST) -> bool:
    # A call that returns a tuple has no shorter form; two values in one line do.
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


def sources(folder: str) -> Iterable[Path]:
    """The Python files of a folder of the repository, without those behind links."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        # `.src` shows the same files under a second path, and they would count twice.
        if not any(part.is_symlink() for part in (path, *path.parents)):
            yield path


def counts_of(folder: str) -> Counts:
    """The counts of a folder of the repository."""
    total = Counts()
    for path in sources(folder):
        total += count(path.read_text(encoding="utf-8"))
    return total


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m weft.proofs.evidence.pages.house")
    parser.add_argument("folders", nargs="*", default=list(FOLDERS), metavar="FOLDER")
    rows = {folder: counts_of(folder) for folder in parser.parse_args(argv).folders}
    titles = list(Counts().row)
    print(f"{'':12}" + "".join(f"{title:>16}" for title in titles))
    for folder, counts in rows.items():
        print(f"{folder:12}" + "".join(f"{counts.row[title]:>16,}" for title in titles))


if __name__ == "__main__":
    main()
