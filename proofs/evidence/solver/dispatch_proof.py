"""Proofs by z3 that dispatch is right, for classes of any size: `python -m
weft.proofs.evidence.solver.dispatch_proof`.

It runs `BatchDescriptor.covers`, `dispatch` and `make_ladder` themselves on unknown integers
(`weft.proofs.evidence.solver.symbolic`). The order is proved for all descriptors. Dispatch is
proved for `BatchDescriptor` with short ladders, and for any shape class with longer ones, where
`covers` is an unknown partial order and padding an unknown number. What needs known numbers
(`rungs`, and the capabilities of back ends) is checked by `tests/transforms/graphs/test_ladder.py`.
"""

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product
from typing import Any

import attrs
import z3

from weft.batches.descriptor import BatchDescriptor
from weft.errors import DescriptorError
from weft.proofs.evidence.solver.symbolic import Path, Verdict, flag, prove, unknown
from weft.transforms.graphs.dispatch import dispatch, excess
from weft.transforms.graphs.ladder import MODES, Ladder, Limits, make_ladder


def unknown_descriptor(path: Path, name: str) -> Any:
    """A descriptor with unknown values, valid or not. All its fields are `int` or `int | None`."""
    cls = BatchDescriptor  # looked up here, so that a test can run the proof on another class
    # Without the constructor, which would refuse invalid values: the order is proved for those as
    # well.
    descriptor = object.__new__(cls)
    for field in attrs.fields(cls):
        label = f"{name}.{field.name}"
        # A field of a new kind must be made unknown on purpose. Left out, it would be the same
        # everywhere, and the proof would say nothing of it.
        if field.type not in (int, int | None):
            raise TypeError(
                f"{label} is a {field.type}, which weft.proofs.evidence.solver.dispatch_proof cannot make"
                " unknown"
            )
        is_set = field.type is int or flag(path, f"{label} given")
        object.__setattr__(descriptor, field.name, unknown(path, label) if is_set else None)
    return descriptor


class AnyClass:
    """A shape class of any type, of which only one thing is known: `covers` is a partial order. It
    is not hashable, and dispatch does not hash it."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name

    def covers(self, other: "AnyClass") -> bool:
        # Reflexive by construction. The other two properties of an order are assumptions.
        return self is other or self.path.branch(_covers(self.name, other.name))

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, AnyClass) and self.path.branch(_equals(self.name, other.name))
        )

    # Unknown, but a function of the class alone: between those that cover one batch, what a rung
    # pads differs by the rung.
    def excess(self, _: "AnyClass") -> dict[str, Any]:
        return {"padding": unknown(self.path, _padding(self.name))}

    def __str__(self) -> str:
        return self.name


@functools.cache
def _covers(a: str, b: str) -> Any:
    return z3.Bool(f"{a} covers {b}")


@functools.cache
def _equals(a: str, b: str) -> Any:
    return z3.Bool(f"{a} == {b}")


def _padding(name: str) -> str:
    return f"what {name} pads"


def partial_order(names: Sequence[str]) -> list[z3.BoolRef]:
    """The assumptions: `covers` is antisymmetric and transitive on the named classes, and equal
    ones pad the same."""
    pairs = list(permutations(names, 2))
    triples = permutations(names, 3)
    # Equality is defined by the order, so that two rungs may be equal without being the same
    # object.
    order = [_equals(a, b) == z3.And(_covers(a, b), _covers(b, a)) for a, b in pairs]
    order += [
        z3.Implies(z3.And(_covers(a, b), _covers(b, c)), _covers(a, c)) for a, b, c in triples
    ]
    return order + [
        z3.Implies(_equals(a, b), z3.Int(_padding(a)) == z3.Int(_padding(b))) for a, b in pairs
    ]


def decided_rightly(descriptor: Any, ladder: Ladder[Any]) -> dict[str, Any]:
    """The claims about one decision, by name."""
    decision = dispatch(descriptor, ladder)
    # Called twice, since a decision may depend on the order of a set, or on what an earlier call
    # left.
    again = dispatch(descriptor, ladder)
    full, pieces = (
        [d for d in classes if d.covers(descriptor)] for classes in (ladder.full, ladder.piecewise)
    )
    mode, covering = (
        ("full", full) if full else ("piecewise", pieces) if pieces else ("none", [descriptor])
    )
    chosen = decision.descriptor
    # Written from the promise and not from the code of `dispatch`: with the same code on both sides
    # the claim could not fail.
    least = [d for d in covering if not any(d != other and d.covers(other) for other in covering)]
    costs = {id(d): tuple(excess(d, descriptor).values()) for d in (*least, chosen)}
    return {
        "sound": chosen.covers(descriptor),
        # By identity: an equal class that is not in the ladder has no graph.
        "total, by mode": decision.mode == mode and any(chosen is d for d in covering),
        "deterministic": again.mode == decision.mode and again.descriptor is chosen,
        "least": not any(d != chosen and chosen.covers(d) for d in covering),
        "pads least": not any(costs[id(d)] < costs[id(chosen)] for d in least),
    }


def reaches_its_own(rung: Any, ladder: Ladder[Any]) -> dict[str, Any]:
    """The claim that a batch of a rung's own class reaches it; in pieces, if no whole graph covers
    it."""
    decision = dispatch(rung, ladder)
    whole = any(d.covers(rung) for d in ladder.full)
    # A rung of pieces that a whole graph covers is never reached, and rightly so.
    shadowed = whole and not any(rung is d for d in ladder.full)
    mode = "full" if whole else "piecewise"
    return {"reachable": decision.mode == mode and (shadowed or decision.descriptor == rung)}


def prove_order() -> Iterator[Verdict]:
    """`BatchDescriptor.covers` is a partial order, and every field of the descriptor counts in it."""

    def antisymmetric(path: Path) -> dict[str, Any]:
        a = unknown_descriptor(path, "a")
        b = unknown_descriptor(path, "b")
        # If a field were left out of `covers`, two classes that differ in it would cover each
        # other.
        return {"antisymmetric": (a.covers(b) and b.covers(a)) == (a == b)}

    def transitive(path: Path) -> dict[str, Any]:
        a, b, c = (unknown_descriptor(path, name) for name in "abc")
        return {"transitive": not (a.covers(b) and b.covers(c)) or a.covers(c)}

    def reflexive(path: Path) -> dict[str, Any]:
        a = unknown_descriptor(path, "a")
        return {"reflexive": a.covers(a)}

    yield prove("covers is reflexive", reflexive)
    yield prove("covers is antisymmetric: classes that cover each other are equal", antisymmetric)
    yield prove("covers is transitive", transitive)


def prove_valid() -> Iterator[Verdict]:
    """A uniform descriptor that the constructor accepts has T = R*q."""

    def constructed(path: Path) -> dict[str, Any]:
        tokens, reqs, query_len = (unknown(path, name) for name in ("tokens", "reqs", "query_len"))
        try:
            descriptor: Any = BatchDescriptor(tokens, reqs, query_len)
        except ValueError:
            # Nothing is claimed of what the constructor refuses.
            return {}
        return {"T = R*q": descriptor.num_tokens.term == descriptor.num_reqs.term * query_len.term}

    yield prove("a uniform descriptor has T = R*q", constructed)


def prove_dispatch(any_classes: int, classes: int) -> Iterator[Verdict]:
    """Dispatch is right on ladders of at most `any_classes` classes of any type, or `classes`
    `BatchDescriptor`s.

    That means: total, deterministic, sound, least, with the least padding; and a rung's own class
    reaches it.
    """

    def claim(
        make: Callable[[Path, str], Any], subject: str, names: Sequence[str], cut: int
    ) -> Callable[[Path], Any]:
        def run(path: Path) -> dict[str, Any]:
            rungs = [make(path, name) for name in names]
            ladder = Ladder(rungs[:cut], rungs[cut:])
            if subject in names:
                return reaches_its_own(rungs[names.index(subject)], ladder)
            return decided_rightly(make(path, subject), ladder)

        return run

    kinds: tuple[tuple[str, Callable[[Path, str], Any], int], ...] = (
        ("any shape class", AnyClass, any_classes),
        ("BatchDescriptor", unknown_descriptor, classes),
    )
    for kind, make, most in kinds:
        # Each way to share so many rungs among whole graphs and pieces: dispatch prefers the
        # former.
        for count, cut in ((n, cut) for n in range(1, most + 1) for cut in range(n + 1)):
            names = [f"rung {i}" for i in range(count)]
            if make is AnyClass:
                assumed = partial_order(["batch", *names])
            else:
                assumed = []
            shown = f"dispatch of {kind} is right, {cut} full + {count - cut} pieces"
            yield _together(
                shown,
                [
                    prove(shown, claim(make, subject, names, cut), assumed)
                    # A batch of any class, and each rung's own.
                    for subject in ("batch", *names)
                ],
            )


def _together(claim: str, verdicts: Sequence[Verdict]) -> Verdict:
    """One result for several proofs of a claim; its counterexample is the first one found."""
    counterexample = next((v.counterexample for v in verdicts if not v.holds), None)
    return Verdict(
        claim, sum(v.paths for v in verdicts), sum(v.seconds for v in verdicts), counterexample
    )


def prove_ladders() -> Iterator[Verdict]:
    """`make_ladder` keeps its bounds for unknown limits and any two sizes, and cutting one part
    cuts no other."""

    def limits(path: Path, tokens: str = "max_num_tokens", reqs: str = "max_num_reqs") -> Limits:
        return Limits(
            unknown(path, reqs), unknown(path, tokens), query_lens, (unknown(path, "loras"),)
        )

    def sizes(path: Path) -> list[Any]:
        return [unknown(path, "size 0"), unknown(path, "size 1")]

    def ladder_within(most: Limits, candidates: Sequence[Any]) -> Any:
        """The ladder; empty if no size is within the limits, which `make_ladder` refuses."""
        try:
            return make_ladder(mode, most, candidates)
        except DescriptorError:
            room = min(most.max_num_reqs, most.max_num_tokens // max(query_lens))
            # Only a refusal of sizes that are all too large is right.
            if any(size <= room for size in candidates):
                raise
            return Ladder()

    def bounded(path: Path) -> dict[str, Any]:
        most = limits(path)
        ladder: Any = ladder_within(most, sizes(path))
        return {
            "full within max_num_reqs*q": all(
                d.num_tokens <= most.max_num_reqs * max(query_lens) for d in ladder.full
            ),
            "within max_num_reqs": all(d.num_reqs <= most.max_num_reqs for d in ladder),
            "within max_num_tokens": all(d.num_tokens <= most.max_num_tokens for d in ladder),
            "uniform means T = R*q": all(
                d.num_tokens == d.num_reqs * d.query_len for d in ladder if d.is_uniform
            ),
            "pieces beside whole graphs are ragged": (
                not ladder.full or not any(d.is_uniform for d in ladder.piecewise)
            ),
        }

    def uncut(path: Path) -> dict[str, Any]:
        most = limits(path)
        fewer = limits(path, reqs="fewer reqs")
        # The same sizes under two limits: unknowns of one name are one number.
        ladders = [ladder_within(limit, sizes(path)).piecewise for limit in (most, fewer)]
        whole, cut = ([d.num_tokens for d in pieces if not d.is_uniform] for pieces in ladders)
        less = limits(path, tokens="fewer tokens")
        room = most.max_num_reqs * max(query_lens)
        full = [ladder_within(limit, sizes(path)).full for limit in (most, less)]
        enough = room <= most.max_num_tokens and room <= less.max_num_tokens
        return {
            "max_num_reqs cuts no ragged pieces": whole == cut,
            "max_num_tokens cuts no whole graph": not enough or full[0] == full[1],
        }

    at_least_1 = [
        "max_num_reqs",
        "max_num_tokens",
        "size 0",
        "size 1",
        "fewer reqs",
        "fewer tokens",
    ]
    # What `Limits` and `make_ladder` themselves require of their arguments.
    assumed = [z3.Int(name) >= 1 for name in at_least_1] + [z3.Int("loras") >= 0]
    # Decodes without drafts, and with: lengths are known numbers, as `rungs` needs them.
    for mode, query_lens in product(MODES, ((1,), (3,))):
        yield prove(
            f"{mode}, query length {query_lens[0]}: the ladder is within its limits",
            bounded,
            assumed,
        )
        if (
            query_lens != (1,) and mode != "full"
        ):  # in full, both bounds apply to ragged whole graphs
            yield prove(
                f"{mode}, query length {query_lens[0]}: cutting one part cuts no other",
                uncut,
                assumed,
            )


def prove_all(any_classes: int = 4, classes: int = 2) -> Iterator[Verdict]:
    """Run every proof, one after another; see `prove_dispatch` for the arguments."""
    yield from prove_order()
    yield from prove_valid()
    yield from prove_dispatch(any_classes, classes)
    yield from prove_ladders()


def main() -> None:
    """Print the table, and exit with 1 if a claim is refuted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--any-classes", type=int, default=4, help="length of ladders of classes of any type"
    )
    parser.add_argument(
        "--classes", type=int, default=2, help="length of ladders of BatchDescriptors (3: minutes)"
    )
    arguments = parser.parse_args()
    all_hold = True
    print(
        "dispatch is right: total, deterministic, sound, least, of least padding; each rung"
        " reachable by its own class"
    )
    for verdict in prove_all(arguments.any_classes, arguments.classes):
        print(verdict, flush=True)
        all_hold &= verdict.holds
    raise SystemExit(not all_hold)


if __name__ == "__main__":
    main()
