"""Model steps as pure functions on PyTorch: `graphify` captures and replays them, `pipeline` makes
them span devices.

Names are imported on first use, so that `import weft` takes no longer than `import torch`.
`__init__.pyi` lists them.
"""

import sys
from typing import Any

from lazy_loader import attach_stub

_load, __dir__, __all__ = attach_stub(__name__, __file__)

__version__ = "0.1.0"

# Names in other libraries, and their equivalents in weft.
_MEANT = {
    "jit": "graphify",
    "compile": "graphify",
    "make_graphed_callables": "graphify",
    "pmap": "pipeline",
    "shard_map": "shard",
    "distribute_tensor": "distribute",
    "psum": "all_reduce",
    "psum_scatter": "reduce_scatter",
    "LLM": "generate",
    "LLMEngine": "Engine",
    "AsyncLLM": "Engine",
    "AsyncLLMEngine": "Engine",
    "AsyncEngineArgs": "EngineLimits",
    "EngineArgs": "EngineLimits",
    "CompletionOutput": "Completion",
    "LoRARequest": "load_adapter",
    "from_pretrained": "load",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _load(name)
    if name in _MEANT:
        meant = f"; weft.{_MEANT[name]} is what does it here"
    else:
        meant = ""
    raise AttributeError(
        f"module 'weft' has no attribute {name!r}{meant}", name=name, obj=sys.modules[__name__]
    )
