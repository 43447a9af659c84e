"""z3 proves dispatch, and refutes each planted bug with a counterexample."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any
from unittest import mock

import attrs
import pytest

pytest.importorskip("z3")

from weft.batches.descriptor import BatchDescriptor
from weft.proofs.evidence.solver import dispatch_proof
from weft.proofs.evidence.solver.symbolic import Path, Verdict, explore, prove, unknown
from weft.transforms.graphs import ladder
from weft.transforms.graphs.dispatch import Decision, dispatch
from weft.transforms.graphs.ladder import Ladder, as_ladder

PROOFS: dict[str, Callable[[], Iterator[Verdict]]] = {
    "order": dispatch_proof.prove_order,
    "valid": dispatch_proof.prove_valid,
    "dispatch": lambda: dispatch_proof.prove_dispatch(4, 1),
    "ladders": dispatch_proof.prove_ladders,
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROOFS)
def test_it_is_proved(name: str) -> None:
    verdicts = list(PROOFS[name]())
    assert verdicts
    assert [str(v) for v in verdicts if not v.holds] == []
    assert all(v.paths > 1 for v in verdicts)


def replaced(home: str, name: str, value: Any) -> AbstractContextManager[Any]:
    return mock.patch.object(import_module(home), name, value)


def covering(covers: Callable[[Any, Any], bool]) -> AbstractContextManager[Any]:
    return mock.patch.object(BatchDescriptor, "covers", covers)


def dispatching(fn: Callable[..., Any]) -> AbstractContextManager[Any]:
    return replaced("weft.proofs.evidence.solver.dispatch_proof", "dispatch", fn)


COVERS = BatchDescriptor.covers


def forgets_loras(a: Any, b: Any) -> bool:
    return COVERS(
        attrs.evolve(a, num_active_loras=0) if type(a.num_active_loras) is int else _without(a), b
    )


def _without(a: Any) -> Any:
    descriptor = object.__new__(BatchDescriptor)
    for field in attrs.fields(BatchDescriptor):
        object.__setattr__(descriptor, field.name, getattr(a, field.name))
    object.__setattr__(descriptor, "num_active_loras", 1 << 62)
    return descriptor


def fits(a: Any, b: Any) -> bool:
    """Compares shapes alone, and ignores the query length."""
    return bool(
        a.num_tokens >= b.num_tokens
        and a.num_reqs >= b.num_reqs
        and a.num_active_loras >= b.num_active_loras
    )


def nearly(a: Any, b: Any) -> bool:
    """Accepts one token too many, so it is not an order."""
    tokens = a.num_tokens + 1 >= b.num_tokens
    return bool(tokens and a.num_reqs >= b.num_reqs and a.query_len in (None, b.query_len))


ORDER = {
    "forgets the LoRAs": (forgets_loras, "antisymmetric: ", "a.num_active_loras = "),
    "forgets the query length": (fits, "antisymmetric: ", "a.query_len"),
    "lets one token more through": (nearly, "antisymmetric: ", "a.num_tokens = "),
    "is strict": (lambda a, b: COVERS(a, b) and a != b, "reflexive: ", "a.query_len given = "),
    "covers what it doubles": (
        lambda a, b: b.num_tokens <= 2 * a.num_tokens,
        "transitive",
        "c.num_tokens = ",
    ),
}


@pytest.mark.parametrize("name", ORDER)
def test_a_bug_in_covers_is_refuted(name: str) -> None:
    covers, part, shown = ORDER[name]
    with covering(covers):
        counterexamples = [
            v.counterexample for v in dispatch_proof.prove_order() if v.counterexample is not None
        ]
    assert any(text.startswith(part) and shown in text for text in counterexamples), counterexamples


def first_covering(descriptor: Any, rungs: Any) -> Any:
    decision = dispatch(descriptor, rungs)
    classes = as_ladder(rungs).full if decision.mode == "full" else as_ladder(rungs).piecewise
    matches = [d for d in classes if d.covers(descriptor)]
    return attrs.evolve(decision, descriptor=matches[0]) if matches else decision


def pieces_first(descriptor: Any, rungs: Any) -> Any:
    whole = as_ladder(rungs).full
    pieces = as_ladder(rungs).piecewise
    decision = dispatch(descriptor, Ladder(pieces, whole))
    return attrs.evolve(
        decision, mode={"full": "piecewise", "piecewise": "full"}.get(decision.mode, "none")
    )


def blind(descriptor: Any, rungs: Any) -> Any:
    """Treats a batch of one token per request as uniform."""
    if (
        isinstance(descriptor, BatchDescriptor)
        and descriptor.num_tokens == descriptor.num_reqs
        and descriptor.query_len is None
    ):
        uniform = _without(descriptor)
        object.__setattr__(uniform, "num_active_loras", descriptor.num_active_loras)
        object.__setattr__(uniform, "query_len", 1)
        decision = dispatch(uniform, rungs)
        return (
            attrs.evolve(decision, descriptor=descriptor) if decision.mode == "none" else decision
        )
    return dispatch(descriptor, rungs)


def later(descriptor: Any, rungs: Any) -> Any:
    """Chooses the later one of incomparable classes, whatever it pads."""
    with replaced("weft.transforms.graphs.dispatch", "excess", lambda larger, descriptor: {}):
        return dispatch(descriptor, rungs)


def lost(descriptor: Any, rungs: Any) -> Any:
    return Decision("none", descriptor, "lost")


def forgetful(descriptor: Any, rungs: Any, history: list[Any] = []) -> Any:  # noqa: B006  # that is the bug
    decision = dispatch(descriptor, rungs)
    history.append(descriptor)
    return decision if len(history) % 2 else lost(descriptor, rungs)


DISPATCH = {
    "takes the first": (first_covering, "least: "),
    "prefers pieces": (pieces_first, "total, by mode: "),
    "is blind to prefill": (blind, "sound: "),
    "pads for nothing": (later, "pads least: "),
    "finds nothing": (lost, "total, by mode: "),
    "remembers": (forgetful, "deterministic: "),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", DISPATCH)
def test_a_bug_in_dispatch_is_refuted(name: str) -> None:
    fn, part = DISPATCH[name]
    with dispatching(fn):
        counterexamples = [
            v.counterexample
            for v in dispatch_proof.prove_dispatch(2, 1)
            if v.counterexample is not None
        ]
    assert any(text.startswith(part) for text in counterexamples), counterexamples


def cut_by_requests(limits: Any, most: Any, sizes: Any) -> list[BatchDescriptor]:
    """Bounds pieces by the number of requests, like whole graphs."""
    return RAGGED(limits, min(most, limits.max_num_reqs), sizes)


def unbounded(limits: Any, sizes: Any) -> list[BatchDescriptor]:
    return [
        BatchDescriptor.uniform(n, q, limits.active_loras[0])
        for q in limits.query_lens
        for n in sizes
    ]


RAGGED = ladder._ragged
LADDER: dict[str, tuple[str, Callable[..., Any], str]] = {
    "cuts the pieces too": ("_ragged", cut_by_requests, "max_num_reqs cuts no ragged pieces: "),
    "is not cut": ("_uniform", unbounded, "full within max_num_reqs*q: "),
}


@pytest.mark.one_of(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("name", LADDER)
def test_a_bug_in_make_ladder_is_refuted(name: str) -> None:
    attribute, fn, part = LADDER[name]
    with replaced("weft.transforms.graphs.ladder", attribute, fn):
        refuted = (
            v.counterexample for v in dispatch_proof.prove_ladders() if v.counterexample is not None
        )
        assert any(text.startswith(part) for text in refuted)


def test_the_executor_takes_every_path() -> None:
    def run(path: Path) -> Any:
        x: Any = unknown(path, "x")
        return {"x": -1 if x < 0 else 1 if x > 0 and x // 2 == 3 else 0}

    assert sorted(result["x"] for _, result in explore(run)) == [-1, 0, 0, 1]


def test_an_exception_on_one_path_refutes() -> None:
    def run(path: Path) -> dict[str, Any]:
        x: Any = unknown(path, "x")
        return {"whole": 1 / 0 if x == 7 else True}

    assert (
        prove("no zero", run).counterexample == "raises ZeroDivisionError: division by zero: x = 7"
    )


def test_what_an_unknown_cannot_do_it_refuses() -> None:
    path, _ = next(explore(lambda path: None))
    x: Any = unknown(path, "x")
    assert isinstance(x, int)
    for attempt in (
        lambda: range(x),
        lambda: x % 2,
        lambda: x // x,
        lambda: [1, 2][x],
        lambda: 1.0 + x,
    ):
        with pytest.raises(TypeError):
            attempt()
