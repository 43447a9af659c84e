"""A run listens only on the loopback interface, and data that a stranger sends to its ports has no
effect."""

import os
import pickle
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import scale, told

from weft.errors import ProgramError
from weft.stages.checkpoints.known_models import DEMO
from weft.transforms.pipelines.pipeline import pipeline
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.launch import launch
from weft.transforms.pipelines.transports.messaging.network import (
    LOOPBACK,
    Network,
    Secret,
    shared_secret,
)

sys.path.insert(0, str(Path(__file__).parent))  # so that a rank finds this module by its name

# Keys that no rank of such a run reads.
UNREAD = ("shared/0", "collected/0/0", "checked/0/0", "layout/0/00", "secret")
# Keys that a rank writes, before or after another rank reads them.
OVERWRITTEN = ("at/0", "at/1", "device/0", "wire/0")


class Planted:
    """Creates a file when it is unpickled."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return open, (self.file, "w")


def run_beside_a_stranger(file: str, keys: tuple[str, ...]) -> list[str]:
    """The words of a rank's error when a stranger writes pickles to its store, before and during
    its run."""
    torch.set_num_threads(1)
    wait = timedelta(seconds=5)
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    stranger = store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, wait)

    def plant(run: int) -> None:
        for key in keys:
            stranger.set(f"weft/0/{run}/{key}", pickle.dumps(Planted(file)))

    def run() -> None:
        transport = Distributed(timeout=3)
        step = pipeline([scale] * 2, transport=transport)
        for size in (2, 3):
            step([torch.ones(())], [torch.ones(())], torch.ones(size))
            transport.share(1)
            transport.collect({"figures": [1.5]})

    plant(0)
    plant(1)
    return [told(run), told(run)]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [UNREAD, OVERWRITTEN, ("failure",)])
def test_a_pickle_in_the_store_is_never_opened(keys: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "executed"
    said = launch(run_beside_a_stranger, 2, str(file), keys)
    assert not file.exists()
    for text in (*said[0], *said[1]):
        if keys == UNREAD:
            assert text == "no error"
        if keys == ("failure",):
            assert text.startswith("RankError: ")
            assert re.search(
                r"'weft/0/\d/failure' holds \d+ bytes that are not sealed with this run's secret",
                text,
            )


def run_with_secret(secrets: list[str]) -> str:
    os.environ["WEFT_SECRET"] = secrets[int(os.environ["RANK"])]
    return told(lambda: Distributed(timeout=3))


def test_ranks_with_different_secrets_refuse_each_other() -> None:
    said = launch(run_with_secret, 2, ["0123456789abcdef", "0123456789abcdeF"])
    assert any("bytes that are not sealed with this run's secret" in text for text in said)
    assert all(text.startswith("RankError: ") for text in said)
    assert any(
        "instead: the same WEFT_SECRET for all processes of the run" in text for text in said
    )


def test_a_secret_that_is_easily_guessed_is_refused() -> None:
    said = launch(run_with_secret, 1, ["short"])
    assert said[0].startswith("ProgramError: Distributed()\n  saw: WEFT_SECRET of 5 characters")
    assert "short" not in said[0].splitlines()[1]


def run_with_a_left_secret() -> tuple[str, list[str]]:
    """A rank of a launcher that passes no secret, like torchrun."""
    del os.environ["WEFT_SECRET"]
    said = told(lambda: Distributed(timeout=5).collect(1))
    time.sleep(0.5)
    folder = Path(os.environ["XDG_RUNTIME_DIR"]) / f"weft-{os.getuid()}"
    return said, [file.name for file in folder.iterdir()]


@pytest.mark.slow
def test_ranks_of_one_machine_find_the_secret_that_the_first_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = launch(run_in_folder, 2, str(tmp_path))
    assert said == [("no error", [])] * 2
    assert (tmp_path / f"weft-{os.getuid()}").stat().st_mode & 0o777 == 0o700


def run_in_folder(folder: str) -> tuple[str, list[str]]:
    os.environ["XDG_RUNTIME_DIR"] = folder
    return run_with_a_left_secret()


def test_a_folder_of_secrets_that_others_may_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / f"weft-{os.getuid()}").mkdir(mode=0o755)
    with (
        pytest.raises(ProgramError, match="which others may read or write"),
        shared_secret(None, dist.HashStore(), 0),
    ):
        pass


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "0123456789abcdeg", "\x80\x04"]
)
def test_a_stranger_names_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    store = dist.HashStore()
    store.set("secret", name)
    with (
        pytest.raises(ProgramError, match="no secret that rank 0 left in"),
        shared_secret(None, store, 1),
    ):
        pass


SECRET = "0123456789abcdef"


@pytest.mark.parametrize(
    ("environment", "num_ranks", "expected"),
    [
        ({}, 2, Network(LOOPBACK, True, None)),
        ({"MASTER_ADDR": "10.0.0.1", "LOCAL_WORLD_SIZE": "2"}, 2, Network(LOOPBACK, True, None)),
        (
            {"MASTER_ADDR": "localhost", "WEFT_SECRET": SECRET},
            2,
            Network(LOOPBACK, True, Secret(SECRET.encode())),
        ),
        (
            {
                "MASTER_ADDR": "10.0.0.1",
                "LOCAL_WORLD_SIZE": "1",
                "WEFT_SECRET": SECRET,
                "WEFT_ADDRESS": "10.0.0.2",
            },
            2,
            Network("10.0.0.2", False, Secret(SECRET.encode())),
        ),
    ],
)
def test_where_a_rank_listens(
    environment: dict[str, str], num_ranks: int, expected: Network
) -> None:
    assert Network.of(environment, num_ranks) == expected


@pytest.mark.parametrize(
    ("environment", "problem", "instead"),
    [
        (
            {},
            "no WEFT_SECRET",
            "export WEFT_SECRET=$(openssl rand -hex 16), the same on every node",
        ),
        (
            {"WEFT_SECRET": SECRET},
            "no WEFT_ADDRESS",
            "export WEFT_ADDRESS=<the address of this node that",
        ),
    ],
)
def test_several_nodes_name_a_secret_and_an_address(
    environment: dict[str, str], problem: str, instead: str
) -> None:
    with pytest.raises(ProgramError) as error:
        Network.of({"MASTER_ADDR": "10.0.0.1", "LOCAL_WORLD_SIZE": "1", **environment}, 2)
    assert error.value.problem == f"ranks on several nodes (MASTER_ADDR=10.0.0.1), and {problem}"
    assert error.value.instead.startswith(instead)


def listening(pid: int) -> set[str]:
    """The addresses at which a process and its descendants listen, as hexadecimal digits."""
    sockets = set()
    for process in family(pid):
        for descriptor in _listed(Path(f"/proc/{process}/fd")):
            sockets.add(_target(descriptor))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            (
                _,
                local,
                _,
                state,
                *_,
            ) = line.split()
            if state == "0A" and f"socket:[{line.split()[9]}]" in sockets:
                addresses.add(local.split(":")[0])
    return addresses


def family(pid: int) -> list[int]:
    tasks = _listed(Path(f"/proc/{pid}/task"))
    children = [int(child) for task in tasks for child in _read(task / "children").split()]
    return [pid, *(each for child in children for each in family(child))]


def ranks_of(agent: int) -> list[int]:
    """The processes of torchrun's agent, but not a fork that has not yet become another program: it
    has the agent's sockets."""
    agent_command = _read(Path(f"/proc/{agent}/cmdline"))
    return [
        each for each in family(agent)[1:] if _read(Path(f"/proc/{each}/cmdline")) != agent_command
    ]


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # it has ended
        return []


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/net")
@pytest.mark.parametrize("launcher", ["--pp 2", "torchrun"])
def test_a_run_listens_on_the_loopback_interface_alone(launcher: str) -> None:
    """All of a run's processes, from start to end, except the store of torchrun's agent, which is
    torchrun's own."""
    options = [
        "generate",
        "--model",
        str(DEMO),
        "--prompt",
        "A list is",
        "--max-tokens",
        "40",
        "--device",
        "cpu",
    ]
    command = [sys.executable, "-m", "weft", *options, "--pp", "2"]
    if launcher == "torchrun":
        run = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--master-addr",
            LOOPBACK,
        ]
        command = [*run, "-m", "weft", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        addresses: set[str] = set()
        while process.poll() is None:
            below = [process.pid] if launcher == "--pp 2" else ranks_of(process.pid)
            addresses |= {address for each in below for address in listening(each)}
            time.sleep(0.02)
        assert process.stdout is not None
        assert process.returncode == 0, process.stdout.read()
    assert addresses == {"0100007F"}
