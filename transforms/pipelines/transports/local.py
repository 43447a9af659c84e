"""The local transport: all ranks in one process and one thread, their effects interleaved."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from torch import Tensor

from weft.effects import Broadcast, Fence, Recv, Send
from weft.transforms.pipelines.checker import Edge, Step, puts, takes
from weft.transforms.pipelines.transports.plan import Plan
from weft.transforms.pipelines.transports.worker import Worker
from weft.trees import tree_map


@attrs.frozen(eq=False)
class Queues:
    """What is on each edge of ranks that share their memory: values are handed over as they are."""

    num_ranks: int
    waiting: dict[Edge, deque[Any]] = attrs.field(factory=dict)


@attrs.frozen(eq=False)
class LocalLink:
    """One rank's ends of the queues.

    A value that is lent must be copied before its sender runs again, which a fence waits for; it is copied when it is
    received, so that a fence has nothing left to wait for.
    """

    rank: int
    queues: Queues
    lent: bool

    def send(self, effect: Send | Broadcast, value: Any) -> None:
        for edge in puts(Step(self.rank, effect), self.queues.num_ranks):
            self.queues.waiting.setdefault(edge, deque()).append(value)

    def recv(self, effect: Recv | Broadcast) -> Any:
        edge = takes(Step(self.rank, effect))
        assert edge is not None, "only an effect that takes is received"
        value = self.queues.waiting[edge].popleft()
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, value) if self.lent else value

    def fence(self, effect: Fence, /) -> None:
        pass  # `interleave` lets it through once all was received


@attrs.frozen
class Local:
    """All ranks here, one effect after the other, in an order that the programs allow."""

    def ranks(self, num_ranks: int) -> Sequence[int]:
        return range(num_ranks)

    def share(self, value: Any) -> Any:
        return value

    def collect(self, value: Any) -> list[Any]:
        return [value]

    def assert_equal(self, subject: str, value: str) -> None:
        """All ranks are in this process, and say the same."""

    def check(self) -> None:
        """Whoever fails here raises here."""

    def received(self, _: int | None = None, /) -> Callable[[], None]:
        return lambda: None

    def mail(self, num_ranks: int, /) -> Queues:
        return Queues(num_ranks)

    def run(self, plan: Plan, workers: Sequence[Worker], mail: Queues, /) -> None:
        links = [LocalLink(worker.rank, mail, plan.lends) for worker in workers]
        for step in plan.order:
            workers[step.rank].perform(step.effect, links[step.rank])
