"""`EngineHost` and what it shares with `RemoteHost`: requests from an event loop to an engine
elsewhere."""

import asyncio
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence

import attrs

from weft.errors import WeftError
from weft.stages.model import Model
from weft.transforms.engine.detokenizing import special_ids
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.stats import Stats
from weft.transforms.server.commands import Abort, Add, Ask, Command, MakeMask, Stop
from weft.transforms.server.loop import Delta, Ended, EngineLoop, Message, Told
from weft.transforms.server.streams import Output, Progress

# Seconds after which an engine that does not answer, as it does between two steps, is said to stand
# still.
STILL_SECONDS = 10.0
# Seconds after which a server that is being stopped no longer waits for such an engine.
GIVE_UP_SECONDS = 30.0


class BusyError(WeftError):
    """As many requests wait as the server lets wait."""


class ClosedError(WeftError):
    """The engine takes no requests: it is being closed, or a step of it raised."""


@attrs.define(eq=False)
class _Listener:
    """What has come for a client's request and was not taken yet. A slow client finds several
    steps' tokens at once."""

    deltas: list[tuple[int, Delta]] = attrs.field(factory=list)
    error: WeftError | None = None
    arrived: asyncio.Event = attrs.field(factory=asyncio.Event)

    async def take(self) -> list[tuple[int, Delta]]:
        """What has come, at least one."""
        await self.arrived.wait()
        deltas = self.deltas
        self.deltas = []
        if self.error is None:
            self.arrived.clear()
        elif not deltas:
            raise self.error
        return deltas


class Host(ABC):
    """An engine that runs elsewhere, as an event loop sees it. All methods are called in that
    loop's thread.

    An event loop that is slow, or a client, keeps nobody else waiting: what has come waits in the
    request's listener, which holds no more than its tokens.

    Args:
        model: of which only the configuration, the tokenizer and the path are read.
        max_model_len: the most tokens of a request.
        max_open: the most completions that run and wait.

    Attributes:
        fault: what a step of the engine raised.
        is_final: whether the engine's process, or one of its ranks, has ended.
        num_open: completions that run and wait.
        is_closing: whether the server is being stopped.
    """

    def __init__(self, model: Model, max_model_len: int, max_open: int) -> None:
        self.model = model
        self.max_model_len = max_model_len
        self.max_open = max_open
        self.fault: str | None = None
        self.is_final = False
        self._special_ids = special_ids(model.tokenizer)
        self._listeners: dict[str, tuple[int, _Listener]] = {}
        self._stats_futures: dict[int, asyncio.Future[Stats]] = {}
        self._names = itertools.count()
        self.num_open = 0
        self.is_closing = self._has_ended = False

    @abstractmethod
    async def open(self) -> None:
        """Begin, in the event loop in which all else is called."""

    @abstractmethod
    async def close(self) -> None:
        """Take no more requests, and end the engine's loop."""

    @abstractmethod
    def send(self, command: Command) -> None:
        """Send a command to the engine."""

    def refuse_requests(self) -> None:
        """Take no more requests; those under way go on."""
        self.is_closing = True

    def check_room(self, count: int) -> None:
        """Raise BusyError if so many more completions would be too many."""
        if self.num_open + count > self.max_open:
            problem = (
                f"{self.num_open} completions under way, {count} more, and room for {self.max_open}"
            )
            raise BusyError("a request", problem, "the same request later")

    def check_open(self) -> None:
        """Raise ClosedError unless the engine takes new requests."""
        self._check_running()
        if self.is_closing:
            raise ClosedError(
                "a request", "a server that is being stopped", "another server, or this one later"
            )

    def _check_running(self) -> None:
        if self.fault is not None:
            instead = "start the server anew; its log has the error"
            raise ClosedError("a request", f"a step that raised {self.fault}", instead)
        if self._has_ended:
            raise ClosedError(
                "a request", "a server that was stopped", "another server, or this one later"
            )

    @property
    def has_ended(self) -> bool:
        """The engine's loop has ended."""
        return self._has_ended

    async def is_moving(self, seconds: float) -> bool:
        """Whether the engine's loop goes on: it answers within so many seconds, which it does
        between two steps."""
        if self._has_ended:
            return False
        try:
            async with asyncio.timeout(seconds):
                await self._ask()
        except (TimeoutError, WeftError):
            return False
        return True

    def give_up(self) -> None:
        """End the completions under way, whose engine stands still."""
        if not self._has_ended:
            self._end(Ended(f"an engine that stood still for {GIVE_UP_SECONDS:g} s", is_final=True))

    async def stats(self) -> Stats:
        """The engine's counts, taken between two steps."""
        self.check_open()
        return await self._ask()

    async def _ask(self) -> Stats:
        number = next(self._names)
        future: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._stats_futures[number] = future
        try:
            self.send(Ask(number))
            return await future
        finally:
            del self._stats_futures[number]

    async def stream(self, requests: Sequence[Add]) -> AsyncGenerator[list[Output], None]:
        """The outputs of requests, several at a time, until all of their completions have ended. A
        consumer that stops aborts them. A server that is being stopped goes on with them: new ones
        are refused before, by `check_open`.

        Raises:
            BusyError: too many requests wait.
            ClosedError: the engine has ended, or failed meanwhile.
            RequestError: what `Engine.add` refuses.
        """
        self._check_running()
        count = sum(request.sampling.n for request in requests)
        self.check_room(count)
        listener = _Listener()
        tokenizer = self.model.tokenizer
        named = [attrs.evolve(request, name=f"request {next(self._names)}") for request in requests]
        progress = {
            (place, index): Progress(request, place, index, tokenizer, self._special_ids)
            for place, request in enumerate(named)
            for index in range(request.sampling.n)
        }
        left = {request.name: request.sampling.n for request in named}
        self.num_open += count
        try:
            for place, request in enumerate(named):
                self._listeners[request.name] = place, listener
                self.send(request)
            while left:
                outputs = _outputs(await listener.take(), progress)
                for output in outputs:
                    if output.finish_reason is not None:
                        name = named[output.place].name
                        left[name] -= 1
                        if not left[name]:
                            del left[name], self._listeners[name]
                yield outputs
        finally:
            self.num_open -= count
            for name in left:
                if self._listeners.pop(name, None) is not None:
                    self.send(Abort(name))

    def receive(self, message: Message) -> None:
        """Hand a message of the engine's loop to those who wait for it."""
        if isinstance(message, Told):
            if (
                future := self._stats_futures.get(message.number)
            ) is not None and not future.done():
                future.set_result(message.stats)
        elif isinstance(message, Ended):
            self._end(message)
        else:
            listeners = self._listeners
            for delta in message:
                if (entry := listeners.get(delta[0])) is not None:
                    place, listener = entry
                    listener.deltas.append((place, delta))
                    listener.arrived.set()

    def _end(self, ended: Ended) -> None:
        self.fault = ended.fault
        self.is_final = ended.is_final
        self._has_ended = True
        self.is_closing |= ended.fault is None
        for _, listener in self._listeners.values():
            listener.error = ended.error()
            listener.arrived.set()
        for future in self._stats_futures.values():
            if not future.done():
                future.set_exception(ended.error())

    def stop(self) -> None:
        """Take no more requests, and tell the engine's loop to end."""
        self.is_closing = True
        self.send(Stop())


def _outputs(
    placed_deltas: Sequence[tuple[int, Delta]], of: dict[tuple[int, int], Progress]
) -> list[Output]:
    """One output for each completion that something came for."""
    if len(placed_deltas) == 1:
        [(place, delta)] = placed_deltas
        return [of[place, delta[1]].add([delta])]
    grouped: dict[tuple[int, int], list[Delta]] = {}
    for place, delta in placed_deltas:
        grouped.setdefault((place, delta[1]), []).append(delta)
    return [of[key].add(deltas) for key, deltas in grouped.items()]


class EngineHost(Host):
    """An engine in a thread of this process.

    Args:
        engine: on the first rank.
        max_waiting: completions that may wait beside those that run (`EngineLimits.max_num_reqs`).
        make_mask: makes masks of `response_format`s.
        num_ranks: processes in which stages of the engine run; the others `follow`.
    """

    def __init__(
        self, engine: Engine, max_waiting: int, make_mask: MakeMask, *, num_ranks: int = 1
    ) -> None:
        super().__init__(
            engine.model, max_model_len(engine), engine.limits.budget.max_num_reqs + max_waiting
        )
        self.engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine_loop = EngineLoop(engine, make_mask, self._deliver, num_ranks=num_ranks)
        self._thread = threading.Thread(
            target=self._engine_loop.run, name="weft engine", daemon=True
        )
        self._thread.start()

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Take no more requests, and end the thread."""
        self.stop()
        await asyncio.to_thread(self._thread.join, None if not self.is_final else 0)

    def send(self, command: Command) -> None:
        self._engine_loop.inbox.put(command)

    def _deliver(self, message: Message) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.receive, message)


def max_model_len(engine: Engine) -> int:
    """The most tokens of a request."""
    limits = engine.limits
    return min(
        engine.model.config.max_position_embeddings, limits.budget.max_pages * limits.page_size
    )
