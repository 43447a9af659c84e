"""Processes of which one fails at an instruction, in one of several ways, for
`weft.proofs.evidence.runs.failures`."""

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import torch

from weft.effects import Effect
from weft.errors import RankError
from weft.meshes.mesh import Mesh
from weft.ops.transfers.collective import all_gather, all_reduce, axis_index
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.checker import CheckedPrograms
from weft.transforms.pipelines.pipeline import Pipelined, pipeline
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.worker import Link, Worker

# Steps that a run would take. Ranks fail in the first or the second: one that has not noticed would
# go on with the others.
STEPS = 4
MICROBATCHES = 2
# Rows of the batch.
ROWS = 4
# Seconds that a rank may keep another one waiting: more than four ranks on two busy cores take to
# capture a step.
TIMEOUT = 5.0
# Seconds after which a run is given up.
HANG = 60.0


class Planted(Exception):
    """The error of a rank that raises."""


def _raise() -> None:
    raise Planted("planted")


WAYS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    # Without cleaning up: no handler runs that could tell the others.
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    # Alive and answering, but without progress: only a time-out tells it from a slow rank.
    "stall": lambda: time.sleep(3600),
    # No thread of the process runs any more, so that it cannot even say that it stands still.
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


# A rank fails before it tells the others that it has come to a collective; before it sends its
# tensor; or after it has received theirs.
Moment = Literal["before", "within", "after"]
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
        instruction: as its program prints the effect, or as a rank in a collective says it; empty:
            any.
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
            where = (
                f"collective {self.collective.index} of effect {self.index},"
                f" {self.collective.moment} {where}"
            )
        return f"{self.way} at {where} of rank {self.rank} of {self._ranks}, step {self.step}"

    @property
    def _ranks(self) -> str:
        if self.tensor == 1:
            return f"{self.num_ranks}"
        return f"{self.num_ranks // self.tensor} x {self.tensor}"

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the ranks, where several share a stage."""
        if self.tensor == 1:
            return None
        return Mesh(pipeline=self.num_ranks // self.tensor, tensor=self.tensor)


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
        if place.moment == "before":
            owner = link
        else:
            # The link tells the others where it is, and its end carries the tensor: patched at one
            # or the other, the failure comes before or after the others know.
            owner = link.end
        perform, count = owner.perform, itertools.count()

        def failing(*args: Any) -> torch.Tensor:
            # Counted here, since a run of a stage has several collectives through one object.
            now = next(count) == place.index
            if now and place.moment != "after":
                fail(self.case, self.folder)
            result: torch.Tensor = perform(*args)
            if now:
                fail(self.case, self.folder)
            return result

        owner.perform = failing


def fail(case: Case, folder: Path) -> None:
    """Fail as the case says; the time is written down."""
    # Before it fails, since afterwards it cannot.
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
        # Workers are replaced and not the stages: the failure lies in the effect, as a rank's own
        # would.
        used = [
            self._failing(worker) if now and worker.rank == self.case.rank else worker
            for worker in workers
        ]
        self.transport.run(checked, used, mail)
        # Still here, so that the place was the end of the program.
        if now and self.case.rank in (worker.rank for worker in workers):
            fail(self.case, self.folder)

    def _failing(self, worker: Worker) -> Failing:
        return Failing(**attrs.asdict(worker, recurse=False), case=self.case, folder=self.folder)


def scale(
    p: torch.Tensor, s: torch.Tensor, batch: torch.Tensor, x: torch.Tensor | None
) -> tuple[Any, torch.Tensor]:
    """A stage."""
    y = (batch if x is None else x) * p
    return s + y.sum(), y


def scale_together(
    p: torch.Tensor, s: torch.Tensor, batch: torch.Tensor, x: torch.Tensor | None
) -> tuple[Any, torch.Tensor]:
    """A stage that ranks share, with two collectives."""
    # Two different collectives, so that an error can name the wrong one.
    y = all_reduce((batch if x is None else x) * p, "tensor")
    return s + y.sum(), all_gather(y[:, None] + axis_index("tensor"), "tensor", dim=1).mean(1)


def advance(s: torch.Tensor, batch: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return s + out.sum() - batch.sum()


def make_pipeline(
    num_ranks: int, transport: Transport | None = None, mesh: Mesh | None = None
) -> Pipelined:
    """Stages that lend their results, so that every kind of effect is in the programs."""
    if mesh is None:
        count = num_ranks
    else:
        count = mesh.sizes["pipeline"]
    stages = [
        graphify(scale if mesh is None else scale_together, outputs="borrow") for _ in range(count)
    ]
    return pipeline(
        stages, microbatches=MICROBATCHES, advance=advance, transport=transport, mesh=mesh
    )


def run_rank(case: Case, folder: Path) -> None:
    """A rank's part: steps, until one raises."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if rank == case.rank and case.delay is not None:
        threading.Timer(case.delay, fail, (case, folder)).start()
    try:
        take_steps(case, folder)
    # Also a KeyboardInterrupt or a SystemExit: whatever ends the rank is what it says.
    except BaseException as error:
        if isinstance(error, RankError):
            about = (error.rank, error.instruction)
        else:
            about = (None, repr(error))
        record = {"pid": os.getpid(), "about": about, "error": str(error), "time": time.monotonic()}
        (folder / f"rank{rank}").write_text(json.dumps(record))
        raise


def take_steps(case: Case, folder: Path) -> None:
    """Take steps in which one rank fails, and wait for what they compute."""
    transport = Distributed(timeout=case.timeout, backend=case.backend)
    step = make_pipeline(case.num_ranks, Sabotaged(transport, case, folder), case.mesh)
    state: Any = (torch.zeros((), device=transport.device),)
    param, batch = (
        torch.tensor(x, device=transport.device) for x in (2.0, [float(row) for row in range(ROWS)])
    )
    # A rank that is killed at any time must find the others still at work.
    for _ in range(STEPS) if case.delay is None else itertools.count():
        state, _ = step((param,), state, batch)
    transport.synchronize()
