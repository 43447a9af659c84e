"""Bodies of requests, read within limits; and clients that go before they are answered."""

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

_LARGE = 2**16
# Characters of a stop text or of a bad word.
MAX_STOP_LEN = 512
# Characters of a field's name that are compared with those of the fields that there are.
_LONGEST_NAME = 64
# The most lists and objects within each other. Far beneath Python's own limit, which other code
# would meet first.
MAX_DEPTH = 128


@attrs.frozen(kw_only=True)
class ServerLimits:
    """The limits of a request.

    Args:
        max_body: bytes of a body.
        max_unfinished: bytes of all bodies that have begun to come. If there are more, the one that
            began first is refused: a body that comes at once is never that for long.
        max_n: completions of a prompt.
        max_logprobs: of a token; None: as the engine has it.
        max_prompts: prompts of a request.
        max_stops: stop texts of a request, all of which are looked for at each token; and bad
            words.
        has_priorities: a request may come before others, by its `priority`.
        timeout: seconds from a request's body until its last token; None: no limit.
        body_timeout: seconds in which a body must come.
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
    """A body that has begun to come, and the clock that ends it."""

    clock: asyncio.Timeout
    num_bytes: int = 0
    is_refused: bool = False


class UnfinishedBodies:
    """The bodies that have begun to come, with a limit for all together.

    Args:
        most: bytes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_bytes = 0
        self._bodies: dict[int, _Unfinished] = {}  # the one that began first comes first

    @contextlib.asynccontextmanager
    async def reading(self, seconds: float) -> AsyncIterator[Callable[[int], None]]:
        """A function that is told how many more bytes of a body have come. Within, the body has so
        many seconds.

        Raises:
            Refusal: it took longer, or others needed the room.
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
            first.clock.reschedule(0)


async def read_body(
    request: Request, limits: ServerLimits, kind: type[BaseModel], bodies: UnfinishedBodies
) -> Any:
    """The body of a request, as a value of its class.

    Args:
        bodies: among which it is counted until it has come.

    Raises:
        Refusal: it is too large, too late, no JSON, or has other fields.
    """
    async with bodies.reading(limits.body_timeout) as count:
        raw = await _read_bytes(request, limits.max_body, count)
    if len(raw) > _LARGE:  # other requests go on meanwhile
        return await asyncio.to_thread(_parsed, raw, kind)
    return _parsed(raw, kind)


def _parsed(raw: bytes, kind: type[BaseModel]) -> Any:
    try:
        text = raw.decode("utf-8-sig")  # of bytes, json.loads takes halves of surrogate pairs too
        parsed = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error!s:.200}", code="invalid_json") from None
    _check_depth(parsed)
    if "\\u" in text:
        _check_characters(parsed)
    try:
        return checked(kind, parsed)
    except ValidationError as error:
        raise _refusal(error, kind) from None


def _refusal(error: ValidationError, kind: type[BaseModel]) -> Refusal:
    """The refusal of the first field that is wrong."""
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
    """Refuse more completions, longer lists or more logprobs than may be: each costs time at each
    token. And refuse a priority, if requests have none here.

    Raises:
        Refusal: 400, with the field.
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
    """Refuse options that would change nothing: of an answer that is no stream, as OpenAI's API
    does; and the usage in each chunk without `include_usage`, which vLLM ignores.

    Raises:
        Refusal: 400, with the field.
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
    """Work for a client that has sent its request. It is cancelled if the client goes.

    Raises:
        ClientDisconnect: it went.
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
        if client.done() and not worker.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        client.cancel()
