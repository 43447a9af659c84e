"""Import this first in a process that interprets kernels: it hides the driver, lets triton 3.6 use
numpy 2.4, refuses addresses outside of a kernel's arguments, which the interpreter reads and a GPU
may not, and halves the interpreter's time."""

from typing import Any

import no_driver  # noqa: F401
import numpy as np
import triton
import triton.experimental.gluon  # by the first kernel otherwise, in each child
from torch import Tensor
from triton import language as tl
from triton.runtime import interpreter

if triton.__version__.startswith("3.6."):  # https://github.com/triton-lang/triton/issues/9171
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor


# The modules whose kernels have tables of addresses.
_BY_ADDRESS = "weft.ops.copying.copies_triton", "weft.ops.transfers.peer_exchange_triton"


class Ranges:
    """The addresses of the arguments of the kernel that runs; all, if they are tables of addresses."""

    def __init__(self) -> None:
        self.starts = self.ends = np.zeros(0, np.uint64)

    def of(self, arguments: list[Any]) -> None:
        """Those of a kernel's arguments."""
        storages = [x.untyped_storage() for x in arguments if isinstance(x, Tensor)]
        ranges = sorted(
            {(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages if one.nbytes()}
        )
        self.starts, self.ends = np.array(ranges, np.uint64).reshape(-1, 2).T

    def check(self, kind: str, pointers: Any, mask: Any) -> None:
        """Raise IndexError if an address that is not masked is outside."""
        addresses = pointers.data[mask.data].astype(np.uint64)
        if not len(self.starts) or not addresses.size:
            return
        size = pointers.get_element_ty().primitive_bitwidth // 8
        index = np.searchsorted(self.starts, addresses, side="right") - 1
        outside = (index < 0) | (addresses + np.uint64(size) > self.ends[index])
        if outside.any():
            raise IndexError(
                f"{kind} {outside.sum()} of {outside.size} addresses outside of the kernel's"
                " arguments"
            )


_ranges = Ranges()
# The modules of triton's language that are patched for the kernel that runs
_patched: set[frozenset[int]] = set()
_patch_lang = interpreter._patch_lang
_to_host = interpreter.GridExecutor._init_args_hst
_load = interpreter.InterpreterBuilder.create_masked_load
_store = interpreter.InterpreterBuilder.create_masked_store


def patch_lang(fn: Any) -> Any:
    """Patch the language for a function, unless this kernel has done so: the interpreter, which
    does it at each call of a function inside a kernel, spends half of its time on that."""
    languages = frozenset(
        id(value) for value in fn.__globals__.values() if value is tl or value is tl.core
    )
    if languages in _patched:
        return None  # which the interpreter drops
    _patched.add(languages)
    return _patch_lang(fn)


def to_host(self: Any, arguments: Any, named: Any) -> Any:
    """The arguments as the kernel gets them, whose ranges are kept."""
    _patched.clear()
    host = _to_host(self, arguments, named)
    # The tensor of a descriptor
    values = [getattr(one, "base", one) for one in (*host[0], *host[1].values())]
    _ranges.of([] if self.fn.__module__ in _BY_ADDRESS else values)
    return host


def load(self: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
    """Load inside of the ranges."""
    _ranges.check("loads", ptrs, mask)
    return _load(self, ptrs, mask, *rest, **named)


def store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
    """Store inside of the ranges."""
    _ranges.check("stores", ptrs, mask)
    return _store(self, ptrs, value, mask, *rest, **named)


interpreter._patch_lang = patch_lang
interpreter.GridExecutor._init_args_hst = to_host
interpreter.InterpreterBuilder.create_masked_load = load
interpreter.InterpreterBuilder.create_masked_store = store
