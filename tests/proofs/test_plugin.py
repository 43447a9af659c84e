"""The pytest plugin, in separate runs of pytest: profiles, the marker, failures, and the modules
that it imports."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from weft.extras import install_command

ROOT = Path(__file__).parents[2]
pytest_plugins = ["pytester"]

FAILS = """
import torch
from hypothesis import given
from weft.proofs import assert_equivalent
from weft.proofs.strategies import tensors

def clipped(x):
    return x.clamp(max=2.0)

def whole(x):
    return x

@given(tensors(1))
def test_inside(x):
    assert_equivalent(clipped, whole, args=(x,))

def test_outside():
    assert_equivalent(clipped, whole, args=(tensors(1),))
"""

PROFILE = """
from hypothesis import settings

def test_profile():
    now = settings()
    print("profile:", now.max_examples, now.derandomize, now.deadline is None, now.database is None)
"""

MISSING = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hypothesis":
            raise ImportError(name)

sys.meta_path.insert(0, Missing())
"""

DEVICES = """
import pytest

def test_device(weft_device):
    assert weft_device == "cpu"

@pytest.mark.gpu
def test_gpu():
    pass
"""

TRACES = """
import logging
import pytest
from torch._logging import trace_structured

logging.getLogger("quiet").propagate = False
trace_structured("artifact")  # torch's own handler leaves at the first trace, if no file is asked for
made = []

def trace(phase):
    trace_structured("artifact", payload_fn=lambda: made.append(phase) or phase)

@pytest.fixture
def traced():
    trace("setup")
    yield
    trace("teardown")

def test_traces(traced, caplog):
    trace("call")
    logging.getLogger("quiet").warning("heard")
    assert "heard" in caplog.text

def test_none_was_made():
    assert made == []
"""

OPTIONS = ("-p", "weft.proofs.plugin", "-p", "no:cacheprovider")


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess(*OPTIONS, *options)


def run_here(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    """In this process, where a profile would stay loaded, and modules of weft would be imported
    twice."""
    return pytester.runpytest_inprocess(*OPTIONS, *options)


@pytest.fixture(autouse=True)
def _no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_HYPOTHESIS_PROFILE", raising=False)
    monkeypatch.delenv("CI", raising=False)  # Hypothesis has its own profile there


@pytest.mark.nightly
def test_the_code_of_a_counterexample_stands_apart(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(FAILS)
    done = run(pytester)
    done.assert_outcomes(failed=2)
    for _ in range(2):
        done.stdout.fnmatch_lines(
            [
                "E*clipped is not whole, bitwise",
                "E*at:      the result, element [[]0[]] of float32 [[]1[]] on cpu",
                "E*clipped: 2.0",
                "E*whole:   2.25",
                "E*apart:   0.25, 1,048,576 ULPs",
                "-*weft: to see it again*-",
                "import torch",
                "import weft.proofs",
                "args = (torch.tensor([[]2.25[]]),)",
                "weft.proofs.assert_equivalent(clipped, whole, args=args)",
            ],
            consecutive=False,
        )
    assert "to see it again:" not in done.stdout.str()
    assert "search.py" not in done.stdout.str()  # the traceback ends in the user's own code


SEEN = {"ci": "100 True True True", "gpu": "50 True True True", "explore": "1000 False True False"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "name"),
    [
        *(("option", name) for name in SEEN),
        ("variable", "gpu"),
        ("configuration", "explore"),
        ("configuration", "ci"),
    ],
)
def test_profiles(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, way: str, name: str
) -> None:
    if way == "variable":
        monkeypatch.setenv("WEFT_HYPOTHESIS_PROFILE", name)
    pytester.makeini(
        "[pytest]\nweft_profile = ci"
        if way != "configuration"
        else f"[pytest]\nweft_profile = {name}"
    )
    pytester.makepyfile(PROFILE)
    done = run(pytester, "-s", *([f"--weft-profile={name}"] if way == "option" else []))
    done.stdout.fnmatch_lines([f"*profile: {SEEN[name]}*"])


@pytest.mark.slow
def test_no_profile_leaves_hypothesis_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(PROFILE)
    run(pytester, "-s").stdout.fnmatch_lines(["*profile: 100 False False False*"])


@pytest.mark.slow
def test_a_profile_that_there_is_not(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_HYPOTHESIS_PROFILE", "fast")
    done = run(pytester)
    done.stderr.fnmatch_lines(["*weft's profile is 'fast': write one of ci, gpu, explore"])


@pytest.mark.slow
def test_without_hypothesis(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(sitecustomize=MISSING, test_one="def test_one(): pass")
    monkeypatch.setenv(
        "PYTHONPATH", f"{pytester.path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    options = ("-p", "no:hypothesispytest")
    run(pytester, *options).assert_outcomes(passed=1)
    done = run(pytester, *options, "--weft-profile=ci")
    done.stderr.fnmatch_lines(
        [f"*weft's profile 'ci' needs Hypothesis: {install_command('proofs')}"]
    )


def test_what_needs_a_gpu(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(DEVICES)
    counts = (
        {"passed": 1, "skipped": 2} if not torch.cuda.is_available() else {"passed": 2, "failed": 1}
    )
    run_here(pytester, "--strict-markers").assert_outcomes(**counts)
    run_here(pytester, "-m", "not gpu").assert_outcomes(passed=1, deselected=2)


@pytest.mark.slow
def test_pytest_does_not_have_torch_make_traces(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_TRACE", raising=False)
    pytester.makepyfile(TRACES)
    run(pytester, "--log-file=log.txt", "--log-cli-level=DEBUG").assert_outcomes(passed=2)


@pytest.mark.nightly
def test_a_file_of_traces_is_written(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_TRACE", str(pytester.path / "traces"))
    pytester.makepyfile(TRACES)
    run(pytester, "-k", "test_traces").assert_outcomes(passed=1, deselected=1)
    [file] = (pytester.path / "traces").iterdir()
    assert [
        word for word in ("setup", "call", "teardown") if f"\t{word}\n" not in file.read_text()
    ] == []


@pytest.mark.slow
def test_it_imports_neither_torch_nor_hypothesis(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_one="def test_one(): pass")
    code = (
        "import sys, pytest; pytest.main(['-q', '--co', '-p', 'weft.proofs.plugin', '-p',"
        " 'no:hypothesispytest']);print('imported:', [name for name in ('torch', 'hypothesis',"
        " 'attrs', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=pytester.path
    )
    assert "imported: []" in done.stdout


def test_pytest_finds_it_where_weft_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"weft.proofs.plugin": "weft.proofs.plugin"}
