"""`Costs`: the seconds and bytes of effects, for `simulate`."""

import math
import re
from collections.abc import Callable, Iterable, Sequence

import attrs

from weft.arguments.checks import COUNT_OR_NONE, Rule, check_values
from weft.effects import Broadcast, Effect, Run, Send
from weft.errors import CostError
from weft.meshes.collectives import AllGather, AllReduce, Collective, PPermute
from weft.transforms.pipelines.timing.events import ADVANCE

# A chained comparison, which also refuses NaN.
_COST: Rule = (lambda value: 0 <= value < math.inf), "a finite number >= 0"
_COST_OR_FUNCTION: Rule = (lambda value: callable(value) or 0 <= value < math.inf), _COST[1]
_BANDWIDTH: Rule = (
    (lambda value: value > 0),
    "a number > 0; infinite: transfers take the latency alone",
)
_EACH: Rule = (lambda value: callable(value) or isinstance(value, Iterable)), ""
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("advance", "launch"), _COST),
    **dict.fromkeys(("latency", "message_bytes", "output_bytes"), _COST_OR_FUNCTION),
    "bytes_per_second": (lambda value: callable(value) or value > 0, _BANDWIDTH[1]),
    "stages": (_EACH[0], "seconds of each stage: (1e-3, 2e-3), or a function (stage, microbatch)"),
    "parts": (_EACH[0], "seconds of each part: (1e-3, 2e-3), or a function (part, rank)"),
    "collective": (
        lambda value: value is None or callable(value),
        "a function from a collective to its seconds",
    ),
    "gpus_per_node": COUNT_OR_NONE,
}
_KINDS = {"stage": "stages", "part": "parts"}


# The ways to sum over ranks
ONE_STEP = "in one step to all others"
RING = "around a ring"
BY_NODE = "in three phases: within nodes, between them, within"


@attrs.frozen
class Costs:
    """The time of each effect in seconds, and the size of each message in bytes, for `simulate`.

    In a collective of `n` ranks, each rank sends to every other rank what it needs, in one step.
    This takes one latency, plus the time to transfer `n - 1` times the rank's bytes, or an `n`-th
    of that in `ReduceScatter` and `AllToAll`. In a `PPermute`, a rank sends its bytes once.

    An `AllReduce` takes the least of three times. (1) One step. (2) A ring: `2 (n - 1)` steps of an
    `n`-th part each (Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce algorithms for
    clusters of workstations"). (3) If its ranks are in several nodes with equally many in each,
    three phases: reduce-scatter within each node, all-reduce of each rank's part between nodes (one
    step or a ring), and all-gather within each node.

    Args:
        stages: seconds of each stage for a micro-batch, or a function `(stage, microbatch) ->
            seconds`. Collectives inside a stage are part of it.
        advance: seconds to advance the state.
        latency: seconds of each transfer, regardless of its size, or a function of the ranks that
            take part in it.
        bytes_per_second: the speed of a transfer from one rank to another, or a function of the
            ranks that take part in it. Infinite: a transfer takes only the latency.
        message_bytes: the bytes of a stage's message for a micro-batch, or a function of the
            micro-batch.
        output_bytes: the bytes of the output that returns from the last stage, or a function of the
            micro-batch.
        launch: seconds that the host takes before each effect.
        parts: seconds of each part of a sharded function, between its collectives, or a function
            `(part, rank) -> seconds`.
        collective: a function from a collective to its seconds, for example measured ones. None:
            computed from `latency` and `bytes_per_second`.
        gpus_per_node: the number of ranks in a node; ranks are numbered node by node. None: all
            ranks are in one node.

    Raises:
        CostError: a cost that is negative or not finite.

    >>> Costs(stages=(1e-3, -1e-3))
    Traceback (most recent call last):
        ...
    weft.errors.CostError: Costs(stages=(0.001, -0.001), …)
      saw: stages[1]=-0.001
      instead: a finite number >= 0
    """

    stages: Sequence[float] | Callable[[int, int], float] = ()
    advance: float = 0.0
    latency: float | Callable[[tuple[int, ...]], float] = 0.0
    bytes_per_second: float | Callable[[tuple[int, ...]], float] = math.inf
    message_bytes: float | Callable[[int], float] = 0
    output_bytes: float | Callable[[int], float] = 0
    launch: float = 0.0
    parts: Sequence[float] | Callable[[int, int], float] = ()
    collective: Callable[[Collective], float] | None = None
    gpus_per_node: int | None = None

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self, recurse=False).items():
            check_values(f"Costs({name}={value!r}, …)", _RULES, {name: value}, CostError)
        for name in _KINDS.values():
            if not callable(entries := getattr(self, name)):
                each = {f"{name}[{index}]": value for index, value in enumerate(entries)}
                check_values(
                    f"Costs({name}={entries!r}, …)", dict.fromkeys(each, _COST), each, CostError
                )


def _collective_seconds(costs: Costs, effect: Collective) -> float:
    if costs.collective is not None:
        return _valid(effect, f"collective('{effect}')", costs.collective(effect))
    num_peers = len(effect.ranks) - 1
    size = collective_bytes(effect)
    if not num_peers:
        return 0.0
    if isinstance(effect, AllReduce):
        return min(all_reduce_ways(costs, effect).values())
    if isinstance(effect, PPermute):
        return transfer_seconds(costs, effect, effect.ranks, size)
    sent = size if isinstance(effect, AllGather) else size / len(effect.ranks)
    return transfer_seconds(costs, effect, effect.ranks, num_peers * sent)


def _flat_seconds(
    costs: Costs, effect: AllReduce, ranks: tuple[int, ...], size: float
) -> tuple[float, float]:
    """The seconds of a sum over ranks in one step, and around a ring."""
    num_peers = len(ranks) - 1
    ring = 2 * num_peers * transfer_seconds(costs, effect, ranks, size / len(ranks))
    return transfer_seconds(costs, effect, ranks, num_peers * size), ring


def effect_seconds(costs: Costs, effect: Effect, rank: int = 0) -> float:
    """The seconds in which a rank performs an effect, without waits and launch. They are 0
    except for a `Run` and a collective."""
    if isinstance(effect, Collective):
        return _collective_seconds(costs, effect)
    if not isinstance(effect, Run):
        return 0.0
    if effect.what == ADVANCE:
        return costs.advance
    match = re.fullmatch(r"(stage|part) (\d+)", effect.what)
    name = _KINDS[match[1]] if match else "stages"
    of_kind = getattr(costs, name)
    index = int(match[2]) if match else 0
    if match is None or not (callable(of_kind) or index < len(of_kind)):
        if name == "parts":
            runs = "'part N'"
        else:
            runs = f"'stage N', or of {ADVANCE!r}"
        instead = f"Costs({name}=...) with a cost for each {name[:-1]}; a Run of {runs}"
        raise CostError(f"costs of '{effect}'", f"no cost of {effect.what!r}", instead)
    if callable(of_kind):
        if name == "stages":
            other = effect.microbatch
        else:
            other = rank
        return _valid(effect, f"{name}({index}, {other})", of_kind(index, other))
    return float(of_kind[index])


def all_reduce_ways(costs: Costs, effect: AllReduce) -> dict[str, float]:
    """The seconds of a sum over several ranks, by the way to compute it."""
    size = collective_bytes(effect)
    ways = dict[str, float]()
    ways[ONE_STEP], ways[RING] = _flat_seconds(costs, effect, effect.ranks, size)
    nodes = dict[int, list[int]]()
    for rank in effect.ranks:
        nodes.setdefault(rank // (costs.gpus_per_node or len(effect.ranks)), []).append(rank)
    first, *rest = nodes.values()
    if (
        costs.gpus_per_node
        and rest
        and len(first) > 1
        and {len(node) for node in rest} == {len(first)}
    ):
        part = size / len(first)
        within = transfer_seconds(costs, effect, tuple(first), (len(first) - 1) * part)
        # One rank of each node stands for all: the others sum their parts at the same time.
        across = min(_flat_seconds(costs, effect, tuple(node[0] for node in nodes.values()), part))
        ways[BY_NODE] = within + across + within
    return ways


def transfer_seconds(costs: Costs, effect: Effect, ranks: tuple[int, ...], size: float) -> float:
    """The seconds to send `size` bytes from one of `ranks` to another; errors name `effect`."""
    latency = costs.latency
    per_second = costs.bytes_per_second
    if callable(latency):
        latency = _valid(effect, f"latency({ranks})", latency(ranks))
    if callable(per_second):
        per_second = _valid(effect, f"bytes_per_second({ranks})", per_second(ranks), _BANDWIDTH)
    return latency + size / per_second


def bytes_sent(costs: Costs, effect: Send | Broadcast) -> float:
    """The bytes of the message that an effect sends."""
    if isinstance(effect, Send):
        name = "message_bytes"
    else:
        name = "output_bytes"
    mb = effect.microbatch
    size: float | Callable[[int], float] = getattr(costs, name)
    if callable(size):
        return _valid(effect, f"{name}({mb})", size(mb))
    return size


def collective_bytes(effect: Collective) -> int:
    """The bytes of each rank's tensor.

    Raises:
        CostError: the schema is unknown, or some of its dimensions are names.
    """
    if effect.schema is None:
        dims = None
    else:
        dims = [dim for tensor in effect.schema.tensors for dim in tensor.dims]
    if effect.schema is None or dims is None or any(isinstance(dim, str) for dim in dims):
        instead = (
            "a schema of numbers, as in x[2, 64] float32; or Costs(collective=...), a function to"
            " its seconds"
        )
        raise CostError(f"costs of '{effect}'", "a tensor whose bytes are not known", instead)
    return sum(math.prod(map(int, one.dims)) * one.dtype.itemsize for one in effect.schema.tensors)


def _valid(effect: Effect, name: str, value: float, rule: Rule = _COST) -> float:
    """A cost that the user's function returned, after a check."""
    check_values(f"costs of '{effect}'", {name: rule}, {name: value}, CostError)
    return value
