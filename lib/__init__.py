"""Model steps as pure functions on PyTorch: `graphify` makes them replay, `pipeline` makes them span devices.

Names are imported on first use, so that `import weft` costs what `import torch` does.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.batch import EMBEDDED, LAST_TOKEN, Batch
    from weft.descriptor import BatchDescriptor, Descriptor
    from weft.donation import clone, donate, donates
    from weft.effects import Program, Schema
    from weft.errors import WeftError
    from weft.outputs import IntermediateTensors, Output
    from weft.padding import inert, pad, unpad
    from weft.sampling import SamplingParams
    from weft.settings import assert_max_captures, config, no_capture
    from weft.stages.adapter_checkpoint import load_adapter
    from weft.stages.adapters import Adapter
    from weft.stages.model import Model, load
    from weft.state import State, admit, advance
    from weft.transforms.borrowing import check_borrowed
    from weft.transforms.dispatch import Decision, dispatch
    from weft.transforms.dispatch_table import dispatch_table
    from weft.transforms.engine.engine import Engine
    from weft.transforms.engine.outputs import RequestOutput
    from weft.transforms.engine.prompts import EmbedsPrompt
    from weft.transforms.engine.setup import EngineLimits
    from weft.transforms.engine.speculation import Speculation
    from weft.transforms.generate import Completion, generate
    from weft.transforms.graphified import clear_caches
    from weft.transforms.graphify import graphify
    from weft.transforms.ladder import Ladder, Limits, make_ladder
    from weft.transforms.microbatch import microbatch
    from weft.transforms.piecewise import piecewise
    from weft.transforms.pipeline import compose, pipeline
    from weft.transforms.scan import scan
    from weft.trees import axes, descriptor_field, pytree, static

__version__ = "0.1.0"

_HOMES = {
    "weft.batch": ("EMBEDDED", "LAST_TOKEN", "Batch"),
    "weft.descriptor": ("BatchDescriptor", "Descriptor"),
    "weft.donation": ("clone", "donate", "donates"),
    "weft.effects": ("Program", "Schema"),
    "weft.errors": ("WeftError",),
    "weft.outputs": ("IntermediateTensors", "Output"),
    "weft.padding": ("inert", "pad", "unpad"),
    "weft.sampling": ("SamplingParams",),
    "weft.stages.adapter_checkpoint": ("load_adapter",),
    "weft.stages.adapters": ("Adapter",),
    "weft.stages.model": ("Model", "load"),
    "weft.settings": ("assert_max_captures", "config", "no_capture"),
    "weft.state": ("State", "admit", "advance"),
    "weft.transforms.borrowing": ("check_borrowed",),
    "weft.transforms.dispatch": ("Decision", "dispatch"),
    "weft.transforms.dispatch_table": ("dispatch_table",),
    "weft.transforms.engine.engine": ("Engine",),
    "weft.transforms.engine.outputs": ("RequestOutput",),
    "weft.transforms.engine.prompts": ("EmbedsPrompt",),
    "weft.transforms.engine.setup": ("EngineLimits",),
    "weft.transforms.engine.speculation": ("Speculation",),
    "weft.transforms.generate": ("Completion", "generate"),
    "weft.transforms.graphified": ("clear_caches",),
    "weft.transforms.graphify": ("graphify",),
    "weft.transforms.ladder": ("Ladder", "Limits", "make_ladder"),
    "weft.transforms.microbatch": ("microbatch",),
    "weft.transforms.piecewise": ("piecewise",),
    "weft.transforms.pipeline": ("compose", "pipeline"),
    "weft.transforms.scan": ("scan",),
    "weft.trees": ("axes", "descriptor_field", "pytree", "static"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MEANT = {"jit": "graphify", "compile": "graphify", "pmap": "pipeline", "shard_map": "pipeline", "LLM": "Engine"}
"""Names that others have for it."""
_SUBPACKAGES = ("effects", "errors", "proofs", "stages", "transforms")

__all__ = [
    "EMBEDDED",
    "LAST_TOKEN",
    "Adapter",
    "Batch",
    "BatchDescriptor",
    "Completion",
    "Decision",
    "Descriptor",
    "EmbedsPrompt",
    "Engine",
    "EngineLimits",
    "IntermediateTensors",
    "Ladder",
    "Limits",
    "Model",
    "Output",
    "Program",
    "RequestOutput",
    "SamplingParams",
    "Schema",
    "Speculation",
    "State",
    "WeftError",
    "admit",
    "advance",
    "assert_max_captures",
    "axes",
    "check_borrowed",
    "clear_caches",
    "clone",
    "compose",
    "config",
    "descriptor_field",
    "dispatch",
    "dispatch_table",
    "donate",
    "donates",
    "generate",
    "graphify",
    "inert",
    "load",
    "load_adapter",
    "make_ladder",
    "microbatch",
    "no_capture",
    "pad",
    "piecewise",
    "pipeline",
    "pytree",
    "scan",
    "static",
    "unpad",
]


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f"weft.{name}")
    if name not in _HOME_OF:
        meant = f"; weft.{_MEANT[name]} is what does it here" if name in _MEANT else ""
        raise AttributeError(f"module 'weft' has no attribute {name!r}{meant}", name=name, obj=sys.modules[__name__])
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBPACKAGES, "__version__"})
