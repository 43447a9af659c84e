"""`weft serve` as a process: it says where it listens, answers, and lets requests end when it is told to stop."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from weft.stages.model import DEMO, load
from weft.transforms.engine.generate import generate

pytest.importorskip("uvicorn")
BODY = {"prompt": "The function returns", "temperature": 0, "max_tokens": 24}


@contextmanager
def serving(*flags: str, model: Sequence[str] = ("demo",)) -> Iterator[tuple[Any, str]]:
    """A server's process and its address."""
    words = [sys.executable, "-m", "weft", "serve", *model, "--device", "cpu", "--port", "0", "--max-num-seqs", "4"]
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


def children_of(process: Any) -> list[int]:
    return [int(own) for own in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="children are read from /proc")
@pytest.mark.parametrize("dies", ["engine", "http"])
def test_neither_process_outlives_the_other(dies: str) -> None:
    with serving("--graph", "none") as (process, url):
        [child] = children_of(process)
        os.kill(process.pid if dies == "engine" else child, signal.SIGKILL)
        assert process.wait(30) != 0
        end = time.monotonic() + 30
        while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
            assert time.monotonic() < end
            time.sleep(0.05)
        with pytest.raises(urllib.error.URLError):
            post(url)


@pytest.mark.slow
def test_a_preset_has_random_weights_and_takes_token_ids() -> None:
    with serving("--graph", "none", model=("--preset", "tiny")) as (_, url):
        found = post(url, prompt=[1, 2, 3], max_tokens=5, ignore_eos=True)
        assert (found["usage"]["completion_tokens"], found["choices"][0]["text"]) == (5, "")
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(url)
        assert b"pass token ids" in refused.value.read()


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
