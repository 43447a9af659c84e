"""Stages: pure functions `(params, state, batch, x) -> (state, y)`. Decoders, their checkpoints,
and custom modules."""

from weft.batches.batch import ResolvedBatch
from weft.ops.attention.backends import AttentionBackend
from weft.stages.attention.context import attend, attention_scores, weighted_values
from weft.stages.checkpoints.chat import ChatTemplate
from weft.stages.checkpoints.formats import load_config
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.config import ModelConfig
from weft.stages.custom.functions import StageFunctions
from weft.stages.custom.module import from_module
from weft.stages.custom.sown import carry, sow
from weft.stages.layout import balance
from weft.stages.params import slice_params

__all__ = [
    "DEMO",
    "AttentionBackend",
    "ChatTemplate",
    "ModelConfig",
    "ResolvedBatch",
    "StageFunctions",
    "attend",
    "attention_scores",
    "balance",
    "carry",
    "from_module",
    "load_config",
    "slice_params",
    "sow",
    "weighted_values",
]
