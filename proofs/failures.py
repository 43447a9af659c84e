"""Ranks that fail at each instruction in turn, and what all other ranks say of it.

    python -m weft.proofs.failures --out FOLDER [--runs 200]

Each run starts a process for every rank of a pipeline of 2, 3 or 4 stages, or of a mesh whose ranks share each stage.
It lets one of them raise, exit, be killed, stall or be stopped at one instruction of its program, or at a collective
inside that instruction, and asks: did every other rank raise a RankError that names that rank and that instruction, in
time; did the launcher; and have all processes ended. The runs take each place in turn, and the ways to fail in turn. A
quarter as many again kill a rank at any time, while it starts and connects too: then all must name it, and the same
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
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from tqdm import tqdm

from weft.effects import Effect, Run
from weft.errors import RankError
from weft.meshes.collectives import AllGather, AllReduce, Collective, with_schema
from weft.meshes.mesh import Mesh
from weft.ops.transfers.collective import all_gather, all_reduce, axis_index
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.checker import CheckedPrograms
from weft.transforms.pipelines.pipeline import Pipelined, pipeline
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.launch import launch
from weft.transforms.pipelines.worker import Link, Worker

NUM_RANKS = (2, 3, 4)
"""Ranks of a pipeline."""
MESHES = (Mesh(pipeline=1, tensor=2), Mesh(pipeline=1, tensor=3), Mesh(pipeline=2, tensor=2))
"""Meshes whose ranks share each stage."""
STEPS = 4
"""Steps that a run would take."""
MICROBATCHES = 2
ROWS = 4
"""Rows of the batch."""
TIMEOUT = 5.0
"""Seconds that a rank may keep another one waiting: more than four ranks on two busy cores take to capture a step."""
LIMIT = 6.0
"""Seconds beyond the time-out in which all must be over: a process that is stopped is asked to end first."""
LATEST = 0.4
"""Seconds after which a rank is killed at the latest, where it is killed at any time."""
HANG = 60.0
"""Seconds after which a run is given up."""


class Planted(Exception):
    """The error of a rank that raises."""


def _raise() -> None:
    raise Planted("planted")


WAYS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stall": lambda: time.sleep(3600),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


Moment = Literal["before", "within", "after"]
"""A rank fails before it tells the others that it has come to a collective; before it sends its tensor; or after it has
received theirs."""
MOMENTS: tuple[Moment, ...] = ("before", "within", "after")


@attrs.frozen
class AtCollective:
    """A place inside a run of a stage.

    Args:
        index: of a collective, among those of the run.
        moment: one of MOMENTS.
    """

    index: int
    moment: Moment


@attrs.frozen
class Case:
    """One way to fail, at one place.

    Args:
        num_ranks: of the pipeline or the mesh.
        rank: that fails.
        index: at which of its effects; after the last: at its end.
        way: one of WAYS.
        step: in which step, from 0.
        instruction: as its program prints the effect, or as a rank in a collective says it; empty: any.
        tensor: the ranks that share each stage.
        collective: where it fails inside that effect; None: before it.
        delay: seconds after which it fails, wherever it then is; None: at that place.
        backend: of the transport.
        timeout: seconds that a rank may keep another one waiting.
    """

    num_ranks: int
    rank: int
    index: int
    way: str
    step: int
    instruction: str
    tensor: int = 1
    collective: AtCollective | None = None
    delay: float | None = None
    backend: Literal["gloo", "nccl", "peer"] = "gloo"
    timeout: float = TIMEOUT

    def __str__(self) -> str:
        if self.delay is not None:
            return f"{self.way} rank {self.rank} of {self._ranks} after {self.delay:.3f} s"
        where = f"'{self.instruction}'"
        if self.collective is not None:
            where = f"collective {self.collective.index} of effect {self.index}, {self.collective.moment} {where}"
        return f"{self.way} at {where} of rank {self.rank} of {self._ranks}, step {self.step}"

    @property
    def _ranks(self) -> str:
        return f"{self.num_ranks}" if self.tensor == 1 else f"{self.num_ranks // self.tensor} x {self.tensor}"

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the ranks, where several share a stage."""
        return None if self.tensor == 1 else Mesh(pipeline=self.num_ranks // self.tensor, tensor=self.tensor)


@attrs.frozen
class Outcome:
    """What became of a case: the seconds from the failure until the last other rank had raised its error, those until
    all processes had ended, and what was wrong, if anything was."""

    case: Case
    raised: float
    ended: float
    wrong: str | None


@attrs.define(eq=False)
class Failing(Worker):
    """A worker that fails at one of its effects."""

    case: Case = attrs.field(kw_only=True)
    folder: Path = attrs.field(kw_only=True)
    count: int = 0

    def perform(self, effect: Effect, link: Link) -> None:
        if self.count == self.case.index:
            if (place := self.case.collective) is None:
                fail(self.case, self.folder)
            else:
                self._plant(place, link)
        self.count += 1
        super().perform(effect, link)

    def _plant(self, place: AtCollective, link: Any) -> None:
        """Let the rank fail at one of the collectives that it comes to next."""
        owner = link if place.moment == "before" else link.end
        perform, count = owner.perform, itertools.count()

        def failing(*given: Any) -> torch.Tensor:
            now = next(count) == place.index
            if now and place.moment != "after":
                fail(self.case, self.folder)
            made: torch.Tensor = perform(*given)
            if now:
                fail(self.case, self.folder)
            return made

        owner.perform = failing


def fail(case: Case, folder: Path) -> None:
    """Fail as the case says; the time is written down."""
    (folder / "failed").write_text(repr(time.monotonic()))
    WAYS[case.way]()


@attrs.define(eq=False)
class Sabotaged:
    """A transport in which one rank fails."""

    transport: Transport
    case: Case
    folder: Path
    steps: int = 0

    @property
    def member(self) -> int | None:
        return self.transport.member

    def ranks(self, num_ranks: int) -> Sequence[int]:
        return self.transport.ranks(num_ranks)

    def share(self, value: Any) -> Any:
        return self.transport.share(value)

    def collect(self, value: Any) -> list[Any]:
        return self.transport.collect(value)

    def assert_equal(self, subject: str, value: str) -> None:
        self.transport.assert_equal(subject, value)

    def check(self) -> None:
        self.transport.check()

    def received(self, last: int | None = None, /) -> Callable[[], None]:
        return self.transport.received(last)

    def mail(self, num_ranks: int, /) -> Any:
        return self.transport.mail(num_ranks)

    def run(self, checked: CheckedPrograms, workers: Sequence[Worker], mail: Any, /) -> None:
        now = self.steps == self.case.step
        self.steps += 1
        used = [self._failing(worker) if now and worker.rank == self.case.rank else worker for worker in workers]
        self.transport.run(checked, used, mail)
        if now and self.case.rank in (worker.rank for worker in workers):
            fail(self.case, self.folder)

    def _failing(self, worker: Worker) -> Failing:
        return Failing(**attrs.asdict(worker, recurse=False), case=self.case, folder=self.folder)


def scale(p: torch.Tensor, s: torch.Tensor, batch: torch.Tensor, x: torch.Tensor | None) -> tuple[Any, torch.Tensor]:
    """A stage."""
    y = (batch if x is None else x) * p
    return s + y.sum(), y


def scale_together(
    p: torch.Tensor, s: torch.Tensor, batch: torch.Tensor, x: torch.Tensor | None
) -> tuple[Any, torch.Tensor]:
    """A stage that ranks share, with two collectives."""
    y = all_reduce((batch if x is None else x) * p, "tensor")
    return s + y.sum(), all_gather(y[:, None] + axis_index("tensor"), "tensor", dim=1).mean(1)


def advance(s: torch.Tensor, batch: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return s + out.sum() - batch.sum()


def make_pipeline(num_ranks: int, transport: Transport | None = None, mesh: Mesh | None = None) -> Pipelined:
    """Stages that lend their results, so that every kind of effect is in the programs."""
    count = num_ranks if mesh is None else mesh.sizes["pipeline"]
    stages = [graphify(scale if mesh is None else scale_together, outputs="borrow") for _ in range(count)]
    return pipeline(stages, microbatches=MICROBATCHES, advance=advance, transport=transport, mesh=mesh)


def run_rank(case: Case, folder: Path) -> None:
    """A rank's part: steps, until one raises."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if rank == case.rank and case.delay is not None:
        threading.Timer(case.delay, fail, (case, folder)).start()
    try:
        take_steps(case, folder)
    except BaseException as error:
        about = (error.rank, error.instruction) if isinstance(error, RankError) else (None, repr(error))
        record = {"pid": os.getpid(), "about": about, "error": str(error), "time": time.monotonic()}
        (folder / f"rank{rank}").write_text(json.dumps(record))
        raise


def take_steps(case: Case, folder: Path) -> None:
    """Take steps in which one rank fails, and wait for what they compute."""
    transport = Distributed(timeout=case.timeout, backend=case.backend)
    step = make_pipeline(case.num_ranks, Sabotaged(transport, case, folder), case.mesh)
    state: Any = (torch.zeros((), device=transport.device),)
    param, batch = (torch.tensor(x, device=transport.device) for x in (2.0, [float(row) for row in range(ROWS)]))
    for _ in range(STEPS) if case.delay is None else itertools.count():
        state, _ = step((param,), state, batch)
    transport.synchronize()


def cases() -> Iterator[Case]:
    """All of a pipeline: every place once, then every place with the next way, until each had each way, in two
    steps."""
    places = [
        (program.num_ranks, program.rank, index, str(effect))
        for num_ranks in NUM_RANKS
        for program in make_pipeline(num_ranks).programs(MICROBATCHES)
        for index, effect in enumerate((*program.effects, "its end"))
    ]
    for step, turn in itertools.product((1, 0), range(len(WAYS))):
        for number, (num_ranks, rank, index, instruction) in enumerate(places):
            yield Case(num_ranks, rank, index, [*WAYS][(number + turn) % len(WAYS)], step, instruction)


def cases_of_meshes() -> Iterator[Case]:
    """All of the meshes, likewise: before each effect, and at each collective of each run of a stage; the places are
    shuffled, so that some of them stand for all."""
    places = [
        (mesh, program.rank, index, effect, place)
        for mesh in MESHES
        for program in make_pipeline(mesh.num_ranks, mesh=mesh).programs(MICROBATCHES)
        for index, effect in enumerate((*program.effects, None))
        for place in (None, *(_PLACES if isinstance(effect, Run) and effect.stage is not None else ()))
    ]
    random.Random(0).shuffle(places)
    for step, turn in itertools.product((1, 0), range(len(WAYS))):
        for number, (mesh, rank, index, effect, place) in enumerate(places):
            instruction = "its end" if effect is None else str(effect)
            if effect is not None and place is not None and place.moment != "before":
                instruction = in_collective(mesh, rank, place.index)
            way, tensor = [*WAYS][(number + turn) % len(WAYS)], mesh.sizes["tensor"]
            yield Case(mesh.num_ranks, rank, index, way, step, instruction, tensor, place)


_PLACES = [AtCollective(index, moment) for index in range(2) for moment in MOMENTS]
"""The places in a run of `scale_together`."""


def in_collective(mesh: Mesh, rank: int, index: int) -> str:
    """The instruction of a rank in a collective of `scale_together`, without its number."""
    ranks, rows = mesh.group(rank, "tensor"), ROWS // MICROBATCHES
    effect: Collective = AllReduce(ranks) if index == 0 else AllGather(ranks, dim=1)
    return str(with_schema(effect, torch.empty((rows,) if index == 0 else (rows, 1))))


@contextmanager
def no_longer_than(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread where what is inside hangs."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"it hangs for {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def cases_at_any_time() -> Iterator[Case]:
    """A rank killed some time after it started: before it has met the others, until it is at its steps."""
    chance = random.Random(0)
    sizes = [*((number, 1) for number in NUM_RANKS), *((mesh.num_ranks, mesh.sizes["tensor"]) for mesh in MESHES)]
    while True:
        num_ranks, tensor = chance.choice(sizes)
        rank = chance.randrange(num_ranks)
        yield Case(num_ranks, rank, -1, "kill", -1, "", tensor, delay=chance.random() * LATEST)


def run_case(case: Case, target: Callable[[Case, Path], None] = run_rank) -> Outcome:
    """Start the ranks, each with `target`, wait for their end, and see what they said."""
    with tempfile.TemporaryDirectory() as name:
        folder, heard = Path(name), None
        try:
            with no_longer_than(HANG + 2 * case.timeout):
                launch(target, case.num_ranks, case, folder, timeout=case.timeout)
        except Exception as error:
            heard = error
        ended = time.monotonic()
        began = float((folder / "failed").read_text()) if (folder / "failed").exists() else ended
        records = {
            rank: json.loads(path.read_text())
            for rank in range(case.num_ranks)
            if (path := folder / f"rank{rank}").exists()
        }
    raised = max((record["time"] - began for rank, record in records.items() if rank != case.rank), default=0.0)
    return Outcome(case, raised, ended - began, _wrong(case, records, heard, ended - began))


def _wrong(case: Case, records: dict[int, Any], heard: Exception | None, seconds: float) -> str | None:
    """What is not as it should be."""
    others = [record["about"] for rank, record in records.items() if rank != case.rank]
    said = others[0][1] if others else ""
    numbered = case.collective is not None and str(said).startswith(f"{case.instruction}, number ")
    wanted = [case.rank, said if numbered or not case.instruction else case.instruction]
    for rank in range(case.num_ranks):
        if rank != case.rank and rank not in records:
            return f"rank {rank} raised nothing"
        if rank != case.rank and records[rank]["about"] != wanted:
            return f"rank {rank} said {records[rank]['about']}: {records[rank]['error']}"
    if isinstance(heard, Planted) if case.way == "raise" else isinstance(heard, RankError):
        said = wanted if not isinstance(heard, RankError) else [heard.rank, heard.instruction]
    else:
        return f"the launcher said {heard!r}"
    if said != wanted:
        return f"the launcher said {said}"
    if any(Path(f"/proc/{record['pid']}").exists() for record in records.values()):
        return "a process is left"
    return f"it took {seconds:.1f} s" if seconds > case.timeout + LIMIT else None


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What the record says."""
    ways = {}
    for way in WAYS:
        own = [outcome for outcome in outcomes if outcome.case.way == way]
        ways[way] = {
            "runs": len(own),
            "raised": _spread([o.raised for o in own]),
            "ended": _spread([o.ended for o in own]),
        }
    return {
        "environment": {"torch": torch.__version__, "python": platform.python_version(), "cpus": os.cpu_count()},
        "timeout": TIMEOUT,
        "runs": len(outcomes),
        "in a mesh": sum(o.case.tensor > 1 for o in outcomes),
        "at a collective": sum(o.case.collective is not None for o in outcomes),
        "at any time": sum(o.case.delay is not None for o in outcomes),
        "places": len({_place(o.case) for o in outcomes if o.case.delay is None}),
        "instructions": Counter(o.case.instruction.split()[0] for o in outcomes if o.case.delay is None),
        "ways": ways,
        "slowest": {str(o.case): round(o.raised, 3) for o in sorted(outcomes, key=lambda o: -o.raised)[:3]},
        "wrong": [f"{outcome.case}: {outcome.wrong}" for outcome in outcomes if outcome.wrong],
    }


def _place(case: Case) -> tuple[Any, ...]:
    return case.num_ranks, case.tensor, case.rank, case.index, case.collective


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    return {"median": round(statistics.median(seconds), 3), "max": round(max(seconds), 3)} if seconds else None


def main() -> None:
    """Run the cases, write `failures.json`, and exit with 1 if one went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--runs", type=int, default=200, help="half of them in a pipeline, half in a mesh")
    given = parser.parse_args()
    half = given.runs // 2
    chosen = [
        *itertools.islice(cases(), given.runs - half),
        *itertools.islice(cases_of_meshes(), half),
        *itertools.islice(cases_at_any_time(), given.runs // 4),
    ]
    outcomes = []
    for case in tqdm(chosen, unit="run"):
        outcomes.append(outcome := run_case(case))
        if outcome.wrong:
            tqdm.write(f"{case}: {outcome.wrong}", file=sys.stderr)
    report = summary(outcomes)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "failures.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    raise SystemExit(1 if report["wrong"] else 0)


if __name__ == "__main__":
    main()
