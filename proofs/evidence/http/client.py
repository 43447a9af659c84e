"""`drive`: a load of streaming requests to `/v1/completions`, and what a client sees of the
answers."""

import asyncio
import itertools
import json
import math
import random
import re
import time
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import attrs

from weft.transforms.engine.evaluation.serving import spread

_EVENT = b"data: {"
# Read by a pattern: parsing each event would take the client more time than the server needs.
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
# Enough for the last events, of which the usage is one; the rest of the stream is only counted.
_TAIL = 2048
_REQUEST_SECONDS = 600.0


@attrs.frozen(kw_only=True)
class Load:
    """Requests with random prompts.

    Args:
        url: of the API, such as `http://127.0.0.1:8000/v1`.
        prompts: token ids.
        output_len: tokens of each completion; no end-of-sequence token ends it.
        rate: requests a second, whose gaps are exponential (a Poisson process); infinite: all at
            once.
        concurrency: the most requests under way.
        seed: of the gaps.
    """

    url: str
    prompts: Sequence[Sequence[int]]
    output_len: int
    rate: float = math.inf
    concurrency: int = 128
    seed: int = 0


@attrs.define(eq=False)
class Answer:
    """An answer as it comes.

    Args:
        began: when the request was begun, in seconds of `time.perf_counter`.
        times: when each event came, the last one with the usage.
        num_tokens: by the usage; None: it did not end.
        error: what came instead.
    """

    began: float
    times: list[float] = attrs.field(factory=list)
    num_tokens: int | None = None
    error: str = ""


class _Client(asyncio.Protocol):
    """One request on a connection of its own. It only counts events, so that the client is not what
    is measured."""

    def __init__(self, raw: bytes, answer: Answer, ended: "asyncio.Future[None]") -> None:
        self._raw = raw
        self._answer = answer
        self._ended = ended
        # The head is kept for the error of an answer that is none.
        self._head = self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.write(self._raw)

    def data_received(self, data: bytes) -> None:
        # First of all: the time of an event is that of its packet, whatever the client does with
        # it.
        now = time.perf_counter()
        # An event's first bytes may come with the packet before.
        received = self._tail[1 - len(_EVENT) :] + data
        self._answer.times += [now] * received.count(_EVENT)
        if len(self._head) < _TAIL:
            self._head += data
        self._tail = (self._tail + data)[-_TAIL:]
        if b"data: [DONE]" in self._tail:
            usages = _USAGE.findall(self._tail)
            self._answer.num_tokens = int(usages[-1]) if usages else 0
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        # The end of a connection is no error after the last event.
        if self._answer.num_tokens is None:
            self._answer.error = f"{error or self._head[-400:].decode(errors='replace')}"
        if not self._ended.done():
            self._ended.set_result(None)


async def _ask(
    load: Load, prompt: Sequence[int], free: asyncio.Semaphore, model: str | None
) -> Answer:
    place = urlsplit(load.url)
    body: dict[str, Any] = {
        "prompt": [*prompt],
        "max_tokens": load.output_len,
        # All requests then have the same length, and a run of one build the same work as that of
        # another.
        "ignore_eos": True,
        "stream": True,
    }
    body |= {"temperature": 1.0, "stream_options": {"include_usage": True}} | (
        {} if model is None else {"model": model}
    )
    raw = json.dumps(body).encode()
    head = (
        # Each request has its own connection, so it never waits for another one's stream.
        f"POST {place.path}/completions HTTP/1.1\r\nhost: {place.netloc}\r\nconnection: close\r\n"
    )
    head += f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    async with free:
        loop = asyncio.get_running_loop()
        # Inside the semaphore: the time that a request waits for the client's own limit is not the
        # server's.
        answer = Answer(time.perf_counter())
        ended = loop.create_future()
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                await loop.create_connection(
                    lambda: _Client(head.encode() + raw, answer, ended),
                    place.hostname or "",
                    place.port or 80,
                )
                await ended
        except (OSError, TimeoutError) as error:
            answer.error = f"{type(error).__name__}: {error}"
    return answer


async def drive(load: Load, model: str | None = None) -> dict[str, Any]:
    """The figures of a load, as `figures` makes them.

    Args:
        load: the requests.
        model: their field `model`; None: they have none.
    """
    draw = random.Random(load.seed)
    free = asyncio.Semaphore(load.concurrency)
    began = time.perf_counter()
    tasks = list[asyncio.Task[Answer]]()
    at = 0.0
    for prompt in load.prompts:
        if math.isfinite(load.rate):
            at += draw.expovariate(load.rate)
            # Until a moment of the plan and not for a gap, or each late request would make all
            # others later.
            await asyncio.sleep(began + at - time.perf_counter())
        tasks.append(asyncio.create_task(_ask(load, prompt, free, model)))
    answers = await asyncio.gather(*tasks)
    return figures(load, answers, time.perf_counter() - began)


def figures(load: Load, answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """The figures of answers: `ttft` runs from a request's beginning to its first event; `itl` are
    the gaps between its events, of which each may carry several tokens (`tokens_per_event`); `tpot`
    is the time after the first event over the tokens but one. Milliseconds, by mean, median and
    99th percentile.

    >>> answers = [Answer(0.0, [1.0, 1.5, 2.0, 2.0], 3), Answer(0.0, [], None, "refused")]
    >>> found = figures(Load(url="", prompts=[[1], [2]], output_len=3), answers, 2.0)
    >>> found["completed"], found["failed"], found["wrong_lengths"], found["tpot"]["p50"], found["tokens_per_event"]
    (1, 1, 0, 500.0, 1.0)
    """
    # An answer with the usage alone has no first token to time.
    done = [answer for answer in answers if answer.num_tokens is not None and len(answer.times) > 1]
    events = [answer.times[:-1] for answer in done]  # the last one is the usage
    tokens = sum(answer.num_tokens or 0 for answer in done)
    errors = [answer.error for answer in answers if answer.error]
    tpot = [
        (times[-1] - times[0]) / (answer.num_tokens - 1)
        for answer, times in zip(done, events, strict=True)
        if answer.num_tokens is not None and answer.num_tokens > 1
    ]
    return {
        "rate": load.rate if math.isfinite(load.rate) else "inf",
        "requests": len(answers),
        "completed": len(done),
        "failed": len(answers) - len(done),
        "wrong_lengths": sum(answer.num_tokens != load.output_len for answer in done),
        "errors": errors[:3],
        "seconds": seconds,
        "requests_per_s": len(done) / seconds,
        "output_tokens_per_s": tokens / seconds,
        "tokens_per_event": tokens / max(sum(map(len, events)), 1),
        "ttft": spread(
            [times[0] - answer.began for answer, times in zip(done, events, strict=True)]
        ),
        "tpot": spread(tpot),
        "itl": spread([b - a for times in events for a, b in itertools.pairwise(times)]),
    }
