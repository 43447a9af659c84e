"""`weft::run_persistent`: a program of instructions as one operator, and the tables that it reads on a GPU."""

import functools
import json
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.ops.persistent.instructions import FIELDS, Attend, Instruction, Linear, Norm, rows_of
from weft.ops.register import define
from weft.torchapi.private import storage_id

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Linear, Norm, Attend)}


@attrs.frozen
class Operands:
    """The arguments of `weft::run_persistent`: the tensors that a program reads and writes, and its text."""

    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    text: str


def operands_of(instructions: Sequence[Instruction]) -> Operands:
    """The arguments of `weft::run_persistent` for a program.

    The text is in JSON: each instruction is its name and its arguments, in which `[0, i]` stands for the i-th tensor
    that is read, and `[1, i]` for one that is written.
    """
    tensors: tuple[list[Tensor], list[Tensor]] = [], []
    places = dict[Any, list[int]]()

    def place(x: Any, name: str, written: Sequence[str]) -> Any:
        if not isinstance(x, Tensor):
            return x
        own = tensors[name in written]
        key = name in written, x.data_ptr(), x.dtype, x.shape, x.stride()
        if key not in places:
            places[key] = [int(name in written), len(own)]
            own.append(x)
        return places[key]

    lines = []
    for each in instructions:
        fields = {field.name: getattr(each, field.name) for field in attrs.fields(type(each))}
        lines.append([type(each).__name__, {name: place(x, name, each.written) for name, x in fields.items()}])
    return Operands(tuple(tensors[0]), tuple(tensors[1]), json.dumps(lines))


def instructions_of(reads: Sequence[Tensor], writes: Sequence[Tensor], text: str) -> list[Instruction]:
    """The program of these arguments."""

    def value(x: Any) -> Any:
        return (reads, writes)[x[0]][x[1]] if isinstance(x, list) else x

    return [_KINDS[kind](**{name: value(x) for name, x in fields.items()}) for kind, fields in _lines(text)]


@functools.lru_cache(maxsize=256)
def _lines(text: str) -> Any:
    return json.loads(text)


def is_one(instructions: Sequence[Instruction]) -> bool:
    """Whether these can be one program: with one dtype, one device, attention with heads of one size at one place of
    its context, and nothing that an instruction reads early written by one before it."""
    attends = [each for each in instructions if isinstance(each, Attend)]
    kinds = {(each.like.dtype, each.like.device) for each in instructions}
    heads = {(each.heads, tuple(x.data_ptr() for x in each.where)) for each in attends}
    pages = sorted((each.kv_pages.data_ptr(), each.kv_pages.nbytes) for each in attends)
    apart = all(start + size <= following for (start, size), (following, _) in pairwise(pages))
    written = set[Any]()
    for each in instructions:
        if written & _storages(each, each.early):
            return False
        written |= _storages(each, [name for name in each.written if name != "kv_pages"])
    return len(kinds) == 1 and len(heads) <= 1 and apart


def _storages(instruction: Instruction, names: Iterable[str]) -> set[Any]:
    return {storage_id(x) for name in names if (x := getattr(instruction, name)) is not None}


class Tables:
    """Device memory for the tables and counters of the programs of one capture, which stay where a graph reads them. A
    capture cannot copy from the host, so they are filled after it."""

    _LEAST = 2**16
    """Numbers of 8 bytes that are there for a capture."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.zeros(self._LEAST, dtype=torch.int64, device=device)
        self._used = 0
        self._fills: list[tuple[Tensor, Tensor]] = []

    @property
    def has_room(self) -> bool:
        """Whether half of it is left, which is enough for a model of over a hundred layers."""
        return self.left >= self._LEAST // 2

    def take(self, count: int) -> Tensor:
        """That many numbers, zeros so far; no more than are left."""
        assert count <= self.left, f"{count} numbers of a table that has {self.left}"
        taken = self.memory[self._used : self._used + count]
        self._used += count
        return taken

    @property
    def left(self) -> int:
        """The numbers that are left."""
        return max(len(self.memory) - self._used, 0)

    def fill_later(self, target: Tensor, values: Tensor) -> None:
        """Copy values to a part of the memory, when `fill` is called."""
        self._fills.append((target, values))

    def fill(self) -> None:
        """Copy all values."""
        for target, values in self._fills:
            target.copy_(values)
        self._fills.clear()


TABLES: ContextVar[Tables | None] = ContextVar("weft.tables", default=None)
"""Those of the capture in this thread."""


def place_table(instructions: Sequence[Instruction], counters: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A program's table `[n, FIELDS]` int64, and `[counters]` int32 zeros, which the program leaves as zeros."""
    rows = torch.tensor(rows_of(instructions), dtype=torch.int64)
    tables = TABLES.get()
    if tables is None or not torch.cuda.is_current_stream_capturing():
        return rows.to(device), torch.zeros(counters, dtype=torch.int32, device=device)
    table, zeros = tables.take(rows.numel()), tables.take(2 * -(-counters // 4))  # aligned to 16 bytes
    tables.fill_later(table, rows.flatten())
    return table.view(-1, FIELDS), zeros.view(torch.int32)


@functools.cache
def processors(device: torch.device) -> int:
    """The programs of a launch: one for each multiprocessor; on the CPU, in the interpreter, 4."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


def _run(reads: list[Tensor], writes: list[Tensor], text: str) -> None:
    """The operator on the CPU: the references of its instructions."""
    for each in instructions_of(reads, writes, text):
        each.run()


RUN = define(
    "run_persistent",
    _run,
    fake=lambda: None,
    kernel="weft.ops.persistent.launch:run",
    writes=("writes",),
)
