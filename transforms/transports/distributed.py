"""The transport `distributed`: a process for each rank, under torchrun or `weft.transforms.launch`."""

import os
import weakref
from collections.abc import Sequence
from typing import Literal

import torch

from weft.effects import Effect
from weft.errors import DeviceError, ProgramError
from weft.torchapi import rendezvous_store
from weft.transforms.transports.gloo import GlooEnd
from weft.transforms.transports.messages import ProcessEnd, ProcessLink
from weft.transforms.transports.nccl import NcclEnd
from weft.transforms.transports.plan import Plan
from weft.transforms.transports.watch import Watch
from weft.transforms.transports.worker import Worker

_START = 30.0
"""Seconds that the processes have, at least, to find each other."""


class Distributed:
    """This process is one rank; its messages go by torch.distributed.

    Made by every rank, in the same order. Under `torchrun`, or a launcher that sets its variables (RANK, WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT), on any number of nodes. It keeps to itself: no default process group is needed, or made.

    Args:
        device: where this rank's tensors are; None: `cuda:LOCAL_RANK` where there is one, else the CPU.
        backend: `gloo` for the CPU, `nccl` or `peer` for GPUs; None: by the device. `peer` stores into the neighbour's
            memory (symmetric memory, GPUs of one node that reach each other).
        timeout: seconds that a rank may keep another one waiting before that raises RankError.

    Raises:
        ProgramError: not under a launcher.
        DeviceError: the back end cannot serve the device.
    """

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        backend: Literal["gloo", "nccl", "peer"] | None = None,
        timeout: float = 30.0,
    ) -> None:
        self.rank, self.num_ranks = _place()
        self.device = _device(device)
        self.backend = backend or ("gloo" if self.device.type == "cpu" else "nccl")
        self.timeout = timeout
        store = rendezvous_store(self.rank, self.num_ranks, max(timeout, _START))
        self.watch = Watch(store, self.rank, self.num_ranks, timeout)
        self._link = ProcessLink(_make_end(self.backend, self.watch, self.device), self.watch, self.device)
        self._close = weakref.finalize(self, self.end.close)

    @property
    def end(self) -> ProcessEnd:
        """This rank's ends of the edges."""
        return self._link.end

    def ranks(self, num_ranks: int) -> Sequence[int]:
        if num_ranks != self.num_ranks:
            seen = f"{num_ranks} stages and {self.num_ranks} processes"
            raise ProgramError(f"pipeline(..., transport={self!r})", seen, "a process for each stage")
        return (self.rank,)

    def run(self, plan: Plan, workers: Sequence[Worker]) -> None:
        (worker,) = workers
        effect: Effect | None = None
        try:
            self.watch.begin(plan)
            self._link.begin(plan)
            effects = plan.programs[self.rank].effects
            for index, effect in enumerate(effects):
                self.watch.at(index, effect)
                worker.perform(effect, self._link)
            self.watch.at(len(effects), "its end")
        except BaseException as error:
            self.watch.fail(str(effect or "the start of a step"), error)
            self._close.detach()
            self.end.close(failed=True)
            raise

    def close(self) -> None:
        """Close the connections."""
        self._close()

    def __repr__(self) -> str:
        return f"Distributed(device='{self.device}', backend={self.backend!r})"


def _place() -> tuple[int, int]:
    """This process's rank, and of how many."""
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        raise ProgramError(
            "Distributed()",
            "no RANK and WORLD_SIZE in the environment",
            "torchrun --nproc-per-node N script.py, or weft.transforms.launch(function, N)",
        ) from None


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available() and local < torch.cuda.device_count()
    return torch.device("cuda", local) if on_gpu else torch.device("cpu")


def _make_end(backend: str, watch: Watch, device: torch.device) -> ProcessEnd:
    if (backend, device.type) == ("gloo", "cpu"):
        return GlooEnd(watch)
    if backend in ("nccl", "peer") and device.type == "cuda":
        torch.cuda.set_device(device)
        if backend == "nccl":
            return NcclEnd(watch, device)
        from weft.transforms.transports.peer import PeerEnd  # it imports triton

        return PeerEnd(watch, device)
    instead = "gloo with the CPU, or nccl or peer with a GPU"
    raise DeviceError("Distributed(...)", f"backend={backend!r}, device='{device}'", instead)
