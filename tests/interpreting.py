"""Kernels in triton's interpreter, in other processes: triton reads its flag where kernels are
defined."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

_TESTS = Path(__file__).parent
# The folders from which the other processes import test modules.
_FOLDERS = (_TESTS, _TESTS / "lib" / "ops", _TESTS / "lib" / "ops" / "copying")
_SERVER = """
import gc, interpreted, json, os, signal, sys, traceback
gc.freeze()  # so that no child copies what it only looks through
for request in map(json.loads, sys.stdin):
    if (child := os.fork()) == 0:
        signal.alarm(request["seconds"])
        written = os.open(request["written"], os.O_WRONLY)
        os.dup2(written, 1)
        os.dup2(written, 2)
        sys.argv = ["-c", *request["arguments"]]
        code = 1
        try:
            exec(compile(request["code"], "<interpreted>", "exec"), {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)  # without taking torch apart, which is most of a second
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def chosen(request: pytest.FixtureRequest) -> list[int]:
    """The values of the parameter `index` for which this run has tests of the fixture that asks."""
    return sorted(
        {
            item.callspec.params["index"]
            for item in request.session.items
            if isinstance(item, pytest.Function)
            and item.path == request.path
            and request.fixturename in item.fixturenames
        }
    )


@functools.cache
def _server() -> subprocess.Popen[str]:
    """A process that has imported torch and triton, and forks for each request. It ends when its
    input does."""
    path = os.pathsep.join([*map(str, _FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_interpreted(code: str, folder: Path, *arguments: object, seconds: int = 300) -> str:
    """Run code in a process of its own, and return its output. It may import modules of `_FOLDERS`."""
    pytest.importorskip("triton")
    written = folder / "written.txt"
    server = _server()
    written.touch()
    assert server.stdin is not None
    assert server.stdout is not None
    request = {
        "code": code,
        "arguments": [*map(str, arguments)],
        "written": str(written),
        "seconds": seconds,
    }
    server.stdin.write(f"{json.dumps(request)}\n")
    server.stdin.flush()
    ended = server.stdout.readline().strip()
    assert ended == "0", f"exit code {ended}: {written.read_text()}"
    return written.read_text()


def interpret(code: str, inputs: Any, folder: Path) -> Any:
    """Run code that reads values from the file `sys.argv[1]` and saves results to `sys.argv[2]`,
    and return these."""
    torch.save(inputs, folder / "in.pt")
    run_interpreted(code, folder, folder / "in.pt", folder / "out.pt")
    return torch.load(folder / "out.pt", weights_only=False)
