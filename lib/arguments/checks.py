"""Checks of arguments: their types and ranges, and errors for arguments that a function does not
have."""

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from types import UnionType
from typing import Any, TypeGuard, TypeVar, cast

from weft.errors import ArgumentError, RequestError, WeftError

F = TypeVar("F", bound=Callable[..., Any])


def names_arguments(_by_position: str = "", /, **meant: str) -> Callable[[F], F]:
    """Decorate a function or a class so that arguments that it does not have raise errors that say
    what to write instead.

    Args:
        _by_position: what to write instead of too many positional arguments; if empty, the names of
            the keyword-only arguments.
        meant: names of arguments in other libraries, and what to write here
            (`weft.arguments.equivalents`).

    Returns:
        A decorator; it keeps the signature.

    >>> @names_arguments(dim="axis=...")
    ... def sum_of(x, *, axis=0): ...
    >>> sum_of([1], dim=0)
    Traceback (most recent call last):
        ...
    weft.errors.ArgumentError: sum_of(..., dim=...)
      saw: 'dim', which is no argument of it
      instead: axis=...
    """

    def wrap(fn: F) -> F:
        decorated: Any = fn
        if not isinstance(fn, type):
            return cast(F, _checked(decorated, decorated.__name__, meant, _by_position))
        # The class itself is returned, so that `isinstance` and subclasses still work.
        decorated.__init__ = _checked(decorated.__init__, decorated.__name__, meant, _by_position)
        return fn

    return wrap


def _checked(
    fn: Callable[..., Any], name: str, meant: dict[str, str], by_position: str
) -> Callable[..., Any]:
    parameters = inspect.signature(fn).parameters
    parameter_names = frozenset(parameters) - {"self"}
    by_name = [f"{key}=..." for key, each in parameters.items() if each.kind is each.KEYWORD_ONLY]
    most = len(parameters) - len(by_name)
    required = [key for key, each in parameters.items() if each.default is each.empty]
    first = sum(parameters[key].kind is not inspect.Parameter.KEYWORD_ONLY for key in required)
    needed = frozenset(required[first:])
    is_method = "self" in parameters

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        # The fast path of correct calls: no error text is built, and the signature is not bound.
        if needed <= kwargs.keys() <= parameter_names and first <= len(args) <= most:
            return fn(*args, **kwargs)
        if len(args) > most:
            count = len(args) - is_method
            takes = most - is_method
            written = ["..."] * count
            instead = by_position or ", ".join(by_name) or ", ".join(sorted(parameter_names))
            problem = (
                f"{count} argument{'s' * (count != 1)} by position, of which it takes"
                f" {takes or 'none'}"
            )
        elif kwargs.keys() <= parameter_names:
            missing = [key for key in required[len(args) : first] if key not in kwargs]
            missing += [key for key in required[first:] if key not in kwargs]
            if not missing:
                return fn(*args, **kwargs)
            written = ["..."] * (len(args) - is_method) + [f"{key}=..." for key in kwargs]
            problem = f"no {missing[0]}"
            instead = ", ".join(f"{key}=..." for key in missing)
        else:
            strange = next(key for key in kwargs if key not in parameter_names)
            written = ["...", f"{strange}=..."]
            instead = _instead(strange, parameter_names, meant)
            problem = f"{strange!r}, which is no argument of it"
        raise ArgumentError(f"{name}({', '.join(written)})", problem, instead)

    return checked


def _instead(strange: str, parameter_names: Collection[str], meant: Mapping[str, str]) -> str:
    """The remedy for an unknown argument name: the nearest name of an argument, or the equivalent
    of the nearest name in other libraries."""
    if strange in meant:
        near = [strange]
    else:
        near = nearest(strange, sorted({*parameter_names, *meant}))
    if not near:
        return f"one of {', '.join(sorted(parameter_names))}"
    if near[0] in parameter_names:
        return f"{near[0]}=..."
    return meant[near[0]]


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """The one of `names` of which `name` may be a misspelling, in a list; an empty list if there is
    none. A name that merely shares a word with another does not count, as it may mean something
    else.

    >>> nearest("temprature", ["temperature", "prompt"]), nearest("cache_prompt", ["temperature", "prompt"])
    (['temperature'], [])
    """
    # A lower cutoff took llama.cpp's `cache_prompt` for a slip of `prompt`.
    return difflib.get_close_matches(name, names, n=1, cutoff=0.81)


def is_int(value: object, least: int | None = None, most: int | None = None) -> TypeGuard[int]:
    """Whether a value is an int, not a bool, from `least` to `most`.

    >>> is_int(1, 1), is_int(0, 1), is_int(True, 1), is_int(1.0, 1)
    (True, False, False, False)
    """
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return (least is None or value >= least) and (most is None or value <= most)


def is_number(value: object, least: float, most: float) -> TypeGuard[float]:
    """Whether a value is an int or a float, not a bool and not NaN, from `least` to `most`.

    >>> is_number(0.5, 0, 1), is_number(float("nan"), 0, 1), is_number("1", 0, 1)
    (True, False, False)
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


# The type of an argument, or a function that says whether its value is valid; and the `instead` of
# the error.
Rule = tuple[type | UnionType | Callable[[Any], object], str]
COUNT: Rule = (lambda value: is_int(value, 1), "a whole number >= 1")
COUNT_OR_NONE: Rule = (
    lambda value: value is None or is_int(value, 1),
    "a whole number >= 1, or None",
)


def check_values(
    call: object,
    rules: Mapping[str, Rule],
    values: Mapping[str, Any],
    error: type[WeftError] = RequestError,
) -> None:
    """Raise `error` for the first value that breaks the rule of its name. A value that the rule
    cannot be applied to breaks it.

    Args:
        call: the call as the user wrote it: a text, or an object that prints as it.
        rules: a rule for each argument, by its name.
        values: the arguments to check.

    >>> check_values("sum_of(x, axis=-1)", {"axis": (lambda axis: axis >= 0, "axis=0, or more")}, {"axis": -1})
    Traceback (most recent call last):
        ...
    weft.errors.RequestError: sum_of(x, axis=-1)
      saw: axis=-1
      instead: axis=0, or more
    """
    for name, value in values.items():
        rule, instead = rules[name]
        if isinstance(rule, type | UnionType):
            holds = isinstance(value, rule)
            problem = f"{name} is {kind_of(value)}"
        else:
            holds = _holds(rule, value)
            problem = ""
        if not holds:
            raise error(f"{call}", problem or _with_value(name, value), instead)


def _holds(rule: Callable[[Any], object], value: Any) -> bool:
    try:
        return bool(rule(value))
    except (TypeError, ValueError):  # a text where a number is compared, or an array
        return False


def _with_value(name: str, value: Any) -> str:
    """An argument with its value, for an error; a tensor, which may be large, is shown by its shape
    and dtype."""
    if isinstance(value, type):
        return f"{name}={value.__name__}, the class"
    is_tensor = bool(getattr(value, "shape", ())) and hasattr(value, "dtype")
    if is_tensor:
        return f"{name} of shape {list(value.shape)}, {value.dtype}"
    return f"{name}={value!r:.200}"


def other_signature(function: Callable[..., Any], count: int, *keywords: str) -> str | None:
    """The name and signature of a function if it does not take `count` positional arguments and
    these keywords; None if it does, or if its signature is unknown. For a module, the signature of
    its `forward`.

    >>> def halved(x): ...
    >>> other_signature(halved, 1), other_signature(halved, 2), other_signature(halved, 1, "axis")
    (None, 'halved(x)', 'halved(x)')
    >>> import torch
    >>> other_signature(torch.nn.ReLU(), 1), other_signature(torch.nn.Linear, 2)  # a class is called to make one
    (None, None)
    """
    # Not of the wrapped function: a decorator may take other arguments than the function in it.
    called = function if isinstance(function, type) else getattr(function, "forward", function)
    try:
        signature = inspect.signature(called, follow_wrapped=False)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*range(count), **dict.fromkeys(keywords))
    except TypeError:
        return f"{getattr(function, '__name__', type(function).__name__)!s:.60}{signature}"
    return None


def kind_of(value: object) -> str:
    """The name of a value's class with an article, for an error.

    >>> kind_of(3), kind_of([]), kind_of(None)
    ('an int', 'a list', 'None')
    """
    if value is None:
        return "None"
    return with_article(type(value).__name__)


def with_article(noun: str) -> str:
    """A noun after `a` or `an`, by its first letter."""
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"
