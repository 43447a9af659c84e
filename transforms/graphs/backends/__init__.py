"""Capture back ends: one small protocol, and the choice by device."""

from collections.abc import Callable, Iterable, Set
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.errors import DeviceError
from weft.transforms.graphs.backends.audit import Audit
from weft.transforms.graphs.calls.buffers import InputBufferPool

NAMES = ("tape", "cuda")
"""What `graphify(..., backend=...)` may name."""


class Recording(Protocol):
    """A captured run: fixed inputs, fixed outputs, and the way to run it again."""

    @property
    def outputs(self) -> Any:
        """What the captured function returned; each replay overwrites these tensors."""

    @property
    def num_pieces(self) -> int:
        """Graphs in it: 1, and 1 more for each split operator that was met."""

    @property
    def nbytes(self) -> int:
        """Bytes of tensor memory that the capture took, beside the buffers it was given."""

    @property
    def driver_bytes(self) -> int:
        """Bytes that the device's driver took for the graphs themselves. It keeps those of a dropped graph for a later
        one, so that they are counted once."""

    def replay(self) -> None:
        """Run the record again on whatever the input buffers hold now."""


class Backend(Protocol):
    """Something that records a function of no arguments (its inputs are fixed buffers) and replays the record."""

    @property
    def name(self) -> str:
        """As `graphify(backend=...)` takes it."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    @property
    def input_buffers(self) -> InputBufferPool:
        """Memory for the input buffers of what it records."""

    @property
    def enter(self) -> Callable[[], None] | None:
        """To call before a replay's buffers are filled: makes the current stream wait for the last replay, if that ran
        on another stream. None where there are no streams."""

    def capture(self, fn: Callable[[], Any], audit: Audit, split_at: frozenset[str] = frozenset()) -> Recording:
        """Run `fn` under `audit` as often as recording takes, and return the record.

        Args:
            fn: what to record.
            audit: refuses what a replay could not repeat.
            split_at: operators, by name (`weft::paged_attention`), that stay outside the graphs: each runs by itself
                between two pieces.

        Raises:
            CaptureError: the audit refused something that `fn` did.
            torch.OutOfMemoryError: there is no room for it.
        """

    def lend_memory(self, recording: Any, made: Set[int], /) -> Any:
        """The recording, with the memory of its outputs free for later captures; for results that are copied before
        anything else replays.

        Args:
            recording: of this back end.
            made: the storages (`storage_id`) that the function made.
        """


def cuda_device(tensors: Iterable[Tensor]) -> torch.device | None:
    """The CUDA device of the first of these tensors that is on one."""
    return next((t.device for t in tensors if t.device.type == "cuda"), None)


def no_backend(name: Any) -> DeviceError:
    """For a name that is none of `NAMES`."""
    return DeviceError(f"graphify(..., backend={name!r})", "no such back end", "backend='tape', 'cuda' or None")


def make_backend(name: str | None, tensors: Iterable[Tensor]) -> Backend:
    """The back end called `name`, or, for None, `cuda` if any of the tensors is on a CUDA device and `tape` if not."""
    from weft.transforms.graphs.backends.cuda import CudaBackend
    from weft.transforms.graphs.backends.tape import TapeBackend

    on_cuda = cuda_device(tensors)
    if name is None:
        name = "cuda" if on_cuda is not None else "tape"
    if name == "tape":
        return TapeBackend()
    if name != "cuda":
        raise no_backend(name)
    if not torch.cuda.is_available() or on_cuda is None:
        seen = "this machine has no CUDA device" if not torch.cuda.is_available() else "no argument is on a CUDA device"
        raise DeviceError("graphify(..., backend='cuda')", seen, "move the arguments there, or write backend='tape'")
    return CudaBackend(on_cuda)
