"""What the tables of mistakes share: a mistake with its answer, and what most of them are made
with."""

import functools
import re
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from refusal import ANY
from torch import Tensor

import weft
from weft.errors import WeftError
from weft.stages import DEMO

X = torch.ones(3)
LIMITS = weft.Limits(max_num_reqs=4, max_num_tokens=16)


@attrs.frozen
class Mistake:
    """What someone wrote, and what is said of it: an error of this kind, with these three parts,
    whole.

    `<line>` stands for a place in a file, `<demo>` for the demo's folder, and `<any>` for anything
    on one line.
    """

    wrong: Callable[[], Any]
    kind: type[WeftError]
    call: str
    problem: str
    instead: str

    def __str__(self) -> str:
        return (
            f"{self.kind.__name__}: {self.call}\n  saw: {self.problem}\n  instead: {self.instead}"
        )

    def pattern(self) -> str:
        """What an error's text has to match."""
        return re.escape(str(self)).replace(re.escape(ANY), ".*")

    def answer(self) -> Exception:
        """The error that it raises."""
        try:
            self.wrong()
        except Exception as error:
            return error
        pytest.fail("nothing was said")


def as_written(error: Exception) -> str:
    """Its text, without what is of this machine alone."""
    text = re.sub(r"\n       at .*", "\n       at <line>", f"{type(error).__name__}: {error}")
    return text.replace(str(DEMO), "<demo>")


@functools.cache
def model() -> weft.Model:
    return weft.load(DEMO, "cpu")


def f(x: Tensor) -> Tensor:
    return x + 1


def g(state: Tensor, x: Tensor) -> Tensor:
    return state + x
