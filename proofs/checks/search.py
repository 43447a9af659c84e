"""Searches with Hypothesis for the smallest example on which a function raises, and turns a user's
arguments into strategies."""

import inspect
import sys
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

import attrs
import torch
from torch import Tensor
from tqdm.auto import tqdm

from weft.arguments.checks import kind_of
from weft.errors import CheckError
from weft.values.trees import tree_map

if TYPE_CHECKING:
    from hypothesis import strategies as st

# Seconds after which a search shows a progress bar.
BAR_AFTER = 2.0
NOT_AGAIN = (
    "It did not happen again with the same arguments: something reads what changes from call to"
    " call."
)


@attrs.frozen
class Found:
    """The result of a search.

    Args:
        examples: the number of examples up to the first failure; of all examples if none failed.
        error: the error of the smallest failing example; None if none failed.
    """

    examples: int
    error: Exception | None


def once(run: Callable[[Any], None], example: Any) -> Found:
    """Run one example, and return the result in the form of `search`."""
    try:
        run(example)
    except CheckError:
        raise
    except Exception as error:
        return Found(1, error)
    return Found(1, None)


def search(
    run: Callable[[Any], None],
    examples: "st.SearchStrategy[Any]",
    title: str,
    functions: Sequence[Callable[..., Any]] = (),
    max_examples: int | None = None,
) -> Found:
    """Call `run` on examples until it raises, and then on ever smaller ones, with a progress bar.

    The active Hypothesis profile determines the number of examples (unless `max_examples` is
    given), whether they are the same each time, and the database of failures, with which the next
    search begins. Nothing but the progress bar is printed.

    Args:
        title: names the search in the progress bar.
        functions: the user's functions. Their code and the title are the key in the database.

    Returns:
        The result; it has 0 examples if the profile generates none, and the database has none.
    """
    from hypothesis import Phase, Verbosity, given, settings
    from hypothesis.errors import Flaky

    failures: list[Exception] = []
    count = 0
    profile = settings()
    if max_examples is None:
        most = profile.max_examples
    else:
        most = max_examples

    @settings(
        deadline=None,
        max_examples=most,
        # One error is returned, that of the smallest example.
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        print_blob=False,
        phases=[
            phase
            for phase in profile.phases
            if phase in (Phase.reuse, Phase.generate, Phase.target, Phase.shrink)
        ],
    )
    @given(examples)
    def test(example: Any) -> None:
        nonlocal count
        count += not failures  # after the first failure, Hypothesis only shrinks
        bar.update()
        try:
            run(example)
        except Exception as error:
            if not is_control(error):
                if not failures:
                    bar.set_description(
                        f"{title}: failed, searching for a smaller example", refresh=False
                    )
                failures.append(error)
            raise

    # Hypothesis would use `test`'s own key for every search, since it is always the same function.
    # `hypothesis.find` sets the same attribute.
    vars(test)["_hypothesis_internal_database_key"] = _key(title, functions)
    shown = sys.stderr.isatty() or "ipykernel" in sys.modules
    with tqdm(
        total=most, desc=title, unit="example", leave=False, delay=BAR_AFTER, disable=not shown
    ) as bar:
        try:
            test()
        except SkipTest:
            pass  # Hypothesis raises this if no phase of the profile has an example
        except Flaky:
            if not failures:
                raise
            failures[-1].add_note(NOT_AGAIN)
        except Exception as error:
            if not failures or error is not failures[-1]:
                raise
    if failures and isinstance(failures[-1], CheckError):
        raise failures[-1]
    return Found(count, failures[-1] if failures else None)


def _key(title: str, functions: Sequence[Callable[..., Any]]) -> bytes:
    """The key of a search in the database, which differs for other functions of the same name."""
    parts = [title]
    for fn in map(inspect.unwrap, functions):
        code = getattr(fn, "__code__", None)
        parts += [getattr(fn, "__module__", "") or "", getattr(fn, "__qualname__", "")]
        if code is not None:
            # Other constants, such as the code of a nested function, have an address in their
            # `repr`.
            plain = [
                value
                for value in code.co_consts
                if isinstance(value, int | float | complex | str | bytes)
            ]
            parts += [code.co_code.hex(), repr(code.co_names), repr(plain)]
    return b"weft.proofs " + sha256("\n".join(parts).encode()).digest()


def remember(error: Exception, args: Any) -> None:
    """Attach to an error the arguments on which a user's function raised it, unless some are
    attached."""
    vars(error).setdefault("__weft_args__", args)


def remembered(error: Exception) -> Any:
    """The arguments that `remember` attached; None if the user's function did not raise the error."""
    return vars(error).get("__weft_args__")


def check_numbers(call: str, max_examples: Any, atol: Any, rtol: Any) -> None:
    """Raise CheckError if `max_examples` is not a whole number >= 1 or None, or if a tolerance is
    not a number >= 0."""
    if max_examples is not None and (
        isinstance(max_examples, bool) or not isinstance(max_examples, int)
    ):
        raise CheckError(call, f"max_examples={max_examples!r:.40}", "a whole number >= 1, or None")
    if max_examples is not None and max_examples < 1:
        raise CheckError(
            call,
            f"max_examples={max_examples}, which compares nothing",
            "a whole number >= 1, or None",
        )
    for name, value in (("atol", atol), ("rtol", rtol)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise CheckError(call, f"{name}={value!r:.40}", "a number >= 0; 0 is bitwise")


def is_control(error: BaseException) -> bool:
    """Whether an error is Hypothesis's own control flow, such as the one that `assume` raises."""
    errors = sys.modules.get("hypothesis.errors")
    return errors is not None and isinstance(error, errors.HypothesisException)


def is_strategy(value: Any) -> bool:
    """Whether a value is a Hypothesis strategy. It does not import Hypothesis: whoever has made a
    strategy has done so."""
    module = sys.modules.get("hypothesis.strategies")
    return module is not None and isinstance(value, module.SearchStrategy)


def as_given(args: Any, call: str) -> Any:
    """Turn `args` into a strategy that draws arguments; return them unchanged if none of them is a
    strategy.

    Args:
        args: a strategy that draws a tuple (of positional arguments) or a dict (of arguments by
            name); or such a tuple or dict, whose entries may be strategies.
        call: the call that the error shows.

    Raises:
        CheckError: `args` is something else.
    """
    if is_strategy(args):
        return args  # the caller applies `check_arguments` to what it draws
    check_arguments(args, call)
    if not any(map(is_strategy, args.values() if isinstance(args, dict) else args)):
        return args
    from hypothesis import strategies as st

    def one(value: Any) -> Any:
        if is_strategy(value):
            return value
        return st.just(value)

    if isinstance(args, dict):
        return st.fixed_dictionaries({name: one(value) for name, value in args.items()})
    return st.tuples(*map(one, args))


def check_arguments(args: Any, call: str, verb: str = "is ") -> Any:
    """Return `args` if it is a tuple, or a dict by names; otherwise raise CheckError."""
    if type(args) is tuple or (type(args) is dict and all(isinstance(name, str) for name in args)):
        return args
    instead = (
        "args=(x, y), or args={'x': x, 'y': y}: the arguments of a call, of which each may be a"
        " strategy; "
    )
    instead += "or one strategy that draws such a tuple or dict, such as st.tuples(...)"
    raise CheckError(call, f"args {verb}{kind_of(args)}", instead)


def copies(tree: Any, device: torch.device | str | None = None) -> Any:
    """Copy a tree and its tensors, to another device if one is given."""

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        new = x.detach().clone().to(device or x.device)
        if x.requires_grad:
            return new.requires_grad_()
        return new

    return tree_map(copy, tree)


def call_with(fn: Callable[..., Any], args: tuple[Any, ...] | dict[str, Any]) -> Any:
    """Call a function with positional arguments (a tuple) or arguments by name (a dict)."""
    if isinstance(args, dict):
        return fn(**args)
    return fn(*args)


def name_of(fn: Any, otherwise: str = "f") -> str:
    """A function's name for messages; `otherwise` for a lambda or an object without a name."""
    name = getattr(fn, "__name__", "")
    if not (name and "<" not in name):
        name = otherwise
    if hasattr(fn, "cache_info") and hasattr(fn, "explain"):
        return f"graphify({name})"
    return name


def names_of(fns: Sequence[Any]) -> list[str]:
    """The names of two functions for one message; `f` and `g` are added if the names are equal, as
    after `functools.wraps`."""
    names = [name_of(fn, other) for fn, other in zip(fns, "fg", strict=True)]
    if len(set(names)) == len(names):
        return names
    return [f"{n} ({name})" for name, n in zip(names, "fg", strict=True)]
