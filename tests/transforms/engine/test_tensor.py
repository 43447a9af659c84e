"""Engines whose layers ranks share: over gloo, equal to one process and to transformers; and what
`Split` refuses."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from refusal import refused

import weft
from weft.errors import ProgramError
from weft.transforms.engine.split import Split
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.launch import launch
from weft.transforms.pipelines.transports.local import Local
from weft.transforms.pipelines.transports.threads import Threads

PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12], [3, 3]]
SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 10,
    "mlp_only_layers": [0],
}
MAX_TOKENS = 6
Seen = dict[str, tuple[list[int], list[float], list[float]]]


def save(folder: Path, architecture: str) -> Any:
    """A random model of transformers, which the folder then has."""
    from transformers import (  # not at the top: each rank imports this module
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(1)
    if architecture == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
    elif architecture == "qwen3-moe":
        sizes = (
            SIZES
            | EXPERTS
            | {"num_hidden_layers": 3, "num_key_value_heads": 4, "norm_topk_prob": True}
        )
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, head_dim=8))
        model.set_experts_implementation("eager")  # others need 16 bytes in a row
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True))
    model.save_pretrained(folder)
    return model.eval()


def complete(model: weft.Model, **options: Any) -> Seen:
    """The tokens and logprobs of each prompt, by an engine; every other one is greedy."""
    limits = weft.EngineLimits(max_num_reqs=4, max_num_tokens=16, max_model_len=32, num_pages=16)
    engine = weft.Engine(model, limits, seed=0, num_logprobs=2, **options)
    for index, prompt in enumerate(PROMPTS):
        sampling = weft.SamplingParams(
            temperature=float(index % 2), seed=index, logprobs=2, prompt_logprobs=1
        )
        engine.add(prompt, sampling, max_tokens=MAX_TOKENS, id=str(index))
    tracks = {output.id: output.track for output in engine}
    return {
        name: (track.token_ids, track.logprobs, track.prompt_logprobs)
        for name, track in tracks.items()
    }


def as_rank(folder: str, tensor: int, graph: str, experts: str | None = None) -> Seen:
    """The same on one rank of several."""
    transport = Distributed()
    stages = transport.num_ranks // tensor
    stage = (transport.rank // tensor, stages)
    shard = (transport.rank % tensor, tensor)
    model = weft.load(folder, "cpu", "float32", stage=stage, shard=shard, experts=experts)
    try:
        return complete(model, pipeline=stages, tensor=tensor, transport=transport, graph=graph)
    finally:
        transport.close()


CASES = [
    ("llama", 2, 1, "none"),
    ("qwen3", 2, 2, "full_and_piecewise"),
    ("qwen3", 4, 1, "full"),
    ("llama", 2, 2, "full"),
]


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("architecture", "tensor", "stages", "graph"), [CASES[0], CASES[2], CASES[1], CASES[3]]
)
def test_shares_serve_as_one_process_and_as_transformers(
    architecture: str, tensor: int, stages: int, graph: str, tmp_path: Path
) -> None:
    theirs = save(tmp_path, architecture)
    alone = complete(weft.load(str(tmp_path), "cpu", "float32"), graph="none")
    every = launch(as_rank, tensor * stages, str(tmp_path), tensor, graph)
    for completions in every:
        assert completions == every[0]
        for name, (tokens, logprobs, of_prompt) in alone.items():
            assert completions[name][0] == tokens
            for ours, expected in (
                (completions[name][1], logprobs),
                (completions[name][2], of_prompt),
            ):
                assert ours == pytest.approx(expected, abs=1e-4)
    for index in (0, 2):  # the greedy ones
        ids = torch.tensor([PROMPTS[index]])
        expected = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS
        )
        assert every[0][str(index)][0] == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("tensor", "experts", "num_local_experts"), [(2, "whole", 4), (4, None, 2)]
)
def test_ranks_with_whole_experts_serve_as_transformers(
    tensor: int, experts: str | None, num_local_experts: int, tmp_path: Path
) -> None:
    """Tokens, and the logprobs of all of them. Four ranks cannot cut 10 columns, and so have whole
    experts unasked."""
    theirs = save(tmp_path, "qwen3-moe")
    layers = weft.load(
        str(tmp_path), "cpu", "float32", shard=(1, tensor), experts=experts
    ).params.layers
    assert [len(layer.gate_up_proj) for layer in layers[1:]] == [num_local_experts] * 2
    every = launch(as_rank, tensor, str(tmp_path), tensor, "full", experts)
    assert every == [every[0]] * tensor
    for index, prompt in enumerate(PROMPTS):
        tokens, logprobs, of_prompt = every[0][str(index)]
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            expected = theirs(ids).logits[0].log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
        all_logprobs = torch.tensor([*of_prompt, *logprobs])
        torch.testing.assert_close(all_logprobs, expected, rtol=1e-4, atol=1e-4)
        if index % 2 == 0:
            prompt_ids = torch.tensor([prompt])
            said = theirs.generate(prompt_ids, do_sample=False, max_new_tokens=MAX_TOKENS)
            assert tokens == said[0, len(prompt) :].tolist()


def test_the_ranks_of_a_split() -> None:
    split = Split(Local(), 2, 3)
    assert split.mesh == weft.Mesh(pipeline=2, tensor=3)
    assert split.here == [0, 0, 0, 1, 1, 1]
    assert Split(Local(), 2).mesh is None
    assert Split(Local(), 2).here == [0, 1]


INSTEAD = "Distributed(), and weft.load(path, shard=(index, 2)), in a process for each rank"


def test_a_model_that_is_no_share_is_refused() -> None:
    model = weft.load("demo", "cpu")
    problem = "a model that is share 0 of 1, for 2 ranks that share each stage"
    with refused(ProgramError, "f()", problem, INSTEAD):
        Split(Threads(), 1, 2).check("f()", model)


def test_a_share_is_refused_where_none_is_asked_for() -> None:
    share = weft.load("demo", "cpu", shard=(1, 2))
    problem = "a model that is share 1 of 2, for 1 ranks that share each stage"
    with refused(ProgramError, "f()", problem, "weft.Engine(model, tensor=2, ...)"):
        Split(Local(), 1, 1).check("f()", share)


@pytest.mark.parametrize("transport", [Local(), Threads()])
def test_shares_need_processes(transport: Any) -> None:
    share = weft.load("demo", "cpu", shard=(0, 2))
    problem = f"transport={transport!r}, where 2 ranks share each stage"
    with refused(ProgramError, "f()", problem, INSTEAD):
        Split(transport, 1, 2).check("f()", share)
    with pytest.raises(ProgramError, match="where 2 ranks share each stage"):
        weft.Engine(share, tensor=2, transport=transport)


def with_the_other_share() -> str:
    """The error of an engine that is given another rank's share."""
    transport = Distributed()
    share = weft.load("demo", "cpu", shard=(1 - int(os.environ["RANK"]), 2))
    try:
        Split(transport, 1, 2).check("f()", share)
    except ProgramError as error:
        return error.problem
    finally:
        transport.close()
    return ""


def test_the_share_of_another_rank_is_refused() -> None:
    assert launch(with_the_other_share, 2) == [
        "share 1 of the model on rank 0, which has share 0",
        "share 0 of the model on rank 1, which has share 1",
    ]
