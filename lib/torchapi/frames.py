"""Facts about running code that weft reads from Python's frames, since torch does not offer them.

- `nn.TransformerEncoder` converts its input to a nested tensor, but not under a function mode, as
  in a capture. What it returns at the padding then differs, and only its `forward` knows where the
  padding is.
- A function mode does not see `Tensor.__reduce_ex__`, which returns early for plain tensors, nor
  the pickler, which reads storages and not tensors. `copy.copy` calls the same method and reads
  nothing; only the caller differs. A patch of `Tensor.__reduce_ex__` would affect all threads, and
  could not see the caller either.
"""

import contextlib
import inspect
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

import torch

# An attribute of tensors that `Tensor.__reduce_ex__` reads, and hardly any other code does. Its
# read is the sign to ask `in_pickle`.
READ_BY_PICKLE: Any = torch.Tensor._backward_hooks


def drops_padding() -> bool:
    """Whether a running `nn.TransformerEncoder` would, outside a capture, convert its input to a
    nested tensor and so return zeros at the padding. Its layers take nested tensors only on their
    fast path."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_qualname == "TransformerEncoder.forward":
            encoder = frame.f_locals["self"]
            mask = frame.f_locals.get("src_key_padding_mask")
            can_nest = not encoder.training and getattr(encoder, "use_nested_tensor", False)
            is_recorded = torch.is_grad_enabled() and any(
                p.requires_grad for p in encoder.parameters()
            )
            is_padded = (
                mask is not None
                and frame.f_locals.get("mask") is None
                and frame.f_locals["src"].dim() == 3
            )
            return (
                can_nest
                and is_padded
                and not is_recorded
                and torch.backends.mha._is_fastpath_enabled
            )
        frame = frame.f_back
    return False


def in_pickle() -> bool:
    """Whether a tensor's `__reduce_ex__` is running, and was not called by `copy`, which keeps the
    storage."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__reduce_ex__":
        frame = frame.f_back
    if frame is not None:
        caller = frame.f_back
    else:
        caller = None
    return caller is not None and caller.f_globals.get("__name__") != "copy"


def custom_function(below: str) -> type | None:
    """The class of the innermost `torch.autograd.Function` whose `forward` runs above the innermost
    frame of the module `below`; None if none runs. Its `apply` has no frame, as it is not Python.
    """
    kinds = {
        code: kind
        for kind in _subclasses(torch.autograd.Function)
        if (code := _code_of_forward(kind)) is not None
    }
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != below:
        if (kind := kinds.get(frame.f_code)) is not None:
            return kind
        frame = frame.f_back
    return None


def _subclasses(kind: type) -> Iterator[type]:
    nearest: list[type] = kind.__subclasses__()
    for below in nearest:
        yield below
        yield from _subclasses(below)


def _code_of_forward(kind: Any) -> types.CodeType | None:
    """The code of a Function's `forward`, even if a decorator wraps it."""
    code: types.CodeType | None = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code


def clear_frames(error: BaseException, folder: str = "") -> None:
    """Drop the local variables in the frames of an error and of its causes.

    Generators and guards among them then end what they began, such as the hooks of
    `torch.utils.checkpoint`, although the error itself is kept.

    Args:
        error: the error. Frames that still run are left as they are.
        folder: clear only frames of code in files whose path begins with this.
    """
    errors: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in errors:
        errors.append(following)
        for frame, _ in traceback.walk_tb(following.__traceback__):
            if frame.f_code.co_filename.startswith(folder):
                with contextlib.suppress(RuntimeError):  # it still runs
                    frame.clear()
                    frame.f_locals  # noqa: B018 -- Python 3.11 keeps the dict that it made before, until asked again
        following = following.__cause__ or following.__context__
