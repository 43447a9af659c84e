"""The text decoder's part of a Qwen2-VL config.json, as transformers reads it, and contradictions
in it."""

import json
from pathlib import Path
from typing import Any

import pytest
from configs import QWEN2_VL, assert_agrees, parse
from released import RELEASED
from transformers import Qwen2VLConfig

from weft.errors import ConfigError
from weft.stages.checkpoints.formats import load_config

(NAME,) = QWEN2_VL["architectures"]
QWEN2_VL_2B = RELEASED["Qwen2-VL-2B-Instruct"]


def test_a_published_file_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    theirs = Qwen2VLConfig.from_dict(json.loads(json.dumps(QWEN2_VL_2B)))
    assert_agrees(parse(QWEN2_VL_2B), theirs, NAME)
    theirs.architectures = [NAME]
    theirs.save_pretrained(tmp_path)
    assert "text_config" in json.loads((tmp_path / "config.json").read_text())
    assert load_config(tmp_path) == parse(QWEN2_VL_2B)


@pytest.mark.parametrize(
    ("changes", "problem", "instead"),
    [
        (
            {"text_config": [1]},
            "config.json has text_config=[1]",
            "text_config is an object, or null",
        ),
        (
            {"text_config": {"hidden_size": 8}},
            "config.json has hidden_size=1536 and text_config.hidden_size=8",
            "write hidden_size in one place, or the same value in both",
        ),
        (
            {"text_config": {"model_type": "qwen3"}},
            "config.json has text_config.model_type='qwen3'",
            "text_config.model_type is 'qwen2_vl_text' for Qwen2VLForConditionalGeneration",
        ),
        (
            {"text_config": {"final_logit_softcapping": 30.0}},
            "config.json has final_logit_softcapping=30.0",
            "weft supports final_logit_softcapping=None in Qwen2VLForConditionalGeneration",
        ),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 23]}},
            "config.json has mrope_section=[16, 24, 23] and head_dim=128",
            "mrope_section adds up to the 64 pairs of a head",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], problem: str, instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(QWEN2_VL_2B | changes)
    assert caught.value.problem == problem
    assert caught.value.instead.startswith(instead)
