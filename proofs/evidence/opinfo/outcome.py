"""`Outcome`: one case, graphified and compared with eager."""

import gc
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.errors import CompilerError, WeftError
from weft.proofs._strategies.operator_samples import Case, cases, copies, seed_all
from weft.proofs.checks.difference import LawViolation, find_difference
from weft.proofs.checks.rounding import assert_rounded
from weft.proofs.evidence.opinfo.causes import causes_of
from weft.transforms.graphs.graphify import graphify
from weft.values.trees import leaves_with_names

# The kinds of outcome.
KINDS = {
    "same": "the results of the capture and of both replays are those of eager, bit for bit",
    "refused": "weft refused the function",
    "inline": "the function itself ran, and its results are those of eager",
    "torch": "the values differ for a cause in torch itself, which is named",
    "raises": "eager raises, and the graphified function too",
    "differs": "a result is not that of eager",
    "crash": "an error that eager does not raise",
}
# Those of a run with a compiler besides.
KINDS_OF_COMPILED = {
    "near": "the values differ in their bits, and not beyond the tolerances of torch.testing",
    "uncompiled": "weft or the compiler cannot compile the function, which a graph may still hold",
}


def kinds(compiler: str | None) -> dict[str, str]:
    """The kinds of outcome of a run with a compiler, or without one."""
    return KINDS if compiler is None else KINDS | KINDS_OF_COMPILED


# The seed before every call, so that random operators repeat.
_SEED = 7
_NOT_RUN = (
    "The device reports an error that ends the process, so the operator's further samples did not"
    " run."
)
# The errors after which a process cannot use its GPU any more; those of a capture that failed are
# none of them.
_LOST = re.compile(r"CUDA error(?!.*captur)|device-side assert|illegal memory access")


@attrs.frozen
class Outcome:
    """The outcome of a case.

    Args:
        kind: a key of `KINDS`, or of `KINDS_OF_COMPILED`.
        operator, transform, dtype, sample: those of the case.
        detail: the reason of a refusal, of a run inline, of a cause in torch, or for which nothing
            was compiled; the difference; or the error.
        device_lost: whether the process cannot use its GPU any more.
        arguments: the shapes of the case's arguments, for those that differ or crash.
    """

    kind: str
    operator: str
    transform: str
    dtype: str
    sample: int
    detail: str = ""
    arguments: str = ""
    device_lost: bool = False


class _Differs(Exception):
    """A result that is not that of eager. Its arguments: when, the difference, and both results if
    only their values differ."""


def outcomes(
    entry: Any,
    transforms: Sequence[str],
    dtype: str,
    device: str,
    samples: int | None,
    seed: int,
    compiler: str | None = None,
) -> Iterator[Outcome]:
    """The outcomes of one operator's cases.

    Args:
        entry: an entry of `operator_database()`.
        samples: the most samples of each transform; None: all.
        seed: of the samples' values.
        compiler: of the graphs; None: nothing is compiled.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for transform in transforms:
            for case in cases(entry, transform, dtype, device, samples, seed):
                yield (outcome := run(case, device, compiler))
                # After such an error every call fails, which would count as faults of operators
                # that have none.
                if outcome.device_lost:
                    yield Outcome("torch", case.operator, transform, dtype, case.sample, _NOT_RUN)
                    return
    # After each operator: graphs in cycles would keep their memory, and a later one would run out
    # of it.
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def run(case: Case, device: str, compiler: str | None = None) -> Outcome:
    """Run one case."""
    try:
        return _outcome(case, *_compare(case, compiler))
    # Causes first, since they are known; whether eager repeats costs five more runs.
    except _Differs as mismatch:
        when, difference, *values = mismatch.args
        for cause in causes_of(case, device):
            if cause.allows(case, *values) if values else cause.elsewhere:
                return _outcome(case, "torch", cause.reason)
        if compiler is not None and values and _is_near(*values):
            return _outcome(case, "near", "within the tolerances of torch.testing")
        if _repeats(case):
            itself = ""
        else:
            # Still a difference and not excused: an operator that does not repeat needs a cause
            # with a reason.
            itself = " (eager differs from itself)"
        return _outcome(case, "differs", f"{when}: {difference}{itself}")
    except CompilerError as error:
        return _outcome(case, "uncompiled", error.problem.partition("\n")[0])
    except WeftError as error:
        return _outcome(case, "refused", error.problem.partition("\n")[0])
    except Exception as error:
        return _outcome(case, "crash", _in_words(error))


def _outcome(case: Case, kind: str, detail: str = "") -> Outcome:
    if kind in ("differs", "crash"):
        arguments = str(case)
    else:
        arguments = ""
    lost = kind in ("raises", "crash") and _LOST.search(detail) is not None
    return Outcome(
        kind, case.operator, case.transform, case.dtype, case.sample, detail, arguments, lost
    )


def _is_near(actual: Any, expected: Any) -> bool:
    try:
        assert_rounded("near", actual, expected)
    except LawViolation:
        return False
    return True


def _compare(case: Case, compiler: str | None) -> tuple[str, str]:
    """The kind of an outcome without a fault, and its detail.

    Raises:
        _Differs: a result is not that of eager.
        Exception: whatever the graphified function raises, and eager does not.
    """
    # A new one for each case, so that no graph of another sample answers.
    graphified = graphify(case.fn, compiler=compiler, strict=compiler is not None)
    # Eager first: where it raises, there is nothing to compare.
    expected, error = _eager(case, case.tensors)
    if error is not None:
        try:
            _call(graphified, case.tensors)
        except Exception:
            return "raises", _in_words(error)
        # The error need not be the same one: a refusal is as good where the function itself has no
        # result.
        raise _Differs("capture", f"no error, where eager raises {_in_words(error)}")
    calls = [("capture", expected, _call(graphified, case.tensors))]
    # The same values again: a graph that reads its capture's inputs is still right.
    calls.append(("replay", expected, _call(graphified, case.tensors)))
    if case.other_tensors is not None:
        expected, error = _eager(case, case.other_tensors)
        if error is None:
            # Other values of the same shapes: what was frozen at the capture is wrong here.
            calls.append(("new values", expected, _call(graphified, case.other_tensors)))
    for (
        when,
        expected,
        result,
    ) in calls:  # compared last, so that a replay which overwrites earlier results is seen
        _assert_equal(when, result, expected)
    # Right results do not say that there was a graph: weft may have run the function itself.
    if graphified.cache_info().captures:
        return "same", ""
    return "inline", str(graphified.explain(*case.tensors)).partition("\n")[0]


def _eager(case: Case, tensors: Sequence[Tensor]) -> tuple[Any, Exception | None]:
    try:
        return _call(case.fn, tensors), None
    except Exception as error:
        return None, error


def _call(fn: Any, tensors: Sequence[Tensor]) -> Any:
    """A function's result on copies of its arguments, and these copies after the call."""
    # Copies, since an operator may write to its arguments; what it wrote is part of the result.
    arguments = copies(tensors)
    # After the copies, which must not come between the seed and the draw.
    seed_all(_SEED)
    return fn(*arguments), arguments


def _assert_equal(when: str, result: Any, expected: Any) -> None:
    """Raise _Differs unless two results have equal structures, dtypes, shapes, strides and bits. In
    the place of a view, such as an expanded tensor, a graphified function may return a copy, with
    the strides of a clone."""
    difference = find_difference(result, expected)
    if difference is not None and difference.first is None:
        raise _Differs(when, str(difference))
    for (path, a), (_, b) in zip(
        leaves_with_names(result), leaves_with_names(expected), strict=True
    ):
        if not isinstance(a, Tensor):
            continue
        # Before the values: a difference of structure is never excused by a cause of torch's.
        if type(a) is not type(b):
            raise _Differs(when, f"{path}: class {type(a).__name__} against {type(b).__name__}")
        if a.layout is not b.layout:
            raise _Differs(when, f"{path}: layout {a.layout} against {b.layout}")
        if a.layout is torch.strided and _strides(a) not in (_strides(b), _strides(b.clone())):
            raise _Differs(
                when, f"{path}: strides {a.stride()} against {b.stride()} of shape {list(a.shape)}"
            )
    if difference is not None:
        raise _Differs(when, str(difference), result, expected)


def _strides(x: Tensor) -> tuple[int, ...]:
    """The strides along axes on which there are several elements."""
    if x.numel():
        # The stride of an axis of one element reaches nothing, and operators set it to any number.
        return tuple(step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1)
    return ()


def _repeats(case: Case) -> bool:
    """Whether eager computes the same again, five times."""
    try:
        first = _call(case.fn, case.tensors)
        results = []
        # Several times: a sum whose order varies may come out the same by chance.
        for _ in range(5):
            again = _call(case.fn, case.tensors)
            results.append(again)  # so that memory which nothing has written is other memory
            if find_difference(again, first) is not None:
                return False
    except Exception:
        return False
    return True


def _in_words(error: BaseException) -> str:
    # The first line: the rest of a CUDA error is advice, which is the same for all.
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:300]}"
