"""Hostile requests in numbers: `weft serve` answers each in OpenAI's form or closes it, and is
afterwards as before.

    python -m weft.proofs.evidence.http.fuzz --cases 5000 --seed 0 --out proofs/results

Starts `weft serve demo`, attacks it (`weft.proofs.evidence.http.attacks`), and checks that it
lives, answers a known request by bits as before, holds no page, file, thread or memory more, and
wrote no traceback. It exits with 1 otherwise.
"""

import argparse
import contextlib
import itertools
import json
import os
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import h11
from tqdm.auto import tqdm

from weft.proofs.evidence.http.attacks import attacks
from weft.proofs.evidence.http.process import (
    Answer,
    ServerProcess,
    connect,
    get,
    post,
    read_answers,
    serving,
    write_record,
)
from weft.proofs.evidence.http.sockets import MAX_BODY, MAX_N, Attack

# A server so small that attacks come to its limits: few requests at once, a short queue, a small
# body.
_FLAGS = (
    *("--device", "cpu", "--graph", "full_and_piecewise", "--scheduling-policy", "priority"),
    *(
        "--max-num-seqs",
        "8",
        "--max-waiting",
        "48",
        "--max-body",
        str(MAX_BODY),
        "--max-n",
        str(MAX_N),
    ),
    *("--request-timeout", "30", "--dtype", "float32"),
)
# Greedy, and without an end of its own, so that 32 tokens with logprobs are compared.
_KNOWN = {
    "prompt": "The function returns",
    "temperature": 0,
    "max_tokens": 32,
    "logprobs": 3,
    "ignore_eos": True,
}
_AT_ONCE = 4
_EVERY = 1000
_SLOW_SECONDS = 60.0
# All errors that are the client's, or that say that the server is busy. 500 is none of them.
_EXPECTED = {400, 401, 403, 404, 405, 408, 413, 429, 504}
_MORE_MEMORY = 64 * 2**20
_MORE_FILES = 8
_MORE_THREADS = 24
# How much more the server may hold at the end than after the first attacks: memory for the grammars
# that it keeps, and 4 MiB (measured) for each graph captured meanwhile; files for the grammar
# compiler's pipes; threads for pools.
_GRAPH_MEMORY = 6 * 2**20
TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}assistant:"
_SECRET = "the secret of a file that no request may read"


@attrs.define
class Fuzzed:
    """The outcome of a run.

    Args:
        cases, seed: of the attacks.
        kinds: of the attacks.
        statuses: of the answers; `closed`: no answer came.
        failures: what went wrong, by the attack that it did with.
        resources: memory in bytes, files, threads and captured graphs of the idle server, by the
            number of attacks that it has had.
        idle_connections: how many were open while it answered a known request.
        slowest: seconds until the slowest answer, and its attack.
        log_bytes: what the server wrote to its log.
        seconds: the time that it took.
    """

    cases: int
    seed: int
    kinds: Counter[str] = attrs.field(factory=Counter)
    statuses: Counter[str] = attrs.field(factory=Counter)
    failures: list[str] = attrs.field(factory=list)
    resources: dict[int, dict[str, int]] = attrs.field(factory=dict)
    idle_connections: int = 0
    slowest: tuple[float, str] = (0.0, "")
    log_bytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        statuses = ", ".join(f"{count} {status}" for status, count in self.statuses.most_common())
        resources = "; ".join(
            f"after {count}: {entry['memory'] / 2**20:.1f} MiB, {entry['files']} files,"
            f" {entry['threads']} threads, {entry.get('captures', 0)} graphs"
            for count, entry in self.resources.items()
            if entry
        )
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
        failed = "".join(f"\n  {entry}" for entry in self.failures)
        return (
            f"{self.cases} attacks ({kinds}) in {self.seconds:.0f} s; {len(self.failures)}"
            f" failures\nanswers: {statuses}\nheld: {resources}\n{self.idle_connections} idle"
            f" connections at once; slowest answer {self.slowest[0]:.1f} s, to {self.slowest[1]};"
            f" {self.log_bytes} bytes of log{failed}"
        )

    def record(self) -> dict[str, Any]:
        """All of it for a JSON file."""
        return {**attrs.asdict(self), "flags": " ".join(_FLAGS)}


def fuzz(cases: int, seed: int = 0, idle_connections: int = 1000) -> Fuzzed:
    """Attack a server so many times.

    Args:
        idle_connections: that are opened once, in the middle.
    """
    outcome, begin, lock = Fuzzed(cases, seed), time.perf_counter(), threading.Lock()
    with contextlib.ExitStack() as stack:
        trap = stack.enter_context(_Trap())
        # A valid schema, so that a server that reads it would go on, and its text would come up in
        # an answer.
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "secret.json"
        file.write_text(json.dumps({"title": _SECRET, "const": _SECRET}))
        template = file.with_name("template.jinja")
        template.write_text(TEMPLATE)
        server = stack.enter_context(serving("demo", *_FLAGS, "--chat-template", str(template)))
        reference = _reference_answer(server)
        # Before the first attack; growth is measured from the first thousand on, when caches are
        # warm.
        outcome.resources[0] = server.resources()

        def attack(case: Attack) -> None:
            start = time.perf_counter()
            problem = ""
            statuses = list[str]()
            try:
                answers = perform(server.port, case)
                statuses = [str(each.status) for each in answers] or ["closed"]
                problem = next(filter(None, map(problem_of, answers)), "")
            # Parsed by a library and not by our own code, which could share a mistake with the
            # server's.
            except h11.RemoteProtocolError as error:
                problem = f"an answer that is not HTTP: {error}"
            except TimeoutError:
                problem = f"no answer within {_SLOW_SECONDS:g} s"
            except OSError as error:
                problem = f"{type(error).__name__}: {error}"
            seconds = time.perf_counter() - start
            with lock:
                outcome.kinds[case.kind] += 1
                outcome.statuses.update(statuses)
                outcome.slowest = max(outcome.slowest, (seconds, f"{case.kind}: {case.name}"))
                # One fault may fail thousands of attacks: the first ones say enough.
                if problem and len(outcome.failures) < 40:
                    outcome.failures.append(
                        f"{case.kind}, {case.name}: {problem}; steps {case.steps!r:.300}"
                    )

        drawn = attacks(seed, trap.address, str(file))
        pool = stack.enter_context(ThreadPoolExecutor(_AT_ONCE))
        with tqdm(total=cases, unit="attack", disable=None) as bar:
            for done in range(0, cases, _EVERY):
                count = min(_EVERY, cases - done)
                for _ in pool.map(attack, itertools.islice(drawn, count)):
                    bar.update()
                if not server.until_idle():
                    outcome.failures.append(
                        f"after {done + count} attacks requests are under way: {server.metrics()}"
                    )
                # Once is enough, and after the first attacks: there the comparison of resources
                # begins.
                if done == 0:
                    _hold_idle(server, idle_connections, outcome)
                outcome.resources[done + count] = settled(server) | {
                    "captures": int(server.metrics()["captures_total"])
                }
        _check_end(server, reference, trap, outcome)
    outcome.seconds = time.perf_counter() - begin
    return outcome


def _reference_answer(server: ServerProcess) -> Any:
    """The answer to the known request, the second time: its prompt is then in the prefix cache."""
    answers = [post(server.port, "/v1/completions", _KNOWN) for _ in range(2)]
    return [answers[-1].status, *(answers[-1].json.get(name) for name in ("choices", "usage"))]


def settled(server: ServerProcess) -> dict[str, int]:
    """The server's memory, files and threads, once it has let go of closed connections."""
    least = server.resources()
    # The server notices closed connections one by one: its open files must have stopped falling.
    for _ in range(20):
        time.sleep(0.1)
        now = server.resources()
        if now.get("files", 0) >= least.get("files", 0):
            return now
        least = now
    return least


def _hold_idle(server: ServerProcess, count: int, outcome: Fuzzed) -> None:
    """Open connections that send nothing, and ask beside them."""
    connections = list[socket.socket]()
    try:
        for _ in range(count):
            connections.append(connect(server.port))
        if (status := post(server.port, "/v1/completions", _KNOWN).status) != 200:
            outcome.failures.append(
                f"beside {count} idle connections the known request is answered by {status}"
            )
        outcome.idle_connections = len(connections)
    except OSError as error:
        outcome.failures.append(f"after {len(connections)} idle connections: {error}")
    finally:
        for connection in connections:
            connection.close()


def _check_end(server: ServerProcess, reference: Any, trap: "_Trap", outcome: Fuzzed) -> None:
    """Compare the server after the attacks with the one before."""
    fail = outcome.failures.append
    if server.process.poll() is not None:
        fail(
            "the server ended: exit code"
            f" {server.process.returncode}\n{server.log.read_text()[-3000:]}"
        )
        return
    if (now := _reference_answer(server)) != reference:
        fail(f"the known request is answered by {now!r:.500}, before by {reference!r:.500}")
    if get(server.port, "/health").status != 200:
        fail("/health does not say 200")
    if not server.until_idle():
        fail(f"requests are under way, or pages are held: {server.metrics()}")
    first = outcome.resources[min(_EVERY, outcome.cases)]
    last = settled(server)
    # Graphs are captured for classes that come up during the attacks. They are no leak: each is
    # kept once.
    memory = _MORE_MEMORY + _GRAPH_MEMORY * (
        outcome.resources[outcome.cases]["captures"] - first["captures"]
    )
    for name, more in (("memory", memory), ("files", _MORE_FILES), ("threads", _MORE_THREADS)):
        if last and last[name] > first[name] + more:
            fail(
                f"{name}: {last[name]} at the end, {first[name]} after the first"
                f" {min(_EVERY, outcome.cases)} attacks"
            )
    if outcome.resources[0] and last["files"] > outcome.resources[0]["files"] + _MORE_FILES:
        fail(f"files: {last['files']} at the end, {outcome.resources[0]['files']} before")
    if trap.calls:
        fail(f"{trap.calls} calls of the address that nobody may call")
    # A server that was attacked must still end as it should: a thread that hangs would show here.
    code = server.stop()
    log = server.log.read_text()
    outcome.log_bytes = len(log)
    if code != 0:
        fail(f"after SIGTERM the exit code is {code}")
    # An answer may be right and the log still have an error that nobody handled.
    if "Traceback" in log or _SECRET in log:
        fail(f"the log has a traceback: {log[-3000:]}")


def perform(port: int, attack: Attack) -> list[Answer]:
    """Do what an attack does; returns the answers that came.

    Raises:
        h11.RemoteProtocolError, TimeoutError: something else came, or nothing, and the connection
            did not end.
    """
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(connect(port, _SLOW_SECONDS))
        for act, value in attack.steps:
            try:
                if act == "send":
                    connection.sendall(value)
                elif act == "wait":
                    time.sleep(value)
                elif act == "read":
                    connection.recv(value)
                elif act == "half_close":
                    connection.shutdown(socket.SHUT_WR)
                elif act == "idle":
                    for _ in range(value):
                        stack.enter_context(connect(port))
                elif act == "reset":
                    connection.setsockopt(
                        # Lingering for 0 seconds makes the close a reset, as of a client that was
                        # killed.
                        socket.SOL_SOCKET,
                        socket.SO_LINGER,
                        struct.pack("ii", 1, 0),
                    )
                    return []
            except (ConnectionError, BrokenPipeError):
                break  # the server has closed it; what it said before may still be read
        # These have taken some bytes of an answer, so that what follows is no whole HTTP.
        if any(act == "read" for act, _ in attack.steps):
            with contextlib.suppress(OSError):
                while connection.recv(65536):
                    pass
            return []
        return read_answers(connection, attack.answers, attack.patience)


def problem_of(answer: Answer) -> str:
    """What is wrong with an answer; an empty text if nothing is."""
    if _SECRET.encode() in answer.body:
        return "an answer with what a file has"
    if answer.status >= 400:
        if answer.status not in _EXPECTED:
            return f"status {answer.status}: {answer.body!r:.600}"
        return _error_problem(answer.body.decode(errors="replace"), answer.headers)
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        if answer.whole:
            events = answer.events
        else:
            # The last event may have been cut.
            events = answer.events[:-1]
        for event in events:
            if event == "[DONE]":
                continue
            payload = json.loads(event)
            if "error" in payload and (problem := _error_problem(event, answer.headers, None)):
                return problem
        if not answer.whole or (events and ("[DONE]" in events[-1:] or "error" in events[-1])):
            return ""
        return "no end"
    if answer.headers.get("content-type", "").startswith("application/json") and answer.whole:
        try:
            json.loads(answer.body)
        except ValueError as error:
            return f"not JSON: {error}"
    return ""


def _error_problem(raw: str, headers: Any, kind: str | None = "application/json") -> str:
    if kind is not None and headers.get("content-type") != kind:
        return f"an error of type {headers.get('content-type')}: {raw:.300}"
    try:
        error = json.loads(raw)["error"]
        # OpenAI's clients read these four, and fail in their own code if one is missing.
        wrong = {"message", "type", "param", "code"} - error.keys() or not isinstance(
            error["message"], str
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        wrong = True
    if wrong:
        return f"an error that is not in OpenAI's form: {raw:.300}"
    return ""


class _Trap:
    """A socket that counts who calls it."""

    def __init__(self) -> None:
        # On this machine, so that a call of it needs no network, and succeeds.
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.calls = 0
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}/schema.json"

    def __enter__(self) -> "_Trap":
        # So that the thread sees that it is to end.
        self._socket.settimeout(0.2)
        self._open = True
        self._thread = threading.Thread(target=self._count, daemon=True)
        self._thread.start()
        return self

    def _count(self) -> None:
        while self._open:
            with contextlib.suppress(TimeoutError):
                self._socket.accept()[0].close()
                self.calls += 1

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._thread.join()
        self._socket.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack as often as the command line asks for, print the outcome, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=5000, help="attacks (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--idle",
        type=int,
        default=1000,
        help="connections that send nothing (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, help="the folder to write the record to (default: none)"
    )
    args = parser.parse_args(arguments)
    # The server's process inherits it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    outcome = fuzz(args.cases, args.seed, args.idle)
    print(outcome)
    write_record(args.out, "http-fuzz-cpu.json", outcome.record())
    if outcome.failures:
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
