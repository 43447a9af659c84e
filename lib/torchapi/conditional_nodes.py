"""WHILE nodes of CUDA graphs, by `cuda.bindings`: a part of a capture that repeats while a flag on
the device is true.

A small kernel copies the flag into the node's condition, once before the node and once at the end
of each repetition. The driver compiles this kernel, and supplies `cudaGraphSetConditional`.
"""

import ctypes
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# The PTX that NVRTC makes from `cudaGraphSetConditional(handle, *flag ? 1 : 0)`. It is stored here
# so that no compiler is needed at run time.
_PTX = b"""
.version 8.4
.target sm_75
.address_size 64
.extern .func cudaGraphSetConditional (.param .b64 handle, .param .b32 value);
.visible .entry set_condition(.param .u64 handle, .param .u64 flag)
{
    .reg .pred %holds;
    .reg .b16 %byte;
    .reg .b32 %value;
    .reg .b64 %handle, %generic, %global;
    ld.param.u64 %handle, [handle];
    ld.param.u64 %generic, [flag];
    cvta.to.global.u64 %global, %generic;
    ld.global.u8 %byte, [%global];
    setp.ne.s16 %holds, %byte, 0;
    selp.u32 %value, 1, 0, %holds;
    {
        .param .b64 first;
        st.param.b64 [first+0], %handle;
        .param .b32 second;
        st.param.b32 [second+0], %value;
        call.uni cudaGraphSetConditional, (first, second);
    }
    ret;
}
"""
# CUDA 12.4.
_LEAST_DRIVER = 12040


def _checked(call: str, result: tuple[Any, ...]) -> list[Any]:
    error, *values = result
    if int(error):
        raise RuntimeError(f"{call}: {getattr(error, 'name', error)}")
    return values


def why_unavailable(device: torch.device) -> str | None:
    """The reason why a capture on this device cannot have a WHILE node; None if it can. It also
    loads the kernel, which is not allowed during a capture."""
    try:
        with torch.cuda.device(device):
            _kernel(torch.cuda.current_device())
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


@functools.cache
def _bindings(name: str) -> Any:
    return importlib.import_module(f"cuda.bindings.{name}")


@functools.cache
def _kernel(_: int) -> Any:
    """The kernel on the current device, and the module that holds it. The argument is the device's
    number, for the cache."""
    driver = _bindings("driver")
    runtime = _bindings("runtime")
    (version,) = _checked("cudaDriverGetVersion", runtime.cudaDriverGetVersion())
    if version < _LEAST_DRIVER:
        raise RuntimeError(
            f"the driver supports CUDA {version}, and WHILE nodes need {_LEAST_DRIVER}"
        )
    torch.zeros((), device="cuda")  # makes sure that the device has a CUDA context
    image = ctypes.create_string_buffer(_PTX)
    (module,) = _checked("cuModuleLoadData", driver.cuModuleLoadData(ctypes.addressof(image)))
    (function,) = _checked(
        "cuModuleGetFunction", driver.cuModuleGetFunction(module, b"set_condition")
    )
    return function, module


def _set_condition(
    device: torch.device, handle: Any, flag: Tensor, stream: torch.cuda.Stream
) -> None:
    function, _ = _kernel(device.index)
    values = ctypes.c_ulonglong(int(handle)), ctypes.c_void_p(flag.data_ptr())
    # `cuLaunchKernel` takes the addresses of the arguments, and copies them before it returns.
    places = (ctypes.c_void_p * 2)(*map(ctypes.addressof, values))
    launch = _bindings("driver").cuLaunchKernel
    _checked(
        "cuLaunchKernel",
        launch(function, 1, 1, 1, 1, 1, 1, 0, stream.cuda_stream, ctypes.addressof(places), 0),
    )


def repeat_while(
    flag: Tensor, step: Callable[[], None], stream: torch.cuda.Stream, pool: Any
) -> None:
    """Add a WHILE node to the capture of the current stream; it repeats `step` while `flag` is
    true.

    Args:
        flag: [] bool on the device; `step` writes it.
        step: launches one repetition on the current stream.
        stream: another stream, on which the repetition is captured.
        pool: a `torch.cuda.MemPool` for the memory of `step`; it must live as long as the graph.

    Raises:
        RuntimeError: CUDA refuses the node. Then the surrounding capture has to end.
    """
    runtime = _bindings("runtime")
    driver = _bindings("driver")
    device = flag.device
    outer = torch.cuda.current_stream(flag.device)
    graph = _captured(runtime, outer)[0]
    (handle,) = _checked(
        "cudaGraphConditionalHandleCreate", runtime.cudaGraphConditionalHandleCreate(graph, 0, 0)
    )
    _set_condition(device, handle, flag, outer)
    graph, dependencies = _captured(runtime, outer)
    node, body = _add_node(driver, graph, dependencies, handle)
    # The node was added to the graph directly, so tell the stream that its later work follows it.
    kept = runtime.cudaStreamUpdateCaptureDependenciesFlags.cudaStreamSetCaptureDependencies
    updated = runtime.cudaStreamUpdateCaptureDependencies(outer.cuda_stream, [node], None, 1, kept)
    _checked("cudaStreamUpdateCaptureDependencies", updated)
    # In the global mode, some calls of CUDA in other threads are errors during a capture.
    mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    begun = runtime.cudaStreamBeginCaptureToGraph(stream.cuda_stream, body, None, None, 0, mode)
    _checked("cudaStreamBeginCaptureToGraph", begun)
    try:
        with torch.cuda.use_mem_pool(pool, device), torch.cuda.stream(stream):
            step()
            _set_condition(device, handle, flag, stream)
    except BaseException:
        # Leave the stream usable; the error says what went wrong, so this result is not checked.
        runtime.cudaStreamEndCapture(stream.cuda_stream)
        raise
    _checked("cudaStreamEndCapture", runtime.cudaStreamEndCapture(stream.cuda_stream))


def _captured(runtime: Any, stream: torch.cuda.Stream) -> tuple[Any, list[Any]]:
    """The graph that a stream is captured into, and the nodes that its next node depends on."""
    status, _, graph, dependencies, *_ = _checked(
        "cudaStreamGetCaptureInfo", runtime.cudaStreamGetCaptureInfo(stream.cuda_stream)
    )
    if status != runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive:
        raise RuntimeError(f"cudaStreamGetCaptureInfo: the stream is not capturing ({status})")
    return graph, list(dependencies or ())


def _add_node(driver: Any, graph: Any, dependencies: list[Any], handle: Any) -> tuple[Any, Any]:
    """Add a WHILE node; returns it and its empty body."""
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle = handle
    params.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
    # A WHILE node has one body.
    params.conditional.size = 1
    (params.conditional.ctx,) = _checked("cuCtxGetCurrent", driver.cuCtxGetCurrent())
    added = driver.cuGraphAddNode(graph, dependencies, None, len(dependencies), params)
    (node,) = _checked("cuGraphAddNode", added)
    return node, params.conditional.phGraph_out[0]
