"""Random numbers in a graph: a replay continues the generator's stream like the function; seeding
inside is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphified import refusal
from torch import Tensor
from torch.nn import functional

from weft.proofs import assert_equal
from weft.transforms.graphs.graphify import graphify

X = torch.arange(3.0)
SEEDS = "it seeds a random generator, or sets its state, which a replay does not repeat"
OWN = torch.Generator()
STATE = OWN.get_state()


def forks(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return x + torch.rand(3)


def first(*values: Any) -> Any:
    return values[0]


SEEDING: dict[str, Callable[[Tensor], Any]] = {
    "manual_seed": lambda x: first(torch.manual_seed(0), x) and x + torch.rand(3),
    "after it drew": lambda x: first(x + torch.rand(3), torch.manual_seed(0)),
    "fork_rng": forks,
    "set_rng_state": lambda x: first(torch.set_rng_state(STATE)) or x + torch.rand(3),
    "of its own generator": lambda x: x + torch.rand(3, generator=OWN.manual_seed(3)),
    "to where it was": lambda x: (
        x + torch.rand(3) + first(OWN.set_state(STATE) and torch.rand(3, generator=OWN))
    ),
}


@pytest.mark.parametrize("way", SEEDING)
def test_seeding_is_refused(way: str) -> None:
    assert SEEDS in refusal(SEEDING[way], X)
    assert "instead: seed it before the call, or pass the random numbers in" in refusal(
        SEEDING[way], X
    )


def test_seeding_an_argument_is_refused() -> None:
    assert SEEDS in refusal(
        lambda x, g: x + torch.rand(3, generator=g.manual_seed(3)), X, torch.Generator()
    )


@pytest.mark.parametrize("module", [torch, torch.random])
def test_a_read_of_the_seed_is_refused_inside_alone(module: Any) -> None:
    torch.manual_seed(5)
    said = refusal(lambda x: x + module.initial_seed(), X)
    assert "it reads the seed of the default generator, which a replay does not read again" in said
    assert "instead: pass the seed in, or draw from a generator" in said
    assert torch.initial_seed() == 5


def test_a_generator_made_inside_is_refused() -> None:
    said = refusal(lambda x: x + torch.rand(3, generator=torch.Generator()), X)
    assert (
        "it draws from a generator that it made itself, which a replay does not make again" in said
    )


def test_a_generator_seeded_before_the_call_is_drawn_from() -> None:
    def fn(x: Tensor) -> Tensor:
        return x + torch.rand(3) + functional.dropout(x, 0.5) + torch.rand(3, generator=OWN)

    g = graphify(fn)
    results = []
    for run in (fn, g):
        torch.manual_seed(5)
        OWN.manual_seed(6)
        results.append([run(X) for _ in range(4)])
    assert_equal("the numbers of the function", results[1], results[0])
