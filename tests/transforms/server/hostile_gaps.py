"""The largest gap of an innocent stream, alone and beside attacks, on a server in processes of its
own.

    python tests/transforms/server/hostile_gaps.py --pp 2 --out build/nightly

It follows streams beside an attack and alone by turns, so that both have the same load of the
machine, and prints a line of JSON for each attack: the gaps in seconds, how often the attack was
answered how, and what other innocents waited. It says on stderr how far it is: with two stages on
two busy processors a round takes half a minute.

The exit status is 1 if an attack lets a stream wait longer than `--ratio` times as long as alone;
if it lets another innocent wait longer than ANSWER_SECONDS; or if an innocent is refused, or told
something else than alone. Where an attack's requests are answered, so that the steps have more
rows, its gap may also be as long as beside as many requests without a grammar, and a fourth. A gap
above the ratio counts if the largest of all rounds and the median of the rounds' largest are above
it: one of them may be a pause of the machine.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import httpx

from weft.proofs.evidence.http.process import ServerProcess, serving, write_record

# An innocent chat, and one with a grammar that was compiled before, must be answered within these.
# Alone they take a tenth of a second; beside loops a chat waits until one of them has had its time.
ANSWER_SECONDS = 10.0
_TOKENS = 60
# One client for all. A new one reads the machine's certificates, which took this process 47 ms, in
# which it sees no token of the stream that it follows.
_CLIENT = httpx.Client(verify=False, timeout=300, limits=httpx.Limits())
_NESTED = {"type": "regex", "regex": "(((a*)*)*)*"}
_AMBIGUOUS = {"type": "grammar", "grammar": 'root ::= root root | "a" | "ab" | "b"'}
_QUICK = {"type": "regex", "regex": "[ab]+"}
_TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'loop' %}{% for a in range(99999) %}{% for b in"
    " range(99999) %}{% endfor %}{% endfor %}{% elif m.content == 'memory' %}{{ m.content *"
    " 300000000 }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"


def slow_grammar(seed: int) -> dict[str, Any]:
    """A grammar that takes longer to compile than it may."""
    rules = "\n".join(f'r{i} ::= r{i + 1} | "{seed}{i}"' for i in range(3000))
    return {"type": "grammar", "grammar": f'root ::= r0\n{rules}\nr3000 ::= "a"'}


# Attacks
# --------------------------------------------------------------------------------------------------------------


def completed(url: str, body: dict[str, Any]) -> list[str]:
    """How a request ends: a code of HTTP, or the reason of each completion."""
    request = {"prompt": "b", "temperature": 1, **body}
    answer = _CLIENT.post(f"{url}/v1/completions", json=request)
    if answer.status_code != 200:
        return [str(answer.status_code)]
    return [choice["finish_reason"] for choice in answer.json()["choices"]]


def chatted(url: str, content: str) -> list[str]:
    """The code of a chat."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0}
    return [str(_CLIENT.post(f"{url}/v1/chat/completions", json=body).status_code)]


def unfinished(url: str, sent: bytes, more: bytes, seconds: float = 8.0) -> list[str]:
    """The code of a request that does not end, or `none` if it has no answer."""
    place = httpx.URL(url)
    with socket.create_connection((place.host, place.port), timeout=60) as connection:
        end = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            connection.sendall(sent)
            while time.monotonic() < end:
                connection.sendall(more)
                time.sleep(0.05)
        connection.settimeout(0.1)
        with contextlib.suppress(OSError):
            return [connection.recv(4096).split()[1].decode()]
    return ["none"]


Request = Callable[[str], list[str]]


def completions(bodies: Sequence[dict[str, Any]]) -> list[Request]:
    """Requests with these bodies."""
    return [functools.partial(completed, body=body) for body in bodies]


_BODY = _HEAD + b"content-length: 4000000\r\n\r\n" + b" " * 3_900_000
# Requests that are sent at once.
ATTACKS: dict[str, list[Request]] = {
    "stars within stars, n=100": completions(
        [{"response_format": _NESTED, "n": 100, "max_tokens": 100}]
    ),
    "stars within stars, n=100, 400 tokens": completions(
        [{"response_format": _NESTED, "n": 100, "max_tokens": 400}]
    ),
    "an ambiguous grammar, n=100": completions(
        [{"response_format": _AMBIGUOUS, "n": 100, "max_tokens": 100}]
    ),
    "stars within stars, 20 requests": completions(
        [{"response_format": _NESTED, "max_tokens": 100 - i} for i in range(20)]
    ),
    "an ambiguous grammar, 20 requests": completions(
        [{"response_format": _AMBIGUOUS, "max_tokens": 40 - i} for i in range(20)]
    ),
    "grammars that take their whole time": completions(
        [{"response_format": slow_grammar(i)} for i in range(3)]
    ),
    "chat templates that loop": [lambda url: chatted(url, "loop") for _ in range(12)],
    "chat templates that fill the memory": [lambda url: chatted(url, "memory") for _ in range(12)],
    "bodies that do not end": [lambda url: unfinished(url, _BODY, b" ") for _ in range(80)],
    "heads that do not end": [lambda url: unfinished(url, _HEAD, b"a: b\r\n") for _ in range(80)],
}
# Requests that are no attack. Steps of more rows take longer: the gaps beside them say what as much
# load costs by itself, and have no limit.
ORDINARY: dict[str, list[Request]] = {
    "20 requests without a grammar": completions(
        [{"max_tokens": 100 - i, "ignore_eos": True} for i in range(20)]
    ),
    "n=100 without a grammar": completions([{"n": 100, "max_tokens": 100, "ignore_eos": True}]),
    "a quick grammar, n=100": completions(
        [{"response_format": _QUICK, "n": 100, "max_tokens": 100}]
    ),
}
# The ordinary requests that are as much load as an attack whose requests are answered.
AS_MUCH_LOAD = {
    "stars within stars, n=100": "n=100 without a grammar",
    "stars within stars, n=100, 400 tokens": "n=100 without a grammar",
    "stars within stars, 20 requests": "20 requests without a grammar",
    "an ambiguous grammar, 20 requests": "20 requests without a grammar",
}


# Innocents
# ------------------------------------------------------------------------------------------------------------


@attrs.define
class Innocents:
    """What innocents saw in some time.

    Args:
        gap: the longest time between two tokens of a stream.
        answers: seconds in which others were answered, by their kind.
        wrong: what was not as it is alone.
    """

    gap: float = 0.0
    answers: dict[str, float] = attrs.field(factory=dict)
    wrong: list[str] = attrs.field(factory=list)

    def follow(self, url: str, tokens: int = _TOKENS) -> str:
        """Follow a stream; returns its text."""
        body = {
            "prompt": "The function",
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        text = ""
        with _CLIENT.stream("POST", f"{url}/v1/completions", json=body) as answer:
            last = None
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    if last is not None:
                        self.gap = max(self.gap, now - last)
                    last = now
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    def ask(self, url: str) -> None:
        """Ask for a chat, and for what has a grammar that was compiled before."""
        for kind, ask in (
            ("chat", lambda: chatted(url, "a")),
            (
                "grammar",
                lambda: completed(url, {"response_format": _QUICK, "max_tokens": 4, "n": 1}),
            ),
        ):
            begin = time.perf_counter()
            answer = ask()
            self.answers[kind] = max(self.answers.get(kind, 0.0), time.perf_counter() - begin)
            if answer[0] not in ("200", "stop", "length"):
                self.wrong.append(f"{kind}: {answer[0]}")

    def turn(self, url: str, expected: str) -> None:
        """One of each."""
        text = self.follow(url)
        if text != expected:
            self.wrong.append(f"stream: {text!r:.100}")
        self.ask(url)


@attrs.frozen
class Round:
    """Innocents beside an attack, and as many alone.

    Args:
        attacked, alone: what they saw.
        ends: of the attack, by the code or the reason.
    """

    attacked: Innocents
    alone: Innocents
    ends: Counter[str]


def measure_round(url: str, attack: Sequence[Request], expected: str, turns: int) -> Round:
    """Follow innocents, one after the other, beside an attack as long as it goes on, and then as
    many alone."""
    attacked = Innocents()
    alone = Innocents()
    count = 0
    with concurrent.futures.ThreadPoolExecutor(len(attack)) as pool:
        sent = [pool.submit(request, url) for request in attack]
        while count < turns or not all(each.done() for each in sent):
            attacked.turn(url, expected)
            count += 1
    for _ in range(count):
        alone.turn(url, expected)
    return Round(attacked, alone, Counter(end for each in sent for end in each.result()))


def verdict(
    name: str, rounds: Sequence[Round], ratio: float, load: Sequence[Round] = ()
) -> dict[str, Any]:
    """The record of an attack, or of ordinary requests; `load` has the rounds of ordinary ones that
    are as much load as the attack."""
    alone = [each.alone.gap for each in rounds]
    attacked = [each.attacked.gap for each in rounds]
    ratios = {
        "largest": max(attacked) / max(alone),
        "median": statistics.median(attacked) / statistics.median(alone),
    }
    answers = Counter[str]()
    for each in rounds:
        answers |= Counter(each.attacked.answers)
    wrong = [words for each in rounds for words in (*each.attacked.wrong, *each.alone.wrong)]
    late = [kind for kind, seconds in answers.items() if seconds > ANSWER_SECONDS]
    if load:
        ratios["as much load"] = max(attacked) / max(each.attacked.gap for each in load)
    is_short = (
        name in ORDINARY
        or min(ratios["largest"], ratios["median"]) <= ratio
        or ratios.get("as much load", 2.0) <= 1.25
    )
    return {
        "attack": name,
        "alone": [round(each.alone.gap, 3) for each in rounds],
        "attacked": [round(each.attacked.gap, 3) for each in rounds],
        "ratio": {kind: round(value, 2) for kind, value in ratios.items()},
        "ends": dict(sum((each.ends for each in rounds), Counter())),
        "others": {kind: round(seconds, 2) for kind, seconds in answers.items()},
        "wrong": wrong[:5],
        "holds": not wrong and not late and is_short,
    }


@contextlib.contextmanager
def attacked_server(pp: int) -> Iterator[ServerProcess]:
    """A server of the small model with a template that loops when it is told to."""
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(_TEMPLATE, encoding="utf-8")
        flags = ["demo", "--device", "cpu", "--pp", f"{pp}", "--max-waiting", "256"]
        with serving(*flags, "--chat-template", f"{template}", seconds=600.0) as server:
            yield server


def say(text: str, start: float = time.monotonic()) -> None:
    """Say how far it is."""
    print(f"{time.monotonic() - start:7.1f} s  {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Measure all attacks on one server; see above."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=2, help="innocents of a round, at least")
    parser.add_argument("--ratio", type=float, default=2.0)
    parser.add_argument("--attack", default="", help="those whose name holds this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    # So that the server is ended too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = {
        name: attack for name, attack in (ORDINARY | ATTACKS).items() if options.attack in name
    }
    rounds_by_name = dict[str, Sequence[Round]]()
    say(f"starting a server of {options.pp} stages")
    records = list[dict[str, Any]]()
    with attacked_server(options.pp) as server:
        url = f"http://127.0.0.1:{server.port}"
        say("it listens; the first grammar, chat and stream")
        first = Innocents()
        first.ask(url)
        expected = first.follow(url)
        for number, (name, attack) in enumerate(chosen.items(), 1):
            rounds = list[Round]()
            for _ in range(options.rounds):
                rounds.append(measure_round(url, attack, expected, options.turns))
                gaps = (
                    f"{rounds[-1].attacked.gap:.3f} s beside it, {rounds[-1].alone.gap:.3f} s alone"
                )
                say(
                    f"{number}/{len(chosen)}  {name}, round {len(rounds)} of {options.rounds}:"
                    f" {gaps}"
                )
            rounds_by_name[name] = rounds
            load = rounds_by_name.get(AS_MUCH_LOAD.get(name, ""), ())
            records.append(verdict(name, rounds, options.ratio, load))
            print(json.dumps(records[-1]), flush=True)
        if not server.until_idle():
            say("the server did not come to rest")
            records.append({"attack": "all", "holds": False})
    write_record(
        options.out,
        f"hostile_gaps_pp{options.pp}.json",
        {"ratio": options.ratio, "attacks": records},
    )
    failed = [record["attack"] for record in records if not record["holds"]]
    say(
        f"{len(records) - len(failed)} of {len(records)} hold"
        + "".join(f"; not: {name}" for name in failed)
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
