"""Loops in captures: what `while_loop` needs from the capture around it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.errors import CaptureError
from weft.torchapi.private import innermost_storage_id
from weft.transforms.graphs.backends.constants import Constants
from weft.transforms.graphs.backends.indexing import Gathers
from weft.transforms.graphs.backends.randomness import Randomness


class Looper(Protocol):
    """The part of a capture, or of a rehearsal of one, that records loops."""

    @property
    def unable(self) -> str | None:
        """The reason why it cannot record a loop whose length depends on data; None if it can."""

    def loop(self, flag: Tensor, carry: Sequence[Tensor], step: Callable[[], None], /) -> None:
        """Record `step`, which runs once now, so that a replay repeats it while `flag` ([] bool)
        holds; `step` writes the flag and the carry."""


_LOOPER: ContextVar[Looper | None] = ContextVar("weft.looper", default=None)


def current_looper() -> Looper | None:
    """The `Looper` of the capture in this thread; None outside captures."""
    return _LOOPER.get()


@contextlib.contextmanager
def looping(looper: Looper | None, *, inside: bool = True) -> Iterator[None]:
    """A context in which `looper` records loops (None: nothing does). With `inside=False`, a looper
    that is already active stays."""
    if not inside and _LOOPER.get() is not None:
        yield
        return
    token = _LOOPER.set(looper)
    try:
        yield
    finally:
        _LOOPER.reset(token)


class Steps:
    """Watches the steps of loops in the runs of one function. A replay repeats a step on other
    values than those of the run.

    Args:
        random: watches the random generators.
        constants: the tensors whose values the function may read on the host.
        gathers: the copies that stand for views.
        refuse: makes the error for a fault and its remedy.
        device: the GPU that replays the function, or None on the CPU.
    """

    def __init__(
        self,
        random: Randomness,
        constants: Constants,
        gathers: Gathers,
        refuse: Callable[[str, str], CaptureError],
        device: torch.device | None,
    ) -> None:
        self._random = random
        self._constants = constants
        self._gathers = gathers
        self._refuse = refuse
        self._device = device

    @property
    def repeats(self) -> bool:
        """Whether a step runs now."""
        return self._random.repeats > 0

    @contextlib.contextmanager
    def step(self, carry: Sequence[Tensor]) -> Iterator[None]:
        """Context of a step, which writes the carry.

        Raises:
            CaptureError: on a GPU, a carry on the CPU; the step draws random numbers, or changes
                what it read on the host.
        """
        elsewhere = [x for x in carry if self._device is not None and x.device != self._device]
        if elsewhere:
            shape = list(elsewhere[0].shape)
            fault = (
                f"the carry of while_loop has a tensor {shape} on {elsewhere[0].device}, which a"
                " replay would not"
            )
            raise self._refuse(f"{fault} change", f"make it with device={str(self._device)!r}")
        self._constants.begin_step(innermost_storage_id(x) for x in carry)
        self._gathers.begin_step()
        try:
            with self._random.repeated():
                yield
        finally:
            was_changed = self._constants.end_step()
        self._gathers.end_step()
        if was_changed:
            fault = (
                "a step of while_loop reads a tensor on the host, and changes it for the next step"
            )
            raise self._refuse(
                fault, "a tensor in the carry, and tensor operations (torch.where) on it"
            )


class Rehearsal:
    """The `Looper` of rehearsals and of listings of operators: it runs each loop's step once."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    unable: str | None = None

    def loop(self, _: Tensor, carry: Sequence[Tensor], step: Callable[[], None]) -> None:
        with self._steps.step(carry):
            step()


def split_in_loop(func: Any) -> tuple[str, str]:
    """The fault of a split operator inside a loop, and the remedy."""
    fault = f"{func}, at which the graph is split, inside while_loop"
    return (
        fault,
        (
            "a back end of that operator that a graph can hold; or the Python loop outside the"
            " graphified function"
        ),
    )
