"""Settings for every test: one thread per process, no network, and `--all`, without which a run is
short.

`pytest` takes minutes: every law and most drawn tests on a few examples, every mutant on its stored
case, one process test of each kind. `pytest --all` adds tests marked `slow`, more cases of those
marked `one_of`, more examples of drawn tests, and a search for one mutant of each law. `pytest
--nightly` has everything: all cases, all examples of drawn tests and many of laws, a search for
every mutant, the long proofs by z3, long runs and benchmarks; `.ci/nightly` runs it. `--rest` with
either of them leaves out each test that a short run has, even where it would draw more examples;
tests that ask for `runs_all`, such as that of the laws, stay. `.ci/run` makes a short run, and then
one with `--all --rest`.
"""

import atexit
import gc
import logging
import math
import os
import signal
import sys
from collections.abc import Generator, Iterator
from typing import Any, Literal

import pytest
import torch

pytest_plugins = ["weft.proofs.plugin"]

# huggingface_hub reads these when it is first imported, which is later; processes that tests start
# inherit them.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
# Inductor otherwise starts processes that import torch, and tries which vector instructions the
# compiler has, which takes longer than all that the tests compile.
os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}

# The models are small, and the workers of pytest-xdist share the cores.
torch.set_num_threads(1)

# The most examples of a drawn test: in a short run, and with `--all`. With `--nightly` it has its own.
FEW_EXAMPLES = 5
SOME_EXAMPLES = 25
_GOLDEN = (math.sqrt(5) - 1) / 2


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--all`, `--nightly` and `--rest`."""
    parser.addoption(
        "--all", action="store_true", help="also run slow tests, and more examples of drawn ones"
    )
    parser.addoption(
        "--nightly", action="store_true", help="as --all, with all examples and the long proofs"
    )
    parser.addoption(
        "--rest", action="store_true", help="leave out each test that a run without --all has"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Name the markers, and let Ctrl-C interrupt: a shell has jobs in the background ignore it, and
    some tests press it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    text = "one_of(n, m=1): a short run takes an n-th of the test's cases, --all an m-th, --nightly all"
    config.addinivalue_line("markers", text)
    config.addinivalue_line("markers", "slow: runs with --all and --nightly only")
    config.addinivalue_line("markers", "nightly: runs with --nightly only")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what was imported to no collection of garbage: many tests make one, and each would look
    through torch."""
    gc.disable()
    collected = yield
    gc.set_threshold(50_000, 20, 20)  # 700 at first: tests that ask for a collection call for it
    gc.enable()
    _freeze_modules()
    return collected


# The number of modules when `_freeze_modules` was last called.
_num_frozen = 0


def _freeze_modules() -> None:
    global _num_frozen
    gc.freeze()
    _join_loggers()
    _num_frozen = len(sys.modules)


def _join_loggers() -> None:
    """Pass torch's logs on to the root logger. pytest adds handlers to each logger that does not do
    so, six in a test: torch has 90 of them, and that took as long as many tests. The logger of
    traces stays apart, which formats nothing if it has no handler."""
    for name, logger in logging.root.manager.loggerDict.items():
        if (
            name.startswith("torch.")
            and name != "torch.__trace"
            and not isinstance(logger, logging.PlaceHolder)
        ):
            logger.propagate = True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Do so with what tests imported meanwhile: torch's compiler alone is half a million objects."""
    if len(sys.modules) > _num_frozen + 20:
        _freeze_modules()


def pytest_unconfigure() -> None:
    """Let the end of the process collect everything: nanobind lists what is then left. pytest, which
    collects twice before, need not look through torch."""
    atexit.register(gc.unfreeze)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this run does not have, and let Hypothesis draw fewer examples than
    `--nightly`."""
    nightly = config.getoption("nightly")
    everything = runs_everything(config)
    marked = {
        name: {item for item in items if item.get_closest_marker(name)}
        for name in ("slow", "nightly")
    }
    # What a short run has
    unmarked = [item for item in items if item not in marked["slow"] | marked["nightly"]]
    short = set(unmarked) - set(_beyond_one_of(unmarked, "short"))
    if nightly:
        chosen = set(items)
    elif everything:
        candidates = [item for item in items if item not in marked["nightly"]]
        chosen = set(candidates) - set(_beyond_one_of(candidates, "all"))
    else:
        chosen = short
    if everything and config.getoption("rest"):
        chosen -= {item for item in short if "runs_all" not in getattr(item, "fixturenames", ())}
    left_out = [item for item in items if item not in chosen]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    if not nightly:
        for item in items:
            _draw_at_most(SOME_EXAMPLES if everything else FEW_EXAMPLES, item)


def _beyond_one_of(items: list[pytest.Item], run: Literal["short", "all"]) -> Iterator[pytest.Item]:
    """The items that a run leaves out because of `one_of`. Those for a GPU are counted apart, since
    a machine without one skips them."""
    cases: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("one_of") is not None:
            is_for_gpu = item.get_closest_marker("gpu") is not None
            cases.setdefault((item.nodeid.partition("[")[0], is_for_gpu), []).append(item)
    for of_test in cases.values():
        marker = of_test[0].get_closest_marker("one_of")
        assert marker is not None
        count = -(-len(of_test) // _takes_every(*marker.args)[run])
        yield from _spread(of_test)[count:]


def _spread(items: list[Any]) -> list[Any]:
    """The cases of a test in an order in which the first few have as many values of each parameter
    as they can, as every n-th has not: of two devices, every second case has one."""
    values = {item: frozenset(item.callspec.indices.items()) for item in items}
    # By multiples of the golden ratio: a few of many are far apart.
    waiting = [
        items[index] for index in sorted(range(len(items)), key=lambda index: index * _GOLDEN % 1)
    ]
    ordered = []
    covered: set[tuple[str, object]] = set()
    while waiting:
        best = max(waiting, key=lambda item: len(values[item] - covered))
        if covered and values[best] <= covered:
            covered.clear()  # all values have come: once more
            continue
        covered |= values[best]
        waiting.remove(best)
        ordered.append(best)
    return ordered


def _takes_every(short: int, everything: int = 1) -> dict[str, int]:
    """The arguments of `one_of` by run."""
    return {"short": short, "all": everything}


def runs_everything(config: pytest.Config) -> bool:
    """Whether the run is not a short one."""
    return bool(config.getoption("all") or config.getoption("nightly"))


def _draw_at_most(count: int, item: pytest.Item) -> None:
    """Lower a test's number of examples, whether its own settings or the profile say it."""
    from hypothesis import is_hypothesis_test, settings

    test = getattr(item, "obj", None)
    machine = getattr(item, "cls", None)
    if isinstance(parent := getattr(machine, "settings", None), settings):  # of a state machine
        machine.settings = settings(parent, max_examples=min(parent.max_examples, count))
    if not is_hypothesis_test(test):
        return
    function = getattr(test, "__func__", test)
    current = getattr(function, "_hypothesis_internal_use_settings", None) or settings()
    most = min(current.max_examples, count)
    # Hypothesis has no public way to change the settings of a test that has some.
    function._hypothesis_internal_use_settings = settings(current, max_examples=most)


@pytest.fixture(scope="session")
def runs_all(pytestconfig: pytest.Config) -> bool:
    """Whether the run is that of `--all` or `--nightly`."""
    return runs_everything(pytestconfig)


@pytest.fixture(scope="session")
def runs_nightly(pytestconfig: pytest.Config) -> bool:
    """Whether the run is that of `--nightly`."""
    return bool(pytestconfig.getoption("nightly"))
