"""Hostile requests, drawn by seed: bodies, sizes, encodings, sockets, grammars, chats, sampling."""

import gzip
import json
import random
from collections.abc import Callable
from typing import Any

from weft.proofs.evidence.http.sockets import (
    CHAT,
    MAX_N,
    ROUTES,
    TEXT,
    VALID,
    Attack,
    dump,
    post,
    size_attack,
    socket_attack,
)

# Values at the edges of what a field may be: of int32, int64 and float64; numbers that JSON has no
# text for; lone surrogates, which UTF-8 cannot encode; and names of files and templates that a
# careless server would open.
_ODD: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        0.5,
        -0.0,
        1e308,
        -1e308,
        2**31,
        2**63,
        -(2**63),
        10**30,
        -(10**30),
        10**400,
    ),
    *(
        float("nan"),
        float("inf"),
        float("-inf"),
        "",
        "a",
        "\0",
        "\ud800",
        "\ud800\udc00",
        "\uffff",
        "💥",
        "a" * 3000,
    ),
    *(
        [],
        [[]],
        [None],
        [1, "a"],
        [True],
        [-1],
        [10**9],
        ["a"] * 500,
        {},
        {"": 0},
        {"a": {"b": {}}},
        {"type": "text"},
    ),
    *(
        "{{ 1/0 }}",
        "<|endoftext|>",
        "../../etc/passwd",
        "file:///etc/passwd",
        "%00",
        "__class__",
        "demo",
        "DEMO",
    ),
]
# Fields of OpenAI's API that weft does not have, or that are no field of anyone's.
_NAMES = [
    "prompt",
    "messages",
    "tools",
    "suffix",
    "best_of",
    "functions",
    "audio",
    "modalities",
    "__proto__",
    "weft",
    "",
]


def attacks(seed: int, trap: str, file: str) -> "Attacks":
    """Attacks without end.

    Args:
        trap: an address that nobody may call.
        file: the name of a file that nobody may read.
    """
    # A generator of its own, so that an attack depends on the seed alone and a failure can be
    # repeated.
    return Attacks(random.Random(seed), trap, file)


class Attacks:
    """An iterator of attacks."""

    def __init__(self, drawn: random.Random, trap: str, file: str) -> None:
        self._drawn = drawn
        self._trap = trap
        self._file = file

    def __iter__(self) -> "Attacks":
        return self

    def __next__(self) -> Attack:
        # Changed bodies most of all, since they reach every field of every route.
        kinds: dict[Callable[[], Attack], int] = {
            self._schema: 40,
            self._encoding: 14,
            lambda: size_attack(self._drawn): 8,
            lambda: socket_attack(self._drawn): 20,
            self._grammar: 8,
            self._chat: 6,
            self._sampling: 8,
        }
        [make] = self._drawn.choices([*kinds], [*kinds.values()])
        return make()

    # Bodies

    def _schema(self) -> Attack:
        """A valid body with some of its parts changed."""
        drawn = self._drawn
        path = drawn.choice(ROUTES)
        # From a valid body: random ones would all end at the first check of the schema.
        kept = {name: value for name, value in VALID[path].items() if drawn.random() < 0.7}
        # A deep copy, since `VALID` is shared by all attacks.
        body: Any = json.loads(json.dumps(kept))
        for _ in range(drawn.randint(1, 3)):
            body = self._changed(body)
        name = "changed"
        raw = dump(body)
        # JSON allows a key twice, and parsers differ in which one counts.
        if drawn.random() < 0.1 and isinstance(body, dict):
            name = "key twice"
            raw = (
                b"{"
                + dump(drawn.choice([*body, "prompt"]))
                + b":"
                + dump(drawn.choice(_ODD))
                + b","
                + raw[1:]
            )
        elif drawn.random() < 0.1:
            name = "deep"
            # Around the server's limit of 128 and Python's of 1,000 calls, and far above both.
            depth = drawn.choice([50, 127, 129, 500, 990, 5000, 30_000])
            opening, closing = drawn.choice([(b"[", b"]"), (b'{"a":', b"}")])
            # Not deeper, or the body would be refused for its size before anyone parses it.
            deep = opening * min(depth, 9000) + b"1" + closing * min(depth, 9000)
            field = drawn.choice(
                [
                    "messages",
                    "prompt",
                    "weft",
                    "response_format",
                    "chat_template_kwargs",
                    "metadata",
                ]
            )
            raw = drawn.choice(
                [
                    deep,
                    b'{"' + field.encode() + b'":' + deep + b"}",
                    b'{"messages":[' + deep + b"]}",
                ]
            )
        return post("schema", name, path, raw)

    def _changed(self, value: Any, depth: int = 0) -> Any:
        drawn = self._drawn
        if isinstance(value, dict) and value and depth < 5:
            chosen = drawn.random()
            if chosen < 0.15:
                return {**value, drawn.choice(_NAMES): drawn.choice(_ODD)}
            if chosen < 0.25:
                gone = drawn.choice([*value])
                return {name: item for name, item in value.items() if name != gone}
            if chosen < 0.95:
                name = drawn.choice([*value])
                return {**value, name: self._changed(value[name], depth + 1)}
        if isinstance(value, list) and value and depth < 5 and drawn.random() < 0.7:
            place = drawn.randrange(len(value))
            return [*value[:place], self._changed(value[place], depth + 1), *value[place + 1 :]]
        return drawn.choice(_ODD)

    def _encoding(self) -> Attack:
        drawn = self._drawn
        path = drawn.choice(ROUTES)
        # Nearly right bodies: one wrong byte in a valid one comes further than noise.
        valid = dump(VALID[path])
        place = drawn.randrange(len(valid))
        choices: dict[str, bytes] = {
            "bytes": drawn.randbytes(drawn.randint(0, 200)),
            "no UTF-8": valid[:place]
            + drawn.choice([b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5"])
            + valid[place:],
            "BOM": b"\xef\xbb\xbf" + valid,
            "UTF-16": valid.decode().encode("utf-16"),
            "UTF-32": valid.decode().encode("utf-32"),
            "surrogate": valid.replace(b"The", drawn.choice([rb"\ud800", rb"\udfff\ud800"])),
            "NUL": valid[:place] + b"\0" + valid[place:],
            "cut": valid[:place],
            "twice": valid + valid,
            "flipped": valid[:place]
            + bytes([valid[place] ^ (1 << drawn.randrange(8))])
            + valid[place + 1 :],
            "no bytes": b"",
            "number": drawn.choice(
                [b"1", b"null", b'"a"', b"[]", b"{}", b"-", b"1" * 5000, b"1e9999", b"0x1", b"'a'"]
            ),
            "form": b"prompt=The+function&max_tokens=4",
            "comments": b"/* a */" + valid,
        }
        name = drawn.choice([*choices, "gzip", "charset"])
        if name == "gzip":
            header = "content-encoding", drawn.choice(["gzip", "br", "deflate", "zz"])
            # Without a time, which would make the bytes of one seed differ from run to run.
            return post("encoding", name, path, gzip.compress(valid, mtime=0), [header])
        if name == "charset":
            kinds = (
                "text/plain",
                "application/json; charset=utf-7",
                "multipart/form-data",
                "\xff",
                "a" * 999,
            )
            return post("encoding", name, path, valid, [("content-type", drawn.choice(kinds))])
        return post("encoding", name, path, choices[name])

    # Requests

    def _grammar(self) -> Attack:
        drawn = self._drawn
        nested: dict[str, Any] = {"type": "integer"}
        for _ in range(drawn.choice([3, 40, 200])):
            nested = drawn.choice(
                [{"type": "array", "items": nested}, {"anyOf": [nested, {"type": "null"}]}]
            )
        # Those that take exponential time to match, exponential space to compile, or have no finite
        # automaton at all, such as references back and looks ahead.
        regexes = [
            *(
                "(a|a)*b",
                "((a{1,99}){1,99}){1,99}",
                "(" * 3000,
                "a{99999999999}",
                "(?=a)b",
                r"(a)\1",
                "[",
                "a\0",
            ),
            *(
                "[^a]*",
                ".*" * 50,
                "(a?){50}a{50}",
                "(((a*)*)*)*",
                "\\",
                "(?i)a",
                "[\ud800]",
                "$^",
                "a{5,2}",
            ),
        ]
        # Fifty rules that stand for a text of 2**50 letters: to write it out is to run out of
        # memory.
        doubling = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(50))
        grammars = [
            *(
                "root ::= root",
                "root ::= a\na ::= root",
                "root ::=",
                "",
                "x ::= 1",
                'root ::= "a"{1,99999999}',
                "\0",
            ),
            *(
                'root ::= root root | "a" | ""',
                "root ::= " + "(" * 3000,
                'root ::= [^"]* "\\x00"',
                "root ::= [\\ud8",
            ),
            f'root ::= r0\n{doubling}\nr50 ::= "a"',
        ]
        if drawn.random() < 0.03:  # these take their whole time
            chain = "\n".join(f'r{i} ::= r{i + 1} | "{i}"' for i in range(2500))
            grammars = [f'root ::= r0\n{chain}\nr2500 ::= "a"']
        # Each refers to the other, so that a search that follows references never ends.
        loop = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
        schemas: list[Any] = [
            *(
                # A server that follows it calls an address, or reads a file, that a client has
                # chosen.
                {"$ref": self._trap},
                {"$ref": f"file://{self._file}"},
                {"$ref": self._file},
                {"$ref": "#"},
                {"$ref": 1},
            ),
            *({"$defs": loop, "$ref": "#/$defs/a"}, {"$ref": "#/a/b"}),
            *(
                {"$schema": self._trap, "$id": self._trap, "$ref": "b.json"},
                {"allOf": [{"$ref": self._trap}]},
                False,
            ),
            *(
                {"type": "string", "pattern": drawn.choice(regexes)},
                {"enum": ["\ud800"]},
                {"enum": ["a" * 400] * 50},
            ),
            *(
                {"type": "array", "minItems": 10**9},
                {"type": "string", "maxLength": 10**9},
                {"const": 10**400},
                nested,
            ),
            *(
                {"type": "object", "properties": {f"p{i}": nested for i in range(20)}},
                {"type": ["x"]},
                {"not": {}},
            ),
            *(
                {"type": "integer", "minimum": -(10**300)},
                {"type": "number", "maximum": 1e-300},
                {"properties": 1},
            ),
            {"type": "object", "patternProperties": {drawn.choice(regexes): {}}},
        ]
        form: dict[str, Any] = drawn.choice(
            [
                {"type": "regex", "regex": drawn.choice(regexes)},
                {"type": "grammar", "grammar": drawn.choice(grammars)},
                *[
                    {
                        "type": "json_schema",
                        "json_schema": {"name": "a", "schema": drawn.choice(schemas)},
                    }
                ]
                * 3,
                {
                    "type": "json_schema",
                    "json_schema": self._changed({"name": "a", "schema": drawn.choice(schemas)}),
                },
                self._changed(
                    {
                        "type": "json_schema",
                        "json_schema": {"name": "a", "schema": {"type": "object"}},
                    }
                ),
            ]
        )
        kind = form.get("type") if isinstance(form, dict) else "other"
        # Few tokens: what is attacked is the compiler of grammars, not the model.
        body = {**TEXT, "max_tokens": 8, "response_format": form, "stream": drawn.random() < 0.3}
        return post("grammar", str(kind)[:12], "/v1/completions", body)

    def _chat(self) -> Attack:
        drawn = self._drawn
        role = drawn.choice(
            ["user", "system", "assistant", "tool", "", None, 1, "{{ 1/0 }}", "u" * 999]
        )
        text = {"type": "text", "text": "a"}
        content: Any = drawn.choice(
            [
                *(
                    "{{ ''.__class__.__mro__ }}",
                    "{% for i in range(10**9) %}{% endfor %}",
                    "\0",
                    "\ud800",
                    "",
                    "a" * 3000,
                ),
                *(
                    None,
                    1,
                    True,
                    text,
                    [text] * 99,
                    [{"type": "image_url"}],
                    [{**text, "text": None}],
                    [[]],
                    [1],
                    ["a"],
                ),
                *({"a": {"b": 1}}, "<|im_end|>", [{**text, "text": "\ud800"}], "Hello", "Hello"),
            ]
        )
        message: Any = {"role": role, "content": content}
        if drawn.random() < 0.3:
            message = self._changed({**message, "tool_calls": [{"id": "a"}], "name": "x"})
        # Chat templates define these names themselves; `a b` is not a valid name.
        variables = drawn.choice(
            [{}, {}, {"messages": 1}, {"bos_token": "x"}, {"self": 1}, {"a b": 1}, {"range": 1}]
        )
        messages = [message] * drawn.choice([1, 1, 2, 300])
        body = {
            **CHAT,
            "messages": messages,
            "chat_template_kwargs": variables,
            "stream": drawn.random() < 0.3,
        }
        return post("chat", "message", drawn.choice(["/v1/chat/completions", "/tokenize"]), body)

    def _sampling(self) -> Attack:
        drawn = self._drawn
        # Stops are searched in every text: many of them, and long ones, make that slow.
        many = [chr(97 + i % 26) + str(i) for i in range(2000)]
        options: dict[str, Any] = {
            "stop": drawn.choice(
                [["a" * 9000], many, [""], ["\ud800"], ["a"] * 99, "a", [1], "zzz"]
            ),
            "n": drawn.choice([MAX_N, MAX_N + 1, 0, -1, 10**9]),
            "logprobs": drawn.choice([0, 5, 6, -1, 10**9]),
            "prompt_logprobs": drawn.choice([0, 5, 6, -1]),
            "logit_bias": {
                str(i): drawn.choice([-100, 100, 1e30, 0])
                for i in range(drawn.choice([5, 300, 3000]))
            },
            "allowed_token_ids": drawn.choice([[5], [], [10**9], [5] * 5000]),
            "stop_token_ids": drawn.choice([[5] * 5000, [10**9], [-1]]),
            "temperature": drawn.choice([0, 1e-9, 1e9, 1e308]),
            "top_p": drawn.choice([0, 1e-9, 1, 1.1]),
            "top_k": drawn.choice([1, -1, 10**9, -2]),
            "min_p": drawn.choice([0, 1, 1.1]),
            "repetition_penalty": drawn.choice([1e-9, 1e9, 0, 1e308]),
            "presence_penalty": drawn.choice([1e9, -1e9, 1e308]),
            "seed": drawn.choice([0, -1, 2**63, 10**30]),
            "priority": drawn.choice([-(10**30), 10**30]),
            "min_tokens": drawn.choice([4, 5, 10**9]),
            "max_tokens": drawn.choice([1, 10**9, 2**63, None]),
            "echo": True,
            "stream": True,
        }
        chosen = {name: options[name] for name in drawn.sample([*options], drawn.randint(1, 4))}
        body = {**TEXT, **chosen}
        if body["max_tokens"] is None:
            # Without a limit of tokens a completion goes on to the end of the context; this ends
            # most of them early, so that the run is not spent on waiting.
            body["stop_token_ids"] = [*range(300)]
        return post("sampling", "+".join(sorted(chosen))[:40], "/v1/completions", body)
