"""Model steps as pure functions on PyTorch: `graphify` captures and replays them, `pipeline` makes
them span devices.

Begin with these six:

- `graphify(f)` returns `f` with captured graphs, which its later calls replay.
- `pipeline(stages)` returns the step that runs the stages one after the other, on several ranks.
- `shard(f, mesh, in_placements, out_placements)` returns `f` run on every rank of a mesh.
- `load(path)` returns a checkpoint's `Model`.
- `generate(model, prompts, max_tokens=...)` returns a `Completion` per prompt.
- `Engine(model)` serves requests that come and go; `step()` returns what each of them got.

Names are imported on first use, so that `import weft` takes no longer than `import torch`.
`__init__.pyi` lists them.
"""

import sys
from typing import Any

from lazy_loader import attach_stub

_load, __dir__, __all__ = attach_stub(__name__, __file__)

__version__ = "0.1.0"

# Names in other libraries, and what to use here.
_MEANT = {
    "jit": "weft.graphify",
    "compile": "weft.graphify",
    "make_graphed_callables": "weft.graphify",
    "pmap": "weft.pipeline",
    "shard_map": "weft.shard",
    "distribute_tensor": "weft.distribute",
    "psum": "weft.all_reduce",
    "psum_scatter": "weft.reduce_scatter",
    "LLM": "weft.generate",
    "LLMEngine": "weft.Engine",
    "AsyncLLM": "weft.Engine",
    "AsyncLLMEngine": "weft.Engine",
    "AsyncEngineArgs": "weft.EngineLimits",
    "EngineArgs": "weft.EngineLimits",
    "CompletionOutput": "weft.Completion",
    "LoRARequest": "weft.load_adapter",
    "from_pretrained": "weft.load",
    "value_and_grad": "torch.func.grad_and_value",
    # These have the same names in JAX and in torch.func.
    **{
        name: f"torch.func.{name}"
        for name in ("vmap", "grad", "vjp", "jvp", "jacfwd", "jacrev", "hessian", "linearize")
    },
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _load(name)
    text = f"module 'weft' has no attribute {name!r}"
    if meant := _MEANT.get(name) or _among_transforms(name):
        text += f"; use {meant}"
    # From `name` and `obj`, Python adds a suggestion of the nearest name.
    raise AttributeError(text, name=name, obj=sys.modules[__name__])


def _among_transforms(name: str) -> str:
    """The name in `weft.transforms`; empty if it has none."""
    # Python itself asks modules for names like `__wrapped__`.
    if name.startswith("_") or name not in _load("transforms").__all__:
        return ""
    return f"weft.transforms.{name}"
