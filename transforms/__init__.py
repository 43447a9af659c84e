"""Transforms, functions to functions: `graphify`, `pipeline`, `microbatch`, and what they are made of."""

from weft.transforms.dispatch import Decision, dispatch
from weft.transforms.graphify import Graphified, graphify
from weft.transforms.ladder import MODES, Limits, make_ladder
from weft.transforms.microbatch import join, microbatch, split
from weft.transforms.pipeline import Pipelined, compose, pipeline
from weft.transforms.schedule import check, streaming

__all__ = [
    "MODES",
    "Decision",
    "Graphified",
    "Limits",
    "Pipelined",
    "check",
    "compose",
    "dispatch",
    "graphify",
    "join",
    "make_ladder",
    "microbatch",
    "pipeline",
    "split",
    "streaming",
]
