"""A timeline in Chrome's trace event format
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), which Perfetto
opens."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from weft.effects import Broadcast, Effect, Recv, Send
from weft.transforms.pipelines.timing.events import Event

# All ranks are threads of one process, since events do not say which ranks share one.
_PROCESS = 0
# The sender, the receiver, the micro-batch and the stage of a message (None: a broadcast), and how
# many equal messages came before it.
_Message = tuple[int, int, int, int | None, int]


def trace_of(events: Sequence[Event]) -> dict[str, Any]:
    """The JSON object of a trace: one thread for each rank, one complete event for each event, and
    an arrow from each send to its receive."""
    ranks = sorted({event.rank for event in events})
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            _metadata("process_name", 0, {"name": "weft"}),
            *(_metadata("thread_name", rank, {"name": f"rank {rank}"}) for rank in ranks),
            *(_metadata("thread_sort_index", rank, {"sort_index": rank}) for rank in ranks),
            *map(_complete, events),
            *_arrows(events, ranks),
        ],
    }


def _metadata(name: str, rank: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": _PROCESS, "tid": rank, "args": args}


def _complete(event: Event) -> dict[str, Any]:
    start = _microseconds(event.start)
    return {
        "name": f"{event.effect}",
        "cat": type(event.effect).__name__.lower(),
        "ph": "X",
        "ts": start,
        # From rounded times, so that an event ends no later than the next one begins.
        "dur": round(_microseconds(event.end) - start, 3),
        "pid": _PROCESS,
        "tid": event.rank,
        "args": {
            "microbatch": event.effect.microbatch,
            "waited": _microseconds(event.waited),
        },
    }


def _microseconds(seconds: float) -> float:
    """A time in microseconds, to the nanosecond, which is as fine as a viewer shows."""
    return round(seconds * 1e6, 3)


def _arrows(events: Sequence[Event], ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The beginning and the end of an arrow for each message of which both ends are recorded."""
    sent = dict[_Message, Event]()
    received = dict[_Message, Event]()
    num_sent = Counter[tuple[Any, ...]]()
    num_received = Counter[tuple[Any, ...]]()
    for event in events:
        # A micro-batch's number occurs again in the next run; the edges of ranks keep the order.
        for message in _messages_sent(event.rank, event.effect, ranks):
            sent[*message, num_sent[message]] = event
            num_sent[message] += 1
        for message in _messages_received(event.rank, event.effect):
            received[*message, num_received[message]] = event
            num_received[message] += 1
    for number, key in enumerate(key for key in sent if key in received):
        arrow = {"name": "message", "cat": "message", "id": number, "pid": _PROCESS}
        before = sent[key]
        after = received[key]
        yield {**arrow, "ph": "s", "tid": before.rank, "ts": _microseconds(before.start)}
        # An arrow joins the events that are under way at its two times; at its end, an event is over.
        last = max(_microseconds(after.start), round(_microseconds(after.end) - 1e-3, 3))
        # `bp`: the arrow ends at the event of this time, and not at the next one.
        yield {**arrow, "ph": "f", "bp": "e", "tid": after.rank, "ts": last}


def _messages_sent(
    rank: int, effect: Effect, ranks: Sequence[int]
) -> Iterator[tuple[int, int, int, int | None]]:
    if isinstance(effect, Send):
        yield rank, effect.to, effect.microbatch, _stage_of(effect, rank)
    elif isinstance(effect, Broadcast) and effect.root == rank:
        for receiver in effect.ranks or ranks:
            if receiver != rank:
                yield rank, receiver, effect.microbatch, None


def _messages_received(rank: int, effect: Effect) -> Iterator[tuple[int, int, int, int | None]]:
    if isinstance(effect, Recv):
        yield effect.source, rank, effect.microbatch, _stage_of(effect, effect.source)
    elif isinstance(effect, Broadcast) and effect.root != rank:
        yield effect.root, rank, effect.microbatch, None


def _stage_of(effect: Send | Recv, sender: int) -> int:
    """The stage whose result is sent; an effect that names none means that of the sender's number."""
    if effect.stage is None:
        return sender
    return effect.stage
