"""What `.ci/environments.py` runs and records, and that the README says what it recorded."""

import importlib.util
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("environments", ROOT / ".ci" / "environments.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for a class's module
    spec.loader.exec_module(module)
    return module


environments = _load()


def entry(name: str, python: str, torch: str, passed: bool = True) -> dict[str, Any]:
    return {"environment": name, "python": python, "torch": torch, "passed": passed}


def test_the_readme_says_what_was_recorded() -> None:
    readme = README.read_text(encoding="utf-8")
    assert (
        environments.with_sentence(readme, environments.sentence(environments.read_record()))
        == readme
    )


def test_the_readme_has_no_other_line_on_versions() -> None:
    text = README.read_text(encoding="utf-8")
    line = environments.sentence(environments.read_record())
    assert re.findall(r"[Tt]ested (?:with|on) .*", text) == ([] if line is None else [line])


def test_a_version_that_nobody_ran_is_noticed() -> None:
    readme = README.read_text(encoding="utf-8")
    planted = environments.with_sentence(readme, "Tested with Python 3.11, and torch 9.99.")
    assert planted != readme
    assert (
        environments.with_sentence(planted, environments.sentence(environments.read_record()))
        == readme
    )


def test_the_line_has_what_passed_alone() -> None:
    record = [
        entry("unpinned", "3.11.7", "2.14.1"),
        entry("torch-2.9", "3.11.7", "2.9.0", passed=False),
        entry("torch-2.13", "3.11.7", "2.13.0+cpu"),
        entry("torch-2.11", "3.11.7", "2.11.0"),
        entry("python-3.13", "3.13.0", "2.14.1"),
    ]
    line = "Tested with Python 3.11 and 3.13, and torch 2.11, 2.13 and 2.14."
    assert environments.sentence(record) == line
    assert environments.sentence(record[1:2]) is None
    assert environments.sentence(record[:1]) == "Tested with Python 3.11, and torch 2.14."
    readme = "Words.\n\nOne.\nApache-2.0.\n"
    assert environments.with_sentence(readme, line) == f"Words.\n\nOne.\n{line}\nApache-2.0.\n"
    assert environments.with_sentence(f"One.\n{line}\nApache-2.0.\n", None) == "One.\nApache-2.0.\n"


def test_an_outcome_takes_the_place_of_an_earlier_one() -> None:
    record = [entry("lowest", "3.11.7", "2.11.0"), entry("torch-2.13", "3.11.7", "2.13.0")]
    changed = environments.with_outcome(record, entry("lowest", "3.11.7", "2.11.0", passed=False))
    assert [(one["environment"], one["passed"]) for one in changed] == [
        ("lowest", False),
        ("torch-2.13", True),
    ]


def test_every_recorded_outcome_says_what_ran() -> None:
    fields = {"environment", "commit", "day", "demo", "python", "torch", "triton", "passed"}
    for outcome in environments.read_record():
        assert fields <= outcome.keys()
        assert not outcome["passed"] or re.search(r"\d+ passed", outcome["tests"])
        assert not outcome["passed"] or not re.search(r"\d+ (failed|error)", outcome["tests"])


LISTING = """torch (2.15.0)
Available versions: 2.15.0, 2.14.1, 2.14.0, 2.13.0+cpu, 2.13.0, 2.12.1, 2.12.0rc1, 2.11.0, 2.10.0, 2.9.1, 1.13.1
  INSTALLED: 2.14.1
"""


def test_each_minor_version_of_torch_that_the_project_allows_has_an_environment() -> None:
    assert environments.newest_of_each_minor(LISTING, "2.11") == [
        "2.11.0",
        "2.12.1",
        "2.13.0",
        "2.14.1",
        "2.15.0",
    ]
    assert environments.newest_of_each_minor(LISTING, "2.13.0") == ["2.13.0", "2.14.1", "2.15.0"]
    with pytest.raises(ValueError, match="pip lists no versions"):
        environments.newest_of_each_minor("ERROR: no network", "2.11")


def test_the_lowest_environment_has_every_requirement_of_the_project() -> None:
    project = environments.project()
    bounds = environments.lower_bounds(project)
    extras = project["optional-dependencies"].values()
    for requirement in map(Requirement, itertools.chain(project["dependencies"], *extras)):
        if requirement.name != project["name"]:
            assert f"{requirement.specifier}" == f">={bounds[requirement.name]}"


@pytest.mark.parametrize(
    ("dependencies", "problem"),
    [
        (["numpy"], "'numpy' has no lower bound"),
        (["torch<3"], "'torch<3' has no lower bound"),
        (["rich>=13", "rich>=14"], "rich has the lower bounds 13 and 14"),
    ],
)
def test_a_requirement_whose_lower_bound_is_not_tried_is_refused(
    dependencies: list[str], problem: str
) -> None:
    table = {
        "name": "house",
        "dependencies": dependencies,
        "optional-dependencies": {"all": ["house[door]", "uv>=1"]},
    }
    with pytest.raises(ValueError, match=re.escape(problem)):
        environments.lower_bounds(table)


def test_names_and_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "torch_releases", lambda python: ["2.11.0", "2.12.1"])
    monkeypatch.setattr(environments, "other_pythons", lambda: ["python3.13"])
    by_name = {one.name: one for one in environments.environments()}
    assert [*by_name] == ["unpinned", "lowest", "torch-2.11", "torch-2.12", "python-3.13"]
    assert by_name["unpinned"].constraints is None
    assert by_name["torch-2.12"].constraints == ("torch==2.12.1",)
    assert {"llguidance==1.6", "torch==2.11"} <= {*by_name["lowest"].constraints}
    assert by_name["python-3.13"].python == "python3.13"


def test_both_commands_run_as_the_readme_prints_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an environment whose pip, weft and pytest only print how they were called."""
    monkeypatch.setattr(environments, "LOGS", tmp_path / "logs")
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("pip", "weft", "pytest"):
        program = commands / name
        program.write_text(
            f'#!/bin/sh\necho "{name} $* under $(cat "$PIP_CONSTRAINT"), with $PYTEST_ADDOPTS"\n'
        )
        program.chmod(0o755)
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("torch==2.12.1")
    script = f"{ROOT / '.ci' / 'readme'}"
    variables = {
        "PATH": "/usr/bin:/bin",
        "PIP_CONSTRAINT": f"{constraints}",
        "PYTEST_ADDOPTS": "-x",
    }
    under = "under torch==2.12.1, with -x"
    for number, lines in enumerate(
        (
            [
                "$ pip install -e . && weft demo",
                f"pip install -e . {under}",
                f"weft demo {under}",
            ],
            [
                "$ pip install -e '.[test]' && pytest",
                f"pip install -e .[test] {under}",
                f"pytest  {under}",
            ],
        ),
        1,
    ):
        log = tmp_path / f"{number}.txt"
        code, last = environments._logged(
            ["bash", script, f"{tmp_path}", f"{number}"], log, variables
        )
        assert code == 0
        assert log.read_text().splitlines() == lines
        assert last == lines[-1]


def test_ci_runs_both_commands_and_pins_nothing() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.findall(r"\.ci/readme \S+ (\d)$", text, re.MULTILINE) == ["1", "2"]
    assert re.search(r"^unset .*\bPIP_CONSTRAINT\b.*\bPYTEST_ADDOPTS\b", text, re.MULTILINE)
    assert "torch" not in re.sub(r"torch is not installed twice", "", text)


def test_the_record_is_a_file_that_reads_well() -> None:
    if environments.RECORD.exists():
        text = environments.RECORD.read_text(encoding="utf-8")
        assert text == json.dumps(json.loads(text), indent=1) + "\n"
