"""A pytest plugin: Hypothesis profiles for laws, tests that need a GPU, failures with code to
paste, and no traces of torch in pytest's logs.

pytest loads it if weft is installed. It imports torch and Hypothesis only when your tests do, or
when you choose a profile.

`--weft-profile=NAME`, or WEFT_HYPOTHESIS_PROFILE=NAME, or `weft_profile = NAME` in pytest's configuration
    `ci`: the same examples each time, and no deadline.
    `gpu`: as `ci`, with only 50 examples, since each captures graphs.
    `explore`: 1,000 examples, different each time; failures are remembered.
    Without a profile, Hypothesis's settings are not changed.
`@pytest.mark.gpu`
    The test is skipped if torch sees no CUDA device.
`weft_device`
    A fixture: the test runs with "cpu", and with "cuda" as a test marked `gpu`.

    def test_my_step(weft_device):
        weft.proofs.check(step, args=..., device=weft_device)

A failure of `assert_equivalent` or `check` shows the arguments below the traceback, as code to
paste.

torch's logger for structured traces formats stacks and graphs as soon as it has a handler, and
pytest adds three. The plugin removes these again. The file that TORCH_TRACE names is still written.
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
    """Add the profile as a command-line option and as an option of pytest's configuration."""
    group = parser.getgroup("weft")
    words = f"Hypothesis profile for laws: {', '.join(PROFILES)} (or {VARIABLE}=NAME)"
    group.addoption("--weft-profile", choices=PROFILES, default=None, help=words)
    parser.addini("weft_profile", "what --weft-profile is if it is not given")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and load the chosen profile."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped without one")
    profile = (
        config.getoption("weft_profile")
        or os.environ.get(VARIABLE)
        or config.getini("weft_profile")
    )
    if profile:
        load_profile(profile)


def load_profile(name: str) -> None:
    """Activate a Hypothesis profile.

    Raises:
        pytest.UsageError: there is no such profile, or Hypothesis is not installed.
    """
    if name not in PROFILES:
        raise pytest.UsageError(f"weft's profile is {name!r}: write one of {', '.join(PROFILES)}")
    try:
        from hypothesis import HealthCheck, settings
    except ImportError:
        raise pytest.UsageError(
            f"weft's profile {name!r} needs Hypothesis: {install_command('proofs')}"
        ) from None
    # The time of an example depends on the load of the machine, and must not fail a test.
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
    """Skip tests that need a GPU if there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="marked gpu, and torch sees no CUDA device"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def weft_device(request: pytest.FixtureRequest) -> str:
    """The device to check a law on: "cpu" (tapes), and "cuda" (CUDA graphs) if there is a GPU."""
    return str(request.param)


def _without_traces() -> None:
    """Remove pytest's handlers from torch's logger for structured traces.

    In every phase of a test, pytest 9 adds its handlers to loggers that do not propagate. torch
    checks this logger for handlers, and not for a level, before it formats a trace.
    """
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
    """Show a counterexample's code in its own section, where no line begins with pytest's `E`."""
    error = _counterexample(call)
    if error is not None:
        error.code_apart = True
    report = yield
    if error is not None:
        report.sections.append(("weft: to see it again", error.code()))
    return report


def _counterexample(call: pytest.CallInfo[None]) -> Any:
    """The Counterexample that a test raised; None if it raised another error, or none."""
    # Looked up and not imported, because the module imports torch.
    module = sys.modules.get("weft.proofs.checks.equivalence")
    if module is None or call.excinfo is None:
        return None
    error = call.excinfo.value
    if isinstance(error, module.Counterexample):
        return error
    return None
