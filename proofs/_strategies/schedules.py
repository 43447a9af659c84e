"""Custom schedules: ranks run their stages in any allowed order, from which `weave` makes
programs."""

import random
from collections.abc import Sequence

import attrs
from hypothesis import strategies as st

from weft.effects import Broadcast, Effect, Program, Recv, Run, Send
from weft.proofs._strategies.programs import SCHEMAS, Scheduled
from weft.transforms.pipelines.schedule import Job, jobs_for
from weft.transforms.pipelines.weaving import weave


@attrs.frozen(repr=False)
class Woven:
    """Programs of several stages on each rank, and an edit of them.

    Args:
        num_stages: the number of stages of all ranks together.
        rows: for each micro-batch, the requests in it.
        scheduled: the programs, the jobs they were made from, and the number of buffers.
        advances: whether the ranks advance their states.
        edited: the programs with one to three edits, which may be harmless.
    """

    num_stages: int
    rows: tuple[frozenset[int], ...]
    scheduled: Scheduled
    advances: bool
    edited: Scheduled

    def __repr__(self) -> str:
        rows = [sorted(row) for row in self.rows]
        return (
            f"Woven({self.num_stages} stages, rows {rows}, {self.scheduled}, edited {self.edited})"
        )


def run_orders(
    rng: random.Random, num_ranks: int, num_stages: int, jobs: Sequence[Job], advances: bool
) -> list[list[Run]]:
    """For each rank, a random order in which it can run its stages.

    Each stage takes the jobs in order. It runs a job after the stage before has run it, after the
    job that this one waits for has ended, and after the rank's stages are done with earlier jobs
    that do not feed (if ranks advance)."""
    done, orders = [0] * num_stages, [list[Run]() for _ in range(num_ranks)]

    def can_run(stage: int) -> bool:
        mb = done[stage]
        if mb == len(jobs) or (stage and done[stage - 1] <= mb):
            return False
        after = jobs[mb].after
        least = 1 + max((i for i in range(mb) if advances and not jobs[i].feeds), default=-1)
        return (after is None or done[-1] > after) and all(
            done[s] >= least for s in range(stage % num_ranks, num_stages, num_ranks)
        )

    while ready := [stage for stage in range(num_stages) if can_run(stage)]:
        stage = rng.choice(ready)
        orders[stage % num_ranks].append(Run(f"stage {stage}", done[stage]))
        done[stage] += 1
    return orders


@st.composite
def woven_programs(draw: st.DrawFn, max_jobs: int = 4) -> Woven:
    """Programs that run stages in any allowed order, for micro-batches of any requests, and an edit
    of the programs.

    >>> from hypothesis import find
    >>> find(woven_programs(), lambda case: case.num_stages == 4 and len(case.scheduled.programs) == 2).num_stages
    4
    """
    # 2 first: an example shrinks towards the fewest ranks that exchange messages.
    ranks = draw(st.sampled_from((2, 2, 1, 3)))
    per_rank = draw(st.sampled_from((2, 2, 1, 3)))
    # Of three requests, so that micro-batches often share one, and one waits for the other.
    rows = draw(
        st.lists(st.frozensets(st.integers(0, 2), min_size=1), min_size=1, max_size=max_jobs)
    )
    samples = draw(
        st.lists(st.sampled_from((True, True, False)), min_size=len(rows), max_size=len(rows))
    )
    jobs = jobs_for(rows, samples)
    rng = draw(st.randoms(use_true_random=False))
    advances = draw(st.booleans())
    # A rank alone sends nothing, so that none of its buffers is ever in flight.
    buffers = draw(st.sampled_from((None, None, 1) if ranks > 1 else (None,)))
    schema = draw(st.sampled_from((None, SCHEMAS[0])))
    orders = run_orders(rng, ranks, ranks * per_rank, jobs, advances)
    scheduled = Scheduled(
        jobs, weave(orders, jobs, schema=schema, advances=advances, buffers=buffers), buffers
    )
    edited = scheduled
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        edited = _edited(rng, edited, ranks * per_rank)
    return Woven(ranks * per_rank, tuple(rows), scheduled, advances, edited)


# "returned" is there twice, since it changes nothing where no output follows a receipt.
_KINDS = (
    "drop",
    "double",
    "move",
    "swap",
    "neighbours",
    "taken",
    "returned",
    "returned",
    "stage",
    "microbatch",
)


def _edited(rng: random.Random, case: Scheduled, num_stages: int) -> Scheduled:
    rank = rng.randrange(len(case.programs))
    effects = list(case.programs[rank].effects)
    if not effects:
        return case
    at = rng.randrange(len(effects))
    other = rng.randrange(len(effects))
    kind = rng.choice(_KINDS)
    if kind == "taken":  # swap two messages that are received one after the other
        receipts = [i for i, e in enumerate(effects) if isinstance(e, Recv | Broadcast)]
        first = rng.randrange(max(len(receipts) - 1, 1))
        for a, b in zip(receipts[first : first + 1], receipts[first + 1 : first + 2], strict=False):
            effects[a], effects[b] = effects[b], effects[a]
    elif kind == "returned":  # take in an output before a message that was received earlier
        received = [i for i, e in enumerate(effects) if isinstance(e, Recv)]
        returned = [
            i
            for i, e in enumerate(effects)
            if isinstance(e, Broadcast) and e.root != rank and [] < received[:1] < [i]
        ]
        if returned:
            first = rng.choice(returned)
            stop = (
                first
                + 1
                + (Run("advance", effects[first].microbatch) in effects[first + 1 : first + 2])
            )
            place = rng.choice([i for i in received if i < first][-2:])
            effects[place:stop] = [*effects[first:stop], *effects[place:first]]
    elif kind == "drop":
        del effects[at]
    elif kind == "double":
        effects.insert(other, effects[at])
    elif kind == "move":
        effects.insert(other, effects.pop(at))
    elif kind == "swap":
        effects[at], effects[other] = effects[other], effects[at]
    elif kind == "neighbours":
        effects[at : at + 2] = effects[at : at + 2][::-1]
    elif kind == "stage":
        effects[at] = _other_stage(effects[at], rng.randrange(num_stages))
    else:
        effects[at] = attrs.evolve(effects[at], microbatch=rng.randrange(len(case.jobs)))
    program: Program = attrs.evolve(case.programs[rank], effects=tuple(effects))
    return attrs.evolve(case, programs=(*case.programs[:rank], program, *case.programs[rank + 1 :]))


def _other_stage(effect: Effect, stage: int) -> Effect:
    if isinstance(effect, Send | Recv):
        return attrs.evolve(effect, stage=stage)
    if isinstance(effect, Run):
        return Run(f"stage {stage}", effect.microbatch)
    return effect
