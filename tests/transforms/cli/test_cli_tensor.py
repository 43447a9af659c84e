"""`--tp`: commands whose model's layers processes share."""

import json

import pytest
from cli_calls import Weft, assert_refused

FLAGS = ("--model", "demo", "--device", "cpu", "--dtype", "float32", "--prompt", "A list is", "--max-tokens", "6")


@pytest.mark.parametrize("more", [(), pytest.param(("--pp", "2"), marks=pytest.mark.slow)])
def test_ranks_that_share_layers_say_what_one_process_says(run: Weft, more: tuple[str, ...]) -> None:
    alone = run("generate", *FLAGS, "--json")
    shared = run("generate", *FLAGS, "--tp", "2", *more, "--json")
    assert (alone[0], shared[0]) == (0, 0), shared[2]
    ours, theirs = json.loads(shared[1]), json.loads(alone[1])
    assert ours["token_ids"] == theirs["token_ids"]
    assert ours["text"] == theirs["text"]


def test_what_ranks_cannot_share_is_refused(run: Weft) -> None:
    seen = "saw: 4 heads, and 2 of keys and values"
    instead = "instead: a number of ranks that divides the heads"
    assert_refused(run("generate", *FLAGS, "--tp", "3"), "--tp 3", seen, instead)
    assert_refused(run("generate", *FLAGS, "--tp", "0"), "--tp")


@pytest.mark.parametrize("transport", ["local", "threads"])
def test_shares_need_processes(run: Weft, transport: str) -> None:
    seen = "2 ranks that share each layer, and a transport within one process"
    assert_refused(run("generate", *FLAGS, "--tp", "2", "--transport", transport), seen, "no --transport, or --tp 1")
