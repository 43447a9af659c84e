"""Mistakes with a custom function that is graphified, whole or in pieces."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from answers import Mistake, X, f, g
from refusal import REMEDY
from torch import Tensor

import weft
from weft.errors import (
    ArgumentError,
    CacheMissError,
    CaptureError,
    DeviceError,
    TooManyCapturesError,
)


@attrs.frozen(eq=False)
class NoPytree:
    """A class that forgot `@weft.pytree`."""

    x: Tensor


def collects(kept: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x + 1

    return keep


def frozen_miss() -> None:
    step = weft.graphify(f)
    step(X)
    step.freeze()
    step(torch.ones(4))


def one_capture_too_many() -> None:
    step = weft.graphify(f)
    with weft.assert_max_captures(1):
        step(X)
        step(torch.ones(4))


def set_config(name: str, value: Any) -> None:
    setattr(weft.config, name, value)


def dict_for_static() -> None:
    weft.graphify(lambda x, how: x, static_argnames="how")(X, {"by": 2})


MISTAKES = {
    "graphify: an option of jit": Mistake(
        lambda: weft.graphify(g, donate_argnums=(0,)),
        ArgumentError,
        "graphify(..., donate_argnums=...)",
        "'donate_argnums', which is no argument of it",
        "donate_argnames=[...], by name",
    ),
    "graphify: an argument that is none": Mistake(
        lambda: weft.graphify(f, donate_argnames=["state"]),
        CaptureError,
        "graphify(f, ...)",
        "donate_argnames holds 'state', which is not one of its arguments",
        "one of x",
    ),
    "graphify: a back end that is none": Mistake(
        lambda: weft.graphify(f, backend="cudagraph"),
        DeviceError,
        "graphify(..., backend='cudagraph')",
        "an unknown back end",
        "backend='tape', 'cuda' or None",
    ),
    "graphify: a call in place of a function": Mistake(
        lambda: weft.graphify(f(X)),
        CaptureError,
        "graphify(<a Tensor>, ...)",
        "a tensor of shape (3,), the result of a call",
        "the function itself: graphify(f), and not graphify(f(x))",
    ),
    "graphify: a value read on the host": Mistake(
        lambda: weft.graphify(lambda x: x * x.max().item())(X),
        CaptureError,
        "graphify(<lambda>)",
        "Tensor.item reads a tensor on the host\n       at <line>",
        REMEDY,
    ),
    "graphify: a branch on data": Mistake(
        lambda: weft.graphify(lambda x: x if x.sum() > 0 else -x)(X),
        CaptureError,
        "graphify(<lambda>)",
        "a branch on a tensor's value\n       at <line>",
        REMEDY,
    ),
    "graphify: a write to an argument": Mistake(
        lambda: weft.graphify(lambda x: x.add_(1))(X),
        CaptureError,
        "graphify(<lambda>)",
        "aten.add_.Tensor writes to x of shape (3,), which it does not own\n       at <line>",
        "return a new tensor, or donate the argument (donate_argnames=...)",
    ),
    "graphify: a list that collects": Mistake(
        lambda: weft.graphify(collects([]))(X),
        CaptureError,
        "graphify(keep)",
        "an argument, or a view of one, is kept and not returned (float32[3]): in a cache, a global"
        " or an attribute",
        "keep a clone of it outside the function",
    ),
    "graphify: an array of numpy": Mistake(
        lambda: weft.graphify(f)(X.numpy()),
        CaptureError,
        "f(...)",
        "x is not a tensor and cannot be hashed (unhashable type: 'numpy.ndarray')",
        "torch.from_numpy(array)",
    ),
    "graphify: a class that is no pytree": Mistake(
        lambda: weft.graphify(lambda b: b.x)(NoPytree(X)),
        CaptureError,
        "<lambda>(...)",
        "b is a NoPytree, which is neither a tensor, a plain value nor a pytree",
        "register its class (weft.pytree), pass its tensors, or name it in static_argnames if it"
        " never changes",
    ),
    "graphify: a new shape after freeze": Mistake(
        frozen_miss,
        CacheMissError,
        "f(...)",
        "a miss after freeze(): x: shape (4,), captured (3,)",
        "capture this signature before freeze(), or call it with arguments like the captured ones",
    ),
    "graphify: a capture too many": Mistake(
        one_capture_too_many,
        TooManyCapturesError,
        "with weft.assert_max_captures(1): f",
        "one capture more (x: shape (4,), captured (3,)), after: f",
        "call with arguments like the captured ones, or allow more captures",
    ),
    "piecewise: an operator that is not called": Mistake(
        lambda: weft.piecewise(f, split_at="aten::sort")(X),
        CaptureError,
        "graphify(f)",
        "no call of aten::sort, which split_at names",
        "name an operator that it calls: aten::add",
    ),
    "graphify: a setting of another name": Mistake(
        lambda: set_config("log_capture", True),
        ArgumentError,
        "weft.config.log_capture = True",
        "'log_capture', which is no setting",
        "explain_cache_misses or log_captures",
    ),
    "graphify: a setting that is no bool": Mistake(
        lambda: set_config("log_captures", "yes"),
        ArgumentError,
        "weft.config.log_captures = 'yes'",
        "a str",
        "True or False",
    ),
    "graphify: a number for names": Mistake(
        lambda: weft.graphify(f, donate_argnames=0),
        CaptureError,
        "graphify(f, ...)",
        "donate_argnames=0",
        "donate_argnames=[...], the names of arguments",
    ),
    "graphify: a dict that is static": Mistake(
        dict_for_static,
        CaptureError,
        "<lambda>(...)",
        "how is not a tensor and cannot be hashed (<any>)",
        "<any>, or take how out of static_argnames",
    ),
    "graphify: a move to another device": Mistake(
        lambda: weft.graphify(lambda x: x.to("meta"))(X),
        CaptureError,
        "graphify(<lambda>)",
        "a copy from cpu to meta inside the function\n<any>",
        "copy it before the call, or after it: x.to(device)",
    ),
    "graphify: a form of listing": Mistake(
        lambda: weft.graphify(f).lower(X).as_text("svg"),
        CaptureError,
        "f.lower(...).as_text('svg')",
        "no such form",
        "'text' or 'dot'",
    ),
}
