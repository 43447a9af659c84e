"""Triton kernels that can be compiled before they are launched, several at once. Import it only where triton is
installed.

A kernel is compiled when it is first launched with arguments of its kinds, one after the other: half a second each, for
some 70 of a model's. LLVM and the assembler leave the interpreter's lock, so that threads compile them side by side: 25
seconds of compilation took 6.7 with 8 threads, on 16 cores beside an H200.
"""

# Triton's decorators have no types.
# mypy: disable-error-code="untyped-decorator"

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import triton
from torch import Tensor
from tqdm.auto import tqdm
from triton.tools.tensor_descriptor import TensorDescriptor

_MOST_THREADS = 8
_BAR_AFTER = 1.0
"""Seconds until a progress bar shows."""
_ASKED: ContextVar[set[Any] | None] = ContextVar("weft.asked", default=None)
"""What was compiled so far, where kernels are compiled instead of launched: triton takes half a millisecond to find
that it knows a kernel that is still being compiled."""


class Kernel:
    """A kernel: `kernel[grid](...)` launches it, or, inside `compiling()`, has it compiled for such arguments.

    Args:
        jit: it, as `triton.jit` makes it.
    """

    def __init__(self, jit: Any) -> None:
        self.jit = jit

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if (asked := _ASKED.get()) is not None:
            return functools.partial(self._compile, asked, grid)
        launch: Callable[..., Any] = self.jit[grid]
        return launch

    def _compile(self, asked: set[Any], grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        key = id(self.jit), *map(_kind, args), *((name, _kind(value)) for name, value in options.items())
        if key not in asked:
            asked.add(key)
            self.jit.warmup(*args, grid=grid, **options)


def _kind(value: Any) -> Any:
    """All of a launch's argument that its compilation may depend on."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16
    if isinstance(value, TensorDescriptor):
        return _kind(value.base), *value.shape, *value.strides, *value.block_shape
    return type(value), value


def kernel(**options: Any) -> Callable[[Callable[..., None]], Kernel]:
    """`triton.jit(**options)`, of a kernel that is launched."""
    return lambda function: Kernel(triton.jit(**options)(function))


class _Workers(ThreadPoolExecutor):
    """Threads that a progress bar counts the work of."""

    def __init__(self, bar: Any) -> None:
        super().__init__(min(_MOST_THREADS, os.cpu_count() or 1))
        self._bar = bar

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        self._bar.total += 1
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(lambda _: self._bar.update())
        return future


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Inside, in this thread, no kernel is launched, so that what it would write stays as it is: it is compiled
    instead, in other threads. On the way out all are done.

    Raises:
        Whatever triton's compiler raises, on the way out.
    """
    mode = getattr(triton, "AsyncCompileMode", None)  # an old triton has none, and compiles one after the other
    token = _ASKED.set(set())
    try:
        with (
            tqdm(desc="compile", unit="kernel", total=0, leave=False, disable=None, delay=_BAR_AFTER) as bar,
            _Workers(bar) as workers,
            contextlib.nullcontext() if mode is None else mode(workers),
        ):
            yield
    finally:
        _ASKED.reset(token)
