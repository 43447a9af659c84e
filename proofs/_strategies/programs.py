"""Programs of pipelines: right programs for any jobs, programs with a named fault, and programs
edited at random."""

from collections.abc import Callable
from typing import Any, get_args

import attrs
import torch
from hypothesis import strategies as st

from weft.effects import Broadcast, Effect, Fence, Program, Recv, Run, Send
from weft.meshes.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    PPermute,
    ReduceScatter,
)
from weft.proofs.checks.programs_exhaustive import fault
from weft.transforms.pipelines.schedule import Job, make_programs
from weft.values.schema import Schema, TensorSchema

SCHEMAS = tuple(
    Schema((TensorSchema("h", ("num_tokens", width), torch.float32),)) for width in (4, 8)
)


@attrs.frozen(repr=False)
class Scheduled:
    """The programs of a pipeline, and what they were made from.

    Args:
        jobs: the micro-batches, and what each waits for.
        programs: one for each rank.
        buffers: the number of results that a stage holds. None: all.
    """

    jobs: tuple[Job, ...]
    programs: tuple[Program, ...]
    buffers: int | None

    def __repr__(self) -> str:
        ranks = ("; ".join([*p.classes, *map(str, p.effects)]) for p in self.programs)
        return f"Scheduled(buffers={self.buffers}, {' / '.join(ranks)})"


@st.composite
def job_lists(draw: st.DrawFn, max_jobs: int = 8, min_jobs: int = 0) -> tuple[Job, ...]:
    """Any jobs of a pipeline. Each may feed another; it runs after any earlier job that feeds, or
    after none.

    Args:
        max_jobs, min_jobs: the most and the fewest jobs.
    """
    jobs: list[Job] = []
    for _ in range(draw(st.integers(min_jobs, max_jobs))):
        feeding = [index for index, job in enumerate(jobs) if job.feeds]
        jobs.append(
            Job(
                draw(st.sampled_from((True, True, False))),
                # An example shrinks towards the first choice: no dependence, then one on the job
                # just before.
                draw(st.sampled_from((None, *reversed(feeding)))),
            )
        )
    return tuple(jobs)


@st.composite
def programs(
    draw: st.DrawFn, max_stages: int = 4, max_jobs: int = 8, min_jobs: int = 0
) -> Scheduled:
    """The programs that `make_programs` makes from any jobs, with or without schemas and classes.

    Args:
        max_stages: the most stages, with a rank for each.
        max_jobs, min_jobs: the most and the fewest jobs.

    >>> from hypothesis import find
    >>> print(*find(programs(), lambda case: len(case.programs) == 2 and case.jobs).programs[0].effects, sep="; ")
    run stage 0 [mb 0]; send to 1 [mb 0]; broadcast from 1 [mb 0]
    """
    jobs = draw(job_lists(max_jobs, min_jobs))
    buffers = draw(st.sampled_from((None, 1, 2)))
    schema = draw(st.sampled_from((None, SCHEMAS[0])))
    advances = draw(st.booleans())
    # 2 first, 1 last: an example shrinks towards the fewest ranks that exchange messages.
    stages = draw(st.sampled_from((*range(2, max_stages + 1), 1)))
    classed = draw(st.booleans())
    rank_programs = make_programs(stages, jobs, schema=schema, advances=advances, buffers=buffers)
    classes = tuple(f"class {index % 2}" for index in range(len(jobs) * classed))
    return Scheduled(
        jobs, tuple(attrs.evolve(program, classes=classes) for program in rank_programs), buffers
    )


@attrs.frozen
class Place:
    """The position of one effect in one rank's program."""

    rank: int
    index: int
    effect: Effect


Where = Callable[[Place, Scheduled], bool]
Edit = Callable[[st.DrawFn, list[Effect], Place, Scheduled], None]


def _drop(draw: st.DrawFn, effects: list[Effect], at: Place, case: Scheduled) -> None:
    del effects[at.index]


def _double(draw: st.DrawFn, effects: list[Effect], at: Place, case: Scheduled) -> None:
    effects.insert(draw(st.integers(0, len(effects))), at.effect)


def _move(draw: st.DrawFn, effects: list[Effect], at: Place, case: Scheduled) -> None:
    effects.insert(draw(st.integers(0, len(effects) - 1)), effects.pop(at.index))


def _move_forward(draw: st.DrawFn, effects: list[Effect], at: Place, case: Scheduled) -> None:
    effects.insert(draw(st.integers(0, at.index)), effects.pop(at.index))


def _swap_alike(draw: st.DrawFn, effects: list[Effect], at: Place, case: Scheduled) -> None:
    alike = [i for i, e in enumerate(effects) if type(e) is type(at.effect)]
    other = draw(st.sampled_from(alike))
    effects[at.index], effects[other] = effects[other], effects[at.index]


def _swap_neighbours(draw: st.DrawFn, effects: list[Effect], at: Place, case: Scheduled) -> None:
    effects[at.index : at.index + 2] = effects[at.index : at.index + 2][::-1]


def _omit(draw: st.DrawFn, effects: list[Effect], at: Place, case: Scheduled) -> None:
    effects[:] = [e for e in effects if e.microbatch != at.effect.microbatch]


def _take_in_last(draw: st.DrawFn, effects: list[Effect], at: Place, case: Scheduled) -> None:
    # The sort is stable: outputs and advances stay in order among themselves, after all else.
    effects.sort(key=lambda e: isinstance(e, Broadcast) or e == Run("advance", e.microbatch))


def _drop_last(draw: st.DrawFn, effects: list[Effect], at: Place, case: Scheduled) -> None:
    del effects[max(i for i, e in enumerate(effects) if isinstance(e, Broadcast))]


def _run_before_a_send(draw: st.DrawFn, effects: list[Effect], at: Place, case: Scheduled) -> None:
    sends = [i for i, e in enumerate(effects[: at.index]) if isinstance(e, Send | Broadcast)]
    effects.insert(sends[-1] if sends else 0, effects.pop(at.index))


def _rewrite(draw: st.DrawFn, effects: list[Effect], at: Place, case: Scheduled) -> None:
    effects[at.index] = draw(any_effects(len(case.programs), len(case.jobs)))


def _insert(draw: st.DrawFn, effects: list[Effect], at: Place, case: Scheduled) -> None:
    effects.insert(
        draw(st.integers(0, len(effects))), draw(any_effects(len(case.programs), len(case.jobs)))
    )


def _collective(draw: st.DrawFn, effects: list[Effect], at: Place, case: Scheduled) -> None:
    kinds = any_effects(len(case.programs), len(case.jobs)).filter(
        lambda e: isinstance(e, Collective)
    )
    effects.insert(draw(st.integers(0, at.index)), draw(kinds))


def _other_peer(draw: st.DrawFn, effects: list[Effect], at: Place, case: Scheduled) -> None:
    # One beyond the last rank, too: the checker must refuse a peer that does not exist.
    peer = draw(st.integers(0, len(case.programs)))
    match at.effect:
        case Send():
            effects[at.index] = attrs.evolve(at.effect, to=peer)
        case Recv():
            effects[at.index] = attrs.evolve(at.effect, source=peer)
        case Broadcast():
            effects[at.index] = attrs.evolve(at.effect, root=peer)
        case AllReduce() | AllGather() | ReduceScatter() | AllToAll() | PPermute():
            effects[at.index] = attrs.evolve(at.effect, ranks=(peer,))
        case Run() | Fence():
            pass


def _other_schema(draw: st.DrawFn, effects: list[Effect], at: Place, case: Scheduled) -> None:
    if isinstance(at.effect, Send | Recv | Broadcast):
        effects[at.index] = attrs.evolve(at.effect, schema=draw(st.sampled_from((None, *SCHEMAS))))


def _other_microbatch(draw: st.DrawFn, effects: list[Effect], at: Place, case: Scheduled) -> None:
    effects[at.index] = attrs.evolve(at.effect, microbatch=draw(st.integers(0, len(case.jobs))))


def _other_stage(draw: st.DrawFn, effects: list[Effect], at: Place, case: Scheduled) -> None:
    effects[at.index] = Run(
        f"stage {draw(st.integers(0, len(case.programs)))}", at.effect.microbatch
    )


def any_effects(num_ranks: int, num_microbatches: int) -> st.SearchStrategy[Effect]:
    """Any effect of any kind, whose ranks and micro-batches exist or are one beyond the last.

    >>> from hypothesis import find
    >>> print(find(any_effects(2, 2), lambda effect: isinstance(effect, AllGather)))
    all_gather dim 0 among 0 [mb 0]
    """
    rank = st.integers(0, num_ranks)
    values: dict[str, st.SearchStrategy[Any]] = {
        "what": st.one_of(st.just("advance"), rank.map(lambda stage: f"stage {stage}")),
        "microbatch": st.integers(0, num_microbatches),
        "schema": st.sampled_from((None, *SCHEMAS)),
        "stage": st.one_of(st.none(), rank),
        **dict.fromkeys(("to", "source", "root"), rank),
    }
    ranks = st.lists(rank, min_size=1, max_size=num_ranks, unique=True).map(tuple)

    # The fields come from the classes, so that new kinds of effects are drawn without an edit here.
    def of_kind(kind: type[Effect]) -> st.SearchStrategy[Effect]:
        names = [field.name for field in attrs.fields(kind)]
        drawn = {name: values[name] for name in names if name in values}
        if issubclass(kind, get_args(Collective)):
            drawn["ranks"] = ranks
        return st.builds(kind, **drawn)

    return st.one_of([of_kind(kind) for kind in get_args(Effect)])


def _of(*kinds: type) -> Where:
    return lambda at, case: isinstance(at.effect, kinds)


def _stages(at: Place, case: Scheduled) -> bool:
    return isinstance(at.effect, Run) and at.effect.what != "advance"


def _advances(at: Place, case: Scheduled) -> bool:
    return isinstance(at.effect, Run) and at.effect.what == "advance"


def _takes(at: Place, case: Scheduled) -> bool:
    return isinstance(at.effect, Broadcast) and at.rank != at.effect.root


_MESSAGES = _of(Send, Recv, Broadcast)

FAULTS: dict[str, tuple[Where, Edit]] = {
    "a send dropped": (_of(Send), _drop),
    "a receive dropped": (_of(Recv), _drop),
    "a broadcast dropped": (_of(Broadcast), _drop),
    "a fence dropped": (_of(Fence), _drop),
    "a stage not run": (_stages, _drop),
    "no advance": (_advances, _drop),
    "sends in another order": (_of(Send), _swap_alike),
    "receives in another order": (_of(Recv), _swap_alike),
    "returns in another order": (_of(Broadcast), _swap_alike),
    "runs in another order": (_of(Run), _swap_alike),
    "another schema at one end": (_MESSAGES, _other_schema),
    "another peer": (_MESSAGES, _other_peer),
    "another micro-batch": (_of(Send, Recv, Broadcast, Fence, Run), _other_microbatch),
    "another stage": (_stages, _other_stage),
    "twice": (_of(Send, Recv, Broadcast, Run), _double),
    "advanced before it returned": (_of(Broadcast), _swap_neighbours),
    "run before the last was sent": (_stages, _run_before_a_send),
    "what returned taken in too late": (_takes, _take_in_last),
    "what returned last not taken in": (_takes, _drop_last),
    "too early": (_of(Send, Recv, Broadcast, Fence, Run), _move_forward),
    "a micro-batch omitted on one rank": (_stages, _omit),
    "a collective, which no program performs": (_stages, _collective),
}
"""Named faults, and the positions where each can be planted. `broken_programs` drops edits that
turn out to be harmless."""

EDITS: tuple[Edit, ...] = (
    _drop,
    _double,
    _move,
    _rewrite,
    _insert,
    _swap_alike,
    _swap_neighbours,
    _omit,
    _other_schema,
    _other_peer,
    _other_microbatch,
)
"""Edits that apply to any effect."""


def _places(case: Scheduled) -> list[Place]:
    return [
        Place(rank, i, e) for rank, p in enumerate(case.programs) for i, e in enumerate(p.effects)
    ]


def _edited(draw: st.DrawFn, case: Scheduled, at: Place, edit: Edit) -> Scheduled:
    effects = list(case.programs[at.rank].effects)
    edit(draw, effects, at, case)
    return _with(case, at.rank, attrs.evolve(case.programs[at.rank], effects=tuple(effects)))


def _with(case: Scheduled, rank: int, program: Program) -> Scheduled:
    return attrs.evolve(case, programs=(*case.programs[:rank], program, *case.programs[rank + 1 :]))


def _other_class(draw: st.DrawFn, case: Scheduled) -> Scheduled:
    rank = draw(st.integers(0, len(case.programs) - 1))
    return _with(
        case,
        rank,
        attrs.evolve(case.programs[rank], classes=(*case.programs[rank].classes[:-1], "another")),
    )


def _other_root(draw: st.DrawFn, case: Scheduled) -> Scheduled:
    return _mapped(case, lambda e: Broadcast(0, e.microbatch) if isinstance(e, Broadcast) else e)


def _mapped(case: Scheduled, change: Callable[[Effect], Effect]) -> Scheduled:
    programs = (attrs.evolve(p, effects=tuple(map(change, p.effects))) for p in case.programs)
    return attrs.evolve(case, programs=tuple(programs))


def _renamed(draw: st.DrawFn, case: Scheduled) -> Scheduled:
    """Renumber the micro-batches and change the schema of all edges; this is mostly harmless."""
    names, schema = (
        draw(st.permutations(range(len(case.jobs)))),
        draw(st.sampled_from((None, *SCHEMAS))),
    )

    def change(effect: Effect) -> Effect:
        if effect.microbatch < len(names):
            mb = names[effect.microbatch]
        else:
            mb = effect.microbatch
        new = attrs.evolve(effect, microbatch=mb)
        if isinstance(new, Send | Recv):
            return attrs.evolve(new, schema=schema)
        return new

    return _mapped(case, change)


def small_programs() -> st.SearchStrategy[Scheduled]:
    """Programs small enough to try every order: few jobs, or at most two stages with more jobs, so
    that one can run far ahead."""
    # The number of orders is a product over the ranks, so that three ranks have fewer jobs.
    return st.one_of(programs(2, 6, min_jobs=4), programs(3, 3))


@attrs.frozen(repr=False)
class Broken:
    """Right programs, and wrong programs that differ from them by one fault, by the fault's
    name."""

    right: Scheduled
    wrong: dict[str, Scheduled]

    def __repr__(self) -> str:
        return f"{self.right} with one of {len(self.wrong)} faults"


@st.composite
def broken_programs(draw: st.DrawFn) -> Broken:
    """Right programs, and copies with one fault each: those of `FAULTS`, another class on one rank,
    and another root on all ranks.

    A copy is kept only if `weft.proofs.checks.programs_exhaustive` finds it wrong."""
    case = draw(small_programs())
    candidates = {
        "another class": _other_class(draw, case),
        "another root": _other_root(draw, case),
    }
    for name, (where, edit) in FAULTS.items():
        if places := [place for place in _places(case) if where(place, case)]:
            candidates[name] = _edited(draw, case, draw(st.sampled_from(places)), edit)
    wrong = {
        name: new
        for name, new in candidates.items()
        if fault(new.programs, buffers=new.buffers) is not None
    }
    return Broken(case, wrong)


@st.composite
def edited_programs(draw: st.DrawFn) -> Scheduled:
    """Right programs with up to three faults or edits of any kind, some of them harmless."""
    case = draw(small_programs())
    # 0 too: the law is also that right programs are accepted.
    for _ in range(draw(st.sampled_from((1, 1, 0, 2, 3)))):
        places = _places(case)
        if not places or draw(st.booleans()):
            case = draw(st.sampled_from((_renamed, _other_class)))(draw, case)
            continue
        place = draw(st.sampled_from(places))
        fitting = (edit for where, edit in FAULTS.values() if where(place, case))
        case = _edited(draw, case, place, draw(st.sampled_from((*EDITS, *fitting))))
    return case
