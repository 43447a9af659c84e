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

# An engine answers between two steps. If it has not for this many seconds, it counts as stuck.
STILL_SECONDS = 10.0
# Seconds that a server which is being stopped waits for a stuck engine.
GIVE_UP_SECONDS = 30.0


class BusyError(WeftError):
    """The server's queue of waiting requests is full."""


class ClosedError(WeftError):
    """The engine accepts no requests: it is being closed, or one of its steps raised."""


@attrs.define(eq=False)
class _Listener:
    """The deltas of a client's request that were not taken yet. A slow client takes several steps'
    deltas at once."""

    deltas: list[tuple[int, Delta]] = attrs.field(factory=list)
    error: WeftError | None = None
    arrived: asyncio.Event = attrs.field(factory=asyncio.Event)

    async def take(self) -> list[tuple[int, Delta]]:
        """Wait for at least one delta, and take all of them."""
        await self.arrived.wait()
        deltas = self.deltas
        self.deltas = []
        # With an error the event stays set: the deltas before it go out first, and the next call
        # raises instead of waiting.
        if self.error is None:
            self.arrived.clear()
        elif not deltas:
            raise self.error
        return deltas


class Host(ABC):
    """An engine that runs in another thread or process, as an event loop sees it.

    All methods are called in that loop's thread. A slow event loop or a slow client delays nobody
    else: deltas wait in the request's listener, which holds no more than the request's tokens.

    Args:
        model: only its configuration, tokenizer and path are read.
        max_model_len: the most tokens of a request, prompt and completion together.
        max_open: the most completions that may run or wait at once.

    Attributes:
        fault: the error that a step of the engine raised.
        is_final: whether the engine's process, or one of its ranks, has ended.
        num_open: completions that run or wait.
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
        """Begin. It is called in the event loop in which all other methods are called."""

    @abstractmethod
    async def close(self) -> None:
        """Accept no more requests, and end the engine's loop."""

    @abstractmethod
    def send(self, command: Command) -> None:
        """Send a command to the engine."""

    def refuse_requests(self) -> None:
        """Accept no more requests; those under way continue."""
        self.is_closing = True

    def check_room(self, count: int) -> None:
        """Raise BusyError if there is no room for `count` more completions."""
        if self.num_open + count > self.max_open:
            problem = (
                f"{self.num_open} completions under way, {count} more, and room for {self.max_open}"
            )
            raise BusyError("a request", problem, "the same request later")

    def check_open(self) -> None:
        """Raise ClosedError unless the engine accepts new requests."""
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
        """Whether the engine's loop, which answers between two steps, does so within `seconds`."""
        if self._has_ended:
            return False
        try:
            async with asyncio.timeout(seconds):
                await self._ask()
        except (TimeoutError, WeftError):
            return False
        return True

    def give_up(self) -> None:
        """End the completions under way because the engine is stuck."""
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
        """Yield the outputs of requests, several at a time, until all completions have ended.

        The requests are aborted if the consumer stops early. A server that is being stopped still
        finishes them; `check_open` is what refuses new ones.

        Raises:
            BusyError: too many requests wait.
            ClosedError: the engine has ended, or fails meanwhile.
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
                # A request that was never sent has no listener, and nothing to abort.
                if self._listeners.pop(name, None) is not None:
                    self.send(Abort(name))

    def receive(self, message: Message) -> None:
        """Hand a message of the engine's loop to whoever waits for it."""
        if isinstance(message, Told):
            # Whoever asked may have timed out meanwhile (`is_moving`).
            if (
                future := self._stats_futures.get(message.number)
            ) is not None and not future.done():
                future.set_result(message.stats)
        elif isinstance(message, Ended):
            self._end(message)
        else:
            listeners = self._listeners
            for delta in message:
                # Deltas of an aborted request may still arrive: its listener is gone.
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
        """Accept no more requests, and tell the engine's loop to end."""
        self.is_closing = True
        self.send(Stop())


def _outputs(
    placed_deltas: Sequence[tuple[int, Delta]], of: dict[tuple[int, int], Progress]
) -> list[Output]:
    """One output for each completion that has new deltas."""
    # The usual case: the client keeps up, and has one completion.
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
        max_waiting: completions that may wait, in addition to those that run
            (`EngineLimits.max_num_reqs`).
        make_mask: makes the mask of a `response_format`.
        num_ranks: processes in which stages of the engine run; all but the first call `follow`.
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
        """Accept no more requests, and end the thread."""
        self.stop()
        # After `give_up` the thread is stuck and may never end: do not wait for it.
        await asyncio.to_thread(self._thread.join, None if not self.is_final else 0)

    def send(self, command: Command) -> None:
        self._engine_loop.inbox.put(command)

    def _deliver(self, message: Message) -> None:
        # Runs in the engine's thread; futures and events may be touched in the loop's thread alone.
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.receive, message)


def max_model_len(engine: Engine) -> int:
    """The most tokens of a request: the model's positions, or the pages of the KV cache if they
    hold fewer."""
    limits = engine.limits
    return min(
        engine.model.config.max_position_embeddings, limits.budget.max_pages * limits.page_size
    )
