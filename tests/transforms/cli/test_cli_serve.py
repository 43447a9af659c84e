"""`weft serve` as a process: it says where it listens, answers, and lets requests end when it is
told to stop."""

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from weft.errors import RequestError
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.transforms.cli import serve
from weft.transforms.cli.http_process import forwarded
from weft.transforms.cli.options import Serve
from weft.transforms.engine.generate import generate
from weft.transforms.server import listening

pytest.importorskip("uvicorn")
NIGHTLY = pytest.mark.nightly
BODY = {"prompt": "The function returns", "temperature": 0, "max_tokens": 24}


@contextlib.contextmanager
def serving(*flags: str, model: Sequence[str] = ("demo",)) -> Iterator[tuple[Any, str]]:
    """A server's process and its address."""
    words = [
        sys.executable,
        "-m",
        "weft",
        "serve",
        *model,
        "--device",
        "cpu",
        "--port",
        "0",
        "--max-num-seqs",
        "4",
    ]
    process = subprocess.Popen(
        [*words, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
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
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def children_of(process: Any) -> list[int]:
    return [
        int(pid)
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="children are read from /proc")
@pytest.mark.parametrize("dies", ["engine", "http"])
def test_neither_process_outlives_the_other(dies: str) -> None:
    with serving("--graph", "none") as (process, url):
        [child] = children_of(process)
        os.kill(process.pid if dies == "engine" else child, signal.SIGKILL)
        assert process.wait(30) != 0
        end = time.monotonic() + 30
        while (
            Path(f"/proc/{child}").exists()
            and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]
        ):
            assert time.monotonic() < end
            time.sleep(0.05)
        with pytest.raises(urllib.error.URLError):
            post(url)


@pytest.mark.slow
def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"{taken.getsockname()[1]}"
        words = [sys.executable, "-m", "weft", "serve", str(DEMO), "--port", port]
        result = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert (
        f"weft serve --host 127.0.0.1 --port {port}\n  saw: Address already in use" in result.stderr
    )
    assert "loading" not in result.stderr


@pytest.mark.skipif(
    sys.platform != "linux", reason="where sockets that are only bound can share a port"
)
def test_of_two_servers_on_one_port_one_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = Serve(model="demo", port=port)
    bound = serve._bound(options)
    try:
        with pytest.raises(RequestError) as caught:
            serve._bound(options)
    finally:
        for listener in bound:
            listener.close()
    assert caught.value.call == f"weft serve --host 127.0.0.1 --port {port}"
    assert caught.value.problem == "Address already in use"
    assert caught.value.instead == "an address of this machine, and a port that is free, or 0"


@pytest.mark.skipif(
    sys.platform != "linux", reason="where sockets that are only bound can share a port"
)
def test_a_server_that_only_binds_is_found_to_share_its_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted bug of the test before."""
    monkeypatch.setattr(socket.socket, "listen", lambda *_: None)
    with pytest.raises(pytest.fail.Exception):
        test_of_two_servers_on_one_port_one_is_told()


def test_a_limit_of_files_that_leaves_none_to_connections_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "raise_file_limit", lambda: 128)
    with pytest.raises(RequestError) as caught:
        serve.run(Serve(model="demo"))
    assert (
        caught.value.problem
        == "a limit of 128 open files (ulimit -Hn); 128 of them are the server's own"
    )
    assert caught.value.instead.startswith("ulimit -n 192 or more before it")
    monkeypatch.setattr(listening, "raise_file_limit", lambda: 192)
    serve._check_files(Serve(model="demo"))


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX limits")
def test_a_server_with_few_files_says_so_and_ends() -> None:
    words = f"ulimit -n 128 && exec {sys.executable} -m weft serve demo --device cpu --port 0"
    ended = subprocess.run(
        ["bash", "-c", words], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode != 0
    assert "a limit of 128 open files" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_address_of_a_family_that_is_not_there_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `localhost` in IPv6, on a machine without it."""
    # Of documentation (RFC 5737)
    absent = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))]
    here = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    options = Serve(model="demo", port=0)
    monkeypatch.setattr(serve.socket, "getaddrinfo", lambda *_, **__: absent + here)
    [bound] = serve._bound(options)
    with bound:
        assert bound.getsockname()[0] == "127.0.0.1"
    monkeypatch.setattr(serve.socket, "getaddrinfo", lambda *_, **__: absent)
    with pytest.raises(
        RequestError,
        match=r"weft serve --host .*\n  saw: .*\n  instead: an address of this machine",
    ):
        serve._bound(options)


@pytest.mark.slow
def test_a_request_whose_grammar_is_compiled_ends_after_a_signal() -> None:
    """The first grammar waits for the process of grammars to start."""
    responses: list[Any] = []
    form = {"type": "regex", "regex": "ab"}
    with serving() as (process, url):
        thread = threading.Thread(target=lambda: responses.append(post(url, response_format=form)))
        thread.start()
        time.sleep(1.0)
        process.send_signal(signal.SIGTERM)
        thread.join(60)
        assert process.wait(30) == 0, process.stderr.read()
    assert responses[0]["choices"][0]["text"] == "ab"


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_signal_is_passed_on_while_the_main_thread_waits() -> None:
    """The system may hand it to any thread, or just before the main one waits: no handler runs
    then."""
    ended = queue.SimpleQueue[int | None]()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:

        def strike() -> None:
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            ended.put(process.poll())

        with forwarded(process):
            threading.Thread(target=strike).start()
            code = ended.get()
        process.kill()
    assert code == -signal.SIGTERM


@pytest.mark.slow
def test_what_it_does_before_it_listens() -> None:
    with serving("--graph", "full_decode_only", "--no-prefix-caching") as (process, url):
        for _ in range(2):
            post(url, prompt=[5] * 70)
        metrics = (
            urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=20).read().decode()
        )
        assert 'weft_prefix_tokens_total{model_name="demo"} 0.0' in metrics
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        lines = process.stderr.read().splitlines()
    said = [line.split(" s  ")[1] for line in lines if " s  " in line]
    assert said[:3] == [
        "loading demo",
        "making its engine, on cpu in bfloat16",
        "capturing graphs of mode full_decode_only",
    ]
    assert re.fullmatch(r"\d+ graphs?; \d+ pages of the KV cache, [\d.]+ MB", said[3])
    assert (len(said), lines[4:]) == (
        4,
        ["SIGTERM: 0 completions under way may end; a second signal ends at once"],
    )


@pytest.mark.slow
def test_a_preset_has_random_weights_and_takes_token_ids() -> None:
    with serving("--graph", "none", model=("--preset", "tiny")) as (_, url):
        response = post(url, prompt=[1, 2, 3], max_tokens=5, ignore_eos=True)
        assert (response["usage"]["completion_tokens"], response["choices"][0]["text"]) == (5, "")
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(url)
        assert b"pass token ids" in refused.value.read()


@pytest.mark.slow
def test_random_weights_of_a_folder_have_its_tokenizer(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO / name, tmp_path)
    with serving("--load-format", "dummy", model=(str(tmp_path),)) as (_, url):
        [choice] = post(url, ignore_eos=True)["choices"]
    [expected] = generate(load(DEMO, "cpu"), [BODY["prompt"]], max_tokens=24)
    assert choice["text"] not in ("", expected.text)
    words = [sys.executable, "-m", "weft", "serve", "--preset", "tiny", "--load-format", "auto"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "weft serve --load-format auto\n  saw: a preset has no weights" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--graph", "full_and_piecewise"), marks=NIGHTLY),
        ("--pp", "2", "--transport", "local", "--graph", "full"),
        pytest.param(("--speculate", "2"), marks=NIGHTLY),
    ],
)
def test_it_answers_and_lets_requests_end(flags: tuple[str, ...]) -> None:
    [expected] = generate(load(DEMO, "cpu"), [BODY["prompt"]], max_tokens=300)
    responses: list[Any] = []
    with serving(*flags) as (process, url):
        assert post(url)["choices"][0]["text"] == expected.text[:24]
        thread = threading.Thread(target=lambda: responses.append(post(url, max_tokens=300)))
        thread.start()
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        thread.join(60)
        assert process.wait(30) == 0, process.stderr.read()
    assert responses[0]["choices"][0]["text"] == expected.text


def stream(url: str, **body: Any) -> Any:
    raw = json.dumps({**BODY, "ignore_eos": True, "stream": True, **body}).encode()
    return urllib.request.urlopen(urllib.request.Request(f"{url}/completions", raw), timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [pytest.param((), marks=NIGHTLY), pytest.param(("--pp", "2"), marks=NIGHTLY), ("--tp", "2")],
)
def test_while_it_drains_streams_end_and_others_get_503(flags: tuple[str, ...]) -> None:
    with serving(*flags) as (process, url), stream(url, max_tokens=480, n=4) as response:
        assert response.readline().startswith(b"data: ")
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        for path, body in (("/v1/completions", json.dumps(BODY).encode()), ("/health", None)):
            with pytest.raises(urllib.error.HTTPError, match="503") as refused:
                urllib.request.urlopen(url.removesuffix("/v1") + path, body, timeout=20)
            assert refused.value.headers["retry-after"] == "1"
            assert json.load(refused.value)["error"]["code"] == "closed"
        events = [line for line in response if line.strip()]
        assert events[-1] == b"data: [DONE]\n"
        assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert process.wait(60) == 0
        assert (
            "completions under way may end; a second signal ends at once" in process.stderr.read()
        )


@pytest.mark.slow
@pytest.mark.parametrize("second", [pytest.param(signal.SIGTERM, marks=NIGHTLY), signal.SIGINT])
def test_a_second_signal_ends_at_once(second: signal.Signals) -> None:
    with serving() as (process, url), stream(url, max_tokens=480, n=4) as response:
        assert response.readline().startswith(b"data: ")
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(second)
        assert process.wait(5) == 128 + second


def descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        parents.setdefault(parent, []).append(int(folder.name))
    children = sorted(parents.get(pid, []))
    return [*children, *(each for child in children for each in descendants(child))]


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="finds the rank's process in /proc"
)
@pytest.mark.parametrize(
    ("is_busy", "split"),
    [
        pytest.param(True, "--pp", marks=NIGHTLY),
        (False, "--pp"),
        (True, "--tp"),
        pytest.param(False, "--tp", marks=NIGHTLY),
    ],
)
def test_a_rank_that_dies_ends_the_server_and_is_named(is_busy: bool, split: str) -> None:
    with serving(split, "2", "--timeout", "4") as (process, url):
        rank_pids = [
            pid
            for pid in descendants(process.pid)
            if b"http_process" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        last_rank = max(rank_pids)
        if is_busy:
            with stream(url, max_tokens=300) as response:
                assert response.readline().startswith(b"data: ")
                os.kill(last_rank, signal.SIGKILL)
                assert b"error" in response.read()
        else:
            os.kill(last_rank, signal.SIGKILL)
        assert process.wait(60) == 2
        assert "rank 1" in process.stderr.read()


def test_it_listens_on_this_machine_alone_unless_told() -> None:
    from weft.transforms.cli.options import Serve

    assert Serve(model="demo").host == "127.0.0.1"
