"""What an engine has done."""

from collections import Counter
from collections.abc import Mapping, Sequence

import attrs

from weft.descriptor import BatchDescriptor
from weft.transforms.dispatch import dispatch
from weft.transforms.engine.work import Work
from weft.transforms.graphify import Graphified
from weft.transforms.ladder import Ladder


@attrs.frozen
class Stats:
    """An engine's counts, at one moment.

    Args:
        ended: requests that have ended, by reason.
        modes: steps by how they were dispatched: `full`, `piecewise` or `none`.
        tokens: that steps computed.
        padding: those that graphs computed besides, because they have fixed sizes.
        captures, replays, eager: of graphs, those of all stages that run here; and calls that ran without one.
    """

    ended: Mapping[str, int]
    modes: Mapping[str, int]
    tokens: int
    padding: int
    captures: int
    replays: int
    eager: int


@attrs.define
class Counts:
    """Counts as they grow.

    Args:
        ladder: what steps are dispatched by.
    """

    ladder: Ladder[BatchDescriptor]
    tokens: int = 0
    padding: int = 0
    ended: Counter[str] = attrs.field(factory=Counter)
    modes: Counter[str] = attrs.field(factory=Counter)
    _dispatched: dict[BatchDescriptor, tuple[str, int]] = attrs.field(factory=dict)

    def add(self, work: Work) -> None:
        """A step was launched."""
        own = work.descriptor
        mode, size = self._dispatched.get(own) or self._dispatch(own)
        self.modes[mode] += 1
        self.tokens += own.num_tokens
        self.padding += size - own.num_tokens

    def _dispatch(self, own: BatchDescriptor) -> tuple[str, int]:
        decision = dispatch(own, self.ladder)
        self._dispatched[own] = decision.mode, decision.descriptor.num_tokens
        return self._dispatched[own]

    def stats(self, graphs: Sequence[Graphified[..., object]]) -> Stats:
        """All there is to tell."""
        infos = [graph.cache_info() for graph in graphs]
        return Stats(
            ended=dict(self.ended),
            modes=dict(self.modes),
            tokens=self.tokens,
            padding=self.padding,
            captures=sum(info.captures for info in infos),
            replays=sum(info.replays for info in infos),
            eager=sum(info.eager for info in infos),
        )
