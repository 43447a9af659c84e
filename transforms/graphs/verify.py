"""`Verified`: a graphified function that compares some of its replays with the function itself."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import attrs
import torch
from torch import Tensor

from weft.batches.padding import pad, unpad
from weft.errors import CaptureError, VerificationError
from weft.settings import may_replay
from weft.torchapi.private import uncompiled
from weft.torchapi.watching import OperatorWatch
from weft.transforms.graphs.calls.call import Call, invoke, make_call, runs_inline
from weft.transforms.graphs.dispatch import Decision
from weft.transforms.graphs.graphified import Graphified
from weft.transforms.graphs.listing import Line, Listing, Writer
from weft.transforms.graphs.lower import lower
from weft.transforms.graphs.options import Graphable
from weft.values.donation import clone
from weft.values.keys import value_key
from weft.values.trees import find_descriptors, leaves_with_names, tree_leaves

P = ParamSpec("P")
R = TypeVar("R")


class Verified(Graphified[P, R]):
    """A graphified function that, at every `verify`-th call, also runs the function itself and
    compares the results and the states of the random generators bit by bit."""

    def __init__(self, graphable: Graphable) -> None:
        super().__init__(graphable)
        self._numbers = itertools.count(1)

    @uncompiled
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Answer the call, and compare the answer if it is this call's turn."""
        assert self._graphable.verify is not None
        if (number := next(self._numbers)) % self._graphable.verify or not may_replay():
            return super().__call__(*args, **kwargs)
        call = make_call(self._graphable.roles, self._graphable.name, args, kwargs)
        if runs_inline(call) or (decision := self._cache.decide(call)).mode == "none":
            return super().__call__(*args, **kwargs)
        with self._lock:
            key = self._cache.key(call, decision)
            # Two copies before the replay takes the donated arguments: one for the function itself,
            # one to find the operator that differs.
            reference_call = self._with_copies(call)
            spare = self._with_copies(call)
            generators = [*_generators(call)]
            before = [generator.get_state() for generator in generators]
            expected = self._run_itself(reference_call, decision)
            drawn = [generator.get_state() for generator in generators]
            # The replay must draw the same numbers as the function itself.
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
            replays = self._cache.count.replays
            result = super().__call__(*args, **kwargs)
            if self._cache.count.replays == replays:
                return result  # this call ran the function itself: there is nothing to compare
            same = _same if self._graphable.compiler is None else _close
            difference = _difference(result, expected, same)
            if not difference and any(
                not torch.equal(x, g.get_state()) for x, g in zip(drawn, generators, strict=True)
            ):
                difference = "it draws another number of random numbers"
            if difference:
                entry = self._cache.entries.get(key)
                raise self._error(
                    number,
                    difference,
                    spare,
                    decision,
                    None if entry is None else entry.graph.watch,
                )
            return result

    def _with_copies(self, call: Call) -> Call:
        """The call with copies of the donated arguments, the only ones that the function may
        write."""
        donated = {
            name: clone(call.references[name])
            for name in call.references
            if name in self._graphable.roles.donated
        }
        references = call.references | donated
        return attrs.evolve(call, references=references, reference_leaves=tree_leaves(references))

    def _run_itself(self, call: Call, decision: Decision[Any]) -> Any:
        """Run the function on the arguments, padded as for the graph, and cut the result to their
        own size."""
        padded = decision.descriptor
        if padded is None:
            copied = call.copied
        else:
            copied = pad(call.copied, padded)
        arguments = {**call.statics, **call.references, **copied}
        try:
            result = invoke(self._graphable.fn, self._graphable.roles, arguments, call.keywords)
        except Exception as error:
            return error
        if padded is None:
            return result
        return unpad(result, find_descriptors(call.copied)[0])

    def _error(
        self,
        number: int,
        difference: str,
        call: Call,
        decision: Decision[Any],
        watch: OperatorWatch | None,
    ) -> VerificationError:
        name = self._graphable.name
        where = ""
        if isinstance(watch, Writer):
            where = self._first_difference(watch.lines, call, decision)
        return VerificationError(
            f"{name}(...), call {number}",
            f"a replay that differs from the function itself: {difference}{where}",
            f"pass what {name} reads from outside as an argument: a replay repeats what it was at"
            " the capture",
        )

    def _first_difference(
        self, captured: Sequence[Line], call: Call, decision: Decision[Any]
    ) -> str:
        """The first operator of the function that differs from the capture, in words."""
        backend = self._cache.backend_for(call)
        try:
            listing: Listing = lower(
                self._graphable, call, decision, backend.device, _not_compiled
            ).listing
        except CaptureError as error:
            return f"; it cannot be captured any more: {error.problem}"
        except Exception:  # the function's own error, which `difference` already names
            return ""
        for index, (now, then) in enumerate(itertools.zip_longest(listing.lines, captured)):
            if now is None or then is None or str(now) != str(then):
                return f"; operator {index}: {_text(now)}, captured {_text(then)}"
            if [value.address for value in now.reads] != [value.address for value in then.reads]:
                return (
                    f"; operator {index}: {now} reads a tensor from outside that is not the"
                    " captured one"
                )
        return "; each operator is called as at the capture"


def _not_compiled(_: Any, __: Any) -> Any:
    raise NotImplementedError("only the listing is of interest")


def _text(line: Line | None) -> str:
    if line is None:
        return "no such operator"
    return f"`{line}`"


def _generators(call: Call) -> Iterator[torch.Generator]:
    """The generators that a call may draw from."""
    leaves = (*call.reference_leaves, *call.copied_leaves)
    yield torch.default_generator
    for index in {x.device.index or 0 for x in leaves if isinstance(x, Tensor) and x.is_cuda}:
        yield torch.cuda.default_generators[index]
    yield from {id(x): x for x in leaves if isinstance(x, torch.Generator)}.values()


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(value_key(one) == value_key(other))
    if (one.shape, one.dtype, one.device, one.layout) != (
        other.shape,
        other.dtype,
        other.device,
        other.layout,
    ):
        return False
    with torch.no_grad():
        one, other = (x.to_dense() if x.layout is not torch.strided else x for x in (one, other))
        if torch.equal(_bits(one), _bits(other)):
            return True
        nan = one.isnan() & other.isnan()
        return bool(nan.any()) and torch.equal(
            _bits(one.masked_fill(nan, 0)), _bits(other.masked_fill(nan, 0))
        )


def _close(one: Any, other: Any) -> bool:
    """Whether a compiled result is the function's but for rounding: within the tolerances that
    `torch.testing` has for the dtype."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return _same(one, other)
    try:
        torch.testing.assert_close(one, other, equal_nan=True)
    except AssertionError:
        return False
    return True


def _difference(result: Any, expected: Any, same: Callable[[Any, Any], bool] = _same) -> str:
    """The first difference between a replay's result and the function's, in words; empty if there
    is none."""
    if isinstance(expected, Exception):
        return f"the function raises {type(expected).__name__}: {expected}"
    pairs = leaves_with_names(result), leaves_with_names(expected)
    if [path for path, _ in pairs[0]] != [path for path, _ in pairs[1]]:
        return "the results have other structures"
    for (path, one), (_, other) in zip(*pairs, strict=True):
        if not same(one, other):
            return f"result{path or ''}{_far(one, other)}"
    return ""


def _bits(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _far(one: Any, other: Any) -> str:
    """How far a leaf is from the expected one."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
        shapes = [
            f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
            for x in (one, other)
        ]
        return f" is {shapes[0]}, and should be {shapes[1]}"
    if one.dtype != other.dtype:
        return f" is of {one.dtype}, and should be of {other.dtype}"
    with contextlib.suppress(RuntimeError), torch.no_grad():
        return f" differs by up to {float((one.double() - other.double()).abs().max()):.3g}"
    return " differs"
