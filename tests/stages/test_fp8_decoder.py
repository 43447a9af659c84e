"""A decoder in FP8: attention gives its output projection values in FP8, as if they had been
quantised after it."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, library

from weft.batches.batch import Batch
from weft.errors import DescriptorError
from weft.ops.attention.paged import paged_attention, paged_attention_quantized
from weft.ops.products.fp8 import quantize
from weft.stages import decoder
from weft.stages.config import ModelConfig, parse_config
from weft.stages.layout import split_model
from weft.stages.model import Model
from weft.stages.random_weights import PRESETS, random_params
from weft.transforms.engine.setup import make_runner, make_state
from weft.transforms.graphs.ladder import Limits

SMALL = {
    "hidden_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}


def model(path: Any) -> Model:
    config: ModelConfig = parse_config({**PRESETS["qwen3-30b-a3b-fp8"], **SMALL}, source="a dict")
    (layout,) = split_model(config, 1)
    params = random_params(config, layout, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    return Model(config, params, None, path, layout=layout)


def logits(of: Model) -> Tensor:
    runner = make_runner(of, Limits(4, 16), mode="none", keep_logits=True)
    state = make_state(of, runner.layouts, [16] * 3)
    step_logits = []
    for batch in (Batch.ragged([0, 1, 2], [[1, 2, 3], [4], [5, 6]]), Batch.decode([0, 1, 2])):
        state, out = runner.step(runner.params, state, batch)
        assert out.logits is not None
        step_logits.append(out.logits)
    return torch.cat(step_logits)


def test_logits_are_those_of_attention_that_is_quantised_after_it(tmp_path: Any) -> None:
    of = model(tmp_path)
    with mock.patch.object(
        decoder, "paged_attention_quantized", wraps=paged_attention_quantized
    ) as called:
        fused_logits = logits(of)
    assert called.call_count == 2 * SMALL["num_hidden_layers"]
    with (
        mock.patch.object(decoder, "BLOCK", 0),
        mock.patch.object(decoder, "paged_attention_quantized", None),
    ):
        assert torch.equal(logits(of), fused_logits)
    assert fused_logits.isfinite().all()


def arguments(dim: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    q, (k, v) = (
        torch.randn(3, 4, dim, generator=generator),
        torch.randn(2, 3, 2, dim, generator=generator),
    )
    starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    lengths = torch.tensor([2, 0], dtype=torch.int32)
    table = torch.tensor([[1], [0]], dtype=torch.int32)
    return (
        q,
        k,
        v,
        torch.zeros(2, 2, 4, 2, dim),
        torch.tensor([4, 5, -1]),
        table,
        starts,
        lengths,
        2,
        dim**-0.5,
        0,
    )


def test_the_op_is_attention_and_quantises_its_result() -> None:
    fused = paged_attention_quantized(*arguments(128))
    expected = quantize(paged_attention(*arguments(128)).flatten(1))
    assert torch.equal(fused.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(fused.scales, expected.scales)
    library.opcheck(
        torch.ops.weft.paged_attention.quantized,
        arguments(128),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_heads_that_are_no_blocks_are_refused() -> None:
    with pytest.raises(DescriptorError, match="heads of 64, not blocks of 128"):
        paged_attention_quantized(*arguments(64))
