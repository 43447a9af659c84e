"""`EngineHost`: an engine in a thread of its own, whose requests come from an event loop; `follow`: the other ranks."""

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import attrs
import torch

from weft.errors import EngineError, RequestError, WeftError
from weft.sampling import SamplingParams
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.inputs import Mask
from weft.transforms.engine.outputs import RequestOutput
from weft.transforms.engine.stats import Stats

_LOG = logging.getLogger("weft.server")
MakeMask = Callable[[Mapping[str, Any]], Mask | None]
"""Makes the mask of a request from a `response_format`."""


@attrs.frozen(kw_only=True)
class Add:
    """A request for the engine, as it travels to all ranks.

    Args:
        name: of the request.
        prompt: token ids.
        sampling, max_tokens, priority, adapter: as `Engine.add` takes them.
        extras: lists of numbers, by name.
        form: the `response_format`, from which each rank makes the mask; None: there is none.
    """

    name: str = ""
    prompt: Sequence[int]
    sampling: SamplingParams
    max_tokens: int
    priority: int = 0
    adapter: str | None = None
    extras: dict[str, Any] = attrs.field(factory=dict)
    form: dict[str, Any] | None = None

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
            mask=None if self.form is None else make_mask(self.form),
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
class Stop:
    """The end of the server."""

    def apply(self, engine: Engine, _: MakeMask) -> None:
        """Nothing: the one who takes it ends."""


def follow(engine: Engine, make_mask: MakeMask) -> None:
    """The part of a rank beside the first one: the same requests and steps, until the first rank stops.

    Raises:
        RankError: a rank ended, or kept this one waiting.
    """
    while True:
        commands = engine.transport.share(None)
        for command in commands:
            with contextlib.suppress(RequestError):  # as on the first rank, which tells the client
                command.apply(engine, make_mask)
        if any(isinstance(command, Stop) for command in commands):
            return
        if not engine.is_idle:
            engine.step()


class BusyError(WeftError):
    """As many requests wait as the server lets wait."""


class ClosedError(WeftError):
    """The engine takes no requests: it is being closed, or a step of it raised."""


@attrs.define(eq=False)
class _Listener:
    """Where a request's outputs go: a queue of an event loop, which is written in that loop's own thread."""

    loop: asyncio.AbstractEventLoop
    outputs: "asyncio.Queue[RequestOutput | BaseException]" = attrs.field(factory=asyncio.Queue)

    def put(self, found: Iterable[RequestOutput | BaseException]) -> None:
        """Put what was found into the queue, from any thread."""

        def put() -> None:
            for own in found:
                self.outputs.put_nowait(own)

        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(put)


class EngineHost:
    """Steps an engine in a thread while it has requests.

    All calls of the engine are made in that thread. An event loop that is slow, or a client, keeps nobody else waiting:
    outputs wait in the request's queue, which holds no more than its tokens.

    Args:
        engine: on the first rank.
        max_waiting: completions that may wait beside those that run (`EngineLimits.max_num_reqs`).
        make_mask: makes masks of `response_format`s.
        num_ranks: processes in which stages of the engine run; the others `follow`.
        on_fault: called, in the engine's thread, when a step has raised.
    """

    def __init__(
        self,
        engine: Engine,
        max_waiting: int,
        make_mask: MakeMask,
        *,
        num_ranks: int = 1,
        on_fault: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine, self.max_waiting = engine, max_waiting
        self._make_mask, self._num_ranks, self._on_fault = make_mask, num_ranks, on_fault
        self._inbox: queue.SimpleQueue[Add | Abort | Stop | Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[str, _Listener] = {}
        self._names = itertools.count()
        self._num_open = 0
        self._closing = False
        self.fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="weft engine", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Completions that run and wait."""
        return self._num_open

    @property
    def is_closing(self) -> bool:
        """Whether the server is being stopped."""
        return self._closing

    def refuse_requests(self) -> None:
        """Take no more requests; those under way go on."""
        self._closing = True

    def check_room(self, count: int) -> None:
        """Raise BusyError if so many more completions would be too many."""
        if self._num_open + count > self.max_open:
            seen = f"{self._num_open} completions under way, {count} more, and room for {self.max_open}"
            raise BusyError("a request", seen, "the same request later")

    @property
    def max_open(self) -> int:
        """The most completions that run and wait."""
        return self.engine.limits.budget.max_num_reqs + self.max_waiting

    def check_open(self) -> None:
        """Raise ClosedError unless the engine takes requests."""
        if self.fault is not None:
            seen = f"a step that raised {type(self.fault).__name__}: {self.fault}"
            raise ClosedError("a request", seen, "start the server anew; its log has the error")
        if self._closing:
            raise ClosedError("a request", "a server that is being stopped", "another server, or this one later")

    async def stats(self) -> Stats:
        """The engine's counts, taken between two steps."""
        self.check_open()
        found: Future[Stats] = Future()
        self._inbox.put(lambda: found.set_result(self.engine.stats()))
        self.check_open()  # the thread may have ended before it could see this
        return await asyncio.wrap_future(found)

    async def stream(self, request: Add) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request, until all of its completions have ended. A consumer that stops aborts it.

        Called in one event loop.

        Raises:
            BusyError: too many requests wait.
            ClosedError: the engine takes no requests, or failed meanwhile.
            RequestError: what `Engine.add` refuses.
        """
        self.check_open()
        count = request.sampling.n
        self.check_room(count)
        request = attrs.evolve(request, name=f"request {next(self._names)}")
        listener = _Listener(asyncio.get_running_loop())
        self._num_open += count
        try:
            self._listeners[request.name] = listener
            self.check_open()  # the thread may have told its listeners before this one was among them
            self._inbox.put(request)
            left = count
            while left:
                found = await listener.outputs.get()
                if isinstance(found, BaseException):
                    raise found
                left -= found.finish_reason is not None
                yield found
        finally:
            self._num_open -= count
            if self._listeners.pop(request.name, None) is not None:
                self._inbox.put(Abort(request.name))

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            self.fault = error
            _LOG.error("a step of the engine raised; the server takes no more requests", exc_info=error)
            self._on_fault()
        fault = EngineError("engine.step()", "a server that was stopped", "the same request later")
        if self.fault is not None:
            seen = f"{type(self.fault).__name__}: {self.fault}"
            fault = EngineError("engine.step()", seen, "start the server anew; its log has the error")
        self._closing = True
        for listener in list(self._listeners.values()):
            listener.put([fault])
        with contextlib.suppress(queue.Empty):  # questions that came too late for a turn
            while True:
                if callable(own := self._inbox.get_nowait()):
                    own()

    def _turn(self) -> bool:
        """Take what has come, and step; False: the end."""
        commands = self._take()
        if self._num_ranks > 1:
            self.engine.transport.share(commands)
        for command in commands:
            try:
                command.apply(self.engine, self._make_mask)
            except RequestError as error:
                if (listener := self._listeners.get(command.name if isinstance(command, Add) else "")) is not None:
                    listener.put([error])
        if any(isinstance(command, Stop) for command in commands):
            return False
        if not self.engine.is_idle:
            self._publish(self.engine.step())
        return True

    def _take(self) -> list[Add | Abort | Stop]:
        """What has come. Without work, wait for it, but no longer than other ranks wait."""
        found, wait = list[Add | Abort | Stop](), self.engine.is_idle
        longest = None if self._num_ranks == 1 else getattr(self.engine.transport, "timeout", 30.0) / 4
        while True:
            try:
                own = self._inbox.get(block=wait, timeout=longest)
            except queue.Empty:
                return found
            if callable(own):
                own()
            else:
                found.append(own)
                wait = False

    def _publish(self, outputs: Sequence[RequestOutput]) -> None:
        """Hand a step's outputs to their requests."""
        of: dict[str, list[RequestOutput]] = {}
        for output in outputs:
            of.setdefault(output.id, []).append(output)
        for name, own in of.items():
            if (listener := self._listeners.get(name)) is not None:
                listener.put(own)

    def close(self) -> None:
        """Take no more requests, and end the thread."""
        self._closing = True
        self._inbox.put(Stop())
        self._thread.join()


def _tensor(name: str, given: Any) -> torch.Tensor:
    try:
        return torch.tensor(given, dtype=torch.float32)
    except (ValueError, TypeError, RuntimeError, OverflowError, RecursionError) as error:
        raise RequestError(f"weft.extras[{name!r}]", f"{error!s:.200}", "numbers, or lists of lists of them") from error
