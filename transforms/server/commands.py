"""The commands of a server to its engine, `Add`, `Abort`, `Ask` and `Stop`, which travel to all ranks; `follow`: those
ranks."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from weft.errors import RequestError
from weft.sampling import SamplingParams
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.masks import Mask

FAULTS = TypeError, ValueError, LookupError
"""Errors by which a request's own values may break `Engine.add`, before it has changed anything."""
MakeMask = Callable[[str], Mask]
"""Makes the mask of a request from its compiled grammar."""


@attrs.frozen(kw_only=True)
class Add:
    """A request for the engine.

    Args:
        name: of the request.
        prompt: token ids.
        sampling, max_tokens, priority, adapter: as `Engine.add` takes them.
        extras: lists of numbers, by name.
        cache_salt: as `Engine.add` takes it.
        grammar: a compiled one, from which each rank makes the mask; None: there is none.
        captured: whether the client wants what the stages captured.
    """

    name: str = ""
    prompt: Sequence[int]
    sampling: SamplingParams
    max_tokens: int
    priority: int = 0
    adapter: str | None = None
    extras: dict[str, Any] = attrs.field(factory=dict)
    cache_salt: str = ""
    grammar: str | None = attrs.field(default=None, repr=False)
    captured: bool = False

    def apply(self, engine: Engine, make_mask: MakeMask) -> None:
        """Add it.

        Raises:
            RequestError: it could never be served.
        """
        engine.add(
            [*self.prompt],
            self.sampling,
            max_tokens=self.max_tokens,
            id=self.name,
            priority=self.priority,
            adapter=self.adapter,
            cache_salt=self.cache_salt,
            mask=None if self.grammar is None else make_mask(self.grammar),
            extras={name: _tensor(name, own) for name, own in self.extras.items()} or None,
        )


@attrs.frozen
class Abort:
    """The end of a request whose client has gone."""

    name: str

    def apply(self, engine: Engine, _: MakeMask) -> None:
        """Abort it unless it has ended."""
        if engine.is_under_way(self.name):
            engine.abort(self.name)


@attrs.frozen
class Ask:
    """A question for the engine's counts, which the first rank answers.

    Args:
        number: of the question, which the answer repeats.
    """

    number: int

    def apply(self, engine: Engine, _: MakeMask) -> None:
        """Nothing: the one who takes it answers."""


@attrs.frozen
class Stop:
    """The end of the server."""

    def apply(self, engine: Engine, _: MakeMask) -> None:
        """Nothing: the one who takes it ends."""


Command = Add | Abort | Ask | Stop


def follow(engine: Engine, make_mask: MakeMask) -> None:
    """The part of a rank beside the first one: the same requests and steps, until the first rank stops.

    Raises:
        RankError: a rank ended, or kept this one waiting.
    """
    while True:
        commands = engine.transport.share(None)
        for command in commands:
            with contextlib.suppress(RequestError, *FAULTS):  # as on the first rank, which tells the client
                command.apply(engine, make_mask)
        if any(isinstance(command, Stop) for command in commands):
            return
        if not engine.is_idle:
            engine.step()


def _tensor(name: str, given: Any) -> torch.Tensor:
    try:
        return torch.tensor(given, dtype=torch.float32)
    except (ValueError, TypeError, RuntimeError, OverflowError, RecursionError) as error:
        raise RequestError(f"weft.extras[{name!r}]", f"{error!s:.200}", "numbers, or lists of lists of them") from error
