"""The configurations of released models, in the form in which transformers 4 wrote them."""

import json
from typing import Any

import attrs
import pytest
from configs import LLAMA_2, LLAMA_3_2, QWEN_2_5, QWEN_3, SMOLLM2, assert_agrees, parse
from theirs import CLASSES

from weft.stages.rope import Rope


@pytest.mark.parametrize("raw", [LLAMA_2, LLAMA_3_2, SMOLLM2, QWEN_2_5, QWEN_3])
def test_old_files_are_read_as_transformers_reads_them(raw: dict[str, Any]) -> None:
    architecture = raw["architectures"][0]
    theirs = CLASSES[architecture][0].from_dict(json.loads(json.dumps(raw)))
    assert_agrees(attrs.evolve(parse(raw), rope=Rope(theta=parse(raw).rope.theta)), theirs, architecture)


def test_llama_3_2s_rope() -> None:
    assert parse(LLAMA_3_2).rope == Rope(
        theta=500_000.0,
        kind="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
