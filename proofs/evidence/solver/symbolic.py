"""A small symbolic executor: it runs a Python function once for each path that unknown integers can
take through it.

An unknown is an object whose arithmetic makes z3 terms. Where the function asks for a truth value
(`if`, `and`, `any`, `min`), the path decides it; if both values are possible, the function is run
again for the other one. So a proof is about the code that runs in production, and not about a model
of it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import z3


class Path:
    """One run of a function, which decides the branches that the function and its unknowns ask
    about.

    Args:
        prefix: the decisions at the first branches, which an earlier run left to this one.
        solver: holds the assumptions about the unknowns.
    """

    def __init__(self, prefix: Sequence[bool], solver: z3.Solver) -> None:
        self._prefix = tuple(prefix)
        self._solver = solver
        self._decisions: dict[int, bool] = {}
        self._terms: list[
            z3.BoolRef
        ] = []  # keeps the terms alive, so that no other term gets the id of one
        self.taken: list[bool] = []
        self.untried: list[tuple[bool, ...]] = []

    def assume(self, condition: z3.BoolRef) -> None:
        """Assume a condition from here on."""
        self._solver.add(condition)

    def branch(self, condition: Any) -> bool:
        """Decide a condition: as the path already implies, or else as true, leaving false to a
        later run."""
        # Equal terms have one id: what the path has decided once must stay decided, and costs no
        # call of z3.
        key = condition.get_id()
        if (decision := self._decisions.get(key)) is not None:
            return decision
        if len(self.taken) < len(self._prefix):
            # The function is deterministic, so that the same decisions lead to the same branch
            # again.
            value = self._prefix[len(self.taken)]
        else:
            value = self._possible(condition)
            # False is left to a later run only if it can hold: paths that no unknowns take are
            # never run.
            if value and self._possible(z3.Not(condition)):
                self.untried.append((*self.taken, False))
        self.taken.append(value)
        self._decisions[key] = value
        self._terms.append(condition)
        # The path's condition grows, and with it what is impossible further on.
        self._solver.add(condition if value else z3.Not(condition))
        return value

    def _possible(self, condition: Any) -> bool:
        """Whether the condition can hold on this path. If z3 cannot tell, yes: an extra path is
        still sound."""
        return bool(self._solver.check(condition) != z3.unsat)

    def counterexample(self, claim: Any) -> str | None:
        """Values of the unknowns on this path that make `claim` false, in words; None if there are
        none.

        Raises:
            ArithmeticError: z3 cannot decide.
        """
        # By refutation: a claim holds on the path if nothing makes its negation true.
        verdict = self._solver.check(z3.Not(claim) if z3.is_expr(claim) else z3.BoolVal(not claim))
        if verdict == z3.unsat:
            return None
        # Never taken for a proof.
        if verdict == z3.unknown:
            raise ArithmeticError(f"z3 cannot decide {claim}: {self._solver.reason_unknown()}")
        model = self._solver.model()
        return ", ".join(sorted(f"{name} = {model[name]}" for name in model.decls())) or "always"


class Integer:
    """An unknown, unbounded integer. It stands in for an int; an operation that it does not support
    is a TypeError."""

    __slots__ = ("path", "term")

    def __init__(self, path: Path, term: Any) -> None:
        self.path = path
        self.term = term

    @property
    # `isinstance(x, int)` is true, so that the code under proof takes its usual way.
    def __class__(self) -> type:
        return int

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("an unknown stays one")

    def __hash__(self) -> int:
        return 0  # one hash for all, so that sets and dicts compare by `==`

    def __repr__(self) -> str:
        return str(self.term)

    def __bool__(self) -> bool:
        return self.path.branch(self.term != 0)

    def __neg__(self) -> "Integer":
        return Integer(self.path, -self.term)

    def __floordiv__(self, other: int) -> "Integer":
        # Python rounds down and z3 makes the remainder positive, which is the same for positive
        # divisors only.
        if type(other) is not int or other < 1:
            # Else z3 divides in another way
            raise TypeError(f"{self} // {other}: only by a known positive number")
        return Integer(self.path, self.term / other)


def _term(value: Any) -> Any:
    """The z3 term of an unknown or of a number; None for anything else."""
    if type(value) is Integer:
        return value.term
    if type(value) is int:
        return z3.IntVal(value)
    return None


def _arithmetic(make: Callable[[Any, Any], Any]) -> Callable[[Integer, Any], Any]:
    def operator(self: Integer, other: Any) -> Any:
        term = _term(other)
        if term is None:
            return NotImplemented
        return Integer(self.path, make(self.term, term))

    return operator


# A comparison is decided at once and returns a bool, since `sorted`, `min` and `in` take nothing
# else.
def _comparison(make: Callable[[Any, Any], Any]) -> Callable[[Integer, Any], Any]:
    def operator(self: Integer, other: Any) -> Any:
        term = _term(other)
        if term is None:
            return NotImplemented
        return self.path.branch(make(self.term, term))

    return operator


for _name, _make in {
    "add": lambda a, b: a + b,
    # The reflected ones, because a known number may stand first.
    "radd": lambda a, b: b + a,
    "sub": lambda a, b: a - b,
    "rsub": lambda a, b: b - a,
    "mul": lambda a, b: a * b,
    "rmul": lambda a, b: b * a,
}.items():
    setattr(Integer, f"__{_name}__", _arithmetic(_make))
for _name, _make in {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}.items():
    setattr(Integer, f"__{_name}__", _comparison(_make))


def unknown(path: Path, name: str) -> Any:
    """An unknown integer."""
    return Integer(path, z3.Int(name))


def flag(path: Path, name: str) -> bool:
    """An unknown truth value, decided here."""
    return path.branch(z3.Bool(name))


@attrs.frozen
class Verdict:
    """The result for a claim: proved on a number of paths, or refuted by a counterexample."""

    claim: str
    paths: int
    seconds: float
    counterexample: str | None = None

    @property
    def holds(self) -> bool:
        """Whether the claim was proved."""
        return self.counterexample is None

    def __str__(self) -> str:
        if self.holds:
            said = "proved"
        else:
            said = f"REFUTED: {self.counterexample}"
        return f"{self.claim:<72}{self.paths:>8} paths {self.seconds:>6.1f} s  {said}"


def prove(
    claim: str, run: Callable[[Path], Any], assumptions: Sequence[z3.BoolRef] = ()
) -> Verdict:
    """Run `run(path)` on every path that its unknowns can take, and prove the claims that it
    returns on each.

    Args:
        claim: in words.
        run: makes unknowns on the path, calls the code under proof, and returns a dict: for each
            part of the claim, a truth value or a z3 term. An exception refutes the claim too.
        assumptions: about the unknowns.
    """
    start = time.perf_counter()
    count = 0
    for path, result in explore(run, assumptions):
        count += 1
        # Code that raises for some unknowns has no result there: the claim is false, and the error
        # says why.
        if isinstance(result, Exception):
            result = {f"raises {type(result).__name__}: {result}".splitlines()[0]: False}
        for part, truth in result.items():
            if (counterexample := path.counterexample(truth)) is not None:
                return Verdict(
                    claim, count, time.perf_counter() - start, f"{part}: {counterexample}"
                )
    return Verdict(claim, count, time.perf_counter() - start)


def explore(
    run: Callable[[Path], Any], assumptions: Sequence[z3.BoolRef] = ()
) -> Iterator[tuple[Path, Any]]:
    """Each path through `run`, with what it returned, or the exception that it raised."""
    solver = z3.Solver()
    solver.add(*assumptions)
    if solver.check() == z3.unsat:
        raise ArithmeticError(
            "the assumptions contradict each other, so that anything would follow"
        )
    # Depth first, from the decisions of earlier runs: a path is told by its list of truth values
    # alone.
    waiting: list[tuple[bool, ...]] = [()]
    while waiting:
        solver.push()
        path = Path(waiting.pop(), solver)
        result: Any
        try:
            result = run(path)
        except Exception as error:  # an exception is a result, which refutes the claim
            result = error
        waiting += path.untried
        # Before the pop: the caller looks for a counterexample under this path's conditions.
        yield path, result
        solver.pop()
