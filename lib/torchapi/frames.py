"""Facts about torch that only Python's frames tell, since torch offers them in no other way.

- A module of torch.nn leaves its fast path under a function mode, and computes other bits than outside a capture. Its
  reasons are a local variable of `forward`. Any other test would repeat the conditions of three modules, 15 to 21 in
  each, which change from one torch to the next.
- A function mode does not see `Tensor.__reduce_ex__`, which returns early for plain tensors, nor the pickler, which
  reads storages and not tensors. `copy.copy` calls the same method and reads nothing; only the caller differs. A patch
  of `Tensor.__reduce_ex__` would affect all threads, and could not see the caller either.
"""

import sys
import types
from typing import Any

import torch

READ_BY_PICKLE: Any = torch.Tensor._backward_hooks
"""An attribute of tensors that `Tensor.__reduce_ex__` reads, and hardly any other code; see `in_pickle`."""


def compiled_caller(below: str) -> types.FrameType | None:
    """The frame that called a result of `torch.compile`, if one runs above the innermost frame of the module `below`;
    None if none runs. If torch called it, that is the function of torch that was called."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != below:
        name = frame.f_globals.get("__name__")
        if name == "torch._dynamo.eval_frame" and frame.f_code.co_qualname.startswith("_TorchDynamoContext."):
            return _first_of_torch(frame.f_back)  # and not DisableContext, which keeps the compiler off
        frame = frame.f_back
    return None


def _first_of_torch(frame: types.FrameType | None) -> types.FrameType | None:
    """The outermost of the frames of torch that this one is in; itself if it is not torch's."""
    while frame is not None and all(_is_of_torch(one) for one in (frame, frame.f_back)):
        frame = frame.f_back
    return frame


def _is_of_torch(frame: types.FrameType | None) -> bool:
    return frame is not None and frame.f_globals.get("__name__", "").startswith("torch.")


def off_fast_path() -> bool:
    """Whether a running module of torch.nn (attention, a layer of a transformer) left its fast path only because a
    function mode is active."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_globals.get("__name__", "").startswith("torch.nn.modules."):
            found = frame.f_locals
            why = str(found.get("why_not_fast_path") or found.get("why_not_sparsity_fast_path"))
            recorded = torch.is_grad_enabled() and any(
                x is not None and x.requires_grad for x in found.get("tensor_args", ())
            )
            if "has_torch_function" in why and not recorded:
                return True
        frame = frame.f_back
    return False


def in_pickle() -> bool:
    """Whether a tensor's `__reduce_ex__` is running, called by code other than `copy`, which keeps the storage."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__reduce_ex__":
        frame = frame.f_back
    caller = frame.f_back if frame is not None else None
    return caller is not None and caller.f_globals.get("__name__") != "copy"
