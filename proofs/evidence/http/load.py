"""A mixed load on `weft serve`: nothing is lost, and each completion is the one that it is alone.

    python -m weft.proofs.evidence.http.load --minutes 30 --out proofs/results

Clients of all kinds at once, on a server so small that requests are preempted and refused: streams,
whole answers, chats, structured answers, several completions, logprobs, slow readers, clients that
go, and malformed requests. The answers are compared with those of the idle server. It exits with 1
if one differs or is lost, or if the server holds pages, files, threads or memory at the end.
"""

import argparse
import contextlib
import json
import os
import random
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

import attrs

from weft.proofs.evidence.http.attacks import attacks
from weft.proofs.evidence.http.catalogue import Asked, Said, catalogue, said
from weft.proofs.evidence.http.fuzz import TEMPLATE, perform, problem_of, settled
from weft.proofs.evidence.http.process import (
    ServerProcess,
    connect,
    post,
    read_answers,
    request_bytes,
    serving,
    write_record,
)

# 18 pages for up to 6 requests of 256 tokens are too few, so that requests are preempted; a queue
# of 8 is too short for all clients, so that some are refused.
_FLAGS = (
    *("--device", "cpu", "--graph", "full_and_piecewise", "--scheduling-policy", "priority"),
    *(
        "--max-num-seqs",
        "6",
        "--max-waiting",
        "8",
        "--max-num-tokens",
        "64",
        "--max-model-len",
        "256",
    ),
    *("--dtype", "float32", "--num-pages", "18", "--max-n", "16", "--max-body", "65536"),
)
# Together more than run and wait at once.
_CLIENTS = {"whole": 4, "stream": 4, "quick": 2, "slow": 3, "gone": 2, "malformed": 1}
# Parts of the run; in every second one, slow readers rest.
_WINDOWS = 20
_MORE_MEMORY = 48 * 2**20


@attrs.define
class Loaded:
    """The outcome of a run.

    Args:
        minutes, seed: of the run.
        requests: that were answered in whole, by the kind of client.
        kinds: of these requests.
        refused: answers with status 429, each of which was asked again.
        gone: clients that went before their answer.
        malformed: answers to malformed requests, by status.
        differences: answers that differ from those alone, or that were lost.
        preempted: how often a request gave up its pages.
        quick_seconds: medians and 95th percentiles of the latency of quick requests, with slow
            readers and without.
        resources: memory in bytes, files and threads, by the second of the run.
        seconds: of the whole run.
    """

    minutes: float
    seed: int
    requests: Counter[str] = attrs.field(factory=Counter)
    kinds: Counter[str] = attrs.field(factory=Counter)
    refused: int = 0
    gone: int = 0
    malformed: Counter[str] = attrs.field(factory=Counter)
    differences: list[str] = attrs.field(factory=list)
    preempted: int = 0
    quick_seconds: dict[str, list[float]] = attrs.field(factory=dict)
    resources: dict[int, dict[str, int]] = attrs.field(factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        usages = [entry for entry in self.resources.values() if entry]
        memory = ", ".join(f"{entry['memory'] / 2**20:.0f}" for entry in usages)
        return (
            f"{self.requests.total()} answers in {self.seconds:.0f} s ({dict(self.requests)}),"
            f" {self.refused} refused and asked again, {self.gone} clients gone,"
            f" {self.malformed.total()} malformed; {self.preempted} preemptions;"
            f" {len(self.differences)} differences\nquick requests, median and 95th percentile:"
            f" {self.quick_seconds}\nMiB: {memory}"
            + "".join(f"\n  {entry}" for entry in self.differences)
        )

    def record(self) -> dict[str, Any]:
        """All of it for a JSON file."""
        return {**attrs.asdict(self), "flags": " ".join(_FLAGS), "clients": _CLIENTS}


class _Load:
    """The clients of a run, and what they have seen."""

    def __init__(
        self, server: ServerProcess, outcome: Loaded, requests: Sequence[Asked], seconds: float
    ) -> None:
        self.server = server
        self.outcome = outcome
        self.requests = requests
        # By the same server before the load, and not by another one: the weights and the build are
        # the same, and only the company differs.
        self.alone = [self._alone(request) for request in requests]
        self.quick = [place for place, request in enumerate(requests) if request.kind == "quick"]
        self.lock = threading.Lock()
        self.latencies = {"with slow readers": [0.0], "without": [0.0]}
        for latencies in self.latencies.values():
            latencies.clear()
        self.begin = time.monotonic()
        self.end = self.begin + seconds
        self.window = seconds / _WINDOWS

    def _alone(self, request: Asked) -> list[Said]:
        answer = post(self.server.port, request.path, request.body)
        if answer.status != 200:
            raise RuntimeError(f"{request} alone: {answer.status} {answer.body!r:.500}")
        return said(answer)

    def slow_readers_rest(self) -> bool:
        """Whether this is a part of the run without them."""
        return int((time.monotonic() - self.begin) / self.window) % 2 == 1

    def run(self, kind: str, number: int) -> None:
        """One client, until the end of the run."""
        # One generator for each client: threads that share one would draw in an order that no seed
        # repeats.
        drawn = random.Random(f"{self.outcome.seed} {kind} {number}")
        act = {"gone": self._go, "malformed": self._malform}.get(kind)
        while time.monotonic() < self.end:
            if kind == "slow" and self.slow_readers_rest():
                time.sleep(0.1)
                continue
            try:
                act(drawn) if act is not None else self._ask(kind, drawn)
            # A client that fails must not end its thread, or the load would fall without anyone
            # noticing.
            except Exception as error:
                self._differ(f"{kind}: {type(error).__name__}: {error}")
            time.sleep(drawn.random() * 0.05)

    def _differ(self, what: str) -> None:
        with self.lock:
            if len(self.outcome.differences) < 40:
                self.outcome.differences.append(what[:600])

    def _ask(self, kind: str, drawn: random.Random) -> None:
        """Ask, again while refused, and compare."""
        if kind == "quick":
            place = drawn.choice(self.quick)
        else:
            place = drawn.randrange(len(self.requests))
        request = self.requests[place]
        streams = kind in ("stream", "slow")
        # The same request, whole or as a stream, has the same right answer.
        raw = request_bytes(request.path, json.dumps({**request.body, "stream": streams}).encode())
        while True:
            start = time.monotonic()
            # At the start of the request, since it may end in another window.
            rests = self.slow_readers_rest()
            with connect(self.server.port, 120.0) as connection:
                if kind == "slow":
                    # A small buffer, so that the server's writes to this client have to wait, and
                    # nobody else's may.
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.sendall(raw)
                if kind == "slow":
                    time.sleep(drawn.random() * 2.0)
                [answer] = read_answers(connection)
            if answer.status != 429:
                break
            with self.lock:
                self.outcome.refused += 1
            # Refused, and the run is over: it was never accepted, so that nothing is lost.
            if time.monotonic() > self.end:
                return
            # Not all at once, or the same clients would be refused again and again.
            time.sleep(float(answer.headers["retry-after"]) * drawn.random())
        seconds = time.monotonic() - start
        if answer.status != 200 or not answer.whole:
            self._differ(
                f"{request} got {answer.status}, whole: {answer.whole}: {answer.body!r:.300}"
            )
            return
        for index, (one, alone) in enumerate(zip(said(answer), self.alone[place], strict=True)):
            if difference := one.difference(alone):
                self._differ(f"{request}, choice {index} of a {kind}: {difference}")
        with self.lock:
            self.outcome.requests[kind] += 1
            self.outcome.kinds[request.kind] += 1
            if kind == "quick":
                self.latencies["without" if rests else "with slow readers"].append(seconds)

    def _go(self, drawn: random.Random) -> None:
        """Ask, and go: while waiting, before the first token, or in the middle."""
        request = self.requests[drawn.randrange(len(self.requests))]
        raw = request_bytes(
            request.path, json.dumps({**request.body, "stream": drawn.random() < 0.7}).encode()
        )
        with connect(self.server.port) as connection:
            connection.sendall(raw)
            if drawn.random() < 0.5:
                # In the head of the answer, or in the middle of its events.
                connection.recv(drawn.choice([10, 400, 2000]))
            else:
                time.sleep(drawn.random() * 0.2)
            if drawn.random() < 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with self.lock:
            self.outcome.gone += 1

    def _malform(self, drawn: random.Random) -> None:
        attack = next(
            candidate
            for candidate in attacks(drawn.randrange(10**9), "http://127.0.0.1:9/", "none")
            # Grammars may take the compiler its whole time limit, which would hold up the requests
            # that are compared.
            if candidate.kind != "grammar"
        )
        try:
            answers = perform(self.server.port, attack)
        except (
            TimeoutError
        ):  # a body that is still valid waits in the queue, last in it if its priority says so
            answers = []
            with self.lock:
                self.outcome.malformed["waits"] += 1
        for answer in answers:
            with self.lock:
                self.outcome.malformed[str(answer.status)] += 1
            if problem := problem_of(answer):
                self._differ(f"malformed, {attack.name}: {problem}")


def load(minutes: float, seed: int = 0, num_requests: int = 150) -> Loaded:
    """Put a server under load for so long.

    Args:
        num_requests: different ones, each of which is asked alone first.
    """
    outcome = Loaded(minutes, seed)
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        template = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "template.jinja"
        template.write_text(TEMPLATE)
        server = stack.enter_context(serving("demo", *_FLAGS, "--chat-template", str(template)))
        run = _Load(server, outcome, catalogue(num_requests, seed), 60 * minutes)
        threads = [
            threading.Thread(target=run.run, args=(kind, number), daemon=True)
            for kind, count in _CLIENTS.items()
            for number in range(count)
        ]
        for thread in threads:
            thread.start()
        while (left := run.end - time.monotonic()) > 0:
            time.sleep(min(left, run.window))
            outcome.resources[round(time.monotonic() - run.begin)] = server.resources()
        for thread in threads:
            # More than the 120 seconds that a client waits for its answer.
            thread.join(180)
        outcome.differences += ["a client did not end"] * sum(
            thread.is_alive() for thread in threads
        )
        _check_end(server, run, outcome)
    for name, latencies in run.latencies.items():
        if len(latencies) > 1:
            # The 10th and the 19th of 19 cuts are the median and the 95th percentile.
            cuts = quantiles(latencies, n=20)
            outcome.quick_seconds[name] = [round(cuts[9], 4), round(cuts[18], 4)]
    outcome.seconds = time.monotonic() - begin
    return outcome


def _check_end(server: ServerProcess, run: _Load, outcome: Loaded) -> None:
    """Compare the server after the load with the one before."""
    fail = outcome.differences.append
    if server.process.poll() is not None:
        fail(
            "the server ended: exit code"
            f" {server.process.returncode}\n{server.log.read_text()[-3000:]}"
        )
        return
    if not server.until_idle():
        fail(f"requests are under way, or pages are held: {server.metrics()}")
    outcome.preempted = int(server.metrics()["preempted_total"])
    # Every tenth, since each is answered alone, and the server is idle meanwhile.
    for place in range(0, len(run.requests), 10):
        again = run._alone(run.requests[place])
        if any(one.difference(other) for one, other in zip(again, run.alone[place], strict=True)):
            fail(f"{run.requests[place]} has another answer after the load")
    # After a quarter of the run: by then caches are full and the graphs captured, so growth is a
    # leak.
    early = next(
        (
            usage
            for second, usage in outcome.resources.items()
            if usage and second >= 15 * outcome.minutes
        ),
        {},
    )
    last = settled(server)
    if early and last["memory"] > early["memory"] + _MORE_MEMORY:
        fail(f"memory: {last['memory']} at the end, {early['memory']} after a quarter of the run")
    if early and last["files"] > early["files"] + 8:
        fail(f"files: {last['files']} at the end, {early['files']} after a quarter of the run")
    code = server.stop()
    log = server.log.read_text()
    if code != 0 or "Traceback" in log:
        fail(f"exit code {code}; log: {log[-3000:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run for as long as the command line asks for, print the outcome, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="of load (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, help="the folder to write the record to (default: none)"
    )
    args = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    outcome = load(args.minutes, args.seed)
    print(outcome)
    write_record(args.out, "http-load-cpu.json", outcome.record())
    if outcome.differences:
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
