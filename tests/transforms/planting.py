"""Faults planted in programs, and the checker's errors for them."""

from collections.abc import Callable, Sequence

import attrs
import pytest
import torch

from weft.effects import Effect, Program, parse_effect
from weft.errors import ProgramError
from weft.transforms.pipelines.checker import check
from weft.transforms.pipelines.schedule import streaming
from weft.values.schema import Schema, TensorSchema

SCHEMA = Schema((TensorSchema("h", ("num_tokens", 4), torch.float32),))
OTHER = Schema((TensorSchema("h", ("num_tokens", 8), torch.float32),))

FED = streaming(3, 2, schema=SCHEMA, feedback=True)

Fault = Callable[[list[Effect]], object]


def planted(programs: Sequence[Program], rank: int, change: Fault) -> tuple[Program, ...]:
    """The programs with one fault on one rank."""
    effects = list(programs[rank].effects)
    change(effects)
    return (
        *programs[:rank],
        attrs.evolve(programs[rank], effects=tuple(effects)),
        *programs[rank + 1 :],
    )


def refused(programs: Sequence[Program], buffers: int | None = None) -> ProgramError:
    with pytest.raises(ProgramError) as error:
        check(programs, buffers=buffers)
    return error.value


def position(effects: list[Effect], text: str) -> int:
    return next(i for i, e in enumerate(effects) if str(e).startswith(text))


def replaced(text: str, effect: Effect) -> Fault:
    return lambda effects: effects.__setitem__(position(effects, text), effect)


def without(text: str) -> Fault:
    return lambda effects: effects.__delitem__(position(effects, text))


def swapped(a: str, b: str) -> Fault:
    def change(effects: list[Effect]) -> None:
        i = position(effects, a)
        j = position(effects, b)
        effects[i], effects[j] = effects[j], effects[i]

    return change


def before(text: str, other: str) -> Fault:
    """The first effect that starts with `text` moves right before the one that starts with `other`."""

    def change(effects: list[Effect]) -> None:
        effect = effects.pop(position(effects, text))
        effects.insert(position(effects, other), effect)

    return change


def program(rank: int, ranks: int, *effects: str) -> Program:
    return Program(rank, ranks, tuple(map(parse_effect, effects)))
