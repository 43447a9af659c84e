"""Triton kernels with fast repeated launches, parallel compilation, and early placement.

Compilation: Triton compiles a kernel at its first launch with new kinds of arguments, one kernel
after another: half a second each, for some 70 kernels of a model. LLVM and the assembler release
Python's global interpreter lock, so threads can compile in parallel: 25 seconds of compilation took
6.7 with 8 threads, on 16 cores beside an H200. Triton also compiles a launcher in C for each list
of argument types, 0.26 s for each of 16 lists; `compiling` makes these too.

Launches: at each launch Triton inspects every argument for what a compilation may depend on, and
compares every constant with its earlier value. That took half of the time of an eager step of 537
launches. `Kernel` caches the compiled kernel for arguments of the same kinds. It still calls
Triton's launch hooks, but reads Triton's compilation settings only for new kinds.

Early placement (programmatic dependent launch, sm_90 and later:
https://docs.nvidia.com/cuda/cuda-programming-guide/04-special-topics/programmatic-dependent-launch.html):
a kernel's programs are placed on the multiprocessors while the previous kernel still runs, and wait
there for its end. A step of hundreds of short kernels then does not pay for the start of each one.
Every kernel that is launched with the options of `early` calls `begin()` in all of its programs,
before it writes anything or reads what a kernel may have written. So the end of one kernel implies
the end of all before it, and nothing is read or written too soon. A kernel that has little left to
do calls `release()`, which lets the next kernel's programs be placed; any earlier, they would crowd
on the multiprocessors that become free first. A captured graph stores this as a kind of edge.

A kernel for few tokens has few programs. It lets the next kernel's programs be placed `at_once`,
before it waits itself, so that programs of several kernels are resident, each kernel waiting for
the one before. A product or a norm whose weights nothing writes (`weft.ops.constants`) loads them
before it waits, so that the weights of the next product arrive while this one is still summing.
Such loads bypass the L1 cache, which may hold stale bytes. Nothing else is read before `begin()`.

Import this module only where triton is installed.
"""

# Triton's decorators have no types, and neither have the functions of a kernel.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from tqdm.auto import tqdm
from triton.language.target_info import cuda_capability_geq
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.ops.constants import ASKED
from weft.ops.tiles.tile import FEW_TOKENS
from weft.torchapi.private import current_device
from weft.values.bounded import BoundedDict

# The tensor memory accelerator (TMA) needs rows that start at a multiple of this many bytes.
LINE = 16
_MOST_THREADS = 16
_MOST_KNOWN = 4096
# The seconds after which a progress bar appears.
_BAR_AFTER = 1.0
# Types of options whose values are equal only if they are identical. Tensors are not among them,
# nor floats, since 0.0 equals -0.0.
_PLAIN = frozenset((bool, int, str, type(None), tl.dtype))
# The types of nearly all arguments that are not tensors.
_VALUES = _PLAIN | {float}

# Whether kernels run in Triton's interpreter, on the CPU.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


class Kernel:
    """A kernel: `kernel[grid](...)` launches it or, inside `compiling()`, compiles it for these
    arguments.

    Args:
        jit: the kernel as `triton.jit` returns it.
    """

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self._device = current_device()
        self._cache = BoundedDict[Any, tuple[Any, tuple[Any, ...]]](_MOST_KNOWN)
        parameters = inspect.signature(jit.fn).parameters.values() if hasattr(jit, "fn") else ()
        self._constant = ["constexpr" in str(parameter.annotation) for parameter in parameters]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        # `pending` remembers what was requested, since Triton takes half a millisecond to recognise
        # a kernel that is being compiled.
        if (pending := ASKED.get()) is not None:
            return functools.partial(self._compile, pending, grid)
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        # With the device, since a compiled kernel is loaded on one device.
        key = self._device(), *_kinds(args, options)
        if (cached := self._cache.get(key)) is not None:
            compiled, constants = cached
            # A compiled kernel takes all three dimensions of its grid.
            compiled[*grid, *(1,) * (3 - len(grid))](*args, *constants)
            return
        self._check_constants(args)
        compiled = _finished(self.jit[grid](*args, **options))
        if not hasattr(compiled, "run"):  # Triton's interpreter returns None
            return
        rest = self.jit.arg_names[len(args) :]
        # The cached launch passes constants by value, so they must be fully described by the key.
        if all(name in options and type(options[name]) in _PLAIN for name in rest):
            self._cache[key] = compiled, tuple(options[name] for name in rest)

    def _compile(
        self, pending: dict[Any, Any], grid: tuple[int, ...], *args: Any, **options: Any
    ) -> None:
        key = id(self.jit), *_kinds(args, options)
        if key not in pending:
            self._check_constants(args)
            pending[key] = self.jit.warmup(*args, grid=grid, **options)

    def _check_constants(self, args: Sequence[Any]) -> None:
        """Raise if a constant is given by position: there `_kinds` does not distinguish all
        integers."""
        if any(self._constant[: len(args)]):
            raise TypeError(f"a constant of {self.jit} is given by position: give it by name")


def _kinds(args: Iterable[Any], options: dict[str, Any]) -> list[Any]:
    """Everything about a launch that its compilation may depend on, except the device."""
    kinds: list[Any] = [*options]
    _add_kinds(kinds, args, exact=False)
    _add_kinds(kinds, options.values(), exact=True)
    return kinds


def _add_kinds(kinds: list[Any], values: Iterable[Any], *, exact: bool) -> None:
    """Add the kind of each value to `kinds`.

    Unless `exact`, the kind of an integer is what Triton specialises a kernel for: whether it is 1,
    whether 16 divides it, and its type (32 bits, 64 bits, or 64 bits unsigned). So most numbers of
    tokens share a kernel.
    """
    add = kinds.append
    for value in values:
        kind = type(value)
        if kind is int and not exact:
            add((value == 1, value % 16 == 0, -(2**31) <= value < 2**31, value < 2**63))
        # The look-up spares most values `isinstance`, which asks the metaclass of Tensor and took a
        # third of the time of recognising a launch.
        elif kind not in _VALUES and isinstance(value, Tensor):
            add(value.dtype)
            add(value.data_ptr() % 16)
        elif kind is TensorDescriptor:
            _add_kinds(kinds, (value.base, *value.shape, *value.strides), exact=False)
            _add_kinds(kinds, value.block_shape, exact=True)
        else:
            add(kind)
            add(value)


def kernel(**options: Any) -> Callable[[Callable[..., None]], Kernel]:
    """`triton.jit(**options)` for a kernel that the host launches."""
    return lambda function: Kernel(triton.jit(**options)(function))


def _on(device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)


class _Workers(ThreadPoolExecutor):
    """A thread pool whose finished tasks a progress bar counts."""

    def __init__(self, bar: Any) -> None:
        # The current device is a setting of each thread: the workers take over the caller's.
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        super().__init__(
            min(_MOST_THREADS, os.cpu_count() or 1), initializer=_on, initargs=(device,)
        )
        self._bar = bar

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        self._bar.total += 1
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(lambda _: self._bar.update())
        return future


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Compile, in other threads, the kernels that this thread would launch in the context; nothing
    is launched or written.

    All of them are compiled when the outermost such context exits.

    Raises:
        Whatever Triton's compiler raises, on exit.
    """
    if ASKED.get() is not None:
        yield
        return
    mode = getattr(triton, "AsyncCompileMode", None)  # older versions compile one after another
    pending: dict[Any, Any] = {}
    bar = tqdm(desc="compile", unit="", total=0, leave=False, disable=None, delay=_BAR_AFTER)
    with bar, _Workers(bar) as workers:
        with contextlib.nullcontext() if mode is None else mode(workers):
            token = ASKED.set(pending)
            try:
                yield
            finally:
                ASKED.reset(token)
        for future in [workers.submit(_make_launcher, compiled) for compiled in pending.values()]:
            future.result()


def _make_launcher(compiled: Any) -> None:
    """Make a kernel's launcher and load the kernel onto the device: reading the attribute `run`
    does both."""
    getattr(_finished(compiled), "run", None)


def _finished(compiled: Any) -> Any:
    """The compiled kernel; while another thread compiles it, Triton may return a future."""
    return compiled.result() if hasattr(compiled, "future") else compiled


@triton.jit
def begin(at_once=False):
    """Wait for the end of the previous kernel, so that its writes are visible.

    With `at_once`, let the next kernel's programs be placed before waiting. A second call returns
    at once.
    """
    if at_once:
        release()
    if not INTERPRETED and cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()


@triton.jit
def release():
    """Let the next kernel's programs be placed, once every program of this kernel has called this
    or ended."""
    if not INTERPRETED and cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()


def at_once(tokens: int) -> int:
    """1 if a kernel for this many tokens lets the next one's programs be placed at once, else 0.

    It is an argument of the launch (`do_not_specialize`), so that a kernel is compiled once for all
    numbers of tokens.
    """
    return int(tokens <= FEW_TOKENS)


def early(x: Tensor) -> dict[str, bool]:
    """The launch options of a kernel that calls `begin`, on the device of `x`."""
    return _early_on(x.device)


@functools.cache
def _early_on(device: torch.device) -> dict[str, bool]:
    supported = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"launch_pdl": True} if supported else {}
