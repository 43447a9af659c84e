"""Ranks that fail at each instruction in turn, and what all other ranks say of it.

    python -m weft.proofs.evidence.runs.failures --out FOLDER [--runs 200]

Each run starts a process for every rank of a pipeline of 2, 3 or 4 stages, or of a mesh whose ranks
share each stage. It lets one of them raise, exit, be killed, stall or be stopped at one instruction
of its program, or at a collective inside that instruction, and asks: did every other rank raise a
RankError that names that rank and that instruction, in time; did the launcher; and have all
processes ended. The runs take each place in turn, and the ways to fail in turn. A quarter as many
again kill a rank at any time, while it starts and connects too: then all must name it, and the same
instruction.
"""

import argparse
import itertools
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from tqdm import tqdm

from weft.effects import Run
from weft.errors import RankError
from weft.meshes.collectives import AllGather, AllReduce, Collective, with_schema
from weft.meshes.mesh import Mesh, group_of
from weft.proofs.evidence.runs.sabotage import (
    HANG,
    MICROBATCHES,
    MOMENTS,
    ROWS,
    TIMEOUT,
    WAYS,
    AtCollective,
    Case,
    Planted,
    make_pipeline,
    run_rank,
)
from weft.transforms.pipelines.transports.launch import launch

# Ranks of a pipeline. With four, some have no edge with the one that failed, and must hear of it
# all the same.
NUM_RANKS = (2, 3, 4)
# Meshes whose ranks share each stage.
MESHES = (Mesh(pipeline=1, tensor=2), Mesh(pipeline=1, tensor=3), Mesh(pipeline=2, tensor=2))
# Seconds beyond the time-out in which all must be over: a process that is stopped is asked to end
# first.
LIMIT = 6.0
# Seconds after which a rank is killed at the latest, where it is killed at any time.
LATEST = 0.4


@attrs.frozen
class Outcome:
    """What became of a case: the seconds from the failure until the last other rank had raised its
    error, those until all processes had ended, and what was wrong, if anything was."""

    case: Case
    raised: float
    ended: float
    wrong: str | None


def cases() -> Iterator[Case]:
    """All of a pipeline: every place once, then every place with the next way, until each had each
    way, in two steps."""
    places = [
        (program.num_ranks, program.rank, index, str(effect))
        for num_ranks in NUM_RANKS
        for program in make_pipeline(num_ranks).programs(MICROBATCHES)
        # The end is a place too: a rank that fails after its last effect has left nobody waiting in
        # this step, and must be named in the next one.
        for index, effect in enumerate((*program.effects, "its end"))
    ]
    for step, turn in itertools.product((1, 0), range(len(WAYS))):
        for number, (num_ranks, rank, index, instruction) in enumerate(places):
            yield Case(
                num_ranks, rank, index, [*WAYS][(number + turn) % len(WAYS)], step, instruction
            )


def cases_of_meshes() -> Iterator[Case]:
    """All of the meshes, likewise: before each effect, and at each collective of each run of a
    stage; the places are shuffled, so that some of them stand for all."""
    places = [
        (mesh, program.rank, index, effect, place)
        for mesh in MESHES
        for program in make_pipeline(mesh.num_ranks, mesh=mesh).programs(MICROBATCHES)
        for index, effect in enumerate((*program.effects, None))
        for place in (
            None,
            *(_PLACES if isinstance(effect, Run) and effect.stage is not None else ()),
        )
    ]
    # A run rarely has time for all of them. In order, the first ones would all be of one mesh.
    random.Random(0).shuffle(places)
    for step, turn in itertools.product((1, 0), range(len(WAYS))):
        for number, (mesh, rank, index, effect, place) in enumerate(places):
            if effect is None:
                instruction = "its end"
            else:
                instruction = str(effect)
            # Before the collective the others know of the effect; from there on, of the collective
            # in it.
            if effect is not None and place is not None and place.moment != "before":
                instruction = in_collective(mesh, rank, place.index)
            way = [*WAYS][(number + turn) % len(WAYS)]
            tensor = mesh.sizes["tensor"]
            yield Case(mesh.num_ranks, rank, index, way, step, instruction, tensor, place)


# The places in a run of `scale_together`.
_PLACES = [AtCollective(index, moment) for index in range(2) for moment in MOMENTS]


def in_collective(mesh: Mesh, rank: int, index: int) -> str:
    """The instruction of a rank in a collective of `scale_together`, without its number."""
    ranks = group_of(mesh, rank, "tensor")
    rows = ROWS // MICROBATCHES
    if index == 0:
        effect: Collective = AllReduce(ranks)
    else:
        effect = AllGather(ranks, dim=1)
    return str(with_schema(effect, torch.empty((rows,) if index == 0 else (rows, 1))))


@contextmanager
def no_longer_than(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread where what is inside hangs."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"it hangs for {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    # A signal, since what hangs may be a wait in another library, which no time-out of ours ends.
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def cases_at_any_time() -> Iterator[Case]:
    """A rank killed some time after it started: before it has met the others, until it is at its
    steps."""
    chance = random.Random(0)
    sizes = [
        *((number, 1) for number in NUM_RANKS),
        *((mesh.num_ranks, mesh.sizes["tensor"]) for mesh in MESHES),
    ]
    while True:
        num_ranks, tensor = chance.choice(sizes)
        rank = chance.randrange(num_ranks)
        # Only killed: to raise or to stall at any time would take code at every place.
        yield Case(num_ranks, rank, -1, "kill", -1, "", tensor, delay=chance.random() * LATEST)


def run_case(case: Case, target: Callable[[Case, Path], None] = run_rank) -> Outcome:
    """Start the ranks, each with `target`, wait for their end, and see what they said."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        heard = None
        try:
            # That the launcher itself does not hang is part of the promise.
            with no_longer_than(HANG + 2 * case.timeout):
                launch(target, case.num_ranks, case, folder, timeout=case.timeout)
        except Exception as error:
            heard = error
        ended = time.monotonic()
        if (folder / "failed").exists():
            # The failing rank writes the time itself, just before it fails: the start of its
            # process is not counted. A monotonic clock is one for all processes of a machine.
            began = float((folder / "failed").read_text())
        else:
            began = ended
        records = {
            rank: json.loads(path.read_text())
            for rank in range(case.num_ranks)
            if (path := folder / f"rank{rank}").exists()
        }
    raised = max(
        (record["time"] - began for rank, record in records.items() if rank != case.rank),
        default=0.0,
    )
    return Outcome(case, raised, ended - began, _wrong(case, records, heard, ended - began))


def _wrong(
    case: Case, records: dict[int, Any], heard: Exception | None, seconds: float
) -> str | None:
    """What is not as it should be."""
    reports = [record["about"] for rank, record in records.items() if rank != case.rank]
    said = reports[0][1] if reports else ""
    # The number of a collective depends on how many came before it in earlier steps.
    numbered = case.collective is not None and str(said).startswith(f"{case.instruction}, number ")
    # Where any instruction will do, all ranks must still say the same one.
    expected = [case.rank, said if numbered or not case.instruction else case.instruction]
    for rank in range(case.num_ranks):
        if rank != case.rank and rank not in records:
            return f"rank {rank} raised nothing"
        if rank != case.rank and records[rank]["about"] != expected:
            return f"rank {rank} said {records[rank]['about']}: {records[rank]['error']}"
    # A rank that raises has an error of its own, which is worth more than that it failed.
    if isinstance(heard, Planted) if case.way == "raise" else isinstance(heard, RankError):
        if not isinstance(heard, RankError):
            said = expected
        else:
            said = [heard.rank, heard.instruction]
    else:
        return f"the launcher said {heard!r}"
    if said != expected:
        return f"the launcher said {said}"
    # A process that was stopped takes no signal but SIGKILL, and is easily left behind.
    if any(Path(f"/proc/{record['pid']}").exists() for record in records.values()):
        return "a process is left"
    if seconds > case.timeout + LIMIT:
        return f"it took {seconds:.1f} s"
    return None


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What the record says."""
    ways = {}
    for way in WAYS:
        way_outcomes = [outcome for outcome in outcomes if outcome.case.way == way]
        ways[way] = {
            "runs": len(way_outcomes),
            "raised": _spread([o.raised for o in way_outcomes]),
            "ended": _spread([o.ended for o in way_outcomes]),
        }
    return {
        "environment": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
        },
        "timeout": TIMEOUT,
        "runs": len(outcomes),
        "in a mesh": sum(o.case.tensor > 1 for o in outcomes),
        "at a collective": sum(o.case.collective is not None for o in outcomes),
        "at any time": sum(o.case.delay is not None for o in outcomes),
        "places": len({_place(o.case) for o in outcomes if o.case.delay is None}),
        "instructions": Counter(
            o.case.instruction.split()[0] for o in outcomes if o.case.delay is None
        ),
        "ways": ways,
        "slowest": {
            str(o.case): round(o.raised, 3) for o in sorted(outcomes, key=lambda o: -o.raised)[:3]
        },
        "wrong": [f"{outcome.case}: {outcome.wrong}" for outcome in outcomes if outcome.wrong],
    }


def _place(case: Case) -> tuple[Any, ...]:
    return case.num_ranks, case.tensor, case.rank, case.index, case.collective


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    if seconds:
        return {"median": round(statistics.median(seconds), 3), "max": round(max(seconds), 3)}
    return None


def main() -> None:
    """Run the cases, write `failures.json`, and exit with 1 if one went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument(
        "--runs", type=int, default=200, help="half of them in a pipeline, half in a mesh"
    )
    args = parser.parse_args()
    half = args.runs // 2
    chosen = [
        *itertools.islice(cases(), args.runs - half),
        *itertools.islice(cases_of_meshes(), half),
        *itertools.islice(cases_at_any_time(), args.runs // 4),
    ]
    outcomes = []
    for case in tqdm(chosen, unit="run"):
        outcomes.append(outcome := run_case(case))
        if outcome.wrong:
            tqdm.write(f"{case}: {outcome.wrong}", file=sys.stderr)
    report = summary(outcomes)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "failures.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    raise SystemExit(1 if report["wrong"] else 0)


if __name__ == "__main__":
    main()
