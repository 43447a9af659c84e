"""`weft serve` as a process: it says where it listens, answers, and lets requests end when it is told to stop."""

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from weft.stages.model import DEMO, load
from weft.transforms.engine.generate import generate

pytest.importorskip("uvicorn")
BODY = {"prompt": "The function returns", "temperature": 0, "max_tokens": 24}


@contextmanager
def serving(*flags: str) -> Iterator[tuple[Any, str]]:
    """A server's process and its address."""
    words = [sys.executable, "-m", "weft", "serve", "demo", "--device", "cpu", "--port", "0", "--max-num-seqs", "4"]
    process = subprocess.Popen([*words, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " is served at http://127.0.0.1:" in line, process.communicate()
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.communicate()


def post(url: str, **body: Any) -> Any:
    request = urllib.request.Request(f"{url}/completions", json.dumps({**BODY, **body}).encode())
    with urllib.request.urlopen(request, timeout=60) as found:
        return json.load(found)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--pp", "2", "--transport", "local"), ("--graph", "none", "--speculate", "2")])
def test_it_answers_and_lets_requests_end(flags: tuple[str, ...]) -> None:
    [expected] = generate(load(DEMO, "cpu"), [BODY["prompt"]], max_tokens=300)
    found: list[Any] = []
    with serving(*flags) as (process, url):
        assert post(url)["choices"][0]["text"] == expected.text[:24]
        asked = threading.Thread(target=lambda: found.append(post(url, max_tokens=300)))
        asked.start()
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        asked.join(60)
        assert process.wait(30) == 0, process.stderr.read()
    assert found[0]["choices"][0]["text"] == expected.text
