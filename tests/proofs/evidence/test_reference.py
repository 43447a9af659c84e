"""The reference page lists every public name, and each name is documented, typed and exercised by a
test."""

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import weft
from weft import transforms
from weft.proofs.evidence.pages.reference import (
    FACES,
    PAGE,
    SURFACE,
    USED,
    call_of,
    first_sentence,
    methods_of,
    names_of,
    new_members,
    page,
    surface,
)

ROOT = Path(__file__).parents[3]
# Classes whose arguments are no user's, and what makes them.
MADE = {
    "Compiled": "Lowered.compile",
    "Lowered": "Graphified.lower",
    "Pipelined": "pipeline",
    "Session": "Pipelined.session",
    "Graphified": "graphify",
    "ResolvedBatch": "a decoder's stage, for its layers",
}
PUBLIC = [(face, name) for face in FACES for name in names_of(face)]
CALLED = [(face, name) for face, name in PUBLIC if callable(getattr(import_module(face), name))]


def value_of(face: str, name: str) -> Any:
    return getattr(import_module(face), name)


def test_the_faces_have_their_names() -> None:
    assert {name for face, name in PUBLIC if face == "weft"} <= {*weft.__all__}
    for face in FACES:
        if face != "weft.proofs":  # which had no names of its own at first
            assert len(names_of(face)) >= 10, face


def test_each_name_has_one_home() -> None:
    """`WeftError` has two: it is the one error that programs catch, and the first of its module."""
    homes: dict[int, list[str]] = {}
    for face, name in CALLED:
        homes.setdefault(id(value_of(face, name)), []).append(f"{face}.{name}")
    several = [names for names in homes.values() if len(names) > 1]
    assert several == [["weft.WeftError", "weft.errors.WeftError"]]


def test_the_surface_is_small() -> None:
    """At most 300 names, methods and properties; flags of commands are listed, and not counted."""
    lines = surface().splitlines()
    assert len([line for line in lines if not line.startswith("weft ")]) <= 300


class Sized:
    def run(self) -> None: ...

    def size(self) -> int: ...


def test_members_that_implement_a_listed_protocol_are_not_new() -> None:
    assert [*new_members(transforms.Local)] == []
    assert "run" in new_members(transforms.Transport)
    assert [*new_members(Sized)] == ["run", "size"]  # which lacks most of a transport's


def test_the_reference_is_of_these_names() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "run python -m weft.proofs.evidence.pages.reference"
    )


def test_the_public_surface_changes_on_purpose() -> None:
    """A removed name or argument is deprecated first: `.github/CONTRIBUTING.md` has the rule."""
    assert SURFACE.read_text(encoding="utf-8") == surface(), (
        "run python -m weft.proofs.evidence.pages.reference, and read the diff"
    )


def test_the_surface_has_names_methods_and_defaults() -> None:
    lines = surface().splitlines()
    assert "weft.dispatch(descriptor, ladder)" in lines
    assert any(line.startswith("weft.Batch.ragged(") for line in lines)
    assert any(line.startswith("weft.generate(") and "temperature=0.0" in line for line in lines)
    assert "weft serve --port=8000" in lines
    assert "weft generate --prompt, --prompt-ids=()" in lines
    assert "weft verify CERTIFICATES" in lines


def undocumented(face: str, name: str) -> bool:
    """Whether a docstring says too little: a dataclass or an attrs class without one is given its
    signature."""
    doc = inspect.getdoc(value_of(face, name)) or ""
    return len(first_sentence(doc)) < 15 or doc.startswith(f"{name}(")


def test_each_name_is_documented() -> None:
    assert [f"{face}.{name}" for face, name in CALLED if undocumented(face, name)] == []


def test_the_methods_of_classes_are_documented_and_listed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    failures = []
    for name in USED:
        [value] = {id(v): v for v in (value_of(*at) for at in PUBLIC if at[1] == name)}.values()
        methods = dict(methods_of(value))
        assert methods, name
        failures += [
            f"{name}.{call}"
            for call, member in methods.items()
            if len(first_sentence(inspect.getdoc(member))) < 15
            or f"| `{name}.{call}` |" not in text
        ]
    assert failures == []


def undocumented_arguments(face: str, name: str) -> list[str]:
    value = value_of(face, name)
    is_error = isinstance(value, type) and issubclass(value, BaseException)
    if name in MADE or is_error or getattr(value, "_is_protocol", False):
        return []
    doc = inspect.getdoc(value) or ""
    names = [parameter for parameter in inspect.signature(value).parameters if parameter != "self"]
    return [argument for argument in names if not re.search(rf"\b{argument}\b", doc)]


def test_arguments_are_documented() -> None:
    assert [
        f"{face}.{name}({a})" for face, name in CALLED for a in undocumented_arguments(face, name)
    ] == []


def untyped(face: str, name: str) -> Iterator[str]:
    value = value_of(face, name)
    methods = [value]
    if isinstance(value, type):
        methods = [
            member
            for key, member in vars(value).items()
            if inspect.isfunction(member) and key[0] != "_"
        ]
    for method in methods:
        signature = inspect.signature(method)
        if signature.return_annotation is inspect.Signature.empty:
            yield f"{face}.{method.__qualname__} -> ?"
        for parameter in signature.parameters.values():
            if parameter.annotation is inspect.Parameter.empty and parameter.name not in (
                "self",
                "cls",
                "_",
            ):
                yield f"{face}.{method.__qualname__}({parameter.name}: ?)"


def test_each_name_is_typed() -> None:
    assert [untyped_name for face, name in CALLED for untyped_name in untyped(face, name)] == []


def test_the_reference_page_names_each() -> None:
    text = PAGE.read_text(encoding="utf-8")
    missing = [n for n in names_of("weft") if not re.search(rf"^\| `{n}[`(]", text, re.MULTILINE)]
    assert missing == []


def test_a_test_exercises_each_name() -> None:
    words = {
        word
        for path in (ROOT / "tests").rglob("*.py")
        for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))
    }
    assert [f"{face}.{name}" for face, name in PUBLIC if name not in words] == []


def test_the_results_of_transforms_are_of_the_classes_that_are_documented() -> None:
    f = weft.graphify(lambda x: x + 1)
    x = torch.ones(3)
    lowered = f.lower(x)
    costs = transforms.Costs(stages=(1e-3, 1e-3))
    stages: list[Any] = [lambda p, s, b, x: (s, b), lambda p, s, b, x: (s, x)]
    step = weft.pipeline(stages, advance=lambda state, batch, out: state)
    session = step.session((None, None), (None, None))
    session.close()
    programs = transforms.make_programs(2, transforms.decode_jobs(1, 2))
    results: dict[type, Any] = {
        transforms.Graphified: f,
        transforms.Lowered: lowered,
        transforms.Compiled: lowered.compile(),
        transforms.Pipelined: step,
        transforms.Session: session,
        transforms.Timeline: transforms.simulate(programs, costs),
        weft.Ladder: weft.make_ladder("full", weft.Limits(2, 4)),
    }
    assert {cls: type(value) for cls, value in results.items()} == {cls: cls for cls in results}


def test_calls_are_written_with_their_arguments() -> None:
    def both(*args: int, key: int = 0, **more: int) -> None: ...

    def by_name(x: int, *, y: int = 0) -> None: ...

    assert call_of("both", both) == "both(*args, key, **more)"
    assert call_of("by_name", by_name) == "by_name(x, *, y)"
    assert call_of("DescriptorError", weft.errors.DescriptorError) == "DescriptorError"
    assert call_of("MODES", transforms.MODES) == "MODES"
