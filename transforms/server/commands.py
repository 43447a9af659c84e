"""`Add`, `Abort`, `Ask` and `Stop`: a server's commands to its engine; `follow`, which obeys them
on the ranks beside the first."""

import base64
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from weft.batches.sampling import SamplingParams
from weft.errors import RequestError
from weft.stages.custom.functions import StageFunctions
from weft.transforms.engine.engine import Engine, is_under_way
from weft.transforms.engine.requests.masks import Mask

FAULTS = TypeError, ValueError, LookupError
"""Errors that a request's values may cause in `Engine.add`, before it has changed anything."""
# The dtypes in which captures are returned.
_DTYPES = {
    str(one).removeprefix("torch."): one
    for one in (torch.float32, torch.int64, torch.int32, torch.bool)
}
# Makes the mask of a request from its compiled grammar.
MakeMask = Callable[[str], Mask]


@attrs.frozen(kw_only=True)
class Add:
    """A request for the engine.

    Args:
        name: the id of the request in the engine.
        prompt: token ids.
        sampling, max_tokens, priority, adapter: as in `Engine.add`.
        extras: values by name, as in `WeftField`.
        cache_salt: as in `Engine.add`.
        grammar: a compiled grammar, from which each rank makes the mask; None: no mask.
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
        """Add the request to the engine.

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
            extras=_tensors(self.extras, engine.model.functions),
        )


@attrs.frozen
class Abort:
    """Ends a request whose client has gone."""

    name: str

    def apply(self, engine: Engine, _: MakeMask) -> None:
        """Abort the request unless it has ended."""
        # The request may have ended while the command was on its way.
        if is_under_way(engine, self.name):
            engine.abort(self.name)


@attrs.frozen
class Ask:
    """Asks for the engine's counts; the first rank answers.

    Args:
        number: identifies the question; the answer repeats it.
    """

    number: int

    def apply(self, engine: Engine, _: MakeMask) -> None:
        """Do nothing: the loop that takes the command answers it."""


@attrs.frozen
class Stop:
    """Ends the server."""

    def apply(self, engine: Engine, _: MakeMask) -> None:
        """Do nothing: the loop that takes the command ends."""


Command = Add | Abort | Ask | Stop


def follow(engine: Engine, make_mask: MakeMask) -> None:
    """Run a rank beside the first: apply the same commands and steps until the first rank stops.

    Raises:
        RankError: a rank ended, or kept this one waiting.
    """
    while True:
        commands = engine.transport.share(None)
        for command in commands:
            # The first rank meets the same error, and tells the client.
            with contextlib.suppress(RequestError, *FAULTS):
                command.apply(engine, make_mask)
        if any(isinstance(command, Stop) for command in commands):
            return
        if not engine.is_idle:
            engine.step()


def _tensors(
    extras: Mapping[str, Any], functions: StageFunctions
) -> dict[str, torch.Tensor] | None:
    """Extras as tensors, each of the dtype of the default in the model's stages."""
    defaults = {**functions.extras, **functions.token_extras}
    return {
        name: _tensor(name, value, defaults.get(name)) for name, value in extras.items()
    } or None


def _tensor(name: str, value: Any, like: torch.Tensor | None) -> torch.Tensor:
    if like is None:
        dtype = torch.float32
    else:
        dtype = like.dtype
    try:
        if not isinstance(value, Mapping):
            return torch.tensor(value, dtype=dtype)
        # Writable memory, since torch.frombuffer warns about bytes, which are read-only.
        raw = bytearray(base64.b64decode(value["base64"], validate=True))
        return (
            torch.frombuffer(raw, dtype=_DTYPES[value["dtype"]]).reshape(value["shape"]).to(dtype)
        )
    except (
        ValueError,
        TypeError,
        LookupError,
        RuntimeError,
        OverflowError,
        RecursionError,
    ) as error:
        problem = f"{type(error).__name__}: {error!s:.200}"
        instead = (
            'numbers, lists of lists of them, or {"dtype": "float32", "shape": [...], "base64":'
            ' "..."}'
        )
        raise RequestError(f"weft.extras[{name!r}]", problem, instead) from error
