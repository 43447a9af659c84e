"""The transport `Local`: all ranks in one process and one thread, which performs their effects one
after the other."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from torch import Tensor

from weft.effects import Broadcast, Fence, Recv, Send
from weft.transforms.pipelines.checker import CheckedPrograms
from weft.transforms.pipelines.machine import Edge, Step, puts, takes
from weft.transforms.pipelines.worker import Worker
from weft.values.trees import tree_map


@attrs.frozen(eq=False)
class Queues:
    """The messages on each edge. Since ranks share memory, a message is the value itself."""

    num_ranks: int
    waiting: dict[Edge, deque[Any]] = attrs.field(factory=dict)


@attrs.frozen(eq=False)
class LocalLink:
    """One rank's ends of the queues.

    A lent value must be copied before its sender runs again. It is copied on receipt, so a fence
    has nothing to wait for.
    """

    rank: int
    queues: Queues
    lent: bool
    member: None = None

    def send(self, effect: Send | Broadcast, value: Any) -> None:
        for edge in puts(Step(self.rank, effect), self.queues.num_ranks):
            self.queues.waiting.setdefault(edge, deque()).append(value)

    def recv(self, effect: Recv | Broadcast) -> Any:
        edge = takes(Step(self.rank, effect))
        assert edge is not None, "only an effect that takes is received"
        value = self.queues.waiting[edge].popleft()
        if self.lent:
            return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, value)
        return value

    def fence(self, effect: Fence, /) -> None:
        # `interleave` orders a fence after the receives that it waits for.
        pass


@attrs.frozen
class Local:
    """A transport that performs the effects of all ranks one after the other, in an order that the
    programs allow, in the caller's thread."""

    @property
    def member(self) -> None:
        return None

    def ranks(self, num_ranks: int) -> Sequence[int]:
        return range(num_ranks)

    def share(self, value: Any) -> Any:
        return value

    def collect(self, value: Any) -> list[Any]:
        return [value]

    def assert_equal(self, subject: str, value: str) -> None:
        """Do nothing: one process decides for all ranks."""

    def check(self) -> None:
        """Do nothing: a rank that fails raises in this thread."""

    def received(self, _: int | None = None, /) -> Callable[[], None]:
        return lambda: None

    def mail(self, num_ranks: int, /) -> Queues:
        return Queues(num_ranks)

    def run(self, checked: CheckedPrograms, workers: Sequence[Worker], mail: Queues, /) -> None:
        links = [LocalLink(worker.rank, mail, checked.lends) for worker in workers]
        for step in checked.order:
            workers[step.rank].perform(step.effect, links[step.rank])
