"""`Randomness` watches the random generators that a captured function draws from: a replay draws further numbers, and
does not seed again."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from weft.torchapi.private import generator_bytes, is_capturing
from weft.transforms.graphs.backends.host_reads import refusal

_SEEDED = "it seeds a random generator, or sets its state, which a replay does not repeat"
_SEED_OUTSIDE = "seed it before the call, or pass the random numbers in"


class UnknownGenerator(RuntimeError):
    """A recorded run drew from a generator that is not known, and that no rehearsal drew from."""


class Randomness:
    """Watches the random generators during a function's runs, and refuses a function that seeds one.

    A generator counts as seeded if its seed changed, or if it is in a state that it had before or that its seed gives.
    A generator that is not a default one, which no other thread draws from, also counts as seeded if its state is not
    the one that the last operator left. The recorded run starts from a state that occurs nowhere else. A generator that
    no rehearsal drew from is made by the function itself.

    Args:
        call: the call in error messages, as the user writes it.
        default: the default generators.
        known: other generators, such as those among the arguments.
    """

    def __init__(self, call: str, default: Sequence[torch.Generator], known: Iterable[torch.Generator]) -> None:
        self.call = call
        self.default = default
        self.initial_states = {generator: generator.get_state() for generator in (*default, *known)}
        self._initial_bytes = {generator: generator_bytes(generator) for generator in self.initial_states}
        self._seeds: dict[torch.Generator, int] = {}
        self._seen_states: dict[torch.Generator, list[bytes]] = {}
        self._recording = self._rehearsed = False

    def add_known(self, generators: Iterable[torch.Generator]) -> None:
        """Add known generators."""
        for generator in generators:
            if generator not in self.initial_states:
                self._add(generator)

    def record(self) -> None:
        """Make the next run the recorded one. Called before a capture begins: during a capture a CUDA generator's state
        cannot be read, and CUDA refuses a change of its seed, so a seed is set here that the function would not set."""
        self._recording = True
        for generator in self.initial_states:
            if generator.device.type == "cuda":  # drawing a number is not allowed while another thread captures
                generator.manual_seed(generator.initial_seed() ^ 1)
            else:
                torch.rand(1, generator=generator, device=generator.device)

    def rehearse(self) -> None:
        """Make the next run a rehearsal."""
        self._recording = False

    def begin(self) -> None:
        """Begin a run."""
        self._seeds, self._seen_states = {}, {}
        self._rehearsed = self._rehearsed or not self._recording
        for generator in self.initial_states:
            self._observe(generator)

    def end(self) -> None:
        """End a run; raise CaptureError if it seeded a generator after its last draw."""
        if any(self._was_seeded(generator) for generator in self._seeds):
            raise refusal(self.call, _SEEDED, _SEED_OUTSIDE)

    def before_operator(self, func: Any, generator: torch.Generator | None) -> None:
        """Raise CaptureError if the run has seeded a generator, or made the one that it is about to draw from."""
        if generator is not None and generator not in self.initial_states:
            self._first_use(generator)
        if may_draw(func):
            self.end()

    def after_operator(self, func: Any) -> None:
        """Record the states that an operator leaves."""
        if may_draw(func):
            for generator in self._seeds:
                self._observe(generator)

    def restore(self) -> None:
        """Restore the states of all generators from before the first run."""
        for generator, state in self.initial_states.items():
            generator.set_state(state)

    def _first_use(self, generator: torch.Generator) -> None:
        if not self._recording:
            self._add(generator)
            self._observe(generator)
        elif self._rehearsed:
            fault = "it draws from a generator that it made itself, which a replay does not make again"
            raise refusal(self.call, fault, "make the generator before the call, and pass it in")
        else:
            raise UnknownGenerator(self.call)

    def _observe(self, generator: torch.Generator) -> None:
        if generator.device.type == "cuda" and is_capturing()():
            return  # the state cannot be read here, and CUDA itself refuses a new seed
        if generator not in self._seen_states:
            fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
            self._seen_states[generator] = [generator_bytes(fresh), self._initial_bytes[generator]]
        self._seeds[generator] = generator.initial_seed()
        self._seen_states[generator].append(generator_bytes(generator))

    def _add(self, generator: torch.Generator) -> None:
        self.initial_states[generator], self._initial_bytes[generator] = (
            generator.get_state(),
            generator_bytes(generator),
        )

    def _was_seeded(self, generator: torch.Generator) -> bool:
        state, seen = generator_bytes(generator), self._seen_states[generator]
        moved = state != seen[-1] and (state in seen or generator not in self.default)
        return moved or generator.initial_seed() != self._seeds[generator]


@functools.cache
def may_draw(func: Any) -> bool:
    """Whether an operator may draw random numbers: its tags say so, or it is not one of torch's and so unknown."""
    return torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in ("aten", "prims")
