"""`weft serve` as a process: its address, its log, what it holds; and one request over a plain
socket."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import h11

from weft.proofs.evidence.environment import environment

_START_SECONDS = 120.0
_END_SECONDS = 30.0


@attrs.frozen(eq=False)
class ServerProcess:
    """A server that listens.

    Args:
        process: of the first, or only, rank.
        port: on 127.0.0.1.
        log: what it writes to stderr.
    """

    process: "subprocess.Popen[str]"
    port: int
    log: Path

    @property
    def url(self) -> str:
        """The address of its API."""
        return f"http://127.0.0.1:{self.port}/v1"

    def resources(self) -> dict[str, int]:
        """The resident memory in bytes, open files and threads of the engine's process and of the
        one that answers; nothing where there is no /proc. The process that compiles grammars has
        limits of its own, and is replaced."""
        totals = dict.fromkeys(("memory", "files", "threads"), 0)
        try:
            # From /proc and not by the server's own word: a leak that it does not know of must
            # show.
            for folder in (Path(f"/proc/{self.process.pid}"), *_answering(self.process.pid)):
                status = dict(
                    line.split(":", 1) for line in (folder / "status").read_text().splitlines()
                )
                totals["memory"] += int(status["VmRSS"].split()[0]) * 1024
                totals["files"] += len(os.listdir(folder / "fd"))
                totals["threads"] += int(status["Threads"])
            return totals
        except (OSError, KeyError):
            return {}

    def metrics(self) -> dict[str, float]:
        """The gauges and counters of `/metrics`, without `weft_` and labels; those of several
        labels are summed."""
        totals: dict[str, float] = {}
        for line in get(self.port, "/metrics").body.decode().splitlines():
            if line.startswith("weft_"):
                # Labels are cut off, so that a figure is of the server and not of one rank or
                # route.
                name, value = re.split(r"{[^}]*}", line.removeprefix("weft_"))
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def until_idle(self, seconds: float = 60.0) -> bool:
        """Wait until no completion runs or waits, and no page is held; False: it did not come to
        that."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            metrics = self.metrics()
            # Pages too: a request that is gone from the queue may still hold some.
            if not (metrics["running"] or metrics["waiting"] or metrics["pages_held"]):
                return True
            time.sleep(0.05)
        return False

    def stop(self, seconds: float = 60.0) -> int:
        """Send SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


def _answering(parent: int) -> list[Path]:
    """The folder in /proc of the process that answers clients for this one."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    folders = [Path(f"/proc/{child}") for child in children]
    return [folder for folder in folders if b"http_process" in (folder / "cmdline").read_bytes()]


@contextlib.contextmanager
def serving(
    *flags: str, seconds: float = _START_SECONDS, shows_log: bool = False
) -> Iterator[ServerProcess]:
    """A server on a free port of this machine, which ends with the block.

    Args:
        flags: of `weft serve`, the model among them.
        seconds: until it must listen.
        shows_log: its log and its progress bars go to stderr, and not to the file.

    Raises:
        RuntimeError: it ended before, or was too late.
    """
    # The system chooses the port, so that several runs on one machine do not meet.
    words = [sys.executable, "-m", "weft", "serve", *flags, "--port", "0"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("a") as file:
            process = subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=None if shows_log else file, text=True
            )
        # Reading a line of the process has no time limit of its own: killing it ends the wait.
        late = threading.Timer(seconds, process.kill)
        late.start()
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if " is served at http://" in line), "")
            late.cancel()
            if not line:
                raise RuntimeError(
                    f"{' '.join(words)} ended with {process.wait()}: {log.read_text()}"
                )
            yield ServerProcess(process, int(line.rsplit(":", 1)[1].split("/")[0]), log)
        finally:
            late.cancel()
            process.terminate()
            try:
                process.communicate(timeout=_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def write_record(folder: Path | None, name: str, record: Mapping[str, Any]) -> None:
    """Write a run's record as JSON, with the environment; None: nowhere."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            # Which kernels there are says nothing of a run on a CPU.
            "environment": {k: v for k, v in environment("cpu").items() if k != "ops"},
            **record,
        }
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@attrs.frozen(eq=False)
class Answer:
    """An answer over HTTP.

    Args:
        status, headers, body: as it came; names of headers in small letters.
        whole: False if the connection ended before the body did.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    whole: bool = True

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """The data of its server-sent events."""
        # Strict: whatever is not an event of data stays in the list, and is then not JSON.
        return [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part]


def request_bytes(
    path: str,
    body: bytes | None = None,
    *,
    method: str | None = None,
    headers: Sequence[tuple[str, str]] = (),
) -> bytes:
    """A request as it travels. A body comes with its length and the type of JSON."""
    lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1", "host: 127.0.0.1"]
    if body is not None:
        lines += [f"content-length: {len(body)}", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers]
    # Headers travel in Latin-1, so that an attack can have any byte in them.
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")


def connect(port: int, seconds: float = 60.0) -> socket.socket:
    """A connection to the server."""
    return socket.create_connection(("127.0.0.1", port), timeout=seconds)


def post(port: int, path: str, body: Any, **options: Any) -> Answer:
    """The answer to a body of JSON."""
    if isinstance(body, bytes):
        raw = body
    else:
        raw = json.dumps(body).encode()
    with connect(port) as connection:
        connection.sendall(request_bytes(path, raw, **options))
        return read_answers(connection)[0]


def get(port: int, path: str) -> Answer:
    """The answer to a GET."""
    with connect(port) as connection:
        connection.sendall(request_bytes(path))
        return read_answers(connection)[0]


def read_answers(
    connection: socket.socket, most: int = 1, patience: float | None = None
) -> list[Answer]:
    """Answers of a connection, at most so many; fewer, if it ends before.

    Args:
        patience: seconds until the first one, and a tenth of that for further ones; None: the first
            one must come.

    Raises:
        h11.RemoteProtocolError: something came that is not HTTP.
        TimeoutError: an answer did not go on, or without patience the first one did not come.
    """
    answers = list[Answer]()
    parser = _new_parser()
    timeout = connection.gettimeout()
    head = None
    body = bytearray()
    while len(answers) < most:
        event = parser.next_event()
        if event is h11.NEED_DATA:
            # Only between answers: one that has begun must go on.
            may_end = parser.their_state is h11.SEND_RESPONSE and (answers or patience is not None)
            if may_end:
                # Later answers are there at once or not at all, and an attack that gets fewer than
                # it may should not cost the run seconds.
                connection.settimeout((patience or 2.0) / (10 if answers else 1))
            try:
                data = connection.recv(65536)
            except ConnectionError:
                data = b""
            except TimeoutError:
                if may_end:
                    return answers
                raise
            connection.settimeout(timeout)
            if not data and parser.their_state is h11.SEND_BODY:
                assert head is not None
                # A body that breaks off is no error of HTTP here: the caller says whether it may.
                return [*answers, _answer(head, body, whole=False)]
            if not data:
                return answers
            parser.receive_data(data)
        elif isinstance(event, h11.Response):
            head = event
            body = bytearray()
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            assert head is not None
            answers.append(_answer(head, body))
            rest = parser.trailing_data[0]
            # What follows such an answer on the connection is no answer.
            if head.status_code >= 400 and dict(head.headers).get(b"connection") == b"close":
                return answers
            parser = _new_parser()
            parser.receive_data(rest or b"") if rest else None
        elif isinstance(event, h11.ConnectionClosed):
            return answers
    return answers


def _new_parser() -> h11.Connection:
    parser = h11.Connection(h11.CLIENT)
    # h11 reads an answer only after a request. What was really sent may be no HTTP, so that it gets
    # one that is.
    parser.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    parser.send(h11.EndOfMessage())
    return parser


def _answer(head: h11.Response, body: bytearray, whole: bool = True) -> Answer:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
    return Answer(head.status_code, headers, bytes(body), whole)
