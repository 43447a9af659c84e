"""Ctrl-C as a terminal sends it, to the command and all its processes, at several moments."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.stages.checkpoints.known_models import DEMO

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads /proc")

GENERATE = (
    "generate",
    "--model",
    str(DEMO),
    "--device",
    "cpu",
    "--prompt",
    "A list is",
    "--max-tokens",
    "480",
)


def processes(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    pids = []
    for folder in Path("/proc").iterdir():
        try:
            fields = (
                (folder / "stat").read_text().rpartition(")")[2].split()
                if folder.name.isdigit()
                else []
            )
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields and fields[0] != "Z" and int(fields[3]) == session:
            pids.append(int(folder.name))
    return sorted(pids)


def holds(pid: int, file: str, text: str) -> bool:
    try:
        return text in Path(f"/proc/{pid}/{file}").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def servers(pids: list[int]) -> list[int]:
    """The process from which ranks are forked, and the ranks."""
    return [pid for pid in pids if holds(pid, "cmdline", "multiprocessing.forkserver")]


MOMENTS: dict[str, Callable[[list[int]], bool]] = {
    "the server of ranks starts": lambda pids: len(servers(pids)) == 1,
    "the server of ranks imports": lambda pids: any(
        holds(pid, "maps", "libtorch_cpu") for pid in servers(pids)
    ),
    "the first rank is there": lambda pids: len(servers(pids)) >= 2,
    "ranks generate": lambda pids: len(servers(pids)) == 3,
}


def interrupted(
    ready: Callable[[list[int]], bool], later: float
) -> tuple[int, str, str, list[int]]:
    """The exit code, stdout and stderr of a command that is interrupted at some moment, and the
    processes left soon afterwards."""
    command = [sys.executable, "-m", "weft", *GENERATE, "--pp", "2"]
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A shell starts background processes so that they ignore Ctrl-C, and so may these tests have
    # been started.
    options |= {
        "start_new_session": True,
        "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    }
    with subprocess.Popen(command, **options) as process:
        try:
            end = time.monotonic() + 60
            while not ready(processes(process.pid)):
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < end
                time.sleep(0.002)
            time.sleep(later)
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=20)
            end = time.monotonic() + 2
            while (left := processes(process.pid)) and time.monotonic() < end:
                time.sleep(0.02)
        finally:
            for pid in processes(process.pid):
                os.kill(pid, signal.SIGKILL)
    return process.returncode, out, err, left


@pytest.mark.one_of(1, 4)
@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_is_quiet_and_ends_all_processes(moment: str) -> None:
    later = 0.7 if moment == "ranks generate" else 0.0
    code, *said_and_left = interrupted(MOMENTS[moment], later)
    # Python may end itself by the signal; a shell reports both as 130
    assert code in (
        130,
        -signal.SIGINT,
    )
    assert said_and_left == ["", "", []]


def test_ctrl_c_is_quiet_before_the_command_is_imported(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("raise KeyboardInterrupt")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "weft"], capture_output=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
