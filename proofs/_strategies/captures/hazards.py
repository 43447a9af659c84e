"""Known hazards of captures as Python code: `hazards()` draws one with its parameters, as a
`TensorProgram`."""

from string import Template
from typing import Any

import attrs
from hypothesis import strategies as st

from weft.proofs._strategies.captures.hazards_of_calls import OF_CALLS, Kind
from weft.proofs._strategies.captures.hazards_of_functions import OF_FUNCTIONS
from weft.proofs._strategies.captures.tensor_programs import TensorProgram

# A kind of hazard defines these functions anew where it needs others.
_HEAD = """
import contextlib
import functools
import threading

import torch
from torch import nn
from torch.utils import _pytree

import weft

device = {device!r}

def arguments(call):
    return torch.tensor([1.0, 2.0, 3.0], device=device) * (1 + call),

def around(call):
    return contextlib.nullcontext()

def before(call):
    pass
"""


@attrs.frozen
class Hazard:
    """One hazard of a capture.

    Args:
        kind: a key of `HAZARDS`.
        program: the code, with parameters filled in.
        refused: whether weft may refuse it.
    """

    kind: str
    program: TensorProgram
    refused: bool

    def __repr__(self) -> str:
        return (
            f"# {self.kind}, which weft"
            f" {'may refuse' if self.refused else 'gets right'}\n{self.program!r}"
        )


HAZARDS: dict[str, Kind] = OF_CALLS | OF_FUNCTIONS
"""The kinds of hazards, by name."""


@st.composite
def hazards(draw: st.DrawFn, device: str = "cpu") -> Hazard:
    """A kind of hazard, its parameters, and two to four calls with new values.

    >>> from hypothesis import find
    >>> hazard = find(hazards(), lambda hazard: hazard.kind == "a generator argument")
    >>> hazard.refused, hazard.program.calls
    (False, 2)
    """
    name = draw(
        st.sampled_from([name for name, kind in HAZARDS.items() if kind.on_gpu or device == "cpu"])
    )
    kind = HAZARDS[name]
    values = {
        parameter: draw(st.sampled_from(texts)) for parameter, texts in kind.parameters.items()
    }
    code = _HEAD.format(device=device).lstrip() + Template(kind.code).substitute(values)
    # Options of the kind come last: some kinds need a certain number of calls.
    options: dict[str, Any] = {"calls": draw(st.integers(2, 4)), **kind.options}
    # A CUDA graph cannot hold everything that a tape can, so it may refuse any hazard.
    return Hazard(name, TensorProgram(code, **options), kind.refused or device != "cpu")
