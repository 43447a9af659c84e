"""Effects of a pipeline as data: what a rank runs, sends and receives, in order. They print, and parse back.

rank 0 of 2
  run stage 0 [mb 0]
  send to 1 [mb 0]: hidden_states[num_tokens, 64] float32
  broadcast from 1 [mb 0]
  run advance [mb 0]
"""

import re
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.errors import ProgramError
from weft.trees import leaf_axes, leaves_with_names


@attrs.frozen
class TensorSchema:
    """One tensor that travels: its path in the value, its dimensions (ints, or axis names of the descriptor), its
    dtype.

    >>> print(TensorSchema("hidden_states", ("num_tokens", 64), torch.float32))
    hidden_states[num_tokens, 64] float32
    """

    name: str
    dims: tuple[int | str, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(map(str, self.dims))}] {str(self.dtype).removeprefix('torch.')}"

    @classmethod
    def parse(cls, text: str) -> "TensorSchema":
        """The inverse of `str`."""
        dim = r"(?:[0-9]+|[A-Za-z_]\w*(?:\+[0-9]+)?)"
        match = re.fullmatch(rf"(.*)\[((?:{dim}(?:, *{dim})*)?)\] (\w+)", text.strip())
        if match is None or not isinstance(dtype := getattr(torch, match[3], None), torch.dtype):
            raise ProgramError(f"TensorSchema.parse({text!r})", "no tensor's schema", "name[num_tokens, 64] float32")
        dims = [d.strip() for d in match[2].split(",") if d.strip()]
        return cls(match[1], tuple(int(d) if d.isdecimal() else d for d in dims), dtype)


@attrs.frozen
class Schema:
    """All tensors of the value that travels on an edge, in flattening order."""

    tensors: tuple[TensorSchema, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors)) or "nothing"

    @classmethod
    def parse(cls, text: str) -> "Schema":
        """The inverse of `str`."""
        parts = re.split(r",\s*(?![^\[]*\])", text) if text.strip() not in ("", "nothing") else []
        return cls(tuple(TensorSchema.parse(part) for part in parts))

    @classmethod
    def of(cls, value: Any) -> "Schema":
        """The schema of an actual value; a dimension that follows the descriptor gets its name."""
        found = []
        for (name, leaf), spec in zip(leaves_with_names(value), leaf_axes(value), strict=True):
            if isinstance(leaf, Tensor):
                names = spec.dims if spec is not None else ()
                dims = [names[i] if i < len(names) and names[i] else size for i, size in enumerate(leaf.shape)]
                found.append(TensorSchema(name.removeprefix("."), tuple(d for d in dims if d is not None), leaf.dtype))
        return cls(tuple(found))


@attrs.frozen
class Run:
    """Run `what` (`stage 1`, `advance`) on a micro-batch."""

    what: str
    microbatch: int

    def __str__(self) -> str:
        return f"run {self.what} [mb {self.microbatch}]"


@attrs.frozen
class Send:
    """Send what the stage made of a micro-batch to rank `to`."""

    to: int
    microbatch: int
    schema: Schema | None = None

    def __str__(self) -> str:
        return f"send to {self.to} [mb {self.microbatch}]" + (f": {self.schema}" if self.schema is not None else "")


@attrs.frozen
class Recv:
    """Receive the stage's input for a micro-batch from rank `source`."""

    source: int
    microbatch: int
    schema: Schema | None = None

    def __str__(self) -> str:
        return f"recv from {self.source} [mb {self.microbatch}]" + (
            f": {self.schema}" if self.schema is not None else ""
        )


@attrs.frozen
class Broadcast:
    """Give the last stage's output for a micro-batch, on rank `root`, to all ranks."""

    root: int
    microbatch: int

    def __str__(self) -> str:
        return f"broadcast from {self.root} [mb {self.microbatch}]"


Effect = Run | Send | Recv | Broadcast

_LINE = re.compile(r"(run (?P<what>.+)|send to (?P<to>\d+)|recv from (?P<source>\d+)|broadcast from (?P<root>\d+)) "
                   r"\[mb (?P<mb>\d+)\](: (?P<schema>.+))?")  # fmt: skip


def parse_effect(line: str) -> Effect:
    """The effect that prints as `line`.

    >>> parse_effect("send to 1 [mb 0]")
    Send(to=1, microbatch=0, schema=None)
    """
    match = _LINE.fullmatch(line.strip())
    if match is None:
        raise ProgramError(f"parse_effect({line!r})", "no effect", "run|send to|recv from|broadcast from ... [mb N]")
    microbatch = int(match["mb"])
    if match["schema"] and not (match["to"] or match["source"]):
        raise ProgramError(f"parse_effect({line!r})", "a schema on what sends nothing", "leave it to send and recv")
    schema = Schema.parse(match["schema"]) if match["schema"] else None
    if match["what"]:
        return Run(match["what"], microbatch)
    if match["to"]:
        return Send(int(match["to"]), microbatch, schema)
    if match["source"]:
        return Recv(int(match["source"]), microbatch, schema)
    return Broadcast(int(match["root"]), microbatch)


@attrs.frozen
class Program:
    """What one rank does in a step, in order."""

    rank: int
    num_ranks: int
    effects: tuple[Effect, ...]

    def __str__(self) -> str:
        return "\n".join([f"rank {self.rank} of {self.num_ranks}", *(f"  {effect}" for effect in self.effects)])

    @classmethod
    def parse(cls, text: str) -> "Program":
        """The inverse of `str`."""
        title, *lines = [line for line in text.splitlines() if line.strip()] or [""]
        match = re.fullmatch(r"rank (\d+) of (\d+)", title.strip())
        if match is None:
            raise ProgramError("Program.parse(...)", f"a first line {title!r}", "rank R of N")
        return cls(int(match[1]), int(match[2]), tuple(parse_effect(line) for line in lines))


def listing(programs: Sequence[Program]) -> str:
    """All ranks' programs, one below the other."""
    return "\n".join(map(str, programs))
