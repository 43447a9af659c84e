"""Effects of a pipeline as data: the runs, sends and receives of a rank, in order. They print as
text that parses back.

rank 0 of 2
  run stage 0 [mb 0]
  send to 1 [mb 0]: hidden_states[num_tokens, 64] float32
  broadcast from 1 [mb 0]
  run advance [mb 0]
"""

import functools
import re
from collections.abc import Sequence

import attrs

from weft.display.tables import columns
from weft.errors import ProgramError
from weft.meshes import collectives
from weft.meshes.collectives import (
    Collective,
)
from weft.values.schema import Schema, read_form

__all__ = [
    "Broadcast",
    "Effect",
    "Fence",
    "Program",
    "Recv",
    "Run",
    "Send",
    "listing",
    "parse_effect",
    "parse_listing",
]


# The stage has two group names, `made` and `got`, since a name may occur only once.
_OF = r"(?: stage (?P<{}>\d+))?"
_SENT = rf"send{_OF.format('made')} to (?P<to>\d+)|recv{_OF.format('got')} from (?P<source>\d+)"
_SENT += r"|broadcast from (?P<root>\d+)(?: among (?P<of>\d+(?:, \d+)*))?"
# `(?(sent)...)`: a schema may follow only where something is sent.
_EFFECT = (
    rf"(?:run (?P<what>.+)|(?P<fence>fence)|(?P<sent>{_SENT}|{collectives.FORM})) "
    r"\[mb (?P<mb>\d+)\](?(sent)(?:: (?P<schema>.+))?)",
    (
        "run|send to|recv from|broadcast from|fence|all_reduce ... [mb N], and a schema only where"
        " something is sent"
    ),
)
_TITLE = r"rank (\d+) of (\d+)", "rank R of N"


@attrs.frozen
class Run:
    """Run `what` (`stage 1`, `advance`) on micro-batch `microbatch`."""

    what: str
    microbatch: int

    @property
    def stage(self) -> int | None:
        """The number of the stage; None if `what` is not a stage."""
        return _number_of(self.what)

    def __str__(self) -> str:
        return f"run {self.what} [mb {self.microbatch}]"


@functools.lru_cache(1024)
def _number_of(what: str) -> int | None:
    match = re.fullmatch(r"stage (\d+)", what)
    if match is None:
        return None
    return int(match[1])


@attrs.frozen
class Send:
    """Start to send a stage's result for `microbatch` to rank `to`. Its buffer is in use until the
    `Fence`.

    Args:
        to, microbatch: the receiver, and the micro-batch.
        schema: the schema of the result, if it was declared.
        stage: the stage whose result it is, on a rank that runs several stages; None: the stage
            with the sender's number.
    """

    to: int
    microbatch: int
    schema: Schema | None = None
    stage: int | None = None

    def __str__(self) -> str:
        return (
            f"send{_of_stage(self.stage)} to {self.to} [mb {self.microbatch}]{_suffix(self.schema)}"
        )


@attrs.frozen
class Recv:
    """Wait for a stage's result for `microbatch` from rank `source`; it is the next stage's input.

    Args:
        source, microbatch: the sender, and the micro-batch.
        schema: the schema of the result, if it was declared.
        stage: the stage whose result it is, as in the `Send`; None: the stage with the sender's
            number.
    """

    source: int
    microbatch: int
    schema: Schema | None = None
    stage: int | None = None

    def __str__(self) -> str:
        return (
            f"recv{_of_stage(self.stage)} from {self.source} [mb"
            f" {self.microbatch}]{_suffix(self.schema)}"
        )


@attrs.frozen
class Broadcast:
    """Pass the last stage's output for `microbatch` from rank `root` to all ranks, or to `ranks`.

    `root` starts to send it, the others wait for it; it is not a barrier. `schema` is the schema of
    the output, if it was declared.
    """

    root: int
    microbatch: int
    schema: Schema | None = None
    ranks: tuple[int, ...] | None = None

    def __str__(self) -> str:
        if self.ranks is None:
            among = ""
        else:
            among = f" among {', '.join(map(str, self.ranks))}"
        return f"broadcast from {self.root}{among} [mb {self.microbatch}]{_suffix(self.schema)}"


@attrs.frozen
class Fence:
    """Wait until everything that this rank sends for `microbatch` has left its buffer, which may
    then be overwritten."""

    microbatch: int

    def __str__(self) -> str:
        return f"fence [mb {self.microbatch}]"


Effect = Run | Send | Recv | Broadcast | Fence | Collective


def _of_stage(stage: int | None) -> str:
    if stage is None:
        return ""
    return f" stage {stage}"


def _suffix(schema: Schema | None) -> str:
    if schema is None:
        return ""
    return f": {schema}"


def parse_effect(line: str) -> Effect:
    """The effect that prints as `line`.

    >>> parse_effect("send to 1 [mb 0]")
    Send(to=1, microbatch=0, schema=None, stage=None)
    """
    match = read_form(_EFFECT, line, f"parse_effect({line!r})", "no effect")
    microbatch = int(match["mb"])
    if match["schema"]:
        schema = Schema.parse(match["schema"])
    else:
        schema = None
    if match["what"]:
        return Run(match["what"], microbatch)
    if match["fence"]:
        return Fence(microbatch)
    stage = next((int(text) for text in (match["made"], match["got"]) if text), None)
    if match["to"]:
        return Send(int(match["to"]), microbatch, schema, stage)
    if match["source"]:
        return Recv(int(match["source"]), microbatch, schema, stage)
    if match["root"]:
        if match["of"]:
            among = tuple(map(int, match["of"].split(", ")))
        else:
            among = None
        return Broadcast(int(match["root"]), microbatch, schema, among)
    if (collective := collectives.parsed(match, microbatch, schema)) is None:
        instead = (
            "all_reduce sum, all_gather dim 0, reduce_scatter sum dim 0, all_to_all dim 0 to 0, "
            "or ppermute 0 to 1, 1 to 0"
        )
        raise ProgramError(f"parse_effect({line!r})", "a collective with other options", instead)
    return collective


@attrs.frozen
class Program:
    """The effects of one rank in a step, in order.

    Args:
        rank, num_ranks: the rank, and the number of ranks.
        effects: the effects, in order.
        classes: the class of each micro-batch, as its descriptor prints; empty if the schedule
            serves any class.
    """

    rank: int
    num_ranks: int
    effects: tuple[Effect, ...]
    classes: tuple[str, ...] = ()

    def __str__(self) -> str:
        classes = (f"  mb {index}: {text}" for index, text in enumerate(self.classes))
        return "\n".join(
            [f"rank {self.rank} of {self.num_ranks}", *classes, *(f"  {e}" for e in self.effects)]
        )

    def _repr_html_(self) -> str:
        return programs_html([self])


def _is_title(line: str) -> bool:
    return re.fullmatch(_TITLE[0], line.strip()) is not None


def listing(programs: Sequence[Program]) -> str:
    """The text of all ranks' programs, one below the other."""
    return "\n".join(map(str, programs))


def programs_html(programs: Sequence[Program]) -> str:
    """All ranks' programs side by side, for a notebook; each line begins with the number of its
    micro-batch."""
    cells = [
        # The number of the micro-batch stands before each line already.
        [(e.microbatch, str(e).replace(f" [mb {e.microbatch}]", "")) for e in p.effects]
        for p in programs
    ]
    return columns([f"rank {p.rank} of {p.num_ranks}" for p in programs], cells)


def _parse_program(lines: Sequence[str]) -> Program:
    title, *rest = lines or [""]
    match = read_form(_TITLE, title, "parse_listing(...)", f"a first line {title!r}")
    classes = list[re.Match[str]]()
    for line in rest:
        micro_batch = re.fullmatch(r"mb (\d+): (.+)", line.strip())
        if micro_batch is None:
            break
        classes.append(micro_batch)
    if any(int(micro_batch[1]) != index for index, micro_batch in enumerate(classes)):
        problem = "classes of micro-batches out of order"
        raise ProgramError("parse_listing(...)", problem, "mb 0: ..., mb 1: ...")
    effects = tuple(parse_effect(line) for line in rest[len(classes) :])
    return Program(
        int(match[1]), int(match[2]), effects, tuple(micro_batch[2] for micro_batch in classes)
    )


def parse_listing(text: str) -> tuple[Program, ...]:
    """The inverse of `listing`, and so of a pipeline's `str`: the programs of all ranks, to read,
    edit and check.

    Args:
        text: the text that a pipeline prints, edited or not.

    Raises:
        ProgramError: a line is not an effect.

    >>> [len(program.effects) for program in parse_listing("rank 0 of 2\\n  run stage 0 [mb 0]\\nrank 1 of 2")]
    [1, 0]
    """
    parts: list[list[str]] = []
    for line in text.splitlines():
        if _is_title(line) or (line.strip() and not parts):
            parts.append([])
        if line.strip():
            parts[-1].append(line)
    return tuple(map(_parse_program, parts))
