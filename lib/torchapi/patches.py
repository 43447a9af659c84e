"""Patches of torch that captures need: whether a capture is running, what TorchScript reads, the
default generator, and the fast path of attention.

Each is installed at its first use, does nothing outside its context, and affects only the thread of
the context.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

_SIGNALLED: ContextVar[bool] = ContextVar("weft.capture_signalled", default=False)


@functools.cache
def _hear_the_signal() -> None:
    """Make `torch.cuda.is_current_stream_capturing`, under each of its names, return True in
    `signal_capture` too."""
    graphs: Any = torch.cuda.graphs
    is_capturing: Callable[[], bool] = graphs._cuda_isCurrentStreamCapturing
    graphs._cuda_isCurrentStreamCapturing = lambda: _SIGNALLED.get() or is_capturing()


@contextlib.contextmanager
def signal_capture() -> Iterator[None]:
    """A context in which `torch.cuda.is_current_stream_capturing()` is True, in this thread alone.

    Code that reads tensors on the host asks it first, so as not to do so in a CUDA graph
    (transformers' masks, torch's SyncBatchNorm: https://github.com/pytorch/pytorch/issues/78549),
    and in a real capture CUDA answers True. Making `torch.compiler.is_compiling()` True instead
    would have too many effects, and in all threads: optimizers, collectives and mixtures of experts
    then compute in other ways.
    """
    _hear_the_signal()
    token = _SIGNALLED.set(True)
    try:
        yield
    finally:
        _SIGNALLED.reset(token)


_HEARS_SCRIPTS: ContextVar[Callable[[str], None] | None] = ContextVar(
    "weft.hears_scripts", default=None
)
_READ_BY_SCRIPTS = ("prim::tolist", "prim::Print", "aten::format", "aten::str")


@functools.cache
def _hear_scripts() -> None:
    """Make calls of TorchScript functions and methods report host reads that use no operator to
    `hearing_scripts`."""

    def hearing(kind: Any) -> Callable[..., Any]:
        call: Callable[..., Any] = kind.__call__

        @functools.wraps(call)
        def heard(self: Any, *args: Any, **kwargs: Any) -> Any:
            tell = _HEARS_SCRIPTS.get()
            if tell is not None and (read := _read_by(self)) is not None:
                tell(read)
            return call(self, *args, **kwargs)

        return heard

    kinds: tuple[Any, ...] = (torch.jit.ScriptFunction, torch._C.ScriptMethod)
    for kind in kinds:
        kind.__call__ = hearing(kind)


def _read_by(script: Any) -> str | None:
    """The kind of the first node in a TorchScript function that reads a tensor on the host without
    an operator; None if there is none."""
    graph = script.inlined_graph  # a copy, which owns the nodes
    for kind in _READ_BY_SCRIPTS:
        for node in graph.findAllNodes(kind, True):
            if any(isinstance(value.type(), torch._C.TensorType) for value in node.inputs()):
                return kind
    return None


@contextlib.contextmanager
def hearing_scripts(tell: Callable[[str], None]) -> Iterator[None]:
    """A context in which `tell` is called before a TorchScript function runs in this thread that
    reads a tensor on the host without an operator. It gets the kind of the node that reads it."""
    _hear_scripts()
    token = _HEARS_SCRIPTS.set(tell)
    try:
        yield
    finally:
        _HEARS_SCRIPTS.reset(token)


# The stand-in for the CPU's default generator, and what to call before its seed is read.
_STANDS_FOR_DEFAULT: ContextVar[tuple[torch.Generator, Callable[[], None]] | None] = ContextVar(
    "weft.default_generator", default=None
)


@functools.cache
def _divert_default_generator() -> None:
    """Make torch's functions for the CPU's default generator use its stand-in, if there is one."""

    def diverting(name: str, method: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(torch.random, name)

        @functools.wraps(function)
        def divert(*args: Any, **kwargs: Any) -> Any:
            stand_in = _STANDS_FOR_DEFAULT.get()
            if stand_in is None:
                return function(*args, **kwargs)
            generator, before_seed_read = stand_in
            if name == "initial_seed":
                before_seed_read()
            return getattr(generator, method)(*args, **kwargs)

        return divert

    for name in ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state"):
        # A generator's own methods are called `get_state` and `set_state`.
        diverted = diverting(name, name.replace("rng_", ""))
        setattr(torch.random, name, diverted)
        setattr(torch, name, diverted)


@contextlib.contextmanager
def default_generator_is(
    generator: torch.Generator, before_seed_read: Callable[[], None]
) -> Iterator[None]:
    """A context in which `torch.manual_seed`, `torch.get_rng_state` and their like, called in this
    thread, use `generator` in place of the CPU's default generator. `torch.initial_seed` calls
    `before_seed_read` first."""
    _divert_default_generator()
    token = _STANDS_FOR_DEFAULT.set((generator, before_seed_read))
    try:
        yield
    finally:
        _STANDS_FOR_DEFAULT.reset(token)


_FAST_PATH_OFF: ContextVar[bool] = ContextVar("weft.attention_fast_path_off", default=False)


def _get_fastpath_enabled() -> bool:
    """Like torch's function of this name, but False in `without_attention_fast_path`.

    TorchScript compiles this function and leaves out the block. torch.compile can trace neither
    context variables nor torch's own function, so torch's flag is read directly.
    """
    if not torch.jit.is_scripting():  # type: ignore[attr-defined]
        off = not torch.compiler.is_dynamo_compiling() and _FAST_PATH_OFF.get()
        return not off and torch.backends.mha._is_fastpath_enabled
    return True


@functools.cache
def _ask_for_the_fast_path() -> None:
    """Make torch's attention call `_get_fastpath_enabled`."""
    torch.backends.mha.get_fastpath_enabled = _get_fastpath_enabled


@contextlib.contextmanager
def without_attention_fast_path() -> Iterator[None]:
    """A context in which torch.nn's attention and transformers do not take their fast path, in this
    thread only.

    In `eval()`, `nn.MultiheadAttention`, `nn.TransformerEncoderLayer` and `nn.TransformerEncoder`
    call one operator for the whole layer if they can. Its result differs in its bits from that of
    the operators that they call otherwise. Under a function mode, as in a capture, they cannot call
    it. For a graph to have the bits of the function itself, neither may take the fast path.
    """
    _ask_for_the_fast_path()
    token = _FAST_PATH_OFF.set(True)
    try:
        yield
    finally:
        _FAST_PATH_OFF.reset(token)
