"""The GPU back end: `torch.cuda.CUDAGraph`, one memory pool for all captures of one graphified function."""

import contextlib
from collections.abc import Callable
from typing import Any

import attrs
import torch

from weft.errors import CaptureError
from weft.torchapi import replayer
from weft.transforms.backends.audit import Audit


@attrs.frozen
class CudaRecording:
    """A CUDA graph, its outputs in the pool, and the tensors from outside that it reads."""

    graph: torch.cuda.CUDAGraph
    outputs: Any
    external: tuple[torch.Tensor, ...]
    replay: Callable[[], None]


class CudaBackend:
    """Captures on a side stream, after an eager warm-up there (kernels compile, libraries make their workspaces).

    The outputs of every capture stay referenced, so that no later capture of the pool reuses their memory.
    """

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool: Any = None

    def capture(self, fn: Callable[[], Any], audit: Audit) -> CudaRecording:
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                with audit:
                    fn()
                outputs = self._record(graph, fn, audit.call)
        finally:
            # Also after a refusal: what is restored then must come after what the warm-up wrote.
            current.wait_stream(self.stream)
        return CudaRecording(graph, outputs, tuple(audit.external.values()), replayer(graph))

    def _record(self, graph: torch.cuda.CUDAGraph, fn: Callable[[], Any], call: str) -> Any:
        self.stream.synchronize()
        # The pool of the first graph serves the rest; a graph alive in it keeps it valid.
        pool = self.pool if self.pool is not None else torch.cuda.graph_pool_handle()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            outputs = fn()
        except BaseException as error:
            # The capture is void, and may say so once more when it is ended; the stream is usable after that.
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            if not isinstance(error, RuntimeError):
                raise
            seen = str(error).splitlines()[0]
            raise CaptureError(call, f"CUDA refused: {seen}", "move what waits for the device out of it") from error
        graph.capture_end()
        self.pool = pool
        return outputs
