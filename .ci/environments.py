"""The README's first two commands in fresh environments, and the record of those in which both
passed.

    python3 .ci/environments.py                       every environment, one after the other
    python3 .ci/environments.py torch-2.11 lowest     some of them
    python3 .ci/environments.py --list                their names
    python3 .ci/environments.py lowest --pytest "tests/lib -k padding"    a trial, which records nothing

`unpinned` has what pip chooses. `torch-2.N` has the newest release of that minor version of torch;
there is one for each minor version in the package index, from the oldest that `pyproject.toml`
allows. `python-3.N` is each other Python on the PATH, with what pip chooses. `lowest` has the lower
bound of each requirement in `pyproject.toml`, so that no bound is a guess.

What the commands print is written to `build/nightly/environments`. `.ci/tested.json` has the last
outcome of each environment, and the README's line "Tested with" is written from those that passed.
"""

import argparse
import dataclasses
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RECORD = ROOT / ".ci" / "tested.json"
LOGS = ROOT / "build" / "nightly" / "environments"
# The line of the README before which its line "Tested with" stands.
LAST_LINE = "Apache-2.0."


@dataclasses.dataclass(frozen=True)
class Environment:
    """An environment to make.

    Args:
        name: in the record, and of the file with its output.
        python: the interpreter of its virtual environment.
        constraints: the requirements that pip must keep to; None: those of the machine, if it has
            any.
    """

    name: str
    python: str
    constraints: tuple[str, ...] | None = None


def project() -> dict[str, Any]:
    """The table `project` of `pyproject.toml`."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    return table


def minor(version: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    first, second, *_ = re.findall(r"\d+", version)
    return int(first), int(second)


def lower_bounds(table: dict[str, Any]) -> dict[str, str]:
    """The least version of each package that the project or one of its extras requires, but for
    weft itself.

    Raises:
        ValueError: a requirement has no lower bound, or two requirements of one package have
            different ones.
    """
    requirements = list(table["dependencies"])
    for extra in table["optional-dependencies"].values():
        requirements += extra
    bounds: dict[str, str] = {}
    for requirement in requirements:
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        if name == table["name"]:
            continue
        bound = re.search(r">=\s*([\w.]+)", requirement)
        if bound is None:
            raise ValueError(f"pyproject.toml: {requirement!r} has no lower bound")
        if bounds.setdefault(name, bound[1]) != bound[1]:
            raise ValueError(
                f"pyproject.toml: {name} has the lower bounds {bounds[name]} and {bound[1]}"
            )
    return bounds


def newest_of_each_minor(listing: str, oldest: str) -> list[str]:
    """The newest release of each minor version, oldest first, from what `pip index versions`
    prints. Releases that are no final ones, and builds of one index alone (`2.13.0+cpu`), are left
    out."""
    line = re.search(r"^Available versions: (.*)$", listing, re.MULTILINE)
    if line is None:
        raise ValueError(f"pip lists no versions:\n{listing}")
    releases = [version for version in line[1].split(", ") if re.fullmatch(r"[\d.]+", version)]
    newest: dict[tuple[int, int], str] = {}
    for version in sorted(releases, key=lambda text: [int(part) for part in text.split(".")]):
        if minor(version) >= minor(oldest):
            newest[minor(version)] = version
    return list(newest.values())


def torch_releases(python: str) -> list[str]:
    """The newest release of each minor version of torch that the project allows and the index has
    for this Python."""
    command = [python, "-m", "pip", "index", "versions", "torch", "--disable-pip-version-check"]
    with tempfile.NamedTemporaryFile() as nothing:  # in place of a constraint of the machine
        variables = os.environ | {"PIP_CONSTRAINT": nothing.name}
        done = subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE, text=True)
    return newest_of_each_minor(done.stdout, lower_bounds(project())["torch"])


def other_pythons() -> list[str]:
    """The Pythons on the PATH that the project allows, without the minor version that runs this."""
    oldest = minor(project()["requires-python"])
    names = (
        f"python3.{number}"
        for number in range(oldest[1], 100)
        if (3, number) != sys.version_info[:2]
    )
    return [name for name in names if _runs(name)]


def _runs(python: str) -> bool:
    try:
        return subprocess.run([python, "-c", "import venv"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def environments() -> list[Environment]:
    """All environments, those first that fail for most reasons."""
    python = getattr(sys, "_base_executable", sys.executable)
    lowest = tuple(f"{name}=={version}" for name, version in lower_bounds(project()).items())
    return [
        Environment("unpinned", python),
        Environment("lowest", python, lowest),
        *(
            Environment("torch-{}.{}".format(*minor(version)), python, (f"torch=={version}",))
            for version in torch_releases(python)
        ),
        *(Environment(name.replace("python", "python-"), name) for name in other_pythons()),
    ]


def run(environment: Environment, pytest_options: str | None) -> dict[str, Any]:
    """Make an environment, run both commands in it, and return what the record says of it."""
    LOGS.mkdir(parents=True, exist_ok=True)
    outcome: dict[str, Any] = {
        "environment": environment.name,
        "commit": _commit(),
        "day": f"{datetime.date.today()}",
    }
    hidden = {"PYTHONPATH", "VIRTUAL_ENV", "PYTEST_ADDOPTS"}
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    if pytest_options is not None:
        variables["PYTEST_ADDOPTS"] = pytest_options
    with tempfile.TemporaryDirectory() as folder:
        venv = Path(folder) / "venv"
        subprocess.run([environment.python, "-m", "venv", f"{venv}"], check=True)
        if environment.constraints is not None:
            constraints = Path(folder) / "constraints.txt"
            constraints.write_text("\n".join(environment.constraints))
            variables["PIP_CONSTRAINT"] = f"{constraints}"
        variables["PYTHONPYCACHEPREFIX"] = f"{Path(folder) / 'bytecode'}"
        codes = []
        for number, name in enumerate(("demo", "tests"), 1):
            command = ["bash", f"{ROOT / '.ci' / 'readme'}", f"{venv}", f"{number}"]
            code, outcome[name] = _logged(
                command, LOGS / f"{environment.name}-{name}.txt", variables
            )
            codes.append(code)
            if code:
                break
        outcome |= _versions(venv)
    outcome["passed"] = codes == [0, 0]
    return outcome


def _logged(command: list[str], log: Path, variables: dict[str, str]) -> tuple[int, str]:
    """The exit code of a command, and the last line that it printed."""
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    lines = [
        line.strip(" =") for line in log.read_text(encoding="utf-8", errors="replace").split("\n")
    ]
    return done.returncode, next((line for line in reversed(lines) if line), "")


def _versions(venv: Path) -> dict[str, str]:
    """The versions of Python, torch and triton in a virtual environment."""
    code = """
import json, platform
from importlib.metadata import distributions
known = {item.metadata["Name"].lower(): item.version for item in distributions()}
print(json.dumps({"python": platform.python_version(), "torch": known.get("torch"), "triton": known.get("triton")}))
"""
    done = subprocess.run(
        [venv / "bin" / "python", "-c", code], check=True, stdout=subprocess.PIPE, text=True
    )
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def _commit() -> str:
    """The commit of the working tree, which ends in `-dirty` if the tree has changes."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    return subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def read_record() -> list[dict[str, Any]]:
    """The last outcome of each environment; empty before the first."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else []


def with_outcome(record: list[dict[str, Any]], outcome: dict[str, Any]) -> list[dict[str, Any]]:
    """The record with an outcome in place of an earlier one of that environment."""
    others = [entry for entry in record if entry["environment"] != outcome["environment"]]
    return sorted([*others, outcome], key=lambda entry: entry["environment"])


def sentence(record: list[dict[str, Any]]) -> str | None:
    """The README's line "Tested with"; None if no environment has passed."""
    passed = [entry for entry in record if entry["passed"]]
    if not passed:
        return None
    pythons = _listed(entry["python"] for entry in passed)
    torches = _listed(entry["torch"] for entry in passed)
    return f"Tested with Python {pythons}, and torch {torches}."


def _listed(versions: Iterable[str]) -> str:
    """The minor versions in words: `2.11, 2.12 and 2.13`."""
    *first, last = [f"{one}.{two}" for one, two in sorted({minor(version) for version in versions})]
    return f"{', '.join(first)} and {last}" if first else last


def with_sentence(readme: str, line: str | None) -> str:
    """The README with this line "Tested with", or without one.

    Raises:
        ValueError: the README does not have the line before which it stands.
    """
    lines = [text for text in readme.split("\n") if not text.startswith("Tested with ")]
    place = lines.index(LAST_LINE)
    return "\n".join([*lines[:place], *([] if line is None else [line]), *lines[place:]])


def main() -> int:
    """Run what the command line asks for; the exit code is 1 if an environment failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="environments; all, if none is named")
    parser.add_argument("--list", action="store_true", help="print the names of all environments")
    parser.add_argument(
        "--pytest", help="options for pytest, for a trial; nothing is recorded then"
    )
    options = parser.parse_args()
    known = {environment.name: environment for environment in environments()}
    if options.list:
        print("\n".join(known))
        return 0
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no environment {', '.join(unknown)}: there are {', '.join(known)}")
    failed = []
    for name in options.names or known:
        outcome = run(known[name], options.pytest)
        print(json.dumps(outcome), flush=True)
        if not outcome["passed"]:
            failed.append(name)
        if options.pytest is None:
            record = with_outcome(read_record(), outcome)
            RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            README.write_text(
                with_sentence(README.read_text(encoding="utf-8"), sentence(record)),
                encoding="utf-8",
            )
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
