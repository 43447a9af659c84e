"""Kernels compiled ahead of the captures that launch them: every class runs once with weft's kernels left out, which
says what they would be launched with; what is not there yet is compiled meanwhile, several at once."""

import contextlib
from typing import Any

import torch

from weft.ops.register import triton_version
from weft.torchapi import DispatchMode, storage_id
from weft.transforms.graphs.backends.operators import tensors_in
from weft.transforms.graphs.cache import Graphs
from weft.transforms.graphs.calls.buffers import InputBufferPool
from weft.transforms.graphs.calls.call import Call
from weft.transforms.graphs.capture import ONE_AT_A_TIME, audit_of, prepare
from weft.transforms.graphs.options import Graphable


class _Zeros(DispatchMode):
    """Lets weft's operators return zeros, since nothing else writes their results: in range, whatever they index."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        if func.namespace == "weft":
            given = {storage_id(x) for x in tensors_in(args, kwargs or {})}
            for made in tensors_in(result):
                if storage_id(made) not in given:
                    made.zero_()
        return result


def compile_ahead(of: Graphable, call: Call, graphs: Graphs) -> None:
    """Compile what the captures of classes that have no graph yet will launch; the arguments are as they were after it.

    For functions of weft's own operators: what another one makes of zeros is not known here. A class that finds no
    memory is left to its capture, which says so.
    """
    if triton_version() is None:
        return
    from weft.ops.kernel_triton import compiling  # not at the top: a machine without triton can still import weft

    device = graphs.backend_for(call).device
    # Not the graphs' own buffers, which they may still be reading and whose bytes they count.
    input_buffers = InputBufferPool()
    missing = [rung for rung in graphs.rungs(call) if graphs.find(call, rung) is None]
    with compiling(), ONE_AT_A_TIME:
        for rung in missing:
            with contextlib.suppress(torch.OutOfMemoryError):
                prepared = prepare(of, call, rung.descriptor, input_buffers)
                with prepared.untouched(audit_of(of, prepared, device)), _Zeros():
                    prepared.run()
