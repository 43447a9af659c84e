"""Stages: pure functions `(params, state, batch, x) -> (state, y)`. Decoders, their checkpoints,
and custom modules."""

from weft.batch import ResolvedBatch
from weft.ops.attention.backends import AttentionBackend
from weft.ops.sampling.sample import sample
from weft.stages.adapters.adapter import Adapter, load_adapter
from weft.stages.adapters.slots import reserve_slots, with_adapters, write_slot
from weft.stages.attention.context import attend, attention_scores, weighted_values
from weft.stages.checkpoints.chat import ChatTemplate
from weft.stages.checkpoints.formats import load_config, load_params
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.config import ModelConfig
from weft.stages.custom.functions import StageFunctions
from weft.stages.custom.module import ModuleStage, from_module
from weft.stages.custom.sown import carry, sow
from weft.stages.decoder import decoder_stage
from weft.stages.layout import StageLayout, balance, split_layers, split_model
from weft.stages.model import Model
from weft.stages.params import DecoderParams, LayerParams, slice_params
from weft.stages.random_weights import random_adapter, random_model, random_params

__all__ = [
    "DEMO",
    "Adapter",
    "AttentionBackend",
    "ChatTemplate",
    "DecoderParams",
    "LayerParams",
    "Model",
    "ModelConfig",
    "ModuleStage",
    "ResolvedBatch",
    "StageFunctions",
    "StageLayout",
    "attend",
    "attention_scores",
    "balance",
    "carry",
    "decoder_stage",
    "from_module",
    "load",
    "load_adapter",
    "load_config",
    "load_params",
    "random_adapter",
    "random_model",
    "random_params",
    "reserve_slots",
    "sample",
    "slice_params",
    "sow",
    "split_layers",
    "split_model",
    "weighted_values",
    "with_adapters",
    "write_slot",
]
