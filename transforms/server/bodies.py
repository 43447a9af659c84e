"""Reads request bodies within limits, and cancels work for clients that disconnect."""

import asyncio
import contextlib
import json
import reprlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from weft.arguments.checks import nearest
from weft.transforms.server.protocol import INSTEAD, Sampled, checked
from weft.transforms.server.refusals import Refusal

# Bodies of more bytes are parsed in a thread.
_LARGE = 2**16
# The most characters of a stop text or of a bad word.
MAX_STOP_LEN = 512
# Only these first characters of an unknown field's name are compared with the known names.
_LONGEST_NAME = 64
# The most nested lists and objects. Far below Python's recursion limit, so that no recursive code
# further on can reach that.
MAX_DEPTH = 128


@attrs.frozen(kw_only=True)
class ServerLimits:
    """The limits of a request.

    Args:
        max_body: the most bytes of a body.
        max_unfinished: the most bytes of all partly received bodies together. Beyond it, the body
            that began first is refused: one that is sent without pauses is not the oldest for long.
        max_n: the most completions of a prompt.
        max_logprobs: the most logprobs of a token; None: the engine's limit.
        max_prompts: the most prompts of a request.
        max_stops: the most stop texts of a request, each of which is searched for at each token;
            and the most bad words.
        has_priorities: whether requests may set `priority`.
        timeout: seconds from a request's body until its last token; None: no limit.
        body_timeout: seconds in which the whole body must arrive.
    """

    max_body: int = 4 * 2**20
    max_unfinished: int = 256 * 2**20
    max_n: int = 128
    max_logprobs: int | None = None
    max_prompts: int = 256
    max_stops: int = 128
    has_priorities: bool = False
    timeout: float | None = None
    body_timeout: float = 30.0


@attrs.define(eq=False)
class _Unfinished:
    """A partly received body, and the timeout that ends it."""

    clock: asyncio.Timeout
    num_bytes: int = 0
    is_refused: bool = False


class UnfinishedBodies:
    """The partly received bodies, with one limit for all of them together.

    Args:
        most: the limit in bytes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_bytes = 0
        self._bodies: dict[int, _Unfinished] = {}  # by id, in the order in which they began

    @contextlib.asynccontextmanager
    async def reading(self, seconds: float) -> AsyncIterator[Callable[[int], None]]:
        """Within, a body must arrive in `seconds`; yields a function that counts its bytes.

        Raises:
            Refusal: it took longer, or newer bodies needed the room.
        """
        body = _Unfinished(asyncio.timeout(seconds))
        try:
            async with body.clock:
                self._bodies[id(body)] = body
                yield lambda count: self._add(body, count)
        except TimeoutError:
            if body.is_refused:
                message = (
                    f"{self._most} bytes of unfinished bodies, of which this one had begun first"
                )
                raise Refusal(503, message, "server_error", code="bodies_too_large") from None
            message = f"the body did not come within {seconds:g} s"
            raise Refusal(408, message, code="body_timeout") from None
        finally:
            self._num_bytes -= body.num_bytes
            self._bodies.pop(id(body), None)

    def _add(self, body: _Unfinished, count: int) -> None:
        if body.is_refused:
            return
        body.num_bytes += count
        self._num_bytes += count
        while self._num_bytes > self._most:
            first = next(each for each in self._bodies.values() if each.num_bytes)
            first.is_refused = True
            self._num_bytes -= first.num_bytes
            first.num_bytes = 0
            # A time that has passed: the task that reads the body is cancelled at its next await.
            first.clock.reschedule(0)


async def read_body(
    request: Request, limits: ServerLimits, kind: type[BaseModel], bodies: UnfinishedBodies
) -> Any:
    """Read and validate the body of a request as an instance of `kind`.

    Args:
        bodies: counts the body until all of it has arrived.

    Raises:
        Refusal: it is too large, too late, not JSON, or has unknown or wrong fields.
    """
    async with bodies.reading(limits.body_timeout) as count:
        raw = await _read_bytes(request, limits.max_body, count)
    if len(raw) > _LARGE:  # keep the event loop free for other requests
        return await asyncio.to_thread(_parsed, raw, kind)
    return _parsed(raw, kind)


def _parsed(raw: bytes, kind: type[BaseModel]) -> Any:
    try:
        # Given bytes, json.loads would also accept halves of surrogate pairs.
        text = raw.decode("utf-8-sig")
        parsed = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error!s:.200}", code="invalid_json") from None
    _check_depth(parsed)
    # Decoding has refused unpaired surrogates, so only an escape can still spell one.
    if "\\u" in text:
        _check_characters(parsed)
    try:
        return checked(kind, parsed)
    except ValidationError as error:
        raise _refusal(error, kind) from None


def _refusal(error: ValidationError, kind: type[BaseModel]) -> Refusal:
    """The refusal for the first wrong field."""
    first = error.errors(include_url=False)[0]
    names = [str(part) for part in first["loc"]]
    said = first["msg"]
    place = ".".join(names)[:200]
    name = names[0][:_LONGEST_NAME] if names else ""
    instead = INSTEAD.get(name)
    if first["type"] == "extra_forbidden":
        said = "this server has no such field"
        if len(names) == 1:
            near = nearest(name, kind.model_fields)
        else:
            near = []
        instead = instead or next(iter(near), None)
    ours = {"call": place, "seen": reprlib.repr(first["input"]), "instead": instead or said}
    message = f"{place or 'the body'}: {said}" + (f"; instead: {instead}" if instead else "")
    return Refusal(400, message, param=place or None, weft=ours)


def check_limits(body: Sampled, limits: ServerLimits, vocab_size: int, logprobs: int) -> None:
    """Refuse too many completions, logprobs or list entries, each of which costs time at each
    token; and a priority, if the server has none.

    Raises:
        Refusal: 400, naming the field.
    """
    if body.n > limits.max_n:
        raise Refusal(400, f"n={body.n}; at most {limits.max_n}", param="n")
    if limits.max_logprobs is not None and logprobs > limits.max_logprobs:
        message = (
            f"{logprobs} logprobs of a token; at most {limits.max_logprobs}, by `weft serve"
            " --max-logprobs`"
        )
        raise Refusal(400, message, param="logprobs")
    if body.priority and not limits.has_priorities:
        message = (
            "this server takes requests as they come; it has priorities by `weft serve"
            " --scheduling-policy priority`"
        )
        raise Refusal(400, f"priority={body.priority}; {message}", param="priority")
    for name, what, value in (
        ("stop", "stop texts", body.stop),
        ("bad_words", "bad words", body.bad_words),
    ):
        if isinstance(value, str):
            texts = [value]
        else:
            texts = value or []
        if len(texts) > limits.max_stops:
            raise Refusal(400, f"{len(texts)} {what}; at most {limits.max_stops}", param=name)
        if (longest := max(map(len, texts), default=0)) > MAX_STOP_LEN:
            raise Refusal(
                400, f"{what} of {longest} characters; at most {MAX_STOP_LEN}", param=name
            )
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        if len(getattr(body, name) or ()) > vocab_size:
            raise Refusal(400, f"more of {name} than the model has tokens", param=name)


def check_stream_options(body: Sampled) -> None:
    """Refuse options that would have no effect: any without `stream`, as OpenAI's API does; and
    `continuous_usage_stats` without `include_usage`, which vLLM ignores.

    Raises:
        Refusal: 400, naming the field.
    """
    options = body.stream_options
    if options is None:
        return
    if not body.stream:
        raise Refusal(
            400, "stream_options without stream: write stream=true", param="stream_options"
        )
    if options.continuous_usage_stats and not options.include_usage:
        message = "continuous_usage_stats without include_usage: write include_usage=true beside it"
        raise Refusal(400, message, param="stream_options.continuous_usage_stats")


async def _read_bytes(request: Request, most: int, count: Callable[[int], None]) -> bytes:
    # Checked in advance, so that a large body is not received; the sum below is for chunked bodies.
    size = request.headers.get("content-length", "0")
    if size.isdecimal() and int(size[:18]) > most:
        raise Refusal(413, f"a body of {size} bytes; at most {most}", code="body_too_large")
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        count(len(chunk))
        if len(raw) > most:
            raise Refusal(413, f"a body of more than {most} bytes", code="body_too_large")
    return bytes(raw)


def _check_depth(value: Any) -> None:
    # Level by level instead of by recursion, which the depth it looks for could exhaust.
    if isinstance(value, dict | list):
        level = [value]
    else:
        level = []
    for _ in range(MAX_DEPTH):
        parts = (
            container.values() if isinstance(container, dict) else container for container in level
        )
        level = [each for container in parts for each in container if isinstance(each, dict | list)]
        if not level:
            return
    raise Refusal(
        400, f"more than {MAX_DEPTH} lists and objects within each other", code="invalid_json"
    )


def _check_characters(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        message = f"half of a surrogate pair, {error.object[error.start]!a}, which is no character"
        raise Refusal(400, message, code="invalid_json") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


@contextlib.asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Within, work for a client; it is cancelled if the client disconnects.

    The client's whole request must have been read before.

    Raises:
        ClientDisconnect: the client disconnected.
    """
    worker = asyncio.current_task()
    assert worker is not None

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        worker.cancel()

    client = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        # `uncancel` returns how many other cancellations are pending: those, as by a timeout or at
        # shutdown, must go on to whoever asked for them.
        if client.done() and not worker.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        client.cancel()
