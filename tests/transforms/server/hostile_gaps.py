"""The largest gap of an innocent stream, alone and beside grammars that take their time.

    python tests/transforms/server/hostile_gaps.py --pp 2

It prints a line for each attack: the gaps in seconds, their ratio, and how the attack was answered.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import attrs
import httpx

_TOKENS = 100
_NESTED = {"type": "regex", "regex": "(((a*)*)*)*"}
_CHAIN = {
    "type": "grammar",
    "grammar": "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}*" for i in range(8)) + '\nr8 ::= "a"*',
}
ATTACKS: dict[str, list[dict[str, Any]]] = {
    "stars within stars, n=100": [{"response_format": _NESTED, "n": 100, "max_tokens": _TOKENS}],
    "a chain of nullable rules, n=100": [{"response_format": _CHAIN, "n": 100, "max_tokens": _TOKENS}],
    "stars within stars, 20 requests": [{"response_format": _NESTED, "max_tokens": _TOKENS - i} for i in range(20)],
    "a chain of nullable rules, 20 requests": [{"response_format": _CHAIN, "max_tokens": 40 - i} for i in range(20)],
}
"""Those that are sent at once."""


@attrs.frozen
class Gaps:
    """What an innocent stream waits at most.

    Args:
        alone, attacked: seconds.
        answers: of the attack, by the code or the reason of their ends.
    """

    alone: float
    attacked: float
    answers: dict[str, int]

    @property
    def ratio(self) -> float:
        """How many times as long."""
        return self.attacked / self.alone


@contextlib.contextmanager
def serving(pp: int) -> Iterator[str]:
    """The address of a server of the small model, in processes of its own."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "weft", "serve", "demo", "--port", str(port), "--device", "cpu"]
    command += ["--pp", str(pp), "--max-waiting", "256"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            for _ in range(1200):
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(log.read().decode())
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/health").status_code == 200:
                        break
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def largest_gap(url: str, tokens: int = _TOKENS) -> float:
    """The longest time between two tokens of a stream."""
    body = {"prompt": "The function", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    gap = 0.0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
        last = None
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                gap = gap if last is None else max(gap, now - last)
                last = now
    return gap


def answer_of(url: str, body: dict[str, Any]) -> list[str]:
    """How a request ends: a code of HTTP, or the reason of each completion."""
    request = {"prompt": "b", "temperature": 1, **body}
    answer = httpx.post(f"{url}/v1/completions", json=request, timeout=300)
    if answer.status_code != 200:
        return [str(answer.status_code)]
    return [choice["finish_reason"] for choice in answer.json()["choices"]]


def measure(url: str, attack: list[dict[str, Any]], streams: int = 4) -> Gaps:
    """Follow some streams, one after the other, alone and beside an attack."""
    alone = max(largest_gap(url) for _ in range(streams))
    with concurrent.futures.ThreadPoolExecutor(len(attack)) as pool:
        sent = [pool.submit(answer_of, url, body) for body in attack]
        attacked = 0.0
        count = 0
        while count < streams or not all(each.done() for each in sent):
            attacked = max(attacked, largest_gap(url))
            count += 1
    return Gaps(alone, attacked, dict(Counter(end for each in sent for end in each.result())))


def main() -> None:
    """Measure all attacks on one server."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=1)
    with serving(parser.parse_args().pp) as url:
        warm = {"response_format": {"type": "regex", "regex": "[ab]+"}, "max_tokens": 4}
        answer_of(url, warm)
        largest_gap(url)
        for name, attack in ATTACKS.items():
            gaps = measure(url, attack)
            print(json.dumps({"attack": name, **attrs.asdict(gaps), "ratio": round(gaps.ratio, 2)}), flush=True)


if __name__ == "__main__":
    main()
