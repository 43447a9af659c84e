"""The one module that imports torch's private names, so that a new torch breaks one file."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards
from torch._C._functorch import peek_interpreter_stack
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DispatchMode",
    "FunctionMode",
    "borrowed",
    "clone_all",
    "copy_all",
    "current_device",
    "current_stream_id",
    "empty_strided_on",
    "function_modes",
    "global_state_check",
    "host_store",
    "in_dispatch_mode",
    "in_functorch_transform",
    "in_plain_surroundings",
    "is_capturing",
    "is_higher_order",
    "operator_name",
    "process_group",
    "pytree",
    "rendezvous_store",
    "replayer",
    "stop_allocating_to_pool",
    "storage_id",
    "symmetric_memory",
    "tensors_check",
    "unnamed_children",
]


class DispatchMode(TorchDispatchMode):
    """`TorchDispatchMode` with types; a subclass defines `__torch_dispatch__(func, types, args, kwargs)`, which
    torch.compile may not trace."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that says so to torch.compile costs more than most handlers

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)

    def __enter__(self) -> Self:
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *error: Any) -> None:
        TorchDispatchMode.__exit__(self, *error)


class FunctionMode(TorchFunctionMode):
    """`TorchFunctionMode` with types; a subclass defines `__torch_function__(func, types, args, kwargs)`, and says
    whether it `only_looks`, so that results are what they are without it."""

    only_looks = False

    def __enter__(self) -> Self:
        TorchFunctionMode.__enter__(self)
        return self

    def __exit__(self, *error: Any) -> None:
        TorchFunctionMode.__exit__(self, *error)


def is_higher_order(func: Any) -> bool:
    """Whether an operator takes functions, as torch.cond does."""
    return isinstance(func, HigherOrderOperator)


def operator_name(operator: Any) -> str | None:
    """`aten::sort` for `torch.ops.aten.sort` and its overloads; None for what is no operator."""
    if isinstance(operator, OpOverload):
        return str(operator.name()).partition(".")[0]
    return str(operator).replace(".", "::", 1) if isinstance(operator, OpOverloadPacket) else None


def unnamed_children(node: Any) -> list[Any] | None:
    """The children of a node whose class was registered with torch's pytree without names for them; None for others."""
    known = pytree.SUPPORTED_NODES.get(type(node))
    return None if known is None or known.flatten_with_keys_fn is not None else list(known.flatten_fn(node)[0])


def in_dispatch_mode() -> bool:
    """Whether a dispatch mode is active in this thread: a capture, a trace, fake tensors, a counter of operators."""
    return _len_torch_dispatch_stack() > 0


def in_functorch_transform() -> bool:
    """Whether an outer torch.func transform (vmap, grad, jvp, functionalize) or a forward-mode level is active."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def in_plain_surroundings() -> bool:
    """Whether no dispatch mode, no function mode, no torch.func transform and no forward-mode level is active."""
    return (
        _len_torch_dispatch_stack() == 0
        and _len_torch_function_stack() == 0
        and peek_interpreter_stack() is None
        and forward_ad._current_level < 0
    )


def global_state_check() -> Callable[[], bool]:
    """A check that autograd's mode, autocast and its dtypes, the default dtype, and the switches of precision and
    determinism are as they are now. It says nothing about inference mode."""
    check: Callable[[], bool] = GlobalStateGuard().check
    return check


def tensors_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A check that as many tensors have the types, dtypes, devices, shapes, strides, flags (conjugate, negative,
    requires_grad, inference) and dispatch keys that these have now, and are different objects.

    It reads no storage: addresses are the caller's to check."""
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def copy_all(targets: tuple[torch.Tensor, ...], values: tuple[torch.Tensor, ...]) -> None:
    """`target.copy_(value)` for all pairs; one launch on a GPU if dtypes, shapes and strides agree."""
    torch._foreach_copy_(targets, values)


def clone_all(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """A clone of each; on a GPU one launch for those of one dtype."""
    fresh = [torch.empty_like(x) for x in tensors]
    torch._foreach_copy_(fresh, tensors)
    return fresh


def empty_strided_on(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
    """`torch.empty_strided(size, stride, dtype)` on the current device of this type, without the Python around it."""
    guards: Any = torch._C._dynamo.guards
    make: Callable[..., torch.Tensor] = (
        guards._empty_strided_cuda if device.type == "cuda" else guards._empty_strided_cpu
    )
    return make


current_device: Callable[[], int | None] = getattr(torch._C, "_cuda_getDevice", lambda: None)
"""The index of the current CUDA device; None in a torch without CUDA."""


def is_capturing() -> Callable[[], bool]:
    """`torch.cuda.is_current_stream_capturing`, without the Python around it; constant where there is no CUDA."""
    if not torch.cuda.is_available():
        return lambda: False
    check: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
    return check


def replayer(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """`graph.replay`, without the Python around it."""
    return functools.partial(torch._C._CUDAGraph.replay, graph)


def function_modes() -> tuple[Any, ...]:
    """What the torch function modes in force change: a default device by its name, any other mode by itself, but for
    those that only look."""
    if _len_torch_function_stack() == 0:
        return ()
    modes = [mode for mode in _get_current_function_mode_stack() if not getattr(mode, "only_looks", False)]
    return tuple(str(getattr(mode, "device", mode)) for mode in modes)


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor at the same place that does not keep the memory: whoever uses it must know that somebody else does."""
    storage = tensor.untyped_storage()
    held = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(held, tensor.storage_offset(), tensor.size(), tensor.stride())


def current_stream_id(device_index: int) -> Callable[[], int]:
    """`torch.cuda.current_stream(device).cuda_stream`, without the Python around it."""
    return functools.partial(torch._C._cuda_getCurrentRawStream, device_index)


def stop_allocating_to_pool(device: torch.device, pool: tuple[int, int]) -> None:
    """Tell the allocator that a capture is over, where `capture_end` failed before it did; it may have been told."""
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)
        torch._C._cuda_releasePool(device.index or 0, pool)


def storage_id(tensor: torch.Tensor) -> int:
    """An identity of the storage that `tensor` is a view of, as long as the storage lives; a resize keeps it."""
    return int(tensor.untyped_storage()._cdata)


_RUNS = itertools.count()


def rendezvous_store(rank: int, num_ranks: int, timeout: float) -> Any:
    """A `torch.distributed.Store` that all processes of a launcher share, and that no earlier call returned; of the
    default process group where there is one, else found by the launcher's variables (`env://`)."""
    if dist.is_initialized():
        whole = dist.distributed_c10d._get_default_store()
    else:
        whole, _, _ = next(dist.rendezvous("env://", rank, num_ranks, timeout=timedelta(seconds=timeout)))  # type: ignore[attr-defined]
    return dist.PrefixStore(f"weft/{next(_RUNS)}", whole)  # type: ignore[attr-defined]


def host_store(address: str, timeout: float) -> Any:
    """A store that this process hosts, at a free `port`, for a launcher's ranks to find."""
    return dist.TCPStore(address, 0, None, True, timedelta(seconds=timeout), wait_for_workers=False)  # type: ignore[attr-defined]


def process_group(backend: str, name: str, store: Any, rank: int, num_ranks: int, timeout: float) -> Any:
    """A process group of torch.distributed for `send(tensors, peer, tag)` and `recv(...)`, known to nobody else.

    Args:
        backend: `gloo` or `nccl`.
        name: different for each of a store.
    """
    own = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    if backend == "gloo":
        return dist.ProcessGroupGloo(own, rank, num_ranks, timedelta(seconds=timeout))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    return dist.ProcessGroupNCCL(own, rank, num_ranks, options)


def symmetric_memory(
    name: str, store: Any, rank: int, num_ranks: int, nbytes: int, device: torch.device
) -> list[Tensor]:
    """`nbytes` bytes of zeros on every rank's GPU, and a view of each rank's from here: [nbytes] uint8, one a rank.

    Collective: every rank calls it with the same size. The memory lives as long as the views.
    """
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

    own_store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    unique: Any = f"weft/{name}/{next(_RUNS)}"  # the registry is the process's; every rank counts alike
    group = dist.ProcessGroup(own_store, rank, num_ranks)
    gloo = dist.ProcessGroupGloo(own_store, rank, num_ranks, timedelta(seconds=60))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    _register_process_group(unique, group)
    _SymmetricMemory.set_group_info(unique, rank, num_ranks, own_store)
    own = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device, unique)
    own.zero_()
    torch.cuda.synchronize(device)
    handle = _SymmetricMemory.rendezvous(own)
    views = [handle.get_buffer(peer, (nbytes,), torch.uint8) for peer in range(num_ranks)]
    handle.barrier()
    torch.cuda.synchronize(device)
    return [_with_owner(view, (own, handle)) for view in views]


def _with_owner(view: Tensor, owner: Any) -> Tensor:
    view.__weft_owner__ = owner  # type: ignore[attr-defined]
    return view
