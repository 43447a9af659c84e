"""Kernels in triton's interpreter, in another process: triton reads its flag where kernels are defined."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


def drawn(count: int, every: int, runs_all: bool) -> range:
    """The indices that this run has of `count` parameters marked `one_of(every)`."""
    return range(0, count, 1 if runs_all else every)


def run_interpreted(code: str, *arguments: object, timeout: float | None = None) -> str:
    """Run code in a new process, and return its output. It may import the modules in this folder."""
    pytest.importorskip("triton")
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", f"import interpreted\n{code}", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert not done.returncode, done.stderr
    return done.stdout


def interpret(code: str, given: Any, folder: Path) -> Any:
    """Run code that reads values from the file `sys.argv[1]` and saves results to `sys.argv[2]`, and return these."""
    torch.save(given, folder / "in.pt")
    run_interpreted(code, folder / "in.pt", folder / "out.pt")
    return torch.load(folder / "out.pt", weights_only=False)
