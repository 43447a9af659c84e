"""Mutants that nobody planted: small changes of the source at random places, and whether a test
notices each.

    python -m weft.proofs.evidence.mutants.drawn --seed 20261129 --files 20 --count 300 --out
    build/nightly

It draws core files of `lib`, `stages` and `transforms` that a test file mirrors
(`lib/values/trees.py`, `tests/lib/values/test_trees.py`), and changes in them. For each change it
runs, in a copy of the repository, the tests that reach the changed statement: those of the mirror,
and then those of the test files that import the module, quick ones first, as far as a budget
allows. It names the changes that all of them survive: each is equivalent to the original, or shows
a test that is missing. A mutant that runs longer than its limit counts as killed.

With `--out`, a second run of the same seed goes on where the first one stopped. `judging.py` says
how tests are run.
"""

import argparse
import ast
import datetime
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

# The folders of the product, and the package of each.
HOMES = {"lib": "weft", "stages": "weft.stages", "transforms": "weft.transforms"}

# Folders whose files are not drawn: they show results and read requests. Kernels are not drawn
# either, since no CPU runs them.
FACES = ("lib/display", "transforms/cli", "transforms/server")

# The packages that tests import. The parent process imports them, so that no fork has to.
IMPORTS = (
    "torch",
    "torch._dynamo",
    "torch.testing",
    "numpy",
    "hypothesis",
    "transformers",
    "tokenizers",
    "z3",
    "rich",
)

# Each becomes its nearest neighbour: `<` becomes `<=` and not `>=`, so that only a test of the
# boundary itself notices.
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
        first_line, last_line: of the statement around the place; of a compound statement, its head
            alone.
        in_function: whether the place runs when a function is called, not when the module is
            imported.
    """

    file: str
    line: int
    before: str
    after: str
    source: str = attrs.field(repr=False)
    first_line: int = 0
    last_line: int = 0
    in_function: bool = False

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before} -> {self.after}"


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that may stand in place of one."""
    match node:
        # Chains such as `0 <= x < n` have several operators, and are left alone.
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            yield ast.Compare(node.left, [_COMPARISONS[type(op)]()], node.comparators)
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield ast.BoolOp(other, node.values)
            for index in range(len(node.values)):
                rest = node.values[:index] + node.values[index + 1 :]
                # Without one of its parts: each condition must have a test for which it alone
                # decides.
                yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            yield ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
        # Before int, since a bool is one too: True + 1 would be 2.
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
        # A constant that is returned has been changed as a constant already.
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield ast.Return(ast.Constant(None))
        # A call whose result nobody takes is there for its effect, as an addition in place is.
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield ast.Pass()
        case _:
            pass


@attrs.frozen
class _Place:
    """A node, the statement around it, and whether it is in the body of a function."""

    node: ast.AST
    statement: ast.stmt | None
    in_function: bool


def places(tree: ast.Module) -> Iterator[_Place]:
    """The nodes of code that runs: no annotations, and no decorators."""
    waiting = [_Place(tree, None, in_function=False)]
    while waiting:
        place = waiting.pop()
        yield place
        # No test can notice a change of what does not run, and a decorator runs once at the import.
        skipped = {"annotation", "returns", "decorator_list", "type_comment"}
        for name, value in ast.iter_fields(place.node):
            if name not in skipped:
                children = value if isinstance(value, list) else [value]
                is_function = isinstance(
                    place.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
                )
                in_function = place.in_function or (is_function and name == "body")
                for child in children:
                    if isinstance(child, ast.AST):
                        statement = child if isinstance(child, ast.stmt) else place.statement
                        waiting.append(_Place(child, statement, in_function))


def _span(statement: ast.stmt) -> tuple[int, int]:
    """The lines of a statement, without the statements in it."""
    inner = [
        node.lineno
        for node in ast.walk(statement)
        if isinstance(node, ast.stmt) and node is not statement
    ]
    last = statement.end_lineno or statement.lineno
    return statement.lineno, max(statement.lineno, min([last + 1, *inner]) - 1) if inner else last


def mutants_of(file: str, source: str) -> Iterator[DrawnMutant]:
    """Every change of a file, in the order of its places."""
    encoded = source.encode()
    # In bytes: the columns of `ast` count bytes of UTF-8 and not characters.
    starts = [0]
    for line in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for place in places(ast.parse(source)):
        node = place.node
        for changed in changes(node):
            assert isinstance(node, ast.expr | ast.stmt), "only these have a place"
            assert place.statement is not None, "a module's nodes are in statements"
            start = starts[node.lineno - 1] + node.col_offset
            # Ast.parse gives both
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            text = ast.unparse(ast.fix_missing_locations(changed))
            if isinstance(changed, ast.expr):
                # In brackets, or the operators around the place could bind its parts to themselves.
                after = f"({text})"
            else:
                after = text
            first_line, last_line = _span(place.statement)
            yield DrawnMutant(
                file=file,
                line=node.lineno,
                before=" ".join(encoded[start:end].decode().split()),
                after=text,
                source=(encoded[:start] + after.encode() + encoded[end:]).decode(),
                first_line=first_line,
                last_line=last_line,
                in_function=place.in_function,
            )


def mirror(repository: Path, file: Path) -> Path | None:
    """The test file that mirrors a file of the product; None if there is none."""
    test = repository / "tests" / file.parent / f"test_{file.name}"
    if test.exists():
        return test
    return None


def mirrored_files(repository: Path) -> list[Path]:
    """The core files of the product that a test file mirrors, relative to the repository."""
    files = []
    for home in HOMES:
        for path in sorted((repository / home).rglob("*.py")):
            file = path.relative_to(repository)
            # A link shows a file under a second path, under which no test mirrors it.
            linked = any((repository / parent).is_symlink() for parent in file.parents)
            is_face = any(file.is_relative_to(face) for face in FACES)
            is_kernel = file.stem.endswith("_triton")
            if not (linked or is_face or is_kernel) and mirror(repository, file) is not None:
                files.append(file)
    return files


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
        # A test names a module in an import, or as a string where it patches a name in it.
        if test != first and (f"{name} import" in text or f'"{name}"' in text):
            importing.append(test)
    return [str(test.relative_to(repository)) for test in (first, *importing)]


def draw(
    repository: Path, seed: int, num_files: int, count: int, files: Sequence[Path] = ()
) -> list[DrawnMutant]:
    """So many mutants, the same for one seed, in so many files, or in the given ones."""
    # Not the global generator: the draw must be the same in each process, whatever else draws.
    chance = random.Random(seed)
    chosen = list(files)
    if not chosen:
        candidates = mirrored_files(repository)
        chosen = chance.sample(candidates, min(num_files, len(candidates)))
    possible = {
        file: list(mutants_of(str(file), (repository / file).read_text(encoding="utf-8")))
        for file in chosen
    }
    drawn: list[DrawnMutant] = []
    # A short file has fewer places than its share; those after it in length take what it leaves.
    by_length = sorted(chosen, key=lambda file: len(possible[file]))
    for index, file in enumerate(by_length):
        share = (count - len(drawn)) // (len(by_length) - index)
        drawn += chance.sample(possible[file], min(share, len(possible[file])))
    return drawn


@attrs.frozen
class Verdict:
    """What the tests said of a mutant.

    Args:
        mutant: the change.
        outcome: `killed` by a test that failed; `late`, `ended`: it took too long, or ended the
            process; `survived`.
        killed_by: the test; None if all passed.
        by_mirror: whether that was one of the file's mirror.
        num_run: how many tests ran.
        num_left: how many tests that reach the change the budget left out.
    """

    mutant: DrawnMutant
    outcome: str
    killed_by: str | None
    by_mirror: bool
    num_run: int
    num_left: int


@attrs.frozen
class Limits:
    """The limits of a run of drawn mutants.

    Args:
        workers: how many processes try mutants, each in a copy of the repository.
        seconds: how long a test may take without a change.
        budget: seconds of tests for one mutant, of its mirror and again of the other tests.
    """

    workers: int = 2
    seconds: float = 300.0
    budget: float = 120.0


def run(
    repository: Path, mutants: Sequence[DrawnMutant], limits: Limits, out: Path
) -> list[Verdict]:
    """The verdicts on mutants, in their order: first by their mirrors; then, on those that survive,
    by other tests.

    Raises:
        RuntimeError: a worker failed; its log is in `out`.
    """
    out.mkdir(parents=True, exist_ok=True)
    tests = {mutant.file: tests_of(repository, Path(mutant.file)) for mutant in mutants}
    # In two rounds, because a mirror is much smaller than all tests that import a module: most
    # mutants end there, and only the survivors pay for the others.
    mirrors = sorted(names[0] for names in tests.values())
    rows = _round("mirrors", repository, dict(enumerate(mutants)), mirrors, limits, out)
    verdicts = {
        number: _verdict(mutants[number], row, by_mirror=True) for number, row in rows.items()
    }
    survivors = {
        number: mutants[number] for number, verdict in verdicts.items() if verdict.killed_by is None
    }
    importers = sorted({test for mutant in survivors.values() for test in tests[mutant.file][1:]})
    if survivors and importers:
        rows = _round("importers", repository, survivors, importers, limits, out)
        for number, row in rows.items():
            verdict = _verdict(mutants[number], row, by_mirror=False)
            verdicts[number] = attrs.evolve(
                verdict,
                num_run=verdict.num_run + verdicts[number].num_run,
                num_left=verdict.num_left + verdicts[number].num_left,
            )
    return [verdicts[number] for number in range(len(mutants))]


def _verdict(mutant: DrawnMutant, row: Mapping[str, Any], *, by_mirror: bool) -> Verdict:
    return Verdict(
        mutant=mutant,
        outcome=row["outcome"],
        killed_by=row["killed_by"],
        by_mirror=by_mirror and row["killed_by"] is not None,
        num_run=row["num_run"],
        num_left=row["num_left"],
    )


def _round(
    name: str,
    repository: Path,
    mutants: Mapping[int, DrawnMutant],
    tests: Sequence[str],
    limits: Limits,
    out: Path,
) -> dict[int, dict[str, Any]]:
    """The verdicts of these test files on the mutants, by the mutants' numbers."""
    numbers = list(mutants)
    # Several workers need the times and the lines of the unchanged tests, which one without mutants
    # finds first.
    if limits.workers > 1:
        shares: list[list[int]] = [[]]
    else:
        shares = []
    # In turn and not in blocks: mutants of one file follow each other, and files differ in their
    # tests.
    shares += [numbers[worker :: limits.workers] for worker in range(limits.workers)]
    verdicts = [out / f"{name}-{index}.jsonl" for index in range(len(shares))]
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for index, share in enumerate(shares):
            copy = _copied(repository, Path(folder) / str(index))
            job = {
                "root": str(copy),
                "files": sorted({mutant.file for mutant in mutants.values()}),
                "tests": tests,
                "mutants": [_as_json(number, mutants[number]) for number in share],
                "imports": IMPORTS,
                "baseline": str((out / f"{name}-unchanged.json").resolve()),
                "verdicts": str(verdicts[index].resolve()),
                "progress": str((out / "progress.txt").resolve()),
                "seconds": limits.seconds,
                "budget": limits.budget,
            }
            path = Path(folder) / f"job-{index}.json"
            path.write_text(json.dumps(job), encoding="utf-8")
            processes.append(_start(copy, path, out / f"log-{index}.txt"))
            # The one without mutants is waited for before the next one starts.
            if not share:
                _finish(processes.pop(), out)
        for process in processes:
            _finish(process, out)
    rows: dict[int, dict[str, Any]] = {}
    for path in verdicts:
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
        else:
            lines = []
        rows |= {row["number"]: row for row in map(json.loads, lines)}
    return rows


def _copied(repository: Path, copy: Path) -> Path:
    """A copy of the repository, in which files may be changed."""
    ignored = shutil.ignore_patterns(".git", "build", "__pycache__", "results", ".hypothesis")
    shutil.copytree(repository, copy, symlinks=True, ignore=ignored)
    # The pattern above leaves out every folder of that name; tests read the records in this one.
    shutil.copytree(repository / "proofs" / "results", copy / "proofs" / "results")
    return copy


def _as_json(number: int, mutant: DrawnMutant) -> dict[str, Any]:
    return attrs.asdict(mutant) | {"number": number, "text": str(mutant)}


def _start(copy: Path, job: Path, log: Path) -> "subprocess.Popen[bytes]":
    """Start a worker on a job."""
    # The safe path keeps the repository's folders out of the modules' path, as `pytest` by itself
    # does.
    environment = os.environ | {"PYTHONPATH": str(copy / ".src"), "PYTHONSAFEPATH": "1"}
    # By its path and not by `-m`, which would import the package around it, and a mutant may be in
    # there.
    script = Path(__file__).with_name("judging.py")
    # At the end: a second run of the same seed goes on, and must not lose what the first one said.
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, str(script), str(job)],
            cwd=copy,
            env=environment,
            stdout=stream,
            stderr=stream,
        )


def _finish(process: "subprocess.Popen[bytes]", out: Path) -> None:
    if process.wait() != 0:
        raise RuntimeError(f"a worker ended with {process.returncode}: read the logs in {out}")


def record(seed: int, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The counts and the survivors, for a JSON file."""
    killed = [verdict for verdict in verdicts if verdict.killed_by is not None]
    survivors = [verdict for verdict in verdicts if verdict.killed_by is None]
    return {
        "seed": seed,
        "mutants": len(verdicts),
        "killed by the mirror": sum(verdict.by_mirror for verdict in killed),
        "killed by another test": sum(not verdict.by_mirror for verdict in killed),
        "files": dict(Counter(verdict.mutant.file for verdict in verdicts)),
        "survivors": [str(verdict.mutant) for verdict in survivors],
        "tests of survivors that the budget left out": sum(
            verdict.num_left for verdict in survivors
        ),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw mutants, run their tests, and print and write what survived."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    # Another draw each day, which can still be repeated: the record has the seed.
    today = int(datetime.date.today().strftime("%Y%m%d"))
    parser.add_argument(
        "--seed", type=int, default=today, help="of the drawing (default: today's date)"
    )
    parser.add_argument(
        "--files", type=int, default=20, help="how many files (default: %(default)s)"
    )
    parser.add_argument(
        "--file", type=Path, action="append", default=[], help="this file, and no drawn one"
    )
    parser.add_argument(
        "--count", type=int, default=300, help="how many mutants (default: %(default)s)"
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="how many run at once (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=300,
        help="the limit of an unchanged test (default: %(default)s)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=120,
        help=(
            "seconds of tests for a mutant in its mirror, and again in the other test files"
            " (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--repository", type=Path, default=Path.cwd(), help="its root (default: this folder)"
    )
    parser.add_argument(
        "--out", type=Path, help="the folder to write the record to (default: none)"
    )
    options = parser.parse_args(arguments)
    mutants = draw(options.repository, options.seed, options.files, options.count, options.file)
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder)
        details = out / f"drawn-mutants-{options.seed}"
        limits = Limits(workers=options.workers, seconds=options.seconds, budget=options.budget)
        verdicts = run(options.repository, mutants, limits, details)
        outcome = record(options.seed, verdicts)
        path = out / "drawn-mutants.json"
        path.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(outcome, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
