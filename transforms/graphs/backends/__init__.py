"""Capture back ends: one small protocol, and the choice of a back end by device."""

from collections.abc import Callable, Iterable, Set
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.errors import DeviceError
from weft.transforms.graphs.backends.audit import Audit
from weft.transforms.graphs.calls.buffers import InputBufferPool

# The names that `graphify(..., backend=...)` takes.
NAMES = ("tape", "cuda")


class Recording(Protocol):
    """A captured run with fixed inputs and outputs, which can be replayed."""

    @property
    def outputs(self) -> Any:
        """The outputs of the captured function; each replay overwrites these tensors."""

    @property
    def num_pieces(self) -> int:
        """The number of graphs: 1, and 1 more per call of a split operator."""

    @property
    def nbytes(self) -> int:
        """The bytes of tensor memory that the capture took, without the input buffers."""

    @property
    def driver_bytes(self) -> int:
        """The bytes that the device's driver took for the graphs themselves. The driver reuses the
        memory of a dropped graph, so a later graph counts fewer bytes."""

    def replay(self) -> None:
        """Run the recorded operators again on the current contents of the input buffers."""


class Backend(Protocol):
    """Records a function without arguments, whose inputs are fixed buffers, as a recording that can
    be replayed."""

    @property
    def name(self) -> str:
        """The name that `graphify(backend=...)` takes."""

    @property
    def device(self) -> torch.device:
        """The device of its recordings."""

    @property
    def input_buffers(self) -> InputBufferPool:
        """The memory for the input buffers of its recordings."""

    @property
    def wait_for_last_replay(self) -> Callable[[], None] | None:
        """A function to call before a replay's buffers are filled: it makes the current stream wait
        for the last replay, if that ran on another stream. None if the device has no streams."""

    @property
    def unable_to_loop(self) -> str | None:
        """The reason why its recordings cannot repeat a part of themselves; None if they can."""

    def allocating(self) -> AbstractContextManager[None]:
        """Context in which to allocate memory that replays use or that outlives the call: input
        buffers, padding sources, tables of copies. On a GPU it is on the back end's own stream, so
        that no other stream gets the memory of a dropped graph while a replay still uses it."""

    def capture(
        self, fn: Callable[[], Any], audit: Audit, split_at: frozenset[str] = frozenset()
    ) -> Recording:
        """Run `fn` under `audit`, once or more, and return the recording.

        Args:
            fn: the function to record.
            audit: refuses operations that a replay cannot repeat.
            split_at: names of operators (`weft::paged_attention`) that stay outside the graphs:
                each runs eagerly between two pieces.

        Raises:
            CaptureError: the audit refused something that `fn` did.
            torch.OutOfMemoryError: the device's memory is full.
        """

    def release_output_memory(self, recording: Any, allocated: Set[int], /) -> Any:
        """Make the memory of a recording's outputs available to later captures. Call it only if
        results are copied before anything else replays.

        Args:
            recording: a recording of this back end.
            allocated: the storages (`storage_id`) that the function allocated.

        Returns:
            The recording with outputs that do not own their memory.
        """


def cuda_device(tensors: Iterable[Tensor]) -> torch.device | None:
    """The CUDA device of the first of these tensors that is on one; None if none is."""
    return next((t.device for t in tensors if t.device.type == "cuda"), None)


def no_backend(name: Any) -> DeviceError:
    """The error for a name that is not in `NAMES`."""
    return DeviceError(
        f"graphify(..., backend={name!r})", "an unknown back end", "backend='tape', 'cuda' or None"
    )


def make_backend(name: str | None, tensors: Iterable[Tensor]) -> Backend:
    """Make the back end `name`; None stands for `cuda` if any of the tensors is on a CUDA device,
    else for `tape`."""
    from weft.transforms.graphs.backends.cuda import CudaBackend
    from weft.transforms.graphs.backends.tape import TapeBackend

    on_cuda = cuda_device(tensors)
    if name is None:
        if on_cuda is not None:
            name = "cuda"
        else:
            name = "tape"
    if name == "tape":
        return TapeBackend()
    if name != "cuda":
        raise no_backend(name)
    if not torch.cuda.is_available() or on_cuda is None:
        if not torch.cuda.is_available():
            problem = "this machine has no CUDA device"
        else:
            problem = "no argument is on a CUDA device"
        raise DeviceError(
            "graphify(..., backend='cuda')",
            problem,
            "move the arguments there, or write backend='tape'",
        )
    return CudaBackend(on_cuda)
