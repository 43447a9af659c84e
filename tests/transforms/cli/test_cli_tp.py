"""`--tp`: ranks that share each layer say what one process says, also under torchrun on two nodes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import Weft, assert_refused
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import weft as weft_package
from weft.stages.checkpoints.known_models import DEMO

OPTIONS = (
    "--model",
    str(DEMO),
    "--prompt",
    "A list",
    "--prompt",
    "The function",
    "--max-tokens",
    "5",
    "--json",
)
EXACT = ("--dtype", "float32", "--device", "cpu")


def said(out: str) -> list[tuple[str, list[int]]]:
    return [(line["text"], line["token_ids"]) for line in map(json.loads, out.splitlines())]


def weft(*more: str, before: tuple[str, ...] = (), **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, *before, "-m", "weft", "generate", *OPTIONS, *EXACT, *more]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def result(process: subprocess.Popen[str]) -> list[tuple[str, list[int]]]:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err[-3000:]
    return said(out)


@pytest.fixture(scope="module")
def alone() -> list[tuple[str, list[int]]]:
    completions = result(weft())
    assert len(completions) == 2
    return completions


def test_two_ranks_say_what_one_process_says(run: Weft) -> None:
    single, shared = (run("generate", *OPTIONS, *EXACT, *more) for more in ((), ("--tp", "2")))
    assert (single[0], shared[0]) == (0, 0), shared[2]
    assert said(single[1]) == said(shared[1])


@pytest.mark.one_of(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--tp 2",
        pytest.param("--tp 2 --graph none", marks=pytest.mark.nightly),
        pytest.param("--tp 2 --pp 2", marks=pytest.mark.nightly),
        "--tp 2 --kv-dtype float8_e4m3fn",
    ],
)
def test_ranks_that_share_layers_say_what_one_process_says(
    flags: str, alone: list[tuple[str, list[int]]]
) -> None:
    if "--kv-dtype" in flags:
        assert result(weft(*flags.split())) == result(weft(*flags.split()[2:]))
    else:
        assert result(weft(*flags.split())) == alone


@pytest.mark.nightly
def test_a_certificate_names_the_weights_of_the_whole_model(tmp_path: Path) -> None:
    digests = []
    for flags in ("--tp 1", "--tp 2 --pp 2"):
        file = tmp_path / f"{flags}.json"
        result(weft(*flags.split(), "--batch-invariant", "--certificates", str(file)))
        digests.append(
            [(one.weights, one.program) for one in weft_package.Certificate.load_all(file)]
        )
    assert digests[0] == digests[1]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.slow
def test_two_agents_of_torchrun_are_two_nodes(alone: list[tuple[str, list[int]]]) -> None:
    """Two processes of each agent: each agent has a stage, which its ranks share."""
    nodes = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    )
    agents = [
        weft("--tp", "2", before=("-m", "torch.distributed.run", *nodes, "--node-rank", str(rank)))
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


def test_what_ranks_cannot_share_is_refused(run: Weft) -> None:
    problem = "saw: 4 heads, and 2 of keys and values"
    instead = "instead: a number of ranks that divides the heads"
    assert_refused(run("generate", *OPTIONS, *EXACT, "--tp", "3"), "--tp 3", problem, instead)
    assert_refused(run("generate", *OPTIONS, *EXACT, "--tp", "0"), "--tp")


def test_ranks_with_whole_experts_say_what_one_process_says(run: Weft, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "vocab_size": 37,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.3,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    none = {"bos_token_id": None, "eos_token_id": None}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts, **none)).save_pretrained(
        tmp_path
    )
    options = (
        "--model",
        str(tmp_path),
        "--prompt-ids",
        "1,2,3",
        "--prompt-ids",
        "9",
        "--max-tokens",
        "5",
        "--json",
    )
    single, shared = (
        run("generate", *options, *EXACT, *more.split()) for more in ("", "--tp 2 --experts whole")
    )
    assert (single[0], shared[0]) == (0, 0), shared[2]
    assert said(single[1]) == said(shared[1])
    problem = "--experts whole, and a Qwen3ForCausalLM, which has no experts"
    assert_refused(
        run("generate", *OPTIONS, *EXACT, "--tp", "2", "--experts", "whole"),
        "--tp 2 --experts whole",
        problem,
    )


@pytest.mark.parametrize("transport", ["local", "threads"])
def test_shares_need_processes(run: Weft, transport: str) -> None:
    problem = "2 ranks that share each layer, and a transport within one process"
    refusal = run("generate", *OPTIONS, *EXACT, "--tp", "2", "--transport", transport)
    assert_refused(refusal, problem, "no --transport, or --tp 1")
