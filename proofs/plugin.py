"""A plugin for pytest: Hypothesis profiles for laws, tests that need a GPU, failures whose code can
be pasted, and none of torch's traces in pytest's logs.

pytest loads it where weft is installed; it imports neither torch nor Hypothesis before a test of
yours does, or asks for a profile.

`--weft-profile=NAME`, or WEFT_HYPOTHESIS_PROFILE=NAME, or `weft_profile = NAME` in pytest's configuration
    `ci`: the same examples each time, no deadline. `gpu`: the same, and 50 of them, since each captures graphs.
    `explore`: 1,000 examples, other ones each time, and failures are remembered. Without it, Hypothesis is left alone.
`@pytest.mark.gpu`
    skipped where torch sees no CUDA device.
`weft_device`
    a fixture: the test runs with "cpu", and with "cuda" as a test marked `gpu`.

    def test_my_step(weft_device):
        weft.proofs.check(step, args=..., device=weft_device)

A failure of `assert_equivalent` or of `check` shows the arguments below the traceback, as they are
to be pasted.

torch's logger of structured traces makes texts of stacks and graphs wherever it has a handler, and
pytest gives it three. The plugin takes those away again; a file that TORCH_TRACE names is written
as ever.
"""

import logging
import os
import sys
from collections.abc import Generator
from typing import Any

import pytest

from weft.extras import install_command

PROFILES = ("ci", "gpu", "explore")
VARIABLE = "WEFT_HYPOTHESIS_PROFILE"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The profile, as an option and in pytest's configuration."""
    group = parser.getgroup("weft")
    words = f"Hypothesis profile for laws: {', '.join(PROFILES)} (or {VARIABLE}=NAME)"
    group.addoption("--weft-profile", choices=PROFILES, default=None, help=words)
    parser.addini("weft_profile", "what --weft-profile is if it is not given")


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker, and load the profile that was asked for."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped without one")
    profile = (
        config.getoption("weft_profile")
        or os.environ.get(VARIABLE)
        or config.getini("weft_profile")
    )
    if profile:
        load_profile(profile)


def load_profile(name: str) -> None:
    """Make a profile the active one.

    Raises:
        pytest.UsageError: no such profile; or Hypothesis is not installed.
    """
    if name not in PROFILES:
        raise pytest.UsageError(f"weft's profile is {name!r}: write one of {', '.join(PROFILES)}")
    try:
        from hypothesis import HealthCheck, settings
    except ImportError:
        raise pytest.UsageError(
            f"weft's profile {name!r} needs Hypothesis: {install_command('proofs')}"
        ) from None
    # How long an example takes depends on what else the machine does, and must not decide.
    patient: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    repeatable = patient | {"derandomize": True, "database": None, "print_blob": True}
    profiles = {
        "ci": repeatable,
        "gpu": repeatable | {"max_examples": 50},
        "explore": patient | {"max_examples": 1000},
    }
    settings.register_profile(f"weft-{name}", settings.get_profile("default"), **profiles[name])
    settings.load_profile(f"weft-{name}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="marked gpu, and torch sees no CUDA device"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def weft_device(request: pytest.FixtureRequest) -> str:
    """Where a law is checked: on tapes everywhere, on CUDA graphs where there is a GPU."""
    return str(request.param)


def _without_traces() -> None:
    """Take pytest's handlers off torch's logger of structured traces. pytest 9 adds its own in
    every phase of a test to loggers that do not propagate, and torch asks this one for handlers,
    not for a level, before it makes a text."""
    traces = logging.getLogger("torch.__trace")
    for handler in traces.handlers[:]:
        if type(handler).__module__ == "_pytest.logging":
            traces.removeHandler(handler)


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = pytest.hookimpl(
    tryfirst=True
)(_without_traces)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the code of a counterexample in a section of its own, where no line begins with `E`."""
    error = _counterexample(call)
    if error is not None:
        error.code_apart = True
    report = yield
    if error is not None:
        report.sections.append(("weft: to see it again", error.code()))
    return report


def _counterexample(call: pytest.CallInfo[None]) -> Any:
    """The Counterexample that ended a call; None if something else did, or nothing."""
    # Not imported here: it imports torch
    module = sys.modules.get("weft.proofs.checks.equivalence")
    if call.excinfo is not None and module is not None:
        error = call.excinfo.value
    else:
        error = None
    if module is not None and isinstance(error, module.Counterexample):
        return error
    return None
