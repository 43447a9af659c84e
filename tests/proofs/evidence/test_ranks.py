"""Ranks in separate processes give bitwise the results of one process; started by torchrun, as
users do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weft.proofs.evidence.runs.ranks import VARIANTS


def _torchrun(num_ranks: int, *args: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(num_ranks),
        "--standalone",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += ["-m", "weft.proofs.evidence.runs.ranks", *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.nightly
@pytest.mark.parametrize(("num_ranks", "traces"), [(2, 2), (4, 2), (2, 8), (3, 4)])
def test_ranks_by_gloo_are_one_process(num_ranks: int, traces: int, tmp_path: Path) -> None:
    """Fewer traces for more ranks: each rank serves a trace twice, once with all stages in its
    process."""
    done = _torchrun(
        num_ranks, "--backend", "gloo", "--traces", str(traces), "--out", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((tmp_path / f"ranks-{num_ranks}-gloo.json").read_text())
    assert [row["variant"] for row in record["rows"]] == list(VARIANTS)
    assert all(row["traces"] == traces and row["tokens"] > 0 for row in record["rows"])
    assert all(row["captures"] > 0 for row in record["rows"] if row["variant"] != "none")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["nccl", "peer"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_on_gpus_are_one_process(num_ranks: int, backend: str) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"{torch.cuda.device_count()} GPUs")
    done = _torchrun(num_ranks, "--backend", backend, "--traces", "4")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == len(VARIANTS)


@pytest.mark.nightly
def test_a_difference_on_one_rank_is_an_error_on_all() -> None:
    """A rank has other weights, which comparing code and programs cannot detect."""
    code = (
        "import os\nimport attrs\nfrom weft.proofs.evidence.runs import ranks\nfrom"
        " weft.proofs._strategies.engine.traces import Trace\nplain = Trace.params\nif"
        " os.environ['RANK'] == '1':\n    Trace.params = lambda self, *args:"
        " plain(attrs.evolve(self, seed=self.seed + 1), *args)\nranks.main(['--traces', '3',"
        " '--variants', 'none', '--timeout', '20'])\n"
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "--no-python",
    ]
    done = subprocess.run(
        [*command, sys.executable, "-c", code], capture_output=True, text=True, timeout=200
    )
    assert done.returncode != 0
    assert "LawViolation: none, rank " in done.stderr
