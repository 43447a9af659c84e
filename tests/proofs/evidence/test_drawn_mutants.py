"""Drawn mutants: each is one change of code that runs; tests kill those that they notice, and the
rest are named."""

import ast
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from weft.proofs.evidence.mutants.drawn import (
    FACES,
    changes,
    draw,
    main,
    mirrored_files,
    mutants_of,
    tests_of as files_of_tests,
)
from weft.proofs.evidence.mutants.judging import functions_in, in_fork, outcome_of, put_in_place

REPOSITORY = Path(__file__).parents[3]

SOURCE = '''"""A module."""


def larger(a: int, b: int = 2) -> int:
    """The larger number."""
    return a if a > b else b


def unused(a: int) -> int:
    return a + 1
'''
TESTS = """from weft.numbers import larger


def test_larger() -> None:
    assert larger(1) == 2
    assert larger(3) == 3
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with one file of the product and its mirror."""
    for folder in ("lib", "tests/lib", ".src", "proofs/results"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / ".src" / "weft").symlink_to("../lib")
    (tmp_path / "lib" / "__init__.py").write_text("")
    (tmp_path / "lib" / "numbers.py").write_text(SOURCE)
    (tmp_path / "tests" / "lib" / "test_numbers.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\naddopts = '-p no:weft.proofs.plugin'\n"
    )
    return tmp_path


def test_a_mutant_is_one_change_that_parses() -> None:
    mutants = list(mutants_of("numbers.py", SOURCE))
    assert {str(mutant) for mutant in mutants} == {
        "numbers.py:4: 2 -> 3",
        "numbers.py:6: return a if a > b else b -> return None",
        "numbers.py:6: a if a > b else b -> b if a > b else a",
        "numbers.py:6: a > b -> a >= b",
        "numbers.py:10: return a + 1 -> return None",
        "numbers.py:10: a + 1 -> a - 1",
        "numbers.py:10: 1 -> 2",
    }
    for mutant in mutants:
        assert ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse(SOURCE))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a and b", {"a or b", "a", "b"}),
        ("a in b", {"a not in b"}),
        ("not a", {"a"}),
        ("True", {"False"}),
        ("7", {"8"}),
        ("f(a)", {"pass"}),
        ("a += 1", {"pass"}),
        ("'text'", set()),
        ("a // b", {"a * b"}),
        ("break", {"continue"}),
        ("return a", {"return None"}),
        ("return None", set()),
    ],
)
def test_what_stands_in_place_of_a_node(before: str, after: set[str]) -> None:
    [statement] = ast.parse(before).body
    nodes = [statement, statement.value] if isinstance(statement, ast.Expr) else [statement]
    assert {ast.unparse(changed) for node in nodes for changed in changes(node)} == after


@pytest.mark.slow
def test_one_seed_draws_the_same_mutants_of_core_files() -> None:
    files = mirrored_files(REPOSITORY)
    assert len(files) >= 60
    assert not [
        file for file in files if file.stem.endswith("_triton") or str(file).startswith(FACES)
    ]
    first, again, other = (draw(REPOSITORY, seed, 20, 100) for seed in (1, 1, 2))
    assert first == again
    assert {mutant.file for mutant in first} != {mutant.file for mutant in other}
    assert len({mutant.file for mutant in first}) == 20
    assert len(first) == 100, "what a short file leaves of its share is drawn in others"


def test_lines_of_a_statement_without_those_inside_it() -> None:
    source = (
        "LIMIT = 1\n\n\ndef f(a, b=2):\n    if a > (\n        b\n    ):\n        return a + b\n   "
        " return b - 1\n"
    )
    spans = {
        (mutant.before, mutant.first_line, mutant.last_line, mutant.in_function)
        for mutant in mutants_of("f.py", source)
    }
    assert spans == {
        ("1", 1, 1, False),
        ("2", 4, 4, False),
        ("a > ( b )", 5, 7, True),
        ("return a + b", 8, 8, True),
        ("a + b", 8, 8, True),
        ("return b - 1", 9, 9, True),
        ("b - 1", 9, 9, True),
        ("1", 9, 9, True),
    }


MADE_AT_IMPORT = """
class Shape:
    def sides(self):
        return 4


def adder(more):
    return lambda number: number + more


one_more = adder(1)
pick = lambda: [0, lambda: 1][1]
"""


@pytest.fixture
def shapes(tmp_path: Path) -> ModuleType:
    """A module in a file."""
    path = tmp_path / "shapes.py"
    path.write_text(MADE_AT_IMPORT)
    spec = importlib.util.spec_from_file_location("shapes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def changed_in_place(shapes: ModuleType, before: str, after: str) -> bool:
    path = Path(str(shapes.__file__))
    [functions] = functions_in([path]).values()
    assert len(functions) >= 4
    return put_in_place(functions, path, MADE_AT_IMPORT, MADE_AT_IMPORT.replace(before, after))


@pytest.mark.one_of(4)
@pytest.mark.parametrize(
    ("before", "after", "use", "expected"),
    [
        ("return 4", "return 5", lambda module: module.Shape.sides, 5),
        ("number + more", "number - more", lambda module: lambda: module.one_more(3), 2),
        ("number + more", "number - more", lambda module: lambda: module.adder(2)(5), 3),
        ("lambda: 1]", "lambda: 7]", lambda module: lambda: module.pick()(), 7),
    ],
)
def test_functions_that_exist_get_their_changed_code(
    shapes: ModuleType,
    before: str,
    after: str,
    use: Callable[[ModuleType], Callable[..., Any]],
    expected: int,
) -> None:
    function = use(shapes)  # as another module has it that imported it earlier
    arguments = [shapes.Shape()] if before == "return 4" else []
    assert changed_in_place(shapes, before, after)
    assert function(*arguments) == expected


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("number + more", "number"),
        ("lambda number: number + more", "None"),
        ("one_more = adder(1)", "one_more = 1"),
    ],
)
def test_what_no_function_alone_can_change_is_imported_anew(
    shapes: ModuleType, before: str, after: str
) -> None:
    assert not changed_in_place(shapes, before, after)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_how_a_fork_ends() -> None:
    def outcome(work: Callable[[Any], None]) -> tuple[str | None, str]:
        return outcome_of(*in_fork(work, lambda _: 4.0))

    def begins(pipe: Any) -> None:
        pipe.tell("begins", "a test")

    def hangs(pipe: Any) -> None:
        begins(pipe)
        time.sleep(60)

    def crashes(pipe: Any) -> None:
        begins(pipe)
        os._exit(3)

    def fails(pipe: Any) -> None:
        begins(pipe)
        pipe.tell("ends", "a test", "failed")

    assert outcome(hangs) == ("a test", "late")
    assert outcome(crashes) == ("a test", "ended")
    assert outcome(fails) == ("a test", "killed")
    assert outcome(lambda _: sys.exit(1)) == ("collection", "ended")
    assert outcome(lambda pipe: pipe.tell("done")) == (None, "survived")


def test_the_tests_of_a_file_are_its_mirror_and_those_that_import_it() -> None:
    first, *importers = files_of_tests(REPOSITORY, Path("lib/values/trees.py"))
    assert first == "tests/lib/values/test_trees.py"
    assert importers


@pytest.mark.nightly
def test_survivors_are_named(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = [
        "--repository",
        str(project),
        "--files",
        "1",
        "--count",
        "99",
        "--out",
        str(out),
        "--seconds",
        "60",
    ]
    assert main(arguments) == 0
    stored = json.loads((out / "drawn-mutants.json").read_text())
    assert json.loads(capsys.readouterr().out) == stored
    assert stored["killed by the mirror"] == 3
    assert set(stored["survivors"]) == {
        "lib/numbers.py:6: a > b -> a >= b",
        "lib/numbers.py:10: return a + 1 -> return None",
        "lib/numbers.py:10: a + 1 -> a - 1",
        "lib/numbers.py:10: 1 -> 2",
    }
