"""`Machine`: the devices of a prediction, their nodes, and the links between them."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import attrs

from weft.arguments.checks import COUNT, COUNT_OR_NONE, Rule, check_values
from weft.errors import CostError
from weft.meshes.collectives import Collective

# The number of kernels per layer in the graph of a decode step. By the profiles in
# `proofs/results/`, it is 10.5 to 12.5 for Llama-3.1-8B and 11.4 for Qwen3-30B-A3B.
KERNELS_PER_LAYER = 11

# Of the GPU memory that the weights leave, the share that the KV cache and graphs may fill;
# temporaries get the rest.
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
        link: bytes per second between two ranks. Infinite: a transfer takes only the latency.
        latency: seconds of each transfer, regardless of its size.
        capacity: the number of messages that an edge holds.
        kernel: seconds that each kernel of a layer takes in addition to its memory reads: to start,
            to fill the device and to end.
        gpus_per_node: the number of ranks in a node. Ranks are numbered node by node, and the ranks
            of a stage have successive numbers. None: all ranks are in one node.
        node_link, node_latency: like `link` and `latency`, but between ranks of two nodes. None:
            the same as inside a node.
        collective: a function from a collective to its seconds, for example measured ones. None:
            computed from the links (`Costs`).

    Raises:
        CostError: a bandwidth that is not a finite number greater than 0, or another impossible
            number.

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
        """Whether all of these ranks are in one node."""
        return len(self.per_node(ranks)) == 1

    def per_node(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """How many of these ranks are in each of their nodes, in order."""
        size = self.gpus_per_node
        return tuple(Counter(0 if size is None else rank // size for rank in ranks).values())

    def latency_of(self, ranks: Sequence[int]) -> float:
        """The seconds of a transfer between these ranks, regardless of its size."""
        if self.is_near(ranks):
            return self.latency
        return self.between_nodes[0]

    def link_of(self, ranks: Sequence[int]) -> float:
        """The bytes per second from one of these ranks to another."""
        if self.is_near(ranks):
            return self.link
        return self.between_nodes[1]
