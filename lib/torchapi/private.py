"""The private names of torch that weft uses, in one folder, so that a new torch breaks only that.
The names of torch.distributed are in `weft.torchapi.distributed`; what weft reads from Python's
frames is in `weft.torchapi.frames`."""

import contextlib
import ctypes
import functools
import gc
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar

import torch
from torch._C import (
    _is_tracing,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch._C._dynamo import eval_frame
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor as is_functorch_wrapped_tensor,
    maybe_get_level,
    peek_interpreter_stack,
)
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses import fake_tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from weft.torchapi.watching import KEY as WATCH_KEY, unwatched, watched

pytree = _pytree

# The operators that `reshape` becomes in a trace.
VIEWS = torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default

# The attributes of a module in which torch keeps the hooks that a call runs.
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# The dicts in which torch keeps the hooks of all modules, by name.
GLOBAL_HOOKS: dict[str, Any] = {
    name: getattr(torch.nn.modules.module, name)
    for name in (f"_global{hooks}" for hooks in MODULE_HOOKS)
}

# The dispatch key that has the highest priority inside a transform of torch.func, and only there.
FUNCTORCH_KEY = "FuncTorchDynamicLayerFrontMode"
F = TypeVar("F", bound=Callable[..., Any])


class DispatchMode(TorchDispatchMode):
    """`TorchDispatchMode` with type annotations; a subclass defines `__torch_dispatch__(func,
    types, args, kwargs)`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


class FunctionMode(TorchFunctionMode):
    """`TorchFunctionMode` with type annotations; a subclass defines `__torch_function__(func,
    types, args, kwargs)`, and sets `only_looks` if it only observes and changes no result."""

    only_looks = False

    def __enter__(self) -> Self:
        TorchFunctionMode.__enter__(self)
        return self

    def __exit__(self, *error: Any) -> None:
        TorchFunctionMode.__exit__(self, *error)


def before_compilation(function: Any) -> Any:
    """The function or the module that `torch.compile` was given, for a result of it; any other
    function or module as it is."""
    if isinstance(function, torch.nn.Module):
        return getattr(function, "_orig_mod", function)
    return getattr(function, "_torchdynamo_orig_callable", function)


def uncompiled(function: F) -> F:
    """Keep `torch.compile` from compiling a function and everything that it calls."""
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    eval_frame.set_code_exec_strategy(function.__code__, skip)
    return function


# The operator with which forward-mode derivatives allocate a tangent: zeros in the layout of
# another tensor.
ZEROS_OF_A_TANGENT: Any = torch.ops.aten._new_zeros_with_same_feature_meta.default


def is_higher_order(func: Any) -> bool:
    """Whether an operator takes functions as arguments, as torch.cond does."""
    return isinstance(func, HigherOrderOperator)


def operator_name(operator: Any) -> str | None:
    """The name `aten::sort` for `torch.ops.aten.sort` and its overloads; None for anything but an
    operator."""
    if isinstance(operator, OpOverload):
        return str(operator.name()).partition(".")[0]
    if isinstance(operator, OpOverloadPacket):
        return str(operator).replace(".", "::", 1)
    return None


def pytree_node(kind: type) -> Any:
    """A class's registration with torch's pytree (`flatten_fn`, `unflatten_fn`); None if it is not
    registered."""
    return pytree.SUPPORTED_NODES.get(kind)


def overload_of(name: str) -> Any:
    """The operator by its name, such as `weft::linear`, or the overload, such as
    `weft::linear.quantized`."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def all_schemas() -> list[Any]:
    """The schemas of all operators that torch has."""
    return list(torch._C._jit_get_all_schemas())


def schema_of(operator: Any) -> Any:
    """The schema of an operator's overload, which says which arguments it writes; None for anything
    else."""
    if isinstance(operator, OpOverload):
        return operator._schema
    return None


def unwrapped_call(operator: Any) -> Callable[..., Any]:
    """The C++ function that calls an operator's overload, without torch's Python wrapper."""
    call: Callable[..., Any] = operator._op
    return call


def unnamed_children(node: Any) -> list[Any] | None:
    """The children of a node whose class is registered with torch's pytree without key paths; None
    for any other node."""
    node_def = pytree.SUPPORTED_NODES.get(type(node))
    if node_def is None or node_def.flatten_with_keys_fn is not None:
        return None
    return list(node_def.flatten_fn(node)[0])


def unseen() -> contextlib.AbstractContextManager[Any]:
    """A context in which operators bypass all dispatch modes and watches."""
    # Most calls are under no dispatch mode, and then need no stack of contexts.
    guard: contextlib.AbstractContextManager[Any] = unwatched()
    if _len_torch_dispatch_stack() == 0:
        return guard
    stack = contextlib.ExitStack()
    stack.enter_context(_disable_current_modes())
    stack.enter_context(guard)
    return stack


def in_dispatch_mode() -> bool:
    """Whether a capture, a dispatch mode (such as a trace, fake tensors or a counter of operators),
    or a trace of torch.jit is active in this thread."""
    return _len_torch_dispatch_stack() > 0 or watched() or _is_tracing()


def in_trace_of_torch() -> bool:
    """Whether a trace that will run again on other values is being made in this thread: by
    `make_fx`, which `linearize` and `torch.export` use, or by torch.jit."""
    return get_proxy_mode() is not None or _is_tracing()


def in_functorch_transform() -> bool:
    """Whether a torch.func transform (vmap, grad, jvp, functionalize) or a forward-mode level is
    active around this call."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def without_transforms() -> contextlib.AbstractContextManager[Any]:
    """A context outside all torch.func transforms, for tensors that none of them made."""
    context: contextlib.AbstractContextManager[Any] = temporarily_clear_interpreter_stack()
    return context


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """A context outside all torch.func transforms, captures, and function and dispatch modes, for
    operators that none of these should see."""
    popped = []
    with contextlib.ExitStack() as stack:
        while _len_torch_function_stack():
            popped.append(_pop_torch_function_stack())
        try:
            stack.enter_context(without_transforms())
            stack.enter_context(unseen())
            yield
        finally:
            for mode in reversed(popped):
                _push_on_torch_function_stack(mode)


def still_alive(find: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """The tensors that `find` finds, less those that only reference cycles hold, or autograd's
    thread of a GPU.

    That thread lets go of what a backward pass used a moment after the pass has returned. It takes
    its tasks in order, so once it has run another one, it holds nothing of those before."""
    devices = {tensor.device for tensor in find()}
    if not devices:
        return []
    gc.collect()
    for device in devices:
        if device.type == "cuda":
            # Neither `view` nor its derivative launches a kernel.
            with without_modes(), torch.enable_grad():
                leaf = torch.empty(1, device=device, requires_grad=True)
                torch.autograd.grad(leaf.view(1), leaf, leaf.detach())
    return find()


def in_other_transform_than_grad() -> bool:
    """Whether a torch.func transform other than `grad`, `vjp` and `jacrev` (without its `vmap`) is
    active."""
    levels = get_interpreter_stack() or ()
    return forward_ad._current_level >= 0 or any(
        level.key() != TransformType.Grad for level in levels
    )


def in_vmap() -> bool:
    """Whether a `vmap` is active, at any level."""
    return any(level.key() == TransformType.Vmap for level in get_interpreter_stack() or ())


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a value for each row of a `vmap`, at any level."""
    while is_functorch_wrapped_tensor(tensor):
        if is_batchedtensor(tensor):
            return True
        tensor = get_unwrapped(tensor)
    return False


def is_differentiated_by_row(tensor: torch.Tensor) -> bool:
    """Whether a derivative inside a `vmap` follows a tensor. Then each row has its own derivative,
    even if all rows share one value."""
    stack = get_interpreter_stack() or ()
    vmaps = [level.level() for level in stack if level.key() == TransformType.Vmap]
    while is_functorch_wrapped_tensor(tensor):
        if not is_batchedtensor(tensor) and any(level < maybe_get_level(tensor) for level in vmaps):
            return True
        tensor = get_unwrapped(tensor)
    return False


def is_differentiated(tensor: torch.Tensor) -> bool:
    """Whether autograd, or a torch.func transform at any level, tracks operations on a tensor."""
    # Each wrapper may be tracked by itself, so all of them are asked.
    while True:
        dual = forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None
        if dual or (tensor.requires_grad and torch.is_grad_enabled()):
            return True
        if not is_functorch_wrapped_tensor(tensor):
            return False
        tensor = get_unwrapped(tensor)


def may_be_differentiated(tensor: torch.Tensor) -> bool:
    """Whether autograd, or a derivative of torch.func, may track operations on a tensor, whatever
    the grad mode. `vmap` alone tracks none, and `grad` of some arguments does not track the others.
    """
    if is_functorch_wrapped_tensor(tensor):
        stack = get_interpreter_stack() or ()
        forward_levels = {level.level() for level in stack if level.key() == TransformType.Jvp}
        while is_functorch_wrapped_tensor(tensor):
            if tensor.requires_grad or maybe_get_level(tensor) in forward_levels:
                return True
            tensor = get_unwrapped(tensor)
    if tensor.requires_grad:
        return True
    if forward_ad._current_level < 0:
        return False
    with unseen():
        return forward_ad.unpack_dual(tensor).tangent is not None


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside all wrappers of torch.func's transforms; under `vmap`, it has all rows."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def innermost_storage_id(tensor: torch.Tensor) -> int:
    """`storage_id` of the tensor inside all wrappers of torch.func's transforms; the wrappers have
    no storage."""
    return storage_id(innermost(tensor))


# Whether a tensor has a shape but no values, as in a trace.
is_fake: Callable[[torch.Tensor], bool] = fake_tensor.is_fake
# The number of active dispatch modes: traces, fake tensors, counters of operators.
num_dispatch_modes: Callable[[], int] = _len_torch_dispatch_stack
# The number of active function modes, such as `torch.device("cpu")` as a context.
num_function_modes: Callable[[], int] = _len_torch_function_stack
# A context in which no function mode sees a call.
WithoutFunctionModes: Callable[[], contextlib.AbstractContextManager[Any]] = (
    torch._C.DisableTorchFunction
)
WithoutAutocast: Callable[[], contextlib.AbstractContextManager[Any]] = torch._C._DisableAutocast
BelowAutograd: Callable[[], contextlib.AbstractContextManager[Any]] = (
    torch._C._AutoDispatchBelowAutograd
)

_in_watch = functools.partial(torch._C._dispatch_tls_is_dispatch_key_included, WATCH_KEY)
_top_hooks = functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, True)


def in_plain_surroundings() -> bool:
    """Whether nothing special is active: no capture, dispatch mode, torch.func transform,
    forward-mode level, hooks on saved tensors or trace of torch.jit."""
    return (
        _len_torch_dispatch_stack() == 0
        and peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and not _in_watch()
        and not _is_tracing()
        and _top_hooks() is None
    )


def saved_tensors_hooks() -> tuple[Any, Any] | None:
    """The innermost pair of `torch.autograd.graph.saved_tensors_hooks`; None if there is none."""
    hooks: tuple[Any, Any] | None = _top_hooks()
    return hooks


# Sets autograd's grad mode in this thread, in a tenth of the time of the context manager.
set_grad_mode: Callable[[bool], None] = torch._C._set_grad_enabled


def global_state_check() -> Callable[[], bool]:
    """A function that returns whether the grad mode, autocast and its dtypes, the default dtype,
    and the switches for precision and determinism still have their present values. It does not
    check inference mode."""
    check: Callable[[], bool] = GlobalStateGuard().check
    return check


def tensors_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that takes as many tensors and returns whether they match these in type, dtype,
    device, shape, strides, flags (conjugate, negative, requires_grad, inference) and dispatch keys,
    and are all different objects.

    It reads no storage, so the caller must check addresses."""
    check: Callable[..., bool] = TensorGuards(
        *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
    ).check
    return check


def copy_all(targets: tuple[torch.Tensor, ...], values: tuple[torch.Tensor, ...]) -> None:
    """`target.copy_(value)` for all pairs, in one launch on a GPU if dtypes, shapes and strides
    agree."""
    torch._foreach_copy_(targets, values)


def clone_all(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """A clone of each tensor; on a GPU one launch per dtype."""
    fresh = [torch.empty_like(x) for x in tensors]
    torch._foreach_copy_(fresh, tensors)
    return fresh


def empty_strided_on(
    device: torch.device,
) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
    """`torch.empty_strided(size, stride, dtype)` on the current device of this type, without
    torch's Python wrapper."""
    guards: Any = torch._C._dynamo.guards
    if device.type == "cuda":
        make: Callable[..., torch.Tensor] = guards._empty_strided_cuda
    else:
        make = guards._empty_strided_cpu
    return make


def current_device() -> Callable[[], int | None]:
    """`torch.cuda.current_device`, without torch's Python wrapper; always None without CUDA."""
    if not torch.cuda.is_available():
        return lambda: None  # in a CUDA build, torch's function would look for the driver
    index: Callable[[], int] = torch._C._cuda_getDevice
    return index


def is_capturing() -> Callable[[], bool]:
    """`torch.cuda.is_current_stream_capturing`, without torch's Python wrapper; always False
    without CUDA."""
    if not torch.cuda.is_available():
        return lambda: False
    check: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
    return check


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor to `device` without making the host wait.

    A copy from pageable memory waits for all earlier work on the device. A copy from pinned memory
    does not, and torch keeps that memory alive until the copy is done.
    """
    if tensor.device.type != "cpu" or torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def replayer(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """`graph.replay`, without torch's Python wrapper."""
    return functools.partial(torch._C._CUDAGraph.replay, graph)


def function_modes() -> tuple[Any, ...]:
    """The active torch function modes as parts of a key: a default device as its name, any other
    mode as itself. Modes that only observe are left out."""
    if _len_torch_function_stack() == 0:
        return ()
    modes = [
        mode
        for mode in _get_current_function_mode_stack()
        if not getattr(mode, "only_looks", False)
    ]
    return tuple(str(mode.device) if isinstance(mode, DeviceContext) else mode for mode in modes)


@contextlib.contextmanager
def without_function_mode(mode: TorchFunctionMode) -> Iterator[None]:
    """A context in which one of the active function modes is off."""
    popped = []
    while _len_torch_function_stack() and mode not in popped:
        popped.append(_pop_torch_function_stack())
    remaining = [other for other in reversed(popped) if other is not mode]
    for other in remaining:
        _push_on_torch_function_stack(other)
    try:
        yield
    finally:
        for _ in remaining:
            _pop_torch_function_stack()
        for other in reversed(popped):
            _push_on_torch_function_stack(other)


def default_device() -> torch.device | None:
    """The device of the innermost `torch.device` context, or of `torch.set_default_device`; None if
    there is none."""
    if _len_torch_function_stack():
        modes = _get_current_function_mode_stack()
    else:
        modes = ()
    devices = [mode.device for mode in modes if isinstance(mode, DeviceContext)]
    if devices:
        return devices[-1]
    return None


def switches() -> tuple[tuple[str, Any], ...]:
    """The settings that a result depends on besides its arguments, by name: the grad mode,
    autocast, defaults, and the switches by which torch chooses its kernels. `global_state_check`
    detects a change of any except inference mode and `backend_switches`."""
    devices = ("cpu", "cuda")
    return (
        ("inference mode", torch.is_inference_mode_enabled()),
        ("grad mode", torch.is_grad_enabled()),
        (
            "autocast",
            tuple(
                torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None
                for d in devices
            ),
        ),
        ("default dtype", torch.get_default_dtype()),
        ("deterministic algorithms", torch.get_deterministic_debug_mode()),
        ("float32 precision", torch._C._get_fp32_precision_getter("cuda", "matmul")),
        (
            "reduced precision of float16",
            torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        ),
        (
            "reduced precision of bfloat16",
            torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        ),
        *backend_switches(),
    )


def backend_switches() -> tuple[tuple[str, Any], ...]:
    """The switches that attention, convolutions and recurrent layers consult, by name."""
    c: Any = torch._C
    attention = (
        c._get_flash_sdp_enabled(),
        c._get_mem_efficient_sdp_enabled(),
        c._get_math_sdp_enabled(),
    )
    attention += (c._get_cudnn_sdp_enabled(), *c._get_sdp_priority_order())
    cudnn = (c._get_cudnn_enabled(), c._get_cudnn_benchmark(), c._get_cudnn_deterministic())
    return (
        ("kernels of attention", attention),
        (
            "cudnn",
            (
                *cudnn,
                c._get_fp32_precision_getter("cuda", "conv"),
                c._get_fp32_precision_getter("cuda", "rnn"),
            ),
        ),
    )


def switches_put_back() -> Callable[[], list[str]]:
    """A function that restores the settings (including the default device) that have changed by the
    time it is called, and returns their names."""
    before = _settings()
    properties = [(name, get(), get, put) for name, get, put in _backend_properties()]

    def put_back() -> list[str]:
        now = _settings()
        changed = {name: value for name, value in before.items() if now[name] != value}
        for name, value in changed.items():
            _SETTERS[name](value)
        names = list(changed)
        for name, value, get, put in properties:
            if get() != value:
                put(value)
                names.append(name)
        return names

    return put_back


def _settings() -> dict[str, Any]:
    """The settings that a user may change, but for those of `_backend_properties`. The order in which
    torch prefers attention kernels is not one of them: torch itself sets it in the first call on a
    GPU."""
    settings = dict(switches()) | {"default device": default_device()}
    del settings["cudnn"]  # properties and precisions
    return settings | {
        "float32 precision": _float32_precisions(),
        "kernels of attention": settings["kernels of attention"][:4],
    }


@functools.cache
def _backend_properties() -> tuple[tuple[str, Callable[[], Any], Callable[[Any], None]], ...]:
    """The name of each property of a module of `torch.backends`, its getter and its setter, but for
    precisions of float32."""
    return tuple(
        (f"{name}.{key}", prop.getter, prop.setter)
        for name, module in sorted(sys.modules.items())
        if name.startswith("torch.backends.")
        for key, prop in vars(type(module)).items()
        if isinstance(prop, torch.backends.ContextProp) and not key.endswith(("32", "precision"))
    )


# The precisions of float32 that `torch.backends` sets, by back end and kind of operator. What is not
# set has that of its back end, and this the generic one.
_PRECISIONS = (
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)
# The older functions that get and set some of them. They have a memory of their own: torch raises
# an error where what one of them was last given is not what is set.
_OLDER_PRECISIONS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32),
)


def _float32_precisions() -> tuple[Any, ...]:
    """The values that the older functions return, with None for an error, and then the precisions
    themselves."""
    older = []
    for get, _ in _OLDER_PRECISIONS:
        try:
            older.append(get())
        except RuntimeError:
            older.append(None)
    return (*older, *(torch._C._get_fp32_precision_getter(*at) for at in _PRECISIONS))


def _set_float32_precisions(values: tuple[Any, ...]) -> None:
    count = len(_OLDER_PRECISIONS)
    for (_, set_older), value in zip(_OLDER_PRECISIONS, values[:count], strict=True):
        if value is not None:
            set_older(value)
    for at, value in zip(_PRECISIONS, values[count:], strict=True):
        torch._C._set_fp32_precision_setter(*at, value)


def _set_autocast(dtypes: tuple[torch.dtype | None, ...]) -> None:
    for device, dtype in zip(("cpu", "cuda"), dtypes, strict=True):
        torch.set_autocast_enabled(device, dtype is not None)
        if dtype is not None:
            torch.set_autocast_dtype(device, dtype)


def _set_attention(value: tuple[Any, ...]) -> None:
    c: Any = torch._C
    flash, mem_efficient, math, cudnn = value
    c._set_sdp_use_flash(flash)
    c._set_sdp_use_mem_efficient(mem_efficient)
    c._set_sdp_use_math(math)
    c._set_sdp_use_cudnn(cudnn)


def _set_reduced_precision(setter: str) -> Callable[[Any], None]:
    """A setter for a switch whose value is one value or a tuple of them."""
    return lambda value: getattr(torch._C, setter)(
        *(value if isinstance(value, tuple) else (value,))
    )


# The functions that set each of the `switches` and the default device, by name.
_SETTERS: dict[str, Callable[[Any], Any]] = {
    "inference mode": lambda enabled: None,  # only the context that was entered can leave it
    "grad mode": torch._C._set_grad_enabled,
    "autocast": _set_autocast,
    "default dtype": torch.set_default_dtype,
    "deterministic algorithms": torch.set_deterministic_debug_mode,
    "float32 precision": _set_float32_precisions,
    "reduced precision of float16": _set_reduced_precision(
        "_set_cublas_allow_fp16_reduced_precision_reduction"
    ),
    "reduced precision of bfloat16": _set_reduced_precision(
        "_set_cublas_allow_bf16_reduced_precision_reduction"
    ),
    "kernels of attention": _set_attention,
    "default device": torch.set_default_device,
}


def generator_bytes(generator: torch.Generator) -> bytes:
    """A random generator's state, read without dispatching an operator."""
    with torch._C.DisableTorchFunction():
        state = generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.numel())


def generator_id(generator: torch.Generator) -> int:
    """A number that identifies a generator as long as it lives. `id` does not: each operator
    receives a new Python object for it."""
    return int(_address_of(generator))


def children_of(spec: Any) -> list[Any]:
    """The children of a tree's structure."""
    # `children` in newer versions of torch, `children_specs` in older ones.
    return list(spec.children() if hasattr(spec, "children") else spec.children_specs)


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor at the same address that does not keep the memory alive; the caller must."""
    storage = tensor.untyped_storage()
    unowned_storage = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return seen_as(
        alias.set_(unowned_storage, tensor.storage_offset(), tensor.size(), tensor.stride()), tensor
    )


def seen_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A view of `tensor` with the lazy conjugate and negative flags of `like`."""
    if like.is_conj():
        view = torch._conj(tensor)
    else:
        view = tensor
    if like.is_neg():
        return torch._neg_view(view)
    return view


def current_stream_id(device_index: int) -> Callable[[], int]:
    """`torch.cuda.current_stream(device).cuda_stream`, without torch's Python wrapper."""
    return functools.partial(torch._C._cuda_getCurrentRawStream, device_index)


@contextlib.contextmanager
def kept_pool(
    device: torch.device, pool: tuple[int, int]
) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """A context that keeps the memory pool of graphs, even if no graph uses it yet, and gives a
    function that makes contexts in which this thread allocates from the pool."""
    index = device.index or 0
    entered = []

    @contextlib.contextmanager
    def allocating() -> Iterator[None]:
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, pool)
        entered.append(pool)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(index, pool)

    try:
        yield allocating
    finally:
        for each in entered:
            torch._C._cuda_releasePool(index, each)


def stop_allocating_to_pool(device: torch.device, pool: tuple[int, int]) -> None:
    """Tell the allocator that a capture is over, in case `capture_end` failed before it did so
    itself (https://github.com/pytorch/pytorch/pull/180395)."""
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)
        torch._C._cuda_releasePool(device.index or 0, pool)


def changes_of(tensors: Iterable[torch.Tensor]) -> int:
    """The number of in-place changes to these tensors that torch has counted. None of the tensors
    may have been made in inference mode.

    torch counts operators, but neither writes to `.data`, nor fused optimizers, nor other writes to
    memory.
    """
    return sum(map(_version_of, tensors))


def counted_changes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The number of in-place changes to each of these tensors, counted as in `changes_of`. Empty
    where torch does not count: while it compiles, in a transform of torch.func, and for tensors
    made in inference mode."""
    uncounted = torch.compiler.is_dynamo_compiling() or peek_interpreter_stack() is not None
    if uncounted or any(x.is_inference() for x in tensors):
        return []
    return list(map(_version_of, tensors))


_version_of, _address_of = operator.attrgetter("_version"), operator.attrgetter("_cdata")


def storage_id(tensor: torch.Tensor) -> int:
    """A number that identifies the storage of `tensor` as long as the storage lives, even after a
    resize. For a tensor without a storage (sparse), a number that identifies the tensor."""
    if tensor.layout is not torch.strided:
        return -id(tensor)
    return int(tensor.untyped_storage()._cdata)
