"""A field of the descriptor is handled everywhere: in strategies, in `covers`, in the ladder, in
the proof."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import attrs
import pytest
from hypothesis import Phase, find, settings
from hypothesis.errors import NoSuchExample

pytest.importorskip("z3")

from weft.batches.descriptor import BatchDescriptor
from weft.proofs.evidence.solver import dispatch_proof
from weft.proofs.evidence.solver.symbolic import Path, explore, prove, unknown
from weft.proofs.strategies import descriptors, limits
from weft.transforms.graphs.dispatch import excess
from weft.transforms.graphs.ladder import make_ladder

QUICK = settings(max_examples=100, database=None, phases=[Phase.generate])


def unspoken(cls: type) -> list[str]:
    """The fields of a descriptor class, each with a place that does not handle it."""
    unhandled = []
    for field in attrs.fields(cls):
        unhandled += [f"{field.name}: {where}" for where in _unspoken(field.name)]
    return unhandled


def _unspoken(name: str) -> Iterator[str]:
    for where, strategy in {
        "strategies": descriptors(),
        "ladder": limits().map(_largest_rungs),
    }.items():
        try:
            find(strategy, lambda d: _varies(d, name), settings=QUICK)
        except NoSuchExample:
            yield where
    if not prove("a difference shows", lambda path: _told_apart(path, name)).holds:
        yield "covers"
    path, _ = next(explore(lambda path: None))
    descriptor = dispatch_proof.unknown_descriptor(path, "a")
    if name not in {field.name for field in attrs.fields(type(descriptor))}:
        yield "proof"
    if isinstance(getattr(descriptor, name), int) and name not in excess(descriptor, descriptor):
        yield "padding"


def _varies(value: Any, name: str) -> bool:
    """Whether a drawn descriptor has a value other than the default, or the rungs of a ladder
    differ."""
    if isinstance(value, tuple):
        return len({getattr(d, name) for d in value}) > 1
    default = getattr(attrs.fields_dict(type(value))[name], "default", None)
    return bool(getattr(value, name) != default)


def _largest_rungs(most: Any) -> tuple[Any, ...]:
    return tuple(make_ladder("full", most))


def _told_apart(path: Path, name: str) -> dict[str, Any]:
    """Two descriptors that differ in one field alone do not cover each other."""
    a = dispatch_proof.unknown_descriptor(path, "a")
    b = dispatch_proof.unknown_descriptor(path, "a")
    object.__setattr__(b, name, unknown(path, f"another {name}"))
    return {name: not (a.covers(b) and b.covers(a)) or getattr(a, name) == getattr(b, name)}


def test_every_field_is_spoken_for() -> None:
    assert unspoken(BatchDescriptor) == []


@attrs.frozen
class Wider(BatchDescriptor):
    """The descriptor with a field that no other code handles."""

    num_images: int = 0


@contextmanager
def instead(cls: type) -> Iterator[None]:
    homes = (
        "weft.proofs._strategies.classes",
        "weft.transforms.graphs.ladder",
        "weft.proofs.evidence.solver.dispatch_proof",
    )
    with ExitStack() as stack:
        for home in homes:
            stack.enter_context(mock.patch.object(import_module(home), "BatchDescriptor", cls))
        yield


def test_a_new_field_is_missed_wherever_it_is_forgotten() -> None:
    with instead(Wider):
        assert unspoken(Wider) == [
            f"num_images: {where}" for where in ("strategies", "ladder", "covers")
        ]
        refuted = [v.counterexample for v in dispatch_proof.prove_order() if not v.holds]
    assert any("a.num_images = " in str(text) for text in refuted), refuted


@attrs.frozen
class Named(BatchDescriptor):
    """The descriptor with a field of a type that the proof cannot make unknown."""

    name: str = ""


def test_a_field_of_a_new_kind_fails_the_proof() -> None:
    with instead(Named):
        refuted = [v.counterexample for v in dispatch_proof.prove_order()]
    assert (
        "raises TypeError: a.name is a <class 'str'>, which weft.proofs.evidence.solver.dispatch_proof"
        " cannot make unknown" in str(refuted[0])
    )
