"""Hostile requests and a mixed load, in small: their counts, and that they see what goes wrong."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from weft.proofs.evidence.http import fuzz as http_fuzz, load as http_load
from weft.proofs.evidence.http.attacks import attacks
from weft.proofs.evidence.http.catalogue import Said, said
from weft.proofs.evidence.http.fuzz import fuzz, perform, problem_of
from weft.proofs.evidence.http.process import Answer, read_answers
from weft.proofs.evidence.http.sockets import Attack

pytest.importorskip("uvicorn")
JSON = {"content-type": "application/json"}
STREAM = {"content-type": "text/event-stream; charset=utf-8"}


@pytest.mark.nightly
def test_a_server_is_after_300_attacks_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert http_fuzz.main(["--cases", "300", "--idle", "100", "--out", str(tmp_path)]) == 0, (
        capsys.readouterr().out
    )
    report = json.loads((tmp_path / "http-fuzz-cpu.json").read_text())
    assert sum(report["kinds"].values()) == 300
    assert report["kinds"].keys() == {
        "schema",
        "encoding",
        "size",
        "socket",
        "grammar",
        "chat",
        "sampling",
    }
    assert report["statuses"]["200"] > 20
    assert report["statuses"]["400"] > 100
    assert report["idle_connections"] == 100
    assert "300 attacks" in capsys.readouterr().out


def test_attacks_are_those_of_their_seed() -> None:
    def some(seed: int) -> list[Attack]:
        drawn = attacks(seed, "http://127.0.0.1:9/", "none")
        return [next(drawn) for _ in range(50)]

    assert some(3) == some(3) != some(4)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            Answer(
                400, JSON, b'{"error": {"message": "a", "type": "b", "param": null, "code": null}}'
            ),
            "",
        ),
        (
            Answer(
                500, JSON, b'{"error": {"message": "a", "type": "b", "param": null, "code": null}}'
            ),
            "status 500",
        ),
        (Answer(400, {"content-type": "text/plain"}, b"no"), "an error of type text/plain: no"),
        (Answer(400, JSON, b'{"error": "no"}'), "an error that is not in OpenAI's form"),
        (Answer(400, JSON, b"{"), "an error that is not in OpenAI's form"),
        (Answer(200, JSON, b"{"), "not JSON"),
        (Answer(200, STREAM, b'data: {"choices": []}\n\n'), "no end"),
        (Answer(200, STREAM, b'data: {"choices": []}\n\ndata: [DONE]\n\n'), ""),
        (
            Answer(200, STREAM, b'data: {"error": {"message": 1}}\n\n'),
            "an error that is not in OpenAI's form",
        ),
        (
            Answer(200, JSON, json.dumps(http_fuzz._SECRET).encode()),
            "an answer with what a file has",
        ),
    ],
)
def test_answers_that_are_wrong(answer: Answer, words: str) -> None:
    assert (words in problem_of(answer)) if words else not problem_of(answer)


@contextmanager
def answering(*raws: bytes) -> Iterator[int]:
    """A port that answers each connection with bytes, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for raw in raws:
                client, _ = server.accept()
                with client:
                    client.recv(65536)
                    client.sendall(raw)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join(10)


def test_answers_are_read_as_they_come() -> None:
    one = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab"
    cut = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n"
    with answering(one + one, cut, b"") as port:
        attack = Attack("socket", "a", [("send", b"GET")], answers=5, patience=1.0)
        assert [answer.body for answer in perform(port, attack)] == [b"ab", b"ab"]
        [answer] = perform(port, attack)
        assert (answer.body, answer.whole) == (b"ab", False)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET")
            assert read_answers(connection) == []


@pytest.mark.nightly
def test_a_traceback_in_the_log_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = http_fuzz.ServerProcess.stop

    def written(self: Any, *arguments: Any) -> int:
        with self.log.open("a") as file:
            file.write("Traceback (most recent call last)")
        return stop(self, *arguments)

    monkeypatch.setattr(http_fuzz.ServerProcess, "stop", written)
    report = fuzz(3, idle_connections=1)
    assert any("the log has a traceback" in failure for failure in report.failures)


def test_choices_are_compared() -> None:
    body = {"choices": [{"index": 0, "text": "a", "finish_reason": "stop", "logprobs": None}]}
    [alone] = said(Answer(200, JSON, json.dumps(body).encode()))
    assert alone == Said("a", finish_reason="stop")
    assert not alone.difference(Said("a", finish_reason="stop"))
    assert alone.difference(Said("b", finish_reason="stop")) == "text: 'a', and alone 'b'"
    assert "finish_reason" in alone.difference(Said("a"))
    near, far = (Said("a", ["a"], [value]) for value in (-1.0001, -1.1))
    assert not Said("a", ["a"], [-1.0]).difference(near)
    assert Said("a", ["a"], [-1.0]).difference(far) == "logprob 0: -1.0, and alone -1.1"
    with pytest.raises(ValueError, match="a stream that ends with"):
        said(Answer(200, STREAM, b'data: {"error": {}}\n\n'))


@pytest.mark.nightly
def test_a_mixed_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert http_load.main(["--minutes", "0.2", "--out", str(tmp_path)]) == 0, (
        capsys.readouterr().out
    )
    report = json.loads((tmp_path / "http-load-cpu.json").read_text())
    assert report["differences"] == []
    assert report["refused"] > 0
    assert report["preempted"] > 0
    assert report["requests"].keys() == {"whole", "stream", "quick", "slow"}
    assert report["gone"] > 0
