"""Every module imports, and the examples in its docstrings do what they say."""

import doctest
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "lib": "weft",
    "stages": "weft.stages",
    "transforms": "weft.transforms",
    "proofs": "weft.proofs",
}
NEEDS = {
    "weft.proofs.evidence.solver.dispatch_proof": "z3",
    "weft.proofs.evidence.solver.schedule_proof": "z3",
    "weft.proofs.evidence.solver.symbolic": "z3",
}


def modules() -> Iterator[str]:
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join((package, *parts)).removesuffix(".__init__")


@pytest.fixture(scope="module", autouse=True)
def finding_explains_nothing() -> Iterator[None]:
    """Most of the time of `hypothesis.find` is spent on what only a failing test would print."""
    before = settings.get_current_profile_name()
    settings.register_profile(
        "doctests", settings(), phases=set(settings().phases) - {Phase.explain}
    )
    settings.load_profile("doctests")
    yield
    settings.load_profile(before)


@pytest.mark.parametrize("name", list(modules()))
def test_the_module_imports_and_its_examples_hold(name: str) -> None:
    if name.endswith("_triton"):
        pytest.importorskip("triton")  # which is to be had on Linux alone
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    module = import_module(name)
    if ">>>" in inspect.getsource(module):  # to look through a module's names takes a while
        assert doctest.testmod(module).failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    assert any(test.examples for test in finder.find(import_module("weft.values.trees")))
