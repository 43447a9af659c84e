"""`assert_equivalent`: compares two functions, and shows the smallest arguments for which they
differ, as code."""

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from weft.errors import CheckError
from weft.proofs.checks.code import Writer
from weft.proofs.checks.difference import LawViolation, find_difference
from weft.proofs.checks.elements import Tolerance
from weft.proofs.checks.search import (
    as_given,
    call_with,
    check_arguments,
    check_numbers,
    copies,
    is_control,
    is_strategy,
    names_of,
    once,
    remember,
    remembered,
    search,
)


class Counterexample(LawViolation):
    """A difference, and the arguments that show it, as code to paste.

    Args:
        text: the difference.
        values: names and values that the code assigns.
        call: the code's last line, which raises this again.
    """

    def __init__(self, text: str, values: Sequence[tuple[str, Any]], call: str) -> None:
        super().__init__(text)
        self.text = text
        self.values = tuple(values)
        self.call = call
        self.code_apart = False
        self._code = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments of `__init__`, so that the error can be sent to another process."""
        return type(self), (self.text, self.values, self.call)

    def code(self, folder: Path | None = None) -> str:
        """The code to paste. It is written once only, because tensors that are too large to print
        are saved (in `folder`)."""
        self._code = (
            self._code
            or f"{Writer({'import weft.proofs'}).block(self.values, folder)}\n{self.call}"
        )
        return self._code

    def __str__(self) -> str:
        """The difference and the code; the difference alone if the code is shown separately."""
        if self.code_apart:
            return self.text
        return f"{self.text}\nto see it again:\n{textwrap.indent(self.code(), '    ')}"


def assert_equivalent(
    f: Callable[..., Any],
    g: Callable[..., Any],
    args: Any,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    equal_nan: bool = True,
    raises: type[Exception] | tuple[type[Exception], ...] = (),
    max_examples: int | None = None,
) -> None:
    """Raise unless `f` and `g` return equal results for the same arguments: by default bitwise, in
    trees of the same structure.

    Each function gets its own copies of the arguments, which it may donate or overwrite. Outside a
    Hypothesis test, pass a strategy; inside one, pass the drawn arguments. Either way, the failure
    shows the smallest arguments found.

    Args:
        f: the function under test.
        g: the function that it should equal.
        args: a strategy that draws a tuple of arguments, or a dict of them by name; or such a
            tuple or dict, whose entries may be strategies. Without any strategy, the two are called
            once.
        atol, rtol: the tolerance for floating-point and complex elements, as for `torch.isclose`.
        equal_nan: whether NaN equals NaN.
        raises: exception types that the functions may raise, if both raise the same one. Any other
            exception that both raise is passed on, since nothing was compared.
        max_examples: the number of examples; None: the active Hypothesis profile's.

    Raises:
        Counterexample: they differ. It shows the path of the first leaf that differs, its first
            such element, both values and their distance in ULPs, the number of elements that
            differ, and the arguments as code to paste.
        CheckError: `args`, `raises`, `max_examples` or a tolerance is not as described above.

    >>> import torch
    >>> assert_equivalent(torch.exp, lambda x: x.exp(), args=(torch.ones(3),))
    >>> assert_equivalent(torch.exp, torch.expm1, args=(torch.zeros(2),), atol=1e-3)
    Traceback (most recent call last):
        ...
    weft.proofs.checks.equivalence.Counterexample: exp is not expm1, within atol=0.001 and rtol=0
      at:     the result, element [0] of float32 [2] on cpu
      exp:    1.0
      expm1:  0.0
      apart:  1, 1,065,353,216 ULPs
      differ: 2 of 2 elements; most at [0]: 1.0 and 0.0, apart 1, 1,065,353,216 ULPs
    to see it again:
        import torch
        import weft.proofs
        args = (torch.zeros(2),)
        weft.proofs.assert_equivalent(exp, expm1, args=args, atol=0.001)
    """
    __tracebackhide__ = True
    names = names_of((f, g))
    call = f"assert_equivalent({', '.join(names)}, args=...)"
    check_numbers(call, max_examples, atol, rtol)
    _check_types(call, raises)
    tolerance = Tolerance(atol, rtol, equal_nan)
    options = {"atol": atol, "rtol": rtol, "equal_nan": equal_nan, "raises": raises}
    drawn = as_given(args, call)
    comparison = _Comparison(f, g, names, tolerance, raises, _call(names, options))
    if is_strategy(drawn):
        result = search(comparison, drawn, call, (f, g), max_examples)
    else:
        result = once(comparison, drawn)
    if not result.examples:
        problem = "a Hypothesis profile that generates no examples, and none in its database"
        raise CheckError(call, problem, "a profile whose `phases` have Phase.generate")
    if result.error is not None:
        if isinstance(result.error, Counterexample):
            # A traceback through the search would not help the reader.
            result.error.with_traceback(None)
        elif remembered(result.error) is not None:
            code = Writer().block([("args", remembered(result.error))])
            result.error.add_note(f"Both raised this for\n{textwrap.indent(code, '    ')}")
        raise result.error from result.error.__cause__


def _check_types(call: str, raises: Any) -> None:
    if isinstance(raises, tuple):
        types = raises
    else:
        types = (raises,)
    if strange := [
        one for one in types if not isinstance(one, type) or not issubclass(one, Exception)
    ]:
        raise CheckError(
            call,
            f"raises={strange[0]!r:.60}",
            "a type of exceptions: raises=ValueError, or a tuple of such",
        )


def _call(names: Sequence[str], options: dict[str, Any]) -> str:
    """Code for the same comparison, with the options that were not left at their defaults."""
    defaults = {"atol": 0.0, "rtol": 0.0, "equal_nan": True, "raises": ()}
    option_texts = [
        f"{name}={_written(value)}" for name, value in options.items() if value != defaults[name]
    ]
    # Without the " (g)" that `names_of` adds to equal names.
    functions = [name.partition(" ")[0] for name in names]
    return f"weft.proofs.assert_equivalent({', '.join([*functions, 'args=args', *option_texts])})"


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + "".join(f"{_written(v)}, " for v in value).strip() + ")"
    if isinstance(value, type):
        return value.__name__
    return repr(value)


@attrs.frozen
class _Comparison:
    """Calls both functions with the same arguments, and raises Counterexample if they differ."""

    f: Callable[..., Any]
    g: Callable[..., Any]
    names: Sequence[str]
    tolerance: Tolerance
    raises: type[Exception] | tuple[type[Exception], ...]
    call: str

    def __call__(self, args: Any) -> None:
        check_arguments(args, f"assert_equivalent({', '.join(self.names)}, args=...)", "drew ")
        kept = copies(args)
        (actual, error), (expected, other) = _outcome(self.f, args), _outcome(self.g, args)
        if error is None and other is None:
            if (difference := find_difference(actual, expected, self.tolerance)) is not None:
                self._refuse(difference.text(*self.names), kept)
            return
        if error is not None and other is not None:
            if not isinstance(error, self.raises or ()) and not isinstance(
                other, self.raises or ()
            ):
                remember(error, kept)
                raise error
            if type(error) is type(other):
                return
        width = max(map(len, self.names)) + 1
        said = [_said(one) for one in (error, other)]
        lines = [
            f"{f'{name}:':<{width}} {text}" for name, text in zip(self.names, said, strict=True)
        ]
        self._refuse("\n".join(lines), kept, error or other)

    def _refuse(self, details: str, args: Any, cause: Exception | None = None) -> None:
        head = f"{self.names[0]} is not {self.names[1]}, {self.tolerance}"
        raise Counterexample(
            f"{head}\n{textwrap.indent(details, '  ')}", [("args", args)], self.call
        ) from cause


def _said(error: Exception | None) -> str:
    if error is None:
        return "returns"
    return f"raises {type(error).__name__}: {error}"


def _outcome(fn: Callable[..., Any], args: Any) -> tuple[Any, Exception | None]:
    """The function's result for copies of the arguments, or the exception that it raised."""
    try:
        return call_with(fn, copies(args)), None
    except Exception as error:
        if is_control(error):
            raise
        return None, error
