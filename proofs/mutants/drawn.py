"""Mutants that nobody planted: small changes of the source at random places, and whether a test notices each.

    python -m weft.proofs.mutants.drawn --seed 20261129 --files 20 --count 300 --out build/nightly

It draws files of `lib`, `stages` and `transforms` that a test file mirrors (`lib/trees.py`, `tests/lib/test_trees.py`),
and changes in them. For each change it runs, in a copy of the repository, the mirror, and then every other test file
that imports the module. It names the changes that all of them survive: each is equivalent to the original, or shows a
test that is missing. A mutant that runs longer than its limit counts as killed.
"""

import argparse
import ast
import concurrent.futures
import datetime
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from tqdm.auto import tqdm

HOMES = {"lib": "weft", "stages": "weft.stages", "transforms": "weft.transforms"}
"""The folders of the product, and the package of each."""

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@attrs.frozen
class DrawnMutant:
    """A change of one place of a file.

    Args:
        file: relative to the repository.
        line: of the place, from 1.
        before, after: the text of the place.
        source: the file's whole text with the change.
    """

    file: str
    line: int
    before: str
    after: str
    source: str = attrs.field(repr=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before} -> {self.after}"


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that may stand in place of one."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            yield ast.Compare(node.left, [_COMPARISONS[type(op)]()], node.comparators)
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield ast.BoolOp(other, node.values)
            for index in range(len(node.values)):
                rest = node.values[:index] + node.values[index + 1 :]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            yield ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int(number)):
            yield ast.Constant(number + 1)
        case ast.IfExp():
            yield ast.IfExp(node.test, node.orelse, node.body)
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()
        case ast.Return(value=ast.expr()):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield ast.Pass()
        case _:
            pass


def places(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes of code that runs: no annotations, and no decorators."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        skipped = {"annotation", "returns", "decorator_list", "type_comment"}
        for name, value in ast.iter_fields(node):
            if name not in skipped:
                children = value if isinstance(value, list) else [value]
                waiting += [child for child in children if isinstance(child, ast.AST)]


def mutants_of(file: str, source: str) -> Iterator[DrawnMutant]:
    """Every change of a file, in the order of its places."""
    encoded = source.encode()
    starts = [0]
    for line in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in places(ast.parse(source)):
        for changed in changes(node):
            assert isinstance(node, ast.expr | ast.stmt), "only these have a place"
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)  # ast.parse gives both
            text = ast.unparse(ast.fix_missing_locations(changed))
            after = f"({text})" if isinstance(changed, ast.expr) else text
            whole = (encoded[:start] + after.encode() + encoded[end:]).decode()
            before = " ".join(encoded[start:end].decode().split())
            yield DrawnMutant(file, node.lineno, before, text, whole)


def mirror(repository: Path, file: Path) -> Path | None:
    """The test file that mirrors a file of the product; None if there is none."""
    test = repository / "tests" / file.parent / f"test_{file.name}"
    return test if test.exists() else None


def mirrored_files(repository: Path) -> list[Path]:
    """The files of the product that a test file mirrors, relative to the repository."""
    found = []
    for home in HOMES:
        for path in sorted((repository / home).rglob("*.py")):
            file = path.relative_to(repository)
            linked = any((repository / parent).is_symlink() for parent in file.parents)
            if not linked and mirror(repository, file) is not None:
                found.append(file)
    return found


def module_of(file: Path) -> str:
    """The name by which a file of the product is imported."""
    home, *rest = file.with_suffix("").parts
    return ".".join([HOMES[home], *rest])


def tests_of(repository: Path, file: Path) -> list[str]:
    """The test files to run for a file: its mirror first, then those that import its module."""
    first = mirror(repository, file)
    assert first is not None, "only mirrored files are drawn"
    name = module_of(file)
    importing = []
    for test in sorted((repository / "tests").rglob("test_*.py")):
        text = test.read_text(encoding="utf-8")
        if test != first and (f"{name} import" in text or f'"{name}"' in text):
            importing.append(test)
    return [str(test.relative_to(repository)) for test in (first, *importing)]


def draw(repository: Path, seed: int, num_files: int, count: int, files: Sequence[Path] = ()) -> list[DrawnMutant]:
    """So many mutants, the same for one seed, in so many files, or in the given ones."""
    chance = random.Random(seed)
    chosen = list(files)
    if not chosen:
        candidates = mirrored_files(repository)
        chosen = chance.sample(candidates, min(num_files, len(candidates)))
    drawn: list[DrawnMutant] = []
    for index, file in enumerate(chosen):
        share = count // len(chosen) + (index < count % len(chosen))
        every = list(mutants_of(str(file), (repository / file).read_text(encoding="utf-8")))
        drawn += chance.sample(every, min(share, len(every)))
    return drawn


@attrs.frozen
class Verdict:
    """What the tests said of a mutant.

    Args:
        mutant: the change.
        killed_by: the test file that failed; None if all passed.
        by_mirror: whether that was the file's mirror.
    """

    mutant: DrawnMutant
    killed_by: str | None
    by_mirror: bool


def judge(copy: Path, mutant: DrawnMutant, seconds: float) -> Verdict:
    """Run the tests of a mutant in a copy of the repository, and put the original back."""
    path = copy / mutant.file
    original = path.read_text(encoding="utf-8")
    tests = tests_of(copy, Path(mutant.file))
    try:
        path.write_text(mutant.source, encoding="utf-8")
        for index, test in enumerate(tests):
            if not passes(copy, test, seconds):
                return Verdict(mutant, test, index == 0)
    finally:
        path.write_text(original, encoding="utf-8")
    return Verdict(mutant, None, by_mirror=False)


def passes(copy: Path, test: str, seconds: float) -> bool:
    """Whether a test file passes in a copy of the repository, within its time."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", test]
    environment = os.environ | {"PYTHONPATH": str(copy / ".src"), "PYTHONDONTWRITEBYTECODE": "1"}
    # The safe path keeps the repository's folders out of the modules' path, as `pytest` by itself does.
    environment["PYTHONSAFEPATH"] = "1"
    quiet = subprocess.DEVNULL
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, stdout=quiet, stderr=quiet, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def run(repository: Path, mutants: Sequence[DrawnMutant], workers: int, seconds: float) -> list[Verdict]:
    """The verdicts on mutants, in their order, by so many workers with a copy of the repository each."""
    with tempfile.TemporaryDirectory() as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for index in range(workers):
            copy = Path(folder) / str(index)
            ignored = shutil.ignore_patterns(".git", "build", "__pycache__", "results", ".hypothesis")
            shutil.copytree(repository, copy, symlinks=True, ignore=ignored)
            shutil.copytree(repository / "proofs" / "results", copy / "proofs" / "results")
            copies.put(copy)

        def verdict(mutant: DrawnMutant) -> Verdict:
            copy = copies.get()
            try:
                return judge(copy, mutant, seconds)
            finally:
                copies.put(copy)

        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            return list(tqdm(pool.map(verdict, mutants), total=len(mutants), unit="mutant"))


def record(seed: int, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The counts and the survivors, for a JSON file."""
    killed = [verdict for verdict in verdicts if verdict.killed_by is not None]
    survivors = [verdict.mutant for verdict in verdicts if verdict.killed_by is None]
    return {
        "seed": seed,
        "mutants": len(verdicts),
        "killed by the mirror": sum(verdict.by_mirror for verdict in killed),
        "killed by another test": sum(not verdict.by_mirror for verdict in killed),
        "files": dict(Counter(verdict.mutant.file for verdict in verdicts)),
        "survivors": [str(mutant) for mutant in survivors],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw mutants, run their tests, and print and write what survived."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    today = int(datetime.date.today().strftime("%Y%m%d"))
    parser.add_argument("--seed", type=int, default=today, help="of the drawing (default: today's date)")
    parser.add_argument("--files", type=int, default=20, help="how many files (default: %(default)s)")
    parser.add_argument("--file", type=Path, action="append", default=[], help="this file, and no drawn one")
    parser.add_argument("--count", type=int, default=300, help="how many mutants (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="how many run at once (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=300, help="the limit of a test file (default: %(default)s)")
    parser.add_argument("--repository", type=Path, default=Path.cwd(), help="its root (default: this folder)")
    parser.add_argument("--out", type=Path, help="the folder to write the record to (default: none)")
    options = parser.parse_args(arguments)
    mutants = draw(options.repository, options.seed, options.files, options.count, options.file)
    outcome = record(options.seed, run(options.repository, mutants, options.workers, options.seconds))
    print(json.dumps(outcome, indent=1))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / "drawn-mutants.json"
        path.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
