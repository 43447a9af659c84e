"""`Randomness` watches the random generators that a captured function draws from: a replay draws
new numbers, but does not repeat a seeding."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from weft.errors import CaptureError
from weft.torchapi.patches import default_generator_is
from weft.torchapi.private import (
    generator_bytes,
    generator_id,
    is_capturing,
)
from weft.torchapi.watching import OperatorWatch
from weft.transforms.graphs.backends.operators import tensors_in

_SEEDED = "it seeds a random generator, or sets its state, which a replay does not repeat"
_SEED_OUTSIDE = "seed it before the call, or pass the random numbers in"


class UnknownGenerator(RuntimeError):
    """A recorded run drew from an unknown generator, and there was no rehearsal to make it
    known."""


class Randomness:
    """Watches the random generators during a function's runs, and refuses a function that seeds
    one.

    A generator counts as seeded if its seed changed, or if it is in a state that it had before or
    that its seed gives. Other threads may draw from a GPU's default generator. Any other watched
    generator also counts as seeded if its state is not the one that the last operator left.
    The recorded run starts from a state that occurs nowhere else. A generator that no rehearsal
    drew from must have been made by the function itself.

    The runs draw from a copy of the CPU's default generator. Meanwhile other threads draw from the
    default generator; they would draw numbers twice if its state were restored after the run.

    Args:
        refuse: makes the error for a fault and its remedy.
        device: the GPU that replays the function, or None on the CPU.
        generators: the generators among the arguments.
    """

    def __init__(
        self,
        refuse: Callable[..., CaptureError],
        device: torch.device | None,
        generators: Iterable[torch.Generator],
    ) -> None:
        self.refuse = refuse
        self.device = device
        default = _default_generators(device)
        self.copy = torch.Generator()
        self.copy.set_state(torch.default_generator.get_state())
        self._shared = {generator_id(generator) for generator in default}
        self._trackers: dict[int, _Known] = {}
        self.add_known((self.copy, *default, *(g for g in generators if not _is_default(g))))
        self._recording = self._rehearsed = False
        self.repeats = 0
        self.draws = True
        """Whether the operators of the runs draw numbers; on fake tensors none does."""

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The known generators."""
        return tuple(tracker.generator for tracker in self._trackers.values())

    @contextlib.contextmanager
    def private_draws(self) -> Iterator[None]:
        """Context of a run, in which the copy stands for the CPU's default generator."""
        seed = torch.default_generator.initial_seed()
        try:
            with default_generator_is(self.copy, self._refuse_seed_read), _PrivateDraws(self):
                yield
        finally:
            if (
                torch.default_generator.initial_seed() != seed
            ):  # the function seeded the default generator by a method of that object
                torch.default_generator.set_state(
                    self._trackers[generator_id(self.copy)].initial_state
                )
                raise self.refuse(_SEEDED, _SEED_OUTSIDE)

    def _refuse_seed_read(self) -> None:
        fault = "it reads the seed of the default generator, which a replay does not read again"
        raise self.refuse(fault, "pass the seed in, or draw from a generator")

    def add_known(self, generators: Iterable[torch.Generator]) -> None:
        """Add known generators."""
        for generator in generators:
            self._trackers.setdefault(generator_id(generator), _Known(generator))

    def record(self) -> None:
        """Make the next run the recorded one. This is called before a capture begins, because
        during a capture a CUDA generator's state cannot be read and CUDA refuses a change of its
        seed. So a seed is set here that the function would not set."""
        self._recording = True
        for generator in self.generators:
            if (
                generator.device.type == "cuda"
            ):  # not by drawing, which is not allowed while another thread captures
                generator.manual_seed(generator.initial_seed() ^ 1)
            else:
                torch.rand(1, generator=generator, device=generator.device)

    def rehearse(self) -> None:
        """Make the next run a rehearsal."""
        self._recording = False

    def begin(self) -> None:
        """Begin a run."""
        self._rehearsed = self._rehearsed or not self._recording
        for tracker in self._trackers.values():
            tracker.begin()

    def end(self) -> None:
        """Raise CaptureError if the run has seeded a generator since its last draw."""
        for identity, tracker in self._trackers.items():
            if tracker.was_seeded(identity in self._shared):
                raise self.refuse(_SEEDED, _SEED_OUTSIDE)

    def before_operator(self, func: Any, generator: torch.Generator | None) -> None:
        """Raise CaptureError if the run has seeded a generator, or has itself made the generator
        that it is about to draw from."""
        if (
            generator is not None
            and generator_id(generator) not in self._trackers
            and not _is_default(generator)
        ):
            self._first_use(generator)
        if may_draw(func):
            self.end()
            if self.repeats:
                self._prepare_to_see_draws()

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Context of a part of a run that a replay may repeat, in which no operator draws."""
        self.repeats += 1
        try:
            yield
        finally:
            self.repeats -= 1

    def after_operator(self, func: Any) -> None:
        """Record the states that an operator leaves. Raise CaptureError if it drew in a step that a
        replay repeats. Whether it drew is told by the generators' states, because tags are not
        exact: attention without dropout is tagged as random, and a custom operator may be tagged or
        not."""
        if may_draw(func):
            moved = [tracker.observe() for tracker in self._trackers.values()]
            if self.repeats and any(moved):
                fault = (
                    f"{func} draws random numbers in while_loop, the same ones in each step of a"
                    " replay"
                )
                raise self.refuse(
                    fault, "draw from a counter in the carry, or draw all numbers before the loop"
                )

    def _prepare_to_see_draws(self) -> None:
        """Read the states before an operator that a replay repeats. The state of a GPU's generator
        cannot be read during a capture: then a rehearsal must have run the operator."""
        if self.device is not None and is_capturing()() and not self._rehearsed:
            raise UnknownGenerator
        for tracker in self._trackers.values():
            tracker.observe()

    def restore(self) -> None:
        """Restore the states of all generators from before the first run."""
        for tracker in self._trackers.values():
            tracker.generator.set_state(tracker.initial_state)

    def _first_use(self, generator: torch.Generator) -> None:
        if not self._recording:
            self.add_known([generator])
            self._trackers[generator_id(generator)].begin()
        elif self._rehearsed:
            fault = (
                "it draws from a generator that it made itself, which a replay does not make again"
            )
            raise self.refuse(fault, "make the generator before the call, and pass it in")
        else:
            raise UnknownGenerator


class _Known:
    """A generator, its state before the first run, and the states in which operators of the present
    run left it."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.initial_state = generator.get_state()
        self._initial_bytes = generator_bytes(generator)
        self._seed: int | None = None
        self._observed_states: list[bytes] = []

    def begin(self) -> None:
        """Begin a run."""
        self._seed = None
        self._observed_states = []
        self.observe()

    def observe(self) -> bool:
        """Note the present seed and state, and return whether the state has changed since the last
        call. The state of a GPU's generator cannot be read during a capture, but there CUDA itself
        refuses a new seed."""
        if self.generator.device.type == "cuda" and is_capturing()():
            return False
        seed = self.generator.initial_seed()
        if self._seed is None:
            fresh = torch.Generator(self.generator.device).manual_seed(seed)
            self._observed_states = [generator_bytes(fresh), self._initial_bytes]
        self._seed = seed
        state = generator_bytes(self.generator)
        moved = state != self._observed_states[-1]
        self._observed_states.append(state)
        return moved

    def was_seeded(self, shared: bool) -> bool:
        """Whether the generator was seeded since the last operator; other threads may draw from a
        shared one."""
        if self._seed is None:
            return False
        state = generator_bytes(self.generator)
        moved = state != self._observed_states[-1] and (
            state in self._observed_states or not shared
        )
        return moved or self.generator.initial_seed() != self._seed


def _default_generators(device: torch.device | None) -> list[torch.Generator]:
    """The default generator of a GPU; for a tape those of all GPUs, on which its function may make
    tensors."""
    if device is not None:
        return [torch.cuda.default_generators[device.index or 0]]
    if torch.cuda.is_initialized():
        return [*torch.cuda.default_generators]
    return []


class _PrivateDraws(OperatorWatch):
    """Makes operators that would draw from the CPU's default generator draw from the copy. If a GPU
    replays the function, draws on the CPU are refused: a replay would not repeat them."""

    def __init__(self, random: Randomness) -> None:
        self.random = random
        self.generator = random.copy

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not may_draw(func):
            return self.pass_on(func, args, kwargs)
        generator = kwargs.get("generator")
        device = kwargs.get("device") or next((t.device for t in tensors_in(args, kwargs)), "cpu")
        if torch.device(device if generator is None else generator.device).type != "cpu":
            return self.pass_on(func, args, kwargs)
        if self.random.device is not None and func.namespace == "aten":
            fault = (
                f"{func} draws random numbers on the CPU, in a call with tensors on a GPU, so that"
                " they would be frozen"
            )
            raise self.random.refuse(
                fault, f"draw them on the GPU (device={str(self.random.device)!r}), or pass them in"
            )
        if (generator is not None and not _is_default(generator)) or not self.random.draws:
            return self.pass_on(func, args, kwargs)
        if (drawing := _taking_generator(func)) is not None:
            return self.pass_on(drawing, args, {**kwargs, "generator": self.generator})
        # An operator without a `generator` argument: lend it the copy's state for this one draw.
        default = torch.default_generator
        before = default.get_state()
        default.set_state(self.generator.get_state())
        try:
            return self.pass_on(func, args, kwargs)
        finally:
            self.generator.set_state(default.get_state())
            default.set_state(before)


def _is_default(generator: torch.Generator) -> bool:
    """Whether a generator is the CPU's default one."""
    return generator_id(generator) == generator_id(torch.default_generator)


@functools.cache
def _taking_generator(func: Any) -> Any:
    """The overload of an operator of torch that takes a generator; None if there is none."""
    names = [a.name for a in func._schema.arguments]
    if "generator" in names:
        return func
    packet = func.overloadpacket
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return next((o for o in overloads if _names_besides_generator(o) == names), None)


def _names_besides_generator(overload: Any) -> list[str] | None:
    names = [a.name for a in overload._schema.arguments]
    if "generator" in names:
        return [name for name in names if name != "generator"]
    return None


@functools.cache
def may_draw(func: Any) -> bool:
    """Whether an operator may draw random numbers: its tags say so, or it is a custom operator, of
    which nothing is known."""
    return torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in (
        "aten",
        "prims",
        "weft",
    )
