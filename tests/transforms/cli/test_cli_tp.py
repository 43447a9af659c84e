"""`--tp`: ranks that share each layer say what one process says, also under torchrun on two nodes."""

import json
import os
import socket
import subprocess
import sys

import pytest

from weft.stages.checkpoints.known_models import DEMO

OPTIONS = ("--model", str(DEMO), "--prompt", "A list", "--prompt", "The function", "--max-tokens", "5", "--json")
EXACT = ("--dtype", "float32", "--device", "cpu")


def said(out: str) -> list[tuple[str, list[int]]]:
    return [(line["text"], line["token_ids"]) for line in map(json.loads, out.splitlines())]


def weft(*more: str, before: tuple[str, ...] = (), **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, *before, "-m", "weft", "generate", *OPTIONS, *EXACT, *more]
    own = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(command, env=own, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def result(process: subprocess.Popen[str]) -> list[tuple[str, list[int]]]:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err[-3000:]
    return said(out)


@pytest.fixture(scope="module")
def alone() -> list[tuple[str, list[int]]]:
    found = result(weft())
    assert len(found) == 2
    return found


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--tp 2", "--tp 2 --graph none", "--tp 2 --pp 2", "--tp 2 --kv-dtype float8_e4m3fn"])
def test_ranks_that_share_layers_say_what_one_process_says(flags: str, alone: list[tuple[str, list[int]]]) -> None:
    if "--kv-dtype" in flags:
        assert result(weft(*flags.split())) == result(weft(*flags.split()[2:]))
    else:
        assert result(weft(*flags.split())) == alone


def own_address() -> str | None:
    """An address of this machine that is not the loopback one."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
            own.connect(("192.0.2.1", 9))  # sends nothing
            found = str(own.getsockname()[0])
    except OSError:
        return None
    return None if found.startswith("127.") else found


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("", 0))
        return int(own.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.0.1", "its own"])
def test_two_agents_of_torchrun_are_two_nodes(address: str, alone: list[tuple[str, list[int]]]) -> None:
    """Two processes of each agent: each agent has a stage, which its ranks share."""
    if (found := own_address() if address == "its own" else address) is None:
        pytest.skip("this machine has only the loopback address")
    nodes = "--nnodes", "2", "--nproc-per-node", "2", "--master-addr", found, "--master-port", str(free_port())
    secret = {"WEFT_SECRET": "0123456789" * 4, "WEFT_ADDRESS": found} if address == "its own" else {}
    agents = [
        weft("--tp", "2", before=("-m", "torch.distributed.run", *nodes, "--node-rank", str(rank)), **secret)
        for rank in range(2)
    ]
    try:
        first, second = map(result, agents)
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()
                agent.wait(30)
    assert (first, second) == (alone, [])
