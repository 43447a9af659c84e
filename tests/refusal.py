"""What tests of bad input share: an error of one kind, whole, and the line that it names."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from weft.errors import WeftError

ANY = "<any>"
REMEDY = (
    "compute it with tensor operations (torch.where), pass it as a static argument, or move it out"
    " of the function"
)
USE_THE_NEW = "use the value that it returned, or pass a copy (weft.clone) to keep the old one"
BELONG = "check that config.json and the weights belong together"


@contextmanager
def refused(kind: type[WeftError], call: str, problem: str, instead: str) -> Iterator[None]:
    """The body raises exactly `kind`, of this text; `<any>` stands for anything on one line."""
    with pytest.raises(WeftError) as caught:
        yield
    assert type(caught.value) is kind
    expected = f"{call}\n  saw: {problem}\n  instead: {instead}"
    text = str(caught.value)
    if not re.fullmatch(re.escape(expected).replace(re.escape(ANY), ".*"), text):
        pytest.fail(f"the error says\n{text}\nand not\n{expected}", pytrace=False)


def at(fn: Callable[..., Any], text: str) -> str:
    """The line of `fn` that holds `text`, as errors print it."""
    lines, first = inspect.getsourcelines(fn)
    index = next(i for i, line in enumerate(lines) if text in line)
    return (
        f"\n       at {inspect.getsourcefile(inspect.unwrap(fn))}:{first + index}:"
        f" {lines[index].strip()}"
    )
