"""Triton kernels that can be compiled before they are launched, several at once, and that are launched again in a few
microseconds. Import it only where triton is installed.

A kernel is compiled when it is first launched with arguments of its kinds, one after the other: half a second each, for
some 70 of a model's. LLVM and the assembler leave the interpreter's lock, so that threads compile them side by side: 25
seconds of compilation took 6.7 with 8 threads, on 16 cores beside an H200. What launches a kernel is C that triton has
compiled for each list of types of arguments, 0.26 s for each of 16: it is made here too.

At each launch triton asks of every argument all that a compilation may depend on, and holds every constant against what
it was: half of the time of an eager step of 537 launches. Arguments of the kinds of an earlier launch get what that one
had compiled; triton's hooks on launches are called, and its settings of compilation count when a kind is new.
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

import torch
import triton
import triton.language as tl
from torch import Tensor
from tqdm.auto import tqdm
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.torchapi import current_device

_MOST_THREADS = 8
_MOST_KNOWN = 4096
_BAR_AFTER = 1.0
"""Seconds until a progress bar shows."""
_PLAIN = (bool, int, str, type(None), tl.dtype)
"""Options that are equal only if they are the same: no tensors, and no -0.0."""
_ASKED: ContextVar[dict[Any, Any] | None] = ContextVar("weft.asked", default=None)
"""Where kernels are compiled instead of launched, those so far, by kind: triton takes half a millisecond to find that
it knows one that is still being compiled."""


class Kernel:
    """A kernel: `kernel[grid](...)` launches it, or, inside `compiling()`, has it compiled for such arguments.

    Args:
        jit: it, as `triton.jit` makes it.
    """

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self._device = current_device()
        self._known: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        if (asked := _ASKED.get()) is not None:
            return functools.partial(self._compile, asked, grid)
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        key = self._device(), *_kinds(args, options)
        if (known := self._known.get(key)) is not None:
            compiled, constants = known
            compiled[*grid, *(1,) * (3 - len(grid))](*args, *constants)
            return
        compiled = _finished(self.jit[grid](*args, **options))
        if not hasattr(compiled, "run"):  # triton's interpreter gives nothing back
            return
        rest = self.jit.arg_names[len(args) :]
        if all(name in options and isinstance(options[name], _PLAIN) for name in rest):
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = compiled, tuple(options[name] for name in rest)

    def _compile(self, asked: dict[Any, Any], grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        key = id(self.jit), *_kinds(args, options)
        if key not in asked:
            asked[key] = self.jit.warmup(*args, grid=grid, **options)


def _kinds(args: tuple[Any, ...], options: dict[str, Any]) -> Iterator[Any]:
    """All of a launch that its compilation may depend on, the device excepted."""
    yield from map(_kind, args)
    for name, value in options.items():
        yield name, _kind(value)


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


def _on(device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)


class _Workers(ThreadPoolExecutor):
    """Threads that a progress bar counts the work of."""

    def __init__(self, bar: Any) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        super().__init__(min(_MOST_THREADS, os.cpu_count() or 1), initializer=_on, initargs=(device,))
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
    asked: dict[Any, Any] = {}
    bar = tqdm(desc="compile", unit="", total=0, leave=False, disable=None, delay=_BAR_AFTER)
    with bar, _Workers(bar) as workers:
        with contextlib.nullcontext() if mode is None else mode(workers):
            token = _ASKED.set(asked)
            try:
                yield
            finally:
                _ASKED.reset(token)
        for future in [workers.submit(_make_launcher, compiled) for compiled in asked.values()]:
            future.result()


def _make_launcher(compiled: Any) -> None:
    """Make what launches a kernel, which reading its attribute `run` does, and load it onto the device."""
    getattr(_finished(compiled), "run", None)


def _finished(compiled: Any) -> Any:
    """What is compiled; while another thread compiles ahead, triton may give a promise of it."""
    return compiled.result() if hasattr(compiled, "future") else compiled
