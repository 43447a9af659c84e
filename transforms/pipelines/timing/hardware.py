"""`Machine`: the devices of a prediction, their nodes, and the links between them."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import attrs

from weft.arguments.checks import COUNT, COUNT_OR_NONE, Rule, check_values
from weft.errors import CostError
from weft.meshes.collectives import Collective

# The kernels of a layer in a graph of a decode step: 10.5 to 12.5 of Llama-3.1-8B, 11.4 of
# Qwen3-30B-A3B, by the profiles in `proofs/results/`.
KERNELS_PER_LAYER = 11

# The share of a GPU's memory beside the weights that the KV cache and graphs may fill; temporaries
# get the rest.
MEMORY_SHARE = 0.85
_SPEED = "a number > 0, in bytes per second; infinite: a transfer takes the latency alone"
_RULES: dict[str, Rule] = {
    "bandwidth": (
        lambda value: 0 < value < math.inf,
        "a finite number > 0, in bytes per second, as in 4.8e12",
    ),
    "memory": (lambda value: 0 < value < math.inf, "a finite number > 0, in bytes, as in 141e9"),
    "link": (lambda value: value > 0, _SPEED),
    "node_link": (lambda value: value is None or value > 0, _SPEED),
    **dict.fromkeys(
        ("latency", "kernel"),
        ((lambda value: 0 <= value < math.inf), "a finite number >= 0, in seconds"),
    ),
    "node_latency": (
        lambda value: value is None or 0 <= value < math.inf,
        "a finite number >= 0, in seconds",
    ),
    "capacity": COUNT,
    "gpus_per_node": COUNT_OR_NONE,
    "collective": (
        lambda value: value is None or callable(value),
        "a function from a collective to its seconds",
    ),
}


@attrs.frozen(kw_only=True)
class Machine:
    """The devices of a pipeline and the links between them.

    Args:
        bandwidth: bytes per second that a device reads from its memory. The default is from an
            H200's data sheet.
        memory: bytes of a device's memory. The default is from an H200's data sheet.
        link: bytes per second between two ranks; infinite: a transfer takes only the latency.
        latency: seconds of each transfer, whatever its size.
        capacity: messages that an edge holds.
        kernel: seconds that each kernel of a layer takes besides its reading: to start, to fill the
            device, to end.
        gpus_per_node: ranks of a node, which are numbered one node after the other, as are the
            ranks of a stage; None: all are in one node.
        node_link, node_latency: as `link` and `latency`, between ranks of two nodes; None: as
            inside a node.
        collective: a function from a collective to its seconds, as measured; None: they follow from
            the links (`Costs`).

    Raises:
        CostError: a bandwidth that is not a finite number greater than 0, or another number that no
            machine has.

    >>> machine = Machine(link=4e11, gpus_per_node=8, node_link=5e10)
    >>> machine.link_of((6, 7)), machine.link_of((7, 8))
    (400000000000.0, 50000000000.0)
    """

    bandwidth: float = 4.8e12
    memory: float = 141e9
    link: float = math.inf
    latency: float = 0.0
    capacity: int = 2
    kernel: float = 0.0
    gpus_per_node: int | None = None
    node_link: float | None = None
    node_latency: float | None = None
    collective: Callable[[Collective], float] | None = None

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self, recurse=False).items():
            check_values(f"Machine({name}={value!r})", _RULES, {name: value}, CostError)

    @property
    def between_nodes(self) -> tuple[float, float]:
        """The latency and the bytes per second of a transfer between two nodes."""
        if self.node_latency is None:
            latency = self.latency
        else:
            latency = self.node_latency
        return latency, self.link if self.node_link is None else self.node_link

    def is_near(self, ranks: Sequence[int]) -> bool:
        """Whether all of some ranks are in one node."""
        return len(self.per_node(ranks)) == 1

    def per_node(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """How many of some ranks are in each of their nodes, in order."""
        size = self.gpus_per_node
        return tuple(Counter(0 if size is None else rank // size for rank in ranks).values())

    def latency_of(self, ranks: Sequence[int]) -> float:
        """The seconds of a transfer between some ranks, whatever its size."""
        if self.is_near(ranks):
            return self.latency
        return self.between_nodes[0]

    def link_of(self, ranks: Sequence[int]) -> float:
        """The bytes per second from one of some ranks to another."""
        if self.is_near(ranks):
            return self.link
        return self.between_nodes[1]
