"""One SIGTERM ends a server, whatever it is busy with, within the seconds that the modules below
name."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.proofs.evidence.http.process import (
    Answer,
    ServerProcess,
    get,
    post,
    read_answers,
    request_bytes,
    serving,
)
from weft.transforms.server.host import GIVE_UP_SECONDS, STILL_SECONDS
from weft.transforms.server.listening import SHUTDOWN_SECONDS

pytest.importorskip("uvicorn")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux", reason="sends signals, and replaces a method in other processes"
    ),
]
NIGHTLY = pytest.mark.nightly
# What starting and ending processes takes on a machine that is busy, beside the seconds of a
# server's own.
BUSY_SECONDS = 60.0
FLAGS = ("demo", "--device", "cpu", "--graph", "none", "--max-num-seqs", "4")
TEXT = {"prompt": "The function returns", "temperature": 0, "max_tokens": 4}
LOOP = (
    "{% for m in messages %}{% if m.content == 'loop' %}{% for a in range(99999) %}{% for b in"
    " range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ m.content }}{% endfor %}"
)
SLOW_GRAMMAR = {
    "type": "grammar",
    "grammar": (
        "root ::= r0\n"
        + "\n".join(f'r{i} ::= r{i + 1} | "{i}"' for i in range(3000))
        + '\nr3000 ::= "a"'
    ),
}


@contextlib.contextmanager
def clients(server: ServerProcess, path: str, body: Any, count: int) -> Iterator[None]:
    """So many clients that ask, and may be left without an answer."""

    def ask() -> None:
        with contextlib.suppress(OSError, IndexError):
            post(server.port, path, body)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    assert all(thread.is_alive() for thread in threads)
    yield
    for thread in threads:
        thread.join(BUSY_SECONDS)
        assert not thread.is_alive()


def stopped(server: ServerProcess) -> tuple[int, float]:
    """The exit code after one SIGTERM, and the seconds until it came."""
    begin = time.monotonic()
    code = server.stop(GIVE_UP_SECONDS + STILL_SECONDS + BUSY_SECONDS)
    return code, time.monotonic() - begin


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(LOOP, encoding="utf-8")
    return str(path)


def busy(server: ServerProcess, kind: str) -> contextlib.AbstractContextManager[Any]:
    """Something that a server is busy with."""
    if kind == "template":
        body = {"messages": [{"role": "user", "content": "loop"}], "max_tokens": 1}
        return clients(server, "/v1/chat/completions", body, 2)
    if kind == "grammar":
        return clients(server, "/v1/completions", {**TEXT, "response_format": SLOW_GRAMMAR}, 2)
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9\r\n\r\n{"
        * (kind == "body")
    )
    return connection


@pytest.mark.parametrize(
    "kind",
    [
        "template",
        pytest.param("grammar", marks=NIGHTLY),
        pytest.param("body", marks=NIGHTLY),
        "head",
    ],
)
@pytest.mark.parametrize("pp", ["1", pytest.param("2", marks=NIGHTLY)])
def test_one_signal_ends_a_server_that_is_busy_for_a_client(
    kind: str, pp: str, template: str
) -> None:
    with serving(*FLAGS, "--pp", pp, "--chat-template", template, seconds=300) as server:
        assert post(server.port, "/v1/completions", TEXT).status == 200
        with busy(server, kind):
            assert get(server.port, "/health").status == 200
            code, seconds = stopped(server)
        assert code == 0
        assert seconds < SHUTDOWN_SECONDS + BUSY_SECONDS / 2
        log = server.log.read_text()
    assert "SIGTERM: 0 completions under way may end" in log
    assert "Traceback" not in log


STANDS_STILL = """
import os, sys, time
if not any("http_process" in word or "chat_jinja" in word for word in sys.orig_argv):
    from weft.transforms.engine.engine import Engine

    step = Engine.step

    def stands_still(engine):
        while os.path.exists({flag!r}):
            time.sleep(0.1)
        return step(engine)

    Engine.step = stands_still
"""


@pytest.mark.parametrize("pp", ["1", pytest.param("2", marks=NIGHTLY)])
def test_an_engine_that_stands_still_is_told_by_its_health_and_ended_by_one_signal(
    pp: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "stands_still"
    (tmp_path / "sitecustomize.py").write_text(
        STANDS_STILL.format(flag=str(flag)), encoding="utf-8"
    )
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )
    with serving(*FLAGS, "--pp", pp, "--timeout", "300", seconds=300) as server:
        assert post(server.port, "/v1/completions", TEXT).status == 200
        assert get(server.port, "/health").status == 200
        flag.touch()
        with clients(server, "/v1/completions", TEXT, 2):
            health = get(server.port, "/health")
            assert health.status == 503
            assert health.json["error"]["code"] == "engine_stands_still"
            code, seconds = stopped(server)
        assert code != 0
        assert seconds < GIVE_UP_SECONDS + STILL_SECONDS + BUSY_SECONDS / 2
        log = server.log.read_text()
    assert "SIGTERM: 2 completions under way may end" in log
    assert "error: the engine stands still; completions under way are given up" in log
    assert f"error: the engine stood still for {STILL_SECONDS:g} s more, and was given up" in log


def test_of_two_servers_that_start_together_on_one_port_one_serves() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "weft", "serve", *FLAGS, "--port", f"{port}"]
    both = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        end = time.monotonic() + 300
        while not (refused := [each for each in both if each.poll() is not None]):
            assert time.monotonic() < end
            time.sleep(0.1)
        assert len(refused) == 1
        [serves] = [each for each in both if each not in refused]
        said = refused[0].communicate()[1]
        assert refused[0].returncode == 2
        assert f"weft serve --host 127.0.0.1 --port {port}\n  saw: Address already in use" in said
        assert "Traceback" not in said
        assert serves.stdout is not None
        assert f" is served at http://127.0.0.1:{port}/v1" in serves.stdout.readline()
        assert post(port, "/v1/completions", TEXT).status == 200
        serves.send_signal(signal.SIGTERM)
        assert serves.wait(BUSY_SECONDS) == 0
        assert "Traceback" not in serves.communicate()[1]
    finally:
        for each in both:
            each.kill()
            each.communicate()


def hosted(port: int, host: str) -> Answer:
    """The answer to a completion that names a host."""
    raw = request_bytes("/v1/completions", json.dumps(TEXT).encode()).replace(
        b"host: 127.0.0.1", f"host: {host}".encode()
    )
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(raw)
        [answer] = read_answers(connection)
    return answer


@pytest.mark.nightly
def test_a_host_that_is_not_this_machine_is_refused_by_a_server() -> None:
    with serving(*FLAGS, seconds=300) as server:
        for host in ("[::1].evil", "[::1].evil:80", "localhost.evil", "evil"):
            answer = hosted(server.port, host)
            assert (answer.status, answer.json["error"]["code"]) == (403, "forbidden_host"), host
        for host in ("[::1]", f"localhost:{server.port}", "127.0.0.1"):
            assert hosted(server.port, host).status == 200, host
