"""Hostile bytes, drawn by seed: sizes that lie, and sockets that stall, break off and send what is
not HTTP.

An `Attack` is data. `size_attack` and `socket_attack` draw one; `weft.proofs.evidence.http.attacks`
mixes them with hostile bodies, and `weft.proofs.evidence.http.fuzz` performs them.
"""

import json
import random
from collections.abc import Sequence
from typing import Any

import attrs

from weft.proofs.evidence.http.process import request_bytes

# Small, so that a body that is too large is soon sent.
MAX_BODY = 65_536
# The limits of the server under attack.
MAX_N = 16
TEXT = {"prompt": "The function", "max_tokens": 4, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
# A body that each route accepts.
# As many fields as fit together, since attacks change those that are there.
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        **TEXT,
        "logprobs": 2,
        "n": 2,
        "stop": ["x"],
        "seed": 1,
        "logit_bias": {"3": 1},
        "echo": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop_token_ids": [3],
        "weft": {"captured": False},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "integer"}},
        },
    },
    "/v1/chat/completions": {
        **CHAT,
        "logprobs": True,
        "top_logprobs": 2,
        "chat_template_kwargs": {"a": 1},
        "n": 2,
    },
    "/tokenize": {"prompt": "The function"},
    "/detokenize": {"tokens": [5, 6, 7]},
}
ROUTES = [*VALID]
_END = b"\r\n\r\n"


@attrs.frozen
class Attack:
    """What one client does.

    Args:
        kind: `size` or `socket`, or a kind of `weft.proofs.evidence.http.attacks`.
        name: of this attack among its kind.
        steps: `send` bytes, `wait` seconds, `half_close`, `read` some bytes, `reset` the
            connection, `idle` so many more connections.
        answers: the number of answers that may come.
        patience: seconds for the first of them; None: it must come, or the connection must end.
    """

    kind: str
    name: str
    steps: Sequence[tuple[str, Any]]
    answers: int = 1
    patience: float | None = None


def post(
    kind: str, name: str, path: str, body: Any, headers: Sequence[tuple[str, str]] = ()
) -> Attack:
    """A whole request, to which an answer must come."""
    if isinstance(body, bytes):
        raw = body
    else:
        raw = dump(body)
    return Attack(kind, name, [("send", request_bytes(path, raw, headers=headers))])


def dump(value: Any) -> bytes:
    """JSON; half of the time with a number that is too large in place of infinity."""
    written = json.dumps(value)
    # The parser refuses `Infinity`, which is not JSON. It accepts 1e999 and reads it as infinity.
    return (written.replace("Infinity", "1e999") if len(written) % 2 else written).encode()


def size_attack(drawn: random.Random) -> Attack:
    """A body that is too large, too long for its length, or never ends."""
    # Bytes and not a client: libraries refuse to send a wrong length.
    head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    body = dump(TEXT)
    # Lengths that parsers read in different ways, which is how one request is smuggled in another.
    length = drawn.choice(
        [b"-1", b"abc", b"1e3", b"0x10", b" ", b"9" * 30, b"99999999", b"4, 5", b"+5", b"\xb2"]
    )
    chunk = b"1000\r\n" + b"a" * 4096 + b"\r\n"
    chunked = head + b"transfer-encoding: chunked" + _END
    prompts = ["a"] * drawn.choice([9, 255, 257, 9999])
    word = drawn.choice(["a", " ", "é", "\n", "0"]) * 20_000
    whole: dict[str, tuple[str, bytes]] = {
        "too large": ("/v1/completions", b" " * (MAX_BODY + drawn.randint(1, 2))),
        "just fits": ("/v1/completions", body.ljust(MAX_BODY)),
        "large number": ("/v1/completions", b'{"prompt":"a","seed":' + b"9" * 50_000 + b"}"),
        "many numbers": ("/v1/completions", b'{"prompt":[' + b"1," * 30_000 + b"1]}"),
        "many prompts": ("/v1/completions", dump({"prompt": prompts, "max_tokens": 4})),
        "many tokens": ("/detokenize", dump({"tokens": [5] * 20_000})),
        "long word": ("/tokenize", dump({"prompt": word})),
    }
    lying = {
        "length lies": head + b"content-length: " + length + _END + body,
        "too short": head + b"content-length: %d" % drawn.randrange(len(body)) + _END + body,
        "too long": head + b"content-length: 5000" + _END + body,
        "chunks without end": chunked + chunk * 17,
        "chunks cut": chunked + chunk,
        "bad chunks": chunked + drawn.choice([b"zz\r\n", b"-1\r\n", b"f" * 40]),
    }
    name = drawn.choice([*whole, *lying])
    if name in whole:
        return post("size", name, *whole[name])
    # The server may wait for the rest of a body that never comes, so that no answer is an answer
    # too; and the rest of one that is too long may be read as further requests.
    return Attack("size", name, [("send", lying[name])], answers=3, patience=0.3)


def socket_attack(drawn: random.Random) -> Attack:
    """Bytes that are not HTTP or nearly, and clients that stall, go, or send much at once."""
    path = drawn.choice(ROUTES)
    whole = request_bytes(path, dump(VALID[path]))
    acts = {**_raw(drawn, path, whole), **_acts(drawn, whole)}
    name = drawn.choice([*acts])
    # Up to 6 pipelined requests, and some for junk behind them.
    return Attack("socket", name, acts[name], answers=8, patience=2.0)


def _raw(drawn: random.Random, path: str, whole: bytes) -> dict[str, list[tuple[str, Any]]]:
    get = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    tokenize = b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    paths = [
        b"/" + b"a" * 9000,
        b"/../../etc/passwd",
        b"//v1//models",
        b"/v1/models/%2e%2e%2f",
        b"*",
        b"/%ff%fe",
        b"http://evil.example/v1/models",
        b"/v1/models/%00",
        b"/v1/models/demo/",
        b"/v1/models/none",
        b"/\xff",
    ]
    methods = b"TRACE", b"CONNECT", b"OPTIONS", b"PUT", b"DELETE", b"post", b"G\0T", b"A" * 500
    # A length and chunks: where two servers believe different ones, the second request is smuggled.
    both = (
        b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /version"
        b" HTTP/1.1\r\nhost: 127.0.0.1"
    )
    messages = {
        "HTTP/0.9": b"GET /\r\n",
        "HTTP/1.0": b"GET /health HTTP/1.0" + _END,
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM" + _END,
        "HTTP/9": b"GET /health HTTP/9.9" + _END,
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + drawn.randbytes(64),
        "random": drawn.randbytes(drawn.randint(1, 300)),
        "no host": b"GET /health HTTP/1.1" + _END,
        "two hosts": get + b"host: evil.example" + _END,
        "other host": b"GET /v1/models HTTP/1.1\r\nhost: evil.example" + _END,
        # As a browser sends for a page of another site.
        "other origin": whole.replace(_END, b"\r\norigin: http://evil.example" + _END, 1),
        "large header": get + b"a: " + b"a" * 100_000 + _END,
        "many headers": get + b"a: b\r\n" * 5000 + b"\r\n",
        "NUL in a header": get + b"a: \0" + _END,
        "folded header": get + b"a: b\r\n c" + _END,
        "bare newlines": get.replace(b"\r\n", b"\n") + b"\n",
        "space before colon": b"GET /health HTTP/1.1\r\nhost : 127.0.0.1" + _END,
        "both lengths": tokenize + both + _END,
        "two lengths": tokenize + b"content-length: 4\r\ncontent-length: 5\r\n\r\n{}   ",
        "odd transfer": tokenize + b"transfer-encoding: xchunked\r\n\r\n0" + _END,
        "method": drawn.choice(methods) + b" /v1/completions HTTP/1.1\r\nhost: 127.0.0.1" + _END,
        "path": b"GET " + drawn.choice(paths) + b" HTTP/1.1\r\nhost: 127.0.0.1" + _END,
        "upgrade": (
            get + b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13" + _END
        ),
        "expect": whole.replace(_END, b"\r\nexpect: 100-continue" + _END, 1),
        "authorization": whole.replace(
            _END, b"\r\nauthorization: " + drawn.randbytes(9).hex().encode() + _END, 1
        ),
    }
    return {name: [("send", raw)] for name, raw in messages.items()}


def _acts(drawn: random.Random, whole: bytes) -> dict[str, list[tuple[str, Any]]]:
    place = drawn.randrange(1, len(whole))
    long = {**TEXT, "max_tokens": 100, "ignore_eos": True}
    stream = request_bytes(
        "/v1/completions", dump({**long, "stream": True, "n": drawn.randint(1, 4)})
    )
    still = request_bytes("/v1/completions", dump(long))
    slow: list[tuple[str, Any]] = []
    # Pieces of the head, slower than any network, and then gone.
    for at in range(0, 24, 8):
        slow += [("send", whole[at : at + 8]), ("wait", 0.02)]
    return {
        "never sends": [("wait", 0.05), ("reset", None)],
        "half a request": [("send", whole[:place]), ("half_close", None)],
        "half a request, gone": [("send", whole[:place]), ("reset", None)],
        "slow head": [*slow, ("reset", None)],
        "slow body": [
            ("send", whole[:-9]),
            ("wait", 0.05),
            ("send", whole[-9:-4]),
            ("send", whole[-4:]),
        ],
        "half-closed": [("send", whole), ("half_close", None)],
        # Answers must come in order, each with its own length.
        "pipelined": [("send", whole * drawn.randint(2, 6))],
        "pipelined, then junk": [("send", whole + drawn.randbytes(20))],
        "stream, gone": [("send", stream), ("read", 300), ("reset", None)],
        "stream, then junk": [("send", stream), ("read", 300), ("send", drawn.randbytes(30))],
        "gone before an answer": [
            ("send", drawn.choice([stream, still])),
            ("wait", drawn.choice([0, 0.01, 0.05])),
            ("reset", None),
        ],
        "many idle": [("idle", 20), ("wait", 0.02), ("reset", None)],
    }
