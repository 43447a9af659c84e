"""L20 for a user's function: padding a batch or cutting it into parts changes no bit; a violation
names the first operator that differs."""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.batches.padding import pad, unpad
from weft.proofs.checks.difference import LawViolation, find_difference
from weft.proofs.checks.search import copies
from weft.proofs.checks.subject import Arguments, Subject
from weft.settings import batch_invariant
from weft.torchapi.watching import OperatorWatch
from weft.transforms.graphs.graphified import roles_of
from weft.transforms.pipelines.microbatch import microbatch
from weft.values.trees import find_descriptors, tree_leaves

_PARTS = 2, 3
_OTHERS = Path(torch.__file__).parent, Path(__file__).parents[2]


def wants_rows(subject: Subject) -> str:
    """A description of what the law needs, if the function lacks it; otherwise empty."""
    if subject.graph.ladder is not None or _is_step(subject):
        return ""
    return "needs a ladder, or (params, state, batch)"


def _is_step(subject: Subject) -> bool:
    return len(roles_of(subject.graph).signature.parameters) == 3


def same_bits(subject: Subject, calls: Sequence[Arguments], seen_by: Callable[[Any], Any]) -> int:
    """L20: in `weft.batch_invariant()`, a padded batch and two or three parts of a batch give the
    same bits as the batch; returns the number of comparisons.

    Args:
        seen_by: removes from a result what padding may change in a `State`.

    Raises:
        LawViolation: they do not; it names the first operator whose result differs.
    """
    count = 0
    with batch_invariant():
        for call in calls:
            alone = list[_Result]()
            other = list[_Result]()
            expected = subject.call(_recording(subject.fn, alone), copies(call))
            for name, run in _ways(subject, call, _recording(subject.fn, other)):
                other.clear()
                result = subject.attempt(name, run)
                difference = find_difference(seen_by(result), seen_by(expected), None)
                if difference is not None:
                    text = difference.text(name, f"{subject.name} of the whole batch")
                    raise LawViolation(f"{text}\n{_first_difference(alone, other)}")
                count += 1
    return count


def _ways(
    subject: Subject, call: Arguments, fn: Callable[..., Any]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Other ways to call `fn` that must give the same result, each with its name."""
    descriptors = find_descriptors(subject.copied(call))
    for descriptor in subject.graph.ladder or ():
        if descriptors and descriptor != descriptors[0] and descriptor.covers(descriptors[0]):
            wide = {
                **copies(subject.referenced(call)),
                **pad(copies(subject.copied(call)), descriptor),
            }
            yield (
                f"{subject.name}, padded to '{descriptor}',",
                partial(_unpadded, subject, fn, wide, descriptors[0]),
            )
    if _is_step(subject):
        for parts in _PARTS:
            cut = microbatch(fn, parts)
            yield f"microbatch({subject.name}, {parts})", partial(subject.call, cut, copies(call))


def _unpadded(subject: Subject, fn: Callable[..., Any], wide: Arguments, descriptor: Any) -> Any:
    return unpad(subject.call(fn, wide), descriptor)


def _recording(fn: Callable[..., Any], results: list["_Result"]) -> Callable[..., Any]:
    """`fn`, changed to append to `results` what each operator in it returns."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Recorder(results):
            return fn(*args, **kwargs)

    return run


@attrs.frozen(eq=False)
class _Result:
    """An operator's floating-point results, and the line of code that called it."""

    name: str
    line: str
    values: tuple[Tensor, ...]


class _Recorder(OperatorWatch):
    """Records the results of all operators that run within."""

    def __init__(self, results: list[_Result]) -> None:
        self.results = results

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self.pass_on(func, args, kwargs)
        values = (x for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point())
        # Cloned, because a later operator may change the tensors in place.
        self.results.append(
            _Result(str(func.name()), _calling_line(), tuple(x.detach().clone() for x in values))
        )
        return out


def _calling_line() -> str:
    """The innermost line of code outside torch and weft; if there is none, of weft."""
    frame: Any = sys._getframe(2)
    weft_line = ""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        here = f"{path.name}:{frame.f_lineno}"
        if path.is_absolute() and not any(path.is_relative_to(other) for other in _OTHERS):
            return here
        weft_line = weft_line or (here if not path.is_relative_to(_OTHERS[0]) else "")
        frame = frame.f_back
    return weft_line


def _first_difference(alone: Sequence[_Result], other: Sequence[_Result]) -> str:
    """A sentence about the first operator whose bits differ, in the rows that both runs have."""
    # Of two lists of operators, one may go on: the first difference is looked for in what both
    # have.
    for one, two in zip(alone, other, strict=False):
        if one.name != two.name:
            return (
                f"the first other operator is {two.name} at {two.line}, in the place of {one.name}"
                f" at {one.line}"
            )
        for a, b in zip(one.values, two.values, strict=True):
            # Padding follows the batch, so what both have comes first in each dimension.
            common = tuple(slice(min(sizes)) for sizes in zip(a.shape, b.shape, strict=True))
            if a.dim() == b.dim() and find_difference(b[common], a[common], None) is not None:
                most = (a[common].double() - b[common].double()).abs().nan_to_num().max().item()
                shapes = f"{list(b.shape)} instead of {list(a.shape)}"
                return (
                    f"the first operator that differs is {one.name} at {one.line}: by up to"
                    f" {most:.3g}, for {shapes}"
                )
    return "no operator differs in the rows that both have"
