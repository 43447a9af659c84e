"""The reference page lists every public name, and each name is documented, typed and exercised by a test."""

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft import transforms
from weft.proofs.reference import FACES, PAGE, USED, call_of, first_sentence, methods_of, names_of, page

ROOT = Path(__file__).parent.parent
MADE = {
    "Compiled": "Lowered.compile",
    "Lowered": "Graphified.lower",
    "Pipelined": "pipeline",
    "Session": "Pipelined.session",
    "Graphified": "graphify",
    "LayerParams": "load, which says what it holds in words",
}
"""Classes whose arguments are no user's, and what makes them."""
EVIDENCE = ("weft.proofs", "weft.proofs.strategies", "weft.proofs.laws")
PUBLIC = [(face, name) for face in FACES for name in names_of(face)]
CALLED = [(face, name) for face, name in PUBLIC if callable(getattr(import_module(face), name))]
OWN = [(face, name) for face, name in CALLED if face not in (*EVIDENCE, "weft.errors")]


def value_of(face: str, name: str) -> Any:
    return getattr(import_module(face), name)


def test_the_faces_have_their_names() -> None:
    assert {name for face, name in PUBLIC if face == "weft"} <= {*weft.__all__}
    for face in FACES:
        if face != "weft.proofs":  # which had no names of its own at first
            assert len(names_of(face)) >= 10, face


def test_the_reference_is_of_these_names() -> None:
    # Written anew by: python -m weft.proofs.reference
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize(("face", "name"), CALLED)
def test_it_is_documented(face: str, name: str) -> None:
    value = value_of(face, name)
    doc = inspect.getdoc(value) or ""
    assert len(first_sentence(doc)) >= 15
    # A dataclass or an attrs class without a docstring would have been given its signature.
    assert not doc.startswith(f"{name}(")


@pytest.mark.parametrize("name", USED)
def test_its_methods_are_listed(name: str) -> None:
    cls = getattr(transforms, name, None) or getattr(weft, name)
    methods = dict(methods_of(cls))
    assert methods
    assert [call for call, member in methods.items() if len(first_sentence(inspect.getdoc(member))) < 15] == []
    assert all(f"| `{name}.{call}` |" in PAGE.read_text(encoding="utf-8") for call in methods)


@pytest.mark.parametrize(("face", "name"), OWN)
def test_its_arguments_are_documented(face: str, name: str) -> None:
    value = value_of(face, name)
    if name in MADE or getattr(value, "_is_protocol", False):
        return
    doc = inspect.getdoc(value) or ""
    names = [parameter for parameter in inspect.signature(value).parameters if parameter != "self"]
    assert [argument for argument in names if not re.search(rf"\b{argument}\b", doc)] == []


@pytest.mark.parametrize(("face", "name"), CALLED)
def test_it_is_typed(face: str, name: str) -> None:
    value = value_of(face, name)
    if isinstance(value, type):
        methods = [member for key, member in vars(value).items() if inspect.isfunction(member) and key[0] != "_"]
    else:
        methods = [value]
    for method in methods:
        signature = inspect.signature(method)
        assert signature.return_annotation is not inspect.Signature.empty, method
        untyped = [p.name for p in signature.parameters.values() if p.annotation is inspect.Parameter.empty]
        assert [name for name in untyped if name not in ("self", "cls", "_")] == []


@pytest.mark.parametrize("name", names_of("weft"))
def test_the_reference_page_names_it(name: str) -> None:
    assert re.search(rf"^\| `{name}[`(]", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("face", "name"), PUBLIC)
def test_a_test_exercises_it(face: str, name: str) -> None:
    """Named in a test, or, of what laws and strategies are made of, in the suite that a test runs."""
    folders = ("tests", "proofs") if face in EVIDENCE else ("tests",)
    places = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    home = inspect.getsourcefile(value_of(face, name)) if callable(value_of(face, name)) else None
    texts = [p.read_text(encoding="utf-8") for p in places if p.name != "__init__.py" and str(p.resolve()) != home]
    assert any(re.search(rf"\b{name}\b", text) for text in texts)


def test_the_results_of_transforms_are_of_the_classes_that_are_documented() -> None:
    f = weft.graphify(lambda x: x + 1)
    x = torch.ones(3)
    lowered = f.lower(x)
    limits = weft.Limits(2, 4)
    costs = transforms.Costs(stages=(1e-3, 1e-3))
    plan = transforms.plan_cohorts(lambda size: costs, 4, 2)
    table = weft.dispatch_table(limits, [weft.BatchDescriptor.uniform(2)])
    stages: list[Any] = [lambda p, s, b, x: (s, b), lambda p, s, b, x: (s, x)]
    step = weft.pipeline(stages, advance=lambda state, batch, out: state)
    session = step.session((None, None), (None, None))
    session.close()
    programs = transforms.make_programs(2, transforms.decode_jobs(1, 2))
    made: dict[type, Any] = {
        transforms.Graphified: f,
        transforms.Lowered: lowered,
        transforms.Compiled: lowered.compile(),
        transforms.Explanation: f.explain(x),
        transforms.CacheInfo: f.cache_info(),
        transforms.MemoryAnalysis: f.memory_analysis(),
        transforms.MemoryEstimate: f.memory_estimate(x),
        transforms.Pipelined: step,
        transforms.Session: session,
        transforms.Timeline: transforms.simulate(programs, costs),
        transforms.CohortPlan: plan,
        transforms.CohortRow: plan.best,
        transforms.DispatchTable: table,
        transforms.Decision: table.rows[0].decision,
        transforms.Ladder: weft.make_ladder("full", limits),
    }
    assert {cls: type(value) for cls, value in made.items()} == {cls: cls for cls in made}


def test_calls_are_written_with_their_arguments() -> None:
    def both(*args: int, key: int = 0, **more: int) -> None: ...

    def by_name(x: int, *, y: int = 0) -> None: ...

    assert call_of("both", both) == "both(*args, key, **more)"
    assert call_of("by_name", by_name) == "by_name(x, *, y)"
    assert call_of("DescriptorError", weft.errors.DescriptorError) == "DescriptorError"
    assert call_of("MODES", transforms.MODES) == "MODES"
