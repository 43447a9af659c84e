"""A plan: programs that passed their check, and what every rank must agree on before it runs them."""

import functools
import hashlib
import platform

import attrs
import torch

from weft import __version__
from weft.effects import Program, listing
from weft.transforms.pipelines.checker import Machine, Step, check, interleave


@attrs.frozen(eq=False)
class Plan:
    """Checked programs.

    Args:
        programs: of all ranks.
        buffers: results that a stage holds before it overwrites the oldest; None: each is a value of its own.
        stages: the fingerprint of each stage's code, and of `advance`'s.
        spans: the effects of each rank that are to be performed, from one to before another: those before were, and
            those behind will be; None: all.
    """

    programs: tuple[Program, ...]
    buffers: int | None = None
    stages: tuple[str, ...] = ()
    spans: tuple[tuple[int, int], ...] | None = None

    def __attrs_post_init__(self) -> None:
        check(self.programs, buffers=self.buffers)

    @functools.cached_property
    def text(self) -> str:
        """What all ranks compare, line by line: versions, stages, programs."""
        versions = f"weft {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
        return "\n".join([versions, *self.stages, listing(self.programs)])

    @functools.cached_property
    def digest(self) -> str:
        """A short hash of `text`."""
        return hashlib.blake2b(self.text.encode(), digest_size=6).hexdigest()

    @functools.cached_property
    def num_microbatches(self) -> int:
        """Of its programs."""
        return 1 + max((effect.microbatch for program in self.programs for effect in program.effects), default=-1)

    def span(self, rank: int) -> tuple[int, int]:
        """The effects of a rank that are to be performed."""
        return (0, len(self.programs[rank].effects)) if self.spans is None else self.spans[rank]

    @functools.cached_property
    def order(self) -> tuple[Step, ...]:
        """An order in which one thread can run all ranks: of what is to be performed."""
        counts, order = [0] * len(self.programs), []
        for step in interleave(self.programs):
            start, stop = self.span(step.rank)
            if start <= counts[step.rank] < stop:
                order.append(step)
            counts[step.rank] += 1
        return tuple(order)

    @functools.cached_property
    def leaves(self) -> bool:
        """Whether messages are still under way when it has been performed, which a later run receives."""
        machine = Machine(self.programs)
        machine.place([self.span(rank)[1] for rank in range(len(self.programs))])
        return any(machine.queues.values())

    @property
    def lends(self) -> bool:
        """Whether results are lent, so that a receiver must copy them: its stage may keep or return what it got, which
        the sender overwrites."""
        return self.buffers is not None
