"""Requests of one event loop, streamed side by side: one task steps the engine as long as somebody listens."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Protocol

from weft.errors import ProgramError
from weft.transforms.engine.outputs import RequestOutput

_PAUSE = 1e-4
"""Seconds between two looks at the device."""


class Steps(Protocol):
    """What streams ask of an engine."""

    def add(
        self,
        prompt: Any,
        sampling: Any = ...,
        *,
        max_tokens: int,
        id: str | None = ...,
        priority: int = ...,
        adapter: str | None = ...,
    ) -> str:
        """A request arrives."""

    def abort(self, id: str) -> list[RequestOutput]:
        """It goes."""

    def is_under_way(self, id: str) -> bool:
        """Whether it has not ended."""

    def launch(self) -> None:
        """Start work."""

    def is_ready(self) -> bool:
        """Whether a step would not wait."""

    def step(self) -> list[RequestOutput]:
        """What requests got."""


class Streams:
    """The streams of an engine.

    Args:
        engine: stepped while there are any.
        spread: whether some of its stages run in other processes, which could not know when requests come.
    """

    def __init__(self, engine: Steps, spread: bool) -> None:
        self._engine = engine
        self._spread = spread
        self._queues: dict[str, asyncio.Queue[RequestOutput | BaseException]] = {}
        self._task: asyncio.Task[None] | None = None

    async def stream(self, prompt: Any, sampling: Any, **options: Any) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request, until all of its completions have ended."""
        if self._spread:
            call, instead = "engine.stream(prompt)", "add() on all ranks, and step() on each"
            raise ProgramError(call, "stages in other processes, which do not know when requests come", instead)
        name = self._engine.add(prompt, sampling, **options)
        queue = self._queues[name] = asyncio.Queue()
        self._start()
        try:
            left = 1 if sampling is None else sampling.n
            while left:
                found = await queue.get()
                if isinstance(found, BaseException):
                    raise found
                left -= found.finish_reason is not None
                yield found
        finally:
            del self._queues[name]
            if self._engine.is_under_way(name):
                self._engine.abort(name)

    def tell(self, outputs: Iterable[RequestOutput]) -> None:
        """Outputs, to who listens to them."""
        for output in outputs:
            if (queue := self._queues.get(output.id)) is not None:
                queue.put_nowait(output)

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Step the engine while somebody listens; what it raises, all who listen raise."""
        try:
            while self._queues:
                self._engine.launch()
                while not self._engine.is_ready():
                    await asyncio.sleep(_PAUSE)
                self.tell(self._engine.step())
                await asyncio.sleep(0)
        except Exception as error:
            for queue in self._queues.values():
                queue.put_nowait(error)
