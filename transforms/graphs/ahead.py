"""`compile_ahead` compiles kernels before the captures that launch them: every class runs once without launching weft's
kernels, which records the kernels' arguments, and missing kernels are compiled meanwhile, several at once."""

import contextlib
from typing import Any

import torch

from weft.ops.register import triton_version
from weft.torchapi.private import storage_id
from weft.torchapi.watching import OperatorWatch
from weft.transforms.graphs.backends.operators import tensors_in
from weft.transforms.graphs.calls.buffers import InputBufferPool
from weft.transforms.graphs.calls.call import Call
from weft.transforms.graphs.capture import ONE_AT_A_TIME, audit_of, prepare
from weft.transforms.graphs.memo import Graphs
from weft.transforms.graphs.options import Graphable


class _Zeros(OperatorWatch):
    """Makes weft's operators return zeros, because no kernel writes their results; zeros are valid as any index."""

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func.namespace == "weft":
            inputs = {storage_id(x) for x in tensors_in(args, kwargs)}
            for output in tensors_in(result):
                if storage_id(output) not in inputs:
                    output.zero_()
        return result


def compile_ahead(graphable: Graphable, call: Call, graphs: Graphs) -> None:
    """Compile the kernels for the classes that have no graph yet; the arguments are left unchanged.

    It is for functions of weft's own operators, because another library's operator may fail on zeros. A class for which
    there is no memory is skipped: its capture will report that.
    """
    if triton_version() is None:
        return
    from weft.ops.kernel_triton import compiling  # imported here so that weft imports on machines without triton

    device = graphs.backend_for(call).device
    # A separate pool, because replays may still be reading the graphs' own buffers, and its bytes would be counted.
    input_buffers = InputBufferPool()
    missing = [rung for rung in graphs.rungs(call) if graphs.find(call, rung) is None]
    with compiling(), ONE_AT_A_TIME:
        for rung in missing:
            with contextlib.suppress(torch.OutOfMemoryError):
                prepared = prepare(graphable, call, rung.descriptor, input_buffers)
                with prepared.restored(audit_of(graphable, prepared, device)), _Zeros():
                    prepared.run()
