"""Loops in CUDA graphs: conditional nodes, which repeat a part of a graph without the host."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.torchapi.conditional_nodes import repeat_while, why_unavailable
from weft.transforms.graphs.backends.audit import Audit

_LOG = logging.getLogger("weft")


class WhileNodes:
    """The WHILE nodes of a device's captures. If the device cannot have any, graphs contain
    `max_steps` steps instead.

    A loop's step is captured on a separate stream into a separate memory pool. Nothing else
    allocates there, so its addresses stay the same from one repetition to the next.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.unable: str | None = None
        self.recorded = 0
        self._streams: list[torch.cuda.Stream] = []

    def rehearsal(self, audit: Audit) -> "Rehearsed":
        """The `Looper` of a capture's rehearsal."""
        return Rehearsed(self, audit)

    def recorder(self, audit: Audit) -> "Recorded":
        """The `Looper` of one capture."""
        self.recorded = 0
        return Recorded(self, audit)

    def stream(self, depth: int) -> torch.cuda.Stream:
        """The stream on which the steps of a loop inside `depth` others are captured."""
        while len(self._streams) <= depth:
            self._streams.append(torch.cuda.Stream(self.device))
        return self._streams[depth]

    def look(self) -> str | None:
        """Look whether the device can have WHILE nodes: the reason why not, or None."""
        if self.unable is None and (reason := why_unavailable(self.device)) is not None:
            self.give_up(reason)
        return self.unable

    def give_up(self, reason: str) -> None:
        """Make all later graphs have `max_steps` steps, and log why."""
        self.unable = reason
        _LOG.warning(
            "while_loop: graphs on %s have max_steps steps, since they cannot repeat: %s",
            self.device,
            reason,
        )


class Rehearsed:
    """Runs each loop's step once, on the stream on which it will be captured, so that libraries
    create their workspaces there."""

    def __init__(self, nodes: WhileNodes, audit: Audit) -> None:
        self.nodes = nodes
        self._audit = audit
        self._depth = 0

    @property
    def unable(self) -> str | None:
        return self.nodes.look()

    def loop(self, _: Tensor, carry: Sequence[Tensor], step: Callable[[], None]) -> None:
        stream = self.nodes.stream(self._depth)
        current = torch.cuda.current_stream(self.nodes.device)
        stream.wait_stream(current)
        self._depth += 1
        try:
            with self._audit.steps.step(carry), torch.cuda.stream(stream):
                step()
        finally:
            self._depth -= 1
            current.wait_stream(stream)


class Recorded:
    """Records each loop as a WHILE node of the current capture, and holds the memory of the loops'
    steps."""

    def __init__(self, nodes: WhileNodes, audit: Audit) -> None:
        self.nodes = nodes
        self._audit = audit
        self.pools: list[Any] = []
        self._depth = 0

    @property
    def unable(self) -> str | None:
        return self.nodes.unable

    def loop(self, flag: Tensor, carry: Sequence[Tensor], step: Callable[[], None]) -> None:
        self.nodes.recorded += 1
        pool = torch.cuda.MemPool()
        self.pools.append(pool)
        stream = self.nodes.stream(self._depth)
        self._depth += 1
        try:
            with self._audit.steps.step(carry):
                repeat_while(flag, step, stream, pool)
        finally:
            self._depth -= 1
