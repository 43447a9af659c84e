"""The random generators that a captured function draws from: a replay draws on, and does not seed again."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from weft.torchapi import generator_bytes, is_capturing
from weft.transforms.graphs.backends.host_reads import refusal

_SEEDED = "it seeds a random generator, or sets its state, which a replay does not repeat: it draws on"
_SEED_OUTSIDE = "seed it before the call, or pass the random numbers in"


class UnknownGenerator(RuntimeError):
    """A recorded run drew from a generator that is neither known nor was met in a rehearsal."""


class Randomness:
    """Watches the generators of a function's runs.

    A generator was set if its seed changed, or if it is in a state that it was in before, or that its seed gives; if
    it is no default generator, which other threads draw from too, also if it is in any state but the one that the last
    operator left. The run that is recorded starts from a state of its own. A generator that a rehearsal did not meet is
    made by the function itself.

    Args:
        call: how the function is called in error messages.
        default: the default generators.
        known: others, such as those among the arguments.
    """

    def __init__(self, call: str, default: Sequence[torch.Generator], known: Iterable[torch.Generator]) -> None:
        self.call = call
        self.default = default
        self.before = {generator: generator.get_state() for generator in (*default, *known)}
        self._first = {generator: generator_bytes(generator) for generator in self.before}
        self._seeds: dict[torch.Generator, int] = {}
        self._seen: dict[torch.Generator, list[bytes]] = {}
        self._records = self._rehearsed = False

    def know(self, generators: Iterable[torch.Generator]) -> None:
        """Take these for known."""
        for generator in generators:
            if generator not in self.before:
                self._take(generator)

    def record(self) -> None:
        """The next run is the recorded one. Called before a capture begins: CUDA lets nobody look into one, and refuses
        another seed there than that before, so that one is set which the function would not."""
        self._records = True
        for generator in self.before:
            if generator.device.type == "cuda":  # it may not draw while another thread captures
                generator.manual_seed(generator.initial_seed() ^ 1)
            else:
                torch.rand(1, generator=generator, device=generator.device)

    def rehearse(self) -> None:
        """The next run is none that is recorded."""
        self._records = False

    def begin(self) -> None:
        """A run begins."""
        self._seeds, self._seen = {}, {}
        self._rehearsed = self._rehearsed or not self._records
        for generator in self.before:
            self._look(generator)

    def end(self) -> None:
        """Raise CaptureError if the run seeded a generator after it last drew from one."""
        if any(self._was_set(generator) for generator in self._seeds):
            raise refusal(self.call, _SEEDED, _SEED_OUTSIDE)

    def before_operator(self, func: Any, generator: torch.Generator | None) -> None:
        """Raise CaptureError if the run seeded a generator, or made the one that it is about to draw from."""
        if generator is not None and generator not in self.before:
            self._meet(generator)
        if may_draw(func):
            self.end()

    def after_operator(self, func: Any) -> None:
        """Remember the states that an operator left."""
        if may_draw(func):
            for generator in self._seeds:
                self._look(generator)

    def restore(self) -> None:
        """Give all generators the states that they had before the first run."""
        for generator, state in self.before.items():
            generator.set_state(state)

    def _meet(self, generator: torch.Generator) -> None:
        if not self._records:
            self._take(generator)
            self._look(generator)
        elif self._rehearsed:
            fault = "it draws from a generator that it made itself, which a replay does not make again: it draws on"
            raise refusal(self.call, fault, "make the generator before the call, and pass it in")
        else:
            raise UnknownGenerator(self.call)

    def _look(self, generator: torch.Generator) -> None:
        if generator.device.type == "cuda" and is_capturing()():
            return  # CUDA itself refuses another seed than the one before
        if generator not in self._seen:
            fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
            self._seen[generator] = [generator_bytes(fresh), self._first[generator]]
        self._seeds[generator] = generator.initial_seed()
        self._seen[generator].append(generator_bytes(generator))

    def _take(self, generator: torch.Generator) -> None:
        self.before[generator], self._first[generator] = generator.get_state(), generator_bytes(generator)

    def _was_set(self, generator: torch.Generator) -> bool:
        state, seen = generator_bytes(generator), self._seen[generator]
        moved = state != seen[-1] and (state in seen or generator not in self.default)
        return moved or generator.initial_seed() != self._seeds[generator]


@functools.cache
def may_draw(func: Any) -> bool:
    """Whether an operator may draw random numbers: its tags say so, or nobody knows."""
    return torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in ("aten", "prims")
