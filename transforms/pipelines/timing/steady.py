"""The steady state of a decode loop: its time per job, from the cycles of its event graph.

The times of a timeline are maxima of earlier times plus costs, and in a full pipeline all jobs have
the same effects. The event graph therefore has one node for each effect of a job on each rank, and
one for the arrival of a message on each edge. An arc `u -> v` of weight w and delay d says that v
of a job comes at least w seconds after u of the job d places earlier. The time per job is then the
greatest ratio of weight to delay of any cycle (Baccelli, Cohen, Olsder and Quadrat, 1992,
"Synchronization and linearity", theorem 3.23, for max-plus systems).
"""

import functools
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import attrs

from weft.effects import Broadcast, Effect, Run, Send
from weft.transforms.pipelines.machine import Edge, Step, puts, takes
from weft.transforms.pipelines.schedule import decode_jobs, make_programs
from weft.transforms.pipelines.timing.costs import (
    Costs,
    bytes_sent,
    effect_seconds,
    transfer_seconds,
)

# The source of an arc, its weight and its delay
Arc = tuple[Hashable, float, int]


@functools.lru_cache(256)
def decode_bodies(num_stages: int, cohorts: int) -> tuple[tuple[Effect, ...], ...]:
    """The effects of each rank from after the run of one job up to the run of the next, in the
    steady state of a decode loop. Their micro-batches count from that of the later job.

    >>> for effect in decode_bodies(2, 2)[0]:
    ...     print(type(effect).__name__, effect.microbatch)
    Send -1
    Broadcast -2
    Run -2
    Run 0
    """
    # With more cohorts the effects are the same: no rank runs further ahead of the outputs.
    full = min(cohorts, num_stages + 1)
    # Not one of the first jobs, which wait for nothing
    job = full + 1
    programs = make_programs(num_stages, decode_jobs(full, 1 + math.ceil(2 / full))[: job + 1])
    bodies = []
    for program in programs:
        first, last = (
            program.effects.index(Run(f"stage {program.rank}", mb)) for mb in (job - 1, job)
        )
        body = program.effects[first + 1 : last + 1]
        bodies.append(
            tuple(attrs.evolve(effect, microbatch=effect.microbatch - job) for effect in body)
        )
    return tuple(bodies)


def seconds_per_job(num_stages: int, cohorts: int, costs: Costs, capacity: int) -> float:
    """The seconds from one job to the next in a full pipeline. The costs must be the same for all
    micro-batches."""
    # The arcs that end at each node
    arcs = defaultdict[Hashable, list[Arc]](list)
    sent = dict[Edge, tuple[Hashable, Effect]]()
    taken = dict[Edge, tuple[Hashable, Effect]]()
    for rank, body in enumerate(decode_bodies(num_stages, cohorts)):
        nodes = [(rank, index) for index in range(len(body))]
        for index, effect in enumerate(body):
            node = nodes[index]
            step = Step(rank, effect)
            arcs[node].append(
                (
                    # For the first effect this is the last one, of the job before: hence the delay
                    # of 1.
                    nodes[index - 1],
                    costs.launch + effect_seconds(costs, effect, rank),
                    int(index == 0),
                )
            )
            sent |= dict.fromkeys(puts(step, num_stages), (node, effect))
            if (edge := takes(step)) is not None:
                taken[edge] = node, effect
    for edge, (source, effect) in sent.items():
        target, receipt = taken[edge]
        assert isinstance(effect, Send | Broadcast)
        seconds = transfer_seconds(costs, effect, (edge.source, edge.to), bytes_sent(costs, effect))
        # A message arrives after its send, and after the message before it on the same edge.
        arcs[edge] += [(source, seconds, effect.microbatch), (edge, seconds, 1)]
        # A receive ends after the arrival.
        arcs[target].append((edge, 0.0, -receipt.microbatch))
        # A send waits for room: for the receive of the message `capacity` places earlier.
        arcs[source].append((target, 0.0, capacity + receipt.microbatch - effect.microbatch))
    return greatest_ratio(arcs)


def greatest_ratio(arcs: Mapping[Hashable, Sequence[Arc]]) -> float:
    """The greatest ratio of weight to delay of any cycle in a strongly connected graph.

    It uses policy iteration (Cochet-Terrasson, Cohen, Gaubert, McGettrick and Quadrat, 1998,
    "Numerical computation of spectral elements in max-plus algebra"): each node follows one of its
    incoming arcs back, and switches to a better one until no node has a better arc.

    Args:
        arcs: the arcs that end at each node. The delays of each cycle must sum to more than 0.

    >>> greatest_ratio({"a": [("a", 2.0, 1), ("b", 1.0, 1)], "b": [("a", 4.0, 1)]})
    2.5
    """
    # Gains within rounding must not count, or the iteration might never end.
    small = 1e-12 * sum(abs(weight) for incoming in arcs.values() for _, weight, _ in incoming)
    policy = {node: incoming[0] for node, incoming in arcs.items()}
    while True:
        ratios, values = _evaluate(policy)
        better = {
            node: max(incoming, key=lambda arc: ratios[arc[0]])
            for node, incoming in arcs.items()
            if max(ratios[source] for source, _, _ in incoming) > ratios[node] * (1 + 1e-12)
        }
        # Compare values only when no node can reach a better ratio: the values of cycles with
        # different ratios are not comparable.
        if not better:
            for node, incoming in arcs.items():
                gains = [
                    weight - ratios[node] * delay + values[source]
                    for source, weight, delay in incoming
                ]
                if (most := max(gains)) > values[node] + small:
                    better[node] = incoming[gains.index(most)]
        if not better:
            return max(ratios.values())
        policy |= better


def _evaluate(
    policy: Mapping[Hashable, Arc],
) -> tuple[dict[Hashable, float], dict[Hashable, float]]:
    """For each node, the ratio of the cycle to which its policy leads, and the node's value
    relative to a node of that cycle."""
    ratios = dict[Hashable, float]()
    values = dict[Hashable, float]()
    for start in policy:
        path = list[Hashable]()
        places = dict[Hashable, int]()
        node = start
        while node not in ratios and node not in places:
            places[node] = len(path)
            path.append(node)
            node = policy[node][0]
        # The walk has closed a new cycle; otherwise it ended at a node that an earlier walk
        # evaluated.
        if node not in ratios:
            cycle = path[places[node] :]
            weights, delays = zip(*(policy[each][1:] for each in cycle), strict=True)
            ratios[node], values[node] = sum(weights) / sum(delays), 0.0
        # From the cycle outwards: the value of a node needs that of the node that it follows.
        for each in reversed(path):
            if each not in ratios:
                source, weight, delay = policy[each]
                ratios[each] = ratios[source]
                values[each] = weight - ratios[source] * delay + values[source]
    return ratios, values
