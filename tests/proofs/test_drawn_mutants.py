"""Drawn mutants: each is one change of code that runs; tests kill those that they notice, and the rest are named."""

import ast
import json
from pathlib import Path

import pytest

from weft.proofs.mutants.drawn import changes, draw, main, mirrored_files, mutants_of, tests_of as files_of_tests

REPOSITORY = Path(__file__).parents[2]

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
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '-p no:weft.proofs.plugin'\n")
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
    ],
)
def test_what_stands_in_place_of_a_node(before: str, after: set[str]) -> None:
    [statement] = ast.parse(before).body
    nodes = [statement, statement.value] if isinstance(statement, ast.Expr) else [statement]
    assert {ast.unparse(changed) for node in nodes for changed in changes(node)} == after


def test_one_seed_draws_the_same_mutants_of_core_files() -> None:
    files = mirrored_files(REPOSITORY)
    assert len(files) >= 60
    first, again, other = (draw(REPOSITORY, seed, 20, 100) for seed in (1, 1, 2))
    assert first == again
    assert {mutant.file for mutant in first} != {mutant.file for mutant in other}
    assert len({mutant.file for mutant in first}) == 20
    assert 90 <= len(first) <= 100, "a short file has fewer places than its share"


def test_the_tests_of_a_file_are_its_mirror_and_those_that_import_it() -> None:
    first, *others = files_of_tests(REPOSITORY, Path("lib/trees.py"))
    assert first == "tests/lib/test_trees.py"
    assert others


@pytest.mark.slow
def test_survivors_are_named(project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["--repository", str(project), "--files", "1", "--count", "99", "--out", str(out), "--seconds", "60"]
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
