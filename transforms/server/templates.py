"""`ChatRenderer`: renders chats as prompts in separate processes, so that a slow template can be
killed."""

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import attrs

from weft.stages.checkpoints import chat_jinja
from weft.stages.checkpoints.chat import ChatTemplate, refused_by_template, template_values
from weft.stages.checkpoints.chat_jinja import COMMAND, LENGTH, packed

# Seconds in which a template must have rendered a chat.
TEMPLATE_SECONDS = 5.0
# Seconds that a template has while another chat waits for its place; divided by the number of
# waiting chats, if several wait.
PATIENCE_SECONDS = 0.5
_LEAST_PATIENCE_SECONDS = 0.05
MOST_AT_ONCE = 4
_CALL = "chat_template.render(messages)"


@attrs.define(eq=False)
class _Rendering:
    """A chat that a process renders.

    Args:
        number: identifies the process.
        since: the time of its start, by `time.monotonic()`.
    """

    number: int
    since: float = attrs.field(factory=time.monotonic)


class ChatRenderer:
    """Renders each chat in a process with a time limit, without blocking the event loop.

    While others wait, the rendering that began first is killed earlier, so that a few slow ones
    do not hold up the rest. Without `os.fork` (Windows), a thread renders, with no time limit.

    Args:
        template: the model's template.
        seconds: the time limit.
    """

    def __init__(self, template: ChatTemplate, seconds: float = TEMPLATE_SECONDS) -> None:
        self._template = template
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._numbers = itertools.count()
        self._busy: list[_Rendering] = []
        self._freed = asyncio.Condition()
        self._num_waiting = 0

    def open(self) -> None:
        """Start the process that is forked for each rendering."""
        if not hasattr(os, "fork"):
            return
        self._control, theirs = socket.socketpair()
        # -P keeps the script's folder off sys.path, where weft's modules could hide others.
        words = [sys.executable, "-P", chat_jinja.__file__, f"{theirs.fileno()}"]
        # In a session of its own, since a terminal's Ctrl-C is for the server alone.
        with theirs:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()], start_new_session=True
            )
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as stream:
            chat_jinja.write_message(
                stream, {"source": self._template.source, "seconds": self._seconds}
            )

    def close(self) -> None:
        """Kill all processes."""
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()

    async def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        """Render messages as `ChatTemplate.render` does.

        Raises:
            RequestError: the messages are malformed, or the template refuses them or takes too
                long.
        """
        if self._control is None:
            return await asyncio.to_thread(self._template.render, messages, **variables)
        message = packed(template_values(self._template, _CALL, messages, variables))
        async with self._place() as rendering:
            answer = await self._answer(message, rendering)
            waited = time.monotonic() - rendering.since
        if answer is None:
            problem = (
                f"a chat template that had not rendered these messages after {waited:.2f} s, and"
                " was ended"
            )
            raise refused_by_template(_CALL, problem)
        if "error" in answer:
            raise refused_by_template(_CALL, answer["error"])
        return str(answer["text"])

    async def _answer(self, message: bytes, rendering: _Rendering) -> dict[str, Any] | None:
        """The answer of a new process; None: it was killed, or ended without an answer."""
        connection = self._begin(rendering)
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        answer: dict[str, Any] | None = None
        # Without an answer the process may still run, also if the client has gone: it is killed.
        try:
            async with asyncio.timeout(self._seconds):
                writer.write(message)
                head = await reader.readexactly(LENGTH.size)
                answer = json.loads(await reader.readexactly(LENGTH.unpack(head)[0]))
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass
        finally:
            if answer is None:
                self._end(rendering)
            writer.close()
        return answer

    def _begin(self, rendering: _Rendering) -> socket.socket:
        """Start a process, and return the connection to it."""
        assert self._control is not None
        connection, theirs = socket.socketpair()
        with theirs:
            command = COMMAND.pack(b"r", rendering.number)
            socket.send_fds(self._control, [command], [theirs.fileno()])
        return connection

    def _end(self, rendering: _Rendering) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.send(COMMAND.pack(b"k", rendering.number))

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[_Rendering]:
        """Within, hold one of the `MOST_AT_ONCE` places. If none is free, the rendering that began
        first is killed once it has had its time."""
        async with self._freed:
            self._num_waiting += 1
            try:
                while len(self._busy) >= MOST_AT_ONCE:
                    await self._wait()
            finally:
                self._num_waiting -= 1
            rendering = _Rendering(next(self._numbers))
            self._busy.append(rendering)
        try:
            yield rendering
        finally:
            self._busy.remove(rendering)
            async with self._freed:
                self._freed.notify()

    async def _wait(self) -> None:
        """Wait for a place, or kill the rendering that began first."""
        first = min(self._busy, key=lambda rendering: rendering.since)
        patience = max(PATIENCE_SECONDS / self._num_waiting, _LEAST_PATIENCE_SECONDS)
        left = first.since + patience - time.monotonic()
        if left <= 0:
            self._end(first)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(left, _LEAST_PATIENCE_SECONDS)):
                await self._freed.wait()
